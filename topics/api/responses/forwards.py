"""Responses about forwarding rules, which the HTTP API calls routers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from topics.api.responses.records import Count, NextCursor, Performance

PREDICATE: dict[str, Any] = {
    "type": "array",
    "prefixItems": [{"const": "tag"}, {"enum": ["Eq", "Glob", "Subject"]}, {"type": "string"}],
    "items": False,
    "minItems": 3,
}
# The types cannot express a predicate or a list of predicates.
EchoedFilter = Annotated[
    Any,
    Meta(
        description="A predicate, or a list of which any must match; null: every record.",
        extra_json_schema={"anyOf": [PREDICATE, {"type": "array", "items": PREDICATE}, {"type": "null"}]},
    ),
]
Guarantee = Literal["at_least_once", "exactly_once"]
ForwardedTotal = Annotated[Count, Meta(description="Copies made so far.")]


class _Rule(Struct):
    router: str
    source: Annotated[str, Meta(description="A topic, or a pattern of topic names.")]
    dest: str
    preserve_node: bool
    preserve_tag: bool
    filter: EchoedFilter
    allow_cycle: bool
    guarantee: Guarantee
    performance: Performance


class ForwardPut(_Rule):
    """A router that was created or changed."""

    created: bool


class Forward(_Rule):
    """A router."""

    forwarded_total: ForwardedTotal


class ForwardRow(Struct):
    router: str
    source: str
    dest: str
    guarantee: Guarantee
    forwarded_total: ForwardedTotal


class ForwardList(Struct):
    """Routers, ordered by name."""

    routers: list[ForwardRow]
    performance: Performance
    next_cursor: NextCursor = UNSET


class ForwardDeleted(Struct):
    """`deleted` is false if the router did not exist."""

    router: str
    deleted: bool
    performance: Performance


BODIES: tuple[type[msgspec.Struct], ...] = (ForwardPut, Forward, ForwardList, ForwardDeleted)
