"""Routers in a history: when each certainly existed, when it may have existed, and which records it copies.

A rule is a router's name, source, dest and what it preserves. It may be created and ended many times, and its filter
and its guarantee may change. Everything that ends it is an *end*: a `DELETE` of the router, a drop of its dest, and a
drop of its source unless that is a pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.checker.shapes import Match, match_of, subject_matches
from tests.support.checker.timeline import FOREVER, Timeline
from tests.support.history import History, Op

ROUTER_KINDS = ("put_router", "router", "routers", "drop_router")


def is_pattern(source: str) -> bool:
    return "*" in source or ">" in source


def filter_of(wanted: Any) -> Match | None:
    """Which tags a router's filter matches; None: every record."""
    if wanted is None:
        return None
    if isinstance(wanted, str) or wanted[0] == "tag":
        return match_of(wanted)
    matches = [match_of(["tag", "Subject", one] if isinstance(one, str) else one) for one in wanted]
    return lambda tag: any(match is not None and match(tag) for match in matches)


@dataclass(slots=True)
class Put:
    """A `PUT` that was, or may have been, executed."""

    op: Op
    sent: int
    settled: int
    certain: bool
    match: Match | None
    exact: bool

    def lets_through(self, tag: str | None) -> bool:
        return self.match is None or self.match(tag)


@dataclass(slots=True)
class End:
    sent: int
    settled: int
    certain: bool
    copies_until: int  # later requests belong to a later life of the rule


@dataclass(slots=True, eq=False)
class Rule:
    name: str
    source: str
    dest: str
    preserve_tag: bool
    preserve_node: bool
    puts: list[Put] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} ({self.source} to {self.dest})"

    def copies(self, topic: str) -> bool:
        if is_pattern(self.source):
            return subject_matches(self.source.split("."), topic.split("."))
        return topic == self.source

    # -- when it exists ------------------------------------------------------------------------------------

    def there_since(self, until: int) -> int:
        """The first answered `PUT` since which it certainly exists up to that moment; FOREVER: there is none."""
        for put in self.puts:
            if put.certain and not any(e.sent < until and e.settled > put.sent for e in self.ends):
                return put.settled
        return FOREVER

    def may_copy(self, sent: int, last: int) -> tuple[int, int] | None:
        """From when to when a record may be copied that was written between these moments; None: never."""
        found: tuple[int, int] | None = None
        for put in self.puts:
            if put.sent > last:
                continue
            ends = [e.copies_until for e in self.ends if e.certain and e.sent > put.settled]
            end = min(ends, default=FOREVER)
            if end < sent:
                continue
            first, until = max(sent, put.sent), end
            found = (first, until) if found is None else (min(first, found[0]), max(until, found[1]))
        return found

    # -- its configuration ---------------------------------------------------------------------------------

    def puts_between(self, start: int, end: int) -> Iterator[Put]:
        """All that can have been in force between these moments."""
        for put in self.puts:
            replaced = any(w.certain and w.sent > put.settled and w.settled < start for w in self.puts)
            if put.sent < end and not replaced:
                yield put

    def may_let_through(self, tag: str | None, start: int) -> bool:
        return any(put.lets_through(tag) for put in self.puts_between(start, FOREVER))

    def lets_through(self, tag: str | None, start: int, end: int) -> bool:
        return all(put.lets_through(tag) for put in self.puts_between(start, end))


def may_have_made(op: Op) -> bool:
    """Whether a `PUT` may have created topics, if only for a moment: one that is refused by then leaves none."""
    return op.kind == "put_router" and op.status not in (400, 403, 404, 409)


def rules_of(history: History, lines: dict[str, Timeline]) -> list[Rule]:
    rules: dict[tuple[str, str, str, bool, bool], Rule] = {}
    for op in history.ops:
        if op.kind != "put_router" or op.refused:
            continue
        put = op.request
        way = (
            op.topic,
            put["source"],
            put["dest"],
            put.get("preserve_tag", True),
            put.get("preserve_node", True),
        )
        rule = rules.setdefault(way, Rule(*way))
        exact = put.get("guarantee") == "exactly_once"
        rule.puts.append(
            Put(op, op.sent_at, lines[put["dest"]].settled(op), op.ok, filter_of(put.get("filter")), exact)
        )
    for rule in rules.values():
        rule.ends = list(_ends(rule, history.ops, lines))
    return list(rules.values())


def _ends(rule: Rule, ops: Iterable[Op], lines: dict[str, Timeline]) -> Iterator[End]:
    for op in ops:
        if op.kind == "drop_router" and op.topic == rule.name:
            line = lines[rule.dest]
        elif op.kind == "drop" and op.topic in (rule.dest, rule.source):
            line = lines[op.topic]
        else:
            continue
        if not op.refused and not (op.ok and not op.answer["deleted"]):
            until = line.settled(op)
            # A dest that is created again has nothing to do with it: its records came another way.
            yield End(op.sent_at, until, op.ok, op.sent_at if op.topic == rule.dest else until)


# -- the order of topics -------------------------------------------------------------------------------------


def in_order(topics: Iterable[str], rules: list[Rule]) -> tuple[list[str], set[str]]:
    """Sources before their dests; and topics in or after a cycle, for which there is no such order."""
    names = list(topics)
    into: dict[str, set[str]] = {
        name: {source for rule in rules if rule.dest == name for source in names if rule.copies(source)}
        for name in names
    }
    found: list[str] = []
    done: set[str] = set()
    while True:
        ready = [name for name in names if name not in done and into[name] <= done]
        if not ready:
            return found, set(names) - done
        found += ready
        done.update(ready)
