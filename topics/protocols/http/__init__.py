"""Shared by all versions of HTTP: requests and responses, queries, server-sent events."""
