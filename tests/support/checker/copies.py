"""Copies of routers: what may appear in a dest, what must appear, in which order, and the totals.

A *flow* is one rule and one topic that it copies. A record of the source is *due* in the dest when the rule certainly
existed before it was written and still exists, its filter matches, and the source still has it: nothing can have
removed it before it was copied. A read of the dest, sent after the record was known in the source, must return what
is due, unless the answer says that it did not wait, or the dest could not take it (it was full, or its disk was).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.checker.jobs import Jobs
from tests.support.checker.ledger import Copy, Era, Ledger, Placed, Sent, Write, data_key
from tests.support.checker.pages import ORIGIN, Missing, Read
from tests.support.checker.problem import Problem, name_of
from tests.support.checker.rules import Rule
from tests.support.checker.timeline import FOREVER, Timeline
from tests.support.checker.topic import Supply
from tests.support.history import History, Op

BLAMED_MAX = 3  # of one flow and one rule
LOOKS = ("diff", "state", "last", "claim")  # heads of a topic after catching up


@dataclass(slots=True, eq=False)
class CheckedTopic:
    """A topic that was checked by itself."""

    ledger: Ledger
    missing: Missing
    ops: list[Op]
    pages: list[Read]  # of reads, not of streams
    shown: list[Op]  # answers with records in them

    @property
    def line(self) -> Timeline:
        return self.ledger.line


def is_late(op: Op) -> bool:
    """Whether an answer says that it did not wait for its sources."""
    return bool((op.answer.get("performance") or {}).get("catch_up_timed_out"))


class Copies:
    def __init__(self, history: History, rules: list[Rule], problems: list[Problem]) -> None:
        self.history, self.rules, self.problems = history, rules, problems
        self.sides: dict[str, CheckedTopic] = {}
        self._holes: dict[str, bool] = {}
        self._troubles = _troubles(history)

    def blame(self, rule: str, topic: str, text: str) -> None:
        self.problems.append(Problem(rule, topic, text))

    def add(self, topic: str, ops: list[Op], jobs: Jobs) -> None:
        assert jobs.missing is not None
        pages = [page for page in jobs.pages if page.op.kind == "diff"]
        shown = [page.op for page in pages]
        self.sides[topic] = CheckedTopic(jobs.ledger, jobs.missing, ops, pages, shown)

    # -- what may come -------------------------------------------------------------------------------------

    def supply(self, topic: str, line: Timeline) -> Supply | None:
        """What may be copied to a topic. None: one record may lead to several copies, which cannot be told apart."""
        rules = [rule for rule in self.rules if rule.dest == topic]
        if not rules:
            return Supply([], False)
        found: dict[bytes, Copy] = {}
        holes = False
        for rule in rules:
            for source in self._sources(rule):
                if source not in self.sides:
                    return None
                holes = holes or self._may_lose(source)
                for copy in self._of_flow(rule, self.sides[source].ledger):
                    key = data_key(copy.ways[0][2])
                    known = found.setdefault(key, copy)
                    if known is copy:
                        continue
                    if known.record != copy.record:
                        return None
                    known.sent, known.settled = min(known.sent, copy.sent), max(known.settled, copy.settled)
                    known.times += copy.times
                    known.ways += copy.ways
        self._holes[topic] = holes
        return Supply(list(found.values()), holes)

    def _sources(self, rule: Rule) -> list[str]:
        """All topics that it can have copied, also those that were not checked."""
        names = [op.topic for op in self.history.ops if op.kind in ("write", "put")]
        names += [other.dest for other in self.rules]
        if rule.source not in self.sides and rule.copies(rule.source):
            names.append(rule.source)
        return [name for name in dict.fromkeys(names) if rule.copies(name)]

    def _may_lose(self, topic: str) -> bool:
        """Whether records may be lost there before they are copied, other than by a delete."""
        line = self.sides[topic].line
        configs = [config for i in range(len(line.back)) for config in line.ever(FOREVER, i)]
        return (
            self._holes.get(topic, False)
            or line.corrupted_at < FOREVER
            or line.may_lose
            or any(_retains_less(config) for config in configs)
        )

    @staticmethod
    def _of_flow(rule: Rule, source: Ledger) -> Iterator[Copy]:
        for write in source.writes:
            if not write.tries:
                continue
            # A copy that its topic lost in a crash is copied again, and counts as one more record for those who copy
            # that.
            losses = sum(cut.kind != "drop" for cut in source.line.cuts) if write.copy else 0
            span = rule.may_copy(write.sent, write.settled)
            for sent in write.records if span is not None else ():
                assert span is not None
                if rule.may_let_through(sent.tag, write.sent):
                    times = write.tries * (1 + losses)
                    yield Copy(_record(rule, sent), *span, times, [(rule, source, sent)])

    # -- what must have come -------------------------------------------------------------------------------

    def check(self) -> None:
        for rule in self.rules:
            dest = self.sides.get(rule.dest)
            if dest is None:
                continue
            flows = [
                Flow(self, rule, self.sides[source], dest)
                for source in self._sources(rule)
                if source in self.sides
            ]
            for flow in flows:
                flow.check()
            Totals(self, rule, dest, flows).check()
        for side in self.sides.values():
            if side.ledger.copies:
                self._check_twice(side)
                self._check_origins(side)

    def _check_twice(self, side: CheckedTopic) -> None:
        """Not more copies of a record than there were of the record."""
        ledger = side.ledger
        for write in ledger.copies.values():
            assert write.copy is not None
            if len(write.places) < 2:
                continue
            for segment in range(len(side.line.era)):
                seqs = {
                    place.base
                    for place in write.places
                    if place.era.number == side.line.era[segment]
                    and ledger.solid_since(place.era.records[place.base], segment) < FOREVER
                }
                if len(seqs) > write.copy.times:
                    self.blame("copied-twice", side.ledger.topic, f"{write.copy.record} is at {sorted(seqs)}")
                    break

    def _check_origins(self, side: CheckedTopic) -> None:
        """The origin in a copy must be correct."""
        for op in side.shown:
            for record in op.answer["records"]:
                meta = record.get("meta")
                if "data" not in record or not isinstance(meta, dict) or ORIGIN not in meta:
                    continue
                sent = side.ledger.find(record)
                if sent is None or sent.write.copy is None:
                    continue
                text = self._wrong_origin(meta[ORIGIN], sent.write.copy)
                if text:
                    self.blame("origin", side.ledger.topic, f"{text}: {record}: {name_of(op)}")
                    return

    def _wrong_origin(self, origin: dict[str, Any], copy: Copy) -> str | None:
        for rule, source, sent in copy.ways:
            if rule.name != origin.get("router"):
                # The origin may be further away.
                further = sent.write.copy
                if further is not None and self._wrong_origin(origin, further) is None:
                    return None
                continue
            if origin["source_topic"] != source.topic:
                continue
            if not any(put.exact for put in rule.puts):
                return "that router does not store origins"
            key = f"router:{rule.name}:{origin['source_topic_id']}:{origin['source_epoch']}:{origin['source_seq']}"
            if origin["idempotency_key"] != key:
                return "its key is of another record"
            seqs = {place.base + sent.index for place in sent.write.places}
            if origin["source_seq"] in seqs or len(seqs) < sent.write.tries * (1 + len(source.line.cuts)):
                return None
            return f"in the source it is at {sorted(seqs)}"
        return "no router makes such a copy"

    # -- reasons why it may not have come ------------------------------------------------------------------

    def had_trouble(self, start: int, end: int) -> bool:
        """Whether a disk was full or failed between these moments, or shortly before."""
        return any(first < end and last > start for first, last in self._troubles)


def _troubles(history: History) -> list[tuple[int, int]]:
    """From a full or failing disk to the moment at which all was well again."""
    found: list[tuple[int, int]] = []
    for event in history.events:
        if event.kind in ("full", "error"):
            calms = (other.at for other in history.events if other.kind == "calm" and other.at > event.at)
            found.append((event.at, min(calms, default=FOREVER)))
    return found


def _retains_less(config: dict[str, Any]) -> bool:
    capped = (config["cap_records"] or config["cap_bytes"]) and config["discard"] == "old"
    return bool(config["ttl_ms"] or capped)


def _record(rule: Rule, sent: Sent) -> dict[str, Any]:
    """As it should be in the dest. The record's own TTL is not copied."""
    record: dict[str, Any] = {"data_base64" if sent.encoded else "data": sent.data}
    if sent.tag is not None and rule.preserve_tag:
        record["tag"] = sent.tag
    if sent.node is not None and rule.preserve_node:
        record["node"] = sent.node
    if sent.meta is not None:
        record["meta"] = sent.meta
    return record


