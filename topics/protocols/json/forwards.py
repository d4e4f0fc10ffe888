"""Requests and replies about routers: decoding, checks that do not need the catalog, and encoding.

Checks have the order of the HTTP contract: the body, the prefixes of the API key, then names.
"""

from __future__ import annotations

import re
from typing import Any

from topics.api.errors import Forbidden, InvalidRequest
from topics.api.requests import ForwardBody
from topics.api.responses import forwards
from topics.engine.commands.forwards import Forward, TagOp, is_pattern, source_matches, source_prefix
from topics.engine.core.subjects import TagMatch, parse_pattern
from topics.engine.shard.appends import NAME
from topics.link import wire
from topics.link.rules import RuleDropped, RuleFound, RuleList, RulePut, RuleResult, RuleSpec
from topics.protocols.json.bodies import BodyType, read_body
from topics.protocols.json.consumer_requests import FILTERS_MAX
from topics.protocols.json.replies import cursor_text, json_reply, spent
from topics.protocols.json.requests import TAG_BYTES_MAX, make_match, tag_match

FORWARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}\Z")
PATTERN_BYTES_MAX = 255
_TOKEN = re.compile(r"[A-Za-z0-9_:-]+|\*|>")

_body = BodyType(ForwardBody)


def read_spec(request: wire.Request, args: wire.Args) -> RuleSpec:
    body: ForwardBody = read_body(_body, request)
    filters = _filters(body.filter)
    prefixes = wire.prefixes_of(args)
    for topic, start in ((body.source, _start_of(body.source)), (body.dest, body.dest)):
        if prefixes is not None and not start.startswith(prefixes):
            raise Forbidden(f"this key may not use the topic {topic!r}", topic=topic)
    _check_names(args.forward, body.source, body.dest)
    forward = Forward(
        0,
        args.forward,
        body.source,
        body.dest,
        body.preserve_node,
        body.preserve_tag,
        filters,
        _is_list(body.filter),
        body.allow_cycle,
        body.guarantee,
    )
    return RuleSpec(forward, body.create_dest, prefixes)


def _start_of(source: str) -> str:
    """Like `source_prefix`; empty if the pattern turns out to be invalid."""
    try:
        return source_prefix(source)
    except ValueError:
        return ""


# -- names -------------------------------------------------------------------------------------------------


def _check_names(name: str, source: str, dest: str) -> None:
    if FORWARD_NAME.match(name) is None:
        raise InvalidRequest(
            f"{name[:64]!r} is not a valid router name: 1 to 255 letters, digits and any of . _ : > -, starting with a letter or digit"
        )
    if is_pattern(source):
        _check_pattern(source)
    else:
        _check_topic("source", source)
    _check_topic("dest", dest)
    if source == dest:
        raise InvalidRequest("source and dest must differ")
    if source_matches(source, dest):
        raise InvalidRequest(f"the pattern {source!r} matches its own dest {dest!r}, which would be a cycle")


def _check_topic(field: str, name: str) -> None:
    if NAME.match(name) is None:
        raise InvalidRequest(f"{field} is {name[:64]!r}, which is not a valid topic name")


def _check_pattern(source: str) -> None:
    tokens = source.split(".")
    if len(source.encode()) > PATTERN_BYTES_MAX or not all(map(_TOKEN.fullmatch, tokens)):
        raise InvalidRequest(
            f"source is {source[:64]!r}, which is neither a topic name nor a pattern; a wildcard must be a whole token: a.*, a.>"
        )
    try:
        parse_pattern(source.encode())
    except ValueError as error:
        raise InvalidRequest(f"source: {error}") from None


# -- filters -----------------------------------------------------------------------------------------------


def _is_list(wanted: str | list[str | list[str]] | None) -> bool:
    """Whether it is a list of alternatives rather than one predicate."""
    return isinstance(wanted, list) and not _is_predicate(wanted)


def _is_predicate(wanted: list[str | list[str]]) -> bool:
    return bool(wanted) and wanted[0] == "tag"


def _filters(wanted: str | list[str | list[str]] | None) -> tuple[tuple[TagOp, str], ...]:
    if wanted is None:
        return ()
    if isinstance(wanted, str):
        found = [tag_match(wanted, subjects=True)]
    elif _is_predicate(wanted):
        found = [_predicate(wanted)]
    elif wanted:
        found = [_entry(entry) for entry in wanted]
    else:
        raise InvalidRequest("an empty filter matches nothing; omit it to match everything")
    if len(found) > FILTERS_MAX:
        raise InvalidRequest(f"{len(found)} entries in filter; send at most {FILTERS_MAX}")
    if any(len(match.value) > TAG_BYTES_MAX for match in found):
        raise InvalidRequest(f"an entry of filter is longer than {TAG_BYTES_MAX} bytes")
    return tuple((match.op, match.value.decode()) for match in found)


def _predicate(wanted: list[str | list[str]]) -> TagMatch:
    words = [word for word in wanted if isinstance(word, str)]
    return tag_match(words if len(words) == len(wanted) else [], subjects=True)


def _entry(entry: str | list[str]) -> TagMatch:
    """An entry of a list. A string must have a wildcard: `["node", "Eq", "x"]` is a wrong predicate, not three patterns."""
    if not isinstance(entry, str):
        return tag_match(entry, subjects=True)
    match = make_match("Subject", entry)
    if match.literal is not None:
        raise InvalidRequest(
            f'in a list, {entry[:64]!r} must be a subject pattern with a wildcard, or a predicate in brackets: ["tag", "Eq", "a"]'
        )
    return match


# -- replies -----------------------------------------------------------------------------------------------


def _rule(forward: Forward) -> dict[str, Any]:
    predicates = [("tag", op, value) for op, value in forward.filter]
    return {
        "router": forward.name,
        "source": forward.source,
        "dest": forward.dest,
        "preserve_node": forward.preserve_node,
        "preserve_tag": forward.preserve_tag,
        "filter": predicates if forward.filter_is_list else predicates[0] if predicates else None,
        "allow_cycle": forward.allow_cycle,
        "guarantee": forward.guarantee,
    }


def render(result: RuleResult, total_ms: float) -> wire.Result:
    performance = spent(total_ms)
    match result:
        case RulePut(rule, created):
            code = wire.CREATED if created else wire.OK
            return json_reply(
                forwards.RouterPut(**_rule(rule), created=created, performance=performance), code
            )
        case RuleFound(rule, total, timed_out):
            if timed_out:
                performance["catch_up_timed_out"] = True
            return json_reply(
                forwards.RouterState(**_rule(rule), forwarded_total=total, performance=performance)
            )
        case RuleDropped(name, deleted):
            return json_reply(forwards.RouterDeleted(router=name, deleted=deleted, performance=performance))
        case RuleList(rules, totals, page_size):
            rows = [
                forwards.RouterRow(
                    router=rule.name,
                    source=rule.source,
                    dest=rule.dest,
                    guarantee=rule.guarantee,
                    forwarded_total=totals[rule.uid],
                )
                for rule in rules[:page_size]
                if rule.uid in totals
            ]
            last = rules[page_size - 1].name.encode() if len(rules) > page_size else None
            return json_reply(
                forwards.RouterList(routers=rows, next_cursor=cursor_text(last), performance=performance)
            )
