"""What fronts and workers ask of a ZeroMQ socket beside its messages."""

from __future__ import annotations

import zmq

_EVENTS = int(
    zmq.EVENTS
)  # as plain numbers: an enum's bits cost a microsecond, and this is asked for every message
_POLLIN = int(zmq.POLLIN)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Tells of news only: after a wake-up or a send, drain the socket until `has_input` says no."""
    return int(socket.getsockopt(zmq.FD))


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. To ask costs half of what it costs to receive in vain, and be told by an exception."""
    return socket.getsockopt(_EVENTS) & _POLLIN != 0  # type: ignore[operator]
