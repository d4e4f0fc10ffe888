"""Responses about merges and snapshots of cold segments."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from topics.api.responses.records import Count, Performance, Seq, TimeMs
from topics.engine.storage.merge_plan_file import PlanGroup

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
ColdDir = Annotated[
    str, Meta(description="Directory of the cold tier on the server; other paths are relative to it.")
]
TopicId = Annotated[Hex, Meta(description="Name of the topic's directory in the cold tier.")]
ManifestNumber = Annotated[int, Meta(ge=1, description="Number of a manifest of this topic.")]


class MergePlan(Struct):
    """Segments to merge, and a lease on the plan. If there is nothing to merge, `plan_id` is null and `groups` is empty."""

    topic: str
    plan_id: Hex | None
    groups: list[PlanGroup]
    performance: Performance
    topic_id: TopicId | UnsetType = UNSET
    lease: Annotated[str, Meta(description="Required by all further calls about the plan.")] | UnsetType = (
        UNSET
    )
    lease_ms: Count | UnsetType = UNSET
    delete_epoch: (
        Annotated[Count, Meta(description="Log entry up to which deletes are included.")] | UnsetType
    ) = UNSET
    cold_dir: ColdDir | UnsetType = UNSET
    staging: Annotated[str, Meta(description="Directory for the outputs.")] | UnsetType = UNSET


class LeaseRenewed(Struct):
    """The lease expires `lease_ms` from now."""

    lease_ms: Count
    performance: Performance


class MergedOutput(Struct):
    """A segment that replaced several."""

    group: Count
    name: str
    first_seq: Seq
    next_seq: Seq
    bytes_in: Annotated[Count, Meta(description="Record bytes of the inputs.")]
    bytes_out: Annotated[Count, Meta(description="Record bytes of the output.")]
    rows: Count
    live: Count


class UnmergedGroup(Struct):
    """A group that was not merged."""

    group: Count
    segment: Annotated[str, Meta(description="The damaged segment, if that is the reason.")]
    reason: str


class PlanCommitted(Struct):
    """All outputs are published. Results are remembered for the last 4 plans, ids for more."""

    plan_id: Hex
    state: Literal["committed"]
    manifest: Count
    groups: list[MergedOutput]
    failed: list[UnmergedGroup]
    performance: Performance


class PlanCommitting(Struct):
    """The outputs are being verified; ask again."""

    plan_id: Hex
    state: Literal["committing"]
    progress: Annotated[float, Meta(ge=0, le=1)]
    performance: Performance


class PlanAbandoned(Struct):
    """The plan is dropped, and its staging directory is empty."""

    plan_id: Hex
    state: Literal["abandoned"]
    performance: Performance


class PlanState(Struct):
    """The current plan."""

    plan_id: Hex
    groups: Count
    bytes: Annotated[Count, Meta(description="Record bytes of all inputs.")]
    leased_until_ms: TimeMs | None
    state: Literal["planned", "committing"]


class MergeState(Struct):
    """State of a topic's cold segments."""

    plan: PlanState | None
    retired_segments: Annotated[Count, Meta(description="Replaced segments that still have files.")]
    retired_bytes: Count
    snapshots: Annotated[Count, Meta(description="Active snapshots.")]
    manifest: ManifestNumber | None
    committed: Annotated[list[Hex], Meta(description="Committed plans, newest last.")]
    performance: Performance


class SnapshotPinned(Struct):
    """The current manifest, whose files are kept until the snapshot expires."""

    snapshot_id: Hex
    expires_at_ms: TimeMs
    cold_dir: ColdDir
    manifest: ManifestNumber
    path: Annotated[str, Meta(description="Path of the manifest.")]
    topic: str
    topic_id: TopicId
    earliest_seq: Seq
    cold_next_seq: Annotated[
        Seq, Meta(description="Records from this seq to `head_seq` are not cold: read them over HTTP.")
    ]
    head_seq: Count
    performance: Performance


class SnapshotRenewed(Struct):
    """The files are kept until `expires_at_ms`."""

    snapshot_id: Hex
    expires_at_ms: TimeMs
    performance: Performance


class SnapshotReleased(Struct):
    """The files may be removed."""

    snapshot_id: Hex
    released: bool
    performance: Performance


BODIES: tuple[type[msgspec.Struct], ...] = (
    MergePlan,
    LeaseRenewed,
    PlanCommitted,
    PlanCommitting,
    PlanAbandoned,
    MergeState,
    SnapshotPinned,
    SnapshotRenewed,
    SnapshotReleased,
)
