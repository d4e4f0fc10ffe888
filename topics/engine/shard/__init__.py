"""The state machine of one shard: handlers for commands, and delivery to waiting readers."""
