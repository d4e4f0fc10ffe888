"""The shard worker: event loop, disk, metrics, dispatch of requests to services."""
