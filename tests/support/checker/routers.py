"""Which routers exist, and what answers say about them."""

from __future__ import annotations

from typing import Any

from tests.support.checker.existence import ExistenceLog, check_life
from tests.support.checker.problem import Problem, name_of
from tests.support.checker.rules import Rule, is_pattern
from tests.support.history import History, Op

DEFAULTS: dict[str, Any] = {
    "preserve_node": True,
    "preserve_tag": True,
    "filter": None,
    "allow_cycle": False,
    "guarantee": "at_least_once",
}


def check_routers(history: History, rules: list[Rule], problems: list[Problem]) -> None:
    by_name: dict[str, list[Rule]] = {}
    for rule in rules:
        by_name.setdefault(rule.name, []).append(rule)
    lives = {name: _life(name, found, history.ops) for name, found in by_name.items()}
    for op in history.ops:
        if op.kind == "router" and op.ok and op.topic not in lives:
            problems.append(Problem("existence", op.topic, f"this router was never created: {name_of(op)}"))
        if op.kind in ("put_router", "router") and op.ok:
            _check_form(op, by_name.get(op.topic, []), problems)
        elif op.kind == "drop" and op.ok:
            _check_removed(op, rules, problems)
    for name, life in lives.items():
        check_life(f"router {name}", life, problems)


def _life(name: str, rules: list[Rule], ops: list[Op]) -> ExistenceLog:
    life = ExistenceLog()
    for rule in rules:
        life.makers += [(put.sent, put.settled) for put in rule.puts]
        life.drops += [(end.sent, end.settled) for end in rule.ends]
        # What is started again after a crash may be refused then, and is undone.
        life.drops += [(put.sent, put.settled) for put in rule.puts if not put.certain]
    for op in ops:
        if op.answered_at is None:
            continue
        there: bool | None = None
        if op.kind == "routers" and op.ok:
            there = _is_listed(name, rules, op)
        elif op.topic != name:
            continue
        elif op.kind == "router" and (op.ok or op.status == 404):
            there = op.ok
        elif op.kind == "put_router" and op.ok:
            there = not op.answer["created"]
        elif op.kind == "drop_router" and op.ok:
            there = op.answer["deleted"]
        if there is not None:
            (life.there if there else life.absent).append((op, op.sent_at, op.answered_at))
    return life


def _is_listed(name: str, rules: list[Rule], op: Op) -> bool | None:
    """None: the list does not tell."""
    if any(row["router"] == name for row in op.answer["routers"]):
        return True
    asked = op.request
    if asked.get("cursor") or op.answer.get("next_cursor") or not name.startswith(asked.get("prefix") or ""):
        return None
    wanted = all(
        asked.get("source") in (None, rule.source) and asked.get("dest") in (None, rule.dest)
        for rule in rules
    )
    return False if wanted else None


# -- what answers say ----------------------------------------------------------------------------------------


def _check_form(op: Op, rules: list[Rule], problems: list[Problem]) -> None:
    """A `PUT` answers with its own request, a `GET` with that of some `PUT` that may be in force."""
    assert op.answered_at is not None
    told = {name: op.answer[name] for name in ("source", "dest", *DEFAULTS)}
    if op.kind == "put_router":
        puts = [op.request]
        if op.answer["created"] != (op.status == 201):
            problems.append(Problem("router", op.topic, f"created does not fit the status: {name_of(op)}"))
    else:
        puts = [put.op.request for rule in rules for put in rule.puts_between(op.sent_at, op.answered_at)]
    if not any(told == _form(put) for put in puts):
        problems.append(Problem("router", op.topic, f"{told} was in the answer of {name_of(op)}, of {puts}"))


def _form(put: dict[str, Any]) -> dict[str, Any]:
    form = {name: put.get(name, default) for name, default in DEFAULTS.items()}
    form |= {"source": put["source"], "dest": put["dest"], "filter": long_form(put.get("filter"))}
    return form


def long_form(wanted: Any) -> Any:
    """A filter as in answers."""
    if wanted is None or (isinstance(wanted, list) and wanted[0] == "tag"):
        return wanted
    if isinstance(wanted, str):
        return ["tag", "Glob" if wanted.endswith("*") else "Eq", wanted]
    return [["tag", "Subject", one] if isinstance(one, str) else one for one in wanted]


# -- drops of topics -----------------------------------------------------------------------------------------


def _check_removed(op: Op, rules: list[Rule], problems: list[Problem]) -> None:
    assert op.answered_at is not None
    named = op.answer["routers_removed"]
    mine = [
        rule
        for rule in rules
        if op.topic == rule.dest or (op.topic == rule.source and not is_pattern(rule.source))
    ]
    # Also one that has ended may be named, if the topic's shard did not know of that yet.
    possible = {rule.name for rule in mine if any(put.sent < op.answered_at for put in rule.puts)}
    if len(set(named)) < len(named) or not possible.issuperset(named):
        problems.append(
            Problem("router", op.topic, f"{named} went with it, of {sorted(possible)}: {name_of(op)}")
        )
    for rule in mine if op.answer["deleted"] else ():
        others = [end for end in rule.ends if end.sent != op.sent_at]
        certain = any(
            put.certain
            and put.settled < op.sent_at
            and not any(end.sent < (op.answered_at or 0) and end.settled > put.sent for end in others)
            for put in rule.puts
        )
        if certain and rule.name not in named:
            problems.append(Problem("router", op.topic, f"{rule} is not named: {name_of(op)}: {named}"))
