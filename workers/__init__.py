"""The server program, and the shard worker."""
