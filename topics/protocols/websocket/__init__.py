"""WebSocket frames."""
