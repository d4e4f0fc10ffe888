"""One shard as a whole: group commit and background work around the state machine."""
