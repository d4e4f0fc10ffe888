"""Foundations of the engine: ports to disk and clock, background tasks, placement, subject patterns."""
