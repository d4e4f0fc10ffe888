"""What all versions of HTTP share: requests and responses, bodies, queries, server-sent events."""
