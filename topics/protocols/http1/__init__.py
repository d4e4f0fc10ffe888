"""HTTP/1.1 framing, request heads and response bytes."""
