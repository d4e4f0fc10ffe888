"""Leases: which records a claim gets and until when, and what becomes of records that exhausted their deliveries.

Records to redeliver come first, lowest seq first, then undelivered ones, in order. Records that have exhausted their
deliveries are moved to the dead letter topic or discarded, and records that no consumer needs are deleted if the topic's
retention is by interest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from topics.api import limits
from topics.api.config import ConsumerConfig, TopicConfig
from topics.api.errors import (
    ConsumerNotFound,
    NotAQueue,
    ShardReadOnly,
    TopicNotFound,
    TopicsError,
)
from topics.engine.commands import consumers as con
from topics.engine.commands.page import Page, Tombstone
from topics.engine.reading.cold_blocks import ColdMiss
from topics.engine.reading.hot_segments import DamagedSegment
from topics.engine.reading.selection import Picked
from topics.engine.reading.small_page import SmallPage
from topics.engine.reading.tombstones import next_gap
from topics.engine.shard.appends import Appends
from topics.engine.shard.long_commands import Work
from topics.engine.shard.reads import Reads
from topics.engine.shard.state import CONTROL_BYTES, ShardState
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.storage import frames
from topics.engine.storage.control import Event
from topics.engine.storage.index import Chunk
from topics.engine.topic.consumer import (
    CLAIMED,
    GIVEN_UP,
    ID_MASK,
    MOVE,
    TIMEOUTS_PER_SLICE,
    Consumer,
    ConsumerRow,
    DeadLettersRow,
    PruneRequest,
    SliceProgress,
    TopicConsumers,
)
from topics.engine.topic.log import Op, Range, TopicLog

FEW = 16  # claims of up to this many records are served without numpy
CATCH_UP_US = 500  # cost of a catch-up slice, in microseconds
CATCH_UP_GROWTH = 16  # factor by which slices may grow if there is much to do
# Pruning: deletion of records that no consumer needs (retention by interest).
PRUNE_INLINE_MAX = 2048  # records times consumers checked at once instead of in slices
PRUNE_PER_TURN, PRUNE_PER_SLICE = 2000, 500  # cost in microseconds
PRUNE_WINDOW = 512  # records checked together
SEQ_BYTES = 24  # maximum size of one record in an event
Seqs: TypeAlias = npt.NDArray[np.uint64]
ClaimsDue: TypeAlias = "tuple[TopicLog, Consumer]"
QUEUE_CONFIG = ConsumerConfig(max_ack_pending=limits.PENDING_MAX, max_waiting=limits.WAITERS_PER_TOPIC_MAX)


@dataclass(slots=True)
class DeliveryPolicy:
    """Delivery settings: from the consumer's config, or from the topic's config for a queue."""

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


def policy_of(config: TopicConfig, consumer: Consumer) -> DeliveryPolicy:
    """The delivery policy of a consumer, cached until a config changes, as every claim needs it."""
    known_for, policy = consumer.policy
    if known_for is not config:
        policy = _make_policy(config, consumer)
        consumer.policy = config, policy
    assert isinstance(policy, DeliveryPolicy)
    return policy


def _make_policy(config: TopicConfig, consumer: Consumer) -> DeliveryPolicy:
    own = consumer.config
    if consumer.name == con.QUEUE:
        max_deliver = config.max_deliveries if config.dead_letter else 0
        return DeliveryPolicy(config.lease_ms, (), max_deliver, config.dead_letter, own.max_ack_pending)
    return DeliveryPolicy(
        own.ack_wait_ms, own.backoff_ms, own.max_deliver, own.dead_letter, own.max_ack_pending
    )


def is_durable(config: TopicConfig, consumer: Consumer) -> bool:
    """Whether the consumer's leases survive a restart."""
    if consumer.name:
        return True
    return config.leases_durable and config.durability != "ephemeral"


def consumer_rows(log: TopicLog) -> tuple[list[ConsumerRow], DeadLettersRow | None]:
    """Snapshot rows of a topic's consumers. A queue without durable leases is stored as it will be after a restart."""
    if log.consumers is None:
        return [], None
    rows = [consumer.row(durable=is_durable(log.config, consumer)) for consumer in log.consumers.all()]
    return rows, log.consumers.row()


