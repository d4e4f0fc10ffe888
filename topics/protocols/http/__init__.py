"""Shared by all versions of HTTP: requests and responses, bodies, queries, server-sent events."""