@dataclass(slots=True)
class ReadTimes:
    """When a read was sent, and when it was answered. A `Read` is one, too."""

    sent: int
    answered: int


@dataclass(slots=True, eq=False)
class Due:
    """A record of a source of which the dest must have a copy."""

    placed: Placed
    write: Write  # the copy
    known: int  # when the source was first known to have it


class Flow:
    def __init__(self, copies: Copies, rule: Rule, source: CheckedTopic, dest: CheckedTopic) -> None:
        self.copies, self.rule, self.source, self.dest = copies, rule, source, dest
        self._blamed = 0
        self._eras: dict[int, list[tuple[Placed, Write]]] = {}

    def __str__(self) -> str:
        return f"{self.rule.name}, {self.source.ledger.topic} to {self.dest.ledger.topic}"

    def blame(self, rule: str, text: str) -> None:
        self._blamed += 1
        if self._blamed <= BLAMED_MAX:
            self.copies.blame(rule, self.dest.ledger.topic, f"{text}: {self}")

    def check(self) -> None:
        for page in self.dest.pages:
            if page.era is not None:
                self._check_order(page, page.era)
        if self.source.line.corrupted_at < FOREVER or self.dest.line.corrupted_at < FOREVER:
            return
        for page in self.dest.pages:
            if page.segment is not None and _is_whole(page):
                self._check_page(page)
        for op in self.dest.ops:
            if op.kind in LOOKS and op.ok and "head_seq" in op.answer and not is_late(op):
                self._check_head(op)

    # -- what is due ---------------------------------------------------------------------------------------

    def due(self, look: ReadTimes | Read, *, trimmed: bool = False) -> Iterator[Due]:
        """For a read of the dest; `trimmed`: also records that may have been lost before."""
        sent, answered = look.sent, look.answered
        source, rule = self.source, self.rule
        line, ledger = source.line, source.ledger
        first, last = line.span(sent, answered)
        since = rule.there_since(answered)
        if first != last or since == FOREVER:
            return
        era = ledger.eras[line.era[first]]
        if not trimmed and any(_retains_less(config) for config in line.ever(answered, era.instance)):
            return
        for placed, copy in self._alone(era):
            write = placed.sent.write
            if write.sent < since:
                continue
            known = ledger.solid_since(placed, first)
            if known > sent or source.missing.may_be_gone(era, placed, answered):
                continue
            if rule.lets_through(placed.sent.tag, write.sent, answered):
                yield Due(placed, copy, known)

    def _alone(self, era: Era) -> list[tuple[Placed, Write]]:
        """Records that can have come in no other way: their copies are copies of them."""
        if era.number not in self._eras:
            found = (
                (placed, self.dest.ledger.copies.get(data_key(placed.sent)))
                for placed in era.records.values()
            )
            self._eras[era.number] = [
                (placed, copy)
                for placed, copy in found
                if copy is not None
                and copy.copy is not None
                and copy.copy.times == len(copy.copy.ways) == 1
                and copy.copy.ways[0][0] is self.rule
            ]
        return self._eras[era.number]

    def may_be_stuck(self, one: Due, look: ReadTimes | Read) -> bool:
        """Whether the dest may have been unable to take it."""
        line = self.dest.line
        first, last = line.span(look.sent, look.answered)
        instances = range(line.back[line.instance[first]], line.instance[last] + 1)
        configs = (config for i in instances for config in line.ever(look.answered, i))
        start = one.placed.sent.write.sent
        return any(c["discard"] == "reject" for c in configs) or self.copies.had_trouble(start, look.answered)

    def may_lack(self, one: Due, look: ReadTimes | Read) -> bool:
        """Whether the dest may lack a copy, or have lost it, being in memory, together with its position."""
        start = one.placed.sent.write.sent
        return self.may_be_stuck(one, look) or any(
            cut.kind in ("wipe", "fallback") and cut.end > start and cut.start < look.answered
            for cut in self.dest.line.cuts
        )

    # -- in order ------------------------------------------------------------------------------------------

    def _check_order(self, page: Read, era: Era) -> None:
        last: dict[int, tuple[int, int]] = {}  # by the source's era: its seq, and the dest's
        for seq in page.seqs:
            placed = era.records.get(seq)
            if placed is None or placed.sent.write.copy is None:
                continue
            copy = placed.sent.write.copy
            if len(copy.ways) > 1 or copy.ways[0][0] is not self.rule or copy.times > 1:
                continue
            _, ledger, sent = copy.ways[0]
            if ledger is not self.source.ledger:
                continue
            for place in sent.write.places:
                origin = place.base + sent.index
                before = last.get(place.era.number, (0, 0))
                if origin < before[0]:
                    self.blame(
                        "copy-order",
                        f"seq {seq} is a copy of {origin}, and {before[1]} of {before[0]}: {name_of(page.op)}",
                    )
                last[place.era.number] = origin, seq

    # -- pages ---------------------------------------------------------------------------------------------

    def _check_page(self, page: Read) -> None:
        """Everything that is due is in the page; and nothing before what is in it was omitted."""
        assert page.era is not None
        if any(c["cap_per_tag"] for c in self.dest.line.ever(page.answered, page.era.instance)):
            return
        records = page.era.records
        shown = {id(records[seq].sent.write) for seq in page.seqs if seq in records}
        due = [one for one in self.due(page, trimmed=True) if not self._was_removed(one, page, picked=True)]
        due.sort(key=lambda one: one.placed.seq)
        self._check_between(page, due, shown)
        if is_late(page.op) or self._removes(page):
            return
        missing = [
            one
            for one in self.due(page)
            if id(one.write) not in shown
            and not self._was_removed(one, page)
            and not self.may_lack(one, page)
        ]
        # Rows of a page without data may be of unknown records: they may be these.
        if len(missing) <= sum(seq not in records for seq in page.seqs):
            return
        for one in missing:
            self.blame(
                "copy-missing",
                f"seq {one.placed.seq} {one.placed.sent.data}, known @{one.known}, is not there: {name_of(page.op)}",
            )

    def _was_removed(self, one: Due, page: Read, *, picked: bool = False) -> bool:
        """A delete may have removed the copy; `picked`: and not all that came before it."""
        tag = one.write.records[0].tag
        return any(
            delete.op.sent_at < page.answered
            and delete.settled > one.placed.sent.write.sent
            and (delete.match is None or delete.match(tag))
            and (not picked or delete.match is not None or delete.seqs is not None)
            for delete in self.dest.missing.deletes.all
        )

    def _removes(self, page: Read) -> bool:
        assert page.era is not None
        return any(_retains_less(config) for config in self.dest.line.ever(page.answered, page.era.instance))

    def _check_between(self, page: Read, due: list[Due], shown: set[int]) -> None:
        """Between two copies that are there, everything due is there; or there is a hole for each missing one."""
        assert page.era is not None
        if any(cut.kind in ("wipe", "fallback") for cut in self.dest.line.cuts):
            return
        seqs = {id(place.write): place.base for place in page.era.places if place.write.copy is not None}
        present = [i for i, one in enumerate(due) if id(one.write) in shown]
        for left, right in itertools.pairwise(present):
            missing = due[left + 1 : right]
            if not missing:
                continue
            first, last = seqs[id(due[left].write)], seqs[id(due[right].write)]
            holes = 0
            if self.dest.ledger.may_have_holes:
                holes = sum(
                    seq not in page.era.records for seq in range(first + 1, min(last, first + 10_000))
                )
            if len(missing) > holes:
                texts = [f"{one.placed.seq} {one.placed.sent.data}" for one in missing[:3]]
                self.blame(
                    "copy-skipped",
                    f"{len(missing)} records, {texts}, are not between seqs {first} and {last}, which are copies of "
                    f"{due[left].placed.seq} and {due[right].placed.seq}, with {holes} holes: {name_of(page.op)}",
                )

    # -- heads ---------------------------------------------------------------------------------------------

    def _check_head(self, op: Op) -> None:
        """A request that was sent after a record was known does not get a head before its copy."""
        assert op.answered_at is not None
        line, ledger = self.dest.line, self.dest.ledger
        first, last = line.span(op.sent_at, op.answered_at)
        if first != last or op.request.get("consumer"):
            return
        era = ledger.eras[line.era[first]]
        look = ReadTimes(op.sent_at, op.answered_at)
        for one in self.due(look):
            places = one.write.places
            if len(places) != 1 or places[0].era is not era or places[0].base <= op.answer["head_seq"]:
                continue
            known = places[0].known_at
            if line.span(known, known) != (first, last):
                continue  # it may have been there before, at another place
            if not self.may_be_stuck(one, look):
                self.blame(
                    "stale",
                    f"seq {one.placed.seq} {one.placed.sent.data} was known @{one.known}, its copy is {places[0].base}, "
                    f"and the head is {op.answer['head_seq']}: {name_of(op)}",
                )


