"""Forwarding between workers: copies of routers, and dead letters."""
