"""Request admission and the endpoints."""