class Totals:
    """The totals of a router."""

    def __init__(self, copies: Copies, rule: Rule, dest: CheckedTopic, flows: list[Flow]) -> None:
        self.copies, self.rule, self.dest, self.flows = copies, rule, dest, flows

    def blame(self, text: str) -> None:
        self.copies.blame("total", self.rule.dest, f"{text}: {self.rule}")

    def check(self) -> None:
        told = sorted(self._told(), key=lambda row: row[0].answered_at or 0)
        if self.dest.line.corrupted_at < FOREVER:
            return
        for (one, before), (two, after) in itertools.combinations(told, 2):
            assert one.answered_at is not None
            if after < before and one.answered_at < two.sent_at and self._is_one_life(one, two):
                self.blame(f"{after} of {name_of(two)}, and it was {before} of {name_of(one)}")
                break
        for op, total in told:
            self._check_bounds(op, total)

    def _told(self) -> Iterator[tuple[Op, int]]:
        for op in self.copies.history.ops:
            if not op.ok:
                continue
            if op.kind == "router" and op.topic == self.rule.name:
                rows = [op.answer]
            elif op.kind == "routers":
                rows = [row for row in op.answer["routers"] if row["router"] == self.rule.name]
            else:
                continue
            for row in rows:
                if (row["source"], row["dest"]) == (self.rule.source, self.rule.dest):
                    yield op, row["forwarded_total"]

    def _is_one_life(self, one: Op, two: Op) -> bool:
        """Whether the rule existed all the time, and nothing happened to the dest that may have removed copies."""
        assert two.answered_at is not None
        line = self.dest.line
        since = self.rule.there_since(two.answered_at)
        return since < one.sent_at and line.span(one.sent_at, one.sent_at) == line.span(
            one.sent_at, two.answered_at
        )

    def _check_bounds(self, op: Op, total: int) -> None:
        assert op.answered_at is not None
        most = sum(
            copy.copy.times
            for copy in self.dest.ledger.copies.values()
            if copy.copy is not None
            and copy.sent < op.answered_at
            and any(rule.name == self.rule.name for rule, _, _ in copy.copy.ways)
        )
        if total > most:
            self.blame(f"{total} copies of {name_of(op)}: there can be {most}")
        if op.kind == "routers" or is_late(op):
            return
        look = ReadTimes(op.sent_at, op.answered_at)
        least = sum(
            not flow.may_lack(one, look)
            for flow in self.flows
            if flow.source.line.corrupted_at == FOREVER
            for one in flow.due(look)
        )
        if total < least:
            self.blame(f"{total} copies of {name_of(op)}: there must be {least}")


def _is_whole(page: Read) -> bool:
    """From the beginning to the head, without a filter."""
    request, answer = page.op.request, page.op.answer
    filtered = page.nodes or page.match or request.get("from_ts") or request.get("from_seq")
    return not filtered and bool(answer["caught_up"])
