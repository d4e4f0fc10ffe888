"""Open streams and WebSockets of a front, and fan-out of new records to them."""
