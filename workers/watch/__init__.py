"""Feeds of topics for watchers, watch sessions, and job streams."""
