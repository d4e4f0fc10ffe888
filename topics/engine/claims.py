"""Claims and what becomes of them: leases handed out, settled, given back; claims that wait.

A claim is decided on staged state and hands out what is published. Its answer waits for no sync: what a crash could undo of
it is the lease, and then the record is handed out again. An ack waits as a delete of its topic's class does.

Claims that find nothing may be parked. They are looked at again when records are published, settled or given back, when
time makes something ready, and, where claims are gathered (`claim_jitter_ms`), when their window closes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias, cast

import numpy as np

from topics.engine import commands as cmd
from topics.engine import consumer_commands as con
from topics.engine import frames, limits
from topics.engine.config import ConsumerConfig, EngineConfig, TopicConfig
from topics.engine.consumer import (
    ACKED,
    CLAIMED,
    EXTENDED,
    GIVEN_UP,
    ID_MASK,
    LEASED,
    MOVE,
    MOVING,
    RETURNED,
    Consumer,
    Event,
    TopicConsumers,
)
from topics.engine.engine_clock import EngineClock
from topics.engine.errors import (
    ConsumerNotFound,
    InvalidRequest,
    NotAQueue,
    ShardReadOnly,
    Throttled,
    TopicNotFound,
    TopicsError,
)
from topics.engine.index import Chunk
from topics.engine.page import Page, Tombstone
from topics.engine.queries import Queries
from topics.engine.reader import DamagedSegment, Picked, Reader
from topics.engine.staging import CONTROL_BYTES, as_ranges
from topics.engine.topic_log import Op, Range, TopicLog
from topics.engine.writes import Writes

SEQ_BYTES = 24  # at most, of one record in an event
LAG_MS = 1000  # how old the count of a filtered backlog may be in an answer to a claim
AGAIN_MS = 50  # until a claim whose answer cannot be sent yet is looked at again
WAKE_COST = 4096  # of an answer, beside its records
Hungry: TypeAlias = "tuple[TopicLog, Consumer]"
QUEUE_CONFIG = ConsumerConfig(max_ack_pending=limits.PENDING_MAX, max_waiting=limits.WAITERS_PER_TOPIC_MAX)


@dataclass(slots=True, eq=False)
class Claimer:
    """A claim that waits."""

    number: int
    token: object
    command: con.Claim
    log: TopicLog
    consumer: Consumer
    once: bool  # it waits for its window alone, and then takes what there is
    done: bool = False


@dataclass(slots=True)
class Policy:
    """How a consumer hands out: by its own config, or, of a queue, by the topic's."""

    lease_ms: int
    backoff_ms: tuple[int, ...]
    max_deliver: int
    dead_letter: str | None
    max_pending: int
    jitter_ms: int

    def lease_for(self, wanted_ms: int, deliveries: int) -> int:
        if wanted_ms:
            return wanted_ms
        if self.backoff_ms:
            return self.backoff_ms[min(deliveries, len(self.backoff_ms)) - 1]
        return self.lease_ms


def policy_of(config: TopicConfig, consumer: Consumer) -> Policy:
    own = consumer.config
    if consumer.name == con.QUEUE:
        return Policy(
            config.lease_ms, (), config.max_deliveries if config.dead_letter else 0, config.dead_letter,
            own.max_ack_pending, config.claim_jitter_ms,
        )  # fmt: skip
    return Policy(own.ack_wait_ms, own.backoff_ms, own.max_deliver, own.dead_letter, own.max_ack_pending, 0)


def is_durable(log: TopicLog, consumer: Consumer) -> bool:
    """Whether what is handed out is remembered over a restart."""
    if consumer.name:
        return True
    return log.config.leases_durable and log.config.durability != "ephemeral"


