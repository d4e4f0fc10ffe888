"""The state machine of one shard: command handlers, and delivery to waiting reads, claims and forwards."""
