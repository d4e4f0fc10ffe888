"""Connections of clients that this worker serves itself. A front has accepted them and handed them over.

    front ──Channel──▶ ClientConnection ──Admission──▶ OwnShard ──▶ ShardCore.receive_local
                              ▲                                            │
                              └──────────── responses ◀── replies ◀────────┘

A worker serves small requests to the hot routes (`plain_head`) for topics of its own shard, with the protocol code of the
fronts. A connection on which anything else arrives goes back to its front, with its unread bytes: another route or shard,
another version of HTTP, a large body, a request that arrives slowly. So fronts remain the only routers, and all that takes
long to receive is in their hands.
"""

from __future__ import annotations

import logging
import select
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import topics
from topics.api.api_keys import parse_keys
from topics.engine.core.placement import shard_of
from topics.link import handover, wire
from topics.link.control_channel import Outage
from topics.link.handover import BACK, GIVE, REFUSED, BadHandover, Channel, Handover
from topics.protocols.http.admission import Admission
from topics.protocols.http.call import Services, error_response
from topics.protocols.http.exchange import Request, Response
from topics.protocols.http.ports import OnReply
from topics.protocols.http1.pace import EOF_WAIT_US, EVENTS_PER_TURN, LINGER_US, may_read_us
from topics.protocols.http1.plain_head import PlainHead, find_plain_head, may_become_plain, topic_of
from topics.protocols.http1.session import IDLE, OPEN, Http1Session
from topics.system.in_flight import InFlightTable
from topics.system.settings import Settings
from workers.shard.core import ShardCore

logger = logging.getLogger("topics.shard")

SWEEP_EVERY_US = 1_000_000
INCOMPLETE_US = 1_000_000  # a request that arrives more slowly is the front's
RETURN_AGAIN_US = 5_000  # a front that was too busy to take a connection back
RECEIVE_BYTES = 64 * 1024
JOIN_MAX = 64 * 1024  # a body up to this size is joined with its head into one write
COMPRESSING_MAX = 64  # responses; more are sent uncompressed
LONG_POLL_GRACE_US = 200_000  # a younger read is not waiting yet, and gets its reply
BUDGET_MS = 30_000  # a request that the shard has not begun within this time is refused
_CLOSED_BOTH = select.EPOLLHUP | select.EPOLLERR


class OwnShard:
    """The port `Shards` of a worker: requests for its own shard only, which skip the link."""

    def __init__(self, core: ShardCore, shards: int) -> None:
        self.count = shards
        self.outages: list[Outage] = []
        self.refused_full = 0
        self._core = core
        self._numbers = count(1)
        self._pending: dict[int, tuple[int, int, bytes, bytes, OnReply]] = {}

    def ask(
        self,
        shard: int,
        op: int,
        flags: int,
        topic: bytes,
        args: bytes,
        body: wire.Buffer,
        received_us: int,
        on_reply: OnReply,
        encoding: int = wire.JSON,
    ) -> int:
        number = next(self._numbers)
        self._pending[number] = op, received_us, topic, args, on_reply
        self._core.receive_local(
            wire.Request(number, received_us, BUDGET_MS, op, flags, topic, args, body, encoding)
        )
        return number

    def receive(self, reply: wire.Reply) -> None:
        entry = self._pending.pop(reply.id, None)
        if entry is not None:  # otherwise its client has disconnected
            try:
                entry[4](reply)
            except Exception:  # otherwise the remaining replies would be lost
                logger.exception("failed to process a reply")

    def tell(self, shard: int, op: int, number: int, topic: bytes = b"", args: bytes = b"") -> None:
        self._core.receive_local(wire.Request(number, 0, 0, op, 0, topic, args, b""))

    def cancel(self, shard: int, number: int) -> None:
        entry = self._pending.get(number)
        if entry is not None and entry[0] in wire.READS:
            self.receive(wire.Reply(number, *wire.failed("not_ready", "the client has disconnected")))

    def end_polls(self, before_us: int) -> None:
        text = "the server is stopping; retry after it has restarted"
        for number, (op, received_us, topic, args, _) in list(self._pending.items()):
            if op in wire.POLLS and received_us <= before_us:
                detail: dict[str, object] | None = {"outcome": "unknown"} if op in wire.CHANGES else None
                self.receive(wire.Reply(number, *wire.failed("shutting_down", text, detail)))
                if op == wire.CLAIM:  # it would still lease jobs
                    self.tell(shard_of(topic, self.count), wire.CANCEL_CLAIM, number, topic, args)


