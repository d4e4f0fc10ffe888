"""What readers were shown, and what was missing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.checker.deletes import Deletes
from tests.support.checker.ledger import Era, Ledger, Placed, Sent
from tests.support.checker.problem import Problem, name_of
from tests.support.checker.shapes import Match, match_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op

BLAMED_MAX = 3  # missing records of one page that are reported one by one
REASONS = ("cap", "ttl", "mixed", "crash", "corrupt", "recreated", "from_seq_too_old", "source_trim")
ORIGIN = "_topics_router"


@dataclass(slots=True)
class Read:
    """An answered read; `segment` and `era` are None when a cut happened while it was in flight."""

    op: Op
    sent: int
    answered: int
    instances: tuple[int, int]
    segment: int | None
    era: Era | None
    seqs: list[int]
    match: Match | None = None
    nodes: frozenset[str] = frozenset()


def make_read(ledger: Ledger, op: Op) -> Read:
    assert op.answered_at is not None
    line = ledger.line
    first, last = line.span(op.sent_at, op.answered_at)
    node = op.request.get("node") if op.kind != "last" else None
    return Read(
        op=op,
        sent=op.sent_at,
        answered=op.answered_at,
        instances=(line.instance[first], line.instance[last]),
        segment=first if first == last else None,
        era=ledger.home_era(first, last),
        seqs=[record["$seq"] for record in op.answer["records"]],
        match=match_of(op.request.get("tag")) if op.kind == "diff" else None,
        nodes=frozenset([node] if isinstance(node, str) else node or ()),
    )


# -- what was shown ------------------------------------------------------------------------------------------


class Shown:
    """First pass: gives every record that was shown its place, and compares it with what was sent and shown before."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def take(self, read: Read) -> None:
        request = read.op.request
        always = read.op.kind in ("last", "handed", "scan") or bool(request.get("frames"))
        tags = always or bool(request.get("include_tags", False))
        meta = always or request.get("include_meta", True)
        data = always or request.get("include_data", True)
        era, segment = read.era, read.segment
        for record in read.op.answer["records"]:
            if era is None:
                self._known_sent(read, record)
                continue
            placed = era.records.get(record["$seq"])
            if placed is None:
                placed = self._place(read, era, record)
                if placed is None:
                    continue
            if record != placed.shown:
                self._compare(read, placed, record, tags=tags, meta=meta, data=data)
            if segment is not None and read.answered < placed.solid.get(segment, FOREVER):
                placed.solid[segment] = read.answered
            placed.place.known_at = min(placed.place.known_at, read.answered)
            if request.get("strong"):
                placed.synced = min(placed.synced, read.answered)
            if placed.place.write.sent > read.answered:
                self.ledger.blame(
                    "invented", f"seq {placed.seq} was shown before it was sent: {name_of(read.op)}"
                )

    def _known_sent(self, read: Read, record: dict[str, Any]) -> Sent | None:
        if "data" not in record:
            return None
        blame = self.ledger.blame
        sent = self.ledger.find(record)
        if sent is None:
            blame("invented", f"{record} was never written: {name_of(read.op)}")
        elif not sent.write.tries:
            ops = ", ".join(name_of(op) for op in sent.write.ops)
            blame("refused-visible", f"{record} is there although its write was refused: {ops}")
        elif sent.write.sent > read.answered:
            blame("invented", f"{record} was shown before it was sent: {name_of(read.op)}")
        else:
            return sent
        return None

    def _place(self, read: Read, era: Era, record: dict[str, Any]) -> Placed | None:
        ledger, line = self.ledger, self.ledger.line
        sent = self._known_sent(read, record)
        if sent is None:
            return None
        write, what = sent.write, f"{record} in {name_of(read.op)}"
        if line.instance[write.first] > era.instance or line.instance[write.last] < line.back[era.instance]:
            ledger.blame("dropped-visible", f"it is of another topic of this name: {what}")
            return None
        if write.first >= era.segments.stop:
            ledger.blame("invented", f"it was sent later: {what}")
            return None
        if ledger.must_be_wiped(era, write):
            ledger.blame("ephemeral-survived", f"it was in memory only when the server restarted: {what}")
            return None
        base = record["$seq"] - sent.index
        for place in write.places:
            if (
                place.base != base
                and place.era.instance == era.instance
                and write.tries < 2
                and write.copy is None
            ):
                ledger.blame("moved", f"its batch begins at {place.base}, not at {base}: {what}")
                return None
        place = ledger.place(write, era, base, f"shown to {read.op.client} @{read.answered}")
        return era.records[record["$seq"]] if place is not None else None

    def _compare(
        self, read: Read, placed: Placed, record: dict[str, Any], *, tags: bool, meta: bool, data: bool
    ) -> None:
        sent = placed.sent
        if sent.write.copy is not None and "meta" in record:
            record = _without_origin(record)
        expected: dict[str, Any] = {"$seq": placed.seq}
        expected["$ts"] = record["$ts"] if placed.ts is None else placed.ts
        if sent.node is not None and read.op.kind != "handed":
            expected["$node"] = sent.node
        if tags and sent.tag is not None:
            expected["$tag"] = sent.tag
        if meta and sent.meta is not None:
            expected["meta"] = sent.meta
        if data:
            expected["data"] = sent.data
            if sent.encoded:
                expected["$encoding"] = "base64"
        if record != expected:
            self.ledger.blame("altered", f"{record} should be {expected}: {name_of(read.op)}")
            return
        placed.ts = record["$ts"]
        placed.shown = record


