"""Newest by tag, and counts of tags."""

from __future__ import annotations

from bisect import bisect_right

from tests.support.checker.ledger import Era, Ledger, Placed
from tests.support.checker.pages import Missing, Read
from tests.support.checker.problem import name_of
from tests.support.checker.shapes import Match, match_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op


class Lookups:
    def __init__(self, ledger: Ledger, missing: Missing) -> None:
        self.ledger, self.missing = ledger, missing
        self.line, self.blame = ledger.line, ledger.blame

    # -- newest by tag -------------------------------------------------------------------------------------

    def check_last(self, read: Read) -> None:
        """Every record in it matches, and nothing newer was there."""
        request, records = read.op.request, read.op.answer["records"]
        subject = request.get("subject")
        match = match_of(["tag", "Subject", subject] if subject else request.get("tag"))
        assert match is not None
        each = bool(request.get("each"))
        wrong = []
        if any(not match(record.get("$tag")) for record in records):
            wrong.append("a tag that was not requested")
        if any(a >= b for a, b in zip(read.seqs, read.seqs[1:], strict=False)):
            wrong.append("seqs do not ascend")
        if read.seqs and read.seqs[-1] > read.op.answer["head_seq"]:
            wrong.append("a record after the head")
        if len(records) > 1 and not each:
            wrong.append("more than one record")
        if len({record.get("$tag") for record in records}) < len(records):
            wrong.append("two records of one tag")
        for text in wrong:
            self.blame("last", f"{text}: {name_of(read.op)}: {records}")
        if read.segment is not None and not wrong:
            self._newest(read, match, each)

    def _newest(self, read: Read, match: Match, each: bool) -> None:
        assert read.era is not None and read.segment is not None
        era, request = read.era, read.op.request
        newest = {record["$tag"]: record["$seq"] for record in read.op.answer["records"]}
        whole = not request.get("cursor") and not read.op.answer.get("next_cursor")
        overall = max(newest.values(), default=0)
        for tag in era.tags:
            if not match(tag) or (each and tag not in newest and not whole):
                continue
            shown = newest.get(tag, 0) if each else overall
            found = self._certain_after(era, tag, shown, read)
            if found is not None:
                self.blame(
                    "last", f"seq {found.seq} with the tag {tag!r} is newer than {shown}: {name_of(read.op)}"
                )

    def _certain_after(self, era: Era, tag: str, seq: int, read: Read) -> Placed | None:
        """A record with this tag and a higher seq that must have been there."""
        assert read.segment is not None
        seqs = era.tags[tag]
        if self._may_shrink(era, read.answered):
            return None
        for newer in seqs[bisect_right(seqs, seq) :]:
            placed = era.records[newer]
            known = self.ledger.solid_since(placed, read.segment) < read.sent
            if known and not self.missing.may_be_gone(era, placed, read.answered):
                return placed
        return None

    def _may_shrink(self, era: Era, by: int) -> bool:
        return self.line.corrupted_at < by or any(
            config["ttl_ms"] or config["cap_records"] or config["cap_bytes"]
            for config in self.line.ever(by, era.instance)
        )

    # -- counts of tags ------------------------------------------------------------------------------------

    def check_tags(self, op: Op) -> None:
        assert op.answered_at is not None
        first, last = self.line.span(op.sent_at, op.answered_at)
        if first != last:
            return
        era = self.ledger.eras[self.line.era[first]]
        prefix, after = op.request.get("prefix") or "", bool(op.request.get("cursor"))
        counts = {row["tag"]: row["count"] for row in op.answer["tags"]}
        for tag, count in counts.items():
            if not tag.startswith(prefix) or count < 1:
                self.blame("tags", f"{tag!r}: {count} in {name_of(op)}")
        whole = not after and not op.answer.get("next_cursor")
        for tag in {*era.tags, *counts}:
            if tag.startswith(prefix) and (tag in counts or whole):
                self._count(op, era, first, tag, counts.get(tag, 0))

    def _count(self, op: Op, era: Era, segment: int, tag: str, count: int) -> None:
        assert op.answered_at is not None
        least = most = 0
        shrinks = self._may_shrink(era, op.answered_at)
        for seq in era.tags.get(tag, []):
            placed = era.records[seq]
            if placed.sent.write.sent < op.answered_at and placed.gone.get(segment, FOREVER) > op.sent_at:
                most += 1
                if not shrinks and self.ledger.solid_since(placed, segment) < op.sent_at:
                    least += not self.missing.may_be_gone(era, placed, op.answered_at)
        if count < least:
            self.blame(
                "tags", f"{count} records with the tag {tag!r}, at least {least} expected: {name_of(op)}"
            )
        if self.line.back[era.instance] != era.instance:
            return
        unplaced = self.ledger.unplaced[era.number].some_before(op.answered_at)
        most += sum(record.tag == tag for write in unplaced for record in write.records)
        if count > most:
            self.blame(
                "tags", f"{count} records with the tag {tag!r}, at most {most} expected: {name_of(op)}"
            )
