"""The front process (not the routers of the API: those are in workers/forward): client connections, request admission, requests to shards, fan-out to watchers."""
