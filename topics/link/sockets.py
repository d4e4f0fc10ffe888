"""ZeroMQ sockets in poll loops: readiness, and flags.

Options and flags are plain ints. zmq's enums and properties cost microseconds each time, and these are used for every message.
"""

from __future__ import annotations

import zmq

NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Edge-triggered: after a wake-up or a send, drain the socket until `has_input` is false."""
    return int(socket.getsockopt(zmq.FD))


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is waiting. Half the cost of a receive that raises EAGAIN."""
    return socket.getsockopt(_EVENTS) & _POLLIN != 0  # type: ignore[operator]


def has_more(socket: zmq.Socket[bytes]) -> bool:
    """Whether the message that is being received has another part."""
    return bool(socket.getsockopt(_RCVMORE))
