"""What leaves a shard without having been asked for at that moment, topic by topic in the order of the scheduler.

    frames    reads that stand or wait: pages for watchers, answers to long polls
    jobs      claims that stand or wait: refills of job streams, answers to claims
    copies    batches of forwards

A publication puts its topic among the news (`dirty`, `fed`, `claims_due`, `flowing`); `deliver` lists it with what it has to
deliver, at most once, and serves listed topics until the room of a turn is used up. A topic is served up to the state that
it had when it was picked, in slices: what comes meanwhile is delivered when its turn comes again.

Copies wait for a turn without answers: whoever has written hears of it first, however many dests there are.

Nothing of this keeps a record from being read: whoever polls is answered by the same turn that its request is handled in.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol

from topics.api.config import EngineConfig
from topics.api.errors import TopicsError
from topics.api.limits import KIB
from topics.engine.core.clock import EngineClock
from topics.engine.core.priority import effective_priority
from topics.engine.reading.reader import Reader
from topics.engine.shard.pressure import Measures
from topics.engine.shard.scheduler import TOP, WAIT_MAX_MS, ScheduledEntry, Scheduler, band_of
from topics.engine.shard.staging import Waiter
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.shard.transaction_commit import Committing
from topics.engine.topic.consumer import Consumer
from topics.engine.topic.log import TopicLog

FRAMES, UNSENT, COPIES = 1, 2, 4

TURN_ROOM = 512 * KIB  # what one turn delivers: the next requests wait for it
ANSWER_ROOM = 64 * KIB  # of a turn that has answers: they wait for it
SLICE_ROOM = 128 * KIB  # of one topic at a time
PICK_COST = 4 * KIB  # of serving a topic, beside what it delivers


class Copier(Protocol):
    """Who sends the copies of this shard's topics."""

    def has_new_copies(self, log: TopicLog) -> bool:
        """Whether a topic with something new has copies to send."""

    def send_copies(self, log: TopicLog, room: int) -> int:
        """Send copies of it; returns about how many bytes that took. If there is more, it is in `flowing` again."""

    def resume_copies(self, log: TopicLog, uid: int) -> None:
        """What could not be read yet for a rule can be now: the topic is in `flowing` again."""


@dataclass(slots=True, eq=False)
class DueTopic:
    """What one topic has to deliver."""

    log: TopicLog
    kinds: int = 0  # FRAMES: its waiters look again; UNSENT: those of them that could not be answered; COPIES
    claims_due: dict[int, Consumer] = field(default_factory=dict)  # whose claims look again, by identity
    entry: ScheduledEntry[DueTopic] | None = None
    is_coalescing: bool = False  # it waits for more before it is listed
    is_picked: bool = False  # it is being served
    waiters_left: int = 0  # waiters that the slices so far have not come to
    new_kinds: int = 0  # kinds that have come since it was picked


