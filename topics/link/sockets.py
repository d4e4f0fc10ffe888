"""Readiness of ZeroMQ sockets, for poll loops."""

from __future__ import annotations

import zmq

# Plain ints: enum arithmetic costs a microsecond, and `has_input` runs for every message.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Edge-triggered: after a wake-up or a send, drain the socket until `has_input` is false."""
    return int(socket.getsockopt(zmq.FD))


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is waiting. Half the cost of a receive that raises EAGAIN."""
    return socket.getsockopt(_EVENTS) & _POLLIN != 0  # type: ignore[operator]
