"""ZeroMQ sockets of a front to the shards: two DEALERs per worker incarnation.

One is registered with the event loop and carries requests and replies. The other one carries only large request bodies,
so that small requests do not wait behind them.

ZeroMQ's descriptor is edge-triggered and may not signal after a send. So after both a wake-up and a send, the socket is
read until it is empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from router.pending import Message, PendingRequests
from topics.link import wire
from topics.link.control_channel import Peer
from topics.link.sockets import NOBLOCK, descriptor, has_input, has_more
from topics.system.logs import log

logger = logging.getLogger("topics.front")

EXPIRE_EVERY_S = 1.0
SETTLE_S = 2.0
ZERO_COPY_BYTES = 1 << 20  # below this size a copy is cheaper than zero-copy, which takes another thread
SEND_AFTER = 16  # requests that are sent before the tick ends, so that shard and front work in parallel


class ShardClient:
    """Sends and receives the messages of PendingRequests. Requests of one tick to one shard are sent as one message."""

    def __init__(self, shards: int, loop: asyncio.AbstractEventLoop, now_us: Callable[[], int]) -> None:
        self.core = PendingRequests(shards, self._schedule)
        self._loop = loop
        self._now_us = now_us
        self._context = zmq.Context(1)
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._bulk: dict[int, zmq.Socket[bytes]] = {}
        self._scheduled = False
        self._queued = 0  # requests since the last send
        self._expire_timer = loop.call_later(EXPIRE_EVERY_S, self._expire)

    # -- workers -------------------------------------------------------------------------------------------

    def set_peers(self, peers: list[Peer]) -> None:
        """Connect to new incarnations of workers, and disconnect from dead ones."""
        live = {peer.shard: peer for peer in peers}
        gone, new = self.core.set_peers({peer.shard: peer.incarnation for peer in peers})
        for shard in gone:
            log(logger, logging.WARNING, "a shard is down", shard=shard)
            self._disconnect(shard)
        for shard in new:
            self._connect(live[shard])

    def _connect(self, peer: Peer) -> None:
        name = wire.new_peer()
        self._sockets[peer.shard] = socket = self._open(peer, name)
        self._bulk[peer.shard] = self._open(peer, name + wire.BULK)
        self._loop.add_reader(descriptor(socket), self._drain, peer.shard, socket)

    def _open(self, peer: Peer, name: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0  # limited by PendingRequests instead
        socket.sndbuf = socket.rcvbuf = wire.SOCKET_BYTES
        socket.immediate = True
        socket.routing_id = name
        socket.connect(f"ipc://{peer.path}")
        return socket

    def _disconnect(self, shard: int) -> None:
        self._bulk.pop(shard).close()
        socket = self._sockets.pop(shard)
        self._loop.remove_reader(descriptor(socket))
        socket.close()

    # -- messages ------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        self._queued += 1
        if self._queued >= SEND_AFTER:
            self._send()

    def _flush(self) -> None:
        """At the end of a tick, send the remaining requests, then read all sockets, because a send may clear the signal."""
        self._scheduled = False
        self._send()
        for shard, socket in list(self._sockets.items()):
            self._drain(shard, socket)

    def _send(self) -> None:
        self._queued = 0
        unsent: list[Message] = []
        for shard, parts in self.core.take_messages():
            socket = self._sockets.get(shard)
            if socket is None:
                # The worker was just reported up, and a request was queued before the socket is connected.
                unsent.append((shard, parts))
                continue
            try:
                if len(parts) == 1:
                    socket.send(parts[0], NOBLOCK)
                elif len(parts[1]) < ZERO_COPY_BYTES:
                    socket.send_multipart(parts, NOBLOCK)
                else:
                    self._bulk[shard].send_multipart(parts, NOBLOCK, copy=False)
            except zmq.Again:
                # The queue has no limit, so this means that the socket is not connected yet.
                unsent.append((shard, parts))
        if unsent:
            self._send_later(unsent)

    def _send_later(self, unsent: list[Message]) -> None:
        for shard, parts in reversed(unsent):  # to keep the order
            self.core.links[shard].messages.insert(0, parts)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_later(0.001, self._flush)

    def _drain(self, shard: int, socket: zmq.Socket[bytes]) -> None:
        receive, core = socket.recv, self.core
        while not socket.closed and has_input(socket):
            message = receive(NOBLOCK)
            separate = receive(NOBLOCK, copy=False).buffer if has_more(socket) else None
            try:
                core.receive(shard, message, separate)
            except wire.BadMessage as error:
                logger.error("invalid message from a shard", extra={"fields": {"error": str(error)}})

    def _expire(self) -> None:
        self.core.expire(self._now_us())
        self._expire_timer = self._loop.call_later(EXPIRE_EVERY_S, self._expire)

    async def settle(self) -> None:
        """Wait for the replies to pending requests, such as the final saves of closed streams, for at most SETTLE_S."""
        give_up = self._loop.time() + SETTLE_S
        while self.core.in_flight and self._loop.time() < give_up:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self._expire_timer.cancel()
        self.core.set_peers({})
        for shard in list(self._sockets):
            self._disconnect(shard)
        self._context.term()
