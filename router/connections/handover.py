"""Hand-over of connections to the workers: a connection whose requests are all for topics of one shard is served there.

    Connection ──give──▶ Channel ──▶ worker        it serves the connection, until something else arrives on it
    Connection ◀─────── Channel ◀── worker        the front serves it again, beginning with the unread bytes

With the default of TOPICS_HANDOVER a connection is given away before its second request, so that a client that sends only one
costs no hand-over. After each return it takes twice as many requests in a row for one shard: connections that alternate
between shards or routes settle here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from topics.engine.core.placement import shard_of
from topics.link import handover
from topics.link.control_channel import Peer
from topics.link.handover import BYTES_MAX, DRAIN, GIVE, REFUSED, BadHandover, Channel, Handover
from topics.protocols.http1.plain_head import find_plain_head, topic_of

if TYPE_CHECKING:
    from router.connections.connection import Connection

logger = logging.getLogger("topics.front")

REQUESTS_MAX = 4096
NEVER = 1 << 62
MOVES_PER_S = 2000  # each costs about 70 µs
CONNECT_EVERY_US = 50_000
REFUSED_US = 1_000_000  # a worker that has no room gets nothing for so long
MESSAGES_PER_TURN = range(64)


class Worker:
    """What is known of the worker of a shard."""

    __slots__ = ("channel", "path", "retry_us")

    def __init__(self) -> None:
        self.path = ""  # empty: there is none
        self.channel: Channel | None = None
        self.retry_us = 0  # when to offer it something again


class Handovers:
    def __init__(
        self,
        shards: int,
        loop: asyncio.AbstractEventLoop,
        now_us: Callable[[], int],
        take_back: Callable[[socket.socket, bytes, int], None],
        at_request: int,
    ) -> None:
        """`at_request`: TOPICS_HANDOVER. `take_back`: serve a connection again, given its unread bytes and how often it was returned."""
        self.shards = shards
        self._loop = loop
        self._now_us = now_us
        self._take_back = take_back
        self._requests_before = at_request - 1
        self._workers = [Worker() for _ in range(shards)]
        self._moves_left = float(MOVES_PER_S)
        self._moves_us = now_us()
        self.is_draining = False

    def set_peers(self, peers: list[Peer]) -> None:
        """The living workers."""
        paths = {peer.shard: handover.socket_path(peer.path) for peer in peers}
        for shard, worker in enumerate(self._workers):
            path = paths.get(shard, "")
            if worker.path != path:
                self._disconnect(worker)
                worker.path, worker.retry_us = path, 0

    def requests_before(self, returns: int) -> int:
        """How many requests in a row for one shard are answered here before the connection is given to its worker."""
        if not returns:
            return self._requests_before
        return min(max(1, self._requests_before) << returns, REQUESTS_MAX)

    def shard_of(self, path: bytes) -> int:
        return shard_of(topic_of(path), self.shards)

    def give(self, connection: Connection, shard: int | None) -> bool:
        """Give a connection to a worker, if its next request is one that the worker serves, for that shard unless it is None.
        False: it stays.
        """
        data = connection.session.buffer
        if len(data) > BYTES_MAX or self.is_draining:
            return False
        plain = find_plain_head(data)
        if plain is None or plain.end > BYTES_MAX:
            return False
        owner = self.shard_of(plain.path)
        if shard is not None and owner != shard:
            return False
        transport = connection.transport
        assert transport is not None
        if transport.get_write_buffer_size() or not self._may_move():
            return False
        channel = self._channel(owner)
        if channel is None:
            return False
        sock = transport.get_extra_info("socket")
        message = Handover(GIVE, connection.returns, data)
        if sock is None or not channel.send(message, sock.fileno()):
            return False
        self._moves_left -= 1
        return True

    def _may_move(self) -> bool:
        now_us = self._now_us()
        earned = (now_us - self._moves_us) * MOVES_PER_S / 1e6
        self._moves_us = now_us
        self._moves_left = min(self._moves_left + earned, MOVES_PER_S)
        return self._moves_left >= 1

    def _channel(self, shard: int) -> Channel | None:
        worker = self._workers[shard]
        now_us = self._now_us()
        if not worker.path or now_us < worker.retry_us:
            return None
        if worker.channel is None:
            worker.channel = handover.connect(worker.path)
            if worker.channel is None:  # it listens once it has recovered
                worker.retry_us = now_us + CONNECT_EVERY_US
            else:
                worker.channel.on_close = lambda channel: self._closed(worker, channel)
                self._loop.add_reader(worker.channel.fd, self._receive, worker, worker.channel)
        return worker.channel

    def _receive(self, worker: Worker, channel: Channel) -> None:
        for _ in MESSAGES_PER_TURN:
            try:
                received = channel.receive()
            except BadHandover as error:
                logger.error("a hand-over failed", extra={"fields": {"error": str(error)}})
                continue
            if received is None:
                break
            message, sock = received
            if message.kind == REFUSED:
                worker.retry_us = self._now_us() + REFUSED_US
            if sock is not None:
                self._take_back(sock, message.data, message.returns)

    def _closed(self, worker: Worker, channel: Channel) -> None:
        self._loop.remove_reader(channel.fd)
        worker.channel = None

    def _disconnect(self, worker: Worker) -> None:
        """The worker has died. Connections that it has given back before are still served."""
        if worker.channel is not None:
            self._receive(worker, worker.channel)
        if worker.channel is not None:
            worker.channel.close()

    def drain(self) -> None:
        """The server is stopping: tell the workers."""
        self.is_draining = True
        for shard in range(
            self.shards
        ):  # a front that has restarted is not connected to all workers that serve clients
            channel = self._channel(shard)
            if channel is not None:
                channel.send(Handover(DRAIN))

    def close(self) -> None:
        for worker in self._workers:
            if worker.channel is not None:
                worker.channel.close()
