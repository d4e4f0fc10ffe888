"""HTTP, whatever its version: requests and responses, admission, endpoints, server-sent events.

Nothing here has a socket or a loop. What it needs of its process is in `topics/protocols/http/ports.py`.
"""
