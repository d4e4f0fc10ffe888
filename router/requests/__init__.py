"""Request admission and endpoints."""
