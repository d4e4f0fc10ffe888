"""Merges and snapshots: answers about plans, and what was read of a pinned snapshot.

All other rules check that no reader notices a merge. Here: a published plan stays published, and the files of a
manifest contain what a page of that moment would show.
"""

from __future__ import annotations

from typing import Any

from tests.support.checker.ledger import Ledger
from tests.support.checker.pages import Missing, Read
from tests.support.checker.problem import name_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op

BLAMED_MAX = 3


def check_plans(ledger: Ledger, ops: list[Op]) -> None:
    """A plan that was published stays known as published, always with the same result."""
    line = ledger.line
    done: dict[tuple[int, str], tuple[Op, Any]] = {}  # by instance and plan
    for op in sorted((op for op in ops if op.ok), key=lambda op: op.answered_at or 0):
        assert op.answered_at is not None
        first, last = line.span(op.sent_at, op.answered_at)
        if line.instance[first] != line.instance[last]:
            continue
        instance = line.instance[first]
        if op.kind == "publish" and op.answer["state"] == "committed":
            result = {name: op.answer[name] for name in ("manifest", "groups", "failed")}
            before, known = done.setdefault((instance, op.request["plan_id"]), (op, result))
            if result != known and result["manifest"]:
                ledger.blame(
                    "plan-answer", f"{result} of {name_of(op)}, and it was {known}: {name_of(before)}"
                )
        elif op.kind == "merges":
            for (of, plan_id), (before, _) in done.items():
                told = before.answered_at is not None and before.answered_at < op.sent_at
                if of == instance and told and plan_id not in op.answer["committed"]:
                    ledger.blame(
                        "plan-forgotten", f"{plan_id} was published: {name_of(before)}; not for {name_of(op)}"
                    )
        elif op.kind == "plan" and op.answer["plan_id"] is not None:
            before = done.get((instance, op.answer["plan_id"]))
            if before is not None and (before[0].answered_at or FOREVER) < op.sent_at:
                ledger.blame("plan-forgotten", f"a published plan was issued again: {name_of(op)}")


def check_scan(ledger: Ledger, missing: Missing, read: Read) -> None:
    """Everything known before the pin, and neither deleted nor expired, is in its files."""
    era, answer, line = read.era, read.op.answer, ledger.line
    if era is None or read.segment is None or line.corrupted_at < FOREVER:
        return
    if any(a >= b for a, b in zip(read.seqs, read.seqs[1:], strict=False)):
        ledger.blame("scan", f"seqs do not ascend: {name_of(read.op)}")
    shown, blamed = set(read.seqs), 0
    for seq in range(answer["first_seq"], answer["next_seq"]):
        placed = era.records.get(seq)
        if placed is None or seq in shown or blamed == BLAMED_MAX:
            continue
        if ledger.solid_since(placed, read.segment) < read.sent and not missing.may_be_gone(
            era, placed, read.answered
        ):
            blamed += 1
            ledger.blame("scan", f"seq {seq} {placed.sent.data} is not in the files of {name_of(read.op)}")
