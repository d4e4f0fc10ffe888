"""Requests and replies about merges and snapshots of cold segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from topics.api import limits
from topics.api.errors import InvalidRequest
from topics.api.requests import CommitBody, LeaseBody, PlanBody, SnapshotBody
from topics.engine.commands import merges as mrg
from topics.engine.commands.merges import MergeParameters
from topics.link import wire
from topics.protocols.json.bodies import BodyType, check_u64, read_body
from topics.protocols.json.replies import spent

LEASE_CHARACTERS_MAX = 64
SNAPSHOT_TTL_MS_MIN = 1000

_plan = BodyType(PlanBody)
_lease = BodyType(LeaseBody)
_commit = BodyType(CommitBody)
_snapshot = BodyType(SnapshotBody)

Reader: TypeAlias = Callable[[str, wire.Request, wire.Args], mrg.MergeCommand]


def read(topic: str, request: wire.Request, args: wire.Args) -> tuple[mrg.MergeCommand, Any]:
    return _READERS[args.call](topic, request, args), None


def _read_plan(topic: str, request: wire.Request, args: wire.Args) -> mrg.MergeCommand:
    body: PlanBody = read_body(_plan, request) if len(request.body) else PlanBody()
    check_u64(target_bytes=body.target_bytes, lease_ms=body.lease_ms)
    parameters = MergeParameters(
        min(max(body.target_bytes, 1), limits.MERGE_BYTES_MAX),
        body.min_garbage,
        max(body.min_segments, 2),
        min(max(body.max_groups, 1), limits.PLAN_GROUPS_MAX),
    )
    lease_ms = min(max(body.lease_ms, limits.PLAN_LEASE_MS_MIN), limits.PLAN_LEASE_MS_MAX)
    return mrg.PlanMerge(topic, parameters, lease_ms, _checked_lease(body.lease))


def _read_renew(topic: str, request: wire.Request, args: wire.Args) -> mrg.MergeCommand:
    body: LeaseBody = read_body(_lease, request)
    return mrg.RenewPlan(topic, args.named, _checked_lease(body.lease))


def _read_commit(topic: str, request: wire.Request, args: wire.Args) -> mrg.MergeCommand:
    body: CommitBody = read_body(_commit, request)
    wait_ms = min(body.wait_ms, limits.MERGE_WAIT_MS_MAX)
    return mrg.CommitPlan(topic, args.named, _checked_lease(body.lease), wait_ms)


def _read_abandon(topic: str, request: wire.Request, args: wire.Args) -> mrg.MergeCommand:
    body: LeaseBody = read_body(_lease, request)
    return mrg.AbandonPlan(topic, args.named, _checked_lease(body.lease))


def _read_pin(topic: str, request: wire.Request, args: wire.Args) -> mrg.MergeCommand:
    return mrg.PinSnapshot(topic, _ttl_ms(request))


def _read_renew_pin(topic: str, request: wire.Request, args: wire.Args) -> mrg.MergeCommand:
    return mrg.RenewSnapshot(topic, args.named, _ttl_ms(request))


def _ttl_ms(request: wire.Request) -> int:
    body: SnapshotBody = read_body(_snapshot, request) if len(request.body) else SnapshotBody()
    check_u64(ttl_ms=body.ttl_ms)
    return min(max(body.ttl_ms, SNAPSHOT_TTL_MS_MIN), limits.SNAPSHOT_TTL_MS_MAX)


def _checked_lease(lease: str) -> str:
    if len(lease) > LEASE_CHARACTERS_MAX:
        raise InvalidRequest("lease is not valid; send the one from the reply to the plan call")
    return lease


_READERS: dict[str, Reader] = {
    "plan": _read_plan,
    "state": lambda topic, request, args: mrg.GetMerges(topic),
    "renew": _read_renew,
    "commit": _read_commit,
    "abandon": _read_abandon,
    "pin": _read_pin,
    "renew_pin": _read_renew_pin,
    "release": lambda topic, request, args: mrg.ReleaseSnapshot(topic, args.named),
}


def rendered(answer: mrg.MergeReply, total_ms: float) -> wire.Result:
    body = answer.body | {"performance": spent(total_ms)}
    return wire.OK if answer.is_final else wire.UNFINISHED, wire.JSON, b"", msgspec.json.encode(body)
