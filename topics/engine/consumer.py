"""A consumer: a cursor, and what was handed out and is not settled yet.

    never handed out ──claim──▶ LEASED ──ack──▶ settled
    (from the cursor on)        │  ▲ └─ extend
                        nack,   │  │ claim
                        expiry, ▼  │
                        release READY ◀── DELAYED        its last delivery was in vain ──▶ MOVING ──▶ settled

What lies below the cursor and has no entry is settled. So the state is as large as what is in hand, whatever the
backlog is, and every step costs the same for a thousand waiting records and for ten million.

Every change is an `Event`, applied by `apply` in live operation and in replay alike. Time is no event: a lease holds its
deadline, and the engine's clock never runs back. Heaps are lazy: an entry that has moved on is skipped when it
comes up, and a heap that is mostly such is made anew.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import msgspec

from topics.engine.config import ConsumerConfig
from topics.engine.errors import Throttled
from topics.engine.limits import FILTER_PAIRS_MAX
from topics.engine.subjects import TagFilter, TagMatch, overlap

READY, LEASED, DELAYED, MOVING = range(4)
CLAIMED, RETURNED, ACKED, GIVEN_UP, EXTENDED, MOVE, UNMOVED, MOVED, RESET, PAUSED, FORGOTTEN = range(1, 12)

ID_MASK = (1 << 64) - 1
COUNT_AT_ONCE_MAX = 64  # records that go, whose tags are looked at for each consumer with a filter
VERDICTS_MAX = 1024  # tags whose match with a filter is remembered
SOURCES_MAX = 65_536  # topics whose letters a topic remembers; the one heard of longest ago is forgotten
STALE_MAX = 64  # so many outdated heap entries are kept, however few are current


class Rows(Protocol):
    """What a consumer needs to know of its topic's records."""

    def count_live(self, first_seq: int, stop_seq: int) -> int: ...

    def tag_counts(self, first_seq: int, stop_seq: int) -> list[tuple[bytes | None, int]]: ...


class Event(msgspec.Struct, frozen=True, array_like=True):
    """What happened to records of one consumer. Fields may be added at the end, never moved."""

    consumer: str
    kind: int
    seqs: list[int] = []
    until_ms: int = 0  # a deadline; or when it is ready again; or when a pause ends
    node: bytes = b""
    first_id: int = 0  # lease ids count on from here
    deliveries: list[int] = []  # empty: the first of each, or unchanged
    cursor: int = 0  # 0: unchanged
    number: int = 0  # of the first letter
    target: str = ""
    reason: str = ""
    streamed: bool = False  # over a connection that ends with the process


class ConsumerRow(msgspec.Struct, array_like=True):
    """A consumer in a snapshot."""

    name: str
    config: ConsumerConfig
    cursor: int
    entries: list[tuple[int, int, int, bytes, int, int]]  # seq, state, deliveries, node, lease id, until
    firsts: list[int]
    created_ms: int
    paused_until_ms: int
    counters: list[int]
    dooms: list[tuple[int, int, str]] = []  # seq, deliveries, reason
    streamed: list[int] = []


class Entry:
    """One record in hand."""

    __slots__ = ("connection", "deliveries", "doom", "id", "node", "state", "streamed", "until_ms")

    def __init__(self) -> None:
        self.state = READY
        self.deliveries = 0
        self.node = b""
        self.id = 0
        self.until_ms = 0
        self.connection = 0
        self.streamed = False
        # Refused by its dead letter topic, where it shall go all the same: deliveries and reason that it goes with.
        self.doom: tuple[int, str] | None = None


@dataclass(slots=True)
class Counters:
    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    dead_lettered: int = 0
    given_up: int = 0


def filter_of(config: ConsumerConfig) -> TagFilter | None:
    """None: every record, also untagged ones."""
    matches = tuple(TagMatch(op, value.encode()) for op, value in config.filter)
    return TagFilter(matches) if matches else None


