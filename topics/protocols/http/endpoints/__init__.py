"""Endpoints: one module per resource of the HTTP API."""
