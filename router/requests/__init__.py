"""Request admission (authentication, routing, limits) and the HTTP endpoints."""