def _without_origin(record: dict[str, Any]) -> dict[str, Any]:
    """The meta of a copy may contain its origin."""
    if not isinstance(record["meta"], dict) or ORIGIN not in record["meta"]:
        return record
    meta = {name: value for name, value in record["meta"].items() if name != ORIGIN}
    bare = {name: value for name, value in record.items() if name != "meta"}
    return bare | {"meta": meta} if meta else bare


# -- what was not shown --------------------------------------------------------------------------------------


class Missing:
    """Second pass: every seq that a page passed is shown, or there is a reason why it is not."""

    def __init__(self, ledger: Ledger, deletes: Deletes) -> None:
        self.ledger, self.deletes = ledger, deletes
        self.line, self.blame = ledger.line, ledger.blame

    def check(self, read: Read) -> None:
        self._form(read)
        if read.era is None:
            return
        answer = read.op.answer
        tombstone = answer["tombstone"]
        start = read.op.request.get("from_seq") or 0
        if tombstone is not None:
            self._tombstone(read, tombstone)
            recreated = tombstone["reason"] == "recreated"
            start = answer["earliest_seq"] - 1 if recreated else tombstone["gap_to"]
        elif start > answer["head_seq"]:
            return
        if answer["next_from_seq"] - start > len(read.seqs):
            self._holes(read, read.era, start)

    def _form(self, read: Read) -> None:
        """Checks of any page."""
        answer, request = read.op.answer, read.op.request
        head, after, start = answer["head_seq"], answer["next_from_seq"], request.get("from_seq") or 0
        tombstone = answer["tombstone"]
        wrong: list[str] = []
        if any(a >= b for a, b in zip(read.seqs, read.seqs[1:], strict=False)):
            wrong.append("seqs do not ascend")
        if read.seqs and read.seqs[-1] > after:
            wrong.append("a record after next_from_seq")
        if after > head:
            wrong.append("next_from_seq is after the head")
        if answer["caught_up"] != (after == head):
            wrong.append("caught_up is wrong")
        if answer.get("lag", head - after) != head - after:
            wrong.append("lag is not the rest")
        recreated = tombstone is not None and tombstone["reason"] == "recreated"
        if recreated != (start > head):
            wrong.append("recreated does not fit the cursor")
        low = 0 if recreated else start if tombstone is None else tombstone["gap_to"]
        if after < low and not recreated:
            wrong.append("it goes back")
        if read.seqs and read.seqs[0] <= low:
            wrong.append("a record before the cursor or in the gap")
        limit = request.get("limit") or (1_000_000 if request.get("frames") else 256)
        if len(read.seqs) > (limit if request.get("frames") else min(limit, 1000)):
            wrong.append("more records than the limit")
        if read.seqs and read.seqs[0] < answer["earliest_seq"]:
            wrong.append("a record before earliest_seq")
        plain = not (read.nodes or read.match or request.get("from_ts"))
        if plain and read.seqs and low < answer["earliest_seq"] != read.seqs[0]:
            wrong.append("earliest_seq is not the first record")
        if request.get("from_ts") and any(r["$ts"] < request["from_ts"] for r in answer["records"]):
            wrong.append("a record from before from_ts")
        for text in wrong:
            self.blame("page", f"{text}: {self._brief(read)}")
        for record in answer["records"] if read.match or read.nodes else ():
            self._filtered(read, record)

    def _filtered(self, read: Read, record: dict[str, Any]) -> None:
        if record.get("$node") in read.nodes:
            configs = self.line.configs(
                read.sent, read.answered, self.line.back[read.instances[0]], read.instances[1]
            )
            if all(config["dedupe_node"] for config in configs):
                self.blame("filter", f"seq {record['$seq']} is of an excluded node: {name_of(read.op)}")
        placed = read.era.records.get(record["$seq"]) if read.era else None
        if read.match is not None and placed is not None and not read.match(placed.sent.tag):
            self.blame("filter", f"seq {record['$seq']} has the tag {placed.sent.tag!r}: {name_of(read.op)}")

    @staticmethod
    def _brief(read: Read) -> str:
        page = {
            name: value for name, value in read.op.answer.items() if name not in ("records", "performance")
        }
        return f"{name_of(read.op)}: seqs {read.seqs[:3]}…{read.seqs[-3:]}, {page}"

    # -- tombstones ----------------------------------------------------------------------------------------

    def _tombstone(self, read: Read, tombstone: dict[str, Any]) -> None:
        reason, first, last = tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]
        answer, request = read.op.answer, read.op.request
        if reason not in REASONS:
            self.blame("tombstone", f"unknown reason: {self._brief(read)}")
            return
        if reason == "recreated":
            if (first, last) != (1, answer["head_seq"]):
                self.blame("tombstone", f"the gap is not 1 to the head: {self._brief(read)}")
            return
        wanted = (request.get("from_seq") or 0) + 1
        if (
            not (first == wanted or (request.get("from_ts") and first >= wanted))
            or not first <= last <= answer["head_seq"]
        ):
            self.blame("tombstone", f"the gap is not at the cursor: {self._brief(read)}")
            return
        if reason in ("cap", "ttl", "mixed"):
            self._retention(read, tombstone)
        elif reason == "crash":
            self._crash(read, first, last)
        elif reason == "source_trim":
            if not self.ledger.may_have_holes:
                self.blame(
                    "tombstone", f"source_trim, and no source can have lost anything: {self._brief(read)}"
                )
        elif reason == "from_seq_too_old":
            self._some_gap(read, tombstone)
        elif self.line.corrupted_at > read.answered:
            self.blame("tombstone", f"corrupt, but nothing was damaged: {self._brief(read)}")
        assert read.era is not None
        for placed in self._placed_between(read.era, first, last):
            if read.segment is not None and read.answered < placed.absent.get(read.segment, FOREVER):
                placed.absent[read.segment] = read.answered

    def _some_gap(self, read: Read, tombstone: dict[str, Any]) -> None:
        """A stream gives no reason for a gap at its beginning: any reason is accepted."""
        if self.line.corrupted_at < read.answered or self.ledger.may_have_holes:
            return
        found: list[Problem] = []
        for reason in ("cap", "ttl", "mixed", "crash"):
            del found[:]
            self.blame = lambda rule, text: found.append(Problem(rule, self.ledger.topic, text))
            if reason == "crash":
                self._crash(read, tombstone["gap_from"], tombstone["gap_to"])
            else:
                self._retention(read, {**tombstone, "reason": reason})
            self.blame = self.ledger.blame
            if not found:
                return
        self.blame(found[-1].rule, found[-1].text)

    def _placed_between(self, era: Era, first: int, last: int) -> Iterator[Placed]:
        """The records with these seqs; the range may be much larger than the number of records."""
        at = max(0, bisect_right(era.bases, first) - 1)
        for base in era.bases[at : bisect_right(era.bases, last)]:
            place = era.by_base[base]
            for seq in range(max(first, base), min(last, place.end) + 1):
                yield era.records[seq]

    def _retention(self, read: Read, tombstone: dict[str, Any]) -> None:
        reason, last, answer = tombstone["reason"], tombstone["gap_to"], read.op.answer
        configs = [
            config
            for instance in range(read.instances[0], read.instances[1] + 1)
            for config in self.line.ever(read.answered, instance)
        ]
        caps = [c for c in configs if c["cap_records"] or c["cap_bytes"]]
        wrong = ""
        if reason in ("cap", "mixed") and not any(c["discard"] == "old" for c in caps):
            wrong = "it has no cap"
        elif reason in ("ttl", "mixed") and not any(c["ttl_ms"] for c in configs):
            wrong = "its records do not expire"
        elif answer["earliest_seq"] <= last:
            wrong = "earliest_seq lies in the gap"
        elif (
            reason == "cap" and not any(c["cap_bytes"] for c in caps) and not read.op.request.get("strong")
        ):  # a reader of synced records does not see the head
            kept = min(c["cap_records"] for c in caps if c["discard"] == "old")
            if answer["head_seq"] - last < kept and not self._may_have_fallen(read):
                wrong = f"a cap of {kept} does not reach so far"
        if wrong:
            self.blame("tombstone", f"{wrong}: {self._brief(read)}")

    def _may_have_fallen(self, read: Read) -> bool:
        return read.era is None or read.era.number > 0 or self.line.corrupted_at < read.answered

    def _crash(self, read: Read, first: int, last: int) -> None:
        assert read.era is not None
        crashes = [
            cut.start
            for cut in self.line.cuts
            if cut.kind in ("tail", "wipe", "fallback") and cut.start < read.answered
        ]
        merged = [cut for cut in self.line.cuts if cut.kind == "drop" and cut.start < read.answered]
        if not crashes and not merged:
            self.blame("tombstone", f"crash, but no crash affects its class: {self._brief(read)}")
            return
        newest = max([*crashes, *(cut.end for cut in merged)])
        whole = read.era.batch_at(last)
        if whole is not None and last < whole.end:
            self.blame(
                "batch",
                f"a crash took {whole.base} to {last} of {name_of(whole.write.ops[0])}: {self._brief(read)}",
            )
        for placed in self._placed_between(read.era, first, last):
            write = placed.sent.write
            told = placed.place.known_at < read.sent
            safe = (self.ledger.class_of(write) == "fsync" and told) or placed.synced < read.sent
            if (
                safe
                or write.sent > newest
                or (read.segment is not None and placed.solid.get(read.segment, FOREVER) < read.sent)
            ):
                self.blame(
                    "lost",
                    f"seq {placed.seq} {placed.sent.data} of {name_of(write.ops[0])} was safe, "
                    f"but is reported as lost in a crash: {self._brief(read)}",
                )

    # -- holes ---------------------------------------------------------------------------------------------

    def _holes(self, read: Read, era: Era, start: int) -> None:
        blamed = unknown = 0
        expected = start + 1
        from_ts = read.op.request.get("from_ts")
        if from_ts:  # everything before a record that is too old is too old as well; its age may be unknown
            old = max((p.seq for p in era.records.values() if p.ts is None or p.ts < from_ts), default=0)
            expected = max(expected, old + 1)
        for seq in [*read.seqs, read.op.answer["next_from_seq"] + 1]:
            if seq - expected > 1_000_000:
                self.blame("hole", f"seqs {expected} to {seq - 1} are missing: {self._brief(read)}")
                return
            for missing in range(expected, seq):
                placed = era.records.get(missing)
                if placed is None:
                    unknown += 1
                    text = self._unknown(read, era, missing, unknown)
                else:
                    text = self._explain(read, era, placed)
                if text is not None and blamed < BLAMED_MAX:
                    blamed += 1
                    self.blame(text[0], f"{text[1]}: {self._brief(read)}")
            expected = seq + 1

    def _explain(self, read: Read, era: Era, placed: Placed) -> tuple[str, str] | None:
        """None when there is a reason for its absence."""
        sent = placed.sent
        if read.match is not None and not read.match(sent.tag):
            return None
        if sent.node is not None and sent.node in read.nodes and self._drops_nodes(read):
            return None
        from_ts = read.op.request.get("from_ts")
        if from_ts and (placed.ts is None or placed.ts < from_ts):
            return None
        if read.segment is not None and read.answered < placed.absent.get(read.segment, FOREVER):
            placed.absent[read.segment] = read.answered
        if self.may_be_gone(era, placed, read.answered):
            return None
        write = placed.place.write
        what = f"seq {placed.seq} {sent.data} of {name_of(write.ops[0])}"
        if placed.place.acked_at < read.sent:
            return "lost", f"{what} was acknowledged @{placed.place.acked_at} and is missing"
        if placed.place.known_at < read.sent:
            return "lost", f"{what} was seen @{placed.place.known_at} and is missing"
        if any(seq in read.seqs for seq in range(placed.place.base, placed.place.end + 1)):
            return "batch", f"{what} is missing, but others of its batch are there"
        return "hole", f"{what} is missing, but the page passed it"

    def _drops_nodes(self, read: Read) -> bool:
        line = self.line
        configs = line.configs(read.sent, read.answered, line.back[read.instances[0]], read.instances[1])
        return any(config["dedupe_node"] for config in configs)

    def may_be_gone(self, era: Era, placed: Placed, by: int) -> bool:
        """Whether something without an announcement can have removed it by then."""
        sent = placed.sent
        if sent.ttl_ms or self.deletes.may_cover_since(era, placed) < by:
            return True
        if sent.tag is not None:
            caps = [c["cap_per_tag"] for c in self.line.ever(by, era.instance) if c["cap_per_tag"]]
            if caps:
                unplaced = self._unplaced(era, by)
                newer = era.newer_with_tag(sent.tag, placed.seq)
                newer += sum(other.tag == sent.tag for write in unplaced for other in write.records)
                return newer >= min(caps)
        return False

    def _unplaced(self, era: Era, by: int) -> list[Any]:
        return self.ledger.unplaced[era.number].some_before(by)

    def _unknown(self, read: Read, era: Era, seq: int, count: int) -> tuple[str, str] | None:
        """A seq without a known record: a write of unknown outcome got it, and then it was removed."""
        line = self.line
        if line.back[era.instance] != era.instance or line.corrupted_at < read.answered:
            return None
        start = era.segments.start
        if start and line.cuts[start - 1].kind in ("wipe", "fallback"):
            return None
        unplaced = self.ledger.unplaced[era.number]
        if count <= unplaced.before(read.answered):
            writes = unplaced.some_before(read.answered)
            records = [record for write in writes for record in write.records]
            if read.match is not None and any(not read.match(record.tag) for record in records):
                return None
            if read.nodes and any(record.node in read.nodes for record in records):
                return None
            if read.op.request.get("from_ts") or any(record.ttl_ms for record in records):
                return None
            if any(c["cap_per_tag"] for c in line.ever(read.answered, era.instance)):
                return None
            if self.deletes.may_cover_unknown(era, seq, records, read.answered):
                return None
        return "hole", f"seq {seq} is missing, but nothing can have removed it"


