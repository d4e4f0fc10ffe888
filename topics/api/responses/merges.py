"""The JSON bodies that the server sends about merges and snapshots of cold segments, as types; see `responses`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from topics.api.responses.records import Count, Performance, Seq, TimeMs
from topics.engine.storage.merge_plan_file import PlanGroup

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
ColdDir = Annotated[
    str, Meta(description="Where the server has the cold tier; other paths are relative to it.")
]
TopicId = Annotated[Hex, Meta(description="Names the topic's directory in the cold tier.")]
ManifestNumber = Annotated[int, Meta(ge=1, description="The number of a manifest of this topic.")]


class MergePlan(Struct):
    """Segments to be merged, and a lease on the work. Without anything to do `plan_id` is null and there are no groups."""

    topic: str
    plan_id: Hex | None
    groups: list[PlanGroup]
    performance: Performance
    topic_id: TopicId | UnsetType = UNSET
    lease: Annotated[str, Meta(description="Goes with every further call.")] | UnsetType = UNSET
    lease_ms: Count | UnsetType = UNSET
    delete_epoch: (
        Annotated[Count, Meta(description="The log entry as of which rows are dead.")] | UnsetType
    ) = UNSET
    cold_dir: ColdDir | UnsetType = UNSET
    staging: Annotated[str, Meta(description="Where outputs go.")] | UnsetType = UNSET


class LeaseRenewed(Struct):
    """The lease holds so long from now."""

    lease_ms: Count
    performance: Performance


class MergedOutput(Struct):
    """A segment that took the place of several."""

    group: Count
    name: str
    first_seq: Seq
    next_seq: Seq
    bytes_in: Annotated[Count, Meta(description="Bytes of records before.")]
    bytes_out: Annotated[Count, Meta(description="Bytes of records now.")]
    rows: Count
    live: Count


class UnmergedGroup(Struct):
    """A group that stays as it was."""

    group: Count
    segment: Annotated[str, Meta(description="The one that is damaged, when that is why.")]
    reason: str


class PlanCommitted(Struct):
    """All outputs are published. Of plans before the last 4 only the id is remembered."""

    plan_id: Hex
    state: Literal["committed"]
    manifest: Count
    groups: list[MergedOutput]
    failed: list[UnmergedGroup]
    performance: Performance


class PlanCommitting(Struct):
    """Outputs are being compared; ask again."""

    plan_id: Hex
    state: Literal["committing"]
    progress: Annotated[float, Meta(ge=0, le=1)]
    performance: Performance


class PlanAbandoned(Struct):
    """The plan is forgotten, and its staging is empty."""

    plan_id: Hex
    state: Literal["abandoned"]
    performance: Performance


class PlanState(Struct):
    """A plan that there is."""

    plan_id: Hex
    groups: Count
    bytes: Annotated[Count, Meta(description="Of the records of all inputs.")]
    leased_until_ms: TimeMs | None
    state: Literal["planned", "committing"]


class MergeState(Struct):
    """What is going on with a topic's cold segments."""

    plan: PlanState | None
    retired_segments: Annotated[Count, Meta(description="Replaced ones that still have files.")]
    retired_bytes: Count
    snapshots: Annotated[Count, Meta(description="Pins that have not ended.")]
    manifest: ManifestNumber | None
    committed: Annotated[list[Hex], Meta(description="Plans that were committed, the newest last.")]
    performance: Performance


class SnapshotPinned(Struct):
    """A manifest as of now, whose files stay until the end of the pin."""

    snapshot_id: Hex
    expires_at_ms: TimeMs
    cold_dir: ColdDir
    manifest: ManifestNumber
    path: Annotated[str, Meta(description="Where the manifest is.")]
    topic: str
    topic_id: TopicId
    earliest_seq: Seq
    cold_next_seq: Annotated[Seq, Meta(description="From here up to `head_seq` records are read over HTTP.")]
    head_seq: Count
    performance: Performance


class SnapshotRenewed(Struct):
    """The files stay until then."""

    snapshot_id: Hex
    expires_at_ms: TimeMs
    performance: Performance


class SnapshotReleased(Struct):
    """The files may go."""

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
