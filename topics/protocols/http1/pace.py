"""How slowly a client may send and read, for all owners of sockets."""

from __future__ import annotations

BYTES_PER_S_MIN = 16 * 1024  # minimum rate of senders and readers
LINGER_US = 2_000_000  # how long a connection whose last response is sent waits for the client to close it
EOF_WAIT_US = 2_000_000  # how long a client that has closed its side may wait for a response
READ_AHEAD_MAX = 256 * 1024  # input buffered behind an open request
EVENTS_PER_TURN = range(64)  # of one connection that sends many requests at once; then others have their turn


def may_read_us(timeout_us: int, read_bytes: int) -> int:
    """How long a client that has read so many bytes may leave the rest of a response unread."""
    return timeout_us + read_bytes * 1_000_000 // BYTES_PER_S_MIN
