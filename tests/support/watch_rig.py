"""Watching without processes and without waiting: shards, fronts and clients under a test's control.

`FeedRig` is one shard; it keeps all replies and pages of a feed by their number. `Town` is shards and fronts whose
messages wait in `up` and `down` until they are carried, with timers that fire when the test lets time pass. `Client`
is the receiver of a stream: it takes everything that is written, unless it is set to be full.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.pending import PendingRequests
from router.watch.service import start_streams
from tests.support.engine_harness import SMALL
from tests.support.shard_answers import ShardAnswer, as_answer
from tests.support.shard_rig import FRONT, Rig
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from tests.support.sse_client import Frame, parse_frame
from topics.api.api_keys import ApiKey
from topics.api.config import EngineConfig
from topics.api.limits import MIB
from topics.engine.commands.topics import Tombstone
from topics.link import wire
from topics.link.watch import (
    CreateSession,
    FeedOptions,
    Follow,
    OpenedSession,
    OpenSession,
    SessionSpec,
    encode,
    read_page_fields,
)
from topics.protocols.http.call import Call, Services
from topics.protocols.http.event_stream import EventStream
from topics.protocols.http.exchange import Request, Response, Stream
from topics.system.settings import Settings

ROOMY = msgspec.structs.replace(SMALL, wal_file_bytes=MIB, cache_bytes=4 * MIB, segment_max_events=1000)
QUICK = msgspec.structs.replace(ROOMY, verify=False)  # checking every topic after every turn is slow
PLAIN = FeedOptions()


@dataclass(frozen=True, slots=True)
class Page:
    """One message of a feed."""

    status: int
    from_seq: int = 0
    to_seq: int = 0
    seqs: list[int] = field(default_factory=list)
    caught_up: bool = False
    tombstone: Tombstone | None = None

    @property
    def span(self) -> tuple[int, int]:
        return self.from_seq, self.to_seq


def page_of(reply: ShardAnswer) -> Page:
    if reply.kind != wire.FEED:
        return Page(reply.status)
    head = read_page_fields(reply.head)
    seqs = [record["$seq"] for record in json.loads(b"[%b]" % bytes(reply.body))]
    assert len(seqs) == head.count
    return Page(reply.status, head.from_seq, head.to_seq, seqs, head.caught_up, head.tombstone)


class FeedRig(Rig):
    """One shard with feeds: any number of replies per number, and jobs that may fail."""

    def __init__(self, config: EngineConfig = ROOMY, **options: Any) -> None:
        self.heard: dict[tuple[bytes, int], list[ShardAnswer]] = {}
        self.told: list[tuple[bytes, ShardAnswer]] = []
        self.is_syncing = True  # otherwise jobs of that kind wait
        super().__init__(config, **options)

    def _keep(self, peer: bytes, parts: list[wire.Buffer]) -> None:
        head = bytes(parts[0])
        for reply in map(as_answer, wire.read_replies(head, *parts[1:])):
            self.heard.setdefault((peer, reply.id), []).append(reply)
            self.told.append((peer, reply))
            self.replies.setdefault((peer, reply.id), reply)
        if self.takes:
            taken = wire.window_update(sum(map(len, parts)))
            self.core.receive(peer, wire.message_head(self.incarnation) + taken)

    def rest(self) -> None:
        self._take(self.core.tend())
        for _ in range(10_000):
            due = [job for job in self.jobs if self.is_syncing or job.kind != "sync"]
            if due:
                self.jobs.remove(due[0])
                error: BaseException | None = None
                try:
                    due[0].run()
                except OSError as failure:
                    error = failure
                self._take(self.core.finish(due[0], error, 0.0))
            elif self.core.has_large:
                self.core.read_large()
            elif self.core.needs_turn or self.core.has_copies or self._is_due():
                self.turn()
            else:
                return
        raise AssertionError("the shard always has more work to do")

    # -- messages of fronts ------------------------------------------------------------------------------------

    def follow(
        self,
        topic: str = "t",
        options: FeedOptions = PLAIN,
        *,
        group: str | None = None,
        from_seq: int = 0,
        seen: int = 0,
        peer: bytes = FRONT,
    ) -> tuple[bytes, int]:
        key = self.receive(wire.FOLLOW, topic, encode(Follow(options, group, from_seq, seen)), peer=peer)
        self.rest()
        return key

    def tell(self, op: int, key: tuple[bytes, int]) -> None:
        """A message without an answer, which has no effect before `rest`."""
        head = wire.request_head(key[1], 0, 0, op, 0, b"", b"", 0)
        self.core.receive(key[0], wire.message_head(self.incarnation) + head)

    def fed(self, *keys: tuple[bytes, int]) -> None:
        for key in keys:
            self.tell(wire.FEED_ACK, key)
        self.rest()

    def unfollow(self, *keys: tuple[bytes, int]) -> None:
        for key in keys:
            self.tell(wire.UNFOLLOW, key)
        self.rest()

    def pages(self, key: tuple[bytes, int]) -> list[Page]:
        """All messages with the number; the answer to the FOLLOW comes first."""
        return [page_of(reply) for reply in self.heard.get(key, [])]

    def write(self, count: int = 1, topic: str = "t", node: str | None = None) -> None:
        body: dict[str, Any] = {"records": [{"data": i} for i in range(count)]}
        if node is not None:
            body["node"] = node
        reply = self.ask(wire.WRITE, topic, body)
        assert reply is not None and reply.status in (200, 201), reply

    def put(self, topic: str = "t", **config: Any) -> None:
        reply = self.ask(wire.PUT_TOPIC, topic, config)
        assert reply is not None and reply.status in (200, 201), bytes(reply.body)

    def drop(self, topic: str = "t") -> None:
        reply = self.ask(wire.DROP_TOPIC, topic)
        assert reply is not None and reply.status == 200, reply

    def session(self, wish: Any, peer: bytes = FRONT) -> tuple[bytes, int]:
        return self.receive(wire.SESSION, "", encode(wish), peer=peer)

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.rest()


# -- fronts -------------------------------------------------------------------------------------------------


class Client:
    """Takes what is written; `close` ends it after the call, as an event loop would."""

    def __init__(self, soon: Callable[[Callable[[], None]], None]) -> None:
        self.is_full = False
        self.writes: list[bytes] = []
        self.is_closed = False
        self.stream: Stream | None = None
        self._soon = soon
        self._told = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed, data
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True
        self._soon(self.leave)

    def abort(self) -> None:
        self.close()

    def leave(self) -> None:
        """The connection is closed by the client."""
        self.is_closed = True
        if self.stream is not None and not self._told:
            self._told = True
            self.stream.closed()

    def drain(self) -> None:
        self.is_full = False
        assert self.stream is not None
        self.stream.drained()

    @property
    def frames(self) -> list[Frame]:
        texts = b"".join(self.writes).split(b"\n\n")
        assert texts.pop() == b""
        return [parse_frame(text + b"\n\n") for text in texts]

    def named(self, event: str) -> list[Frame]:
        return [frame for frame in self.frames if frame.event == event]

    def seqs(self, topic: str = "t", *, is_shared: bool = False) -> list[int]:
        """Seqs of the topic in the order of arrival. Frames must follow each other, unless a group shares them."""
        found: list[int] = []
        at: int | None = None
        for frame in self.frames:
            if frame.event == "tombstone" and frame.data["topic"] == topic:
                at = None
            if frame.event == "record" and frame.data["topic"] == topic:
                assert is_shared or at is None or frame.data["from_seq"] == at, frame
                at = frame.data["to_seq"]
                found += frame.seqs
        return found

    @property
    def last(self) -> Frame:
        return self.frames[-1]


class Front:
    """A front's core and stream service; its outgoing messages wait in the rig."""

    def __init__(self, town: Town, name: bytes, settings: Settings) -> None:
        self.name = name
        self.town = town
        self.core = PendingRequests(town.shards)
        self.services = Services(self.core, settings, town.now_us, "test", 0)
        self.streams = start_streams(self.services, self.core, town.later, town.clock.wall_ms)

    def client(self) -> Client:
        return Client(self.town.soon)

    def stream(self, cursors: dict[str, int] | None = None, **options: Any) -> Client:
        """An open stream; see `prepare`."""
        return self.prepare(cursors, **options)()

    def prepare(
        self,
        cursors: dict[str, int] | None = None,
        *,
        patterns: list[str] | None = None,
        group: str | None = None,
        options: FeedOptions = PLAIN,
        heartbeat_ms: int = 15_000,
        wid: str = "",
    ) -> Callable[[], Client]:
        """A persistent session that belongs to a stream; calling the result opens that."""
        cursors = {"t": 0} if cursors is None and patterns is None else cursors or {}
        number = self.streams.next_number()
        wid = wid or f"wid-{self.name!r}-{number}"
        spec = SessionSpec(options, heartbeat_ms, list(cursors), patterns or [], group)
        desk = self.town.shard_for(wid).core.watch
        desk.sessions.create(CreateSession(wid, b"", spec, cursors), 0)
        session = desk.sessions.open(self.name, OpenSession(wid, b"", number), 0)
        assert isinstance(session, OpenedSession)
        desk.close()  # a stream that saves its position

        def begin() -> Client:
            client = self.client()
            client.stream = EventStream(
                self.streams.fanout, self.streams, wid, number, session, None, lambda: None
            )
            client.stream.opened(client)
            return client

        return begin

    def call(self, path: str = "", *, key: ApiKey | None = None, body: Any = None, **fields: Any) -> Call:
        text = b"" if body is None else json.dumps(body).encode()
        request = Request(b"GET", b"/", b"", self.town.now_us(), text, **fields)
        return Call(request, path.encode(), key, self.services)

    def open(self, wid: str, **fields: Any) -> Answers:
        """GET of a session, as the endpoint does it."""
        from topics.protocols.http.endpoints.watch import open_stream

        answers = Answers(self)
        call = self.call(wid, **fields)
        answers.request = call.request
        open_stream(call, answers)
        return answers

    def work(self, topic: str = "q", query: str = "node=n", *, consumer: str = "", **fields: Any) -> Answers:
        """GET of a queue's jobs, or of a consumer's records, as the endpoint does it."""
        from topics.protocols.http.endpoints import job_streams

        answers = Answers(self)
        call = self.call(topic, **fields)
        answers.request = call.request
        call.request.query, call.consumer = query.encode(), consumer.encode()
        (job_streams.stream if consumer else job_streams.work)(call, answers)
        return answers


