"""Requests and replies between workers."""
