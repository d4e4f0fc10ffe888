"""Reads of a topic that gets copies wait until it has what its sources had published when the read came.

    read ──▶ is a round running? ── no ──▶ begin one ──▶ CATCH_UP to the shards of the sources ──▶ all answered ──▶ read
                     │ yes
                     └──▶ wait for the next round, which begins when this one ends, and serves all who wait by then

A round that began before a read came says nothing about it: the record may have been written in between. So a topic has
one round that runs and one that gathers, and however many read it, no more. Where the sources lie in this shard, and
nothing is owed, a round ends as it begins.

A read waits for WAIT_US at the most; then it is served all the same, and its answer says so. So it is when the shard of a
source is down. A dest that is full, or read-only, is as far as it can be: nobody waits for that.

All of it is messages: no worker ever stands still for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from topics.engine.commands import forwards as fwd
from topics.engine.core.placement import shard_of
from topics.engine.runtime.engine import Engine
from topics.engine.topic.flows import Inflow
from topics.link import wire
from workers.forward import messages as forward_messages
from workers.forward.forwarder import Forwarder
from workers.forward.messages import CatchUp
from workers.peers.links import PeerLinks

WAIT_US = 1_000_000
HELD_MAX = 10_000  # reads; the next one is served at once, and says that it has not waited
ASKS_MAX = 256  # on their way to one shard; copies, letters and steps need room between the workers, too

# Set here, and never sent: the read was served before the topic had caught up.
LATE = 512

READS = frozenset(
    (
        wire.DIFF, wire.DIFF_FRAMES, wire.GET_TOPIC, wire.WATCH_READ, wire.CLAIM, wire.LAST_BY_TAG,
        wire.COUNT_BY_TAG, wire.LIST_DELETED, wire.OPEN_JOBS, wire.FORWARD_TOTALS,
    )
)  # fmt: skip

_PERFORMANCE = b'"performance":{'
_SAID = b'"performance":{"catch_up_timed_out":true,'
_HEADER = b"Topics-Catch-Up-Timed-Out: true\r\n"


@dataclass(slots=True, eq=False)
class HeldRead:
    """A read that waits; `go` begins it."""

    peer: bytes
    request: wire.Request
    go: Callable[[], None]


@dataclass(slots=True, eq=False)
class CatchUpRound:
    until_us: int
    held: list[HeldRead] = field(default_factory=list)
    left: int = 0  # shards that have not answered
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
    """Of a round, to the shard of a source."""

    course: TopicCatchUp
    round: CatchUpRound
    uids: list[int]


class CatchUps:
    def __init__(
        self,
        engine: Engine,
        links: PeerLinks,
        forwarder: Forwarder,
        *,
        shards: int,
        now_us: Callable[[], int],
    ) -> None:
        self._published = engine.shard.published
        self._own = engine.config.shard
        self._links = links
        self._forwarder = forwarder
        self._shards = shards
        self._now_us = now_us
        self._courses: dict[str, TopicCatchUp] = {}
        self._rounds: deque[CatchUpRound] = deque()  # in the order of their ends
        self._sources: dict[int, int | None] = {}  # the shard of a rule's source; None: any may have some
        self._held = 0
        self._on_way = [0] * shards  # questions, by shard
        self._lines: list[deque[CatchUpQuery]] = [
            deque() for _ in range(shards)
        ]  # those that wait for an answer to another
        self.rounds = 0
        self.late = 0  # reads that were served before their time

    # -- where sources are ---------------------------------------------------------------------------------

    def learn_source(self, forward: fwd.Forward) -> None:
        """A source has spoken. Until it does, and for a pattern, every shard is asked."""
        if forward.uid not in self._sources and self._takes(forward):
            self._sources[forward.uid] = (
                None if forward.is_pattern else shard_of(forward.source, self._shards)
            )

    def _takes(self, forward: fwd.Forward) -> bool:
        """Whether such a rule is known here; its last copies may come when it has ended."""
        log = self._published.get(forward.dest)
        return log is not None and log.inflows is not None and forward.uid in log.inflows

    def forget(self, uid: int) -> None:
        self._sources.pop(uid, None)

    def _by_shard(self, inflows: dict[int, Inflow]) -> dict[int, list[int]]:
        by_shard: dict[int, list[int]] = {}
        for uid in inflows:
            shard = self._sources.get(uid)
            for number in range(self._shards) if shard is None else (shard,):
                by_shard.setdefault(number, []).append(uid)
        return by_shard

    # -- reads ---------------------------------------------------------------------------------------------

    def hold(self, topic: str, peer: bytes, request: wire.Request, go: Callable[[], None]) -> bool:
        """Whether a read has to wait. If so, `go` is called when it may begin."""
        log = self._published.get(topic)
        if log is None or not log.inflows:
            return False
        course = self._courses.get(topic)
        if course is None:
            running = self._new_round()
            course = self._courses[topic] = TopicCatchUp(topic, running)
            self._begin(course)
            if running.is_over and not running.is_late:
                return False
            held_in = running
        else:
            if course.gathering is None:
                course.gathering = self._new_round()
            held_in = course.gathering
        if held_in.is_over or self._held >= HELD_MAX:
            self._answer_late(request)
            return False
        held_in.held.append(HeldRead(peer, request, go))
        self._held += 1
        return True

    def withdraw(self, peer: bytes, number: int | None = None) -> bool:
        """Whoever asked is gone; without a number, all of that front. Whether there was such a read."""
        found = False
        if not self._held:
            return found
        for course in self._courses.values():
            for waiting in (course.running, course.gathering):
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

    def _begin(self, course: TopicCatchUp) -> None:
        log = self._published.get(course.topic)
        running = course.running
        by_shard = self._by_shard(log.inflows) if log is not None and log.inflows else {}
        self.rounds += 1
        running.left = 1
        for shard, uids in by_shard.items():
            running.left += 1
            if shard == self._own:
                self._forwarder.chase(uids, lambda behind: self._heard(course, running, is_late=bool(behind)))
            else:
                self._lines[shard].append(CatchUpQuery(course, running, uids))
                self._ask_next(shard)
        self._heard(course, running, is_late=False)

    def _ask_next(self, shard: int) -> None:
        line = self._lines[shard]
        while line and self._on_way[shard] < ASKS_MAX:
            question = line.popleft()
            if question.round.is_over:
                continue
            body = forward_messages.encode(CatchUp(question.uids))
            self._on_way[shard] += 1
            if not self._links.ask(shard, wire.CATCH_UP, b"", body, partial(self._answered, shard, question)):
                self._on_way[shard] -= 1
                self._heard(question.course, question.round, is_late=True)

    def _answered(self, shard: int, question: CatchUpQuery, reply: wire.Reply | None) -> None:
        """A source that could not ask this shard has not waited: it may not have heard yet that this one is up."""
        self._on_way[shard] -= 1
        is_late = reply is None or reply.status != 200
        if reply is not None and not is_late:
            is_late = bool(forward_messages.read_caught_up(reply.body).behind)
        self._heard(question.course, question.round, is_late=is_late)
        self._ask_next(shard)

    def _heard(self, course: TopicCatchUp, running: CatchUpRound, *, is_late: bool) -> None:
        running.is_late = running.is_late or is_late
        running.left -= 1
        if not running.left and not running.is_over:
            self._end(course)

    def _end(self, course: TopicCatchUp) -> None:
        over, course.running.is_over = course.running, True
        held, over.held = over.held, []
        self._held -= len(held)
        for read in held:
            if over.is_late:
                self._answer_late(read.request)
            read.go()
        if course.gathering is not None:
            course.running, course.gathering = course.gathering, None
            self._begin(course)
        else:
            del self._courses[course.topic]

    def _answer_late(self, request: wire.Request) -> None:
        request.flags |= LATE
        self.late += 1

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        return self._rounds[0].until_us if self._rounds else None

    def tick(self) -> None:
        """Let go of whoever has waited for too long."""
        rounds = self._rounds
        while rounds and rounds[0].is_over:
            rounds.popleft()
        if not rounds or rounds[0].until_us > self._now_us():
            return
        now_us = self._now_us()
        for course in list(self._courses.values()):
            if course.running.until_us <= now_us:
                course.running.is_late = True
                self._end(course)


def mark_late(rendered: tuple[int, int, bytes, wire.Buffer]) -> tuple[int, int, bytes, wire.Buffer]:
    """An answer to a read that was late, which says so."""
    status, kind, head, body = rendered
    if kind == wire.FRAMES:
        return status, kind, head + _HEADER, body
    if kind != wire.JSON:
        return rendered
    # `performance` is the last member of every answer, and has figures only: no record's text comes after it.
    before, found, after = bytes(body).rpartition(_PERFORMANCE)
    return (status, kind, head, before + _SAID + after) if found else rendered
