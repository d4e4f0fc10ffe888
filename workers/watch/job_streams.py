"""Job streams of a shard: claims that push jobs to connected clients as they become ready.

A stream is a claim that waits in the engine. It is repeated as soon as it is answered and the client may have more jobs:
its connection has fewer than `max` leases, and fewer than PUSHES_AHEAD pushes without a JOBS_ACK. Otherwise no claim
waits, so ready jobs go to other clients. The engine reports the end of a lease (`Outcome.settled`) and the front sends
a JOBS_ACK when there is room, so nothing is polled.

When the client or its front is gone, the leases of its connection are released at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
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
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from topics.link.job_streams import PUSH_BYTES, PUSHES_AHEAD, JobStreamOptions, decode_options
from topics.protocols.encoding import Encoding
from workers.peers.links import Send

logger = logging.getLogger("topics.shard")

STREAMS_MAX = 100_000  # more are refused with 429; each takes about 1 KiB
# Of all pushes to one front without a JOBS_ACK. Beyond it pushes are small, because stalled clients keep theirs.
UNACKED_BYTES_MAX = 64 << 20
SMALL_PUSH_BYTES = 16 * 1024
CLAIMS_PER_TURN = 128  # of PUSH_BYTES each; more claims wait for later turns

# Peer, number, requester, command; returns the token.
Ask: TypeAlias = Callable[[bytes, int, Any, cmd.Command], Any]


@dataclass(slots=True, eq=False)
class JobStream:
    peer: bytes
    number: int
    topic: str
    options: JobStreamOptions
    connection: int  # id of its leases in the engine
    encoding: Encoding
    is_open: bool = False  # the queue or consumer exists, and the front has the reply
    is_closed: bool = False
    token: Any = None  # of the waiting claim
    claim: con.Claim | None = None
    unacked: deque[int] = field(default_factory=deque)  # bytes of each push without a JOBS_ACK


class JobStreams:
    def __init__(
        self,
        engine: ShardEngine,
        *,
        send: Send,
        ask: Ask,
        has_window: Callable[[bytes], bool],
        encodings: Mapping[int, Encoding],
        is_headers_only: Callable[[con.Claimed], bool],
    ) -> None:
        """`has_window`: whether a front's reply window is open. `is_headers_only`: whether the consumer gets no data."""
        self._stats = engine.stats
        self._send = send
        self._ask = ask
        self._has_window = has_window
        self._encodings = encodings
        self._is_headers_only = is_headers_only
        self._connections = 0
        self._streams: dict[tuple[bytes, int], JobStream] = {}
        self._by_connection: dict[int, JobStream] = {}
        self._by_topic: dict[str, dict[JobStream, None]] = {}
        self._per_front: dict[bytes, int] = {}
        self._unacked_bytes: dict[bytes, int] = {}
        self._to_refill: dict[JobStream, None] = {}  # streams that may have room for more jobs
        self._claims_asked = 0  # since the last turn
        self._ops: dict[int, Callable[[bytes, wire.Request], None]] = {
            wire.OPEN_JOBS: self._on_open,
            wire.JOBS_ACK: self._on_ack,
            wire.CLOSE_JOBS: self._on_close,
        }

    def __len__(self) -> int:
        return len(self._streams)

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Handle a request about job streams; False: it is not one. A TopicsError is sent as the reply."""
        handler = self._ops.get(request.op)
        if handler is None:
            return False
        handler(peer, request)
        return True

    def fronts(self) -> list[bytes]:
        """Fronts with open streams. When one dies, its leases must be released."""
        return list(self._per_front)

    def front_gone(self, peer: bytes) -> None:
        if peer in self._per_front:
            for stream in [stream for stream in self._streams.values() if stream.peer == peer]:
                self._close(stream)

    def _on_open(self, peer: bytes, request: wire.Request) -> None:
        try:
            options = decode_options(request.body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"a message about a job stream cannot be decoded: {error}") from None
        if len(self._streams) >= STREAMS_MAX:
            raise Throttled("too many job streams", limit="job_streams", max=STREAMS_MAX)
        topic = request.topic.decode("utf-8", "replace")
        self._connections += 1
        encoding = self._encodings[request.encoding]
        stream = JobStream(peer, request.id, topic, options, self._connections, encoding)
        self._streams[peer, request.id] = stream
        self._by_connection[stream.connection] = stream
        self._by_topic.setdefault(topic, {})[stream] = None
        self._per_front[peer] = self._per_front.get(peer, 0) + 1
        self._ask(peer, request.id, stream, self._existence_check(stream))

    @staticmethod
    def _existence_check(stream: JobStream) -> cmd.Command:
        """A command that shows whether the queue or consumer exists."""
        consumer = stream.options.consumer
        if consumer == con.QUEUE:
            return cmd.State(stream.topic, touch=False)
        return con.GetConsumer(stream.topic, consumer)

    def _on_ack(self, peer: bytes, request: wire.Request) -> None:
        stream = self._streams.get((peer, request.id))
        if stream is not None and stream.unacked:
            self._unacked_bytes[peer] -= stream.unacked.popleft()
            self._refill(stream)

    def _on_close(self, peer: bytes, request: wire.Request) -> None:
        stream = self._streams.get((peer, request.id))
        if stream is not None:
            self._close(stream)

    def is_followed(self, topic: str, consumer: str) -> bool:
        return any(stream.options.consumer == consumer for stream in self._by_topic.get(topic, ()))

    def settled(self, connection: int) -> None:
        """Leases of a connection have ended in this turn: it may have room for more jobs."""
        stream = self._by_connection.get(connection)
        if stream is not None and stream.is_open:
            self._to_refill[stream] = None

    @property
    def has_refills(self) -> bool:
        """Whether streams with room wait for a later turn."""
        return bool(self._to_refill)

    def tick(self) -> None:
        """The turn has ended: claim more for the streams that have room."""
        self._claims_asked = 0
        if not self._to_refill:
            return
        streams, self._to_refill = self._to_refill, {}
        for stream in streams:
            if not stream.is_closed:
                self._refill(stream)

    # -- claims --------------------------------------------------------------------------------------------

    def on_result(self, stream: JobStream, token: Any, result: object) -> None:
        """The result of a command of this service."""
        if stream.is_closed:
            return  # its leases are released by a later command
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
            self._send(stream.peer, stream.number, *wire.refused(error))
            self._remove(stream)
            return
        self._send(stream.peer, stream.number, wire.OK, wire.MSGPACK, b"", b"")
        if stream.options.check_only:
            self._remove(stream)
            return
        stream.is_open = True
        self._refill(stream)

    def _refill(self, stream: JobStream) -> None:
        """Let a claim wait for as many jobs as the client may have now."""
        if len(stream.unacked) >= PUSHES_AHEAD:
            return
        if stream.claim is None and (
            self._claims_asked >= CLAIMS_PER_TURN or not self._has_window(stream.peer)
        ):
            self._to_refill[stream] = None
            return
        room = self._room(stream)
        if stream.claim is not None:
            stream.claim.max = room  # update the waiting claim
        elif room:
            self._claim(stream, room)

    def _claim(self, stream: JobStream, room: int) -> None:
        options = stream.options
        is_over = self._unacked_bytes.get(stream.peer, 0) > UNACKED_BYTES_MAX
        stream.claim = con.Claim(
            stream.topic,
            options.consumer,
            options.node.encode(),
            room,
            options.lease_ms,
            SMALL_PUSH_BYTES if is_over else PUSH_BYTES,
            standing=True,
            connection=stream.connection,
        )
        stream.token = self._ask(stream.peer, stream.number, stream, stream.claim)
        self._claims_asked += 1

    def _room(self, stream: JobStream) -> int:
        held = self._stats.leases_of(stream.topic, stream.options.consumer, stream.connection)
        if held is None:
            return 1  # the claim will fail, and end the stream
        return stream.options.max - held

    def _push(self, stream: JobStream, claimed: con.Claimed) -> None:
        try:
            body = stream.encoding.job_events(claimed, headers_only=self._is_headers_only(claimed))
        except Exception as error:  # one bad record must not take the shard down
            logger.exception("jobs could not be encoded")
            self._fail(stream, TopicsError(f"a job could not be encoded: {error!r}"))
            return
        if body:
            self._send(stream.peer, stream.number, wire.OK, wire.JOBS, b"", body)
            stream.unacked.append(len(body))
            self._unacked_bytes[stream.peer] = self._unacked_bytes.get(stream.peer, 0) + len(body)
        self._refill(stream)

    # -- ends ----------------------------------------------------------------------------------------------

    def on_dropped(self, result: cmd.TopicDropped | con.ConsumerDropped) -> None:
        """End the streams of a dropped topic or consumer, also those without a waiting claim, before its name is reused."""
        if not result.deleted:
            return
        for stream in list(self._by_topic.get(result.topic, ())):
            if isinstance(result, cmd.TopicDropped):
                error: TopicsError = TopicNotFound(stream.topic)
            elif stream.options.consumer == result.consumer:
                error = ConsumerNotFound(stream.topic, result.consumer)
            else:
                continue
            if stream.is_open:
                self._fail(stream, error)

    def _fail(self, stream: JobStream, error: TopicsError) -> None:
        """End a stream with an error, which the front passes on."""
        code, _, fields, body = wire.refused(error)
        self._send(stream.peer, stream.number, code, wire.JOBS, fields, body)
        self._close(stream)

    def _close(self, stream: JobStream) -> None:
        self._remove(stream)
        if stream.is_open:
            release = con.Release(stream.topic, stream.options.consumer, stream.connection)
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
            self._unacked_bytes[peer] = self._unacked_bytes.get(peer, 0) - sum(stream.unacked)
        else:
            del self._per_front[peer]
            self._unacked_bytes.pop(peer, None)


def _refusal(stream: JobStream, result: object) -> TopicsError | None:
    """Why the stream cannot be opened; None: it can."""
    if isinstance(result, TopicsError):
        return result
    if isinstance(result, cmd.TopicState):
        return NotAQueue(stream.topic) if result.config.type != "queue" else None
    assert isinstance(result, con.ConsumerState)
    most = result.config.max_waiting
    if result.waiting >= most:
        return Throttled(
            "this consumer has reached its max_waiting; retry later, or raise max_waiting",
            limit="max_waiting",
            max=most,
        )
    return None
