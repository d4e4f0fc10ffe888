"""What claims, acks, nacks and extends say of leases, and what time it was on the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.checker.ledger import Era
from tests.support.checker.problem import name_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op

SETTLES = ("ack", "nack", "extend")


@dataclass(slots=True, eq=False)
class Lease:
    """One delivery of one record, as its claim was told."""

    op: Op
    seq: int
    node: str
    id: str
    deliveries: int
    until_ms: int
    since_ms: int  # when it was handed out: between these two
    latest_ms: int
    era: Era | None  # None: a cut passed while the claim was on its way
    life: int | None  # how often the worker had been restarted; None: it was just then

    def __str__(self) -> str:
        return f"seq {self.seq} to {self.op.client} ({self.node}) until {self.until_ms} by {name_of(self.op)}"


@dataclass(slots=True, eq=False)
class Settle:
    """What an ack, nack or extend did to one record, or may have done."""

    op: Op
    seq: int
    id: str  # "": whichever
    counted: bool | None  # None: nobody knows

    def may_be_of(self, lease: Lease) -> bool:
        return (
            self.seq == lease.seq
            and self.op.request["node"] == lease.node
            and self.id in ("", lease.id)
            and self.counted is not False
        )


def told_before(op: Op, moment: int) -> bool:
    return op.answered_at is not None and op.answered_at < moment


def settles_of(op: Op) -> Iterator[Settle]:
    """One for each seq. Of one that is named twice, the first counts, if any does."""
    if op.refused:
        return
    seqs = op.request["seqs"]
    ids = op.request.get("lease_ids") or [""] * len(seqs)
    skipped = Counter(op.answer["skipped"]) if op.ok else Counter()
    named = Counter(seqs)
    seen: set[int] = set()
    for seq, lease_id in zip(seqs, ids, strict=True):
        counted: bool | None = None
        if op.ok:
            counted = seq not in seen and skipped[seq] < named[seq]
            if named[seq] > 1 and counted:
                lease_id = ""  # which of them it was is not said
        seen.add(seq)
        yield Settle(op, seq, lease_id, counted)


class Clock:
    """What time it was on the server when something was executed."""

    def __init__(self) -> None:
        self._told: dict[int, list[tuple[Op, int, int]]] = {}  # by life

    def add(self, op: Op, life: int | None, since_ms: int, latest_ms: int) -> None:
        if life is not None:
            self._told.setdefault(life, []).append((op, since_ms, latest_ms))

    def at_least(self, life: int, moment: int) -> int:
        """For whatever is sent at this moment."""
        told = self._told.get(life, [])
        return max((since for op, since, _ in told if (op.answered_at or FOREVER) < moment), default=0)

    def at_most(self, life: int, moment: int) -> int:
        """For whatever is answered at this moment."""
        told = self._told.get(life, [])
        return min((latest for op, _, latest in told if op.sent_at > moment), default=FOREVER)

    def faults(self) -> Iterator[str]:
        """It never runs back. Over a restart that goes for what is in the log, and most leases are not."""
        for told in self._told.values():
            yield from self._faults(told)

    @staticmethod
    def _faults(told: list[tuple[Op, int, int]]) -> Iterator[str]:
        by_answer = sorted(told, key=lambda row: row[0].answered_at or FOREVER)
        latest, at = None, 0
        for op, _, latest_ms in sorted(told, key=lambda row: row[0].sent_at):
            while at < len(by_answer) and (by_answer[at][0].answered_at or FOREVER) < op.sent_at:
                if latest is None or by_answer[at][1] > latest[1]:
                    latest = by_answer[at]
                at += 1
            if latest is not None and latest_ms < latest[1]:
                yield f"{latest_ms} for {name_of(op)}, after {latest[1]} for {name_of(latest[0])}"
