"""Commands that a shard takes, and their results."""
