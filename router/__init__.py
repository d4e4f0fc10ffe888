"""The front: client connections, admission, requests to shards, fan-out to watchers."""
