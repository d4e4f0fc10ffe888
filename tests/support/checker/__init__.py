"""Checks a history: is everything that clients were told compatible with the contract?

The checker knows docs/http/ and the guarantees of the four durability classes, and nothing of the code. It never
reports a legal history: where the order of two things is unknown, both orders are allowed. Its parts:

1. `shapes`: every request and answer has the fields of the contract; unknown ones raise `Unknown`.
2. `timeline`: a topic's life is divided into *segments* by drops and by crashes that affect its class. Several
   segments may form one *era*, in which a seq means one record, and several eras one *instance*, the time between two
   drops. What was in flight during a cut may belong to either side.
3. `ledger`: every record that was acknowledged or shown gets its place, which is a seq of an era.
4. `streams`: what watchers saw is converted into pages, which are checked like pages of reads.
5. `jobs`: leases and settles; `dead_letters`: jobs that were moved after their last delivery.
6. `batches`: a commit of a transaction is a write for all of the above; and what answers say about transactions.
7. `pages`, `counters`, `lookups`, `existence`: each answer is compared with these places.
8. `rules`: which routers there were. What they may copy to a topic is, for all of the above, a write of unknown
   outcome; `copies` checks what must have been copied, and in which order. Sources are checked before their dests. For
   copies in cycles only little can be checked: `cycles`.

`erases` is for tests that also have the files: it returns the bytes that they must not contain any more.
"""

from __future__ import annotations

from tests.support.checker.batches import with_batches
from tests.support.checker.copies import Copies
from tests.support.checker.cycles import check_cycles
from tests.support.checker.dead_letters import check_dead_letters, targets_of
from tests.support.checker.existence import check_existence
from tests.support.checker.jobs import Jobs
from tests.support.checker.problem import Problem
from tests.support.checker.routers import check_routers
from tests.support.checker.rules import ROUTER_KINDS, in_order, is_pattern, may_have_made, rules_of
from tests.support.checker.shapes import Unknown, check_shapes
from tests.support.checker.streams import WatchSessions
from tests.support.checker.timeline import Timeline, make_timeline
from tests.support.checker.topic import check_topic
from tests.support.history import History

__all__ = ["Problem", "Unknown", "assert_ok", "check"]

SHOWN_MAX = 20


def check(history: History) -> list[Problem]:
    """Everything in the history that the contract does not allow."""
    problems = check_shapes(history)
    if problems:
        return problems  # the other rules need complete answers
    history, batches = with_batches(history)
    topics: dict[str, list[int]] = {}
    for number, op in enumerate(history.ops):
        if op.kind == "watch":
            continue
        if op.kind in ROUTER_KINDS:
            if may_have_made(op):
                for name in (op.request["source"], op.request["dest"]):
                    if not is_pattern(name):
                        topics.setdefault(name, []).append(number)
            continue
        if op.kind == "list":
            if op.ok:
                for row in op.answer["topics"]:
                    topics.setdefault(row["topic"], []).append(number)
        else:
            topics.setdefault(op.topic, []).append(number)
    watches = WatchSessions(history, problems)
    watches.follow()
    lines: dict[str, Timeline] = {}
    targets = targets_of(history)
    for name, numbers in topics.items():
        lines[name] = make_timeline(history, name, [history.ops[number] for number in numbers])
    rules = rules_of(history, lines)
    copies = Copies(history, rules, problems)
    sources: dict[str, Jobs] = {}
    names, circular = in_order(topics, rules)
    for name in names:
        ops = [history.ops[number] for number in topics[name]]
        supply = copies.supply(name, lines[name])
        if supply is None:
            circular.add(name)
        elif name not in targets:
            pushed = watches.pushed.get(name, [])
            sources[name] = check_topic(lines[name], ops, pushed, problems, supply, batches.get(name))
            copies.add(name, ops, sources[name])
    copies.check()
    check_cycles(history, circular, rules, problems)
    for name in targets:
        check_dead_letters(history, name, [sources[other] for other in topics if other in sources], problems)
    check_existence(history, watches.pushed, lines, targets, problems)
    check_routers(history, rules, problems)
    return problems


def assert_ok(history: History) -> None:
    problems = check(history)
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems[:SHOWN_MAX])
        more = f"\n… and {len(problems) - SHOWN_MAX} more" if len(problems) > SHOWN_MAX else ""
        raise AssertionError(f"{len(problems)} violations:\n{shown}{more}")
