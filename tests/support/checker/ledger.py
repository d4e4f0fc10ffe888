"""Writes, and the seqs they got: records are identified by their data."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.support.checker.problem import Problem, name_of
from tests.support.checker.timeline import FOREVER, Timeline
from tests.support.history import Op


class Sent:
    """A record as its writer sent it."""

    __slots__ = ("data", "encoded", "index", "meta", "node", "tag", "ttl_ms", "write")

    def __init__(self, write: Write, index: int, record: dict[str, Any], node: str | None) -> None:
        self.write, self.index = write, index
        self.encoded = record.get("data_base64") is not None
        self.data = record["data_base64"] if self.encoded else record["data"]
        self.tag: str | None = record.get("tag")
        self.node: str | None = record.get("node") or node
        self.meta = record.get("meta") or None
        self.ttl_ms: int = record.get("ttl_ms") or 0


@dataclass(slots=True, eq=False)
class Copy:
    """A record that routers may copy to a topic: like a write of unknown time and outcome."""

    record: dict[str, Any]
    sent: int
    settled: int
    times: int  # how often, if each lost copy is copied once more
    ways: list[tuple[Any, Ledger, Sent]] = field(default_factory=list)  # rule, and where it comes from


class Write:
    """One batch, and all requests that tried to write it: retries have the same key and the same records."""

    __slots__ = (
        "copy", "first", "key", "last", "ops", "places", "records", "sent", "settled", "tries", "weakest",
    )  # fmt: skip

    def __init__(self, op: Op) -> None:
        self.key: str | None = op.request.get("idempotency_key")
        node = op.request.get("node")
        self.records = [Sent(self, i, record, node) for i, record in enumerate(op.request["records"])]
        self.ops: list[Op] = []
        self.tries = 0  # requests that may have written it
        self.sent, self.settled = FOREVER, -1
        self.first, self.last = FOREVER, -1  # segments
        self.places: list[Place] = []
        self.copy: Copy | None = None  # not written by a client here: it may have been copied
        self.weakest: str | None = None  # the weakest class that it can have been written under

    def add(self, op: Op, line: Timeline) -> None:
        self.ops.append(op)
        if op.refused or (op.ok and op.answer["deduped"]):
            return
        self.tries += 1
        settled = line.settled(op)
        first, last = line.span(op.sent_at, settled)
        self.sent, self.settled = min(self.sent, op.sent_at), max(self.settled, settled)
        self.first, self.last = min(self.first, first), max(self.last, last)


@dataclass(slots=True, eq=False)
class Place:
    """The place of a batch in an era."""

    write: Write
    era: Era
    base: int
    acked_at: int = FOREVER
    known_at: int = FOREVER  # acknowledged or shown

    @property
    def end(self) -> int:
        return self.base + len(self.write.records) - 1


class Placed:
    """A record at its seq."""

    __slots__ = ("absent", "gone", "may_go", "place", "sent", "seq", "shown", "solid", "synced", "ts")

    def __init__(self, place: Place, sent: Sent) -> None:
        self.place, self.sent = place, sent
        self.seq = place.base + sent.index
        self.ts: int | None = None
        self.shown: dict[str, Any] | None = None  # as a reader last saw it
        self.synced = FOREVER  # when it was first seen by a reader of synced records only
        # The first moment of each, by segment:
        self.solid: dict[int, int] = {}  # it was known to be there
        self.absent: dict[int, int] = {}  # it was known to be gone
        self.gone: dict[int, int] = {}  # a delete that covers it was acknowledged
        self.may_go = -1  # sent_at of the first delete that may cover it; -1: not computed yet


@dataclass(slots=True, eq=False)
class Era:
    number: int
    instance: int
    segments: range = range(0)
    records: dict[int, Placed] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    tags: dict[str, list[int]] = field(default_factory=dict)  # ascending seqs
    bases: list[int] = field(default_factory=list)  # ascending
    by_base: dict[int, Place] = field(default_factory=dict)

    def batch_at(self, seq: int) -> Place | None:
        at = bisect_right(self.bases, seq) - 1
        if at < 0:
            return None
        place = self.by_base[self.bases[at]]
        return place if place.end >= seq else None

    def newer_with_tag(self, tag: str, seq: int) -> int:
        seqs = self.tags.get(tag, [])
        return len(seqs) - bisect_right(seqs, seq)


@dataclass(slots=True)
class UnplacedWrites:
    """Batches that may have been written and have no known place, by the moment they were sent."""

    sent: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # cumulative numbers of records
    writes: list[Write] = field(default_factory=list)

    def before(self, moment: int) -> int:
        at = bisect_left(self.sent, moment)
        return self.counts[at - 1] if at else 0

    def some_before(self, moment: int) -> list[Write]:
        return self.writes[: bisect_left(self.sent, moment)]


class Ledger:
    def __init__(self, topic: str, line: Timeline, problems: list[Problem]) -> None:
        self.topic, self.line, self.problems = topic, line, problems
        self.writes: list[Write] = []
        self.by_key: dict[str, list[Write]] = {}
        self._by_data: dict[bytes, Sent] = {}
        self._by_op: dict[int, Write] = {}
        self.eras: list[Era] = []
        for segment, number in enumerate(line.era):
            if number == len(self.eras):
                self.eras.append(Era(number, line.instance[segment], range(segment, segment)))
            self.eras[number].segments = range(self.eras[number].segments.start, segment + 1)
        self.unplaced: list[UnplacedWrites] = []  # by era
        self.copies: dict[bytes, Write] = {}
        self.may_have_holes = False  # a source may have lost what was not copied yet

    def blame(self, rule: str, text: str) -> None:
        self.problems.append(Problem(rule, self.topic, text))

    # -- writes --------------------------------------------------------------------------------------------

    def add_write(self, op: Op) -> None:
        write = Write(op)
        texts = [data_key(sent) for sent in write.records]
        known = self._by_data.get(texts[0])
        key = write.key
        if known is not None and key is not None and known.write.key == key:
            write = known.write
            if [data_key(sent) for sent in write.records] != texts:
                self.blame("workload", f"the same key with a part of the same records: {name_of(op)}")
        else:
            self.writes.append(write)
            if key is not None:
                self.by_key.setdefault(key, []).append(write)
            for text, sent in zip(texts, write.records, strict=True):
                if self._by_data.setdefault(text, sent) is not sent:
                    self.blame("workload", f"data that was written before: {text} in {name_of(op)}")
        write.add(op, self.line)
        self._by_op[id(op)] = write

    def add_copy(self, copy: Copy) -> None:
        names = ", ".join(str(rule) for rule, _, _ in copy.ways)
        op = Op(f"router {names}", "write", self.topic, {"records": [copy.record]}, copy.sent)
        op.settled_at = None if copy.settled == FOREVER else copy.settled
        write = Write(op)
        write.copy = copy
        write.add(op, self.line)
        write.tries = copy.times
        text = data_key(write.records[0])
        self.writes.append(write)
        self.copies[text] = write
        assert self._by_data.setdefault(text, write.records[0]) is write.records[0], (
            "copied to where it comes from"
        )

    def write_of(self, op: Op) -> Write:
        return self._by_op[id(op)]

    def find(self, shown: dict[str, Any]) -> Sent | None:
        return self._by_data.get(shown_key(shown))

    def home_era(self, first: int, last: int) -> Era | None:
        """The era of what happened in these segments, if there is only one."""
        number = self.line.era[first]
        return self.eras[number] if number == self.line.era[last] else None

    # -- places --------------------------------------------------------------------------------------------

    def place(self, write: Write, era: Era, base: int, why: str) -> Place | None:
        """Note that this batch has these seqs. None when something else has them."""
        for place in write.places:
            if place.era is era and place.base == base:
                return place
        place = Place(write, era, base)
        for sent in write.records:
            other = era.records.get(base + sent.index)
            if other is not None:
                self.blame(
                    "seq-shared",
                    f"seq {base + sent.index} is {sent.data} of {name_of(write.ops[0])} ({why}), "
                    f"and {other.sent.data} of {name_of(other.sent.write.ops[0])}",
                )
                return None
        write.places.append(place)
        era.places.append(place)
        self._enter(place)
        return place

    def _enter(self, place: Place) -> None:
        era = place.era
        insort(era.bases, place.base)
        era.by_base[place.base] = place
        for sent in place.write.records:
            placed = Placed(place, sent)
            era.records[placed.seq] = placed
            if sent.tag is not None:
                insort(era.tags.setdefault(sent.tag, []), placed.seq)

    def acknowledge(self, place: Place, op: Op, first: int, last: int) -> None:
        assert op.answered_at is not None
        place.acked_at = min(place.acked_at, op.answered_at)
        place.known_at = min(place.known_at, op.answered_at)
        if first == last:
            for seq in range(place.base, place.end + 1):
                solid = place.era.records[seq].solid
                if op.answered_at < solid.get(first, FOREVER):
                    solid[first] = op.answered_at

    def carry_over(self) -> None:
        """Records that a crash cannot lose, because they were written under a stronger class, stay known."""
        line = self.line
        for older, era in zip(self.eras, self.eras[1:], strict=False):
            if older.instance != era.instance:
                continue
            start = line.cuts[era.segments.start - 1].start
            if line.corrupted_at < start:
                continue
            if any(config["durability"] == "ephemeral" for config in line.ever(start, era.instance)):
                continue
            for place in older.places:
                if place.known_at < start and self.class_of(place.write) in ("disk", "fsync"):
                    self._carry(place, era)

    def _carry(self, place: Place, era: Era) -> None:
        found = {
            era.records[seq].sent.write for seq in range(place.base, place.end + 1) if seq in era.records
        }
        if not found:
            twin = Place(place.write, era, place.base, place.acked_at, place.known_at)
            era.places.append(twin)
            self._enter(twin)
        elif found != {place.write}:
            what = name_of(place.write.ops[0])
            self.blame("seq-shared", f"seqs from {place.base} of {what} were used again after a crash")

    def must_be_wiped(self, era: Era, write: Write) -> bool:
        """Whether it was only in memory at the restart with which this era begins."""
        line, start = self.line, era.segments.start
        cut = line.cuts[start - 1] if start else None
        if cut is None or cut.kind != "wipe" or not cut.certain or write.last >= start:
            return False
        configs = line.configs(write.sent, cut.start, line.back[era.instance], era.instance)
        return all(config["durability"] == "ephemeral" for config in configs)

    def class_of(self, write: Write) -> str:
        """The weakest class that the topic can have had when it was written."""
        if write.weakest is None:
            line = self.line
            first, last = line.instance[write.first], line.instance[write.last]
            write.weakest = line.class_of(write.sent, write.settled, line.back[first], last)
        return write.weakest

    def solid_since(self, placed: Placed, segment: int) -> int:
        """When the record was first known to be there, with a promise that holds in this segment."""
        since = placed.solid.get(segment, FOREVER)
        if segment > placed.place.era.segments.start and self.class_of(placed.sent.write) == "fsync":
            since = min([since, *(at for other, at in placed.solid.items() if other < segment)])
        return since

    def count_unplaced(self) -> None:
        line = self.line
        in_order = sorted((write for write in self.writes if write.tries), key=lambda write: write.sent)
        for era in self.eras:
            unplaced = UnplacedWrites()
            total = 0
            twice = self.may_write_twice(era.instance)
            for write in in_order:
                if write.first >= era.segments.stop or line.instance[write.last] < line.back[era.instance]:
                    continue
                places = sum(place.era is era for place in write.places)
                if write.copy is not None:
                    # What was lost with the end of a segment is copied once more.
                    times = write.tries - places + (len(era.segments) - 1 if places else 0)
                    for _ in range(times):
                        total += 1
                        unplaced.sent.append(write.sent)
                        unplaced.counts.append(total)
                        unplaced.writes.append(write)
                    continue
                if not places or (twice and write.key is not None and write.tries > places):
                    total += len(write.records)
                    unplaced.sent.append(write.sent)
                    unplaced.counts.append(total)
                    unplaced.writes.append(write)
            self.unplaced.append(unplaced)

    def may_write_twice(self, instance: int) -> bool:
        """Whether a key can have been forgotten, so that a retry is written once more."""
        line = self.line
        if any(cut.kind != "drop" for cut in line.cuts):
            return True
        window = min(config["idempotency_window_ms"] for config in line.ever(FOREVER, instance))
        times = [p.ts for era in self.eras for p in era.records.values() if p.ts is not None]
        return not times or max(times) - min(times) > window


_encode = msgspec.json.Encoder(order="deterministic").encode


def data_key(sent: Sent) -> bytes:
    """Records are identified by the JSON value of their data."""
    return b"base64:" + str(sent.data).encode() if sent.encoded else _encode(sent.data)


def shown_key(shown: dict[str, Any]) -> bytes:
    if shown.get("$encoding") == "base64":
        return b"base64:" + str(shown["data"]).encode()
    return _encode(shown["data"])
