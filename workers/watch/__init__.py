"""Feeds for watchers, watch sessions, and streams of jobs."""
