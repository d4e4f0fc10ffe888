"""A worker's sockets to the other workers: one DEALER for each living incarnation, made when there is something to send.

ZeroMQ's descriptors tell of news only, and a send may swallow the news: a socket is looked at until it is empty after
each ring of its descriptor and after each send. `has_mail` says that one of them is yet to be looked at.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable

import zmq

from topics.link import wire
from topics.link.control_channel import Peer
from topics.link.sockets import descriptor, has_input

logger = logging.getLogger("topics.shard")

Receive = Callable[[int, bytes, wire.Buffer | None], None]  # shard, the parts of a message


class PeerSockets:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: select.poll) -> None:
        self._context = context
        self._poller = poller
        self._peers: dict[int, Peer] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._shards: dict[int, int] = {}  # by descriptor
        self._unseen: dict[int, None] = {}  # shards whose sockets may hold something

    def set_peers(self, peers: dict[int, Peer]) -> None:
        """Which other workers live. A socket is to one incarnation, and goes with it."""
        for shard, peer in self._peers.items():
            if peers.get(shard) != peer:
                self._disconnect(shard)
        self._peers = peers

    def send(self, shard: int, parts: list[wire.Buffer]) -> None:
        socket = self._sockets.get(shard) or self._connect(shard)
        socket.send_multipart(parts, zmq.NOBLOCK)
        self._unseen[shard] = None

    def ring(self, fd: int) -> None:
        """The poll says that a descriptor has news; it may be somebody else's."""
        shard = self._shards.get(fd)
        if shard is not None:
            self._unseen[shard] = None

    @property
    def has_mail(self) -> bool:
        return bool(self._unseen)

    def drain(self, receive: Receive) -> None:
        while self._unseen:
            shard, _ = self._unseen.popitem()
            socket = self._sockets[shard]
            while has_input(socket):
                message, *apart = socket.recv_multipart(zmq.NOBLOCK)
                try:
                    receive(shard, message, apart[0] if apart else None)
                except wire.BadMessage as error:
                    logger.error("a message could not be read", extra={"fields": {"error": str(error)}})

    def close(self) -> None:
        self.set_peers({})

    def _connect(self, shard: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0  # the links' bounds hold; so no send ever finds the socket full
        socket.sndbuf = socket.rcvbuf = wire.SOCKET_BYTES
        socket.connect(f"ipc://{self._peers[shard].path}")
        fd = descriptor(socket)
        self._sockets[shard] = socket
        self._shards[fd] = shard
        self._poller.register(fd, select.POLLIN)
        return socket

    def _disconnect(self, shard: int) -> None:
        socket = self._sockets.pop(shard, None)
        if socket is None:
            return
        fd = descriptor(socket)
        del self._shards[fd]
        self._poller.unregister(fd)
        self._unseen.pop(shard, None)
        socket.close()
