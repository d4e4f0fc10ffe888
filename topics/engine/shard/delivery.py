"""Delivery to waiting reads, waiting claims and forwards, topic by topic in the order of the scheduler.

    reads     long polls and standing reads: replies, and pages for watchers
    claims    waiting claims and job streams
    copies    batches of forwards

Publishing marks a topic (`waiters_due`, `claimable`, `claims_due`, `copies_due`). `deliver` schedules each marked topic, at most
once, and serves scheduled topics until the turn's budget is used up. A topic is served in slices, up to the state it had
when it was picked; later changes are delivered the next time.

Copies wait for a turn without replies, so that writers get their replies first, however many dests there are.

None of this delays a new read: it is answered in the turn that handles its request.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from topics.api.errors import TopicsError
from topics.api.limits import KIB
from topics.engine.commands.copies import Copier
from topics.engine.core.pressure import Measures
from topics.engine.core.priority import effective_priority
from topics.engine.core.scheduler import TOP, WAIT_MAX_MS, ScheduledEntry, Scheduler, band_of
from topics.engine.shard.consumers.admin import Consumers
from topics.engine.shard.consumers.claims import Claims
from topics.engine.shard.consumers.leases import Leases
from topics.engine.shard.forwards import Forwards
from topics.engine.shard.reads import Reads
from topics.engine.shard.state import ShardState, Waiter
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.topic.consumer import Consumer
from topics.engine.topic.log import Op, TopicLog

READS, BLOCKED, COPIES = 1, 2, 4

TURN_ROOM = 512 * KIB  # delivery budget of a turn: the next requests wait for it
ANSWER_ROOM = 64 * KIB  # the budget of a turn with replies: they wait for it
SLICE_ROOM = 128 * KIB  # per topic and slice
PICK_COST = 4 * KIB  # fixed cost of serving a topic


@dataclass(slots=True, eq=False)
class DueTopic:
    """A topic with something to deliver."""

    log: TopicLog
    kinds: int = 0  # READS: check all waiters; BLOCKED: check those whose reply could not be sent; COPIES
    claims_due: dict[int, Consumer] = field(
        default_factory=dict
    )  # consumers with claims to check, by identity
    entry: ScheduledEntry[DueTopic] | None = None
    is_coalescing: bool = False  # waits for more changes before it is scheduled
    is_picked: bool = False  # is being served
    waiters_left: int = 0  # waiters that previous slices have not reached
    new_kinds: int = 0  # kinds added since it was picked


class Delivery:
    def __init__(
        self,
        state: ShardState,
        reads: Reads,
        leases: Leases,
        claims: Claims,
        consumers: Consumers,
        forwards: Forwards,
    ) -> None:
        self.state = state
        self.reads = reads
        self.leases = leases
        self.claims = claims
        self.consumers = consumers
        self.forwards = forwards
        self.claimable: dict[int, TopicLog] = {}  # topics with new records and waiting claims
        self.copier: Copier | None = None  # None: copies wait
        self.measures = Measures()
        self.scheduler: Scheduler[DueTopic] = Scheduler(self._priority_of)
        self._due_topics: dict[int, DueTopic] = {}
        self._coalescing: list[tuple[int, int, DueTopic]] = []  # heap of (until when, tie breaker, topic)
        self._coalesce_count = 0
        self.paused: dict[int, TopicLog] = {}  # topics whose pushes wait until the pressure falls
        # Topics with only copies, picked in a turn with replies; since when they wait.
        self._deferred_copies: dict[DueTopic, int] = {}
        state.events.copies_readable.append(self._resume_copies)
        state.events.copies_awaited.append(self.expedite)
        state.events.published.append(self._published)

    def _published(self, log: TopicLog, op: Op) -> None:
        if log.consumers is not None and log.consumers.waiting and (op.head or op.count):
            self.claimable[log.id] = log  # new records, or fewer pending

    def _priority_of(self, due: DueTopic) -> float:
        log = due.log
        return effective_priority(log.view.config, log.last_read_ts or None, self.state.now_ms)

    # -- timing --------------------------------------------------------------------------------------------

    @property
    def has_new_work(self) -> bool:
        """Whether topics are marked, other than for copies, that are not scheduled yet."""
        return bool(self.reads.waiters_due or self.claimable or self.leases.claims_due)

    @property
    def has_copies(self) -> bool:
        """Whether copies wait for a turn without replies."""
        return self.copier is not None and bool(self._deferred_copies or self.forwards.copies_due)

    @property
    def deliver_at_ms(self) -> int | None:
        """When the next delivery is due, except for timeouts of claims and long polls, and except for copies.

        The worker decides when copies start, as replies are sent before them.
        """
        if self.has_new_work or self.scheduler.size:
            return self.state.clock.mono_ms
        return self._coalescing[0][0] if self._coalescing else None

    def is_due(self, now_ms: int) -> bool:
        """Whether `deliver` has anything to do."""
        if (
            self.has_new_work
            or self.has_copies
            or self.scheduler.size
            or (self.paused and not self.measures.defers)
        ):
            return True
        if self._coalescing and self._coalescing[0][0] <= now_ms:
            return True
        if self.reads.polls and self.reads.polls[0][0] <= now_ms:
            return True
        if self.claims.timers and self.claims.timers[0][0] <= now_ms:
            return True
        return bool(self.consumers.idle_timers) and self.consumers.idle_timers[0][0] <= now_ms

    @property
    def backlog(self) -> int:
        """Scheduled topics, without those whose copies wait for a turn without replies."""
        return self.scheduler.size

    def sending_resumed(self) -> None:
        """A front can take more replies: check blocked reads and claims again."""
        blocked, self.reads.blocked_waiters = self.reads.blocked_waiters, {}
        for log in blocked.values():
            self._enqueue(log, BLOCKED)
        self.leases.claims_due |= self.claims.blocked_claims
        self.claims.blocked_claims = {}

    def _resume_copies(self, log: TopicLog, uid: int) -> None:
        if self.copier is not None:
            self.copier.resume_copies(log, uid)

    def expedite(self, log: TopicLog) -> None:
        """A read waits for copies of this topic: schedule it in the top band."""
        due = self._enqueue(log, COPIES)
        if due.entry is not None and due.entry.band < TOP and not due.is_picked:
            self.scheduler.discard(due.entry)
            self._schedule(due, since_ms=self.state.clock.mono_ms - WAIT_MAX_MS)

    # -- scheduling ----------------------------------------------------------------------------------------

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
                # Only copies are lowered by a band. Reads and claims move the topic back to its own band.
                self.scheduler.discard(due.entry)
                self._schedule(due, since_ms=due.entry.since_ms, may_lower=False)
            return due
        if kind != READS or not self.measures.coalesce_ms or band_of(self._priority_of(due)) == TOP:
            self._schedule(due)
        elif not due.is_coalescing:
            due.is_coalescing = True
            until_ms = self.state.clock.mono_ms + self.measures.coalesce_ms
            self._coalesce_count += 1
            heapq.heappush(self._coalescing, (until_ms, self._coalesce_count, due))
        return due

    def _schedule(self, due: DueTopic, *, since_ms: int | None = None, may_lower: bool = True) -> None:
        due.is_coalescing = False
        lowered = may_lower and self.measures.defers and due.kinds == COPIES
        due.entry = self.scheduler.add(due, self.state.clock.mono_ms, lowered=lowered, since_ms=since_ms)

    def _schedule_new(self, *, with_copies: bool) -> None:
        state = self.state
        if self.reads.waiters_due:
            waiters_due, self.reads.waiters_due = self.reads.waiters_due, {}
            for log in waiters_due.values():
                self._enqueue(log, READS)
        if self.claimable:
            claimable, self.claimable = self.claimable, {}
            for log in claimable.values():
                self.claims.wake_waiting_claims(log)
        if self.leases.claims_due:
            claims_due, self.leases.claims_due = self.leases.claims_due, {}
            for key, (log, consumer) in claims_due.items():
                self._enqueue(log).claims_due[key] = consumer
        if with_copies and self.copier is not None:
            self._schedule_copies(self.copier)
        while self._coalescing and self._coalescing[0][0] <= state.clock.mono_ms:
            due = heapq.heappop(self._coalescing)[2]
            if due.is_coalescing:
                self._schedule(due)

    def _schedule_copies(self, copier: Copier) -> None:
        deferred, self._deferred_copies = self._deferred_copies, {}
        for due, since_ms in deferred.items():
            if due.entry is None and due.kinds:
                self._schedule(due, since_ms=since_ms)
        copies_due, self.forwards.copies_due = self.forwards.copies_due, {}
        self.forwards.copies_due_records = 0.0
        for log in copies_due.values():
            if copier.has_new_copies(log):
                self._enqueue(log, COPIES)

    # -- serving -------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Deliver one turn's share. In a turn with replies the budget is smaller, and copies are deferred."""
        if not self.measures.defers and self.paused:
            self._resume_pushes()
        self.claims.process_claim_timers()
        is_answering = bool(self.state.ready)
        self._schedule_new(with_copies=not is_answering)
        now_ms = self.state.clock.mono_ms
        room = ANSWER_ROOM if is_answering else TURN_ROOM
        while room > 0:
            entry = self.scheduler.pick(now_ms)
            if entry is None:
                break
            room -= self._serve_topic(entry, min(room, SLICE_ROOM), now_ms, with_copies=not is_answering)
        self.reads.end_polls()
        self.consumers.end_idle_consumers()

    def _resume_pushes(self) -> None:
        paused, self.paused = self.paused, {}
        for log in paused.values():
            self._enqueue(log, READS)
            if log.consumers is not None:
                self.claims.wake_waiting_claims(log)

    def _serve_topic(
        self, entry: ScheduledEntry[DueTopic], room: int, now_ms: int, *, with_copies: bool
    ) -> int:
        due = entry.item
        due.is_picked = True
        may_push = entry.band > 0 or not self.measures.defers
        is_mixed = due.kinds != COPIES or bool(due.claims_due)
        used = 0
        if due.kinds & (READS | BLOCKED):
            used += self._serve_reads(due, room, may_push=may_push)
        if due.claims_due and used < room:
            used += self._serve_claims(due, room - used, may_push=may_push)
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
        """Everything up to the state at the pick is delivered; schedule the topic again if it has changed since."""
        due.entry, due.is_picked = None, False
        if not due.new_kinds:
            del self._due_topics[due.log.id]
            return
        again, due.new_kinds = due.new_kinds, 0
        due.kinds = again
        self._schedule(due)

    def _defer_copies(self, entry: ScheduledEntry[DueTopic], used: int) -> None:
        """Defer copies to a turn without replies, keeping their age."""
        due = entry.item
        self.scheduler.done(entry, used)
        due.kinds |= due.new_kinds
        due.entry, due.is_picked, due.new_kinds = None, False, 0
        if due.kinds == COPIES:
            self._deferred_copies[due] = entry.since_ms
        else:
            self._schedule(due, since_ms=entry.since_ms)

    def _lower_band(self, entry: ScheduledEntry[DueTopic], used: int) -> None:
        """Schedule the topic's copies again, one band lower."""
        due = entry.item
        self.scheduler.done(entry, used)
        due.kinds |= due.new_kinds
        due.entry, due.is_picked, due.new_kinds = None, False, 0
        self._schedule(due, since_ms=entry.since_ms)

    def _serve_reads(self, due: DueTopic, room: int, *, may_push: bool) -> int:
        """Check waiting reads. Those not reached come first in the next slice."""
        state = self.state
        log = due.log
        is_changed = bool(due.kinds & READS)
        try:
            if log.stored is not None or log.deferred:
                state.touch(log)
        except UpkeepPending:
            state.upkeep.wait(log, lambda error: self._wake_waiters(log), name="frames")
            due.kinds, due.waiters_left = due.kinds & ~(READS | BLOCKED), 0
            return 0
        except (TopicsError, OSError):
            is_changed = True  # each waiter is handled again, where the error becomes its reply
        waiters, log.waiters = log.waiters, []
        count = min(due.waiters_left or len(waiters), len(waiters))
        used = looked = 0
        for waiter in waiters[:count]:
            assert isinstance(waiter, Waiter)
            if used >= room:
                break
            looked += 1
            if not is_changed and not waiter.is_blocked:
                log.waiters.append(waiter)  # it has seen the current state
            elif not may_push and waiter.command.standing and not log.view.dropped:
                log.waiters.append(waiter)
                self.paused[log.id] = log
            elif state.can_send(waiter.token):
                waiter.is_blocked = False
                used += self.reads.serve_waiter(waiter)
            else:
                waiter.is_blocked = True
                log.waiters.append(waiter)
                self.reads.blocked_waiters[log.id] = log
        log.waiters = waiters[looked:] + log.waiters
        due.waiters_left = count - looked
        if not due.waiters_left:
            due.kinds &= ~(READS | BLOCKED)
        return used

    def _wake_waiters(self, log: TopicLog) -> None:
        self.reads.waiters_due[log.id] = log

    def _serve_claims(self, due: DueTopic, room: int, *, may_push: bool) -> int:
        used = 0
        while due.claims_due and used < room:
            consumer = due.claims_due.pop(next(iter(due.claims_due)))
            used += self.claims.serve_consumer(due.log, consumer, room - used, may_push=may_push)
            if not may_push and consumer.streams:
                self.paused[due.log.id] = due.log
        return used

    def _serve_copies(self, due: DueTopic, room: int) -> int:
        due.kinds &= ~COPIES
        if self.copier is None:
            return 0
        used = self.copier.send_copies(due.log, room)
        if self.forwards.copies_due.pop(due.log.id, None) is not None:
            due.kinds |= COPIES
        return used
