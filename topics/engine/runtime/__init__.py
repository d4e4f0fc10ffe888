"""The engine of one shard: group commit and background work around the state machine."""
