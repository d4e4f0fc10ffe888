"""Client protocols: bytes to requests and responses to bytes, without sockets or an event loop."""
