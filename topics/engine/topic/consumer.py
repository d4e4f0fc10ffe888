"""Consumer state: a cursor, plus one entry for each delivered record that is not settled yet.

    undelivered      ──claim──▶ LEASED ──ack──▶ settled
    (from the cursor)           │  ▲ └─ extend
                        nack,   │  │ claim
                        expiry, ▼  │
                        release READY ◀── DELAYED     deliveries exhausted ──▶ MOVING ──▶ settled

A record below the cursor without an entry is settled. So memory grows with the pending entries, not with the backlog,
and every operation costs the same for a thousand undelivered records as for ten million.

Every change is an `Event`; `apply` runs it live and in replay. Timeouts are not events: a lease stores its deadline,
and the engine's clock never runs backwards. Heaps are lazy: stale entries are skipped when they reach the top, and a
heap that is mostly stale is rebuilt, a few entries per push.

No call takes longer than a turn allows. Expiring thousands of leases, or counting the matches of a filter among a
million records, is done in slices (`catch_up`). A consumer that has not caught up delivers nothing in the meantime. If
writers add work faster than it is done, slices grow (`SliceProgress`), so it always finishes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from topics.api.config import ConsumerConfig
from topics.engine.core.subjects import TagFilter, TagMatch, overlap
from topics.engine.storage.control import Event

READY, LEASED, DELAYED, MOVING = range(4)
CLAIMED, RETURNED, ACKED, GIVEN_UP, EXTENDED, MOVE, UNMOVED, MOVED, RESET, PAUSED, FORGOTTEN = range(1, 12)

ID_MASK = (1 << 64) - 1
# When records are removed, a filtered consumer checks the tags of up to REMOVED_CHECKED_MAX of them. All consumers
# together may check more, up to REMOVED_CHECKED_TOTAL, as a recount would cost more.
REMOVED_CHECKED_MAX, REMOVED_CHECKED_TOTAL = 64, 2048
COUNT_BLOCK, COUNT_BLOCK_UNFILTERED = 256, 65_536  # rows counted together
COUNT_INLINE_US = 2000  # estimated cost up to which counting is done at once instead of in slices
ROWS_PER_US = 256  # rows counted per microsecond, without a filter
TIMEOUTS_PER_SLICE = 500  # leases and delays ended per call
MATCH_CACHE_MAX = 1024  # tags whose filter result is cached
DEAD_LETTER_SOURCES_MAX = 65_536  # source topics whose dead letter numbers are kept; least recent dropped
STALE_MAX = 64  # stale heap entries always tolerated
REBUILT_PER_PUSH = 4  # entries moved per push while a heap is rebuilt
STALE_SCANNED_MAX = 64  # stale deadlines skipped to find the next one

T = TypeVar("T")


class Rows(Protocol):
    """The part of a topic's row index that consumers use."""

    @property
    def first_seq(self) -> int: ...

    def spans(self, first_seq: int, stop_seq: int) -> Iterator[tuple[Any, int, int]]: ...

    def count_live(self, first_seq: int, stop_seq: int) -> int: ...

    def live_in(self, ranges: Sequence[tuple[int, int]]) -> list[int]: ...

    def tag_counts(self, first_seq: int, stop_seq: int) -> list[tuple[bytes | None, int]]: ...


class ConsumerRow(msgspec.Struct, array_like=True):
    """A consumer, as stored in a snapshot."""

    name: str
    config: ConsumerConfig
    cursor: int
    entries: list[tuple[int, int, int, bytes, int, int]]  # seq, state, deliveries, node, lease id, until
    initial_seqs: list[int]
    created_ms: int
    paused_until_ms: int
    counters: list[int]
    dead_letters: list[tuple[int, int, str]] = []  # seq, deliveries, reason
    streamed: list[int] = []


class PendingEntry:
    """A delivered record that is not settled yet."""

    __slots__ = ("connection", "dead_letter", "deliveries", "id", "node", "state", "streamed", "until_ms")

    def __init__(self) -> None:
        self.state = READY
        self.deliveries = 0
        self.node = b""
        self.id = 0
        self.until_ms = 0
        self.connection = 0
        self.streamed = False
        # Set after its dead letter topic refused it: (deliveries, reason) to send it with again.
        self.dead_letter: tuple[int, str] | None = None


