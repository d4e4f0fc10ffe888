"""Leases in claims, acks, nacks and extends, and the time on the server that follows from them."""

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
    """One delivery of one record, as in the answer of its claim."""

    op: Op
    seq: int
    node: str
    id: str
    deliveries: int
    until_ms: int
    since_ms: int  # when it was delivered: between these two
    latest_ms: int
    era: Era | None  # None: a cut happened while the claim was in flight
    life: int | None  # how often the worker had been restarted; None: it was restarted meanwhile

    def __str__(self) -> str:
        return f"seq {self.seq} to {self.op.client} ({self.node}) until {self.until_ms} by {name_of(self.op)}"


@dataclass(slots=True, eq=False)
class Settle:
    """What an ack, nack or extend did to one record, or may have done."""

    op: Op
    seq: int
    id: str  # "": any
    counted: bool | None  # None: unknown

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
    """One for each seq. If a seq is named twice, the first one counts, if any does."""
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
                lease_id = ""  # the answer does not say which of them
        seen.add(seq)
        yield Settle(op, seq, lease_id, counted)


class Clock:
    """The server's time when a request was executed."""

    def __init__(self) -> None:
        self._told: dict[int, list[tuple[Op, int, int]]] = {}  # by incarnation

    def add(self, op: Op, life: int | None, since_ms: int, latest_ms: int) -> None:
        if life is not None:
            self._told.setdefault(life, []).append((op, since_ms, latest_ms))

    def at_least(self, life: int, moment: int) -> int:
        """For requests sent at this moment."""
        told = self._told.get(life, [])
        return max((since for op, since, _ in told if (op.answered_at or FOREVER) < moment), default=0)

    def at_most(self, life: int, moment: int) -> int:
        """For requests answered at this moment."""
        told = self._told.get(life, [])
        return min((latest for op, _, latest in told if op.sent_at > moment), default=FOREVER)

    def faults(self) -> Iterator[str]:
        """It never goes back. Over a restart that is true for what is logged, and most leases are not."""
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
