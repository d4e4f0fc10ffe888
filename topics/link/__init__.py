"""Messages between the processes of a server: supervisor, fronts and shard workers."""
