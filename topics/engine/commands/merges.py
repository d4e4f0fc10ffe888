"""Commands on merges and snapshots of the cold segments of a topic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from topics.api.limits import PLAN_GROUPS_MAX


class MergeParameters(msgspec.Struct, frozen=True):
    """Which adjacent segments are worth merging. Stored in the plan file."""

    target_bytes: int = 1 << 30
    min_garbage: float = 0.1
    min_segments: int = 2
    max_groups: int = PLAN_GROUPS_MAX


@dataclass(slots=True)
class PlanMerge:
    """Make a plan, or return the existing one. `lease`: of a caller that asks again."""

    topic: str
    parameters: MergeParameters = field(default_factory=MergeParameters)
    lease_ms: int = 60_000
    lease: str = ""


@dataclass(slots=True)
class RenewPlan:
    topic: str
    plan_id: str
    lease: str


@dataclass(slots=True)
class CommitPlan:
    topic: str
    plan_id: str
    lease: str
    wait_ms: int = 10_000


@dataclass(slots=True)
class AbandonPlan:
    topic: str
    plan_id: str
    lease: str


@dataclass(slots=True)
class GetMerges:
    topic: str


@dataclass(slots=True)
class PinSnapshot:
    topic: str
    ttl_ms: int = 3_600_000


@dataclass(slots=True)
class RenewSnapshot:
    topic: str
    snapshot_id: str
    ttl_ms: int = 3_600_000


@dataclass(slots=True)
class ReleaseSnapshot:
    topic: str
    snapshot_id: str


@dataclass(slots=True)
class MergeReply:
    """Body of the response. `is_final` is false while a commit is running."""

    body: dict[str, object]
    is_final: bool = True


MergeCommand: TypeAlias = (
    PlanMerge
    | RenewPlan
    | CommitPlan
    | AbandonPlan
    | GetMerges
    | PinSnapshot
    | RenewSnapshot
    | ReleaseSnapshot
)
