"""Consumers of topics: create, change, get, list, pause, reset, drop; counts of queues; inactivity; overlaps of work queues.

Like a topic's config, a consumer's config and position are logged and synced in every durability class.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import count, islice

import numpy as np

from topics.api import limits
from topics.api.config import ConsumerConfig, TopicConfig
from topics.api.errors import (
    ConsumerNotFound,
    ConsumerOverlap,
    InvalidRequest,
    Throttled,
    TopicNotFound,
    WrongEpoch,
)
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.core.subjects import TagFilter
from topics.engine.reading.tombstones import next_gap
from topics.engine.shard.appends import NAME, RANGE_BYTES
from topics.engine.shard.consumers.claims import Claims
from topics.engine.shard.consumers.leases import Leases, consumer_rows, is_durable, slice_budget, tag_of
from topics.engine.shard.long_commands import Work
from topics.engine.shard.state import CONTROL_BYTES, ShardState
from topics.engine.storage import frames
from topics.engine.storage.control import ConsumerStored, Event
from topics.engine.topic.consumer import (
    FORGOTTEN,
    MOVING,
    PAUSED,
    RESET,
    TIMEOUTS_PER_SLICE,
    Consumer,
    MatchCount,
    PruneRequest,
    SliceProgress,
    TopicConsumers,
    count_cost,
    filter_of,
)
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.snapshot_row import RowPart, TopicRow

STALE_TIMERS_MAX = 64  # stale timers always tolerated
CONFIG_BYTES = 32 * limits.KIB  # upper bound of a consumer's config
SCANNED_PER_SLICE = 256  # records or tags that a command scans at a time
STATE_COST = 20  # cost of building a consumer's state, in microseconds


class Consumers:
    def __init__(self, state: ShardState, leases: Leases, claims: Claims) -> None:
        self.state = state
        self.leases = leases
        self.claims = claims
        state.handlers |= {
            con.PutConsumer: self._put_consumer,
            con.DropConsumer: self._drop_consumer,
            con.PauseConsumer: self._pause_consumer,
            con.ResetConsumer: self._reset_consumer,
            con.GetConsumer: self._get_consumer,
            con.ListConsumers: self._list_consumers,
        }
        state.appliers |= {frames.CONSUMER_PUT: self._apply_put, frames.CONSUMER_DELETE: self._apply_delete}
        state.row_parts["consumers"] = RowPart(self._capture, self._restore)
        self._inner_state = state.wrap(cmd.State, self._state_of_queue)
        self._inner_put_topic = state.wrap(cmd.PutTopic, self._put_topic_with_consumers)
        # Consumers with an inactivity TTL, by timer number.
        self.idle: dict[int, tuple[TopicLog, Consumer]] = {}
        self.idle_timers: list[tuple[int, int]] = []
        self._timer_numbers = count(1)
        self.is_followed: Callable[[str, str], bool] = lambda topic, consumer: False  # by an open stream
        self.overlaps: list[tuple[str, str, str]] = []  # in stored work queues, as of the start
        state.events.recovered.append(self._recovered)
        state.events.topic_recovered.append(self._topic_recovered)
        state.events.topic_removed.append(self._topic_removed)
        state.events.config_changed.append(self._config_changed)
        state.events.state_requested.append(self._add_queue_counts)
        state.events.checked.append(self.check_consumers)

    def _put_consumer(self, token: object, command: con.PutConsumer) -> None:
        self.state.check_writable()
        log = self.state.for_write(command.topic)
        if log is None:
            raise TopicNotFound(command.topic)
        self._check_consumer(log, command.consumer, command.config)
        self.state.long.start(token, command, log, self._put_steps(token, command, log))

    def _put_steps(self, token: object, command: con.PutConsumer, log: TopicLog) -> Work:
        """Find the start position, create or change the consumer, and reply once its lag is counted."""
        state = self.state
        name, config = command.consumer, command.config
        known = _named(log, name)
        if known is not None and known.config == config:
            yield from self._wait_caught_up(log, known)
            state.answer(token, self._consumer_state(log, known), log, held=log.pending > 0)
            return
        while True:
            changes = log.consumers.changes if log.consumers is not None else 0
            known = _named(log, name)
            is_new_filter = known is None or known.config.filter != config.filter
            if log.config.retention == "work_queue" and is_new_filter:
                yield from self._check_overlap(log, name, config)
            if known is None:
                if log.consumers is not None and len(log.consumers.named) >= limits.CONSUMERS_PER_TOPIC_MAX:
                    raise Throttled(
                        f"topic {log.name!r} has its maximum of {limits.CONSUMERS_PER_TOPIC_MAX} consumers; delete some",
                        limit="consumers",
                        max=limits.CONSUMERS_PER_TOPIC_MAX,
                    )
                cursor, initial_seqs = yield from self._start_position(log, config)
            else:
                initial_seqs = yield from self._remaining_initial(log, known, config)
                cursor = known.cursor
            if changes == (log.consumers.changes if log.consumers is not None else 0):
                break  # no consumer was created, changed or dropped during the scan
        state.check_writable()
        state.reserve(CONFIG_BYTES + len(initial_seqs) * RANGE_BYTES)
        created_ms = state.now_ms if known is None else known.created_ms
        stored = ConsumerStored(name, config, cursor, initial_seqs, created_ms)
        state.log(frames.CONSUMER_PUT, log, stored)
        consumer = _named(log, name)
        assert consumer is not None
        consumer.active_ms = state.now_ms
        self._set_idle_timer(log, consumer)
        self.claims.wake_claims(log, consumer)
        state.touched[log.id] = log
        yield from self._answer_change(token, log, consumer, created=known is None)

    def _answer_change(
        self, token: object, log: TopicLog, consumer: Consumer, *, created: bool = False
    ) -> Work:
        """Reply to a logged change of a consumer: the change is synced now, the reply waits until the lag is counted."""
        if self.leases.is_behind(log, consumer):
            self.state.add_op(Op(log, sync=True))
            yield 0
            yield from self._wait_caught_up(log, consumer)
        state = self._consumer_state(log, consumer)
        state.created = created
        self.state.add_op(Op(log, token, state, sync=True))

    def _wait_caught_up(self, log: TopicLog, consumer: Consumer) -> Work:
        """Work until the consumer is no longer behind (see `is_behind`); no turn passes after the last slice."""
        while not consumer.dropped and self.leases.is_behind(log, consumer):
            took = self.leases.catch_up(log, consumer)
            if self.leases.is_behind(log, consumer):
                yield took
        if consumer.dropped:
            raise ConsumerNotFound(log.name, consumer.name)

    @staticmethod
    def _capture(log: TopicLog, row: TopicRow) -> None:
        row.consumers, row.dead_letters = consumer_rows(log)

    def _restore(self, log: TopicLog, row: TopicRow) -> None:
        if row.dead_letters is not None:
            log.consumers = TopicConsumers()
            log.consumers.restore(row.dead_letters)
        for stored in row.consumers:
            shape = ConsumerStored(
                stored.name, stored.config, stored.cursor, stored.initial_seqs, stored.created_ms
            )
            consumer = self.store_consumer(log, shape) if stored.name else self.leases.queue_of(log)
            consumer.restore(stored)

    def _apply_put(self, log: TopicLog, stored: ConsumerStored, op: Op | None) -> None:
        self.store_consumer(log, stored)

    def store_consumer(self, log: TopicLog, stored: ConsumerStored) -> Consumer:
        """Create or change a consumer."""
        if log.consumers is None:
            log.consumers = TopicConsumers()
        log.consumers.changes += 1
        consumer = log.consumers.named.get(stored.name)
        if consumer is None:
            consumer = log.consumers.named[stored.name] = Consumer(
                stored.name, stored.config, self.leases.settled.append
            )
        else:
            consumer.configure(stored.config)
        consumer.cursor, consumer.initial_seqs = stored.cursor, list(stored.initial_seqs)
        consumer.created_ms = stored.created_ms
        return consumer

    def _check_consumer(self, log: TopicLog, name: str, config: ConsumerConfig) -> None:
        if not NAME.match(name):
            raise InvalidRequest(
                f"{name!r} is not a valid consumer name: use 1 to 255 of A-Z a-z 0-9 . _ : -, starting with a letter or digit"
            )
        if config.dead_letter is not None:
            if not NAME.match(config.dead_letter):
                raise InvalidRequest(f"dead_letter {config.dead_letter!r} is not a valid topic name")
            if config.dead_letter == log.name:
                raise InvalidRequest("a topic cannot be the dead letter topic of its own consumer")

    def _check_overlap(self, log: TopicLog, name: str, config: ConsumerConfig) -> Work:
        """In a work queue each record is for one consumer, so filters must not overlap. Existing overlaps are kept."""
        if log.config.type == "queue":
            raise ConsumerOverlap(log.name, con.QUEUE, name)
        if log.consumers is not None:
            other = yield from log.consumers.overlapping(name, filter_of(config))
            if other is not None:
                raise ConsumerOverlap(log.name, other, name)

    def _start_position(
        self, log: TopicLog, config: ConsumerConfig
    ) -> Generator[int, None, tuple[int, list[int]]]:
        """The cursor of a new consumer, and records below it to deliver first."""
        end = log.view.head + 1
        if config.deliver == "new":
            return end, []
        if config.deliver == "from_seq":
            return max(config.deliver_value, 1), []
        if config.deliver == "from_ts":
            return log.first_since(config.deliver_value), []
        if config.deliver == "all":
            return min(log.view.first_seq, end), []
        tag_filter = filter_of(config)
        if config.deliver == "last_per_tag":
            return end, (yield from self._last_per_tag(log, tag_filter, end))
        if tag_filter is None:
            return log.last_live(end) or end, []
        return (yield from self._last_matching(log, tag_filter, end)), []

    def _last_matching(self, log: TopicLog, tag_filter: TagFilter, end: int) -> Generator[int, None, int]:
        """The last matching record below `end`; `end` if there is none."""
        at = end
        while (span := log.span_before(at, SCANNED_PER_SLICE)) is not None:
            chunk, first, stop = span
            rows = np.flatnonzero(chunk.live(first, stop, frames.DEAD)) + first
            for row in reversed(rows.tolist()):
                if tag_filter.matches(tag_of(log, chunk.first_seq + row)):
                    return chunk.first_seq + int(row)
            at = chunk.first_seq + first
            yield SCANNED_PER_SLICE * tag_filter.cost
        return end

    def _last_per_tag(
        self, log: TopicLog, tag_filter: TagFilter | None, end: int
    ) -> Generator[int, None, list[int]]:
        """The last record of each matching tag, ascending. For a tag with a record above `end`, that one is enough."""
        tags, first = log.tags, 1
        lasts: dict[bytes, int] = {}
        unsure: list[bytes] = []
        while first < len(tags.strings.names) or unsure:
            if tags is not log.tags:  # the topic was reloaded: ids have changed
                tags, first, lasts = log.tags, 1, {}
            names = unsure[-SCANNED_PER_SLICE:]
            if names:
                del unsure[-SCANNED_PER_SLICE:]
            else:
                found = tags.strings.names[first : first + SCANNED_PER_SLICE]
                names = [name for name in found if name and (tag_filter is None or tag_filter.matches(name))]
                first += SCANNED_PER_SLICE
            for name in names:
                lasts[name] = tags.last(name, log.are_live) if name in tags.strings.ids else 0
            if len(lasts) > limits.INITIAL_SEQS_MAX:
                raise Throttled(
                    f"deliver last_per_tag supports at most {limits.INITIAL_SEQS_MAX} tags; narrow the filter",
                    limit="tags",
                    max=limits.INITIAL_SEQS_MAX,
                )
            yield SCANNED_PER_SLICE * (tag_filter.cost if tag_filter is not None else 1) + 2 * len(names)
            if first >= len(tags.strings.names) and not unsure:
                # Check tags again whose last record was deleted in the meantime.
                unsure = [name for name, seq in lasts.items() if seq and not log.is_live(seq)]
        return sorted(seq for seq in lasts.values() if 0 < seq < end)

    def _remaining_initial(
        self, log: TopicLog, known: Consumer, config: ConsumerConfig
    ) -> Generator[int, None, list[int]]:
        """The consumer's initial records that still match with this config."""
        tag_filter, initial_seqs = filter_of(config), known.initial_seqs
        if tag_filter is None or not initial_seqs:
            return initial_seqs
        kept: set[int] = set()
        for start in range(0, len(initial_seqs), SCANNED_PER_SLICE):
            part = initial_seqs[start : start + SCANNED_PER_SLICE]
            kept |= {seq for seq in part if tag_filter.matches(tag_of(log, seq))}
            yield 2 * len(part)
        return [seq for seq in known.initial_seqs if seq in kept]

    def _drop_consumer(self, token: object, command: con.DropConsumer) -> None:
        self.state.check_writable()
        log = self.state.for_write(command.topic)
        if log is None:
            raise TopicNotFound(command.topic)
        consumer = log.consumers.named.get(command.consumer) if log.consumers is not None else None
        result = con.ConsumerDropped(command.topic, command.consumer, consumer is not None)
        if consumer is None:
            self.state.answer(token, result, log, held=log.pending > 0)
            return
        self._end_consumer(log, consumer, token, result)

    def _end_consumer(self, log: TopicLog, consumer: Consumer, token: object, result: object) -> None:
        state = self.state
        state.reserve(CONTROL_BYTES + len(consumer.name))
        state.log(frames.CONSUMER_DELETE, log, consumer.name)
        self.claims.fail_claims(log, ConsumerNotFound(log.name, consumer.name), consumer)
        op = Op(log, token, result, sync=True)
        self.leases.prune_settled(log, op)
        state.count_live(op)
        state.touched[log.id] = log
        state.add_op(op)

    def _apply_delete(self, log: TopicLog, name: str, op: Op | None) -> None:
        consumer = _named(log, name)
        if consumer is None:
            return
        assert log.consumers is not None
        consumer.dropped = True
        self.idle.pop(consumer.idle_number, None)
        for connection in list(consumer.connections):
            self.leases.settled.append(connection)
        if consumer.counts[MOVING]:
            log.consumers.drop_dead_letters(consumer.name, set(consumer.entries))
        log.consumers.changes += 1
        del log.consumers.named[consumer.name]

    # -- reading -------------------------------------------------------------------------------------------

    def _get_consumer(self, token: object, command: con.GetConsumer) -> None:
        log, consumer = self.leases.find_consumer(command.topic, command.consumer or "?")
        self.state.long.start(token, command, log, self._get_steps(token, log, consumer))

    def _get_steps(self, token: object, log: TopicLog, consumer: Consumer) -> Work:
        yield from self._wait_caught_up(log, consumer)
        self.state.answer(token, self._consumer_state(log, consumer), log, held=log.pending > 0)

    def _list_consumers(self, token: object, command: con.ListConsumers) -> None:
        log = self.state.for_read(command.topic)
        self.state.long.start(token, command, log, self._list_steps(token, command, log))

    def _list_steps(self, token: object, command: con.ListConsumers, log: TopicLog) -> Work:
        named = log.consumers.named if log.consumers is not None else {}
        size = min(max(command.limit, 1), limits.LIST_PAGE_MAX)
        names = list(islice((name for name in sorted(named) if name > command.after), size + 1))
        rows: list[con.ConsumerState] = []
        for name in names:
            consumer = named.get(name)
            if consumer is None:
                continue
            with suppress(ConsumerNotFound):
                yield from self._wait_caught_up(log, consumer)
                cost = STATE_COST + len(consumer.entries) // 64 + consumer.remaining_cost(log, log.next_seq)
                rows.append(self._consumer_state(log, consumer))
                yield max(cost, 1)
        self.state.answer(token, con.ConsumerList(command.topic, rows), log, held=log.pending > 0)

    def _consumer_state(self, log: TopicLog, consumer: Consumer) -> con.ConsumerState:
        counters, now_ms = consumer.counters, self.state.now_ms
        lag = self.leases.lag(log, consumer)
        entries, config = len(consumer.entries), consumer.config
        tombstone, *_ = next_gap(log.view, consumer.cursor, log.view.head)
        return con.ConsumerState(
            topic=log.name,
            consumer=consumer.name,
            config=config,
            created=False,
            created_ts=consumer.created_ms,
            cursor=consumer.cursor,
            delivered=counters.delivered,
            redelivered=counters.redelivered,
            ack_floor=consumer.ack_floor,
            ack_pending=entries,
            in_flight=consumer.in_flight,
            acked=counters.acked,
            dead_lettered=counters.dead_lettered,
            given_up=counters.given_up,
            waiting=len(consumer.waiters),
            lag_records=lag,
            lag_ms=self.lag_ms(log, consumer, now_ms) if lag else 0,
            last_activity_ts=consumer.active_ms,
            paused=consumer.is_paused(now_ms),
            paused_until_ts=max(consumer.paused_until_ms, 0) if consumer.is_paused(now_ms) else 0,
            stalled=lag > 0 and entries >= config.max_ack_pending,
            tombstone=tombstone,
        )

    def lag_ms(self, log: TopicLog, consumer: Consumer, now_ms: int) -> int:
        """The age of the oldest undelivered record of the consumer."""
        oldest = self.leases.next_live(
            log, consumer, consumer.initial_seqs[0] if consumer.initial_seqs else consumer.cursor
        )
        return max(0, now_ms - oldest[0].ts_at(oldest[1])) if oldest is not None else 0

    # -- pause and reset -----------------------------------------------------------------------------------

    def _pause_consumer(self, token: object, command: con.PauseConsumer) -> None:
        self.state.check_writable()
        log, consumer = self.leases.find_consumer(command.topic, command.consumer or "?")
        self.state.long.start(token, command, log, self._pause_steps(token, command, log, consumer))

    def _pause_steps(
        self, token: object, command: con.PauseConsumer, log: TopicLog, consumer: Consumer
    ) -> Work:
        if consumer.dropped:
            raise ConsumerNotFound(log.name, consumer.name)
        self.state.reserve(CONTROL_BYTES + len(consumer.name))
        until_ms = (command.until_ms or -1) if command.paused else 0
        self.leases.apply_event(log, consumer, Event(consumer.name, PAUSED, until_ms=until_ms))
        consumer.active_ms = self.state.now_ms
        self.claims.wake_claims(log, consumer)
        yield from self._answer_change(token, log, consumer)

    def _reset_consumer(self, token: object, command: con.ResetConsumer) -> None:
        self.state.check_writable()
        log, consumer = self.leases.find_consumer(command.topic, command.consumer or "?")
        last = max(command.value, 1) - 1
        if command.epoch is not None and log.cursor_of(command.epoch, last) != last:
            raise WrongEpoch(command.topic, command.epoch, log.epoch)
        self.state.long.start(token, command, log, self._reset_steps(token, command, log, consumer))

    def _reset_steps(
        self, token: object, command: con.ResetConsumer, log: TopicLog, consumer: Consumer
    ) -> Work:
        """Count the records that the reset skips or redelivers while the cursor is locked, then move it."""
        assert log.consumers is not None
        yield from self._wait_caught_up(log, consumer)
        count: MatchCount | None = None
        progress = SliceProgress(count_cost(consumer.filter, log.next_seq - log.first_seq))
        consumer.cursor_locked = True
        try:
            while True:
                from_seq, to_seq = consumer.cursor, self._reset_to(log, command)
                low, high = min(from_seq, to_seq), max(from_seq, to_seq)
                if count is None or count.filter is not consumer.filter or count.first > low:
                    self._end_count(log, count)
                    count = MatchCount(consumer.filter, low, high)
                    log.consumers.recounts.append(count)
                count.stop = max(count.stop, high)  # the head may have moved
                took, share = 1, slice_budget(progress)
                while not count.is_done and took < share:
                    took += count.count_block(log)
                progress.spent += took
                if count.is_done:
                    took += self.leases.catch_up(log, consumer)
                    if consumer.process_timeouts(self.state.now_ms) and consumer.is_counted(
                        log, log.next_seq
                    ):
                        break
                yield took
                if consumer.dropped:
                    raise ConsumerNotFound(log.name, consumer.name)
        finally:
            consumer.cursor_locked = False
            self._end_count(log, count)
            self.claims.wake_claims(log, consumer)
        again, skips = (count.total, 0) if to_seq < from_seq else (0, count.total)
        skips += sum(seq < to_seq for seq in consumer.entries)
        state = self._consumer_state(log, consumer)
        result = con.ConsumerReset(state, command.dry_run, from_seq, to_seq, again, skips)
        if command.dry_run:
            self.state.answer(token, result, log, held=log.pending > 0)
            return
        self.state.check_writable()
        self.state.reserve(CONTROL_BYTES + len(consumer.name))
        undelivered = (consumer.undelivered or 0) + (again or -count.total)
        self.leases.apply_event(log, consumer, Event(consumer.name, RESET, cursor=to_seq))
        consumer.undelivered = undelivered
        consumer.active_ms = self.state.now_ms
        op = Op(log, token, result, sync=True)
        self.leases.prune_settled(log, op)
        self.state.count_live(op)
        result.state = self._consumer_state(log, consumer)
        self.state.add_op(op)

    @staticmethod
    def _reset_to(log: TopicLog, command: con.ResetConsumer) -> int:
        end = log.view.head + 1
        if command.to == "ts":
            return log.first_since(command.value)
        positions = {
            "start": min(log.view.first_seq, end),
            "end": end,
            "seq": min(max(command.value, 1), end),
        }
        return positions[command.to]

    @staticmethod
    def _end_count(log: TopicLog, count: MatchCount | None) -> None:
        if count is not None and log.consumers is not None:
            log.consumers.recounts.remove(count)

    # -- inactive consumers --------------------------------------------------------------------------------

    def _set_idle_timer(self, log: TopicLog, consumer: Consumer) -> None:
        """Set the inactivity timer of a consumer that has an inactive TTL."""
        ttl_ms = consumer.config.inactive_ttl_ms
        self.idle.pop(consumer.idle_number, None)
        if not ttl_ms:
            return
        due_ms = self.state.clock.mono_ms + max(consumer.active_ms + ttl_ms - self.state.now_ms, 0) + 1
        consumer.idle_number = next(self._timer_numbers)
        self.idle[consumer.idle_number] = log, consumer
        heapq.heappush(self.idle_timers, (due_ms, consumer.idle_number))
        if len(self.idle_timers) > 2 * len(self.idle) + STALE_TIMERS_MAX:
            self.idle_timers = [timer for timer in self.idle_timers if timer[1] in self.idle]
            heapq.heapify(self.idle_timers)

    def end_idle_consumers(self) -> None:
        state = self.state
        while self.idle_timers and self.idle_timers[0][0] <= state.clock.mono_ms and state.read_only is None:
            log_and_consumer = self.idle.get(heapq.heappop(self.idle_timers)[1])
            if log_and_consumer is None:
                continue
            log, consumer = log_and_consumer
            consumer.process_timeouts(state.now_ms)
            in_use = consumer.waiters or consumer.in_flight or consumer.counts[MOVING]
            if in_use or self.is_followed(log.name, consumer.name):
                consumer.active_ms = state.now_ms
            if state.now_ms - consumer.active_ms < consumer.config.inactive_ttl_ms:
                self._set_idle_timer(log, consumer)
            elif state.has_room(CONTROL_BYTES + len(consumer.name)):
                state.upkeep_now(log)
                self._end_consumer(log, consumer, None, None)
            else:
                consumer.active_ms = state.now_ms  # the disk is full: try again later
                self._set_idle_timer(log, consumer)

    # -- topics --------------------------------------------------------------------------------------------

    def queue_counts(self, log: TopicLog) -> cmd.QueueCounts | None:
        if log.config.type != "queue":
            return None
        consumer = self.leases.queue_of(log)
        consumer.process_timeouts(self.state.now_ms)
        assert log.consumers is not None
        in_flight, dead = consumer.in_flight, log.consumers.dead_lettered
        return cmd.QueueCounts(self.leases.ready_count(log, consumer), in_flight, dead)

    def _add_queue_counts(self, log: TopicLog, state: cmd.TopicState) -> None:
        state.queue = self.queue_counts(log)

    def _state_of_queue(self, token: object, command: cmd.State) -> None:
        """Process the lease timeouts of a queue before its counts are read."""
        state = self.state
        log = state.published.get(command.topic)
        queue = log.consumers.queue if log is not None and log.consumers is not None else None
        if log is None or queue is None or queue.process_timeouts(state.now_ms):
            self._inner_state(token, command)
        else:
            state.touch(log)
            state.long.start(token, command, log, self._state_steps(token, command, queue))

    def _state_steps(self, token: object, command: cmd.State, queue: Consumer) -> Work:
        while not queue.process_timeouts(self.state.now_ms):
            yield TIMEOUTS_PER_SLICE
        self._inner_state(token, command)

    def queue_totals(self) -> tuple[int, int]:
        """The number of queues, and of leases over all of them, possibly including some that have just expired."""
        queues = [log for log in self.state.published.values() if log.view.config.type == "queue"]
        in_flight = 0
        for log in queues:
            if log.consumers is not None and log.consumers.queue is not None:
                log.consumers.queue.process_timeouts(self.state.now_ms)
                in_flight += log.consumers.queue.in_flight
        return len(queues), in_flight

    def _topic_removed(self, log: TopicLog) -> None:
        for consumer in log.consumers.named.values() if log.consumers is not None else ():
            self.idle.pop(consumer.idle_number, None)

    def _config_changed(self, log: TopicLog, before: TopicConfig, op: Op) -> None:
        was_durable = before.type == "queue" and is_durable(before, self.leases.queue_of(log))
        if was_durable and not is_durable(log.config, self.leases.queue_of(log)):
            # Leases are no longer logged. If they are again later, replay must not restore the old ones.
            # Not applied: the leases of now stay.
            self.state.log_only(frames.LEASE, log, Event(con.QUEUE, FORGOTTEN))
            self.state.touched[log.id] = log
        if log.config.retention != before.retention:
            count, size = op.count, op.bytes
            self.leases.prune_settled(log, op)
            self.state.records_live += op.count - count
            self.state.bytes_live += op.bytes - size

    def _put_topic_with_consumers(self, token: object, command: cmd.PutTopic) -> None:
        log = self.state.staged.get(command.topic)
        becomes = command.config.retention == "work_queue"
        if log is None or not becomes or log.config.retention == "work_queue" or log.consumers is None:
            self._inner_put_topic(token, command)
            return
        self.state.touch(log)
        self.state.long.start(token, command, log, self._put_work_queue(token, command, log))

    def _put_work_queue(self, token: object, command: cmd.PutTopic, log: TopicLog) -> Work:
        """Turn a topic with consumers into a work queue, unless their filters overlap."""
        while True:
            assert log.consumers is not None
            changes = log.consumers.changes
            found = yield from self._find_overlap(log)
            if found is not None:
                raise ConsumerOverlap(log.name, found[1], found[0])
            if changes == log.consumers.changes:
                self._inner_put_topic(token, command)
                return

    def _find_overlap(self, log: TopicLog) -> Generator[int, None, tuple[str, str] | None]:
        """Two consumers with overlapping filters, or None. A queue's built-in consumer gets every record."""
        if log.config.type == "queue":
            self.leases.queue_of(log)
        return (yield from log.consumers.find_overlap()) if log.consumers is not None else None

    # -- start ---------------------------------------------------------------------------------------------

    def _recovered(self, salt: int) -> None:
        self.overlaps = self._stored_overlaps()

    def _stored_overlaps(self) -> list[tuple[str, str, str]]:
        """The stored work queues whose consumers overlap: the topic, and two of its consumers."""
        found: list[tuple[str, str, str]] = []
        for log in self.state.published.values():
            if log.config.retention == "work_queue" and log.consumers is not None and log.consumers.named:
                steps = self._find_overlap(log)
                try:
                    for _ in range(limits.FILTER_PAIRS_MAX):  # more would take too long
                        next(steps)
                except StopIteration as end:
                    if end.value is not None:
                        found.append((log.name, *end.value))
        return found

    def _topic_recovered(self, log: TopicLog) -> None:
        """Finish the consumers of a topic after replay: drop leases that do not survive, fix cursors, start timers."""
        consumers = log.consumers
        if consumers is None:
            return
        for consumer in consumers.all():
            if not consumer.name:
                if not is_durable(log.config, consumer):
                    consumer.forget_leases()
                consumer.cursor = 1  # rescans the topic: live records without an entry are ready
            if log.config.durability in ("memory", "ephemeral"):
                # The head may have gone back. A consumer with a start beyond the head keeps it.
                starts = consumer.config.deliver_value if consumer.config.deliver == "from_seq" else 0
                consumer.cursor = min(consumer.cursor, max(log.next_seq, starts))
            consumer.undelivered = consumer.counting = None
            if not log.is_unloaded:
                for seq in [seq for seq in consumer.entries if not log.is_live(seq)]:
                    consumers.forget(log, seq, seq)
            consumer.release_streamed()
            consumer.note_rescan()
            consumer.active_ms = self.state.now_ms
            self._set_idle_timer(log, consumer)
        if log.config.retention == "interest" and consumers.named:
            # Records that all consumers have settled: the process may have ended before they were deleted.
            stop = min(consumer.cursor for consumer in consumers.named.values())
            if log.count and log.first_seq < stop and log.config.type != "queue":
                self.leases.prune_later(log, PruneRequest(log.first_seq, stop), None)

    def check_consumers(self) -> None:
        for log in self.state.by_id.values():
            if log.consumers is None or self.state.read_only is not None:
                continue
            for consumer in log.consumers.all():
                consumer.check()
                if not log.is_unloaded:
                    assert all(map(log.is_live, consumer.entries)), (log.name, consumer.name)
                if consumer.undelivered is not None and not log.is_unloaded:
                    undelivered = consumer.count_matching(log, consumer.cursor, consumer.counted_to)
                    assert consumer.undelivered == undelivered, (
                        log.name,
                        consumer.name,
                        consumer.undelivered,
                        undelivered,
                    )


def _named(log: TopicLog, name: str) -> Consumer | None:
    return log.consumers.named.get(name) if log.consumers is not None else None
