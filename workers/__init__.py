"""The server program: supervisor and shard workers."""
