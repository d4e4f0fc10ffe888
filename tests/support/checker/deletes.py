"""Deletes of records: what each can have removed, and what it certainly has removed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.support.checker.ledger import Era, Ledger, Placed, Sent
from tests.support.checker.problem import name_of
from tests.support.checker.shapes import Match, match_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op


@dataclass(slots=True)
class Delete:
    op: Op
    settled: int
    certain: bool
    first: int  # segments
    last: int
    before_seq: int | None
    seqs: frozenset[int] | None
    match: Match | None
    keep: int | None

    def selects(self, seq: int, tag: str | None) -> bool:
        """Whether all selectors except `keep` match."""
        return (
            (self.before_seq is None or seq < self.before_seq)
            and (self.seqs is None or seq in self.seqs)
            and (self.match is None or self.match(tag))
        )


def was_executed(op: Op) -> bool:
    """An erase on a full disk is refused, but may have deleted: then the error says how many."""
    return op.ok or "deleted" in op.detail


class Deletes:
    def __init__(self, ledger: Ledger, ops: Iterable[Op]) -> None:
        self.ledger = ledger
        line = ledger.line
        self.all: list[Delete] = []
        for op in sorted(ops, key=lambda op: op.sent_at):
            done = was_executed(op)
            if op.refused and not done:
                continue
            settled, request = line.settled(op), op.request
            first, last = line.span(op.sent_at, settled)
            seqs = request.get("seqs")
            self.all.append(
                Delete(
                    op=op,
                    settled=settled,
                    certain=done,
                    first=first,
                    last=last,
                    before_seq=request.get("before_seq"),
                    seqs=None if seqs is None else frozenset(seqs),
                    match=match_of(request.get("match")),
                    keep=request.get("keep"),
                )
            )

    def _of(self, era: Era) -> Iterator[Delete]:
        line = self.ledger.line
        back = line.back[era.instance]
        for delete in self.all:
            if line.instance[delete.last] >= back and line.instance[delete.first] <= era.instance:
                yield delete

    # -- may have been removed -----------------------------------------------------------------------------

    def may_cover_since(self, era: Era, placed: Placed) -> int:
        """When the first delete was sent that can have removed it."""
        if placed.may_go < 0:
            placed.may_go = FOREVER
            for delete in self._of(era):
                if self._may_cover(delete, era, placed):
                    placed.may_go = delete.op.sent_at
                    break
        return placed.may_go

    def covering(self, era: Era, placed: Placed) -> Iterator[Delete]:
        """All that can have removed it."""
        return (delete for delete in self._of(era) if self._may_cover(delete, era, placed))

    def _may_cover(self, delete: Delete, era: Era, placed: Placed) -> bool:
        sent = placed.sent
        if sent.write.sent > delete.settled or not delete.selects(placed.seq, sent.tag):
            return False
        if not delete.keep:
            return True
        return self._newer_at_most(delete, era, placed) >= delete.keep

    def _newer_at_most(self, delete: Delete, era: Era, placed: Placed) -> int:
        """The most newer records there can have been when it was executed, of all or of this tag."""
        unplaced = self.ledger.unplaced[era.number].some_before(delete.settled)
        tag = placed.sent.tag
        if delete.match is not None:
            assert tag is not None
            count = era.newer_with_tag(tag, placed.seq)
            return count + sum(record.tag == tag for write in unplaced for record in write.records)
        ends = (place.end for place in era.places if place.write.sent < delete.settled)
        return max(ends, default=0) - placed.seq + sum(len(write.records) for write in unplaced)

    def may_cover_unknown(self, era: Era, seq: int, records: list[Sent], by: int) -> bool:
        """Whether it can have removed one of these records, if that had this seq."""
        for delete in self._of(era):
            if delete.op.sent_at < by and any(delete.selects(seq, record.tag) for record in records):
                return True
        return False

    # -- certainly removed ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Note for every record when a delete that must have removed it was acknowledged."""
        for delete in self.all:
            if not delete.certain or delete.first != delete.last:
                continue
            segment = delete.first
            era = self.ledger.eras[self.ledger.line.era[segment]]
            if delete.op.ok:
                self._check_deleted(delete, era)
            for placed in self._covered(delete, era, segment):
                if delete.settled < placed.gone.get(segment, FOREVER):
                    placed.gone[segment] = delete.settled

    def _check_deleted(self, delete: Delete, era: Era) -> None:
        """It cannot have removed more records than there were."""
        if self.ledger.line.back[era.instance] != era.instance:
            return
        most = sum(
            placed.sent.write.sent < delete.settled and delete.selects(placed.seq, placed.sent.tag)
            for placed in self._candidates(delete, era)
        )
        unplaced = self.ledger.unplaced[era.number].some_before(delete.settled)
        most += sum(
            delete.match is None or delete.match(record.tag) for write in unplaced for record in write.records
        )
        if delete.seqs is not None:
            most = min(most, len(delete.seqs))
        if not 0 <= delete.op.answer["deleted"] <= most:
            count = delete.op.answer["deleted"]
            self.ledger.blame("count", f"{count} deleted by {name_of(delete.op)}: there were {most} at most")

    def _covered(self, delete: Delete, era: Era, segment: int) -> list[Placed]:
        sent_at = delete.op.sent_at
        chosen = [
            placed
            for placed in self._candidates(delete, era)
            if self.ledger.solid_since(placed, segment) < sent_at
            and delete.selects(placed.seq, placed.sent.tag)
        ]
        if delete.keep is None:
            return chosen
        kept: dict[str | None, int] = {}
        found = []
        for placed in reversed(chosen):
            group = placed.sent.tag if delete.match is not None else None
            if kept.get(group, 0) >= delete.keep:
                found.append(placed)
            elif self._certainly_lives(era, placed, delete):
                kept[group] = kept.get(group, 0) + 1
        return found

    def _certainly_lives(self, era: Era, placed: Placed, delete: Delete) -> bool:
        """When the delete was executed: no TTL, no cap, no other delete can have removed it before, and no damage."""
        if placed.sent.ttl_ms or self.ledger.line.corrupted_at < delete.settled:
            return False
        configs = self.ledger.line.ever(delete.settled, era.instance)
        if any(c["ttl_ms"] or c["cap_records"] or c["cap_bytes"] or c["cap_per_tag"] for c in configs):
            return False
        return not any(
            other is not delete and other.op.sent_at < delete.settled and self._may_cover(other, era, placed)
            for other in self._of(era)
        )

    def _candidates(self, delete: Delete, era: Era) -> list[Placed]:
        """In the order of seqs."""
        records = era.records
        if delete.seqs is not None:
            return [records[seq] for seq in sorted(delete.seqs) if seq in records]
        bases = era.bases
        if delete.before_seq is not None:
            bases = bases[: bisect_left(bases, delete.before_seq)]
        found = []
        for base in bases:
            place = era.by_base[base]
            found += [records[seq] for seq in range(base, place.end + 1)]
        return found
