"""Read-your-writes for dests of routers: a read waits until the dest has what its sources had published when it arrived.

    read ──▶ is a round running? ── no ──▶ begin one ──▶ CATCH_UP to the shards of the sources ──▶ all replied ──▶ read
                     │ yes
                     └──▶ wait for the next round, which begins when this one ends, and serves all waiting reads

A round that began before a read arrived is not enough: a record may have been written in between. So a topic has one
running round and one gathering round, however many reads there are. If all sources are on this shard and nothing is
pending, a round ends at once.

A read waits for WAIT_US at most; then it is served anyway, and its reply says so. The same happens when the shard of a
source is down. A dest that is full or read-only is as far as it can be, so reads do not wait.

Workers only exchange messages; none ever blocks on another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from topics.engine.commands import forwards as fwd
from topics.engine.core.placement import shard_of
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from workers.forward import messages as forward_messages
from workers.forward.forwarder import Forwarder
from workers.forward.messages import CatchUp
from workers.peers.links import PeerLinks

WAIT_US = 1_000_000
HELD_MAX = 10_000  # reads; further ones are served at once, as if they had timed out
QUERIES_MAX = 256  # in flight to one shard; copies, dead letters and steps need room, too

READS = frozenset(
    (
        wire.DIFF, wire.GET_TOPIC, wire.WATCH_READ, wire.CLAIM, wire.LAST_BY_TAG,
        wire.COUNT_BY_TAG, wire.LIST_DELETED, wire.OPEN_JOBS, wire.FORWARD_TOTALS,
    )
)  # fmt: skip


@dataclass(slots=True, eq=False)
class HeldRead:
    """A waiting read; `go` begins it."""

    peer: bytes
    request: wire.Request
    go: Callable[[], None]


@dataclass(slots=True, eq=False)
class CatchUpRound:
    until_us: int
    held: list[HeldRead] = field(default_factory=list)
    left: int = 0  # shards that have not replied
    is_late: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class TopicCatchUp:
    """The rounds of one topic."""

    topic: str
    running: CatchUpRound
    gathering: CatchUpRound | None = None


@dataclass(slots=True, eq=False)
class CatchUpQuery:
    """A request of a round to the shard of a source."""

    topic_state: TopicCatchUp
    round: CatchUpRound
    uids: list[int]


class CatchUps:
    def __init__(
        self,
        engine: ShardEngine,
        links: PeerLinks,
        forwarder: Forwarder,
        *,
        shards: int,
        now_us: Callable[[], int],
    ) -> None:
        self._stats = engine.stats
        self._own = engine.stats.shard
        self._links = links
        self._forwarder = forwarder
        self._shards = shards
        self._now_us = now_us
        self._topics: dict[str, TopicCatchUp] = {}
        self._rounds: deque[CatchUpRound] = deque()  # by deadline
        self._sources: dict[int, int | None] = {}  # the shard of a rule's source; None: every shard
        self._held = 0
        self._in_flight = [0] * shards  # queries by shard
        self._queues: list[deque[CatchUpQuery]] = [deque() for _ in range(shards)]  # waiting for room
        self.rounds = 0
        self.late = 0  # reads served before their topic had caught up

    # -- sources -------------------------------------------------------------------------------------------

    def learn_source(self, forward: fwd.Forward) -> None:
        """Copies of a rule have arrived, so its source is known. Until then, and for patterns, every shard is queried."""
        if forward.uid not in self._sources and self._has_rule(forward):
            self._sources[forward.uid] = (
                None if forward.is_pattern else shard_of(forward.source, self._shards)
            )

    def _has_rule(self, forward: fwd.Forward) -> bool:
        """Whether this shard has such a rule: its last copies may arrive after it was deleted."""
        return forward.uid in self._stats.inflows(forward.dest)

    def forget(self, uid: int) -> None:
        self._sources.pop(uid, None)

    def _by_shard(self, inflows: Iterable[int]) -> dict[int, list[int]]:
        by_shard: dict[int, list[int]] = {}
        for uid in inflows:
            shard = self._sources.get(uid)
            for number in range(self._shards) if shard is None else (shard,):
                by_shard.setdefault(number, []).append(uid)
        return by_shard

    # -- reads ---------------------------------------------------------------------------------------------

    def hold(self, topic: str, peer: bytes, request: wire.Request, go: Callable[[], None]) -> bool:
        """Whether a read must wait; if so, `go` is called when it may begin."""
        if not self._stats.inflows(topic):
            return False
        topic_state = self._topics.get(topic)
        if topic_state is None:
            running = self._new_round()
            topic_state = self._topics[topic] = TopicCatchUp(topic, running)
            self._begin(topic_state)
            if running.is_over and not running.is_late:
                return False
            held_in = running
        else:
            if topic_state.gathering is None:
                topic_state.gathering = self._new_round()
            held_in = topic_state.gathering
        if held_in.is_over or self._held >= HELD_MAX:
            self._mark_late(request)
            return False
        held_in.held.append(HeldRead(peer, request, go))
        self._held += 1
        return True

    def withdraw(self, peer: bytes, number: int | None = None) -> bool:
        """Drop a waiting read of a front, or all of them without a number; returns whether there was one."""
        found = False
        if not self._held:
            return found
        for topic_state in self._topics.values():
            for waiting in (topic_state.running, topic_state.gathering):
                if waiting is None:
                    continue
                kept = [
                    held
                    for held in waiting.held
                    if held.peer != peer or number not in (None, held.request.id)
                ]
                found = found or len(kept) < len(waiting.held)
                self._held -= len(waiting.held) - len(kept)
                waiting.held = kept
        return found

    # -- rounds --------------------------------------------------------------------------------------------

    def _new_round(self) -> CatchUpRound:
        made = CatchUpRound(self._now_us() + WAIT_US)
        self._rounds.append(made)
        return made

    def _begin(self, topic_state: TopicCatchUp) -> None:
        running = topic_state.running
        by_shard = self._by_shard(self._stats.inflows(topic_state.topic))
        self.rounds += 1
        running.left = 1
        for shard, uids in by_shard.items():
            running.left += 1
            if shard == self._own:
                self._forwarder.catch_up(
                    uids, lambda behind: self._part_done(topic_state, running, is_late=bool(behind))
                )
            else:
                self._queues[shard].append(CatchUpQuery(topic_state, running, uids))
                self._send_next(shard)
        self._part_done(topic_state, running, is_late=False)

    def _send_next(self, shard: int) -> None:
        queue = self._queues[shard]
        while queue and self._in_flight[shard] < QUERIES_MAX:
            query = queue.popleft()
            if query.round.is_over:
                continue
            body = forward_messages.encode(CatchUp(query.uids))
            self._in_flight[shard] += 1
            if not self._links.ask(shard, wire.CATCH_UP, b"", body, partial(self._on_reply, shard, query)):
                self._in_flight[shard] -= 1
                self._part_done(query.topic_state, query.round, is_late=True)

    def _on_reply(self, shard: int, query: CatchUpQuery, reply: wire.Reply | None) -> None:
        """A source that reports rules as behind could not reach this shard; it may not know yet that it is up."""
        self._in_flight[shard] -= 1
        is_late = reply is None or reply.code != wire.OK
        if reply is not None and not is_late:
            is_late = bool(forward_messages.read_caught_up(reply.body).behind)
        self._part_done(query.topic_state, query.round, is_late=is_late)
        self._send_next(shard)

    def _part_done(self, topic_state: TopicCatchUp, running: CatchUpRound, *, is_late: bool) -> None:
        running.is_late = running.is_late or is_late
        running.left -= 1
        if not running.left and not running.is_over:
            self._end(topic_state)

    def _end(self, topic_state: TopicCatchUp) -> None:
        over, topic_state.running.is_over = topic_state.running, True
        held, over.held = over.held, []
        self._held -= len(held)
        for read in held:
            if over.is_late:
                self._mark_late(read.request)
            read.go()
        if topic_state.gathering is not None:
            topic_state.running, topic_state.gathering = topic_state.gathering, None
            self._begin(topic_state)
        else:
            del self._topics[topic_state.topic]

    def _mark_late(self, request: wire.Request) -> None:
        request.flags |= wire.LATE
        self.late += 1

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        return self._rounds[0].until_us if self._rounds else None

    def tick(self) -> None:
        """End rounds that have timed out."""
        rounds = self._rounds
        while rounds and rounds[0].is_over:
            rounds.popleft()
        if not rounds or rounds[0].until_us > self._now_us():
            return
        now_us = self._now_us()
        for topic_state in list(self._topics.values()):
            if topic_state.running.until_us <= now_us:
                topic_state.running.is_late = True
                self._end(topic_state)
