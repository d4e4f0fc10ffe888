"""The front's sockets to the shards: two DEALERs for each worker incarnation, one of them on the loop's own descriptor.

Large bodies have a socket of their own, so that nothing waits behind one. Answers never come there.

ZeroMQ's descriptor is edge-triggered and may stay silent after a send, so both a wake-up and a send end in a drain
until there is nothing left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from router.pending import Message, PendingRequests
from topics.link import wire
from topics.link.control_channel import Peer
from topics.link.sockets import descriptor, has_input
from topics.system.logs import log

logger = logging.getLogger("topics.front")

EXPIRE_EVERY_S = 1.0
SETTLE_S = 2.0
SHARE_BYTES = 1 << 20  # below it a copy costs less than the thread that has to hear when it may be freed
SEND_FROM = 16  # requests; they leave before the tick ends, so that shard and front work side by side


class ShardClient:
    """Carries the core's messages. A tick's requests to one shard leave as one message."""

    def __init__(self, shards: int, loop: asyncio.AbstractEventLoop, now_us: Callable[[], int]) -> None:
        self.core = PendingRequests(shards, self._schedule)
        self._loop = loop
        self._now_us = now_us
        self._context = zmq.Context(1)
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._bulk: dict[int, zmq.Socket[bytes]] = {}
        self._scheduled = False
        self._queued = 0  # requests since the last message
        self._expire_timer = loop.call_later(EXPIRE_EVERY_S, self._expire)

    # -- workers -------------------------------------------------------------------------------------------

    def set_peers(self, peers: list[Peer]) -> None:
        """Each incarnation of a worker gets sockets of its own."""
        living = {peer.shard: peer for peer in peers}
        gone, new = self.core.set_peers({peer.shard: peer.incarnation for peer in peers})
        for shard in gone:
            log(logger, logging.WARNING, "a shard is down", shard=shard)
            self._disconnect(shard)
        for shard in new:
            self._connect(living[shard])

    def _connect(self, peer: Peer) -> None:
        name = wire.new_peer()
        self._sockets[peer.shard] = socket = self._open(peer, name)
        self._bulk[peer.shard] = self._open(peer, name + wire.BULK)
        self._loop.add_reader(descriptor(socket), self._drain, peer.shard, socket)

    def _open(self, peer: Peer, name: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0  # the core's credits are the bound
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
        if self._queued >= SEND_FROM:
            self._send()

    def _flush(self) -> None:
        """The end of a tick: send what is left of it, then look at every socket, as a send may swallow its signal."""
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
                # Its worker was just reported up, and whoever heard of it has asked before it is connected.
                unsent.append((shard, parts))
                continue
            try:
                if len(parts) == 1:
                    socket.send(parts[0], zmq.NOBLOCK)
                elif len(parts[1]) < SHARE_BYTES:
                    socket.send_multipart(parts, zmq.NOBLOCK)
                else:
                    self._bulk[shard].send_multipart(parts, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                # Without a limit on the queue this means: not connected yet. Ask again when the loop comes round.
                unsent.append((shard, parts))
        if unsent:
            self._again(unsent)

    def _again(self, unsent: list[Message]) -> None:
        for shard, parts in reversed(unsent):  # what came before goes before
            self.core.links[shard].apart.insert(0, parts)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_later(0.001, self._flush)

    def _drain(self, shard: int, socket: zmq.Socket[bytes]) -> None:
        receive, core = socket.recv, self.core
        while not socket.closed and has_input(socket):
            message = receive(zmq.NOBLOCK)
            apart = receive(zmq.NOBLOCK, copy=False).buffer if socket.rcvmore else None
            try:
                core.receive(shard, message, apart)
            except wire.BadMessage as error:
                logger.error("a message could not be read", extra={"fields": {"error": str(error)}})

    def _expire(self) -> None:
        self.core.expire(self._now_us())
        self._expire_timer = self._loop.call_later(EXPIRE_EVERY_S, self._expire)

    async def settle(self) -> None:
        """Wait for the last answers, so that nothing is cut off on its way: streams that ended save where they stand."""
        give_up = self._loop.time() + SETTLE_S
        while self.core.in_flight and self._loop.time() < give_up:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self._expire_timer.cancel()
        self.core.set_peers({})
        for shard in list(self._sockets):
            self._disconnect(shard)
        self._context.term()
