"""Dead letters: a job that is given up is in the dead letter topic, once, or still in its queue.

Only the server writes to a target, so its records are looked up in their sources.
"""

from __future__ import annotations

from typing import Any

from tests.support.checker.jobs import Jobs
from tests.support.checker.ledger import Era, Placed, data_key, shown_key
from tests.support.checker.pages import Read
from tests.support.checker.problem import Problem, name_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import History, Op

ADDED = "$dead_letter_"


def targets_of(history: History) -> set[str]:
    """Dead letter topics."""
    configs: list[dict[str, Any]] = [op.request for op in history.ops if op.kind in ("put", "put_consumer")]
    configs += [op.request.get("config") or {} for op in history.ops if op.kind == "write"]
    return {config["dead_letter"] for config in configs if config.get("dead_letter")}


def check_dead_letters(history: History, target: str, sources: list[Jobs], problems: list[Problem]) -> None:
    """Whole pages of the target are compared with those of its sources."""
    pages = [
        op
        for op in history.ops
        if op.kind == "diff" and op.topic == target and op.ok and op.answer["caught_up"] and not op.request.get("from_seq")
    ]  # fmt: skip
    letters = DeadLetters(target, sources, problems)
    for page in pages:
        letters.check_page(page)
    for source in sources:
        letters.check_source(source, pages)


class DeadLetters:
    def __init__(self, target: str, sources: list[Jobs], problems: list[Problem]) -> None:
        self.target, self.problems = target, problems
        self.sources = {source.ledger.topic: source for source in sources}

    def blame(self, rule: str, text: str) -> None:
        self.problems.append(Problem(rule, self.target, text))

    # -- arrived ---------------------------------------------------------------------------------------------

    def check_page(self, page: Op) -> None:
        """Everything in it was written by a client, and is there once."""
        seen: dict[tuple[bytes, str], int] = {}
        for record in page.answer["records"]:
            meta = record.get("meta") or {}
            consumer, home = meta.get(f"{ADDED}consumer", ""), meta.get(f"{ADDED}from")
            if not any(source.ledger.find(record) for source in self.sources.values()):
                self.blame("letter", f"{record} was never written: {name_of(page)}")
            if home is None:
                continue  # bytes have no meta: their origin is unknown
            known = self.sources[home].ledger.find(record) if home in self.sources else None
            if known is None:
                self.blame("letter", f"it was never written to {home}: {record}")
                continue
            wanted = {name: value for name, value in meta.items() if not name.startswith(ADDED)}
            if (wanted or None, record.get("$tag"), record.get("$node")) != (
                known.meta,
                known.tag,
                known.node,
            ):
                self.blame("letter", f"{record} differs in {home}")
            first = seen.setdefault((shown_key(record), consumer), record["$seq"])
            if first != record["$seq"]:
                self.blame("letter-twice", f"{record} is at seq {first} as well: {name_of(page)}")

    # -- sent ------------------------------------------------------------------------------------------------

    def check_source(self, source: Jobs, pages: list[Op]) -> None:
        """What has left a queue, and was neither acked nor removed, is here."""
        if source.moves is None or self._removes_more(source):
            return
        for read in source.pages:
            if read.op.kind != "diff" or not read.op.answer["caught_up"] or read.op.request.get("from_seq"):
                continue
            if (
                read.era is None
                or read.segment is None
                or read.match
                or read.nodes
                or read.op.request.get("from_ts")
            ):
                continue
            after = [page for page in pages if page.sent_at > read.answered and page.client == read.op.client]
            if after:
                self._check_moved(source, read, read.era, read.segment, after[-1])
            before = [page for page in pages if (page.answered_at or FOREVER) < read.sent]
            if before:
                self._check_gone(source, read, read.era, before[-1])

    @staticmethod
    def _removes_more(source: Jobs) -> bool:
        line = source.line
        names = ("ttl_ms", "cap_records", "cap_bytes", "cap_per_tag")
        configs = [config for i in range(len(line.back)) for config in line.ever(FOREVER, i)]
        return line.corrupted_at < FOREVER or any(config[name] for config in configs for name in names)

    def _check_moved(self, source: Jobs, read: Read, era: Era, segment: int, page: Op) -> None:
        here = {shown_key(record) for record in page.answer["records"]}
        there = set(read.seqs)
        for placed in era.records.values():
            if placed.seq in there or data_key(placed.sent) in here:
                continue
            known = source.ledger.solid_since(placed, segment) < read.sent
            if known and not self._may_be_removed(source, era, placed, read.answered):
                self.blame(
                    "letter-lost",
                    f"seq {placed.seq} {placed.sent.data} of {source.ledger.topic} is not there any more "
                    f"({name_of(read.op)}), and not here: {name_of(page)}",
                )

    @staticmethod
    def _may_be_removed(source: Jobs, era: Era, placed: Placed, by: int) -> bool:
        """By anything but a move."""
        assert source.missing is not None
        deletes = source.missing.deletes.covering(era, placed)
        others = (delete for delete in deletes if delete.op is not source.moves)
        return bool(placed.sent.ttl_ms) or any(delete.op.sent_at < by for delete in others)

    def _check_gone(self, source: Jobs, read: Read, era: Era, page: Op) -> None:
        """Records that were here when all leases had ended are not in the queue any more."""
        assert page.answered_at is not None
        if not any(page.answered_at < event.at < read.sent for event in source.line.overs):
            return
        here = {
            shown_key(record)
            for record in page.answer["records"]
            if f"{ADDED}consumer" not in (record.get("meta") or {}) and "$encoding" not in record
        }
        for seq in read.seqs:
            placed = era.records.get(seq)
            if placed is not None and data_key(placed.sent) in here:
                self.blame(
                    "letter-twice",
                    f"seq {seq} of {source.ledger.topic} is a dead letter and still a job: {name_of(read.op)}",
                )
