"""The check of one topic's part of a history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.checker.acks import Acks, is_wrong_last_seq
from tests.support.checker.batches import Batches
from tests.support.checker.counters import Counters, observations_of
from tests.support.checker.deletes import Deletes
from tests.support.checker.jobs import Jobs
from tests.support.checker.ledger import Copy, Ledger
from tests.support.checker.lookups import Lookups
from tests.support.checker.merges import check_plans, check_scan
from tests.support.checker.pages import Missing, Read, Returned, Shown, make_read
from tests.support.checker.problem import Problem, name_of
from tests.support.checker.timeline import Timeline, full_config
from tests.support.history import Op

READS = ("diff", "last", "push", "handed", "scan")


@dataclass(slots=True)
class Supply:
    copies: list[Copy]
    may_have_holes: bool


def check_topic(
    line: Timeline,
    ops: list[Op],
    pushed: list[Op],
    problems: list[Problem],
    supply: Supply | None = None,
    batches: Batches | None = None,
) -> Jobs:
    """`pushed` are the pages that streams showed of it, `supply` is what routers may copy to it, `batches` are its
    transactions.
    """
    if batches is not None:
        ops = [*ops, *batches.told(line)]
    ledger = Ledger(line.topic, line, problems)
    acks = Acks(ledger)
    writes = [op for op in ops if op.kind == "write"]
    for op in writes:
        ledger.add_write(op)
    changes = list(ops)
    if supply is not None:
        ledger.may_have_holes = supply.may_have_holes
        for copy in supply.copies:
            ledger.add_copy(copy)
        changes += [write.ops[0] for write in ledger.copies.values()]
    answered = sorted((op for op in ops if op.ok), key=lambda op: op.answered_at or 0)
    for op in answered:
        if op.kind == "write":
            acks.take(op)

    for op in pushed:
        _shown_since(ledger, op)
    jobs = Jobs(ledger, ops)
    told = sorted(
        (op for op in [*answered, *pushed, *jobs.shown()] if op.ok), key=lambda op: op.answered_at or 0
    )
    reads = [make_read(ledger, op) for op in told if op.kind in READS]
    shown = Shown(ledger)
    for read in reads:
        shown.take(read)
    for op in answered:
        if op.kind == "write" and op.answer["deduped"]:
            acks.take_retry(op)
    if batches is not None:
        batches.settle(ledger)
    ledger.carry_over()
    ledger.count_unplaced()
    acks.check_twice()
    _check_times(ledger)

    deletes = Deletes(ledger, [*(op for op in ops if op.kind == "delete"), *jobs.removals])
    deletes.settle()
    missing = Missing(ledger, deletes)
    pages = [read for read in reads if read.op.kind in ("diff", "push")]
    for read in pages:
        missing.check(read)
    _check_returned(ledger, reads, pages)
    jobs.check(missing, pages)
    if batches is not None:
        batches.check(ledger, pages)
    for read in reads:
        if read.op.kind == "scan":
            check_scan(ledger, missing, read)
    check_plans(ledger, ops)

    counters = Counters(
        ledger, missing, [observation for op in ops for observation in observations_of(ledger, op)]
    )
    counters.check()
    counters.check_quiet([page for page in pages if page.op.kind == "diff"], [*changes, *jobs.removals])
    lookups = Lookups(ledger, missing)
    for read in reads:
        if read.op.kind == "last":
            lookups.check_last(read)
    for op in answered:
        if op.kind == "tags":
            lookups.check_tags(op)
        elif op.kind in ("state", "put"):
            _check_config(ledger, op)
    for op in writes:
        acks.check_condition(op, missing)
        if is_wrong_last_seq(op):
            _check_refusal(ledger, op)
    return jobs


def _shown_since(ledger: Ledger, op: Op) -> None:
    """A page that a stream showed was read after its connection began, and after its newest record was sent."""
    if op.ok and op.answer["records"] and "data" in op.answer["records"][-1]:
        sent = ledger.find(op.answer["records"][-1])
        if sent is not None and op.answered_at is not None and sent.write.sent < op.answered_at:
            op.sent_at = max(op.sent_at, sent.write.sent)


def _check_times(ledger: Ledger) -> None:
    """$ts never decreases with seq."""
    for era in ledger.eras:
        before, of = 0, 0
        for seq in sorted(era.records):
            ts = era.records[seq].ts
            if ts is None:
                continue
            if ts < before:
                ledger.blame("ts", f"seq {seq} has $ts {ts}, and seq {of} before it has {before}")
            before, of = ts, seq


def _check_returned(ledger: Ledger, reads: list[Read], pages: list[Read]) -> None:
    returned = Returned(ledger)
    returned.learn(pages)
    suspects: dict[int, dict[int, tuple[int, str]]] = {}
    for read in reads:
        if read.segment is not None:
            if read.segment not in suspects:
                suspects[read.segment] = returned.suspects(read.segment)
            returned.check(read, suspects[read.segment])


def _check_config(ledger: Ledger, op: Op) -> None:
    """The config in an answer is one that can be in force."""
    assert op.answered_at is not None
    line = ledger.line
    first, last = line.span(op.sent_at, op.answered_at)
    told = full_config(op.answer["config"])
    if op.kind == "put":
        configs: list[dict[str, Any]] = [full_config(op.request)]
    else:
        configs = line.configs(
            op.sent_at, op.answered_at, line.back[line.instance[first]], line.instance[last]
        )
    if told not in configs:
        ledger.blame("config", f"{told} was in the answer of {name_of(op)}, and should be one of {configs}")
    if op.kind == "put" and op.answer["created"] != (op.status == 201):
        ledger.blame("config", f"created does not fit the status: {name_of(op)}")


def _check_refusal(ledger: Ledger, op: Op) -> None:
    detail = op.answer["error"]["detail"]
    wanted = op.request.get("if_last_seq")
    if wanted is None:
        wanted = (op.request.get("if_tag_last_seq") or {}).get("seq")
    if detail.get("expected") != wanted or detail.get("actual") == wanted:
        ledger.blame("condition", f"{detail} is not a reason to refuse {name_of(op)}")
