"""Client connections: HTTP/1, HTTP/2 and WebSocket."""
