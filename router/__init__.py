"""The front process: client connections, request admission, requests to shards, fan-out to watchers."""