class Delivery(Committing):
    def __init__(self, config: EngineConfig, clock: EngineClock, reader: Reader, boot_id: str) -> None:
        super().__init__(config, clock, reader, boot_id)
        self.copier: Copier | None = None  # None: nobody sends copies, they wait
        self.measures = Measures()
        self.scheduler: Scheduler[DueTopic] = Scheduler(self._priority_of)
        self._due_topics: dict[int, DueTopic] = {}
        self._coalescing: list[tuple[int, int, DueTopic]] = []  # until when, a number, what
        self._coalesce_count = 0
        self.paused: dict[int, TopicLog] = {}  # topics whose pushes wait until there is less pressure
        self._deferred_copies: dict[
            DueTopic, int
        ] = {}  # whose turn came among answers, with nothing but copies; since when they wait

    def _priority_of(self, due: DueTopic) -> float:
        log = due.log
        return effective_priority(log.view.config, log.last_read_ts or None, self.now_ms)

    # -- when ----------------------------------------------------------------------------------------------

    @property
    def has_new_work(self) -> bool:
        """Whether something other than copies was published, or asked for, that is not listed yet."""
        return bool(self.waiters_due or self.claimable or self.claims_due)

    @property
    def has_copies(self) -> bool:
        """Whether a turn without answers is wanted for copies."""
        return bool(self._deferred_copies or self.copies_due) and self.copier is not None

    @property
    def deliver_at_ms(self) -> int | None:
        """When something is to be delivered without a request, other than what claims and long polls wait for. When copies
        are begun is up to whoever sends the answers before them.
        """
        if self.has_new_work or self.scheduler:
            return self.clock.mono_ms
        return self._coalescing[0][0] if self._coalescing else None

    def is_due(self, now_ms: int) -> bool:
        """Whether `deliver` has anything to do."""
        if (
            self.has_new_work
            or self.has_copies
            or self.scheduler
            or (self.paused and not self.measures.defers)
        ):
            return True
        if self._coalescing and self._coalescing[0][0] <= now_ms:
            return True
        if self.waiter_heap and self.waiter_heap[0][0] <= now_ms:
            return True
        claims_due_ms = self.claims_due_ms
        return claims_due_ms is not None and claims_due_ms <= now_ms

    @property
    def backlog(self) -> int:
        """Topics that wait for their turn, without those that wait for the next one without answers."""
        return len(self.scheduler)

    def sending_resumed(self) -> None:
        """A front has taken of what it was sent: those who could not be answered look again."""
        blocked, self.blocked_waiters = self.blocked_waiters, {}
        for log in blocked.values():
            self._enqueue(log, UNSENT)
        self.claims_due |= self.blocked_claims
        self.blocked_claims = {}

    def _copies_ready(self, log: TopicLog, uid: int, error: TopicsError | None) -> None:
        if error is None and self.copier is not None:
            self.copier.resume_copies(log, uid)

    def expedite(self, log: TopicLog) -> None:
        """Somebody waits for copies of this topic: it is served as if it had waited for long."""
        due = self._enqueue(log, COPIES)
        if due.entry is not None and due.entry.band < TOP and not due.is_picked:
            self.scheduler.discard(due.entry)
            self._schedule(due, since_ms=self.clock.mono_ms - WAIT_MAX_MS)

    # -- listing -------------------------------------------------------------------------------------------

    def _enqueue(self, log: TopicLog, kind: int = 0) -> DueTopic:
        due = self._due_topics.get(log.id)
        if due is None:
            due = self._due_topics[log.id] = DueTopic(log)
        elif due.is_picked:
            due.new_kinds |= kind
            return due
        due.kinds |= kind
        if due.entry is not None:
            if due.entry.is_lowered and kind != COPIES:
                # Copies alone wait one band lower. What is pushed does not, nor does it count as of the lowest band.
                self.scheduler.discard(due.entry)
                self._schedule(due, since_ms=due.entry.since_ms, may_lower=False)
            return due
        if kind != FRAMES or not self.measures.coalesce_ms or band_of(self._priority_of(due)) == TOP:
            self._schedule(due)
        elif not due.is_coalescing:
            due.is_coalescing = True
            until_ms = self.clock.mono_ms + self.measures.coalesce_ms
            self._coalesce_count += 1
            heapq.heappush(self._coalescing, (until_ms, self._coalesce_count, due))
        return due

    def _schedule(self, due: DueTopic, *, since_ms: int | None = None, may_lower: bool = True) -> None:
        due.is_coalescing = False
        lowered = may_lower and self.measures.defers and due.kinds == COPIES
        due.entry = self.scheduler.add(due, self.clock.mono_ms, lowered=lowered, since_ms=since_ms)

    def _schedule_new(self, *, with_copies: bool) -> None:
        if self.waiters_due:
            waiters_due, self.waiters_due = self.waiters_due, {}
            for log in waiters_due.values():
                self._enqueue(log, FRAMES)
        if self.claimable:
            claimable, self.claimable = self.claimable, {}
            for log in claimable.values():
                self.wake_waiting_claims(log)
        if self.claims_due:
            claims_due, self.claims_due = self.claims_due, {}
            for key, (log, consumer) in claims_due.items():
                self._enqueue(log).claims_due[key] = consumer
        if with_copies and self.copier is not None:
            self._schedule_copies(self.copier)
        while self._coalescing and self._coalescing[0][0] <= self.clock.mono_ms:
            due = heapq.heappop(self._coalescing)[2]
            if due.is_coalescing:
                self._schedule(due)

    def _schedule_copies(self, copier: Copier) -> None:
        deferred, self._deferred_copies = self._deferred_copies, {}
        for due, since_ms in deferred.items():
            if due.entry is None and due.kinds:
                self._schedule(due, since_ms=since_ms)
        copies_due, self.copies_due = self.copies_due, {}
        self.copies_due_records = 0.0
        for log in copies_due.values():
            if copier.has_new_copies(log):
                self._enqueue(log, COPIES)

    # -- serving -------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """One turn's share of what is to be delivered. After answers a turn without any is wanted for the rest."""
        if not self.measures.defers and self.paused:
            self._resume_pushes()
        self.process_claim_timers()
        is_answering = bool(self.ready)
        self._schedule_new(with_copies=not is_answering)
        now_ms = self.clock.mono_ms
        room = ANSWER_ROOM if is_answering else TURN_ROOM
        while room > 0:
            entry = self.scheduler.pick(now_ms)
            if entry is None:
                break
            room -= self._serve_topic(entry, min(room, SLICE_ROOM), now_ms, with_copies=not is_answering)
        self.end_polls()
        self.end_idle_consumers()

    def _resume_pushes(self) -> None:
        paused, self.paused = self.paused, {}
        for log in paused.values():
            self._enqueue(log, FRAMES)
            if log.consumers is not None:
                self.wake_waiting_claims(log)

    def _serve_topic(
        self, entry: ScheduledEntry[DueTopic], room: int, now_ms: int, *, with_copies: bool
    ) -> int:
        due = entry.item
        due.is_picked = True
        may_push = entry.band > 0 or not self.measures.defers
        is_mixed = due.kinds != COPIES or bool(due.claims_due)
        used = 0
        if due.kinds & (FRAMES | UNSENT):
            used += self._serve_frames(due, room, may_push=may_push)
        if due.claims_due and used < room:
            used += self._serve_jobs(due, room - used, may_push=may_push)
        if due.kinds == COPIES and not due.claims_due:
            if not with_copies:
                self._defer_copies(entry, used)
                return used
            if is_mixed and self.measures.defers:
                self._lower_band(entry, used + PICK_COST)
                return used + PICK_COST
            if used < room:
                used += self._serve_copies(due, room - used)
        used += PICK_COST
        if due.kinds or due.claims_due:
            self.scheduler.slice_done(entry, used, now_ms)
        else:
            self.scheduler.done(entry, used)
            self._finish(due)
        return used

    def _finish(self, due: DueTopic) -> None:
        """Up to where it was when it was picked, all is delivered."""
        due.entry, due.is_picked = None, False
        if not due.new_kinds:
            del self._due_topics[due.log.id]
            return
        again, due.new_kinds = due.new_kinds, 0
        due.kinds = again
        self._schedule(due)

    def _defer_copies(self, entry: ScheduledEntry[DueTopic], used: int) -> None:
        """They wait for a turn without answers, and lose nothing of their age by it."""
        due = entry.item
        self.scheduler.done(entry, used)
        due.kinds |= due.new_kinds
        due.entry, due.is_picked, due.new_kinds = None, False, 0
        if due.kinds == COPIES:
            self._deferred_copies[due] = entry.since_ms
        else:
            self._schedule(due, since_ms=entry.since_ms)

    def _lower_band(self, entry: ScheduledEntry[DueTopic], used: int) -> None:
        """Its copies wait one band lower."""
        due = entry.item
        self.scheduler.done(entry, used)
        due.kinds |= due.new_kinds
        due.entry, due.is_picked, due.new_kinds = None, False, 0
        self._schedule(due, since_ms=entry.since_ms)

    def _serve_frames(self, due: DueTopic, room: int, *, may_push: bool) -> int:
        """Let reads that stand or wait look again. Those that were not looked at come first in the next slice."""
        log = due.log
        is_changed = bool(due.kinds & FRAMES)
        try:
            if log.stored is not None or log.deferred:
                self._touch(log)
        except UpkeepPending:
            self.upkeep.wait(log, lambda error: self._wake_waiters(log), name="frames")
            due.kinds, due.waiters_left = due.kinds & ~(FRAMES | UNSENT), 0
            return 0
        except (TopicsError, OSError):
            is_changed = True  # each of them asks again by itself, where the error becomes its answer
        waiters, log.waiters = log.waiters, []
        count = min(due.waiters_left or len(waiters), len(waiters))
        used = looked = 0
        for waiter in waiters[:count]:
            assert isinstance(waiter, Waiter)
            if used >= room:
                break
            looked += 1
            if not is_changed and not waiter.is_blocked:
                log.waiters.append(waiter)  # it has seen the topic as it is
            elif not may_push and waiter.command.standing and not log.view.dropped:
                log.waiters.append(waiter)
                self.paused[log.id] = log
            elif self.can_send(waiter.token):
                waiter.is_blocked = False
                used += self.serve_waiter(waiter)
            else:
                waiter.is_blocked = True
                log.waiters.append(waiter)
                self.blocked_waiters[log.id] = log
        log.waiters = waiters[looked:] + log.waiters
        due.waiters_left = count - looked
        if not due.waiters_left:
            due.kinds &= ~(FRAMES | UNSENT)
        return used

    def _wake_waiters(self, log: TopicLog) -> None:
        self.waiters_due[log.id] = log

    def _serve_jobs(self, due: DueTopic, room: int, *, may_push: bool) -> int:
        used = 0
        while due.claims_due and used < room:
            consumer = due.claims_due.pop(next(iter(due.claims_due)))
            used += self.serve_consumer(due.log, consumer, room - used, may_push=may_push)
            if not may_push and consumer.streams:
                self.paused[due.log.id] = due.log
        return used

    def _serve_copies(self, due: DueTopic, room: int) -> int:
        due.kinds &= ~COPIES
        if self.copier is None:
            return 0
        used = self.copier.send_copies(due.log, room)
        if self.copies_due.pop(due.log.id, None) is not None:
            due.kinds |= COPIES
        return used
