"""Forwarding rules, kept by shard 0."""
