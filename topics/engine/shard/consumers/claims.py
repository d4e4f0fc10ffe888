"""Claims and waiting claims.

A claim is decided on staged state and delivers published records. Its reply waits for no sync: a crash can only undo the
lease, and then the record is redelivered.

Claims that find nothing may be parked. They are checked again when records are published, settled or returned, when a lease
or delay ends, and, with `claim_jitter_ms`, when their window closes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import cast

from topics.api import limits
from topics.api.errors import (
    InvalidRequest,
    ShardReadOnly,
    Throttled,
    TopicNotFound,
    TopicsError,
)
from topics.engine.commands import consumers as con
from topics.engine.commands.page import Page
from topics.engine.reading.cold_blocks import ColdMiss
from topics.engine.shard.consumers.leases import (
    CATCH_UP_US,
    ClaimsDue,
    Leases,
    size_of,
)
from topics.engine.shard.state import ShardState
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.topic.consumer import READY, Consumer
from topics.engine.topic.log import Op, TopicLog

STALE_TIMERS_MAX = 64  # stale timers always tolerated
SEND_RETRY_MS = 50  # retry interval for a timed out claim whose reply cannot be sent yet
WAKE_COST = 4096  # delivery cost of a reply, in addition to its records
CATCH_UP_COST = 128 * limits.KIB  # delivery cost of a catch-up slice: a topic's share of a turn


@dataclass(slots=True, eq=False)
class WaitingClaim:
    """A parked claim."""

    number: int
    token: object
    command: con.Claim
    log: TopicLog
    consumer: Consumer
    once: bool  # waits only for its window or for the consumer to catch up, and is then answered in any case
    done: bool = False


class Claims:
    def __init__(self, state: ShardState, leases: Leases) -> None:
        self.state = state
        self.leases = leases
        self.blocked_claims: dict[int, ClaimsDue] = {}  # consumers with claims whose reply cannot be sent yet
        self.timers: list[tuple[int, int, TopicLog, Consumer, WaitingClaim | None]] = []
        self._stale_timers = 0  # timers of claims that are already answered
        self.numbers = count(1)
        state.handlers[con.Claim] = self._claim
        state.events.topic_removed.append(lambda log: self.fail_claims(log, TopicNotFound(log.name)))
        state.events.failed.append(self._shard_failed)

    # -- claim ---------------------------------------------------------------------------------------------

    def _claim(self, token: object, command: con.Claim) -> None:
        log, consumer = self.leases.find_consumer(command.topic, command.consumer)
        if not 0 < len(command.node) <= limits.NODE_BYTES_MAX:
            raise InvalidRequest(
                f"node must name the claiming worker, with 1 to {limits.NODE_BYTES_MAX} bytes"
            )
        self.state.check_writable()
        consumer.active_ms = self.state.now_ms
        if log.config.claim_jitter_ms and consumer is not None and not consumer.name:
            self._park_claim(token, command, log, consumer, once=not command.standing and not command.wait_ms)
            self._open_window(log, consumer)
            return
        if command.standing:  # streams are filled when the scheduler serves the topic
            self._park_claim(token, command, log, consumer, once=False)
            self.wake_claims(log, consumer)
            return
        if self.leases.is_behind(log, consumer):
            self._park_claim(token, command, log, consumer, once=not command.wait_ms)
            self.wake_claims(log, consumer)
            return
        if not self._serve_one(token, command, log, consumer, may_wait=bool(command.wait_ms)):
            self._park_claim(token, command, log, consumer, once=False)
            self._set_timer(log, consumer)

    def _park_claim(
        self, token: object, command: con.Claim, log: TopicLog, consumer: Consumer, *, once: bool
    ) -> None:
        assert log.consumers is not None
        # Streams do not count: they stay parked as long as they are open.
        if not command.standing and len(consumer.waiters) >= consumer.config.max_waiting:
            raise Throttled(
                "too many claims are waiting; retry later",
                limit="max_waiting",
                max=consumer.config.max_waiting,
            )
        claim = WaitingClaim(next(self.numbers), token, command, log, consumer, once)
        consumer.waiters[claim.number] = claim
        if command.connection:
            consumer.parked[command.connection] = claim
        consumer.streams += command.standing
        log.consumers.waiting += 1
        if not once and not command.standing:
            jitter_ms = log.config.claim_jitter_ms if not consumer.name else 0  # not before its window closes
            due_ms = self.state.clock.mono_ms + max(
                min(command.wait_ms, limits.DIFF_WAIT_MS_MAX), jitter_ms + 1
            )
            heapq.heappush(self.timers, (due_ms, claim.number, log, consumer, claim))
            if 2 * self._stale_timers > len(self.timers) + STALE_TIMERS_MAX:
                # Stale timers would stay until they are due: half a minute of busy workers.
                self.timers = [timer for timer in self.timers if timer[4] is None or not timer[4].done]
                heapq.heapify(self.timers)
                self._stale_timers = 0

    def unpark_claim(self, claim: WaitingClaim) -> None:
        claim.done = True
        self._stale_timers += not claim.once and not claim.command.standing
        del claim.consumer.waiters[claim.number]
        claim.consumer.parked.pop(claim.command.connection, None)
        claim.consumer.streams -= claim.command.standing
        assert claim.log.consumers is not None
        claim.log.consumers.waiting -= 1

    def withdraw_claims(self, matches_token: Callable[[object], bool]) -> None:
        """Drop all waiting claims with a matching token, without a reply."""
        self.state.cold.withdraw(matches_token)
        self.state.upkeep.withdraw(matches_token)
        for log in self.state.published.values():
            for consumer in (
                log.consumers.all() if log.consumers is not None and log.consumers.waiting else ()
            ):
                for claim in list(consumer.waiters.values()):
                    assert isinstance(claim, WaitingClaim)
                    if matches_token(claim.token):
                        self.unpark_claim(claim)

    def withdraw_claim(self, topic: str, name: str, matches_token: Callable[[object], bool]) -> bool:
        """Drop a waiting claim without a reply; returns False if none has a matching token."""
        if self.state.cold.withdraw(matches_token) or self.state.upkeep.withdraw(matches_token):
            return True
        log = self.state.published.get(topic)
        consumer = log.consumers.find(name) if log is not None and log.consumers is not None else None
        for claim in consumer.waiters.values() if consumer is not None else ():
            assert isinstance(claim, WaitingClaim)
            if matches_token(claim.token):
                self.unpark_claim(claim)
                return True
        return False

    def _open_window(self, log: TopicLog, consumer: Consumer) -> None:
        if not consumer.window_ms:
            consumer.window_ms = self.state.clock.mono_ms + log.config.claim_jitter_ms
            heapq.heappush(self.timers, (consumer.window_ms, next(self.numbers), log, consumer, None))

    def _set_timer(self, log: TopicLog, consumer: Consumer) -> None:
        """Set a timer for the next lease or delay that ends, if claims wait or streams hold leases."""
        state = self.state
        if not consumer.waiters and not consumer.connections:
            return
        at_ms = consumer.next_change_ms()
        if consumer.is_paused(state.now_ms) and not consumer.connections:
            at_ms = max(consumer.paused_until_ms, 0)
        elif consumer.config.replay == "original":
            due_ms = self.leases.replay_due(log, consumer)
            at_ms = min(at_ms, due_ms) if at_ms and due_ms else at_ms or due_ms
        if not at_ms:
            return
        # A lease may last a day, in which the engine's clock and the monotonic clock may drift apart: check in between.
        wake_ms = state.clock.mono_ms + min(max(at_ms - state.now_ms, 0) + 1, limits.CLAIM_CHECK_MS)
        if not state.clock.mono_ms < consumer.wake_ms <= wake_ms:
            consumer.wake_ms = wake_ms
            heapq.heappush(self.timers, (wake_ms, next(self.numbers), log, consumer, None))

    def wake_waiting_claims(self, log: TopicLog) -> None:
        """Records were published: check the waiting claims of all consumers again."""
        assert log.consumers is not None
        for consumer in log.consumers.all():
            if consumer.waiters:
                self.leases.claims_due[id(consumer)] = log, consumer

    def wake_claims(self, log: TopicLog, consumer: Consumer) -> None:
        if consumer.waiters:
            self.leases.claims_due[id(consumer)] = log, consumer

    # -- waiting claims ------------------------------------------------------------------------------------

    def process_claim_timers(self) -> None:
        """Process due timers: mark consumers whose claims must be checked, and answer claims that timed out."""
        now_ms = self.state.clock.mono_ms
        while self.timers and self.timers[0][0] <= now_ms:
            _, _, log, consumer, claim = heapq.heappop(self.timers)
            if claim is None:
                self.leases.claims_due[id(consumer)] = log, consumer
            elif claim.done:
                self._stale_timers -= 1
            else:
                self._claim_timed_out(claim)

    def _claim_timed_out(self, claim: WaitingClaim) -> None:
        """Answer a claim whose wait has ended, or arrange for that if it cannot be answered now."""
        is_behind = self.leases.is_behind(claim.log, claim.consumer)
        if is_behind and claim.consumer.name:
            # Answered as soon as the consumer has caught up: later it might be behind again.
            claim.once = True
            self.wake_claims(claim.log, claim.consumer)
            return
        if is_behind or not self.state.can_send(claim.token):
            self.wake_claims(claim.log, claim.consumer)
            again_ms = self.state.clock.mono_ms + SEND_RETRY_MS
            heapq.heappush(self.timers, (again_ms, next(self.numbers), claim.log, claim.consumer, claim))
            return
        self.unpark_claim(claim)
        self._stale_timers -= 1  # its timer was the one that fired
        self.state.ready.append((claim.token, self.leases.claimed(claim.log, claim.consumer)))

    def serve_consumer(self, log: TopicLog, consumer: Consumer, room: int, *, may_push: bool = True) -> int:
        """Answer waiting claims of one consumer as far as records are available; returns the delivery cost in bytes.

        Without `may_push`, streams keep waiting.
        """
        state = self.state
        if consumer.window_ms and consumer.window_ms > state.clock.mono_ms:
            return 0
        window_ms, consumer.window_ms = consumer.window_ms, 0
        claims = cast("list[WaitingClaim]", list(consumer.waiters.values()))
        if not may_push:
            claims = [claim for claim in claims if not claim.command.standing]
        if log.dropped or state.read_only is not None or consumer.dropped:
            return 0  # `fail_claims` answers them
        size = 0
        try:
            state.touch(log)
            if self.leases.is_behind(log, consumer):
                took = self.leases.catch_up(log, consumer)
                if self.leases.is_behind(log, consumer):
                    consumer.window_ms = window_ms
                    self.leases.claims_due[id(consumer)] = log, consumer
                    return max(1, took // CATCH_UP_US) * CATCH_UP_COST
            self._send_pending_replies(log, consumer)
            if not claims:
                self._set_timer(log, consumer)  # full streams must learn when leases expire
                return 0
            jitter = not consumer.name and log.config.claim_jitter_ms
            if jitter and not window_ms:
                if self._has_ready(log, consumer):
                    self._open_window(log, consumer)
                else:
                    self._set_timer(log, consumer)
                return 0
            if jitter:
                sendable = [claim for claim in claims if state.can_send(claim.token)]
                if len(sendable) < len(claims):
                    self.blocked_claims[id(consumer)] = log, consumer
                size = self._distribute(log, consumer, sendable)
            else:
                size = self._serve_in_turn(log, consumer, claims, room)
        except ColdMiss as miss:
            self._wait_with_claims(log, consumer, miss)
        except UpkeepPending:
            state.upkeep.wait(
                log, lambda error: self.wake_claims(log, consumer), name=("claims", id(consumer))
            )
        except TopicsError as error:
            self.fail_claims(log, error, consumer)
        except OSError as error:
            self.fail_claims(log, TopicsError(f"a file could not be read: {error}"), consumer)
        self._set_timer(log, consumer)
        return size

    def _send_pending_replies(self, log: TopicLog, consumer: Consumer) -> None:
        """Send replies to settles that waited until the consumer's counts were known."""
        pending, consumer.pending_replies = consumer.pending_replies, []
        for op in pending:
            assert isinstance(op, Op)
            assert isinstance(op.result, con.Settled)
            op.result.ready, op.result.in_flight = self.leases.ready_count(log, consumer), consumer.in_flight
            self.state.add_op(op)

    def _wait_with_claims(self, log: TopicLog, consumer: Consumer, miss: ColdMiss) -> None:
        """The next records are in the cold tier: check the consumer's claims again when they are fetched."""

        def resume(error: TopicsError | None) -> None:
            if error is None or self.state.is_outdated(miss):
                self.wake_claims(log, consumer)
            else:
                self.fail_claims(log, error, consumer)

        try:
            self.state.cold.wait(miss, resume, name=("claims", id(consumer)))
        except TopicsError as error:
            self.fail_claims(log, error, consumer)

    def _serve_in_turn(self, log: TopicLog, consumer: Consumer, claims: list[WaitingClaim], room: int) -> int:
        """Serve claims in order until no record is left: thousands may wait for one record."""
        left = room
        is_empty = False
        for claim in claims:
            if is_empty and not claim.once:
                continue
            if left <= 0:
                self.wake_claims(log, consumer)  # continue in the next turn
                break
            if not self.state.can_send(claim.token):
                self.blocked_claims[id(consumer)] = log, consumer
                continue
            size = self._serve_one(claim.token, claim.command, log, consumer, may_wait=not claim.once)
            if not size:
                is_empty = True
                continue
            self.unpark_claim(claim)
            left -= size
        return room - left

    def _has_ready(self, log: TopicLog, consumer: Consumer) -> bool:
        consumer.process_timeouts(self.state.now_ms)
        return self.leases.ready_count(log, consumer) > 0

    def fail_claims(self, log: TopicLog, error: TopicsError, consumer: Consumer | None = None) -> None:
        """Answer all waiting claims with an error: the topic, the consumer or the shard is unavailable."""
        state = self.state
        if log.consumers is None:
            return
        for one in [consumer] if consumer is not None else log.consumers.all():
            for claim in list(one.waiters.values()):
                assert isinstance(claim, WaitingClaim)
                self.unpark_claim(claim)
                state.ready.append((claim.token, error))
            pending, one.pending_replies = one.pending_replies, []
            for op in pending:
                assert isinstance(op, Op)
                if state.read_only is None:
                    state.add_op(op)
                else:
                    state.ready.append((op.token, error))

    def _shard_failed(self, reason: str) -> None:
        for log in self.state.by_id.values():
            self.fail_claims(log, ShardReadOnly(reason))
            for consumer in log.consumers.all() if log.consumers is not None else ():
                consumer.undelivered = consumer.counting = None

    # -- delivery to claims --------------------------------------------------------------------------------

    def _serve_one(
        self, token: object, command: con.Claim, log: TopicLog, consumer: Consumer, *, may_wait: bool
    ) -> int:
        """Answer a claim and return the delivery cost in bytes; 0 if there is nothing and it may wait."""
        assert log.consumers is not None
        number = log.consumers.next_dead_letter
        try:
            page, tombstone, cursor = self.leases.pick(log, consumer, command.max, command.max_bytes)
        finally:  # also if the next records must be fetched first, or cannot be read
            if number != log.consumers.next_dead_letter:
                self.leases.note_dead_letters(log, command)
        if not page.seqs and tombstone is None:
            self._skip_to(log, consumer, cursor)
            if may_wait:
                return 0
        self.leases.lease(token, command, log, consumer, page, cursor, tombstone)
        if command.connection:
            self._set_timer(log, consumer)  # a full stream must learn when leases expire
        return int(sum(page.lengths)) + WAKE_COST

    def _skip_to(self, log: TopicLog, consumer: Consumer, cursor: int) -> None:
        """Advance the cursor past records that do not match. Not logged: a restart scans them again."""
        before, consumer.cursor = consumer.cursor, cursor
        consumer.note_cursor_moved(before, [])
        self.leases.prune_skipped(log, consumer, before, cursor)
        if cursor <= log.view.head and cursor > before and not consumer.is_paused(self.state.now_ms):
            self.wake_claims(log, consumer)  # the scan limit was reached: continue in the next turn

    def _distribute(self, log: TopicLog, consumer: Consumer, claims: list[WaitingClaim]) -> int:
        """Distribute the records among the claims of one window, one record each, round robin."""
        assert log.consumers is not None
        wanted = sum(claim.command.max for claim in claims)
        number = log.consumers.next_dead_letter
        try:
            page, _, cursor = self.leases.pick(
                log, consumer, min(wanted, limits.CLAIM_WINDOW_RECORDS_MAX), limits.WAKE_BYTES_MAX // 2
            )
        finally:
            if number != log.consumers.next_dead_letter:
                self.leases.note_dead_letters(log, *(claim.command for claim in claims))
        shares: list[list[int]] = [[] for _ in claims]
        sizes = [0] * len(claims)
        open_, at = list(range(len(claims))), 0
        left = len(page.seqs)
        for i in range(left):
            size = size_of(log, page.seqs[i])
            while open_:
                at %= len(open_)
                k = open_[at]
                command = claims[k].command
                budget = command.max_bytes or limits.CLAIM_BYTES_DEFAULT
                if len(shares[k]) < command.max and (not shares[k] or sizes[k] + size <= budget):
                    shares[k].append(i)
                    sizes[k] += size
                    at += 1
                    break
                open_.pop(at)
            else:
                self._put_back_rest(consumer, page, i)
                cursor = min(cursor, page.seqs[i]) if page.seqs[i] >= consumer.cursor else consumer.cursor
                break
        for claim, share in zip(claims, shares, strict=True):
            if not share and not claim.once:
                continue  # keeps waiting
            part = page if len(share) == left else page.take(share)
            try:
                self.leases.lease(claim.token, claim.command, log, consumer, part, cursor, None)
            except TopicsError:
                self._put_back_unleased(consumer, page.seqs)
                raise
            self.unpark_claim(claim)
        return sum(sizes) + WAKE_COST * len(claims)

    @staticmethod
    def _put_back_unleased(consumer: Consumer, seqs: list[int]) -> None:
        """Return records that were distributed but not leased."""
        entries = consumer.entries
        consumer.put_back(seq for seq in seqs if seq in entries and entries[seq].state == READY)
        fresh = [seq for seq in seqs if seq not in entries]
        if fresh:
            consumer.cursor = min(consumer.cursor, fresh[0])
            consumer.note_rescan()

    @staticmethod
    def _put_back_rest(consumer: Consumer, page: Page, first: int) -> None:
        """Return picked records, from index `first` on, for which no claim has room."""
        consumer.put_back(seq for seq in page.seqs[first:] if seq in consumer.entries)
