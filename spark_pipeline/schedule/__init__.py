"""Scheduled jobs: configuration, due times, and the process that runs them."""
