"""Responses about forwarding rules, which the HTTP API calls routers."""

from __future__ import annotations

from typing import Annotated, Any

from topics.api.config import PREDICATE
from topics.api.fields import HIDDEN, Answer, Count, NextCursor, doc, one_of
from topics.api.responses.records import Performance

# The types cannot express a predicate or a list of predicates.
EchoedFilter = Annotated[
    Any,
    doc(
        "A predicate, or a list of which any must match; null: every record.",
        anyOf=[PREDICATE, {"type": "array", "items": PREDICATE}, {"type": "null"}],
    ),
]
Guarantee = Annotated[str, one_of("at_least_once", "exactly_once")]
ForwardedTotal = Annotated[Count, doc("Copies made so far.")]


class Router(Answer, kw_only=True):
    router: str
    source: Annotated[str, doc("A topic, or a pattern of topic names.")]
    dest: str
    preserve_node: bool
    preserve_tag: bool
    filter: EchoedFilter
    allow_cycle: bool
    guarantee: Guarantee
    created: Annotated[bool, HIDDEN] = False
    forwarded_total: Annotated[int, HIDDEN] = 0
    performance: Performance


class RouterPut(Router, kw_only=True):
    """A router that was created or changed."""

    created: bool


class RouterState(Router, kw_only=True):
    """A router."""

    forwarded_total: ForwardedTotal


class RouterRow(Answer, kw_only=True):
    router: str
    source: str
    dest: str
    guarantee: Guarantee
    forwarded_total: ForwardedTotal


class RouterList(Answer, kw_only=True):
    """Routers, ordered by name."""

    routers: list[RouterRow]
    next_cursor: NextCursor = None
    performance: Performance


class RouterDeleted(Answer, kw_only=True):
    """`deleted` is false if the router did not exist."""

    router: str
    deleted: bool
    performance: Performance
