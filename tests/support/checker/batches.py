"""Batches of transactions: for all other rules, each commit is a write of unknown outcome that has a key.

A *variant* is one attempt at a batch: the chunks that a commit names, in their order. Attempts at one batch have
different chunks, and only one of them may appear. A small batch is appended as one write, a larger one chunk by
chunk. `check` compares other answers with that (that a batch is committed, or open).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.checker.ledger import Era, Ledger, Place, Write
from tests.support.checker.pages import Read
from tests.support.checker.problem import name_of
from tests.support.checker.shapes import Unknown
from tests.support.checker.timeline import FOREVER, RESTARTS, Timeline, full_config, touches
from tests.support.history import Event, History, Op

WHOLE_RECORDS = 10_000  # larger batches may appear in parts, unless they have one chunk
KINDS = ("begin", "stage", "commit", "abort")

Records = list[dict[str, Any]]
Key = tuple[str, int]  # part and chunk


@dataclass(slots=True, eq=False)
class Variant:
    """What commits with these parts would append."""

    chunks: list[tuple[Key, Records]]
    is_whole: bool
    tries: list[Op] = field(default_factory=list)  # commits that may have been executed
    writes: list[list[Op]] = field(default_factory=list)  # for each piece: its writes in the ledger

    @property
    def count(self) -> int:
        return sum(len(records) for _, records in self.chunks)

    @property
    def pieces(self) -> list[tuple[str, Records]]:
        """What is appended at once, each with a name."""
        if self.is_whole and self.chunks:
            return [("", [record for _, records in self.chunks for record in records])]
        return [(f"{part} {chunk}", records) for (part, chunk), records in self.chunks]


@dataclass(slots=True)
class Ack:
    """An answer that says where a batch is."""

    op: Op
    answered: int
    first: int
    last: int
    count: int


@dataclass(slots=True, eq=False)
class Batch:
    producer: str
    number: int
    begins: list[Op] = field(default_factory=list)
    stages: dict[Key, list[Op]] = field(default_factory=dict)
    commits: list[Op] = field(default_factory=list)
    variants: dict[str, Variant] = field(default_factory=dict)
    acks: list[Ack] = field(default_factory=list)

    def __str__(self) -> str:
        return f"batch {self.number} of {self.producer}"

    @property
    def tries(self) -> Iterator[Op]:
        return (op for variant in self.variants.values() for op in variant.tries)


class Batches:
    """All batches of one topic."""

    def __init__(self, history: History, topic: str, ops: list[Op]) -> None:
        self.topic = topic
        self.calms = [event.at for event in history.events if event.kind == "calm"]
        self._breaks = _breaks(history, topic)
        self._whole_max = _whole_max(history.events)
        self.all: dict[str, Batch] = {}  # by the transaction's id
        for op in ops:
            if op.kind == "begin" and op.ok:
                request = op.request
                batch = self.all.setdefault(op.answer["txn"], Batch(request["producer"], request["batch"]))
                batch.begins.append(op)
                if (batch.producer, batch.number) != (request["producer"], request["batch"]):
                    raise Unknown(f"two batches with the id {op.answer['txn']}")
        for op in ops:
            known = self.all.get(op.request.get("txn", ""))
            if known is not None and op.kind == "stage":
                known.stages.setdefault((op.request["part"], op.request["chunk"]), []).append(op)
            elif known is not None and op.kind == "commit":
                known.commits.append(op)
        for batch in self.all.values():
            self._take(batch)

    def _take(self, batch: Batch) -> None:
        for op in batch.commits:
            variant = self._variant(batch, op)
            if variant is not None:
                if not op.refused:
                    variant.tries.append(op)
                for writes, (name, records) in zip(variant.writes, variant.pieces, strict=True):
                    writes += self._stand_ins(op, records, f"{batch} {name}", variant)
        for op in [*batch.begins, *batch.commits]:
            if op.ok and op.answer["state"] == "committed" and op.answer["count"]:
                answer = op.answer
                assert op.answered_at is not None
                ack = Ack(op, op.answered_at, answer["first_seq"], answer["last_seq"], answer["count"])
                batch.acks.append(ack)
        batch.acks.sort(key=lambda ack: ack.answered)

    def _variant(self, batch: Batch, op: Op) -> Variant | None:
        """None: it names chunks that were not staged."""
        text = repr(op.request["parts"])
        if text not in batch.variants:
            chunks: list[tuple[Key, Records]] = []
            for part in op.request["parts"]:
                for chunk in range(part["chunks"]):
                    staged = batch.stages.get((part["part"], chunk))
                    if staged is None:
                        return None
                    chunks.append(((part["part"], chunk), staged[0].request["records"]))
            variant = Variant(chunks, True)
            variant.is_whole = len(chunks) <= 1 or variant.count <= self._whole_max
            variant.writes = [[] for _ in variant.pieces]
            batch.variants[text] = variant
        return batch.variants[text]

    def _stand_ins(self, op: Op, records: Records, key: str, variant: Variant) -> list[Op]:
        """A write that stands for this commit: unless refused, it may have been executed at any time."""
        request = {"records": records, "idempotency_key": key, "return_seqs": False, "create": False}
        made = Op(op.client, "write", op.topic, request, op.sent_at)
        if op.refused:
            made.answered_at, made.status, made.answer = op.answered_at, op.status, op.answer
            made.settled_at = op.settled_at
            return [made]
        made.settled_at = op.settled_at
        if not (op.ok and op.answer["state"] == "committed"):
            # A decided commit continues, however long it takes, and whatever dies.
            made.settled_at = min(
                (calm for calm in self.calms if calm > (op.settled_at or FOREVER)), default=None
            )
        if variant.is_whole:
            return [made]
        # Of a decided but unfinished one, the server itself appends lost records again.
        end = FOREVER if made.settled_at is None else made.settled_at
        again = sum(op.sent_at < event.at < end for event in self._breaks)
        return [
            made,
            *(
                Op(op.client, "write", op.topic, request, op.sent_at, settled_at=made.settled_at)
                for _ in range(again)
            ),
        ]

    # -- for the ledger --------------------------------------------------------------------------------------

    def writes(self) -> list[Op]:
        """Every commit as writes."""
        return [op for variant in self._variants() for writes in variant.writes for op in writes]

    def told(self, line: Timeline) -> list[Op]:
        """Every answer that says where a batch is, as if it were a retry."""
        found: list[Op] = []
        for batch in self.all.values():
            variants = [variant for variant in batch.variants.values() if variant.tries and variant.chunks]
            for ack in batch.acks:
                first, last = line.span(min((op.sent_at for op in batch.tries), default=0), ack.answered)
                if line.era[first] != line.era[last]:
                    continue  # perhaps of an earlier era: a batch is remembered although its records are gone
                if variants and variants[0].is_whole:
                    found.append(_told(ack, variants[0].writes[0][0], ack.first, ack.count))
                elif len(variants) == 1:
                    head, tail = variants[0].writes[0][0], variants[0].writes[-1][0]
                    found.append(_told(ack, head, ack.first, len(head.request["records"])))
                    size = len(tail.request["records"])
                    found.append(_told(ack, tail, ack.last - size + 1, size))
        return found

    def _variants(self) -> Iterator[Variant]:
        return (variant for batch in self.all.values() for variant in batch.variants.values())

    def settle(self, ledger: Ledger) -> None:
        """Committed records are synced, whatever the topic's class. If a piece was appended twice the later one is
        committed: a crash may have lost the other before any answer named the batch.
        """
        for batch in self.all.values():
            for ack in batch.acks:
                era = _era(ledger, ack.op)
                for places in _places(ledger, batch, era) if era is not None else ():
                    told = [place for place in places if ack.first <= place.base <= ack.last]
                    if not told:
                        continue
                    place = max(told, key=lambda place: place.base)
                    for seq in range(place.base, place.end + 1):
                        placed = place.era.records[seq]
                        placed.synced = min(placed.synced, ack.answered)

    # -- checks ----------------------------------------------------------------------------------------------

    def check(self, ledger: Ledger, pages: list[Read]) -> None:
        for batch in self.all.values():
            self._check_answers(ledger, batch)
            self._check_states(ledger, batch)
            self._check_stages(ledger, batch)
            self._check_pieces(ledger, batch, pages)
        by_producer: dict[str, list[Batch]] = {}
        for batch in self.all.values():
            by_producer.setdefault(batch.producer, []).append(batch)
        for batches in by_producer.values():
            batches.sort(key=lambda batch: batch.number)
            self._check_known(ledger, batches)
            for one, two in itertools.combinations(batches, 2):
                self._check_rising(ledger, one, two)

    def _check_answers(self, ledger: Ledger, batch: Batch) -> None:
        """All answers give the same place, and the number of records that were to be appended."""
        first: dict[int, Ack] = {}
        counts = {variant.count for variant in batch.variants.values() if variant.tries}
        for ack in batch.acks:
            if ack.count not in counts and ledger.line.corrupted_at > ack.answered:
                ledger.blame(
                    "txn-count", f"{ack.count} records of {batch}, which has {counts}: {name_of(ack.op)}"
                )
            if ack.last - ack.first + 1 < ack.count:
                ledger.blame(
                    "txn-count",
                    f"{ack.count} records do not fit {ack.first} to {ack.last}: {name_of(ack.op)}",
                )
            era = _era(ledger, ack.op)
            if era is None:
                continue
            other = first.setdefault(era.number, ack)
            if (other.first, other.last, other.count) != (ack.first, ack.last, ack.count):
                told = f"{ack.first} to {ack.last}: {name_of(ack.op)}"
                ledger.blame(
                    "txn-answer",
                    f"{batch} is at {told}, and was at {other.first} to {other.last}: {name_of(other.op)}",
                )

    def _check_states(self, ledger: Ledger, batch: Batch) -> None:
        for op in batch.begins:
            if op.answer["state"] == "committing" and any(calm < op.sent_at for calm in self.calms):
                ledger.blame("txn-stuck", f"{batch} is decided, but never committed: {name_of(op)}")

    def _check_stages(self, ledger: Ledger, batch: Batch) -> None:
        for (part, chunk), ops in batch.stages.items():
            for op in ops:
                if op.ok and op.answer["records"] != len(op.request["records"]):
                    ledger.blame("txn-stage", f"another number of records: {name_of(op)}")
                if (
                    op.ok
                    and op.answer["repeated"]
                    and not any(
                        other is not op and not other.refused and other.sent_at < (op.answered_at or 0)
                        for other in ops
                    )
                ):
                    ledger.blame("txn-stage", f"chunk {chunk} of {part} was not staged before: {name_of(op)}")

    def _check_known(self, ledger: Ledger, batches: list[Batch]) -> None:
        """A committed batch had a commit request, for it or a later one; and it stays committed."""
        told = [(batch, op) for batch in batches for op in (*batch.begins, *batch.commits) if op.ok]
        committed = [(batch, op) for batch, op in told if op.answer["state"] == "committed"]
        for batch, op in committed:
            assert op.answered_at is not None
            later = [other for other in batches if other.number >= batch.number]
            if not any(one.sent_at < op.answered_at for other in later for one in other.tries):
                ledger.blame(
                    "txn-invented",
                    f"{batch} is reported as committed without a commit request: {name_of(op)}",
                )
        for batch, op in told:
            era = _era(ledger, op)
            if op.answer["state"] != "open" or era is None:
                continue
            for other, before in committed:
                if (
                    other.number >= batch.number
                    and (before.answered_at or 0) < op.sent_at
                    and _era(ledger, before) is era
                ):
                    ledger.blame(
                        "txn-forgotten",
                        f"{batch} is open for {name_of(op)}, and {other} was committed: {name_of(before)}",
                    )
                    break

    def _check_rising(self, ledger: Ledger, one: Batch, two: Batch) -> None:
        """An earlier batch does not come after a later one."""
        for era in ledger.eras:
            for early in itertools.chain(*_places(ledger, one, era)):
                for late in itertools.chain(*_places(ledger, two, era)):
                    if early.base > late.base and _together(early, late):
                        ledger.blame("txn-rising", f"{one} is at {early.base}, behind {two} at {late.base}")

    # -- larger ones -----------------------------------------------------------------------------------------

    def _check_pieces(self, ledger: Ledger, batch: Batch, pages: list[Read]) -> None:
        variants = [v for v in batch.variants.values() if v.tries and not v.is_whole]
        for era in ledger.eras:
            seen = [(v, places) for v in variants if any(places := _pieces(ledger, v, era))]
            for (_, ours), (_, theirs) in itertools.combinations(seen, 2):
                if any(_together(one, two) for one in ours if one for two in theirs if two):
                    ledger.blame(
                        "txn-twice",
                        f"two attempts at {batch} are there, at {_bases(ours)} and {_bases(theirs)}",
                    )
            for variant, places in seen:
                self._check_order(ledger, batch, places)
                self._check_all_there(
                    ledger, batch, variant, places, [page for page in pages if page.era is era]
                )

    def _check_order(self, ledger: Ledger, batch: Batch, places: list[Place | None]) -> None:
        for one, two in itertools.pairwise(place for place in places if place is not None):
            if one.base > two.base and _together(one, two):
                ledger.blame("txn-order", f"chunks of {batch} are at {_bases(places)}")

    def _check_all_there(
        self, ledger: Ledger, batch: Batch, variant: Variant, places: list[Place | None], pages: list[Read]
    ) -> None:
        """When all is quiet, or after it was acknowledged, it is complete if any of it is there. If the topic became
        ephemeral between two pieces, a crash may take the later ones.
        """
        if all(places) or ledger.line.corrupted_at < FOREVER:
            return
        era = next(place.era for place in places if place is not None)
        classes = {config["durability"] for config in ledger.line.ever(FOREVER, era.instance)}
        if "ephemeral" in classes and len(classes) > 1:
            return
        done = min([*self.calms, *(ack.answered for ack in batch.acks)], default=FOREVER)
        for page in pages:
            request, answer = page.op.request, page.op.answer
            if page.sent < done or request.get("from_seq") or not answer["caught_up"] or answer["tombstone"]:
                continue
            if page.match or page.nodes or request.get("from_ts") or page.era is None:
                continue
            shown = any(place is not None and place.base in page.seqs for place in places)
            if shown and all(seq in page.era.records for seq in range(1, answer["head_seq"] + 1)):
                ledger.blame(
                    "txn-part", f"only chunks at {_bases(places)} of {batch} are there: {name_of(page.op)}"
                )
                return


def with_batches(history: History, topics: set[str] | None = None) -> tuple[History, dict[str, Batches]]:
    """The history with writes that stand for commits, of all topics or of these, and the additional checks."""
    by_topic: dict[str, list[Op]] = {}
    for op in history.ops:
        if op.kind in KINDS and (topics is None or op.topic in topics):
            by_topic.setdefault(op.topic, []).append(op)
    if not by_topic:
        return history, {}
    found = {topic: Batches(history, topic, ops) for topic, ops in by_topic.items()}
    ops = [*history.ops, *(op for batches in found.values() for op in batches.writes())]
    ops.sort(key=lambda op: op.sent_at)
    return History(ops, history.events, history.streams), found


def _breaks(history: History, topic: str) -> list[Event]:
    """Events that can lose records of a topic: power cuts and failed disks, and every restart if they may not be
    logged.
    """
    settings = (
        op.request if op.kind == "put" else op.request.get("config")
        for op in history.ops
        if op.topic == topic and op.kind in ("put", "write") and not op.refused
    )
    in_ram = any(full_config(given)["durability"] == "ephemeral" for given in settings)
    return [
        event
        for event in history.events
        if event.kind in ("power", "error") or (in_ram and event.kind in RESTARTS and touches(event, topic))
    ]


def _whole_max(events: list[Event]) -> int:
    return next((int(event.note) for event in events if event.kind == "pieces"), WHOLE_RECORDS)


def _told(ack: Ack, write: Op, first: int, count: int) -> Op:
    last = first + count - 1
    answer = {
        "topic": write.topic,
        "first_seq": first,
        "last_seq": last,
        "head_seq": max(last, ack.last),
        "count": count,
    }
    answer |= {"created": False, "deduped": True}
    request = {**write.request}
    return Op(
        ack.op.client, "write", write.topic, request, ack.op.sent_at, ack.answered, 200, answer, ack.answered
    )


def _era(ledger: Ledger, op: Op) -> Era | None:
    assert op.answered_at is not None
    return ledger.home_era(*ledger.line.span(op.sent_at, op.answered_at))


def _pieces(ledger: Ledger, variant: Variant, era: Era) -> list[Place | None]:
    """For each piece the last place that it has."""
    found: list[Place | None] = []
    for writes in variant.writes:
        places = [place for place in _write(ledger, writes).places if place.era is era]
        found.append(max(places, key=lambda place: place.base, default=None))
    return found


def _write(ledger: Ledger, writes: list[Op]) -> Write:
    return ledger.write_of(writes[0])


def _places(ledger: Ledger, batch: Batch, era: Era) -> list[list[Place]]:
    """For each piece of each attempt its places."""
    variants = (variant for variant in batch.variants.values() if variant.tries)
    writes = (_write(ledger, writes) for variant in variants for writes in variant.writes)
    return [[place for place in write.places if place.era is era] for write in writes]


def _together(one: Place, two: Place) -> bool:
    """Whether both were known to be there between two crashes that can have lost one of them."""
    return bool(one.era.records[one.base].solid.keys() & two.era.records[two.base].solid.keys())


def _bases(places: list[Place | None]) -> list[int | None]:
    return [place.base if place is not None else None for place in places]
