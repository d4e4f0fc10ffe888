"""Topics that copies reach in cycles, or in two forms: a record is there more than once, and its copies cannot be
told apart.

So only this is checked: a client wrote it, to this topic or to one that it is copied from, and there are not more
copies than a cycle allows.
"""

from __future__ import annotations

from collections import Counter

from tests.support.checker.ledger import Sent, Write, data_key, shown_key
from tests.support.checker.problem import Problem, name_of
from tests.support.checker.rules import Rule
from tests.support.history import History, Op

HOPS_MAX = 8


def check_cycles(history: History, topics: set[str], rules: list[Rule], problems: list[Problem]) -> None:
    for topic in sorted(topics):
        written = _written(history, _upstream(topic, history, rules))
        lossy = sum(event.kind in ("kill", "power", "stop") for event in history.events)
        for op in history.ops:
            if op.kind == "diff" and op.ok and op.topic == topic:
                _check_page(op, written, (HOPS_MAX + 1) * (1 + lossy), problems)


def _upstream(topic: str, history: History, rules: list[Rule]) -> set[str]:
    """A topic, and all that it has copies of."""
    names = {op.topic for op in history.ops if op.kind == "write"}
    found = [topic]
    for name in found:
        for rule in rules:
            if rule.dest == name:
                found += [other for other in sorted(names) if rule.copies(other) and other not in found]
                if rule.source not in found:
                    found.append(rule.source)
    return set(found)


def _written(history: History, topics: set[str]) -> dict[bytes, list[Op]]:
    found: dict[bytes, list[Op]] = {}
    for op in history.ops:
        if op.kind == "write" and op.topic in topics and not op.refused:
            write = Write(op)
            for i, record in enumerate(op.request["records"]):
                found.setdefault(data_key(Sent(write, i, record, None)), []).append(op)
    return found


def _check_page(page: Op, written: dict[bytes, list[Op]], most: int, problems: list[Problem]) -> None:
    counts: Counter[bytes] = Counter()
    for record in page.answer["records"]:
        if "data" not in record:
            continue
        key = shown_key(record)
        counts[key] += 1
        if not any(op.sent_at < (page.answered_at or 0) for op in written.get(key, [])):
            problems.append(Problem("invented", page.topic, f"{record} was never written: {name_of(page)}"))
    for key, count in counts.items():
        if key in written and count > most * len(written[key]):
            problems.append(Problem("ring", page.topic, f"{key!r} is there {count} times: {name_of(page)}"))