class LazyHeap(Generic[T]):
    """A heap that tolerates stale entries until they reach the top or outnumber the current ones.

    Then it is rebuilt incrementally: entries are taken from the end of the old heap, which therefore stays a heap, and pushed
    to a new one. `renew` returns the current part of an entry and its size, or None if the entry is stale.
    """

    __slots__ = ("_count", "_new", "_old", "_renew")

    def __init__(self, renew: Callable[[T], tuple[T, int] | None]) -> None:
        self._renew = renew
        self._new: list[tuple[T, int]] = []
        self._old: list[tuple[T, int]] = []
        self._count = 0  # total size of the entries in both heaps

    def __bool__(self) -> bool:
        return bool(self._new or self._old)

    def __iter__(self) -> Iterator[T]:
        return (entry for heap in (self._new, self._old) for entry, _ in heap)

    def push(self, entry: T, current: int, count: int = 1) -> None:
        """Add an entry of size `count`. `current`: the number of items in the heap that are not stale."""
        heapq.heappush(self._new, (entry, count))
        self._count += count
        if self._old:
            left = REBUILT_PER_PUSH * count
            while self._old and left > 0:
                moved, size = self._old.pop()
                self._count -= size
                left -= size
                renewed = self._renew(moved)
                if renewed is not None:
                    heapq.heappush(self._new, renewed)
                    self._count += renewed[1]
        elif self._count > 2 * current + STALE_MAX:
            self._old, self._new = self._new, []

    def first(self) -> T | None:
        heap = self._smaller()
        return heap[0][0] if heap else None

    def pop(self) -> T:
        entry, count = heapq.heappop(self._smaller())
        self._count -= count
        return entry

    def _smaller(self) -> list[tuple[T, int]]:
        new, old = self._new, self._old
        return old if old and (not new or old[0] < new[0]) else new


class MatchCount:
    """An incremental count of the live records of a range that match a filter, block by block over several turns.

    Blocks in which records are removed in the meantime are counted again at the end.
    """

    __slots__ = ("_at", "_counts", "_firsts", "_recount", "_stops", "filter", "first", "stop")

    def __init__(self, tag_filter: TagFilter | None, first: int, stop: int) -> None:
        self.filter = tag_filter
        self.first = self._at = first
        self.stop = stop
        self._firsts: list[int] = []
        self._stops: list[int] = []
        self._counts: list[int] = []
        self._recount: dict[int, None] = {}  # blocks to recount

    @property
    def is_done(self) -> bool:
        return self._at >= self.stop and not self._recount

    @property
    def total(self) -> int:
        return sum(self._counts)

    def count_block(self, rows: Rows) -> int:
        """Count one more block; returns the cost in microseconds."""
        if self._at >= self.stop:
            block, _ = self._recount.popitem()
        else:
            size = COUNT_BLOCK if self.filter is not None else COUNT_BLOCK_UNFILTERED
            found = next(rows.spans(max(self._at, rows.first_seq), self.stop), None)
            if found is None:
                self._at = self.stop
                return 1
            chunk, low, high = found
            block = len(self._firsts)
            self._firsts.append(chunk.first_seq + low)
            self._at = chunk.first_seq + min(low + size, high)
            self._stops.append(self._at)
            self._counts.append(0)
        first, stop = max(self._firsts[block], rows.first_seq), self._stops[block]
        if first >= stop:
            self._counts[block] = 0
            return 1
        took = 1 + (stop - first) // ROWS_PER_US
        if self.filter is None:
            self._counts[block] = rows.count_live(first, stop)
            return took
        tags = rows.tag_counts(first, stop)
        self._counts[block] = sum(count for tag, count in tags if self.filter.matches(tag))
        return took + len(tags) * self.filter.cost

    def note_removed(self, first: int, last: int) -> None:
        """Records in this range are being removed: recount the blocks that contain them."""
        low = bisect_right(self._stops, first)
        high = bisect_right(self._firsts, last)
        self._recount.update(dict.fromkeys(range(low, high)))


class SliceProgress:
    """Progress of sliced work: the cost estimated at its start, and the cost so far, in microseconds."""

    __slots__ = ("estimate", "spent")

    def __init__(self, estimate: int) -> None:
        self.estimate = estimate
        self.spent = 0


def overlap_cost(one: TagFilter | None, other: TagFilter | None) -> int:
    """Estimated cost of comparing two filters, in microseconds."""
    if one is None or other is None:
        return 1
    return 4 + one.weight * other.weight + (len(one.any_of) + len(other.any_of)) // 8


def count_cost(tag_filter: TagFilter | None, rows: int) -> int:
    """Estimated cost of counting rows, in microseconds, if each has its own tag."""
    return rows * tag_filter.cost if tag_filter is not None else rows // ROWS_PER_US