# -- what came back ------------------------------------------------------------------------------------------


class Returned:
    """Third pass: what a reader knows to be gone, or what was deleted, is not shown again."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.floors: dict[
            int, tuple[list[int], list[int]]
        ] = {}  # by segment: moments, and floors valid from then on

    def learn(self, reads: list[Read]) -> None:
        """Reads in the order of their answers."""
        for read in reads:
            tombstone = read.op.answer.get("tombstone")
            if (
                tombstone is None
                or read.segment is None
                or tombstone["reason"] not in ("cap", "ttl", "mixed")
            ):
                continue
            moments, floors = self.floors.setdefault(read.segment, ([], []))
            moments.append(read.answered)
            floors.append(max(tombstone["gap_to"], floors[-1] if floors else 0))

    def suspects(self, segment: int) -> dict[int, tuple[int, str]]:
        """Seqs that must not be shown any more, since when, and why."""
        era = self.ledger.eras[self.ledger.line.era[segment]]
        found: dict[int, tuple[int, str]] = {}
        for seq, placed in era.records.items():
            absent, gone = placed.absent.get(segment, FOREVER), placed.gone.get(segment, FOREVER)
            if absent < FOREVER or gone < FOREVER:
                found[seq] = min((absent, "came-back"), (gone, "undeleted"))
        return found

    def check(self, read: Read, suspects: dict[int, tuple[int, str]]) -> None:
        assert read.segment is not None
        if suspects:
            for seq in suspects.keys() & set(read.seqs):
                since, rule = suspects[seq]
                if since < read.sent:
                    self.ledger.blame(rule, f"seq {seq} was gone @{since}, but came back: {name_of(read.op)}")
        moments, floors = self.floors.get(read.segment, ([], []))
        at = bisect_left(moments, read.sent)
        if at and read.seqs and read.seqs[0] <= floors[at - 1]:
            self.ledger.blame(
                "came-back",
                f"seq {read.seqs[0]} was evicted @{moments[at - 1]} (up to {floors[at - 1]}): {name_of(read.op)}",
            )
