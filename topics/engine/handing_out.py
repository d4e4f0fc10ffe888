"""What a consumer hands out next, and under which leases; what leaves it for good.

First what is ready again, the lowest seq first, then what was never handed out, in order. What has had its last delivery
leaves here, for the dead letter topic or for nowhere, and so does what retention by interest keeps no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from topics.engine import consumer_commands as con
from topics.engine import frames, limits
from topics.engine.config import ConsumerConfig, EngineConfig, TopicConfig
from topics.engine.consumer import (
    CLAIMED,
    GIVEN_UP,
    ID_MASK,
    MOVE,
    Consumer,
    Event,
    TopicConsumers,
)
from topics.engine.engine_clock import EngineClock
from topics.engine.errors import (
    ConsumerNotFound,
    NotAQueue,
    TopicNotFound,
    TopicsError,
)
from topics.engine.index import Chunk
from topics.engine.page import Page, Tombstone
from topics.engine.queries import Queries
from topics.engine.reader import DamagedSegment, FewRecords, Picked, Reader
from topics.engine.staging import CONTROL_BYTES, as_ranges
from topics.engine.topic_log import Op, Range, TopicLog
from topics.engine.writes import Writes

FEW = 16  # records of a claim that is served without numpy
SEQ_BYTES = 24  # at most, of one record in an event
LAG_MS = 1000  # how old the count of a filtered backlog may be in an answer to a claim
QUEUE_CONFIG = ConsumerConfig(max_ack_pending=limits.PENDING_MAX, max_waiting=limits.WAITERS_PER_TOPIC_MAX)


@dataclass(slots=True)
class Policy:
    """How a consumer hands out: by its own config, or, of a queue, by the topic's."""

    lease_ms: int
    backoff_ms: tuple[int, ...]
    max_deliver: int
    dead_letter: str | None
    max_pending: int

    def lease_for(self, wanted_ms: int, deliveries: int) -> int:
        if wanted_ms:
            return wanted_ms
        if self.backoff_ms:
            return self.backoff_ms[min(deliveries, len(self.backoff_ms)) - 1]
        return self.lease_ms


def policy_of(config: TopicConfig, consumer: Consumer) -> Policy:
    """Made again only when a config has changed: every claim asks."""
    known_for, policy = consumer.policy
    if known_for is not config:
        policy = _make_policy(config, consumer)
        consumer.policy = config, policy
    assert isinstance(policy, Policy)
    return policy


def _make_policy(config: TopicConfig, consumer: Consumer) -> Policy:
    own = consumer.config
    if consumer.name == con.QUEUE:
        max_deliver = config.max_deliveries if config.dead_letter else 0
        return Policy(config.lease_ms, (), max_deliver, config.dead_letter, own.max_ack_pending)
    return Policy(own.ack_wait_ms, own.backoff_ms, own.max_deliver, own.dead_letter, own.max_ack_pending)


def is_durable(log: TopicLog, consumer: Consumer) -> bool:
    """Whether what is handed out is remembered over a restart."""
    if consumer.name:
        return True
    return log.config.leases_durable and log.config.durability != "ephemeral"


class HandingOut(Writes, Queries):
    def __init__(self, config: EngineConfig, clock: EngineClock, reader: Reader, boot_id: str) -> None:
        super().__init__(config, clock, reader, boot_id)
        # Of the next lease. Begins at random, so that no lease of before a restart is taken for one of now.
        self.lease_id = 0
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
        waiting = max(0, published - consumer.behind - consumer.met_later)
        return waiting + len(consumer.firsts) + consumer.returned

    def leases_of(self, log: TopicLog, name: str, connection: int) -> int:
        """How many unexpired leases a connection has."""
        consumer = log.consumers.find(name) if log.consumers is not None else None
        if consumer is None:
            return 0
        consumer.pass_time(self.now_ms)
        return consumer.leases_of(connection)

    # -- what is next --------------------------------------------------------------------------------------

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
            few = self._pick_few(log, consumer, policy, returned, cursor, stop, limit, budget_left)
            if few is not None:
                return few[0], tombstone, few[1]
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
            except (TopicsError, OSError):
                consumer.put_back(returned)
                raise

    def _pick_few(
        self,
        log: TopicLog,
        consumer: Consumer,
        policy: Policy,
        returned: list[int],
        cursor: int,
        stop: int,
        limit: int,
        budget: int,
    ) -> tuple[Page, int] | None:
        """What most claims are: a few records, all of them in memory. None: look for them the long way."""
        is_plain = consumer.filter is None and not consumer.firsts and consumer.config.replay == "instant"
        if limit > FEW or not is_plain or cursor < consumer.rescan:
            return None
        few = FewRecords()
        if not self.reader.add_few(log, few, returned):
            return None
        room = min(limit - len(returned), policy.max_pending - len(consumer.entries))
        if room > 0 and (budget > 0 or not returned):
            found = self.reader.take_few(log, few, cursor, stop, room, budget)
            if found is None:
                return None
            cursor = found
        return few.page(log), cursor

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
            page, start = no_page(log), cursor
            picked = self.reader.undelivered(log, page, cursor, stop, limit, budget, consumer.filter)
            cursor = page.next_from_seq + 1
            if start >= consumer.rescan or not consumer.entries:
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

    # -- leases --------------------------------------------------------------------------------------------

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
        if consumer.behind is not None:
            consumer.behind = (
                consumer.behind + sum(seq >= before for seq in seqs) if before >= consumer.rescan else None
            )
        self._retire_passed(log, consumer, before, consumer.cursor)
        if command.connection and acks:
            consumer.attach(command.connection, seqs)
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
        waiting = sum(log.is_live(seq) for seq in consumer.firsts) - consumer.met_later
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
