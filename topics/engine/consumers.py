"""Named consumers: made, changed, looked at, paused, moved to another place, and gone.

What they are and where they stand is logged and synced, whatever the topic's class, as a topic's config is.
"""

from __future__ import annotations

import heapq
from itertools import islice

from topics.engine import consumer_commands as con
from topics.engine import frames, limits
from topics.engine.config import ConsumerConfig
from topics.engine.consumer import MOVING, PAUSED, RESET, Consumer, Event, TopicConsumers, filter_of
from topics.engine.control import ConsumerStored
from topics.engine.errors import (
    ConsumerNotFound,
    ConsumerOverlap,
    InvalidRequest,
    Throttled,
    TopicNotFound,
    WrongEpoch,
)
from topics.engine.handing_out import tag_of
from topics.engine.settling import Settling
from topics.engine.staging import CONTROL_BYTES
from topics.engine.topic_log import Op, TopicLog
from topics.engine.writes import NAME, RANGE_BYTES

CONFIG_BYTES = 32 * limits.KIB  # more than any config of a consumer


class Consumers(Settling):
    def _put_consumer(self, token: object, command: con.PutConsumer) -> None:
        self._writable()
        log = self._for_write(command.topic)
        if log is None:
            raise TopicNotFound(command.topic)
        name, config = command.consumer, command.config
        self._check_consumer(log, name, config)
        consumers = log.consumers
        known = consumers.named.get(name) if consumers is not None else None
        if known is not None and known.config == config:
            self._answer(token, self._consumer_state(log, known), log, held=log.pending > 0)
            return
        if log.config.retention == "work_queue" and (known is None or known.config.filter != config.filter):
            self._check_overlap(log, name, config)
        if known is None:
            if consumers is not None and len(consumers.named) >= limits.CONSUMERS_PER_TOPIC_MAX:
                raise Throttled(
                    f"topic {log.name!r} has {limits.CONSUMERS_PER_TOPIC_MAX} consumers already",
                    limit="consumers",
                    max=limits.CONSUMERS_PER_TOPIC_MAX,
                )
            cursor, firsts = self._begin(log, config)
        else:
            wants = Consumer(name, config, self.settled_over).wants
            cursor, firsts = known.cursor, [seq for seq in known.firsts if wants(tag_of(log, seq))]
        self.reserve(CONFIG_BYTES + len(firsts) * RANGE_BYTES)
        created_ms = self.now_ms if known is None else known.created_ms
        stored = ConsumerStored(name, config, cursor, firsts, created_ms)
        self.add_frame(frames.encode_control(frames.CONSUMER_PUT, log.id, self.now_ms, stored))
        consumer = self.store_consumer(log, stored)
        consumer.active_ms = self.now_ms
        self._set_idle_timer(log, consumer)
        self._is_hungry(log, consumer)
        self.touched[log.id] = log
        state = self._consumer_state(log, consumer)
        state.created = known is None
        self.add_op(Op(log, token, state, sync=True))

    def store_consumer(self, log: TopicLog, stored: ConsumerStored) -> Consumer:
        """Make or change a consumer, live or in replay."""
        if log.consumers is None:
            log.consumers = TopicConsumers()
        consumer = log.consumers.named.get(stored.name)
        if consumer is None:
            consumer = log.consumers.named[stored.name] = Consumer(
                stored.name, stored.config, self.settled_over
            )
        else:
            consumer.configure(stored.config)
        consumer.cursor, consumer.firsts = stored.cursor, list(stored.firsts)
        consumer.created_ms = stored.created_ms
        return consumer

    def _check_consumer(self, log: TopicLog, name: str, config: ConsumerConfig) -> None:
        if not NAME.match(name):
            raise InvalidRequest(
                f"{name!r} is not a consumer name: 1 to 255 of A-Z a-z 0-9 . _ : - with a letter or digit first"
            )
        if config.dead_letter is not None:
            if not NAME.match(config.dead_letter):
                raise InvalidRequest(f"dead_letter {config.dead_letter!r} is not a topic name")
            if config.dead_letter == log.name:
                raise InvalidRequest("a topic cannot take the dead letters of its own consumer")

    def _check_overlap(self, log: TopicLog, name: str, config: ConsumerConfig) -> None:
        """A record of a work queue is for one consumer. What overlaps since before that was checked may stay so."""
        if log.config.type == "queue":
            raise ConsumerOverlap(log.name, con.QUEUE, name)
        other = log.consumers.overlapping(name, filter_of(config)) if log.consumers is not None else None
        if other is not None:
            raise ConsumerOverlap(log.name, other, name)

    def _begin(self, log: TopicLog, config: ConsumerConfig) -> tuple[int, list[int]]:
        """Where a new consumer stands: its cursor, and records below it that it gets first."""
        end = log.view.head + 1
        if config.deliver == "new":
            return end, []
        if config.deliver == "from_seq":
            return max(config.deliver_value, 1), []
        if config.deliver == "from_ts":
            return log.first_since(config.deliver_value), []
        if config.deliver == "all":
            return min(log.view.first_seq, end), []
        probe = Consumer("", config, self.settled_over)
        if config.deliver == "last" and probe.filter is None:
            return log.last_live(end) or end, []
        matches = probe.filter.any_of if probe.filter is not None else None
        names = (
            {name for match in matches for name in log.tags.names(match)}
            if matches is not None
            else set(log.tags.strings.ids)
        )
        if len(names) > limits.FIRSTS_MAX:
            raise Throttled(
                f"{len(names)} tags; a consumer begins with the last record of at most {limits.FIRSTS_MAX}",
                limit="tags",
                max=limits.FIRSTS_MAX,
            )
        lasts = sorted(seq for name in names if 0 < (seq := log.tags.last(name, log.are_live)) < end)
        if config.deliver == "last":
            return lasts[-1] if lasts else end, []
        return end, lasts

    def _drop_consumer(self, token: object, command: con.DropConsumer) -> None:
        self._writable()
        log = self._for_write(command.topic)
        if log is None:
            raise TopicNotFound(command.topic)
        consumer = log.consumers.named.get(command.consumer) if log.consumers is not None else None
        result = con.ConsumerDropped(command.topic, command.consumer, consumer is not None)
        if consumer is None:
            self._answer(token, result, log, held=log.pending > 0)
            return
        self._end_consumer(log, consumer, token, result)

    def _end_consumer(self, log: TopicLog, consumer: Consumer, token: object, result: object) -> None:
        self.reserve(CONTROL_BYTES + len(consumer.name))
        frame = frames.encode_control(frames.CONSUMER_DELETE, log.id, self.now_ms, consumer.name)
        self.add_frame(frame)
        self.remove_consumer(log, consumer)
        self.fail_claims(log, ConsumerNotFound(log.name, consumer.name), consumer)
        op = Op(log, token, result, sync=True)
        self._retire_done(log, op)
        self.count_live(op)
        self.touched[log.id] = log
        self.add_op(op)

    def remove_consumer(self, log: TopicLog, consumer: Consumer) -> None:
        """Live or in replay."""
        assert log.consumers is not None
        consumer.dropped = True
        self.idle.pop(consumer.idle_number, None)
        for connection in list(consumer.connections):
            self.on_settled(connection)
        log.consumers.drop_letters(consumer.name, set(consumer.entries))
        del log.consumers.named[consumer.name]

    # -- reading -------------------------------------------------------------------------------------------

    def _named(self, topic: str, name: str) -> tuple[TopicLog, Consumer]:
        log, consumer = self._find_consumer(topic, name or "?")
        consumer.pass_time(self.now_ms)
        return log, consumer

    def _get_consumer(self, token: object, command: con.GetConsumer) -> None:
        log, consumer = self._named(command.topic, command.consumer)
        self._answer(token, self._consumer_state(log, consumer), log, held=log.pending > 0)

    def _list_consumers(self, token: object, command: con.ListConsumers) -> None:
        log = self._for_read(command.topic)
        named = log.consumers.named if log.consumers is not None else {}
        size = min(max(command.limit, 1), limits.LIST_PAGE_MAX)
        names = islice((name for name in sorted(named) if name > command.after), size + 1)
        rows: list[con.ConsumerState] = []
        for name in names:
            named[name].pass_time(self.now_ms)
            rows.append(self._consumer_state(log, named[name]))
        self._answer(token, con.ConsumerList(command.topic, rows), log, held=log.pending > 0)

    def _consumer_state(self, log: TopicLog, consumer: Consumer) -> con.ConsumerState:
        counters, now_ms = consumer.counters, self.now_ms
        lag = self.lag(log, consumer)
        entries, config = len(consumer.entries), consumer.config
        tombstone, _, _ = self._lost(log, consumer.cursor)
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
        """The age of the oldest record that the consumer wants and that was never handed out."""
        oldest = self._next_live(log, consumer, consumer.firsts[0] if consumer.firsts else consumer.cursor)
        return max(0, now_ms - oldest[0].ts_at(oldest[1])) if oldest is not None else 0

    # -- moving and pausing --------------------------------------------------------------------------------

    def _pause_consumer(self, token: object, command: con.PauseConsumer) -> None:
        self._writable()
        log, consumer = self._named(command.topic, command.consumer)
        self.reserve(CONTROL_BYTES + len(consumer.name))
        until_ms = (command.until_ms or -1) if command.paused else 0
        event = Event(consumer.name, PAUSED, until_ms=until_ms)
        self.log_event(log, event)
        consumer.apply(event)
        consumer.active_ms = self.now_ms
        self._is_hungry(log, consumer)
        self.add_op(Op(log, token, self._consumer_state(log, consumer), sync=True))

    def _reset_consumer(self, token: object, command: con.ResetConsumer) -> None:
        self._writable()
        log, consumer = self._named(command.topic, command.consumer)
        last = max(command.value, 1) - 1
        if command.epoch is not None and log.cursor_of(command.epoch, last) != last:
            raise WrongEpoch(command.topic, command.epoch, log.epoch)
        end = log.view.head + 1
        places = {"start": min(log.view.first_seq, end), "end": end, "seq": min(max(command.value, 1), end)}
        to_seq = log.first_since(command.value) if command.to == "ts" else places[command.to]
        from_seq = consumer.cursor
        seen = consumer.cursor - 1 if to_seq < from_seq else to_seq - 1
        again = consumer.wanted(log, to_seq, seen + 1)
        skips = consumer.wanted(log, from_seq, to_seq)
        skips += sum(log.is_live(seq) for seq in consumer.entries if seq < to_seq)
        state = self._consumer_state(log, consumer)
        result = con.ConsumerReset(state, command.dry_run, from_seq, to_seq, again, skips)
        if command.dry_run:
            self._answer(token, result, log, held=log.pending > 0)
            return
        self.reserve(CONTROL_BYTES + len(consumer.name))
        event = Event(consumer.name, RESET, cursor=to_seq)
        self.log_event(log, event)
        consumer.apply(event)
        consumer.active_ms = self.now_ms
        op = Op(log, token, result, sync=True)
        self._retire_done(log, op)
        self.count_live(op)
        result.state = self._consumer_state(log, consumer)
        self._is_hungry(log, consumer)
        self.add_op(op)

    # -- consumers that go by themselves -------------------------------------------------------------------

    def end_idle_consumers(self) -> None:
        timers = self.idle_timers
        while timers and timers[0][0] <= self.clock.mono_ms and self.read_only is None:
            log_and_consumer = self.idle.get(heapq.heappop(timers)[1])
            if log_and_consumer is None:
                continue
            log, consumer = log_and_consumer
            consumer.pass_time(self.now_ms)
            in_use = consumer.waiters or consumer.in_flight or consumer.counts[MOVING]
            if in_use or self.is_followed(log.name, consumer.name):
                consumer.active_ms = self.now_ms
            if self.now_ms - consumer.active_ms < consumer.config.inactive_ttl_ms:
                self._set_idle_timer(log, consumer)
            elif self.has_room(CONTROL_BYTES + len(consumer.name)):
                self.refresh(log)
                self._end_consumer(log, consumer, None, None)
            else:
                consumer.active_ms = self.now_ms  # the disk is full: later
                self._set_idle_timer(log, consumer)
