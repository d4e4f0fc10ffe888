"""Existence of topics: a created topic exists until it is dropped, and a dropped one does not come back."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from tests.support.checker.problem import Problem, name_of
from tests.support.checker.rules import ROUTER_KINDS, is_pattern, may_have_made
from tests.support.checker.timeline import Timeline, may_create
from tests.support.history import History, Op

EXISTING = (
    "diff", "state", "delete", "last", "tags", "claim", "ack", "nack", "extend", "put_consumer", "consumer",
    "begin", "stage", "commit", "abort", "plan", "merges", "renew", "publish", "abandon", "pin", "renew_pin", "release",
)  # fmt: skip


@dataclass(slots=True)
class ExistenceLog:
    """Answers that show that a topic exists, or that it does not; and requests that can have changed that."""

    there: list[tuple[Op, int, int]] = field(default_factory=list)  # op, sent, answered
    absent: list[tuple[Op, int, int]] = field(default_factory=list)
    makers: list[tuple[int, int]] = field(default_factory=list)  # sent, settled
    drops: list[tuple[int, int]] = field(default_factory=list)


def check_existence(
    history: History,
    pushed: dict[str, list[Op]],
    lines: dict[str, Timeline],
    targets: set[str],
    problems: list[Problem],
) -> None:
    """`targets` are created by dead letters, at any time."""
    lives: dict[str, ExistenceLog] = {}
    for op in history.ops:
        if op.kind == "watch":
            _note_watch(lives, op)
        elif op.kind in ROUTER_KINDS:
            _note_router(lives, lines, op)
        elif op.kind != "list":
            _note(lives.setdefault(op.topic, ExistenceLog()), lines[op.topic], op)
    for topic, ops in pushed.items():
        life = lives.setdefault(topic, ExistenceLog())
        for op in ops:
            assert op.answered_at is not None
            (life.there if op.ok else life.absent).append((op, op.sent_at, op.answered_at))
    for op in history.ops:
        if op.kind == "list" and op.ok:
            _note_list(lives, op)
    for topic, life in lives.items():
        if topic not in targets:
            check_life(topic, life, problems)


def _note(life: ExistenceLog, line: Timeline, op: Op) -> None:
    answered = op.answered_at
    if op.ok and answered is not None:
        made = op.kind in ("put", "write") and op.answer["created"]
        if (
            op.kind in EXISTING
            or (op.kind in ("put", "write") and not made)
            or (op.kind == "drop" and op.answer["deleted"])
        ):
            life.there.append((op, op.sent_at, answered))
        if made or (op.kind == "drop" and not op.answer["deleted"]):
            life.absent.append((op, op.sent_at, answered))
    elif op.status == 404 and answered is not None and op.answer["error"]["code"] == "topic_not_found":
        life.absent.append((op, op.sent_at, answered))
    if op.refused:
        return
    if op.kind == "drop" and not (op.ok and not op.answer["deleted"]):
        life.drops.append((op.sent_at, line.settled(op)))
    if (
        (op.kind == "put" and not (op.ok and not op.answer["created"]))
        or (op.kind == "write" and may_create(op))
        or (op.kind == "begin" and op.request.get("create") is not False)
    ):
        life.makers.append((op.sent_at, line.settled(op)))


def _note_watch(lives: dict[str, ExistenceLog], op: Op) -> None:
    if op.answered_at is None:
        return
    if op.ok:
        for topic in op.answer["topics"]:
            lives.setdefault(topic, ExistenceLog()).there.append((op, op.sent_at, op.answered_at))
    elif op.status == 404:
        topic = op.answer["error"]["detail"]["topic"]
        lives.setdefault(topic, ExistenceLog()).absent.append((op, op.sent_at, op.answered_at))


def _note_router(lives: dict[str, ExistenceLog], lines: dict[str, Timeline], op: Op) -> None:
    """A router creates its topics. One that is refused, or undone later, removes them again."""
    if not may_have_made(op):
        return
    for topic in (op.request["source"], op.request["dest"]):
        if is_pattern(topic):
            continue
        life = lives.setdefault(topic, ExistenceLog())
        span = op.sent_at, lines[topic].settled(op)
        life.makers.append(span)
        if op.ok:
            assert op.answered_at is not None
            life.there.append((op, op.sent_at, op.answered_at))
        else:
            life.drops.append(span)


def _note_list(lives: dict[str, ExistenceLog], op: Op) -> None:
    """A complete list has all names with its prefix."""
    assert op.answered_at is not None
    names = {row["topic"] for row in op.answer["topics"]}
    for name in names:
        lives.setdefault(name, ExistenceLog()).there.append((op, op.sent_at, op.answered_at))
    if op.request.get("cursor"):
        return
    until = max(names, default="") if op.answer.get("next_cursor") else None
    prefix = op.request.get("prefix") or ""
    for name, life in lives.items():
        if name.startswith(prefix) and name not in names and (until is None or name < until):
            life.absent.append((op, op.sent_at, op.answered_at))


def check_life(topic: str, life: ExistenceLog, problems: list[Problem]) -> None:
    """Between an answer that shows one state and a later one that shows the other there must be a change."""
    # An op that created the topic shows both: it did not exist before, and exists now.
    made = [(op, s, a) for op, s, a in life.absent if op.ok and op.kind in ("put", "write", "put_router")]
    dropped = [(op, s, a) for op, s, a in life.there if op.kind in ("drop", "drop_router")]
    _contradictions(
        topic, [*life.there, *made], life.absent, life.drops, "is not there", problems, skip=dropped
    )
    if life.there and not life.makers:
        problems.append(Problem("existence", topic, f"never created: {name_of(life.there[0][0])}"))
        return
    _contradictions(topic, [*life.absent, *dropped], life.there, life.makers, "is there", problems, skip=made)


def _contradictions(
    topic: str,
    before: list[tuple[Op, int, int]],
    after: list[tuple[Op, int, int]],
    reasons: list[tuple[int, int]],
    text: str,
    problems: list[Problem],
    skip: list[tuple[Op, int, int]],
) -> None:
    """`before` contradicts `after`; something between the two must have changed it."""
    skipped = {id(op) for op, _, _ in skip}
    told = sorted((row for row in before if id(row[0]) not in skipped), key=lambda row: row[2])
    answers = [row[2] for row in told]
    # The latest `sent` of all that were answered by then: a change must have settled after that.
    latest: list[tuple[int, Op]] = []
    for op, sent, _ in told:
        latest.append(max(latest[-1], (sent, op), key=lambda row: row[0]) if latest else (sent, op))
    for op, sent, answered in after:
        at = bisect_left(answers, sent)
        if not at:
            continue
        since, other = latest[at - 1]
        if not any(start < answered and end > since for start, end in reasons):
            problems.append(
                Problem("existence", topic, f"it {text} for {name_of(op)}, unlike for {name_of(other)}")
            )
