"""A worker's sockets to other workers: one DEALER per running incarnation, opened at the first send.

ZeroMQ's descriptors are edge-triggered, and a send may consume the event. So a socket is drained after each event of its
descriptor and after each send. `has_messages`: at least one socket has yet to be drained.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable

import zmq

from topics.link import wire
from topics.link.control_channel import Peer
from topics.link.sockets import NOBLOCK, descriptor, has_input

logger = logging.getLogger("topics.shard")

Receive = Callable[[int, bytes, wire.Buffer | None], None]  # shard, the parts of its message


class PeerSockets:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: select.epoll) -> None:
        self._context = context
        self._poller = poller
        self._peers: dict[int, Peer] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._shards: dict[int, int] = {}  # by descriptor
        self._undrained: dict[int, None] = {}  # shards whose sockets may have messages

    def set_peers(self, peers: dict[int, Peer]) -> None:
        """Set the running workers. The socket of an incarnation that has ended is closed."""
        for shard, peer in self._peers.items():
            if peers.get(shard) != peer:
                self._disconnect(shard)
        self._peers = peers

    def send(self, shard: int, parts: list[wire.Buffer]) -> None:
        socket = self._sockets.get(shard) or self._connect(shard)
        socket.send_multipart(parts, NOBLOCK)
        self._undrained[shard] = None

    def readable(self, fd: int) -> None:
        """A descriptor is readable; it need not belong to one of these sockets."""
        shard = self._shards.get(fd)
        if shard is not None:
            self._undrained[shard] = None

    @property
    def has_messages(self) -> bool:
        return bool(self._undrained)

    def drain(self, receive: Receive) -> None:
        while self._undrained:
            shard, _ = self._undrained.popitem()
            socket = self._sockets[shard]
            while has_input(socket):
                message, *separate = socket.recv_multipart(NOBLOCK)
                try:
                    receive(shard, message, separate[0] if separate else None)
                except wire.BadMessage as error:
                    logger.error("a message could not be decoded", extra={"fields": {"error": str(error)}})

    def close(self) -> None:
        self.set_peers({})

    def _connect(self, shard: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0  # PeerLinks limits what is in flight, so a send never blocks
        socket.sndbuf = socket.rcvbuf = wire.SOCKET_BYTES
        socket.connect(f"ipc://{self._peers[shard].path}")
        fd = descriptor(socket)
        self._sockets[shard] = socket
        self._shards[fd] = shard
        self._poller.register(fd, select.EPOLLIN)
        return socket

    def _disconnect(self, shard: int) -> None:
        socket = self._sockets.pop(shard, None)
        if socket is None:
            return
        fd = descriptor(socket)
        del self._shards[fd]
        self._poller.unregister(fd)
        self._undrained.pop(shard, None)
        socket.close()