def count_matches(rows: Rows, tag_filter: TagFilter | None, first: int, stop: int) -> int:
    """The number of live records in [first, stop) that match a filter."""
    if first >= stop:
        return 0
    if tag_filter is None:
        return rows.count_live(first, stop)
    return sum(count for tag, count in rows.tag_counts(first, stop) if tag_filter.matches(tag))


@dataclass(slots=True)
class Counters:
    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    dead_lettered: int = 0
    given_up: int = 0


def filter_of(config: ConsumerConfig) -> TagFilter | None:
    """The consumer's tag filter; None: every record, including untagged ones."""
    matches = tuple(TagMatch(op, value.encode()) for op, value in config.filter)
    return TagFilter(matches) if matches else None


class Consumer:
    __slots__ = (
        "_delayed",
        "_expiries",
        "_returned",
        "active_ms",
        "config",
        "connections",
        "count_progress",
        "counted_to",
        "counters",
        "counting",
        "counts",
        "created_ms",
        "cursor",
        "cursor_locked",
        "dropped",
        "entries",
        "filter",
        "idle_number",
        "initial_seqs",
        "match_cache",
        "name",
        "on_settled",
        "parked",
        "paused_until_ms",
        "pending_replies",
        "policy",
        "replay_shift_ms",
        "rescan_below",
        "streams",
        "undelivered",
        "waiters",
        "wake_ms",
        "window_ms",
    )

    def __init__(self, name: str, config: ConsumerConfig, on_settled: Callable[[int], None]) -> None:
        self.name = name
        self.cursor = 1  # the next undelivered seq
        # Matching live records between the cursor and `counted_to`; None: not counted. Later appends are counted on demand.
        self.undelivered: int | None = None
        self.counted_to = 0
        self.match_cache: dict[bytes, bool] = {}  # tag → whether it matches the filter
        self.idle_number = 0  # number of its inactivity timer
        self.rescan_below = 0  # below this seq the cursor may meet pending entries
        self.policy: tuple[object, object] = (None, None)  # the topic config it was made from, and the policy
        self.initial_seqs: list[int] = []  # undelivered records below the cursor, ascending (last_per_tag)
        self.entries: dict[int, PendingEntry] = {}
        self.counts = [0, 0, 0, 0]  # entries by state
        self.connections: dict[int, set[int]] = {}  # connection → seqs it has leases on
        self.counting: MatchCount | None = None  # count in progress, if it takes longer than a turn
        self.count_progress: SliceProgress | None = None  # while the count is behind
        self._reset_heaps()
        self.counters = Counters()
        self.created_ms = 0
        self.paused_until_ms = 0  # -1: indefinitely
        # Waiting claims and timers: not stored.
        self.waiters: dict[int, object] = {}
        self.parked: dict[int, object] = {}  # waiting claims of connections, by connection number
        self.streams = 0  # number of waiting claims that are streams
        self.pending_replies: list[object] = []  # replies to settles, held until the consumer has caught up
        self.cursor_locked = False  # a reset is counting records around the cursor
        self.window_ms = 0  # when the current claim window (claim_jitter_ms) closes; 0: none is open
        self.wake_ms = 0  # the earliest timer set for it
        self.active_ms = 0
        self.replay_shift_ms: int | None = None  # replay original: delivery time minus record time
        self.dropped = False
        self.on_settled = on_settled
        self.configure(config)

    def _reset_heaps(self) -> None:
        # (deadline, the seqs leased with it)
        self._expiries: LazyHeap[tuple[int, list[int]]] = LazyHeap(self._still_leased)
        self._returned: LazyHeap[int] = LazyHeap(self._still_ready)
        self._delayed: LazyHeap[tuple[int, int]] = LazyHeap(self._still_delayed)

    def configure(self, config: ConsumerConfig) -> None:
        self.config = config
        self.undelivered = self.counting = self.count_progress = None
        self.match_cache = {}
        self.policy = (None, None)
        self.filter = filter_of(config)

    # -- counts --------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self.counts[LEASED]

    @property
    def returned(self) -> int:
        return self.counts[READY]

    @property
    def ack_floor(self) -> int:
        lowest = min(self.entries, default=self.cursor)
        return min(lowest, self.initial_seqs[0] if self.initial_seqs else self.cursor) - 1

    def is_paused(self, now_ms: int) -> bool:
        return self.paused_until_ms < 0 or self.paused_until_ms > now_ms

    def leases_of(self, connection: int) -> int:
        return len(self.connections.get(connection, ()))

    # -- timeouts ------------------------------------------------------------------------------------------

    def process_timeouts(self, now_ms: int) -> bool:
        """Make records of expired leases and ended delays ready, up to TIMEOUTS_PER_SLICE; returns whether all are done."""
        expiries, delayed, limit = self._expiries, self._delayed, TIMEOUTS_PER_SLICE
        while (lease := expiries.first()) is not None and lease[0] < now_ms:
            until_ms, seqs = lease
            if limit <= 0:
                return False
            part = seqs[-limit:]
            expiries.pop()
            if len(part) < len(seqs):
                self._push_expiry(until_ms, seqs[:-limit])
            limit -= len(part)
            for seq in part:
                entry = self.entries.get(seq)
                if entry is not None and entry.state == LEASED and entry.until_ms == until_ms:
                    self._make_ready(seq, entry)
        while (delay := delayed.first()) is not None and delay[0] <= now_ms:
            if limit <= 0:
                return False
            due_ms, seq = delayed.pop()
            limit -= 1
            entry = self.entries.get(seq)
            if entry is not None and entry.state == DELAYED and entry.until_ms == due_ms:
                self._make_ready(seq, entry)
        return True

    def next_change_ms(self) -> int:
        """When the next lease or delay ends, or somewhat earlier; 0: there is none."""
        expiries, delayed = self._expiries, self._delayed
        for _ in range(STALE_SCANNED_MAX):
            lease = expiries.first()
            if lease is None or self._is_leased(lease):
                break
            expiries.pop()
        lease, delay = expiries.first(), delayed.first()
        times = [lease[0] + 1] if lease is not None else []
        if delay is not None:
            times.append(delay[0])
        return min(times, default=0)

    def _is_leased(self, lease: tuple[int, list[int]]) -> bool:
        """Whether any record of this heap entry is still leased with that deadline."""
        until_ms, seqs = lease
        entries = (self.entries.get(seq) for seq in seqs)
        return any(e is not None and e.state == LEASED and e.until_ms == until_ms for e in entries)

    def _still_leased(self, lease: tuple[int, list[int]]) -> tuple[tuple[int, list[int]], int] | None:
        until_ms, entries = lease[0], self.entries
        held = [
            seq
            for seq in lease[1]
            if (entry := entries.get(seq)) is not None
            and entry.state == LEASED
            and entry.until_ms == until_ms
        ]
        return ((until_ms, held), len(held)) if held else None

    def _still_delayed(self, delay: tuple[int, int]) -> tuple[tuple[int, int], int] | None:
        entry = self.entries.get(delay[1])
        is_delayed = entry is not None and entry.state == DELAYED and entry.until_ms == delay[0]
        return (delay, 1) if is_delayed else None

    def _still_ready(self, seq: int) -> tuple[int, int] | None:
        entry = self.entries.get(seq)
        return (seq, 1) if entry is not None and entry.state == READY else None

    # -- ready and undelivered records ---------------------------------------------------------------------

    def take_returned(self) -> Iterator[int]:
        """Records to redeliver, lowest seq first. Unused ones must be returned with `put_back`."""
        last = 0
        while self._returned:
            seq = self._returned.pop()
            entry = self.entries.get(seq)
            # A record that was returned twice may be in the heap twice.
            if entry is not None and entry.state == READY and seq != last:
                last = seq
                yield seq

    def put_back(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self._returned.push(seq, self.counts[READY])

    def note_rescan(self) -> None:
        """Remember up to where the cursor must skip pending entries."""
        self.rescan_below = max((seq + 1 for seq in self.entries if seq >= self.cursor), default=0)

    def matches(self, tag: bytes | None) -> bool:
        """Whether records with this tag match the filter."""
        if self.filter is None:
            return True
        if tag is None:
            return False
        is_match = self.match_cache.get(tag)
        if is_match is None:
            if len(self.match_cache) >= MATCH_CACHE_MAX:
                self.match_cache = {}
            is_match = self.match_cache[tag] = self.filter.matches(tag)
        return is_match

    def count_matching(self, rows: Rows, first: int, stop: int) -> int:
        """The number of matching live records in [first, stop)."""
        if self.filter is None or stop - first > MATCH_CACHE_MAX:
            return count_matches(rows, self.filter, first, stop)
        if first >= stop:
            return 0
        return sum(count for tag, count in rows.tag_counts(first, stop) if self.matches(tag))

    def is_counted(self, rows: Rows, end: int) -> bool:
        """Whether its records up to `end` are counted, or so few are missing that they can be counted at once."""
        return self.counting is None and self.remaining_cost(rows, end) <= COUNT_INLINE_US

    def remaining_cost(self, rows: Rows, end: int) -> int:
        """Estimated cost of counting up to `end`, in microseconds."""
        first = self.cursor if self.undelivered is None else max(self.counted_to, self.cursor)
        return count_cost(self.filter, end - max(first, rows.first_seq))

    def count(self, rows: Rows, end: int) -> int:
        """Count one block towards `end`; returns the cost in microseconds."""
        if self.undelivered is None:
            self.undelivered, self.counted_to, self.counting = 0, self.cursor, None
        if self.counting is None:
            self.counting = MatchCount(self.filter, max(self.counted_to, self.cursor), end)
        took = self.counting.count_block(rows)
        if self.counting.is_done:
            self.undelivered += self.counting.total
            self.counted_to, self.counting = self.counting.stop, None
        return took

    def note_cursor_moved(self, before: int, fresh: list[int]) -> None:
        """The cursor has moved on from `before`, past these delivered records and past records that do not match."""
        if self.undelivered is None:
            return
        if before < self.rescan_below or self.cursor > self.counted_to:
            self.undelivered = None
        else:
            self.undelivered -= sum(seq >= before for seq in fresh)

    def note_removed(self, rows: Rows, first: int, last: int, at_once: int) -> None:
        """Records in this range are being removed: adjust the count, checking the tags of up to `at_once` of them."""
        first, stop = max(first, self.cursor), min(last + 1, self.counted_to)
        if self.undelivered is None or first >= stop:
            return
        if self.filter is not None and stop - first > at_once:
            self.undelivered = None  # recounted on demand: many consumers may never be asked
        else:
            self.undelivered -= self.count_matching(rows, first, stop)

    def note_removed_many(self, rows: Rows, removed: list[int]) -> None:
        """These records, ascending, are being removed."""
        if not self.undelivered:
            return
        low, high = bisect_left(removed, self.cursor), bisect_left(removed, self.counted_to)
        if self.filter is None:
            self.undelivered -= high - low
        elif high - low > REMOVED_CHECKED_MAX:
            self.undelivered = None
        else:
            self.undelivered -= sum(self.count_matching(rows, seq, seq + 1) for seq in removed[low:high])

    # -- events --------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        kind, seqs = event.kind, event.seqs
        if kind == CLAIMED:
            self._deliver(event)
        elif kind == RETURNED:
            for i, seq in enumerate(seqs):
                self._return(seq, event.until_ms, event.deliveries[i] if event.deliveries else None)
        elif kind in (ACKED, GIVEN_UP):
            dropped = sum(self.drop(seq) for seq in seqs)
            if kind == ACKED:
                self.counters.acked += dropped
            else:
                self.counters.given_up += dropped
        elif kind == EXTENDED:
            for seq in seqs:
                entry = self.entries.get(seq)
                if entry is not None and entry.state == LEASED:
                    entry.until_ms = event.until_ms
            self._push_expiry(event.until_ms, seqs)
        elif kind == MOVE:
            for seq, deliveries in zip(seqs, event.deliveries, strict=True):
                entry = self.entries.get(seq)
                if entry is None:  # in replay, if its leases were not logged
                    entry = self.entries[seq] = PendingEntry()
                    self.counts[READY] += 1
                    entry.deliveries = deliveries
                self._leave_connection(seq, entry)
                self._set(entry, MOVING)
        elif kind == UNMOVED:
            for seq in seqs:
                self._return(seq, event.until_ms, None)
        elif kind == MOVED:
            self.counters.dead_lettered += sum(self.drop(seq) for seq in seqs)
        elif kind == RESET:
            self.forget_leases()
            self.initial_seqs = []
            self.replay_shift_ms = self.undelivered = self.counting = self.count_progress = None
            self.cursor = event.cursor
            self.note_rescan()
        elif kind == PAUSED:
            self.paused_until_ms = event.until_ms
        elif kind == FORGOTTEN:
            self.forget_leases()

    def _deliver(self, event: Event) -> None:
        entries, counters = self.entries, self.counters
        seqs, deliveries = event.seqs, event.deliveries
        if self.initial_seqs and seqs:
            # Initial records are delivered in order and lie below the cursor.
            del self.initial_seqs[: bisect_right(self.initial_seqs, seqs[-1])]
        if event.cursor:
            self.cursor = event.cursor
        counters.delivered += len(seqs)
        if deliveries:
            counters.redelivered += sum(number > 1 for number in deliveries)
        if not event.until_ms:
            counters.acked += len(seqs)  # ack none: settled on delivery
            for seq in seqs:
                self.drop(seq)
            return
        lease_id, until_ms, node = event.first_id, event.until_ms, event.node
        for i, seq in enumerate(seqs):
            entry = entries.get(seq)
            if entry is None:
                entry = entries[seq] = PendingEntry()
                self.counts[LEASED] += 1
                entry.state = LEASED
            else:
                self._set(entry, LEASED)
            entry.deliveries = deliveries[i] if deliveries else 1
            entry.node, entry.until_ms, entry.dead_letter = node, until_ms, None
            entry.streamed = event.streamed
            entry.id = (lease_id + i) & ID_MASK
        self._push_expiry(until_ms, seqs)

    def attach(self, connection: int, seqs: Iterable[int]) -> None:
        """Tie leases to a connection: they end when it closes."""
        self.connections.setdefault(connection, set()).update(seqs)
        for seq in seqs:
            self.entries[seq].connection = connection

    def _push_expiry(self, until_ms: int, seqs: list[int]) -> None:
        if seqs:
            self._expiries.push((until_ms, seqs), self.counts[LEASED], len(seqs))

    def _return(self, seq: int, due_ms: int, deliveries: int | None) -> None:
        entry = self.entries.get(seq)
        if entry is None:
            return
        if deliveries is not None:
            entry.deliveries = deliveries
        if not due_ms:
            self._make_ready(seq, entry)
            return
        self._leave_connection(seq, entry)
        self._set(entry, DELAYED)
        entry.until_ms = due_ms
        self._delayed.push((due_ms, seq), self.counts[DELAYED])

    def _make_ready(self, seq: int, entry: PendingEntry) -> None:
        self._leave_connection(seq, entry)
        self._set(entry, READY)
        entry.until_ms = 0
        self._returned.push(seq, self.counts[READY])

    def _set(self, entry: PendingEntry, state: int) -> None:
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    def _leave_connection(self, seq: int, entry: PendingEntry) -> None:
        connection = entry.connection
        if connection:
            entry.connection = 0
            held = self.connections[connection]
            held.discard(seq)
            if not held:
                del self.connections[connection]
            self.on_settled(connection)

    def drop(self, seq: int) -> bool:
        """Remove an entry: its record is settled, or removed from the log. Returns whether there was one."""
        entry = self.entries.pop(seq, None)
        if entry is None:
            return False
        self.counts[entry.state] -= 1
        self._leave_connection(seq, entry)
        return True

    def forget(self, first: int, last: int) -> list[int]:
        """Drop entries of records that are removed from the log. Returns which of them were moving."""
        if self.initial_seqs and first <= self.initial_seqs[-1] and last >= self.initial_seqs[0]:
            del self.initial_seqs[
                bisect_left(self.initial_seqs, first) : bisect_right(self.initial_seqs, last)
            ]
        entries = self.entries
        if not entries:
            return []
        if last - first < len(entries):
            gone = [seq for seq in range(first, last + 1) if seq in entries]
        else:
            gone = [seq for seq in entries if first <= seq <= last]
        moving = [seq for seq in gone if entries[seq].state == MOVING]
        for seq in gone:
            self.drop(seq)
        return moving

    # -- snapshots -----------------------------------------------------------------------------------------

    def row(self, *, durable: bool) -> ConsumerRow:
        """The snapshot row. Without `durable` leases it keeps only entries on their way to a dead letter topic."""
        counters = self.counters
        return ConsumerRow(
            self.name,
            self.config,
            self.cursor,
            [
                (seq, entry.state, entry.deliveries, entry.node, entry.id, entry.until_ms)
                for seq, entry in self.entries.items()
                if durable or entry.state == MOVING
            ],
            list(self.initial_seqs),
            self.created_ms,
            self.paused_until_ms,
            [
                counters.delivered, counters.redelivered, counters.acked, counters.dead_lettered, counters.given_up,
            ],
            [(seq, *entry.dead_letter) for seq, entry in self.entries.items() if entry.dead_letter and durable],
            [seq for seq, entry in self.entries.items() if entry.streamed and durable],
        )  # fmt: skip

    def restore(self, row: ConsumerRow) -> None:
        self.cursor, self.initial_seqs = row.cursor, row.initial_seqs
        self.created_ms, self.paused_until_ms = row.created_ms, row.paused_until_ms
        self.counters = Counters(*row.counters)
        for seq, state, deliveries, node, lease_id, until_ms in row.entries:
            entry = self.entries[seq] = PendingEntry()
            entry.state, entry.deliveries, entry.node = state, deliveries, node
            entry.id, entry.until_ms = lease_id, until_ms
            self.counts[state] += 1
            if state == READY:
                self._returned.push(seq, self.counts[READY])
            elif state == LEASED:
                self._push_expiry(until_ms, [seq])
            elif state == DELAYED:
                self._delayed.push((until_ms, seq), self.counts[DELAYED])
        for seq, deliveries, reason in row.dead_letters:
            self.entries[seq].dead_letter = deliveries, reason
        for seq in row.streamed:
            self.entries[seq].streamed = True

    def release_streamed(self) -> None:
        """After a restart: make records ready that were leased over connections, which are gone."""
        for seq, entry in self.entries.items():
            if entry.streamed and entry.state == LEASED:
                self._make_ready(seq, entry)

    def forget_leases(self) -> None:
        """Drop all leases, as if their records had never been delivered; moving entries stay."""
        moving = self.entries.items() if self.counts[MOVING] else ()
        self.entries = {seq: entry for seq, entry in moving if entry.state == MOVING}
        self.counts = [0, 0, 0, len(self.entries)]
        self._reset_heaps()
        connections, self.connections = self.connections, {}
        for connection in connections:
            self.on_settled(connection)

    # -- invariants ----------------------------------------------------------------------------------------

    def check(self) -> None:
        counts = [0, 0, 0, 0]
        for entry in self.entries.values():
            counts[entry.state] += 1
        assert counts == self.counts, (self.name, counts, self.counts)
        returned = set(self._returned)
        assert all(seq in returned for seq, entry in self.entries.items() if entry.state == READY), self.name
        held = {seq for seqs in self.connections.values() for seq in seqs}
        assert held == {seq for seq, entry in self.entries.items() if entry.connection}, self.name
        assert self.initial_seqs == sorted(self.initial_seqs)


@dataclass(slots=True, eq=False)
class PruneRequest:
    """Records to delete if no consumer needs them any more, and the reply that waits for that."""

    first: int
    stop: int
    seqs: Sequence[int] | None = None  # ascending; None: all of [first, stop)
    answer: Any = None  # an Op
    work: Iterator[int] | None = None


class DeadLettersRow(msgspec.Struct, array_like=True):
    """A topic's dead letters, as stored in a snapshot."""

    next_dead_letter: int
    dead_letters: list[tuple[int, str, int, str, int, str]]
    received: list[tuple[int, int]]
    dead_lettered: int


class TopicConsumers:
    """All consumers of one topic, and its dead letters: those to be sent, and how many were received from other topics."""

    __slots__ = (
        "changes",
        "dead_letter_numbers",
        "dead_lettered",
        "dead_letters",
        "named",
        "next_dead_letter",
        "pruning",
        "queue",
        "received",
        "recounts",
        "synced_dead_letter",
        "waiting",
    )

    def __init__(self) -> None:
        self.queue: Consumer | None = None
        self.named: dict[str, Consumer] = {}
        self.waiting = 0  # parked claims
        self.next_dead_letter = 1
        self.synced_dead_letter = (
            0  # dead letters up to this number may be sent: their MOVE events are synced
        )
        # By number, ascending: (consumer, seq, target, deliveries, reason).
        self.dead_letters: dict[int, tuple[str, int, str, int, str]] = {}
        self.dead_letter_numbers: dict[tuple[str, int], int] = {}  # by consumer and seq
        self.received: dict[int, int] = {}  # source topic id → the highest number received from it
        self.dead_lettered = 0  # by the built-in consumer of a queue
        self.changes = 0  # bumped whenever a consumer may need other records than before
        self.recounts: list[MatchCount] = []  # counts in progress that do not start at a cursor
        self.pruning: deque[PruneRequest] = deque()

    def all(self) -> list[Consumer]:
        return [self.queue, *self.named.values()] if self.queue is not None else list(self.named.values())

    def find(self, name: str) -> Consumer | None:
        return self.named.get(name) if name else self.queue

    def overlapping(self, name: str, tag_filter: TagFilter | None) -> Generator[int, None, str | None]:
        """The name of another consumer whose filter overlaps this one, or None."""
        for other in self.all():
            if other.name != name:
                if overlap(other.filter, tag_filter):
                    return other.name
                yield overlap_cost(other.filter, tag_filter)
        return None

    def find_overlap(self) -> Generator[int, None, tuple[str, str] | None]:
        """Two consumers whose filters overlap, or None."""
        consumers = self.all()
        unfiltered = [consumer.name for consumer in consumers if consumer.filter is None]
        if unfiltered and len(consumers) > 1:
            return unfiltered[0], next(one.name for one in consumers if one.name != unfiltered[0])
        for i, one in enumerate(consumers):
            for other in consumers[:i]:
                if overlap(other.filter, one.filter):
                    return one.name, other.name
                yield overlap_cost(other.filter, one.filter)
        return None

    def forget(self, rows: Rows, first: int, last: int) -> None:
        """Records in this range are about to be removed from the log."""
        for count in self.recounts:
            count.note_removed(first, last)
        every = self.all()
        at_once = max(REMOVED_CHECKED_MAX, REMOVED_CHECKED_TOTAL // max(len(every), 1))
        for consumer in every:
            if consumer.undelivered:
                consumer.note_removed(rows, first, last, at_once)
            if consumer.counting is not None:
                consumer.counting.note_removed(first, last)
            moving = consumer.forget(first, last)
            if moving:
                self.drop_dead_letters(consumer.name, set(moving))

    def forget_many(self, rows: Rows, ranges: Sequence[tuple[int, int]]) -> None:
        """`forget` for many ascending ranges. The removed seqs are listed once for all consumers."""
        removed = sorted(rows.live_in(ranges))
        if not removed:
            return
        gone = set(removed)
        for count in self.recounts:
            for first, last in ranges:
                count.note_removed(first, last)
        for consumer in self.all():
            consumer.note_removed_many(rows, removed)
            if consumer.counting is not None:
                for first, last in ranges:
                    consumer.counting.note_removed(first, last)
            if (
                consumer.initial_seqs
                and consumer.initial_seqs[0] <= removed[-1]
                and consumer.initial_seqs[-1] >= removed[0]
            ):
                consumer.initial_seqs = [seq for seq in consumer.initial_seqs if seq not in gone]
            held = consumer.entries.keys() & gone if consumer.entries else ()
            moving = {seq for seq in held if consumer.entries[seq].state == MOVING}
            for seq in held:
                consumer.drop(seq)
            if moving:
                self.drop_dead_letters(consumer.name, moving)

    def drop_dead_letters(self, consumer: str, seqs: set[int]) -> None:
        for seq in seqs:
            number = self.dead_letter_numbers.pop((consumer, seq), None)
            if number is not None:
                del self.dead_letters[number]

    def apply(self, event: Event) -> None:
        """Apply an event to its consumer and to the dead letters."""
        consumer = self.find(event.consumer)
        if consumer is None:
            return
        if event.kind == MOVE:
            number = event.number
            for seq, deliveries in zip(event.seqs, event.deliveries, strict=True):
                self.dead_letters[number] = (event.consumer, seq, event.target, deliveries, event.reason)
                self.dead_letter_numbers[event.consumer, seq] = number
                number += 1
            self.next_dead_letter = max(self.next_dead_letter, number)
        elif event.kind in (UNMOVED, MOVED):
            for seq in event.seqs:
                known = self.dead_letter_numbers.get((event.consumer, seq))
                if known is not None and seq in consumer.entries:
                    consumer.entries[seq].dead_letter = self.dead_letters[known][3:]
            self.drop_dead_letters(event.consumer, set(event.seqs))
        elif event.kind == RESET:
            self.changes += 1
        before = consumer.counters.dead_lettered
        consumer.apply(event)
        if consumer is self.queue:
            self.dead_lettered += consumer.counters.dead_lettered - before

    def note_received(self, source_id: int, number: int) -> None:
        self.received.pop(source_id, None)
        self.received[source_id] = number
        while len(self.received) > DEAD_LETTER_SOURCES_MAX:
            del self.received[next(iter(self.received))]

    def row(self) -> DeadLettersRow:
        letters = [(number, *letter) for number, letter in self.dead_letters.items()]
        return DeadLettersRow(self.next_dead_letter, letters, list(self.received.items()), self.dead_lettered)

    def restore(self, row: DeadLettersRow) -> None:
        self.next_dead_letter, self.dead_lettered = row.next_dead_letter, row.dead_lettered
        self.dead_letters = {letter[0]: letter[1:] for letter in row.dead_letters}
        self.dead_letter_numbers = {
            (letter[0], letter[1]): number for number, letter in self.dead_letters.items()
        }
        self.received = dict(row.received)
        self.synced_dead_letter = self.next_dead_letter - 1
