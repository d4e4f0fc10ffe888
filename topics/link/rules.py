"""Requests of clients about forwarding rules, and their results, as the catalog gives and takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from topics.engine.commands.forwards import Forward


@dataclass(slots=True)
class RuleSpec:
    """A rule as requested by a client, without uid and state."""

    forward: Forward
    create_dest: bool
    prefixes: tuple[str, ...] | None


@dataclass(slots=True)
class RulePut:
    forward: Forward
    created: bool


@dataclass(slots=True)
class RuleFound:
    forward: Forward
    total: int  # of its copies
    timed_out: bool  # the dest had not caught up


@dataclass(slots=True)
class RuleList:
    """More rules than `page_size` mean that there is another page. A rule without a total is being deleted."""

    forwards: list[Forward]
    totals: dict[int, int]
    page_size: int


@dataclass(slots=True)
class RuleDropped:
    name: str
    deleted: bool


RuleResult: TypeAlias = RulePut | RuleFound | RuleList | RuleDropped