class Consumer:
    __slots__ = (
        "_delayed",
        "_expiries",
        "_expiring",
        "_returned",
        "active_ms",
        "ahead",
        "config",
        "connections",
        "counted_to",
        "counters",
        "counts",
        "created_ms",
        "cursor",
        "dropped",
        "entries",
        "filter",
        "firsts",
        "idle_number",
        "name",
        "on_settled",
        "parked",
        "paused_until_ms",
        "policy",
        "replay_shift_ms",
        "rescan",
        "streams",
        "verdicts",
        "waiters",
        "wake_ms",
        "window_ms",
    )

    def __init__(self, name: str, config: ConsumerConfig, on_settled: Callable[[int], None]) -> None:
        self.name = name
        self.cursor = 1  # the next seq that was never handed out
        # Live records from the cursor to `counted_to` that it wants; None: not counted. What was appended since then is
        # counted when somebody asks.
        self.ahead: int | None = None
        self.counted_to = 0
        self.verdicts: dict[bytes, bool] = {}  # whether it wants a tag
        self.idle_number = 0  # of the timer that ends it when nobody uses it
        self.rescan = 0  # below it the cursor may meet what is in hand
        self.policy: tuple[object, object] = (None, None)  # as of which config of the topic
        self.firsts: list[int] = []  # chosen records below the cursor that were never handed out, ascending
        self.entries: dict[int, Entry] = {}
        self.counts = [0, 0, 0, 0]  # entries by state
        self.connections: dict[int, set[int]] = {}  # seqs that were handed out over one, and are leased
        self._expiries: list[tuple[int, list[int]]] = []  # deadline, and what was handed out with it
        self._expiring = 0  # records in there
        self._returned: list[int] = []
        self._delayed: list[tuple[int, int]] = []
        self.counters = Counters()
        self.created_ms = 0
        self.paused_until_ms = 0  # -1: without an end
        # Who waits and for what time; known to this process alone.
        self.waiters: dict[int, object] = {}
        self.parked: dict[int, object] = {}  # of them, those of a connection, by its number
        self.streams = 0  # of them, standing ones
        self.window_ms = 0  # when the claims that gather are served together; 0: none do
        self.wake_ms = 0  # the earliest timer that was set for it
        self.active_ms = 0
        self.replay_shift_ms: int | None = None  # between a record's time and its original replay
        self.dropped = False
        self.on_settled = on_settled
        self.configure(config)

    def configure(self, config: ConsumerConfig) -> None:
        self.config = config
        self.ahead = None
        self.verdicts = {}
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
        return min(lowest, self.firsts[0] if self.firsts else self.cursor) - 1

    def is_paused(self, now_ms: int) -> bool:
        return self.paused_until_ms < 0 or self.paused_until_ms > now_ms

    def leases_of(self, connection: int) -> int:
        return len(self.connections.get(connection, ()))

    # -- time ----------------------------------------------------------------------------------------------

    def pass_time(self, now_ms: int) -> None:
        """Leases that have expired and delays that are over make their records ready."""
        expiries, delayed = self._expiries, self._delayed
        while expiries and expiries[0][0] < now_ms:
            until_ms, seqs = heapq.heappop(expiries)
            self._expiring -= len(seqs)
            for seq in seqs:
                entry = self.entries.get(seq)
                if entry is not None and entry.state == LEASED and entry.until_ms == until_ms:
                    self._make_ready(seq, entry)
        while delayed and delayed[0][0] <= now_ms:
            due_ms, seq = heapq.heappop(delayed)
            entry = self.entries.get(seq)
            if entry is not None and entry.state == DELAYED and entry.until_ms == due_ms:
                self._make_ready(seq, entry)

    def next_change_ms(self) -> int:
        """When time will make something ready; 0: nothing waits for it."""
        expiries, delayed = self._expiries, self._delayed
        while expiries:
            until_ms, seqs = expiries[0]
            entries = (self.entries.get(seq) for seq in seqs)
            if any(e is not None and e.state == LEASED and e.until_ms == until_ms for e in entries):
                break
            heapq.heappop(expiries)
            self._expiring -= len(seqs)
        times = [expiries[0][0] + 1] if expiries else []
        if delayed:
            times.append(delayed[0][0])
        return min(times, default=0)

    # -- what is ready -------------------------------------------------------------------------------------

    def take_returned(self) -> Iterator[int]:
        """Records that are ready again, the lowest first. What is not used is put back with `put_back`."""
        last = 0
        while self._returned:
            seq = heapq.heappop(self._returned)
            entry = self.entries.get(seq)
            # One that came back, was handed out and came back again may be in the heap twice.
            if entry is not None and entry.state == READY and seq != last:
                last = seq
                yield seq

    def put_back(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            heapq.heappush(self._returned, seq)

    def note_rescan(self) -> None:
        """What is in hand beyond the cursor is passed by when the cursor comes there."""
        self.rescan = max((seq + 1 for seq in self.entries if seq >= self.cursor), default=0)

    def wants(self, tag: bytes | None) -> bool:
        """Whether records with this tag are for it."""
        if self.filter is None:
            return True
        if tag is None:
            return False
        verdict = self.verdicts.get(tag)
        if verdict is None:
            if len(self.verdicts) >= VERDICTS_MAX:
                self.verdicts = {}
            verdict = self.verdicts[tag] = self.filter.matches(tag)
        return verdict

    def wanted(self, rows: Rows, first: int, stop: int) -> int:
        """How many live records of the seqs [first, stop) are for it."""
        if first >= stop:
            return 0
        if self.filter is None:
            return rows.count_live(first, stop)
        return sum(count for tag, count in rows.tag_counts(first, stop) if self.wants(tag))

    def passed(self, before: int, fresh: list[int]) -> None:
        """The cursor has moved on from `before`, over these records and over such that it does not want."""
        if self.ahead is None:
            return
        if before < self.rescan or self.cursor > self.counted_to:
            self.ahead = None
        else:
            self.ahead -= sum(seq >= before for seq in fresh)

    def lost(self, rows: Rows, first: int, last: int) -> None:
        """Records of this range go."""
        first, stop = max(first, self.cursor), min(last + 1, self.counted_to)
        if self.ahead is None or first >= stop:
            return
        if self.filter is not None and stop - first > COUNT_AT_ONCE_MAX:
            self.ahead = None  # counted anew when somebody asks: there may be many who never do
        else:
            self.ahead -= self.wanted(rows, first, stop)

    # -- events --------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        kind, seqs = event.kind, event.seqs
        if kind == CLAIMED:
            self._hand_out(event)
        elif kind == RETURNED:
            for i, seq in enumerate(seqs):
                self._give_back(seq, event.until_ms, event.deliveries[i] if event.deliveries else None)
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
                if entry is None:  # in replay: its leases were not logged
                    entry = self.entries[seq] = Entry()
                    self.counts[READY] += 1
                    entry.deliveries = deliveries
                self._leave_connection(seq, entry)
                self._set(entry, MOVING)
        elif kind == UNMOVED:
            for seq in seqs:
                self._give_back(seq, event.until_ms, None)
        elif kind == MOVED:
            self.counters.dead_lettered += sum(self.drop(seq) for seq in seqs)
        elif kind == RESET:
            for seq in [seq for seq, entry in self.entries.items() if entry.state != MOVING]:
                self.drop(seq)
            self.firsts = []
            self.replay_shift_ms = self.ahead = None
            self.cursor = event.cursor
            self.note_rescan()
        elif kind == PAUSED:
            self.paused_until_ms = event.until_ms
        elif kind == FORGOTTEN:
            self.forget_leases()

    def _hand_out(self, event: Event) -> None:
        entries, counters = self.entries, self.counters
        seqs, deliveries = event.seqs, event.deliveries
        if self.firsts and seqs:
            # They are handed out in order, and none is beyond the cursor.
            del self.firsts[: bisect_right(self.firsts, seqs[-1])]
        if event.cursor:
            self.cursor = event.cursor
        counters.delivered += len(seqs)
        if deliveries:
            counters.redelivered += sum(number > 1 for number in deliveries)
        if not event.until_ms:
            counters.acked += len(seqs)  # of a consumer without acks: nothing stays in hand
            for seq in seqs:
                self.drop(seq)
            return
        lease_id, until_ms, node = event.first_id, event.until_ms, event.node
        for i, seq in enumerate(seqs):
            entry = entries.get(seq)
            if entry is None:
                entry = entries[seq] = Entry()
                self.counts[LEASED] += 1
                entry.state = LEASED
            else:
                self._set(entry, LEASED)
            entry.deliveries = deliveries[i] if deliveries else 1
            entry.node, entry.until_ms, entry.doom = node, until_ms, None
            entry.streamed = event.streamed
            entry.id = (lease_id + i) & ID_MASK
        self._push_expiry(until_ms, seqs)

    def attach(self, connection: int, seqs: Iterable[int]) -> None:
        """These leases end with the connection."""
        self.connections.setdefault(connection, set()).update(seqs)
        for seq in seqs:
            self.entries[seq].connection = connection

    def _push_expiry(self, until_ms: int, seqs: list[int]) -> None:
        if not seqs:
            return
        heapq.heappush(self._expiries, (until_ms, seqs))
        self._expiring += len(seqs)
        if self._expiring > 2 * self.counts[LEASED] + STALE_MAX:
            leased = [(held.until_ms, seq) for seq, held in self.entries.items() if held.state == LEASED]
            self._expiries = [(held_until_ms, [seq]) for held_until_ms, seq in leased]
            self._expiring = len(leased)
            heapq.heapify(self._expiries)

    def _give_back(self, seq: int, due_ms: int, deliveries: int | None) -> None:
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
        heapq.heappush(self._delayed, (due_ms, seq))
        if len(self._delayed) > 2 * self.counts[DELAYED] + STALE_MAX:
            self._delayed = [
                (held.until_ms, number) for number, held in self.entries.items() if held.state == DELAYED
            ]
            heapq.heapify(self._delayed)

    def _make_ready(self, seq: int, entry: Entry) -> None:
        self._leave_connection(seq, entry)
        self._set(entry, READY)
        entry.until_ms = 0
        heapq.heappush(self._returned, seq)
        if len(self._returned) > 2 * self.counts[READY] + STALE_MAX:
            self._returned = [number for number, held in self.entries.items() if held.state == READY]
            heapq.heapify(self._returned)

    def _set(self, entry: Entry, state: int) -> None:
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    def _leave_connection(self, seq: int, entry: Entry) -> None:
        connection = entry.connection
        if connection:
            entry.connection = 0
            held = self.connections[connection]
            held.discard(seq)
            if not held:
                del self.connections[connection]
            self.on_settled(connection)

    def drop(self, seq: int) -> bool:
        """The record is settled, or gone from the log."""
        entry = self.entries.pop(seq, None)
        if entry is None:
            return False
        self.counts[entry.state] -= 1
        self._leave_connection(seq, entry)
        return True

    def forget(self, first: int, last: int) -> list[int]:
        """Records of this range are gone from the log. Returns which of them were moving."""
        if self.firsts and first <= self.firsts[-1] and last >= self.firsts[0]:
            del self.firsts[bisect_left(self.firsts, first) : bisect_right(self.firsts, last)]
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
        """What survives: everything, or, of leases that need not, what is on its way to a dead letter topic."""
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
            list(self.firsts),
            self.created_ms,
            self.paused_until_ms,
            [
                counters.delivered, counters.redelivered, counters.acked, counters.dead_lettered, counters.given_up,
            ],
            [(seq, *entry.doom) for seq, entry in self.entries.items() if entry.doom and durable],
            [seq for seq, entry in self.entries.items() if entry.streamed and durable],
        )  # fmt: skip

    def restore(self, row: ConsumerRow) -> None:
        self.cursor, self.firsts = row.cursor, row.firsts
        self.created_ms, self.paused_until_ms = row.created_ms, row.paused_until_ms
        self.counters = Counters(*row.counters)
        for seq, state, deliveries, node, lease_id, until_ms in row.entries:
            entry = self.entries[seq] = Entry()
            entry.state, entry.deliveries, entry.node = state, deliveries, node
            entry.id, entry.until_ms = lease_id, until_ms
            self.counts[state] += 1
            if state == READY:
                heapq.heappush(self._returned, seq)
            elif state == LEASED:
                self._push_expiry(until_ms, [seq])
            elif state == DELAYED:
                heapq.heappush(self._delayed, (until_ms, seq))
        for seq, deliveries, reason in row.dooms:
            self.entries[seq].doom = deliveries, reason
        for seq in row.streamed:
            self.entries[seq].streamed = True

    def end_streamed(self) -> None:
        """After a restart: what was handed out over connections is ready again, as they are gone."""
        for seq, entry in self.entries.items():
            if entry.streamed and entry.state == LEASED:
                self._make_ready(seq, entry)

    def forget_leases(self) -> None:
        """After a restart, of leases that need not survive: all that is live is ready, as if never handed out."""
        for seq in [seq for seq, entry in self.entries.items() if entry.state != MOVING]:
            self.drop(seq)

    # -- proofs --------------------------------------------------------------------------------------------

    def check(self) -> None:
        counts = [0, 0, 0, 0]
        for entry in self.entries.values():
            counts[entry.state] += 1
        assert counts == self.counts, (self.name, counts, self.counts)
        returned = set(self._returned)
        assert all(seq in returned for seq, entry in self.entries.items() if entry.state == READY), self.name
        held = {seq for seqs in self.connections.values() for seq in seqs}
        assert held == {seq for seq, entry in self.entries.items() if entry.connection}, self.name
        assert self.firsts == sorted(self.firsts)