class ClientConnection:
    """A socket, the HTTP/1 state machine, and the unsent rest of its last response."""

    __slots__ = (
        "_advancing",
        "_began_us",
        "_clients",
        "_events",
        "_open",
        "_stalled_max",
        "_stalled_us",
        "active_us",
        "channel",
        "has_ended",
        "returns",
        "session",
        "sock",
        "unsent",
    )

    def __init__(
        self, clients: ClientConnections, sock: socket.socket, channel: Channel, returns: int
    ) -> None:
        self._clients = clients
        self.sock: socket.socket | None = sock
        self.channel = channel  # of the front that gave it
        self.returns = returns
        self.session = Http1Session(body_bytes_max=0)
        self.unsent: list[memoryview] = []
        self.has_ended = False  # the client has closed its side
        self.active_us = clients.received_us
        self._events = select.EPOLLIN
        self._open: Request | None = None
        self._advancing = False
        self._began_us = 0  # when the incomplete request began
        self._stalled_us = 0  # since when the client has not read
        self._stalled_max = 0

    @property
    def unsent_bytes(self) -> int:
        return sum(map(len, self.unsent))

    # -- in ------------------------------------------------------------------------------------------------

    def ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if self.sock is None:
            return
        if events & select.EPOLLIN and not self.has_ended:
            self._read()
        elif events & _CLOSED_BOTH:
            self.close()

    def _read(self) -> None:
        assert self.sock is not None
        session = self.session
        room = handover.BYTES_MAX - len(session.buffer)  # all of it can be handed over
        try:
            data = self.sock.recv(min(room, RECEIVE_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not data:
            self._end_of_input()
            return
        if session.state is not IDLE and session.state is not OPEN:
            return  # the last response is written
        self.active_us = self._clients.received_us
        session.receive(data)
        self.advance()

    def _end_of_input(self) -> None:
        """The client has closed its side; it may still wait for the response to an open request."""
        self.has_ended = True
        if self.session.state is OPEN or (self.session.state is IDLE and self.unsent):
            self.active_us = self._clients.received_us
            self._watch()
        else:
            self.close()

    def _watch(self) -> None:
        """Wait for what can be handled: input while there is room for it, room for unsent bytes."""
        if self.sock is None:
            return
        reads = not self.has_ended and len(self.session.buffer) < handover.BYTES_MAX
        events = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if self.unsent else 0)
        if events != self._events:
            self._events = events
            self._clients.epoll.modify(self.sock.fileno(), events)

    def advance(self) -> None:
        """Start the received requests, until one waits for its response, the rest is incomplete, or there were many."""
        if self._advancing:
            return
        self._advancing = True
        clients, session = self._clients, self.session
        try:
            for _ in EVENTS_PER_TURN:
                data = session.buffer
                if session.state is not IDLE or self.unsent or self.sock is None or not data:
                    break
                plain = find_plain_head(data)
                if plain is None:
                    if not may_become_plain(data):
                        clients.give_back(self)
                    break
                if not clients.serves(plain):
                    clients.give_back(self)
                    break
                if len(data) < plain.end:
                    break
                request = session.next_event(self.active_us)
                assert isinstance(request, Request)
                self._handle(request)
            else:
                clients.yielded.append(self)
        finally:
            self._advancing = False
        self._watch()
        if self.sock is None or session.state is not IDLE or self.unsent:
            return
        if self.has_ended:
            self.close()
        elif not session.buffer:
            self._began_us = 0
        elif not self._began_us:
            self._began_us = self.active_us

    def _handle(self, request: Request) -> None:
        self._began_us = 0
        self._open = request
        self._clients.open += 1
        try:
            self._clients.admission.handle(request, self._respond)
        except Exception:
            logger.exception("a request failed")
            if self.session.state is OPEN:
                self._respond(error_response("internal", "the request failed; see the server's log"))

    # -- out -----------------------------------------------------------------------------------------------

    def _respond(self, response: Response) -> None:
        if self.sock is None or self.session.state is not OPEN:
            return
        self._open = None
        self._clients.open -= 1
        head, body = self.session.respond(response, keep_alive=not self._clients.is_draining)
        if len(body) <= JOIN_MAX:
            self.unsent.append(memoryview(head + body))
        else:
            self.unsent += (memoryview(head), memoryview(body))
        self._flush()
        if self.sock is not None and self.session.state is IDLE and (self.session.buffer or self.has_ended):
            self.advance()

    def _flush(self) -> None:
        clients = self._clients
        before = self.unsent_bytes if self._stalled_us else 0
        try:
            while self.unsent:
                assert self.sock is not None
                sent = (
                    self.sock.sendmsg(self.unsent) if len(self.unsent) > 1 else self.sock.send(self.unsent[0])
                )
                while self.unsent and sent >= len(self.unsent[0]):
                    sent -= len(self.unsent.pop(0))
                if sent:
                    self.unsent[0] = self.unsent[0][sent:]
        except BlockingIOError:
            size = self.unsent_bytes
            clients.unsent_bytes += size - before
            if not self._stalled_us:
                self._stalled_us, self._stalled_max = clients.now_us(), size
            self._watch()
            return
        except OSError:
            self.close(stalled_bytes=before)
            return
        clients.unsent_bytes -= before
        if self._stalled_us:
            self._stalled_us = 0
            self._watch()
        self.active_us = clients.received_us
        if self.session.state is not IDLE and self.session.state is not OPEN:
            self._close_gracefully()
        elif before:  # `_respond` goes on by itself when nothing was left
            self.advance()

    def _close_gracefully(self) -> None:
        """Close only the sending side first: closing a socket with unread input would discard the response at the client."""
        assert self.sock is not None
        if self.has_ended:
            self.close()
            return
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def release(self) -> socket.socket:
        """Take the socket out of this connection, which has no open request and no unsent bytes."""
        sock, self.sock = self.sock, None
        assert sock is not None
        self._clients.forget(self, sock)
        return sock

    def drain(self) -> None:
        """Close the connection if it is idle. A request that has arrived unnoticed is answered first."""
        if self.session.state is IDLE and not self.unsent:
            self.ready(select.EPOLLIN)
        if self.session.state is IDLE and not self.unsent and not self.session.buffer:
            self.close()

    def close(self, stalled_bytes: int | None = None) -> None:
        if self.sock is None:
            return
        if self._stalled_us:
            self._clients.unsent_bytes -= self.unsent_bytes if stalled_bytes is None else stalled_bytes
            self._stalled_us = 0
        self.unsent = []
        self.release().close()
        self.session.close()
        request, self._open = self._open, None
        if request is not None:
            self._clients.open -= 1
            request.release()

    # -- time ----------------------------------------------------------------------------------------------

    def sweep(self, now_us: int, *, idle_us: int, request_us: int) -> None:
        silent_us = now_us - self.active_us
        if self._stalled_us:
            read = self._stalled_max - self.unsent_bytes
            if now_us - self._stalled_us > may_read_us(request_us, read):
                self.close()
        elif self.session.state is OPEN:
            # Most likely the client has closed both sides, which looks the same.
            if self.has_ended and silent_us > EOF_WAIT_US:
                self.close()
        elif self.session.state is not IDLE:
            if silent_us > LINGER_US:
                self.close()
        elif self._began_us:
            if now_us - self._began_us > INCOMPLETE_US:
                self._clients.give_back(self)
        elif silent_us > idle_us:
            self.close()


class ClientConnections:
    """All of them, the channels to the fronts, and what their requests share."""

    def __init__(
        self,
        core: ShardCore,
        epoll: select.epoll,
        settings: Settings,
        *,
        path: str,
        shard: int,
        shards: int,
        connections_max: int,
        now_us: Callable[[], int],
        wake: Callable[[], None],
        in_flight: tuple[InFlightTable, int] | None = None,
    ) -> None:
        """`path`: of the listening socket. `wake`: has the event loop call `run_due`; for other threads."""
        self.epoll = epoll
        self.now_us = now_us
        self.received_us = now_us()  # when the event loop last received something
        self.open = 0  # unanswered requests
        self.unsent_bytes = 0  # of clients that do not read
        self.yielded: deque[ClientConnection] = deque()  # which have more requests than one turn may start
        self._counts = core.metrics.clients
        self._shard, self._shards = shard, shards
        self._connections_max = connections_max
        self._connections: dict[int, ClientConnection] = {}  # by descriptor
        self._channels: dict[int, Channel] = {}
        self._returning: deque[tuple[socket.socket, Channel, Handover]] = deque()  # the front was too busy
        self._idle_us, self._request_us = settings.keepalive_ms * 1000, settings.request_timeout_ms * 1000
        self._sweep_us = 0
        self._own_shard = OwnShard(core, shards)
        self._services = Services(
            self._own_shard, settings, now_us, topics.__version__, now_us(), in_flight=in_flight
        )
        self.admission = Admission(
            self._services, parse_keys(settings.api_keys), lambda: self.unsent_bytes, self._offload
        )
        self._wake = wake
        self._threads: ThreadPoolExecutor | None = None
        self._compressing = 0
        self._done: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._listener = handover.listen(path)
        epoll.register(self._listener.fileno(), select.EPOLLIN)

    @property
    def count(self) -> int:
        return len(self._connections)

    @property
    def is_draining(self) -> bool:
        return self._services.draining

    def serves(self, plain: PlainHead) -> bool:
        """Whether this worker serves the request. It has to fit into a message, as it may be handed over incomplete."""
        return plain.end <= handover.BYTES_MAX and shard_of(topic_of(plain.path), self._shards) == self._shard

    # -- the event loop ------------------------------------------------------------------------------------

    def ready(self, fd: int, events: int) -> None:
        """A descriptor of these has become ready; others are ignored."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.ready(events)
        elif fd in self._channels:
            self._receive(self._channels[fd])
        elif fd == self._listener.fileno():
            self._accept()

    @property
    def has_work(self) -> bool:
        """Whether `run_due` has something to do now."""
        return bool(self.yielded or self._done)

    def wake_at_us(self) -> int | None:
        """When `run_due` has something to do, if nothing happens before."""
        if self._returning:
            return self.now_us() + RETURN_AGAIN_US
        return self._sweep_us if self._connections else None

    def run_due(self, now_us: int) -> None:
        for _ in range(len(self.yielded)):
            connection = self.yielded.popleft()
            connection.advance()
        while self._done:
            done, result = self._done.popleft()
            self._compressing -= 1
            done(result)
        if self.is_draining:
            self._own_shard.end_polls(now_us - LONG_POLL_GRACE_US)
        while self._returning and self._send(*self._returning[0]):
            self._returning.popleft()
        if now_us >= self._sweep_us:
            self._sweep_us = now_us + SWEEP_EVERY_US
            for connection in list(self._connections.values()):
                connection.sweep(now_us, idle_us=self._idle_us, request_us=self._request_us)

    def receive_replies(self, replies: list[wire.Reply]) -> None:
        for reply in replies:
            self._own_shard.receive(reply)

    # -- hand-over -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        channel = handover.accept(self._listener)
        if channel is not None:
            self._channels[channel.fd] = channel
            channel.on_close = self._channel_closed
            self.epoll.register(channel.fd, select.EPOLLIN)

    def _channel_closed(self, channel: Channel) -> None:
        self.epoll.unregister(channel.fd)
        del self._channels[channel.fd]

    def _receive(self, channel: Channel) -> None:
        for _ in EVENTS_PER_TURN:
            try:
                received = channel.receive()
            except BadHandover as error:
                logger.error("a hand-over failed", extra={"fields": {"error": str(error)}})
                continue
            if received is None:
                break
            message, sock = received
            if sock is None:
                self.drain()
            elif message.kind != GIVE or self.is_draining or len(self._connections) >= self._connections_max:
                self._counts.refused += 1
                self._send_back(sock, channel, message._replace(kind=REFUSED))
            else:
                self._take(sock, channel, message)

    def _take(self, sock: socket.socket, channel: Channel, message: Handover) -> None:
        self._counts.taken += 1
        connection = ClientConnection(self, sock, channel, message.returns)
        self._connections[sock.fileno()] = connection
        self._counts.open += 1
        self.epoll.register(sock.fileno(), select.EPOLLIN)
        connection.session.receive(message.data)
        connection.advance()

    def forget(self, connection: ClientConnection, sock: socket.socket) -> None:
        # Closing it would not be enough: epoll reports a socket until its last descriptor is closed, wherever that is.
        self.epoll.unregister(sock.fileno())
        del self._connections[sock.fileno()]
        self._counts.open -= 1

    def give_back(self, connection: ClientConnection) -> None:
        self._counts.returned += 1
        message = Handover(BACK, connection.returns + 1, connection.session.take_rest())
        self._send_back(connection.release(), connection.channel, message)

    def _send_back(self, sock: socket.socket, channel: Channel, message: Handover) -> None:
        if not self._send(sock, channel, message):
            self._returning.append((sock, channel, message))

    def _send(self, sock: socket.socket, channel: Channel, message: Handover) -> bool:
        """Send a connection to its front, or to another one if that has died. False: it is too busy."""
        if channel.is_closed:
            channel = next(iter(self._channels.values()), channel)
        if not channel.send(message, sock):
            if not channel.is_closed:
                return False
            if self._channels:
                return self._send(sock, channel, message)
        sock.close()  # sent; or no front is there to serve it
        return True

    # -- compression ---------------------------------------------------------------------------------------

    def _offload(
        self, work: Callable[[], Any], done: Callable[[Any], None], size: int = 0, *, is_large: bool = False
    ) -> bool:
        """Run a function on another thread. Returns False if too many are waiting."""
        if self._compressing >= COMPRESSING_MAX:
            return False
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "gzip")
        self._compressing += 1

        def run() -> None:
            result = None
            try:
                result = work()
            except Exception:
                logger.exception("offloaded work failed")
            self._done.append((done, result))
            self._wake()

        self._threads.submit(run)
        return True

    # -- stop ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """The server is stopping: close idle connections, and the others after their response."""
        if self.is_draining:
            return
        self._services.draining = True
        for connection in list(self._connections.values()):
            connection.drain()
        self._own_shard.end_polls(self.now_us() - LONG_POLL_GRACE_US)

    @property
    def is_drained(self) -> bool:
        return not self.open and not self.unsent_bytes

    def close(self) -> None:
        self._services.draining = True
        for connection in list(self._connections.values()):
            connection.close()
        while self._returning:
            self._returning.popleft()[0].close()
        for channel in list(self._channels.values()):
            channel.close()
        self._listener.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def connections_max(open_files: int) -> int:
    """How many connections a worker takes: half of its descriptors remain for files and other sockets."""
    return open_files // 2
