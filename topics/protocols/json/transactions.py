"""Requests and replies about transactions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from topics.api import limits
from topics.api.errors import BatchTooLarge, InvalidRequest, TransactionNotFound
from topics.api.requests import BeginBody, CommitPartsBody, StageBody
from topics.api.responses import transactions
from topics.engine.commands import topics as cmd
from topics.engine.commands import transactions as txc
from topics.link import wire
from topics.protocols.json.bodies import BodyType, check_u64, read_body
from topics.protocols.json.count_bound import CountBound
from topics.protocols.json.replies import json_reply, spent
from topics.protocols.json.requests import bound_records, check_count, read_records

_ID = re.compile(r"[0-9a-f]{16}")

_begin = BodyType(BeginBody)
_stage = BodyType(StageBody)
_commit = BodyType(CommitPartsBody)
_parts = CountBound("parts", limits.TXN_PARTS_MAX)

Reader: TypeAlias = Callable[[str, wire.Request, wire.Args], tuple[cmd.Command, Any]]


def read_begin(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    body: BeginBody = read_body(_begin, request)
    check_u64(batch=body.batch, ttl_ms=body.ttl_ms)
    _check_name("producer", body.producer, limits.KEY_BYTES_MAX)
    return txc.BeginTransaction(topic, body.producer, body.batch, body.ttl_ms, body.create), None


def read_stage(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    bound_records(request)
    body: StageBody = read_body(_stage, request)
    txn = _txn_id(topic, args)
    _check_name("part", body.part, limits.TXN_PART_BYTES_MAX)
    check_count(len(body.records))
    records = read_records(body.records, request.body, body.node)
    return txc.StageChunk(topic, txn, body.part, body.chunk, records), None


def read_commit(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    if _parts.is_exceeded(request.body):
        raise BatchTooLarge(
            f"more than {_parts.maximum} parts in one commit", parts=_parts.maximum + 1, max=_parts.maximum
        )
    body: CommitPartsBody = read_body(_commit, request)
    txn = _txn_id(topic, args)
    for part in body.parts:
        _check_name("part", part.part, limits.TXN_PART_BYTES_MAX)
    parts = [(part.part, part.chunks, part.records) for part in body.parts]
    return txc.CommitTransaction(topic, txn, parts, min(body.wait_ms, limits.DIFF_WAIT_MS_MAX)), None


def read_abort(topic: str, request: wire.Request, args: wire.Args) -> tuple[cmd.Command, Any]:
    return txc.AbortTransaction(topic, _txn_id(topic, args)), None


def _txn_id(topic: str, args: wire.Args) -> int:
    if _ID.fullmatch(args.txn) is None:
        raise TransactionNotFound(topic, args.txn[:64])
    return int(args.txn, 16)


def _check_name(field: str, name: str, bytes_max: int) -> None:
    if not 0 < len(name.encode()) <= bytes_max:
        raise InvalidRequest(f"{field} must have 1 to {bytes_max} bytes")


READERS: dict[int, Reader] = {
    wire.TXN_BEGIN: read_begin,
    wire.TXN_STAGE: read_stage,
    wire.TXN_COMMIT: read_commit,
    wire.TXN_ABORT: read_abort,
}


def render(op: int, result: object, total_ms: float) -> wire.Result:
    if isinstance(result, txc.ChunkStaged):
        return json_reply(
            transactions.ChunkStaged(
                topic=result.topic,
                part=result.part,
                chunk=result.chunk,
                records=result.records,
                repeated=result.repeated,
                performance=spent(total_ms),
            )
        )
    assert isinstance(result, txc.TransactionState)
    txn = f"{result.txn:016x}"
    if result.state == "aborted":
        return json_reply(
            transactions.TransactionAborted(
                topic=result.topic, txn=txn, state=result.state, performance=spent(total_ms)
            )
        )
    is_committing = result.state == "committing"
    body = transactions.Transaction(
        topic=result.topic,
        txn=txn,
        state=result.state,
        first_seq=result.first_seq or None,
        last_seq=result.last_seq or None,
        count=result.count,
        progress=round(result.progress, 4) if is_committing else None,
        performance=spent(total_ms),
    )
    # A client repeats an unfinished commit. A repeated begin is OK.
    return json_reply(body, wire.UNFINISHED if op == wire.TXN_COMMIT and is_committing else wire.OK)
