"""Copies between topics and dead letters, across workers."""