class Answers(list[Response]):
    """A `respond` that keeps the answer, and opens the stream when the test says so."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self.front = front
        self.request: Request

    def __call__(self, response: Response) -> None:
        self.append(response)

    def begin(self) -> Client:
        (response,) = self
        assert response.status == 200 and response.stream is not None, bytes(response.body)
        client = self.front.client()
        client.stream = response.stream
        response.stream.opened(client)
        return client


class Town:
    """Shards and fronts. `up` and `down` hold messages until they are carried: (front, shard, parts)."""

    def __init__(
        self, shards: int = 1, fronts: int = 1, *, config: EngineConfig = QUICK, **settings: Any
    ) -> None:
        self.shards = shards
        self.clock = SimClock()
        self.config = config
        self.now = 0
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._soon: deque[Callable[[], None]] = deque()
        self.up: deque[tuple[Front, int, list[wire.Buffer]]] = deque()
        self.down: deque[tuple[Front, int, list[wire.Buffer]]] = deque()
        self.disks = [SimDisk(shard + 1) for shard in range(shards)]
        self.rigs: list[FeedRig | None] = [None] * shards
        self._incarnations = itertools.count(1)
        made = Settings(**settings)
        self.fronts = [Front(self, b"front-%d" % i, made) for i in range(fronts)]
        for shard in range(shards):
            self.start(shard)

    @property
    def front(self) -> Front:
        return self.fronts[0]

    @property
    def rig(self) -> FeedRig:
        rig = self.rigs[0]
        assert rig is not None
        return rig

    # -- start and stop ------------------------------------------------------------------------------------

    def start(self, shard: int = 0) -> FeedRig:
        rig = FeedRig(  # each on a disk of its own, with caps of its own
            self.config,
            incarnation=next(self._incarnations),
            clock=self.clock,
            disk=self.disks[shard],
        )
        rig._keep = lambda peer, parts: self._keep(shard, peer, parts)  # type: ignore[method-assign]
        self.rigs[shard] = rig
        for front in self.fronts:
            front.core.worker_up(shard, rig.incarnation)
        return rig

    def kill(self, shard: int = 0) -> None:
        """The process ends, and the fronts learn of it."""
        self.rigs[shard] = None
        self.disks[shard].kill()
        self.up = deque(wait for wait in self.up if wait[1] != shard)
        self.down = deque(wait for wait in self.down if wait[1] != shard)
        for front in self.fronts:
            front.core.worker_down(shard)

    def _keep(self, shard: int, peer: bytes, parts: list[wire.Buffer]) -> None:
        for front in self.fronts:
            if front.name == peer:
                self.down.append((front, shard, parts))
                return
        rig = self.rigs[shard]
        if rig is not None:
            FeedRig._keep(rig, peer, parts)

    # -- messages ------------------------------------------------------------------------------------------

    def collect(self) -> None:
        for front in self.fronts:
            self.up += [(front, shard, parts) for shard, parts in front.core.take_messages()]

    def carry_up(self) -> bool:
        """All messages of fronts reach the shards, which take a turn."""
        self.collect()
        waiting, self.up = self.up, deque()
        for front, shard, parts in waiting:
            rig = self.rigs[shard]
            if rig is not None:
                rig.core.receive(front.name, bytes(parts[0]), *parts[1:])
        for rig in self.rigs:
            if rig is not None:
                rig.rest()
        return bool(waiting)

    def carry_down(self) -> bool:
        """One message reaches a front."""
        if not self.down:
            return False
        front, shard, parts = self.down.popleft()
        front.core.receive(shard, bytes(parts[0]), *parts[1:])
        rig = self.rigs[shard]
        if rig is not None:
            taken = wire.window_update(sum(map(len, parts)))
            rig.core.receive(front.name, wire.message_head(rig.incarnation) + taken)
        return True

    def rest(self) -> None:
        """Everything that does not need time to pass."""
        for _ in range(10_000):
            while self._soon:
                self._soon.popleft()()
            if not self.carry_down() and not self.carry_up() and not self.down and not self._soon:
                return
        raise AssertionError("the shards and fronts always have more work to do")

    def write(self, count: int = 1, topic: str = "t", **fields: Any) -> None:
        self.shard_for(topic).write(count, topic, **fields)

    def shard_for(self, topic: str) -> FeedRig:
        rig = self.rigs[self.front.streams.fanout.shard_of(topic)]
        assert rig is not None
        return rig

    # -- time ----------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        return self.now

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + delay_us, next(self._order), action))

    def soon(self, action: Callable[[], None]) -> None:
        self._soon.append(action)

    def advance(self, us: int) -> None:
        """Let time pass; timers fire in order."""
        end = self.now + us
        self.rest()
        while self._timers and self._timers[0][0] <= end:
            at_us, _, action = heapq.heappop(self._timers)
            self._move_to(at_us)
            action()
            self.rest()
        self._move_to(end)
        self.rest()

    def _move_to(self, at_us: int) -> None:
        self.clock.advance(at_us // 1000 - self.now // 1000)
        self.now = at_us
