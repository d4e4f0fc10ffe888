"""Responses about merges and snapshots of cold segments."""

from __future__ import annotations

from typing import Annotated

from topics.api.fields import Answer, Count, Seq, TimeMs, doc, one_of, schema
from topics.api.responses.records import Performance
from topics.engine.storage.merge_plan_file import PlanGroup

Hex = Annotated[str, schema(pattern="^[0-9a-f]{16}$")]
ColdDir = Annotated[str, doc("Directory of the cold tier on the server; other paths are relative to it.")]
TopicId = Annotated[Hex, doc("Name of the topic's directory in the cold tier.")]
ManifestNumber = Annotated[int, doc("Number of a manifest of this topic.", minimum=1)]


class MergePlan(Answer, kw_only=True):
    """Segments to merge, and a lease on the plan. If there is nothing to merge, `plan_id` is null and `groups` is empty."""

    topic: str
    plan_id: Hex | None
    groups: list[PlanGroup]
    performance: Performance
    topic_id: TopicId | None = None
    lease: Annotated[str, doc("Required by all further calls about the plan.")] | None = None
    lease_ms: Count | None = None
    delete_epoch: Annotated[Count, doc("Log entry up to which deletes are included.")] | None = None
    cold_dir: ColdDir | None = None
    staging: Annotated[str, doc("Directory for the outputs.")] | None = None


class LeaseRenewed(Answer, kw_only=True):
    """The lease expires `lease_ms` from now."""

    lease_ms: Count
    performance: Performance


class MergedOutput(Answer, kw_only=True):
    """A segment that replaced several."""

    group: Count
    name: str
    first_seq: Seq
    next_seq: Seq
    bytes_in: Annotated[Count, doc("Record bytes of the inputs.")]
    bytes_out: Annotated[Count, doc("Record bytes of the output.")]
    rows: Count
    live: Count


class UnmergedGroup(Answer, kw_only=True):
    """A group that was not merged."""

    group: Count
    segment: Annotated[str, doc("The damaged segment, if that is the reason.")]
    reason: str


class PlanCommitted(Answer, kw_only=True):
    """All outputs are published. Results are remembered for the last 4 plans, ids for more."""

    plan_id: Hex
    state: Annotated[str, one_of("committed")]
    manifest: Count
    groups: list[MergedOutput]
    failed: list[UnmergedGroup]
    performance: Performance


class PlanCommitting(Answer, kw_only=True):
    """The outputs are being verified; ask again."""

    plan_id: Hex
    state: Annotated[str, one_of("committing")]
    progress: Annotated[float, schema(minimum=0, maximum=1)]
    performance: Performance


class PlanAbandoned(Answer, kw_only=True):
    """The plan is dropped, and its staging directory is empty."""

    plan_id: Hex
    state: Annotated[str, one_of("abandoned")]
    performance: Performance


class PlanState(Answer, kw_only=True):
    """The current plan."""

    plan_id: Hex
    groups: Count
    bytes: Annotated[Count, doc("Record bytes of all inputs.")]
    leased_until_ms: TimeMs | None
    state: Annotated[str, one_of("planned", "committing")]


class MergeState(Answer, kw_only=True):
    """State of a topic's cold segments."""

    plan: PlanState | None
    retired_segments: Annotated[Count, doc("Replaced segments that still have files.")]
    retired_bytes: Count
    snapshots: Annotated[Count, doc("Active snapshots.")]
    manifest: ManifestNumber | None
    committed: Annotated[list[Hex], doc("Committed plans, newest last.")]
    performance: Performance


class SnapshotPinned(Answer, kw_only=True):
    """The current manifest, whose files are kept until the snapshot expires."""

    snapshot_id: Hex
    expires_at_ms: TimeMs
    cold_dir: ColdDir
    manifest: ManifestNumber
    path: Annotated[str, doc("Path of the manifest.")]
    topic: str
    topic_id: TopicId
    earliest_seq: Seq
    cold_next_seq: Annotated[
        Seq, doc("Records from this seq to `head_seq` are not cold: read them over HTTP.")
    ]
    head_seq: Count
    performance: Performance


class SnapshotRenewed(Answer, kw_only=True):
    """The files are kept until `expires_at_ms`."""

    snapshot_id: Hex
    expires_at_ms: TimeMs
    performance: Performance


class SnapshotReleased(Answer, kw_only=True):
    """The files may be removed."""

    snapshot_id: Hex
    released: bool
    performance: Performance
