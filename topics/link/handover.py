"""Hand-over of client connections between fronts and workers: messages, and the sockets that carry them.

A worker that is ready listens on a SOCK_SEQPACKET socket next to its ZeroMQ socket; each front connects to it. One message
hands over at most one connection: its descriptor, and the bytes that were received and not processed.

    message   version u16 · kind u8 · returns u8 · received bytes

    kind      sender   means
    GIVE      front    the worker serves this connection from now on
    BACK      worker   the front serves it again: the bytes are, or begin with, a request that a worker does not serve
    REFUSED   worker   the same: the worker has no room for more connections
    DRAIN     front    the server is stopping: end the connections. Without a descriptor

Little-endian. `returns` counts how often the connection was sent back. A connection is handed over between two requests: no
request of it is open, no response is unsent. Its owner is whoever has received the message; the descriptor of the sender is
closed once it is sent, and those of lost messages are closed by the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Callable
from typing import NamedTuple

VERSION = 1
GIVE, BACK, REFUSED, DRAIN = 1, 2, 3, 4
_KINDS = frozenset((GIVE, BACK, REFUSED, DRAIN))
RETURNS_MAX = 255
# Received bytes of one message. It has to fit the send buffer of a socket, by default 208 KiB.
BYTES_MAX = 128 * 1024

_HEAD = struct.Struct("<HBB")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_FD = struct.Struct("i")
# A sender must not fill the table of descriptors that it has in flight. The kernel refuses more with one of these errors.
_BUSY = frozenset((errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMSGSIZE))
_STREAM_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


class BadHandover(Exception):
    """A message of another version, or one that is malformed."""


class Handover(NamedTuple):
    kind: int
    returns: int = 0
    data: bytes = b""


def encode(message: Handover) -> bytes:
    assert len(message.data) <= BYTES_MAX
    return _HEAD.pack(VERSION, message.kind, min(message.returns, RETURNS_MAX)) + message.data


def decode(message: bytes, descriptors: int) -> Handover:
    """The message that came with that many descriptors."""
    if not _HEAD.size <= len(message) <= _HEAD.size + BYTES_MAX:
        raise BadHandover(f"a message of {len(message)} bytes")
    version, kind, returns = _HEAD.unpack_from(message)
    if version != VERSION or kind not in _KINDS:
        raise BadHandover(f"version {version} and kind {kind}")
    if descriptors != (kind != DRAIN):
        raise BadHandover(f"{descriptors} descriptors with a message of kind {kind}")
    return Handover(kind, returns, message[_HEAD.size :])


def socket_path(path: str) -> str:
    """Where the worker listens whose ZeroMQ socket has this path. As long as that, because the kernel limits the length."""
    return path.removesuffix(".sock") + ".conn"


def listen(path: str) -> socket.socket:
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        listener.bind(path)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket) -> Channel | None:
    """The next front that has connected, if any."""
    try:
        sock, _ = listener.accept()
    except OSError:  # none; or it has gone, or there is no descriptor left
        return None
    return _checked(sock)


def connect(path: str) -> Channel | None:
    """A channel to the worker that listens there; None if none does, or it is too busy to accept."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return _checked(sock)


def _checked(sock: socket.socket) -> Channel | None:
    """The channel, if a process of the same user is at the other end."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        sock.close()
        return None
    sock.setblocking(False)
    return Channel(sock)


class Channel:
    """One end of the connection between a front and a worker. Nothing here blocks. It closes itself when the other end has."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self.is_closed = False
        self.on_close: Callable[[Channel], None] = lambda channel: (
            None
        )  # called while the descriptor is still open

    def send(self, message: Handover, sock: socket.socket | int | None = None) -> bool:
        """Send a message, with a connection unless it is a DRAIN. False: the other end is too busy, or gone. The connection
        still belongs to the caller, who closes it once this returns True.
        """
        if self.is_closed:
            return False
        fd = sock.fileno() if isinstance(sock, socket.socket) else sock
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
        try:
            self._socket.sendmsg([encode(message)], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno not in _BUSY:
                self.close()
            return False
        return True

    def receive(self) -> tuple[Handover, socket.socket | None] | None:
        """The next message and its connection; None if there is none. Raises BadHandover; its descriptors are closed."""
        if self.is_closed:
            return None
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _HEAD.size + BYTES_MAX + 1, socket.CMSG_SPACE(_FD.size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            self.close()
            return None
        fds = _descriptors(ancillary)
        if not data and not fds:
            self.close()
            return None
        try:
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise BadHandover("a truncated message; is the limit of open files reached?")
            message = decode(data, len(fds))
            connection = _connection(fds.pop()) if fds else None
        except BadHandover:
            for fd in fds:
                os.close(fd)
            raise
        return message, connection

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.on_close(self)
            self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % _FD.size
            fds += [fd for (fd,) in _FD.iter_unpack(data[:whole])]
    return fds


def _connection(fd: int) -> socket.socket:
    """The connection with this descriptor, which it takes over, and closes if it is something else."""
    sock = None
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise BadHandover("a descriptor that is no socket")
        sock = socket.socket(fileno=fd)
        if sock.type != socket.SOCK_STREAM or sock.family not in _STREAM_FAMILIES:
            raise BadHandover("a socket that is no connection of a client")
        sock.setblocking(False)
    except (BadHandover, OSError) as error:
        with contextlib.suppress(OSError):
            sock.close() if sock is not None else os.close(fd)
        raise error if isinstance(error, BadHandover) else BadHandover(str(error)) from None
    return sock
