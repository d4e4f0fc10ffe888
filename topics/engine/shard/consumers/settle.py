"""Settling of leases: ack, nack, term, extend, and release when a connection closes.

An ack is as durable as a delete in the topic's class. The reply to a nack or extend waits for nothing: if a crash undoes it,
the lease expires or the record is redelivered.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from topics.api import limits
from topics.api.errors import ConsumerNotFound, InvalidRequest
from topics.engine.commands import consumers as con
from topics.engine.shard.appends import Appends
from topics.engine.shard.consumers.claims import Claims, WaitingClaim
from topics.engine.shard.consumers.leases import SEQ_BYTES, DeliveryPolicy, Leases, is_durable, policy_of
from topics.engine.shard.long_commands import Work
from topics.engine.shard.state import CONTROL_BYTES, ShardState, as_ranges
from topics.engine.storage.control import Event
from topics.engine.topic.consumer import ACKED, EXTENDED, GIVEN_UP, LEASED, MOVING, RETURNED, Consumer
from topics.engine.topic.log import Op, TopicLog

SETTLED_PER_SLICE = 500  # leases per slice of a command that settles many without naming them


class Settlement:
    def __init__(self, state: ShardState, appends: Appends, leases: Leases, claims: Claims) -> None:
        self.state = state
        self.appends = appends
        self.leases = leases
        self.claims = claims
        state.handlers |= {con.Settle: self._settle, con.Release: self._release}

    def _settle(self, token: object, command: con.Settle) -> None:
        state = self.state
        log, consumer = self.leases.find_consumer(command.topic, command.consumer)
        state.check_writable()
        consumer.process_timeouts(state.now_ms)
        consumer.active_ms = state.now_ms
        held, skipped = self._held(consumer, command)
        is_all = command.kind == "ack" and consumer.config.ack == "all" and bool(consumer.name)
        if held and is_all:
            if len(consumer.entries) > limits.CLAIM_MAX:
                work = self._ack_up_to(token, command, log, consumer, max(held), skipped)
                state.long.start(token, command, log, work)
                return
            held = pending_up_to(consumer, consumer.entries, max(held))
        policy = policy_of(log.config, consumer)
        result = con.Settled(command.topic, consumer.name, command.kind, len(held), skipped, 0, 0)
        op = Op(log, token, result)
        assert log.consumers is not None
        number = log.consumers.next_dead_letter
        if command.kind == "ack":
            self._ack(log, consumer, held, op)
        elif command.kind == "nack":
            self._nack(log, consumer, held, command, policy, op)
        elif command.kind == "term":
            self._term(log, consumer, held, command, policy, op)
        else:
            self._extend(log, consumer, held, command, op)
        if number != log.consumers.next_dead_letter:
            self.leases.note_dead_letters(log, command)
        state.count_live(op)
        self._finish_settle(log, consumer, op, result)

    def _finish_settle(self, log: TopicLog, consumer: Consumer, op: Op, result: con.Settled) -> None:
        """Add the consumer's counts to the reply. If they are not known yet, the reply waits, but the change does not."""
        if self.leases.is_behind(log, consumer):
            if op.token is not None:
                consumer.pending_replies.append(
                    Op(log, op.token, result, sync=op.sync, unordered=op.unordered)
                )
                op.token = None
            self.leases.claims_due[id(consumer)] = log, consumer
        else:
            result.ready, result.in_flight = self.leases.ready_count(log, consumer), consumer.in_flight
            self.claims.wake_claims(log, consumer)
        self.state.add_op(op)

    def _ack_up_to(
        self,
        token: object,
        command: con.Settle,
        log: TopicLog,
        consumer: Consumer,
        last: int,
        skipped: list[int],
    ) -> Work:
        """Ack all pending records up to `last` (ack all), in slices."""
        result = con.Settled(command.topic, consumer.name, command.kind, 0, skipped, 0, 0)
        pending = list(consumer.entries)
        for start in range(0, len(pending), SETTLED_PER_SLICE):
            self.state.check_writable()
            if consumer.dropped:
                raise ConsumerNotFound(log.name, consumer.name)
            seqs = pending_up_to(consumer, pending[start : start + SETTLED_PER_SLICE], last)
            op = Op(log, None, result)
            self._ack(log, consumer, seqs, op)
            self.state.count_live(op)
            self.state.add_op(op)
            result.count += len(seqs)
            yield 2 * SETTLED_PER_SLICE
        op = Op(log, token, result, sync=result.synced)
        self._finish_settle(log, consumer, op, result)

    def _held(self, consumer: Consumer, command: con.Settle) -> tuple[list[int], list[int]]:
        """Split the seqs into those the node has a valid lease on and the others. A repeated seq counts once."""
        entries, node = consumer.entries, command.node
        ids = command.lease_ids or [0] * len(command.seqs)
        held: dict[int, None] = {}
        skipped: list[int] = []
        for seq, lease_id in zip(command.seqs, ids, strict=True):
            entry = entries.get(seq)
            if (
                entry is not None
                and entry.state == LEASED
                and entry.until_ms >= self.state.now_ms
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
            op.unordered = True
            return
        op.sync = log.config.durability == "fsync"
        assert isinstance(op.result, con.Settled)
        op.result.synced = op.sync
        if not consumer.name:
            ranges = as_ranges(sorted(seqs))
            self.state.reserve(CONTROL_BYTES + len(ranges) * SEQ_BYTES)
            self.appends.log_delete(log, ranges, op)
            consumer.counters.acked += len(seqs)
            self.state.touched[log.id] = log
            return
        self.state.reserve(2 * CONTROL_BYTES + 2 * len(seqs) * SEQ_BYTES)
        self.leases.apply_event(log, consumer, Event(consumer.name, ACKED, seqs))
        self.leases.prune_into(log, seqs, op)

    def _nack(
        self,
        log: TopicLog,
        consumer: Consumer,
        seqs: list[int],
        command: con.Settle,
        policy: DeliveryPolicy,
        op: Op,
    ) -> None:
        if command.nack == "dead":
            if policy.dead_letter is None:
                raise InvalidRequest("no dead_letter is configured; set one, or use kind retry")
            if seqs:
                self.leases.move(log, consumer, seqs, policy.dead_letter, 0, command.reason)
            op.unordered = not seqs
            return
        due_ms = self.state.now_ms + command.delay_ms if command.delay_ms else 0
        deliveries: list[int] = []
        if command.nack == "release":
            deliveries = [consumer.entries[seq].deliveries - 1 for seq in seqs]
        self._return_leases(
            log, consumer, Event(consumer.name, RETURNED, seqs, due_ms, deliveries=deliveries)
        )
        op.unordered = True

    def _return_leases(self, log: TopicLog, consumer: Consumer, event: Event) -> None:
        durable = bool(event.seqs) and is_durable(log.config, consumer)
        if durable:
            self.state.reserve(CONTROL_BYTES + len(event.seqs) * SEQ_BYTES)
        self.leases.apply_event(log, consumer, event, durable=durable)
        self.claims.wake_claims(log, consumer)

    def _term(
        self,
        log: TopicLog,
        consumer: Consumer,
        seqs: list[int],
        command: con.Settle,
        policy: DeliveryPolicy,
        op: Op,
    ) -> None:
        """Stop redelivery: move the records to the dead letter topic, or discard them if there is none."""
        if not consumer.name:
            raise InvalidRequest("a queue does not support term; ack the job, or nack it with kind dead")
        if not seqs:
            op.unordered = True
            return
        if policy.dead_letter is not None:
            self.leases.move(log, consumer, seqs, policy.dead_letter, 0, command.reason)
            return
        op.sync = log.config.durability == "fsync"
        self.state.reserve(2 * CONTROL_BYTES + 2 * len(seqs) * SEQ_BYTES)
        self.leases.apply_event(log, consumer, Event(consumer.name, GIVEN_UP, seqs, reason=command.reason))
        self.leases.prune_into(log, seqs, op)

    def _extend(
        self, log: TopicLog, consumer: Consumer, seqs: list[int], command: con.Settle, op: Op
    ) -> None:
        event = Event(consumer.name, EXTENDED, seqs, self.state.now_ms + command.lease_ms)
        durable = bool(seqs) and is_durable(log.config, consumer)
        if durable:
            self.state.reserve(CONTROL_BYTES + len(seqs) * SEQ_BYTES)
        self.leases.apply_event(log, consumer, event, durable=durable)
        assert isinstance(op.result, con.Settled)
        op.result.deadlines = dict.fromkeys(seqs, event.until_ms)
        op.unordered = True

    def _release(self, token: object, command: con.Release) -> None:
        """A connection has closed: return its leases. Logged only if leases are durable."""
        state = self.state
        log = state.published.get(command.topic)
        consumer = (
            log.consumers.find(command.consumer) if log is not None and log.consumers is not None else None
        )
        if log is None or consumer is None:
            state.ready.append((token, con.Released(command.topic, 0)))
            return
        claim = consumer.parked.get(command.connection)
        if claim is not None:
            assert isinstance(claim, WaitingClaim)
            self.claims.unpark_claim(claim)
        state.cold.withdraw_connection(command.connection)
        consumer.active_ms = state.now_ms
        consumer.process_timeouts(state.now_ms)
        work = self._release_steps(token, command, log, consumer)
        if consumer.leases_of(command.connection) <= SETTLED_PER_SLICE:
            next(work, None)
        else:
            state.long.start(token, command, log, work, refusable=False)  # no client would retry it

    def _release_steps(self, token: object, command: con.Release, log: TopicLog, consumer: Consumer) -> Work:
        released = 0
        while held := consumer.connections.get(command.connection):
            seqs = sorted(islice(held, SETTLED_PER_SLICE))
            released += len(seqs)
            if self.state.read_only is not None or consumer.dropped:
                break
            self._return_leases(log, consumer, Event(consumer.name, RETURNED, seqs))
            if consumer.leases_of(command.connection):
                yield 2 * SETTLED_PER_SLICE
        self.state.add_op(Op(log, token, con.Released(command.topic, released), unordered=True))


def pending_up_to(consumer: Consumer, seqs: Iterable[int], last: int) -> list[int]:
    """The pending seqs up to `last`, without those on their way to a dead letter topic."""
    entries = consumer.entries
    return sorted(
        seq
        for seq in seqs
        if seq <= last and (entry := entries.get(seq)) is not None and entry.state != MOVING
    )