class Claims(Writes, Queries):
    def __init__(self, config: EngineConfig, clock: EngineClock, reader: Reader, boot_id: str) -> None:
        super().__init__(config, clock, reader, boot_id)
        # Of the next lease. Begins at random, so that no lease of before a restart is taken for one of now.
        self.lease_id = 0
        self.hungry: dict[int, Hungry] = {}  # consumers whose claims must look again, by identity
        self.unserved: dict[int, Hungry] = {}  # those of them with claims that may not be answered yet
        self.timers: list[tuple[int, int, TopicLog, Consumer, Claimer | None]] = []
        self.idle_timers: list[tuple[int, int, TopicLog, Consumer]] = []
        self.numbers = count(1)
        self.on_settled: Callable[[int], None] = lambda connection: None  # it has one lease less

    # -- finding consumers ---------------------------------------------------------------------------------

    def settled_over(self, connection: int) -> None:
        self.on_settled(connection)

    def queue_of(self, log: TopicLog) -> Consumer:
        """The built-in consumer of a queue."""
        consumers = log.consumers
        if consumers is None:
            consumers = log.consumers = TopicConsumers()
        if consumers.queue is None:
            consumers.queue = Consumer(con.QUEUE, QUEUE_CONFIG, self.settled_over)
        return consumers.queue

    def _find_consumer(self, topic: str, name: str) -> tuple[TopicLog, Consumer]:
        log = self.published.get(topic)
        if log is None or log.dropped:
            raise TopicNotFound(topic)
        if not name and log.config.type != "queue":
            raise NotAQueue(topic)
        self._touch(log)
        if not name:
            return log, self.queue_of(log)
        consumer = log.consumers.named.get(name) if log.consumers is not None else None
        if consumer is None:
            raise ConsumerNotFound(topic, name)
        return log, consumer

    def ready_count(self, log: TopicLog, consumer: Consumer) -> int:
        """How many records could be claimed now. At a named consumer with a filter it may be a second old."""
        published = log.count - (log.next_seq - 1 - log.view.head)
        if not consumer.name:
            return max(0, published - len(consumer.entries) + consumer.returned)
        if consumer.filter is not None:
            since_ms, lag = consumer.lag
            if self.now_ms - since_ms >= LAG_MS:
                lag = self._lag(log, consumer)
                consumer.lag = self.now_ms, lag
            return lag + consumer.returned
        # Or even beyond the next one: it waits for a seq that is still to come.
        if consumer.cursor > log.view.head:
            return len(consumer.firsts) + consumer.returned
        if consumer.behind is None:
            consumer.behind = log.count_live(1, consumer.cursor)
        return max(0, published - consumer.behind) + len(consumer.firsts) + consumer.returned

    def leases_of(self, log: TopicLog, name: str, connection: int) -> int:
        """How many unexpired leases a connection has."""
        consumer = log.consumers.find(name) if log.consumers is not None else None
        if consumer is None:
            return 0
        consumer.pass_time(self.now_ms)
        return consumer.leases_of(connection)

    # -- claim ---------------------------------------------------------------------------------------------

    def _claim(self, token: object, command: con.Claim) -> None:
        log, consumer = self._find_consumer(command.topic, command.consumer)
        if not 0 < len(command.node) <= limits.NODE_BYTES_MAX:
            raise InvalidRequest(f"node names who claims: 1 to {limits.NODE_BYTES_MAX} bytes")
        self._writable()
        consumer.active_ms = self.now_ms
        if log.config.claim_jitter_ms and consumer is not None and not consumer.name:
            self._park_claim(token, command, log, consumer, once=not command.standing and not command.wait_ms)
            self._open_window(log, consumer)
            return
        if not self._serve_one(
            token, command, log, consumer, may_wait=bool(command.standing or command.wait_ms)
        ):
            self._park_claim(token, command, log, consumer, once=False)
            self._set_timer(log, consumer)

    def _park_claim(
        self, token: object, command: con.Claim, log: TopicLog, consumer: Consumer, *, once: bool
    ) -> None:
        assert log.consumers is not None
        if len(consumer.waiters) >= consumer.config.max_waiting:
            raise Throttled(
                "too many claims wait already; come back later",
                limit="max_waiting",
                max=consumer.config.max_waiting,
            )
        claimer = Claimer(next(self.numbers), token, command, log, consumer, once)
        consumer.waiters[claimer.number] = claimer
        if command.connection:
            consumer.parked[command.connection] = claimer
        consumer.streams += command.standing
        log.consumers.waiting += 1
        if not once and not command.standing:
            due_ms = self.clock.mono_ms + min(command.wait_ms, limits.DIFF_WAIT_MS_MAX)
            heapq.heappush(self.timers, (due_ms, claimer.number, log, consumer, claimer))

    def _unpark_claim(self, claimer: Claimer) -> None:
        claimer.done = True
        del claimer.consumer.waiters[claimer.number]
        claimer.consumer.parked.pop(claimer.command.connection, None)
        claimer.consumer.streams -= claimer.command.standing
        assert claimer.log.consumers is not None
        claimer.log.consumers.waiting -= 1

    def _open_window(self, log: TopicLog, consumer: Consumer) -> None:
        if not consumer.window_ms:
            consumer.window_ms = self.clock.mono_ms + log.config.claim_jitter_ms
            heapq.heappush(self.timers, (consumer.window_ms, next(self.numbers), log, consumer, None))

    def _set_timer(self, log: TopicLog, consumer: Consumer) -> None:
        """Look again when time makes something ready, as long as somebody waits for it, or holds all that it may."""
        if not consumer.waiters and not consumer.connections:
            return
        at_ms = consumer.next_change_ms()
        if consumer.is_paused(self.now_ms) and not consumer.connections:
            at_ms = max(consumer.paused_until_ms, 0)
        elif consumer.config.replay == "original":
            due_ms = self._replay_due(log, consumer)
            at_ms = min(at_ms, due_ms) if at_ms and due_ms else at_ms or due_ms
        if not at_ms:
            return
        # A lease may last a day: the engine's clock and the monotonic one may be apart by then, so look in between.
        wake_ms = self.clock.mono_ms + min(max(at_ms - self.now_ms, 0) + 1, limits.CLAIM_LOOK_MS)
        if not self.clock.mono_ms < consumer.wake_ms <= wake_ms:
            consumer.wake_ms = wake_ms
            heapq.heappush(self.timers, (wake_ms, next(self.numbers), log, consumer, None))

    def feed(self, log: TopicLog) -> None:
        """Something was published: claims that wait look again."""
        assert log.consumers is not None
        for consumer in log.consumers.every():
            if consumer.waiters:
                self.hungry[id(consumer)] = log, consumer

    def _is_hungry(self, log: TopicLog, consumer: Consumer) -> None:
        if consumer.waiters:
            self.hungry[id(consumer)] = log, consumer

    # -- serving those that wait ---------------------------------------------------------------------------

    @property
    def claims_due_ms(self) -> int | None:
        """When a claim or a consumer must be looked at without a request."""
        if self.hungry or self.fed:
            return self.clock.mono_ms
        times = [timers[0][0] for timers in (self.timers, self.idle_timers) if timers]
        return min(times, default=None)

    def serve_claims(self) -> None:
        """Let claims look again whose consumers have something new, and those whose time is up."""
        room = limits.WAKE_BYTES_MAX
        now_ms = self.clock.mono_ms
        fed, self.fed = self.fed, {}
        for log in fed.values():
            self.feed(log)
        while self.timers and self.timers[0][0] <= now_ms:
            _, _, log, consumer, claimer = heapq.heappop(self.timers)
            if claimer is None:
                self.hungry[id(consumer)] = log, consumer
            elif not claimer.done:
                self._give_up_waiting(claimer)
        hungry, self.hungry, self.unserved = self.hungry | self.unserved, {}, {}
        for key, (log, consumer) in hungry.items():
            if room <= 0:
                self.hungry[key] = log, consumer  # the next turn goes on
            else:
                room -= self._serve(log, consumer)

    def _give_up_waiting(self, claimer: Claimer) -> None:
        """Its time is up."""
        if not self.may_wake(claimer.token):
            again_ms = self.clock.mono_ms + AGAIN_MS
            heapq.heappush(
                self.timers, (again_ms, next(self.numbers), claimer.log, claimer.consumer, claimer)
            )
            return
        self._unpark_claim(claimer)
        self.ready.append((claimer.token, self._claimed(claimer.log, claimer.consumer)))

    def _serve(self, log: TopicLog, consumer: Consumer) -> int:
        """Answer the claims of one consumer as far as there is something; returns about how many bytes that takes."""
        if consumer.window_ms and consumer.window_ms > self.clock.mono_ms:
            return 0
        gathered = bool(consumer.window_ms)
        consumer.window_ms = 0
        claimers = cast("list[Claimer]", list(consumer.waiters.values()))
        if not claimers:
            if consumer.connections:
                consumer.pass_time(self.now_ms)  # streams that were full hear of leases that have run out
                self._set_timer(log, consumer)
            return 0
        if log.dropped or self.read_only is not None or consumer.dropped:
            return 0  # they are told elsewhere
        size = 0
        try:
            self._touch(log)
            jitter = not consumer.name and log.config.claim_jitter_ms
            if jitter and not gathered:
                if self._has_something(log, consumer):
                    self._open_window(log, consumer)
                else:
                    self._set_timer(log, consumer)
                return 0
            if jitter:
                sendable = [claimer for claimer in claimers if self.may_wake(claimer.token)]
                if len(sendable) < len(claimers):
                    self.unserved[id(consumer)] = log, consumer
                size = self._deal(log, consumer, sendable)
            else:
                size = self._serve_in_turn(log, consumer, claimers)
        except TopicsError as error:
            self.fail_claims(log, error, consumer)
        except OSError as error:
            self.fail_claims(log, TopicsError(f"a file could not be read: {error}"), consumer)
        self._set_timer(log, consumer)
        return size

    def _serve_in_turn(self, log: TopicLog, consumer: Consumer, claimers: list[Claimer]) -> int:
        """One after the other, until there is nothing left: thousands may wait for one record."""
        size = 0
        for claimer in claimers:
            if not self.may_wake(claimer.token):
                self.unserved[id(consumer)] = log, consumer
            elif self._serve_one(claimer.token, claimer.command, log, consumer, may_wait=True):
                self._unpark_claim(claimer)
                size += WAKE_COST
            else:
                break
        return size

    def _has_something(self, log: TopicLog, consumer: Consumer) -> bool:
        consumer.pass_time(self.now_ms)
        return self.ready_count(log, consumer) > 0

    def fail_claims(self, log: TopicLog, error: TopicsError, consumer: Consumer | None = None) -> None:
        """The topic, the consumer or the shard is not there any more for those that wait."""
        if log.consumers is None:
            return
        for one in [consumer] if consumer is not None else log.consumers.every():
            for claimer in list(one.waiters.values()):
                assert isinstance(claimer, Claimer)
                self._unpark_claim(claimer)
                self.ready.append((claimer.token, error))

    # -- handing out ---------------------------------------------------------------------------------------

    def _serve_one(
        self, token: object, command: con.Claim, log: TopicLog, consumer: Consumer, *, may_wait: bool
    ) -> bool:
        """Answer a claim; False when there is nothing and it may wait."""
        page, tombstone, cursor = self._pick(log, consumer, command.max, command.max_bytes)
        if not page.seqs and tombstone is None:
            self._pass_by(log, consumer, cursor)
            if may_wait:
                return False
        self._lease(token, command, log, consumer, page, cursor, tombstone)
        return True

    def _pass_by(self, log: TopicLog, consumer: Consumer, cursor: int) -> None:
        """Nothing up to the cursor is for this consumer. Not logged: after a restart it looks there once more."""
        before, consumer.cursor = consumer.cursor, cursor
        self._retire_passed(log, consumer, before, cursor)
        if cursor <= log.view.head and cursor > before and not consumer.is_paused(self.now_ms):
            self._is_hungry(log, consumer)  # it has looked at enough for one turn, and goes on in the next

    def _deal(self, log: TopicLog, consumer: Consumer, claimers: list[Claimer]) -> int:
        """Claims that came in one window share what there is: one record each, turn by turn."""
        wanted = sum(claimer.command.max for claimer in claimers)
        page, _, cursor = self._pick(log, consumer, min(wanted, limits.DEAL_MAX), limits.WAKE_BYTES_MAX // 2)
        shares: list[list[int]] = [[] for _ in claimers]
        sizes = [0] * len(claimers)
        open_, at = list(range(len(claimers))), 0
        left = len(page.seqs)
        for i in range(left):
            size = size_of(log, page.seqs[i])
            while open_:
                at %= len(open_)
                k = open_[at]
                command = claimers[k].command
                budget = command.max_bytes or limits.CLAIM_BYTES_DEFAULT
                if len(shares[k]) < command.max and (not shares[k] or sizes[k] + size <= budget):
                    shares[k].append(i)
                    sizes[k] += size
                    at += 1
                    break
                open_.pop(at)
            else:
                self._untake(consumer, page, i)
                cursor = min(cursor, page.seqs[i]) if page.seqs[i] >= consumer.cursor else consumer.cursor
                break
        for claimer, share in zip(claimers, shares, strict=True):
            if not share and not claimer.once:
                continue  # it waits on
            self._unpark_claim(claimer)
            part = page if len(share) == left else part_of(page, share)
            self._lease(claimer.token, claimer.command, log, consumer, part, cursor, None)
        return sum(sizes) + WAKE_COST * len(claimers)

    @staticmethod
    def _untake(consumer: Consumer, page: Page, first: int) -> None:
        """Records from here on were picked and nobody has room for them."""
        consumer.put_back(seq for seq in page.seqs[first:] if seq in consumer.entries)

    def _pick(
        self, log: TopicLog, consumer: Consumer, limit: int, max_bytes: int
    ) -> tuple[Page, Tombstone | None, int]:
        """What to hand out next: records that are ready again, then chosen ones, then those that follow the cursor.

        Returns the page, what was lost in front of the cursor, and where the cursor stands after it.
        """
        consumer.pass_time(self.now_ms)
        if consumer.is_paused(self.now_ms):
            return no_page(log), None, consumer.cursor
        policy = policy_of(log.config, consumer)
        limit = min(limit, limits.DEAL_MAX)
        budget = max_bytes or (limits.DIFF_BYTES_DEFAULT if consumer.name else limits.CLAIM_BYTES_DEFAULT)
        while True:
            page = no_page(log)
            returned, budget_left = self._pick_returned(log, consumer, policy, limit, budget)
            picked = rows_of(log, returned)
            tombstone, cursor, stop = None, consumer.cursor, log.view.head + 1
            if consumer.name:
                tombstone, cursor, stop = self._lost(log, cursor)
            try:
                room = min(limit - len(returned), policy.max_pending - len(consumer.entries))
                if room > 0 and (budget_left > 0 or not returned):
                    fresh, cursor = self._pick_fresh(log, consumer, cursor, stop, room, budget_left)
                    picked += fresh
                if picked:
                    self.reader.fill(log, page, picked)
                if returned and page.seqs[-1] < returned[-1]:  # of a queue that looks at everything again
                    page = part_of(page, sorted(range(len(page.seqs)), key=page.seqs.__getitem__))
                return page, tombstone, cursor
            except DamagedSegment as damage:
                consumer.put_back(returned)
                self._lose_rows(log, damage)

    def _pick_returned(
        self, log: TopicLog, consumer: Consumer, policy: Policy, limit: int, budget: int
    ) -> tuple[list[int], int]:
        """Records that are ready again, except those that have had their last delivery: they leave."""
        picked: list[int] = []
        dead: list[int] = []
        for seq in consumer.take_returned():
            entry = consumer.entries[seq]
            is_doomed = entry.doom is not None and policy.dead_letter is not None
            if is_doomed or (policy.max_deliver and entry.deliveries >= policy.max_deliver):
                dead.append(seq)
                if len(dead) >= limits.DEAL_MAX:
                    break
                continue
            size = size_of(log, seq)
            if len(picked) >= limit or (picked and size > budget):
                consumer.put_back([seq])
                break
            picked.append(seq)
            budget -= size
        if dead:
            try:
                self._end_deliveries(log, consumer, policy, dead)
            except TopicsError:
                consumer.put_back(picked + dead)
                raise
        return picked, budget

    def _pick_fresh(
        self, log: TopicLog, consumer: Consumer, cursor: int, stop: int, limit: int, budget: int
    ) -> tuple[list[tuple[Chunk, Picked]], int]:
        """Records that were never handed out, and where the cursor stands behind them."""
        firsts = [seq for seq in consumer.firsts[:limit] if log.is_live(seq)]
        if firsts:
            return rows_of(log, firsts), cursor
        if consumer.config.replay == "original":
            stop = min(stop, self._replay_stop(log, consumer, cursor))
        kept: list[tuple[Chunk, Picked]] = []
        while True:
            page = no_page(log)
            picked = self.reader.undelivered(log, page, cursor, stop, limit, budget, consumer.filter)
            cursor = page.next_from_seq + 1
            if consumer.name or not consumer.entries:
                return kept + picked, cursor
            # A queue that was restarted looks at everything again, also at what is in hand: that it passes by.
            passed = 0
            for chunk, rows in picked:
                mine = [row for row in rows.tolist() if chunk.first_seq + row not in consumer.entries]
                passed += len(rows) - len(mine)
                if mine:
                    kept.append((chunk, np.array(mine)))
                    limit -= len(mine)
                    budget -= int(chunk.rows["size"][mine].sum())
            if not passed or limit <= 0 or budget <= 0:
                return kept, cursor

    @staticmethod
    def _lost(log: TopicLog, cursor: int) -> tuple[Tombstone | None, int, int]:
        """What was lost where the cursor stands, the cursor behind it, and up to where nothing else is lost."""
        view = log.view
        head, floor = view.head, view.evict_floor
        tombstone: Tombstone | None = None
        if cursor < floor:
            by_cap, by_ttl = view.cap_lost >= cursor, view.ttl_lost >= cursor
            reason = "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl"
            tombstone = Tombstone(cursor, floor - 1, reason, floor - cursor, floor, head)
            cursor = floor
        stop = head + 1
        for first, last, reason in view.losses:
            if last < cursor:
                continue
            if first <= cursor and tombstone is None:
                tombstone = Tombstone(cursor, last, reason, last - cursor + 1, last + 1, head)
                cursor = last + 1
                continue
            stop = min(stop, first)
            break
        return tombstone, cursor, stop

    def _replay_stop(self, log: TopicLog, consumer: Consumer, cursor: int) -> int:
        """Up to where records are due in their original time."""
        first = self._next_live(log, consumer, cursor)
        if first is None:
            return log.view.head + 1
        chunk, row = first
        if consumer.replay_shift_ms is None:
            consumer.replay_shift_ms = self.now_ms - chunk.ts_at(row)
        return log.first_since(self.now_ms - consumer.replay_shift_ms + 1)

    def _replay_due(self, log: TopicLog, consumer: Consumer) -> int:
        """When the next record is due in its original time; 0: there is none."""
        first = self._next_live(log, consumer, consumer.cursor)
        if first is None or consumer.replay_shift_ms is None:
            return 0
        return first[0].ts_at(first[1]) + consumer.replay_shift_ms

    def _next_live(self, log: TopicLog, consumer: Consumer, cursor: int) -> tuple[Chunk, int] | None:
        page = no_page(log)
        picked = self.reader.undelivered(log, page, cursor, log.view.head + 1, 1, 1 << 30, consumer.filter)
        return (picked[0][0], int(picked[0][1][0])) if picked else None

    def _lease(
        self,
        token: object,
        command: con.Claim,
        log: TopicLog,
        consumer: Consumer,
        page: Page,
        cursor: int,
        tombstone: Tombstone | None,
    ) -> None:
        """Hand out what was picked, and answer."""
        seqs = page.seqs
        has_moved = cursor != consumer.cursor
        if not seqs and not has_moved:
            self.ready.append((token, self._claimed(log, consumer, tombstone)))
            return
        durable = is_durable(log, consumer)
        if durable:
            try:
                self.reserve(CONTROL_BYTES + len(command.node) + len(seqs) * SEQ_BYTES)
            except TopicsError:
                consumer.put_back(seq for seq in seqs if seq in consumer.entries)
                raise
        entries = consumer.entries
        deliveries = [entries[seq].deliveries + 1 if seq in entries else 1 for seq in seqs]
        acks = consumer.config.ack != "none"
        policy = policy_of(log.config, consumer)
        deadlines = [
            self.now_ms + policy.lease_for(command.lease_ms, number) if acks else 0 for number in deliveries
        ]
        first_id, before = self.lease_id, consumer.cursor
        self.lease_id = (self.lease_id + len(seqs)) & ID_MASK
        for event in claimed_events(
            consumer.name, seqs, deadlines, deliveries, command.node, first_id, cursor if has_moved else 0
        ):
            if durable:
                self.log_event(log, event)
            consumer.apply(event)
        self._retire_passed(log, consumer, before, consumer.cursor)
        if command.connection and acks:
            consumer.attach(command.connection, seqs)
            self._set_timer(log, consumer)
        ids = [(first_id + i) & ID_MASK for i in range(len(seqs))] if acks else [0] * len(seqs)
        result = self._claimed(log, consumer, tombstone)
        result.page, result.lease_ids = page, ids
        result.deadlines, result.deliveries = deadlines, deliveries
        log.last_read_ts = self.now_ms
        if durable:
            self.add_op(Op(log, token, result, free=True))
            if not acks:
                self._retire(log, consumer, seqs)
        else:
            self.ready.append((token, result))

    def _claimed(self, log: TopicLog, consumer: Consumer, tombstone: Tombstone | None = None) -> con.Claimed:
        """The answer of a claim that got nothing."""
        ready = self.ready_count(log, consumer)
        return con.Claimed(log.name, consumer.name, no_page(log), [], [], [], ready, tombstone)

    def _lag(self, log: TopicLog, consumer: Consumer) -> int:
        """Live records that match and were never handed out."""
        cursor, stop = consumer.cursor, log.view.head + 1
        waiting = sum(log.is_live(seq) for seq in consumer.firsts)
        if cursor >= stop:
            return waiting
        if consumer.filter is None:
            return waiting + log.count_live(cursor, stop)
        names = {name for match in consumer.filter.any_of for name in log.tags.names(match)}
        for name in names:
            seqs = log.tags.seqs(name, log.are_live)
            waiting += int(np.searchsorted(seqs, stop)) - int(np.searchsorted(seqs, cursor))
        return waiting

    def log_event(self, log: TopicLog, event: Event) -> None:
        self.add_frame(frames.encode_control(frames.LEASE, log.id, self.now_ms, event))
        self.touched[log.id] = log

    # -- the last delivery ---------------------------------------------------------------------------------

    def _end_deliveries(self, log: TopicLog, consumer: Consumer, policy: Policy, seqs: list[int]) -> None:
        """They would be handed out once too often: they go to the dead letter topic, or nowhere."""
        if policy.dead_letter is not None:
            by_doom: dict[tuple[int, str], list[int]] = {}
            for seq in seqs:
                doom = consumer.entries[seq].doom or (policy.max_deliver, "")
                by_doom.setdefault(doom, []).append(seq)
            for (deliveries, reason), doomed in by_doom.items():
                self._move(log, consumer, doomed, policy.dead_letter, deliveries, reason)
            return
        self.reserve(CONTROL_BYTES + len(seqs) * SEQ_BYTES)
        event = Event(consumer.name, GIVEN_UP, seqs)
        self.log_event(log, event)
        consumer.apply(event)
        op = Op(log)
        self._retire_into(log, consumer, seqs, op)
        self.count_live(op)
        self.add_op(op)

    def _move(
        self, log: TopicLog, consumer: Consumer, seqs: list[int], target: str, deliveries: int, reason: str
    ) -> None:
        """They are on their way to another topic, from the sync of this on."""
        assert log.consumers is not None
        self.reserve(CONTROL_BYTES + len(target) + len(reason) * 4 + len(seqs) * SEQ_BYTES)
        counts = [deliveries or consumer.entries[seq].deliveries for seq in seqs]
        number = log.consumers.next_number
        event = Event(
            consumer.name, MOVE, seqs, deliveries=counts, number=number, target=target, reason=reason
        )
        self.log_event(log, event)
        log.consumers.apply(event)
        self.add_op(Op(log, sync=True, letters=log.consumers.next_number - 1))

    # -- settling ------------------------------------------------------------------------------------------

    def _settle(self, token: object, command: con.Settle) -> None:
        log, consumer = self._find_consumer(command.topic, command.consumer)
        self._writable()
        consumer.pass_time(self.now_ms)
        consumer.active_ms = self.now_ms
        held, skipped = self._held(consumer, command)
        is_all = command.kind == "ack" and consumer.config.ack == "all" and bool(consumer.name)
        if held and is_all:
            top = max(held)
            held = sorted(
                seq for seq, entry in consumer.entries.items() if seq <= top and entry.state != MOVING
            )
        policy = policy_of(log.config, consumer)
        result = con.Settled(command.topic, consumer.name, command.kind, len(held), skipped, 0, 0)
        op = Op(log, token, result)
        if command.kind == "ack":
            self._ack(log, consumer, held, op)
        elif command.kind == "nack":
            self._nack(log, consumer, held, command, policy, op)
        elif command.kind == "term":
            self._term(log, consumer, held, command, policy, op)
        else:
            self._extend(log, consumer, held, command, op)
        result.ready = self.ready_count(log, consumer)
        result.in_flight = consumer.in_flight
        self._is_hungry(log, consumer)
        self.count_live(op)
        self.add_op(op)

    @staticmethod
    def _held(consumer: Consumer, command: con.Settle) -> tuple[list[int], list[int]]:
        """Which of the named records the node has leases on, and which not. A repeated one counts once."""
        entries, node = consumer.entries, command.node
        ids = command.lease_ids or [0] * len(command.seqs)
        held: dict[int, None] = {}
        skipped: list[int] = []
        for seq, lease_id in zip(command.seqs, ids, strict=True):
            entry = entries.get(seq)
            if (
                entry is not None
                and entry.state == LEASED
                and entry.node == node
                and (not lease_id or entry.id == lease_id)
                and seq not in held
            ):
                held[seq] = None
            else:
                skipped.append(seq)
        return list(held), skipped

    def _ack(self, log: TopicLog, consumer: Consumer, seqs: list[int], op: Op) -> None:
        if not seqs:
            op.free = True
            return
        op.sync = log.config.durability == "fsync"
        assert isinstance(op.result, con.Settled)
        op.result.synced = op.sync
        if not consumer.name:
            ranges = as_ranges(sorted(seqs))
            self.reserve(CONTROL_BYTES + len(ranges) * SEQ_BYTES)
            self._log_delete(log, ranges, op, erase=False)
            consumer.counters.acked += len(seqs)
            self.touched[log.id] = log
            return
        self.reserve(2 * CONTROL_BYTES + 2 * len(seqs) * SEQ_BYTES)
        event = Event(consumer.name, ACKED, seqs)
        self.log_event(log, event)
        consumer.apply(event)
        self._retire_into(log, consumer, seqs, op)

    def _nack(
        self, log: TopicLog, consumer: Consumer, seqs: list[int], command: con.Settle, policy: Policy, op: Op
    ) -> None:
        if command.nack == "dead":
            if policy.dead_letter is None:
                raise InvalidRequest("there is no dead_letter to send it to; set one, or use kind retry")
            if seqs:
                self._move(log, consumer, seqs, policy.dead_letter, 0, command.reason)
            op.free = not seqs
            return
        due_ms = self.now_ms + command.delay_ms if command.delay_ms else 0
        deliveries: list[int] = []
        if command.nack == "release":
            deliveries = [consumer.entries[seq].deliveries - 1 for seq in seqs]
        self._give_back(log, consumer, Event(consumer.name, RETURNED, seqs, due_ms, deliveries=deliveries))
        op.free = True

    def _give_back(self, log: TopicLog, consumer: Consumer, event: Event) -> None:
        if event.seqs and is_durable(log, consumer):
            self.reserve(CONTROL_BYTES + len(event.seqs) * SEQ_BYTES)
            self.log_event(log, event)
        consumer.apply(event)
        self._is_hungry(log, consumer)

    def _term(
        self, log: TopicLog, consumer: Consumer, seqs: list[int], command: con.Settle, policy: Policy, op: Op
    ) -> None:
        """Never again, whatever its deliveries: to the dead letter topic, or nowhere."""
        if not consumer.name:
            raise InvalidRequest(
                "a job of a queue is acked, or sent to the dead letter with a nack of kind dead"
            )
        if not seqs:
            op.free = True
            return
        if policy.dead_letter is not None:
            self._move(log, consumer, seqs, policy.dead_letter, 0, command.reason)
            return
        op.sync = log.config.durability == "fsync"
        self.reserve(2 * CONTROL_BYTES + 2 * len(seqs) * SEQ_BYTES)
        event = Event(consumer.name, GIVEN_UP, seqs, reason=command.reason)
        self.log_event(log, event)
        consumer.apply(event)
        self._retire_into(log, consumer, seqs, op)

    def _extend(
        self, log: TopicLog, consumer: Consumer, seqs: list[int], command: con.Settle, op: Op
    ) -> None:
        event = Event(consumer.name, EXTENDED, seqs, self.now_ms + command.lease_ms)
        if seqs and is_durable(log, consumer):
            self.reserve(CONTROL_BYTES + len(seqs) * SEQ_BYTES)
            self.log_event(log, event)
        consumer.apply(event)
        assert isinstance(op.result, con.Settled)
        op.result.deadlines = dict.fromkeys(seqs, event.until_ms)
        op.free = True

    def _release(self, token: object, command: con.Release) -> None:
        """A connection is gone. What it had is ready again; the log hears of it only where leases are kept."""
        log = self.published.get(command.topic)
        consumer = (
            log.consumers.find(command.consumer) if log is not None and log.consumers is not None else None
        )
        if log is None or consumer is None:
            self.ready.append((token, con.Released(command.topic, 0)))
            return
        claimer = consumer.parked.get(command.connection)
        if claimer is not None:
            assert isinstance(claimer, Claimer)
            self._unpark_claim(claimer)
        consumer.active_ms = self.now_ms
        consumer.pass_time(self.now_ms)
        seqs = sorted(consumer.connections.get(command.connection, ()))
        if seqs and self.read_only is None:
            self._give_back(log, consumer, Event(consumer.name, RETURNED, seqs))
        self.add_op(Op(log, token, con.Released(command.topic, len(seqs)), free=True))

    # -- retention by interest -----------------------------------------------------------------------------

    def _retire(self, log: TopicLog, consumer: Consumer, seqs: list[int]) -> None:
        op = Op(log)
        self._retire_into(log, consumer, seqs, op)
        if op.count:
            self.count_live(op)
            self.add_op(op)

    def _retire_passed(self, log: TopicLog, consumer: Consumer, first: int, stop: int) -> None:
        """What a filter left out may have been what a record was kept for."""
        if consumer.filter is None or log.config.retention != "interest" or first >= stop:
            return
        passed: list[int] = []
        for chunk, low, high in log.spans(first, stop):
            rows = np.flatnonzero(chunk.live(low, high, frames.DEAD)) + low + chunk.first_seq
            passed += [seq for seq in rows.tolist() if seq not in consumer.entries]
        self._retire(log, consumer, passed)

    def _retire_into(self, log: TopicLog, consumer: Consumer, seqs: list[int], op: Op) -> None:
        """Delete what nobody needs any more, if the topic's retention says so."""
        retention = log.config.retention
        if retention == "limits" or not seqs:
            return
        gone = [seq for seq in sorted(seqs) if log.is_live(seq)]
        if retention == "interest":
            assert log.consumers is not None
            others = [other for other in log.consumers.named.values() if other is not consumer]
            gone = [seq for seq in gone if not any(needs(log, other, seq) for other in others)]
        ranges: list[Range] = as_ranges(gone)
        if ranges and self.has_room(CONTROL_BYTES + len(ranges) * SEQ_BYTES):
            self._log_delete(log, ranges, op, erase=False)
            self.touched[log.id] = log

    # -- the shard -----------------------------------------------------------------------------------------

    def queue_counts(self, log: TopicLog) -> cmd.QueueCounts | None:
        if log.config.type != "queue":
            return None
        consumer = self.queue_of(log)
        consumer.pass_time(self.now_ms)
        assert log.consumers is not None
        in_flight, dead = consumer.in_flight, log.consumers.dead_lettered
        return cmd.QueueCounts(self.ready_count(log, consumer), in_flight, dead)

    def queue_totals(self) -> tuple[int, int]:
        """How many queues there are, and leases over all of them."""
        queues = [log for log in self.published.values() if log.view.config.type == "queue"]
        in_flight = 0
        for log in queues:
            if log.consumers is not None and log.consumers.queue is not None:
                log.consumers.queue.pass_time(self.now_ms)
                in_flight += log.consumers.queue.in_flight
        return len(queues), in_flight

    def _publish_name(self, op: Op) -> None:
        super()._publish_name(op)
        if op.dropped:
            self.moving.pop(op.log.id, None)
            self.fail_claims(op.log, TopicNotFound(op.log.name))

    def discard_staged(self) -> None:
        super().discard_staged()
        for log in self.by_id.values():
            self.fail_claims(log, ShardReadOnly(self.read_only or ""))

    def start_claims(self, salt: int) -> None:
        """Recovery is done. The salt is the log's, and new with every start."""
        self.lease_id = salt
        for log in self.by_id.values():
            self.consumers_recovered(log)

    def consumers_recovered(self, log: TopicLog) -> None:
        """The log is replayed: what it says of leases is true of what lives, and time runs again."""
        consumers = log.consumers
        if consumers is None:
            return
        for consumer in consumers.every():
            if not consumer.name:
                if not is_durable(log, consumer):
                    consumer.forget_leases()
                consumer.cursor = 1  # it passes by what is in hand; what is not, and lives, is ready
            starts = consumer.config.deliver_value if consumer.config.deliver == "from_seq" else 0
            consumer.cursor = min(consumer.cursor, max(log.next_seq, starts))
            if not log.is_away:
                for seq in [seq for seq in consumer.entries if not log.is_live(seq)]:
                    consumers.forget(seq, seq, lambda _: 0)
            consumer.active_ms = self.now_ms
            self._set_idle_timer(log, consumer)
        consumers.safe_number = consumers.next_number - 1
        if consumers.letters:
            self.moving[log.id] = log

    def _set_idle_timer(self, log: TopicLog, consumer: Consumer) -> None:
        """From now on its time runs, if it goes when nobody uses it."""
        ttl_ms = consumer.config.inactive_ttl_ms
        if ttl_ms:
            due_ms = self.clock.mono_ms + max(consumer.active_ms + ttl_ms - self.now_ms, 0) + 1
            heapq.heappush(self.idle_timers, (due_ms, next(self.numbers), log, consumer))

    def check_consumers(self) -> None:
        for log in self.by_id.values():
            if log.consumers is None or self.read_only is not None:
                continue
            for consumer in log.consumers.every():
                consumer.check()
                if not log.is_away:
                    assert all(map(log.is_live, consumer.entries)), (log.name, consumer.name)
                if consumer.behind is not None and consumer.filter is None and not log.is_away:
                    assert consumer.behind == log.count_live(1, consumer.cursor), (log.name, consumer.name)


def needs(log: TopicLog, consumer: Consumer, seq: int) -> bool:
    """Whether a consumer has not settled a record that it wants."""
    if seq in consumer.entries or seq in consumer.firsts:
        return True
    if seq < consumer.cursor:
        return False
    if consumer.filter is None:
        return True
    found = log.find(seq)
    tag = found[0].get(found[1])[4] if found is not None else 0
    return bool(tag) and consumer.filter.matches(log.tags.strings.name(tag))


def no_page(log: TopicLog) -> Page:
    return Page(log.name, [], [], [], None, None, [], None, [], [], 0, log.view.head, log.first_seq, None, 0)


def rows_of(log: TopicLog, seqs: list[int]) -> list[tuple[Chunk, Picked]]:
    """Where these records lie, chunk by chunk."""
    picked: list[tuple[Chunk, list[int]]] = []
    for seq in seqs:
        found = log.find(seq)
        if found is None:
            continue
        if picked and picked[-1][0] is found[0]:
            picked[-1][1].append(found[1])
        else:
            picked.append((found[0], [found[1]]))
    return [(chunk, np.array(rows)) for chunk, rows in picked]


def claimed_events(
    name: str,
    seqs: list[int],
    deadlines: list[int],
    deliveries: list[int],
    node: bytes,
    first_id: int,
    cursor: int,
) -> Iterator[Event]:
    """Records with one deadline are one event. With a backoff there may be several; the first moves the cursor."""
    start = 0
    while start < len(seqs) or cursor:
        until_ms = deadlines[start] if seqs else 0
        stop = next((i for i in range(start, len(seqs)) if deadlines[i] != until_ms), len(seqs))
        again = deliveries[start:stop] if max(deliveries[start:stop], default=1) > 1 else []
        yield Event(
            name, CLAIMED, seqs[start:stop], until_ms, node, (first_id + start) & ID_MASK, again, cursor
        )
        start, cursor = stop, 0


def size_of(log: TopicLog, seq: int) -> int:
    """The accounted bytes of a record."""
    found = log.find(seq)
    return found[0].get(found[1])[6] if found is not None else 0


def part_of(page: Page, rows: list[int]) -> Page:
    """A page of some of the records."""
    at = np.array(rows, dtype=np.intp)
    return Page(
        page.topic,
        [page.seqs[i] for i in rows],
        np.asarray(page.timestamps)[at],
        np.asarray(page.flags)[at],
        [page.tags[i] for i in rows] if page.tags is not None else None,
        [page.nodes[i] for i in rows] if page.nodes is not None else None,
        page.frames,
        np.asarray(page.which)[at] if page.which is not None else None,
        np.asarray(page.starts)[at],
        np.asarray(page.lengths)[at],
        page.next_from_seq,
        page.head_seq,
        page.earliest_seq,
        None,
        page.scanned,
    )