class LettersRow(msgspec.Struct, array_like=True):
    """What a snapshot keeps of a topic's letters."""

    next_number: int
    letters: list[tuple[int, str, int, str, int, str]]
    taken: list[tuple[int, int]]
    dead_lettered: int


class TopicConsumers:
    """All consumers of one topic, and its letters: what is on its way to dead letter topics, and what came from others."""

    __slots__ = (
        "dead_lettered",
        "letters",
        "named",
        "next_number",
        "numbers",
        "queue",
        "safe_number",
        "taken",
        "waiting",
    )

    def __init__(self) -> None:
        self.queue: Consumer | None = None
        self.named: dict[str, Consumer] = {}
        self.waiting = 0  # claims that are parked
        self.next_number = 1
        self.safe_number = 0  # letters up to here may be sent: that they are on their way is synced
        # By number, ascending: consumer, seq, target, deliveries, reason.
        self.letters: dict[int, tuple[str, int, str, int, str]] = {}
        self.numbers: dict[tuple[str, int], int] = {}  # of the letters, by consumer and seq
        self.taken: dict[int, int] = {}  # source topic → the highest number that came from it
        self.dead_lettered = 0  # by the queue itself

    def every(self) -> list[Consumer]:
        return [self.queue, *self.named.values()] if self.queue is not None else list(self.named.values())

    def find(self, name: str) -> Consumer | None:
        return self.named.get(name) if name else self.queue

    def overlapping(self, name: str, wanted: TagFilter | None) -> str | None:
        """A consumer that would get some of the records that `name` gets with this filter."""
        for other in self.every():
            if other.name != name and overlap(other.filter, wanted):
                return other.name
        return None

    def find_overlap(self) -> tuple[str, str] | None:
        """Two consumers that get the same records.

        Sorted by the bytes that all their tags start with, only entries of filters are compared of which one starts as
        the other does. That is few, but for patterns that start with a wildcard, so the number has a bound.
        """
        consumers = self.every()
        unfiltered = [consumer.name for consumer in consumers if consumer.filter is None]
        if unfiltered and len(consumers) > 1:
            return unfiltered[0], next(one.name for one in consumers if one.name != unfiltered[0])
        entries = [
            (match.prefix, consumer.name, match)
            for consumer in consumers
            if consumer.filter is not None
            for match in consumer.filter.any_of
        ]
        entries.sort(key=itemgetter(0))
        compared = 0
        around: list[tuple[bytes, str, TagMatch]] = []  # each starts as the one before it does
        for entry in entries:
            while around and not entry[0].startswith(around[-1][0]):
                around.pop()
            compared += len(around)
            if compared > FILTER_PAIRS_MAX:
                raise Throttled(
                    "the consumers' filters have too many patterns that start with a wildcard to be compared",
                    limit="filters",
                    max=FILTER_PAIRS_MAX,
                )
            for _, name, match in around:
                if name != entry[1] and match.overlaps(entry[2]):
                    return name, entry[1]
            around.append(entry)
        return None

    def forget(self, rows: Rows, first: int, last: int) -> None:
        """Records of this range go from the log, where they still are."""
        for consumer in self.every():
            if consumer.ahead:
                consumer.lost(rows, first, last)
            moving = consumer.forget(first, last)
            if moving:
                self.drop_letters(consumer.name, set(moving))

    def drop_letters(self, consumer: str, seqs: set[int]) -> None:
        for seq in seqs:
            number = self.numbers.pop((consumer, seq), None)
            if number is not None:
                del self.letters[number]

    def apply(self, event: Event) -> None:
        """What an event does to its consumer and to the letters."""
        consumer = self.find(event.consumer)
        if consumer is None:
            return
        if event.kind == MOVE:
            number = event.number
            for seq, deliveries in zip(event.seqs, event.deliveries, strict=True):
                self.letters[number] = (event.consumer, seq, event.target, deliveries, event.reason)
                self.numbers[event.consumer, seq] = number
                number += 1
            self.next_number = max(self.next_number, number)
        elif event.kind in (UNMOVED, MOVED):
            for seq in event.seqs:
                known = self.numbers.get((event.consumer, seq))
                if known is not None and seq in consumer.entries:
                    consumer.entries[seq].doom = self.letters[known][3:]
            self.drop_letters(event.consumer, set(event.seqs))
        before = consumer.counters.dead_lettered
        consumer.apply(event)
        if consumer is self.queue:
            self.dead_lettered += consumer.counters.dead_lettered - before

    def took(self, source_id: int, number: int) -> None:
        self.taken.pop(source_id, None)
        self.taken[source_id] = number
        while len(self.taken) > SOURCES_MAX:
            del self.taken[next(iter(self.taken))]

    def row(self) -> LettersRow:
        letters = [(number, *letter) for number, letter in self.letters.items()]
        return LettersRow(self.next_number, letters, list(self.taken.items()), self.dead_lettered)

    def restore(self, row: LettersRow) -> None:
        self.next_number, self.dead_lettered = row.next_number, row.dead_lettered
        self.letters = {letter[0]: letter[1:] for letter in row.letters}
        self.numbers = {(letter[0], letter[1]): number for number, letter in self.letters.items()}
        self.taken = dict(row.taken)
        self.safe_number = self.next_number - 1
