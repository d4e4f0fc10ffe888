"""Decoding and validation of requests about queues and consumers: bytes to engine commands.

A request without a consumer name refers to the queue's own consumer. Checks have the order of the HTTP contract; those
that need only the body are here, others (existence of topic and consumer, a claim's `node`) in the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from topics.api import limits
from topics.api.config import (
    BACKOFF_STEPS_MAX,
    CONSUMER_CLAMPED,
    CONSUMER_U64,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    ConsumerBody,
    ConsumerConfig,
    DeliverFrom,
    TagOp,
    clamp,
)
from topics.api.errors import BatchTooLarge, Forbidden, InvalidRequest
from topics.api.fields import U64_MAX
from topics.api.requests import (
    PATTERN_IN_A_STRING,
    REASON_BYTES_MAX,
    SETTLE_SEQS_MAX,
    AckBody,
    ClaimBody,
    ExtendBody,
    FetchBody,
    NackBody,
    PauseBody,
    ResetBody,
    ResetTo,
    SettleBody,
    TermBody,
)
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.core.subjects import TagMatch
from topics.link import wire
from topics.protocols.json.bodies import BodyType, check_u64, read_body
from topics.protocols.json.requests import TAG_BYTES_MAX, make_match, tag_match

DELAY_MS_MAX = 86_400_000
FILTERS_MAX = 32
INACTIVE_TTL_MS_MIN, INACTIVE_TTL_MS_MAX = 1000, 30 * 86_400_000

_LEASE_ID = re.compile(r"lease_[0-9a-f]{1,16}")
_PATTERN_IN_A_STRING = re.compile(PATTERN_IN_A_STRING)
_NO_SUCH_LEASE = U64_MAX  # replaces `lease_0`, which never exists: 0 would mean "any lease"

_claim = BodyType(ClaimBody)
_fetch = BodyType(FetchBody)
_ack = BodyType(AckBody)
_nack = BodyType(NackBody)
_extend = BodyType(ExtendBody)
_term = BodyType(TermBody)
_consumer = BodyType(ConsumerBody)
_pause = BodyType(PauseBody)
_reset = BodyType(ResetBody)

Reader: TypeAlias = Callable[[str, wire.Request, wire.Args], tuple[cmd.Command, Any]]


# -- claims and acks ---------------------------------------------------------------------------------------


def read_claim(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    body: ClaimBody | FetchBody = read_body(_fetch if args.consumer else _claim, request)
    check_u64(lease_ms=body.lease_ms)
    command = con.Claim(
        topic,
        args.consumer,
        body.node.encode(),
        min(max(body.max, 1), limits.CLAIM_MAX),
        clamped_lease_ms(body.lease_ms) if body.lease_ms is not None else 0,
        wait_ms=min(body.wait_ms, limits.DIFF_WAIT_MS_MAX),
    )
    if isinstance(body, FetchBody):
        check_u64(max_bytes=body.max_bytes)
        command.max_bytes = min(body.max_bytes or limits.DIFF_BYTES_DEFAULT, limits.DIFF_BYTES_MAX)
    return command, None


def clamped_lease_ms(lease_ms: int) -> int:
    return min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)


def read_ack(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    return _settle(topic, "ack", read_body(_ack, request), args), None


def read_nack(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    body: NackBody = read_body(_nack, request)
    check_u64(delay_ms=body.delay_ms)
    command = _settle(topic, "nack", body, args)
    command.delay_ms = min(body.delay_ms, DELAY_MS_MAX)
    command.nack = body.kind
    command.reason = _checked_reason(body.reason)
    return command, None


def read_extend(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    body: ExtendBody = read_body(_extend, request)
    check_u64(lease_ms=body.lease_ms)
    command = _settle(topic, "extend", body, args)
    command.lease_ms = clamped_lease_ms(body.lease_ms)
    return command, None


def read_term(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    body: TermBody = read_body(_term, request)
    command = _settle(topic, "term", body, args)
    command.reason = _checked_reason(body.reason)
    return command, None


def _settle(topic: str, kind: con.SettleKind, body: SettleBody, args: wire.Args) -> con.Settle:
    seqs = body.seqs
    if seqs and max(seqs) > U64_MAX:
        raise InvalidRequest("seqs does not fit into 64 bits")
    lease_ids = [_lease_id(text) for text in body.lease_ids[: SETTLE_SEQS_MAX + 1]]  # more are refused below
    node = body.node.encode()
    if not 0 < len(node) <= limits.NODE_BYTES_MAX:
        raise InvalidRequest(f"node must have 1 to {limits.NODE_BYTES_MAX} bytes")
    if len(seqs) > SETTLE_SEQS_MAX:
        raise BatchTooLarge(
            f"{len(seqs)} seqs in one call; send at most {SETTLE_SEQS_MAX}",
            seqs=len(seqs),
            max=SETTLE_SEQS_MAX,
        )
    if lease_ids and len(lease_ids) != len(seqs):
        raise InvalidRequest(f"{len(lease_ids)} lease_ids for {len(seqs)} seqs; send one for each, or none")
    return con.Settle(topic, kind, node, seqs, lease_ids, args.consumer)


def _lease_id(text: str) -> int:
    if not text:
        return 0
    if _LEASE_ID.fullmatch(text) is None:
        raise InvalidRequest(f"{text[:64]!r} is not a lease id; send one from a claim, or an empty string")
    return int(text[6:], 16) or _NO_SUCH_LEASE


def _checked_reason(reason: str) -> str:
    if len(reason.encode()) > REASON_BYTES_MAX:
        raise InvalidRequest(f"reason may have at most {REASON_BYTES_MAX} bytes")
    return reason


# -- named consumers ---------------------------------------------------------------------------------------


def read_put(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    body: ConsumerBody = read_body(_consumer, request) if len(request.body) else ConsumerBody()
    target, prefixes = body.dead_letter, args.prefixes
    if target is not None and prefixes is not None and not target.startswith(tuple(prefixes)):
        raise Forbidden(f"this key may not use the topic {target!r}", topic=target)
    return con.PutConsumer(topic, args.consumer, consumer_config(body)), None


def consumer_config(body: ConsumerBody) -> ConsumerConfig:
    check_u64(
        **{name: getattr(body, name) for name in CONSUMER_U64}, backoff_ms=max(body.backoff_ms, default=0)
    )
    if len(body.backoff_ms) > BACKOFF_STEPS_MAX:
        raise InvalidRequest(f"{len(body.backoff_ms)} steps in backoff_ms; send at most {BACKOFF_STEPS_MAX}")
    settings = clamp(body, CONSUMER_CLAMPED)
    settings["deliver"], settings["deliver_value"] = _delivery(body.deliver)
    settings["backoff_ms"] = tuple(map(clamped_lease_ms, body.backoff_ms))
    settings["filter"] = _checked_filter(body.filter)
    if body.inactive_ttl_ms:
        settings["inactive_ttl_ms"] = min(max(body.inactive_ttl_ms, INACTIVE_TTL_MS_MIN), INACTIVE_TTL_MS_MAX)
    return ConsumerConfig(**settings)


def _delivery(
    deliver: Literal["all", "new", "last", "last_per_tag"] | DeliverFrom,
) -> tuple[Literal["all", "new", "last", "last_per_tag", "from_seq", "from_ts"], int]:
    if not isinstance(deliver, DeliverFrom):
        return deliver, 0
    seq, ts = deliver.from_seq, deliver.from_ts
    if isinstance(seq, int) and not isinstance(ts, int):
        check_u64(from_seq=seq)
        return "from_seq", seq
    if isinstance(ts, int) and not isinstance(seq, int):
        check_u64(from_ts=ts)
        return "from_ts", ts
    raise InvalidRequest("deliver as an object needs either from_seq or from_ts")


def _filters(wanted: str | list[str | list[str]] | None) -> list[TagMatch]:
    """A predicate, or a list of alternatives. `["tag", op, value]` is always a predicate."""
    if wanted is None:
        return []
    if isinstance(wanted, str):
        if _PATTERN_IN_A_STRING.search(wanted):
            raise InvalidRequest(
                f'filter {wanted[:64]!r} looks like a subject pattern; send a list, ["a.>"], or ["tag", "Eq", value] for that exact tag'
            )
        return [tag_match(wanted, subjects=True)]
    words = [word for word in wanted if isinstance(word, str)]
    if len(words) == len(wanted) == 3 and words[0] == "tag" and words[1] in ("Eq", "Glob", "Subject"):
        return [tag_match(words, subjects=True)]
    return [
        make_match("Subject", entry) if isinstance(entry, str) else tag_match(entry, subjects=True)
        for entry in wanted
    ]


def _checked_filter(wanted: str | list[str | list[str]] | None) -> tuple[tuple[TagOp, str], ...]:
    matches = _filters(wanted)
    if len(matches) > FILTERS_MAX:
        raise InvalidRequest(f"{len(matches)} entries in filter; send at most {FILTERS_MAX}")
    if any(len(match.value) > TAG_BYTES_MAX for match in matches):
        raise InvalidRequest(f"an entry of filter is longer than {TAG_BYTES_MAX} bytes")
    return tuple((match.op, match.value.decode()) for match in matches)


def read_pause(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    if request.flags & wire.RESUME:
        return con.PauseConsumer(topic, args.consumer, False), None
    body: PauseBody = read_body(_pause, request) if len(request.body) else PauseBody()
    check_u64(until_ts=body.until_ts)
    return con.PauseConsumer(topic, args.consumer, True, body.until_ts), None


def read_reset(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    body: ResetBody = read_body(_reset, request)
    to, value = _target(body.to)
    if body.epoch is not None and to != "seq":
        raise InvalidRequest("epoch is only allowed with a seq to reset to")
    return con.ResetConsumer(topic, args.consumer, to, value, body.dry_run, body.epoch), None


def _target(to: Literal["start", "end"] | ResetTo) -> tuple[Literal["start", "end", "seq", "ts"], int]:
    if not isinstance(to, ResetTo):
        return to, 0
    seq, ts = to.seq, to.ts
    if isinstance(seq, int) and not isinstance(ts, int):
        check_u64(seq=seq)
        return "seq", seq
    if isinstance(ts, int) and not isinstance(seq, int):
        check_u64(ts=ts)
        return "ts", ts
    raise InvalidRequest("to as an object needs either seq or ts")


def _read_get(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    return con.GetConsumer(topic, args.consumer), None


def _read_list(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    return con.ListConsumers(topic, args.after, args.page_size), args.page_size


def _read_drop(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    return con.DropConsumer(topic, args.consumer), None


READERS: dict[int, Reader] = {
    wire.CLAIM: read_claim,
    wire.ACK: read_ack,
    wire.NACK: read_nack,
    wire.EXTEND: read_extend,
    wire.TERM: read_term,
    wire.PUT_CONSUMER: read_put,
    wire.GET_CONSUMER: _read_get,
    wire.LIST_CONSUMERS: _read_list,
    wire.DROP_CONSUMER: _read_drop,
    wire.PAUSE_CONSUMER: read_pause,
    wire.RESET_CONSUMER: read_reset,
}
