"""Streams of jobs at one shard: who wants jobs as they come, how much each may hold, and when it is asked for again.

A stream is a claim that stands in the engine, and is asked again as soon as it is answered and the client may have more:
fewer than `max` leases of its connection hold, and fewer than PUSHES_AHEAD of its pushes are not WORKED. While either is
used up nothing stands for it, so what is ready goes to others. The engine says when a lease of a connection has ended
(`shard.on_settled`), the front when there is room: nothing is looked at in between.

When the client, or its front, is gone, what was leased over its connection is released at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from topics.api.errors import (
    ConsumerNotFound,
    InvalidRequest,
    NotAQueue,
    Throttled,
    TopicNotFound,
    TopicsError,
)
from topics.api.http_errors import error_head, error_parts
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.runtime.engine import Engine
from topics.link import wire
from topics.link.job_streams import PUSH_BYTES, PUSHES_AHEAD, JobStreamOptions, decode_options
from workers.peers.links import Send
from workers.watch import job_events

logger = logging.getLogger("topics.shard")

STREAMS_MAX = 100_000  # more are refused with 429; each costs about 1 KiB here
# Of pushes to one front that are not WORKED. Beyond it pushes are small: clients that take nothing keep theirs.
AHEAD_BYTES_MAX = 64 << 20
SMALL_PUSH_BYTES = 16 * 1024
CLAIMS_PER_TURN = 128  # of PUSH_BYTES each; more are asked in the turns that follow

Ask: TypeAlias = Callable[
    [bytes, int, Any, cmd.Command], Any
]  # peer, number, who asks, what; returns the token


@dataclass(slots=True, eq=False)
class JobStream:
    peer: bytes
    number: int
    topic: str
    wish: JobStreamOptions
    connection: int  # as the engine knows it
    is_open: bool = False  # there is such a queue or consumer, and the front was told so
    is_closed: bool = False
    token: Any = None  # of the claim that stands
    claim: con.Claim | None = None
    ahead: deque[int] = field(default_factory=deque)  # bytes of pushes that are not WORKED


class JobStreams:
    def __init__(
        self,
        engine: Engine,
        *,
        send: Send,
        ask: Ask,
        has_window: Callable[[bytes], bool],
        is_headers_only: Callable[[con.Claimed], bool],
    ) -> None:
        """`has_window`: whether a front has_window what it was sent. `is_headers_only`: whether the consumer wants no data."""
        self._shard = engine.shard
        self._send = send
        self._ask = ask
        self._has_window = has_window
        self._is_headers_only = is_headers_only
        self._connections = 0
        self._streams: dict[tuple[bytes, int], JobStream] = {}
        self._by_connection: dict[int, JobStream] = {}
        self._by_topic: dict[str, dict[JobStream, None]] = {}
        self._per_front: dict[bytes, int] = {}
        self._ahead_bytes: dict[bytes, int] = {}
        self._stirred: dict[JobStream, None] = {}  # which may have room for more
        self._asked = 0  # claims since the last turn
        self._shard.on_settled = self._settled
        self._shard.is_followed = self._is_followed
        self._ops: dict[int, Callable[[bytes, wire.Request], None]] = {
            wire.OPEN_JOBS: self._on_work,
            wire.JOBS_ACK: self._on_worked,
            wire.CLOSE_JOBS: self._on_unwork,
        }

    def __len__(self) -> int:
        return len(self._streams)

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Whether it was for the desk; a TopicsError is what the front is to be told."""
        handler = self._ops.get(request.op)
        if handler is None:
            return False
        handler(peer, request)
        return True

    def fronts(self) -> list[bytes]:
        """Those with open streams. Should one die, others get its clients' jobs."""
        return list(self._per_front)

    def front_gone(self, peer: bytes) -> None:
        if peer in self._per_front:
            for stream in [stream for stream in self._streams.values() if stream.peer == peer]:
                self._close(stream)

    def _on_work(self, peer: bytes, request: wire.Request) -> None:
        try:
            wish = decode_options(request.body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"a message about a stream of jobs cannot be read: {error}") from None
        if len(self._streams) >= STREAMS_MAX:
            raise Throttled("too many streams of jobs", limit="job_streams", max=STREAMS_MAX)
        topic = request.topic.decode("utf-8", "replace")
        self._connections += 1
        stream = JobStream(peer, request.id, topic, wish, self._connections)
        self._streams[peer, request.id] = stream
        self._by_connection[stream.connection] = stream
        self._by_topic.setdefault(topic, {})[stream] = None
        self._per_front[peer] = self._per_front.get(peer, 0) + 1
        self._ask(peer, request.id, stream, self._question(stream))

    @staticmethod
    def _question(stream: JobStream) -> cmd.Command:
        """What tells whether there is such a queue or consumer."""
        consumer = stream.wish.consumer
        if consumer == con.QUEUE:
            return cmd.State(stream.topic, touch=False)
        return con.GetConsumer(stream.topic, consumer)

    def _on_worked(self, peer: bytes, request: wire.Request) -> None:
        stream = self._streams.get((peer, request.id))
        if stream is not None and stream.ahead:
            self._ahead_bytes[peer] -= stream.ahead.popleft()
            self._fill(stream)

    def _on_unwork(self, peer: bytes, request: wire.Request) -> None:
        stream = self._streams.get((peer, request.id))
        if stream is not None:
            self._close(stream)

    def _is_followed(self, topic: str, consumer: str) -> bool:
        return any(stream.wish.consumer == consumer for stream in self._by_topic.get(topic, ()))

    def _settled(self, connection: int) -> None:
        """Within the engine's turn, which may have more to say: what follows from it waits for the turn's end."""
        stream = self._by_connection.get(connection)
        if stream is not None and stream.is_open:
            self._stirred[stream] = None

    def tick(self) -> None:
        """The turn has ended: who has room for more asks for it."""
        self._asked = 0
        if not self._stirred:
            return
        stirred, self._stirred = self._stirred, {}
        for stream in stirred:
            if not stream.is_closed:
                self._fill(stream)

    # -- claims --------------------------------------------------------------------------------------------

    def on_result(self, stream: JobStream, token: Any, result: object) -> None:
        """The engine has answered one of the desk's own questions."""
        if stream.is_closed:
            return  # what it claimed was released after that
        if not stream.is_open:
            self._open(stream, result)
        elif stream.token is token:
            stream.token = stream.claim = None
            if isinstance(result, TopicsError):
                self._fail(stream, result)
            else:
                assert isinstance(result, con.Claimed)
                self._push(stream, result)

    def _open(self, stream: JobStream, result: object) -> None:
        error = _refusal(stream, result)
        if error is not None:
            status, body = error_parts(error)
            self._send(stream.peer, stream.number, status, wire.JSON, error_head(status), body)
            self._remove(stream)
            return
        self._send(stream.peer, stream.number, 200, wire.INTERNAL, b"", b"")
        if stream.wish.check_only:
            self._remove(stream)
            return
        stream.is_open = True
        self._fill(stream)

    def _fill(self, stream: JobStream) -> None:
        """Let a claim stand for all that the client may have now."""
        if len(stream.ahead) >= PUSHES_AHEAD:
            return
        if stream.claim is None and (self._asked >= CLAIMS_PER_TURN or not self._has_window(stream.peer)):
            self._stirred[stream] = None
            return
        room = self._room(stream)
        if stream.claim is not None:
            stream.claim.max = room  # also the one that stands is for all of it
        elif room:
            self._claim(stream, room)

    def _claim(self, stream: JobStream, room: int) -> None:
        wish = stream.wish
        is_crowded = self._ahead_bytes.get(stream.peer, 0) > AHEAD_BYTES_MAX
        stream.claim = con.Claim(
            stream.topic,
            wish.consumer,
            wish.node.encode(),
            room,
            wish.lease_ms,
            SMALL_PUSH_BYTES if is_crowded else PUSH_BYTES,
            standing=True,
            connection=stream.connection,
        )
        stream.token = self._ask(stream.peer, stream.number, stream, stream.claim)
        self._asked += 1

    def _room(self, stream: JobStream) -> int:
        log = self._shard.published.get(stream.topic)
        if log is None:
            return 1  # the claim finds out what has become of it
        return stream.wish.max - self._shard.leases_of(log, stream.wish.consumer, stream.connection)

    def _push(self, stream: JobStream, claimed: con.Claimed) -> None:
        try:
            body = job_events.render(claimed, headers_only=self._is_headers_only(claimed))
        except Exception as error:  # one odd record must not take the shard down
            logger.exception("jobs could not be rendered")
            self._fail(stream, TopicsError(f"a job could not be rendered: {error!r}"))
            return
        if body:
            self._send(stream.peer, stream.number, 200, wire.JOBS, b"", body)
            stream.ahead.append(len(body))
            self._ahead_bytes[stream.peer] = self._ahead_bytes.get(stream.peer, 0) + len(body)
        self._fill(stream)

    # -- ends ----------------------------------------------------------------------------------------------

    def on_dropped(self, result: cmd.TopicDropped | con.ConsumerDropped) -> None:
        """Also streams for which nothing stands in the engine hear of it, and before there may be another of that name."""
        if not result.deleted:
            return
        for stream in list(self._by_topic.get(result.topic, ())):
            if isinstance(result, cmd.TopicDropped):
                error: TopicsError = TopicNotFound(stream.topic)
            elif stream.wish.consumer == result.consumer:
                error = ConsumerNotFound(stream.topic, result.consumer)
            else:
                continue
            if stream.is_open:
                self._fail(stream, error)

    def _fail(self, stream: JobStream, error: TopicsError) -> None:
        """It cannot go on; the front hears why."""
        status, body = error_parts(error)
        self._send(stream.peer, stream.number, status, wire.JOBS, b"", body)
        self._close(stream)

    def _close(self, stream: JobStream) -> None:
        self._remove(stream)
        if stream.is_open:
            release = con.Release(stream.topic, stream.wish.consumer, stream.connection)
            self._ask(stream.peer, stream.number, stream, release)

    def _remove(self, stream: JobStream) -> None:
        stream.is_closed = True
        peer = stream.peer
        del self._streams[peer, stream.number]
        del self._by_connection[stream.connection]
        of_topic = self._by_topic[stream.topic]
        del of_topic[stream]
        if not of_topic:
            del self._by_topic[stream.topic]
        self._per_front[peer] -= 1
        if self._per_front[peer]:
            self._ahead_bytes[peer] = self._ahead_bytes.get(peer, 0) - sum(stream.ahead)
        else:
            del self._per_front[peer]
            self._ahead_bytes.pop(peer, None)


def _refusal(stream: JobStream, result: object) -> TopicsError | None:
    """Why there can be no such stream, if so."""
    if isinstance(result, TopicsError):
        return result
    if isinstance(result, cmd.TopicState):
        return NotAQueue(stream.topic) if result.config.type != "queue" else None
    assert isinstance(result, con.ConsumerState)
    most = result.config.max_waiting
    if result.waiting >= most:
        return Throttled(
            "as many wait at this consumer as it allows; come back later, or raise its max_waiting",
            limit="max_waiting",
            max=most,
        )
    return None
