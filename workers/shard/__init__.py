"""The shard worker: event loop, request dispatch, flow control, disk, metrics."""