class Leases:
    def __init__(self, state: ShardState, appends: Appends, reads: Reads) -> None:
        self.state = state
        self.appends = appends
        self.reads = reads
        state.appliers[frames.LEASE] = self._apply_event
        self.lease_id = 0  # of the next lease
        self.pruning: dict[int, TopicLog] = {}  # topics with records that no consumer may need any more
        self.claims_due: dict[int, ClaimsDue] = {}  # consumers whose claims must be checked, by identity
        self.settled: list[int] = []  # connections whose leases have ended since the last turn
        state.events.recovered.append(self._recovered)
        state.events.failed.append(lambda reason: self.end_pruning(ShardReadOnly(reason, unknown=True)))

    def _recovered(self, salt: int) -> None:
        self.lease_id = salt  # a lease from before a restart is not mistaken for a current one

    # -- finding consumers ---------------------------------------------------------------------------------

    def queue_of(self, log: TopicLog) -> Consumer:
        """The built-in consumer of a queue."""
        consumers = log.consumers
        if consumers is None:
            consumers = log.consumers = TopicConsumers()
        if consumers.queue is None:
            consumers.queue = Consumer(con.QUEUE, QUEUE_CONFIG, self.settled.append)
        return consumers.queue

    def find_consumer(self, topic: str, name: str) -> tuple[TopicLog, Consumer]:
        log = self.state.published.get(topic)
        if log is None or log.dropped:
            raise TopicNotFound(topic)
        if not name and log.config.type != "queue":
            raise NotAQueue(topic)
        self.state.touch(log)
        if not name:
            return log, self.queue_of(log)
        consumer = log.consumers.named.get(name) if log.consumers is not None else None
        if consumer is None:
            raise ConsumerNotFound(topic, name)
        return log, consumer

    def is_behind(self, log: TopicLog, consumer: Consumer) -> bool:
        """Whether it has more expired leases or uncounted records than one call can process, or a reset locks its cursor.

        Then it delivers nothing, and its counts are unknown.
        """
        if not consumer.process_timeouts(self.state.now_ms) or consumer.cursor_locked:
            return True
        return bool(consumer.name) and not consumer.is_counted(log, log.next_seq)

    def catch_up(self, log: TopicLog, consumer: Consumer) -> int:
        """Do one slice of pending expiry and counting; returns the cost in microseconds."""
        if consumer.count_progress is None:
            consumer.count_progress = SliceProgress(consumer.remaining_cost(log, log.next_seq))
        took, share = 1, slice_budget(consumer.count_progress)
        while took < share:
            if not consumer.process_timeouts(self.state.now_ms):
                took += TIMEOUTS_PER_SLICE
            elif consumer.name and not consumer.is_counted(log, log.next_seq):
                counted = consumer.count(log, log.next_seq)
                consumer.count_progress.spent += counted
                took += counted
            else:
                break
        if consumer.is_counted(log, log.next_seq):
            consumer.count_progress = None
        return took

    def known_lag(self, log: TopicLog, consumer: Consumer) -> int | None:
        """The lag if it is cheap to compute, else the last count (None if never counted), and a recount is scheduled."""
        if not self.is_behind(log, consumer):
            return self.lag(log, consumer)
        self.claims_due[id(consumer)] = log, consumer
        return consumer.undelivered

    def ready_count(self, log: TopicLog, consumer: Consumer) -> int:
        """The number of records that could be claimed now."""
        if consumer.name:
            return self.lag(log, consumer) + consumer.returned
        published = log.count - (log.next_seq - 1 - log.view.head)
        return max(0, published - len(consumer.entries) + consumer.returned)

    def lag(self, log: TopicLog, consumer: Consumer) -> int:
        """The number of matching live records that were never delivered to a named consumer."""
        cursor, end = consumer.cursor, log.next_seq
        if consumer.undelivered is None:
            consumer.undelivered, consumer.counted_to = 0, cursor
        if consumer.counted_to < end:
            consumer.undelivered += consumer.count_matching(log, max(consumer.counted_to, cursor), end)
            consumer.counted_to = end
        lag = consumer.undelivered + len(consumer.initial_seqs)
        if end > log.view.head + 1:
            lag -= consumer.count_matching(log, max(cursor, log.view.head + 1), end)  # not published yet
        if cursor < consumer.rescan_below:
            lag -= sum(seq >= cursor and consumer.matches(tag_of(log, seq)) for seq in consumer.entries)
        return max(0, lag)

    def leases_of(self, log: TopicLog, name: str, connection: int) -> int:
        """The number of unexpired leases of a connection."""
        consumer = log.consumers.find(name) if log.consumers is not None else None
        if consumer is None:
            return 0
        consumer.process_timeouts(self.state.now_ms)  # any left are reported by `on_settled` later
        return consumer.leases_of(connection)

    # -- record selection ----------------------------------------------------------------------------------

    def pick(
        self, log: TopicLog, consumer: Consumer, limit: int, max_bytes: int
    ) -> tuple[Page, Tombstone | None, int]:
        """Select records to deliver: returned ones, then initial ones, then those from the cursor on.

        Returns the page, a tombstone for records lost at the cursor, and the cursor after the page.
        """
        consumer.process_timeouts(self.state.now_ms)
        if consumer.is_paused(self.state.now_ms):
            return empty_page(log), None, consumer.cursor
        policy = policy_of(log.config, consumer)
        limit = min(limit, limits.CLAIM_WINDOW_RECORDS_MAX)
        budget = max_bytes or (limits.DIFF_BYTES_DEFAULT if consumer.name else limits.CLAIM_BYTES_DEFAULT)
        while True:
            page = empty_page(log)
            returned, budget_left = self._pick_returned(log, consumer, policy, limit, budget)
            picked = rows_of(log, returned)
            tombstone, cursor, stop = None, consumer.cursor, log.view.head + 1
            if consumer.name:
                tombstone, cursor, stop, _ = next_gap(log.view, cursor, log.view.head)
            few = self._pick_few(log, consumer, policy, returned, cursor, stop, limit, budget_left)
            if few is not None:
                return few[0], tombstone, few[1]
            try:
                room = min(limit - len(returned), policy.max_pending - len(consumer.entries))
                if room > 0 and (budget_left > 0 or not returned):
                    fresh, cursor = self._pick_fresh(log, consumer, cursor, stop, room, budget_left)
                    picked += fresh
                if picked:
                    self.state.reader.fill(log, page, picked)
                again = len(returned)
                if again and len(page.seqs) > again and page.seqs[again] < returned[-1]:
                    # A queue rescans from the start after a restart, so undelivered records may precede returned ones.
                    page = page.take(sorted(range(len(page.seqs)), key=page.seqs.__getitem__))
                return page, tombstone, cursor
            except DamagedSegment as damage:
                consumer.put_back(returned)
                self.reads.record_losses(log, damage)
            except ColdMiss as miss:
                consumer.put_back(returned)
                if miss.count <= limits.COLD_BLOCKS_PER_READ or limit <= 1:
                    raise
                limit = max(1, limit // 4)  # too far apart to fetch all of them for one claim
            except (TopicsError, OSError):
                consumer.put_back(returned)
                raise

    def _pick_few(
        self,
        log: TopicLog,
        consumer: Consumer,
        policy: DeliveryPolicy,
        returned: list[int],
        cursor: int,
        stop: int,
        limit: int,
        budget: int,
    ) -> tuple[Page, int] | None:
        """Fast path for the common case: a few records, all in memory. None: use the general path."""
        is_plain = (
            consumer.filter is None and not consumer.initial_seqs and consumer.config.replay == "instant"
        )
        if limit > FEW or not is_plain or cursor < consumer.rescan_below:
            return None
        few = SmallPage(log, self.state.reader.tail_cache)
        if not few.add(returned):
            return None
        room = min(limit - len(returned), policy.max_pending - len(consumer.entries))
        if room > 0 and (budget > 0 or not returned):
            found = few.take(cursor, stop, room, budget)
            if found is None:
                return None
            cursor = found
        return few.page(), cursor

    def _pick_returned(
        self, log: TopicLog, consumer: Consumer, policy: DeliveryPolicy, limit: int, budget: int
    ) -> tuple[list[int], int]:
        """Records to redeliver. Those that have exhausted their deliveries are given up here."""
        picked: list[int] = []
        dead: list[int] = []
        for seq in consumer.take_returned():
            entry = consumer.entries[seq]
            is_dead = entry.dead_letter is not None and policy.dead_letter is not None
            if is_dead or (policy.max_deliver and entry.deliveries >= policy.max_deliver):
                dead.append(seq)
                if len(dead) >= limits.CLAIM_MAX:
                    self.claims_due[id(consumer)] = log, consumer  # the rest in later turns
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
                self._give_up_deliveries(log, consumer, policy, dead)
            except TopicsError:
                consumer.put_back(picked + dead)
                raise
        return picked, budget

    def _pick_fresh(
        self, log: TopicLog, consumer: Consumer, cursor: int, stop: int, limit: int, budget: int
    ) -> tuple[list[tuple[Chunk, Picked]], int]:
        """Undelivered records, and the cursor after them."""
        if consumer.initial_seqs:
            return rows_of(log, self._pick_initial(log, consumer, limit, budget)), cursor
        if consumer.config.replay == "original":
            stop = min(stop, self._replay_stop(log, consumer, cursor))
        between: list[int] = []
        if cursor < consumer.rescan_below and consumer.entries:
            between, cursor = self._pick_between(
                log, consumer, cursor, min(stop, consumer.rescan_below), limit, budget
            )
            limit -= len(between)
            if cursor < consumer.rescan_below or limit <= 0:
                return rows_of(log, between), cursor
        page = empty_page(log)
        picked = self.state.reader.undelivered(log, page, cursor, stop, limit, budget, consumer.filter)
        return rows_of(log, between) + picked, page.next_from_seq + 1

    @staticmethod
    def _pick_initial(log: TopicLog, consumer: Consumer, limit: int, budget: int) -> list[int]:
        found: list[int] = []
        for seq in consumer.initial_seqs[:limit]:
            budget -= size_of(log, seq)
            if found and budget < 0:
                break
            found.append(seq)
        return found

    @staticmethod
    def _pick_between(
        log: TopicLog, consumer: Consumer, cursor: int, stop: int, limit: int, budget: int
    ) -> tuple[list[int], int]:
        """Records between pending entries that lie beyond the cursor, after a restart or reset; and the cursor after them."""
        found: list[int] = []
        for chunk, low, high in log.spans(max(cursor, log.first_seq), stop):
            rows = np.flatnonzero(chunk.live(low, high, frames.DEAD)) + low + chunk.first_seq
            for seq in rows.tolist():
                if seq in consumer.entries or not consumer.matches(tag_of(log, seq)):
                    continue
                budget -= size_of(log, seq)
                if found and budget < 0:
                    return found, seq
                found.append(seq)
                if len(found) == limit:
                    return found, seq + 1
        return found, stop

    def _replay_stop(self, log: TopicLog, consumer: Consumer, cursor: int) -> int:
        """Replay original: the seq before which records are due."""
        first = self.next_live(log, consumer, cursor)
        if first is None:
            return log.view.head + 1
        chunk, row = first
        if consumer.replay_shift_ms is None:
            consumer.replay_shift_ms = self.state.now_ms - chunk.ts_at(row)
        return log.first_since(self.state.now_ms - consumer.replay_shift_ms + 1)

    def replay_due(self, log: TopicLog, consumer: Consumer) -> int:
        """Replay original: when the next record is due; 0: there is none."""
        first = self.next_live(log, consumer, consumer.cursor)
        if first is None or consumer.replay_shift_ms is None:
            return 0
        return first[0].ts_at(first[1]) + consumer.replay_shift_ms

    def next_live(self, log: TopicLog, consumer: Consumer, cursor: int) -> tuple[Chunk, int] | None:
        page = empty_page(log)
        picked = self.state.reader.undelivered(
            log, page, cursor, log.view.head + 1, 1, 1 << 30, consumer.filter
        )
        return (picked[0][0], int(picked[0][1][0])) if picked else None

    # -- leases --------------------------------------------------------------------------------------------

    def lease(
        self,
        token: object,
        command: con.Claim,
        log: TopicLog,
        consumer: Consumer,
        page: Page,
        cursor: int,
        tombstone: Tombstone | None,
    ) -> None:
        """Lease the selected records and reply."""
        state = self.state
        seqs = page.seqs
        has_moved = cursor != consumer.cursor
        if not seqs and not has_moved:
            state.ready.append((token, self.claimed(log, consumer, tombstone)))
            return
        durable = is_durable(log.config, consumer)
        if durable:
            try:
                state.reserve(CONTROL_BYTES + len(command.node) + len(seqs) * SEQ_BYTES)
            except TopicsError:
                consumer.put_back(seq for seq in seqs if seq in consumer.entries)
                raise
        entries = consumer.entries
        deliveries = [entries[seq].deliveries + 1 if seq in entries else 1 for seq in seqs]
        acks = consumer.config.ack != "none"
        policy = policy_of(log.config, consumer)
        deadlines = [
            state.now_ms + policy.lease_for(command.lease_ms, number) if acks else 0 for number in deliveries
        ]
        first_id, before = self.lease_id, consumer.cursor
        self.lease_id = (self.lease_id + len(seqs)) & ID_MASK
        for event in claimed_events(
            consumer.name, seqs, deadlines, deliveries, command.node, first_id, cursor if has_moved else 0,
            streamed=command.connection != 0,
        ):  # fmt: skip
            self.apply_event(log, consumer, event, durable=durable)
        consumer.note_cursor_moved(before, seqs)
        self.prune_skipped(log, consumer, before, consumer.cursor)
        if command.connection and acks:
            consumer.attach(command.connection, seqs)
        ids = [(first_id + i) & ID_MASK for i in range(len(seqs))] if acks else [0] * len(seqs)
        result = self.claimed(log, consumer, tombstone)
        result.page, result.lease_ids = page, ids
        result.deadlines, result.deliveries = deadlines, deliveries
        log.last_read_ts = state.now_ms
        if durable:
            state.add_op(Op(log, token, result, unordered=True))
            if not acks:
                self._prune(log, seqs)
        else:
            state.ready.append((token, result))

    def claimed(self, log: TopicLog, consumer: Consumer, tombstone: Tombstone | None = None) -> con.Claimed:
        """An empty reply to a claim."""
        ready = self.ready_count(log, consumer)
        return con.Claimed(log.name, consumer.name, empty_page(log), [], [], [], ready, tombstone)

    def apply_event(self, log: TopicLog, consumer: Consumer, event: Event, *, durable: bool = True) -> None:
        """Apply an event to a consumer; a durable one is logged."""
        if durable:
            self.state.log(frames.LEASE, log, event)
            self.state.touched[log.id] = log
        else:
            consumer.apply(event)

    def _apply_event(self, log: TopicLog, event: Event, op: Op | None) -> None:
        if not event.consumer:
            self.queue_of(log)
        if log.consumers is not None:
            log.consumers.apply(event)

    # -- exhausted deliveries ------------------------------------------------------------------------------

    def _give_up_deliveries(
        self, log: TopicLog, consumer: Consumer, policy: DeliveryPolicy, seqs: list[int]
    ) -> None:
        """Move records that have exhausted their deliveries to the dead letter topic, or discard them."""
        if policy.dead_letter is not None:
            by_reason: dict[tuple[int, str], list[int]] = {}
            for seq in seqs:
                reason_key = consumer.entries[seq].dead_letter or (policy.max_deliver, "")
                by_reason.setdefault(reason_key, []).append(seq)
            for (deliveries, reason), part in by_reason.items():
                self.move(log, consumer, part, policy.dead_letter, deliveries, reason)
            return
        self.state.reserve(CONTROL_BYTES + len(seqs) * SEQ_BYTES)
        self.apply_event(log, consumer, Event(consumer.name, GIVEN_UP, seqs))
        op = Op(log)
        self.prune_into(log, seqs, op)
        self.state.count_live(op)
        self.state.add_op(op)

    def move(
        self, log: TopicLog, consumer: Consumer, seqs: list[int], target: str, deliveries: int, reason: str
    ) -> None:
        """Mark records as dead letters; they may be sent once this is synced."""
        assert log.consumers is not None
        self.state.reserve(CONTROL_BYTES + len(target) + len(reason) * 4 + len(seqs) * SEQ_BYTES)
        counts = [deliveries or consumer.entries[seq].deliveries for seq in seqs]
        number = log.consumers.next_dead_letter
        event = Event(
            consumer.name, MOVE, seqs, deliveries=counts, number=number, target=target, reason=reason
        )
        self.apply_event(log, consumer, event)
        self.state.add_op(Op(log, sync=True, dead_letters=log.consumers.next_dead_letter - 1))

    def note_dead_letters(self, log: TopicLog, *commands: con.MovesDeadLetters) -> None:
        """Tell these commands which dead letters they have caused, so that their replies can wait for those."""
        assert log.consumers is not None
        for command in commands:
            command.last_dead_letter, command.dead_letters_ms = (
                log.consumers.next_dead_letter - 1,
                self.state.clock.mono_ms,
            )

    # -- retention by interest -----------------------------------------------------------------------------

    def _prune(self, log: TopicLog, seqs: list[int]) -> None:
        op = Op(log)
        self.prune_into(log, seqs, op)
        if op.count:
            self.state.count_live(op)
            self.state.add_op(op)

    def prune_skipped(self, log: TopicLog, consumer: Consumer, first: int, stop: int) -> None:
        """Prune records that the cursor has skipped: the filter may have been the reason to keep them."""
        if consumer.filter is not None and log.config.retention == "interest" and first < stop:
            self._prune_range(log, first, stop, None)

    def prune_settled(self, log: TopicLog, op: Op | None) -> None:
        """Prune records that every consumer has passed."""
        named = log.consumers.named.values() if log.consumers is not None else ()
        if log.config.retention == "interest" and named:
            self._prune_range(log, log.first_seq, min(consumer.cursor for consumer in named), op)

    def _prune_range(self, log: TopicLog, first: int, stop: int, op: Op | None) -> None:
        assert log.consumers is not None
        first, stop = max(first, log.first_seq), min(stop, log.next_seq)
        if first >= stop or log.config.type == "queue":
            return
        if (stop - first) * len(log.consumers.named) <= PRUNE_INLINE_MAX:
            into = op if op is not None else Op(log)
            self._delete_unneeded(log, live_seqs(log, first, stop), into)
            if op is None and into.count:
                self.state.count_live(into)
                self.state.add_op(into)
            return
        self.prune_later(log, PruneRequest(first, stop), op)

    def prune_into(self, log: TopicLog, seqs: list[int], op: Op) -> None:
        """Delete those of these records that the topic's retention no longer keeps.

        If that takes longer than a turn allows, the op's reply waits for it.
        """
        retention = log.config.retention
        if retention == "limits" or not seqs or log.config.type == "queue":
            return  # jobs of a queue are deleted by its acks only
        assert log.consumers is not None
        seqs = sorted(seqs)
        if retention == "work_queue":
            self._delete_live(log, np.array(seqs, dtype=np.uint64), op)
        elif len(seqs) * len(log.consumers.named) <= PRUNE_INLINE_MAX:
            self._delete_unneeded(log, np.array(seqs, dtype=np.uint64), op)
        else:
            self.prune_later(log, PruneRequest(seqs[0], seqs[-1] + 1, seqs), op)

    def prune_later(self, log: TopicLog, request: PruneRequest, op: Op | None) -> None:
        assert log.consumers is not None
        queue = log.consumers.pruning
        if op is not None and op.token is not None:
            request.answer = Op(log, op.token, op.result, sync=op.sync, unordered=op.unordered)
            op.token = None
        last = queue[-1] if queue else None
        # Requests without a reply are joined, so that the queue stays short.
        if last is not None and last.work is None and not (last.answer or last.seqs or request.answer):
            last.first, last.stop = min(last.first, request.first), max(last.stop, request.stop)
        else:
            queue.append(request)
        self.pruning[log.id] = log

    def run_pruning(self) -> None:
        """Do one turn's share of pruning."""
        state = self.state
        left = PRUNE_PER_TURN
        pending: dict[int, TopicLog] = {}
        while left > 0 and self.pruning and state.read_only is None:
            log = self.pruning.pop(next(iter(self.pruning)))
            assert log.consumers is not None
            queue = log.consumers.pruning
            left -= 1
            try:
                if not log.dropped:
                    state.touch(log)
                    left -= self._prune_slice(log, queue[0])
            except UpkeepPending:
                pending[log.id] = log
                continue
            except (TopicsError, OSError):
                # The rest stays until a consumer is dropped or reset, or until a restart.
                queue[0].work = None
            while queue and (log.dropped or queue[0].work is None):
                done = queue.popleft()
                if done.answer is not None:
                    state.add_op(done.answer)
                if not log.dropped:
                    break
            if queue:
                self.pruning[log.id] = log
        self.pruning |= pending

    def end_pruning(self, error: TopicsError | None = None) -> None:
        """Stop pruning: the shard stops or is read-only. The rest is checked after a restart."""
        state = self.state
        for log in self.pruning.values():
            assert log.consumers is not None
            for request in log.consumers.pruning:
                if request.answer is not None and error is None:
                    state.add_op(request.answer)
                elif request.answer is not None:
                    state.ready.append((request.answer.token, error))
            log.consumers.pruning.clear()
        self.pruning = {}

    def _prune_slice(self, log: TopicLog, request: PruneRequest) -> int:
        """Do one slice; `work` is None when the request is done."""
        if request.work is None:
            request.work = self._prune_steps(log, request)
        used = 0
        for units in request.work:
            used += units
            if used >= PRUNE_PER_SLICE:
                return used
        request.work = None
        return used

    def _prune_steps(self, log: TopicLog, request: PruneRequest) -> Work:
        at = request.first
        while at < request.stop:
            if request.seqs is not None:
                start = bisect_left(request.seqs, at)
                seqs = np.array(request.seqs[start : start + PRUNE_WINDOW], dtype=np.uint64)
                at = int(seqs[-1]) + 1
            else:
                span = next(log.spans(max(at, log.first_seq), request.stop), None)
                if span is None:
                    return
                chunk, low, high = span
                at = chunk.first_seq + min(low + PRUNE_WINDOW, high)
                seqs = live_seqs(log, chunk.first_seq + low, at)
            yield 10
            gone = yield from self._unneeded_steps(log, seqs)
            op = Op(log)
            self._delete_live(log, gone, op)
            if op.count:
                self.state.count_live(op)
                self.state.add_op(op)
                yield 4 * len(gone)

    def _unneeded_steps(self, log: TopicLog, seqs: Seqs) -> Generator[int, None, Seqs]:
        """The records that no consumer needs. That can only change if a consumer is created, changed or reset."""
        consumers = log.consumers
        assert consumers is not None
        while True:
            changes, left = consumers.changes, seqs[log.are_live(seqs)]
            tags = [tag_of(log, seq) for seq in left.tolist()]
            yield len(tags)
            for consumer in list(consumers.named.values()):
                if not len(left):
                    return left
                is_needed = needed(consumer, left.tolist(), tags)
                tags = [tag for tag, keeps in zip(tags, is_needed, strict=True) if not keeps]
                left = left[~np.array(is_needed, dtype=np.bool_)]
                yield 1 + len(is_needed) // (1 if consumer.filter is not None else 8)
            if consumers.changes == changes:
                return left

    def _delete_unneeded(self, log: TopicLog, seqs: Seqs, op: Op) -> None:
        steps = self._unneeded_steps(log, seqs)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            self._delete_live(log, end.value, op)

    def _delete_live(self, log: TopicLog, seqs: Seqs, op: Op) -> None:
        ranges = ranges_of(seqs[log.are_live(seqs)])
        if ranges and self.state.has_room(CONTROL_BYTES + len(ranges) * SEQ_BYTES):
            self.appends.log_delete(log, ranges, op)
            self.state.touched[log.id] = log


def slice_budget(progress: SliceProgress) -> int:
    """The cost allowed for the next slice. It grows as the work goes on, and without bound once the estimate is exceeded
    because of concurrent changes.
    """
    return max(
        CATCH_UP_US,
        min(progress.spent // 8, CATCH_UP_GROWTH * CATCH_UP_US),
        progress.spent - progress.estimate,
    )


def live_seqs(log: TopicLog, first: int, stop: int) -> Seqs:
    """The live seqs in [first, stop)."""
    parts = [
        (np.flatnonzero(chunk.live(low, high, frames.DEAD)) + (low + chunk.first_seq)).astype(np.uint64)
        for chunk, low, high in log.spans(max(first, log.first_seq), stop)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)


def ranges_of(seqs: Seqs) -> list[Range]:
    """Convert ascending seqs to inclusive ranges."""
    if not len(seqs):
        return []
    breaks = np.flatnonzero(np.diff(seqs) != 1)
    firsts = seqs[np.concatenate(([0], breaks + 1))].tolist()
    lasts = seqs[np.concatenate((breaks, [len(seqs) - 1]))].tolist()
    return list(zip(firsts, lasts, strict=True))


def needed(consumer: Consumer, seqs: list[int], tags: list[bytes | None]) -> list[bool]:
    """Which of these live records match a consumer's filter and are not settled."""
    cursor, entries, initial = consumer.cursor, consumer.entries, consumer.initial_seqs
    matches = consumer.matches if len(seqs) <= FEW or consumer.filter is None else consumer.filter.matches
    is_needed = [
        seq in entries or (seq >= cursor and matches(tag)) for seq, tag in zip(seqs, tags, strict=True)
    ]
    if initial and initial[0] <= seqs[-1] and initial[-1] >= seqs[0]:
        chosen = set(initial[bisect_left(initial, seqs[0]) : bisect_right(initial, seqs[-1])])
        return [is_it or seq in chosen for seq, is_it in zip(seqs, is_needed, strict=True)]
    return is_needed


def tag_of(log: TopicLog, seq: int) -> bytes | None:
    found = log.find(seq)
    tag = found[0].get(found[1])[4] if found is not None else 0
    return log.tags.strings.names[tag] if tag else None


def empty_page(log: TopicLog) -> Page:
    return Page.empty(log.name, next_from_seq=0, head_seq=log.view.head, earliest_seq=log.first_seq)


def rows_of(log: TopicLog, seqs: list[int]) -> list[tuple[Chunk, Picked]]:
    """The rows of these records, grouped by chunk."""
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
    *,
    streamed: bool,
) -> Iterator[Event]:
    """One event per lease deadline; with a backoff there may be several. The first moves the cursor."""
    start = 0
    while start < len(seqs) or cursor:
        until_ms = deadlines[start] if seqs else 0
        stop = next((i for i in range(start, len(seqs)) if deadlines[i] != until_ms), len(seqs))
        again = deliveries[start:stop] if max(deliveries[start:stop], default=1) > 1 else []
        yield Event(
            name, CLAIMED, seqs[start:stop], until_ms, node, (first_id + start) & ID_MASK, again, cursor,
            streamed=streamed,
        )  # fmt: skip
        start, cursor = stop, 0


def size_of(log: TopicLog, seq: int) -> int:
    """The accounted size of a record in bytes."""
    found = log.find(seq)
    return found[0].get(found[1])[6] if found is not None else 0
