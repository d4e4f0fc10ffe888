"""The JSON bodies that jobs send about merges and snapshots of cold segments; see `schemas`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from topics.api import limits
from topics.api.requests import U32, U64


class PlanBody(msgspec.Struct):
    """What is worth merging. What is left out has its default."""

    target_bytes: Annotated[
        U64, Meta(description="An output has no more records than fit into this; at most 2 GiB.")
    ] = 1 << 30
    min_garbage: Annotated[
        float,
        Meta(ge=0, le=1, description="Segments of which this share is dead are merged, also one alone."),
    ] = 0.1
    min_segments: Annotated[
        U32, Meta(description="So many neighbours are merged in any case; at least 2.")
    ] = 2
    max_groups: Annotated[
        U32, Meta(description=f"Most outputs of the plan; 1 to {limits.PLAN_GROUPS_MAX}.")
    ] = limits.PLAN_GROUPS_MAX
    lease_ms: Annotated[
        U64,
        Meta(
            description="How long the plan is the caller's alone, unless renewed; clamped to "
            f"{limits.PLAN_LEASE_MS_MIN} to {limits.PLAN_LEASE_MS_MAX}."
        ),
    ] = 60_000
    lease: Annotated[str, Meta(description="The lease that the caller has already, when it asks again.")] = ""


class LeaseBody(msgspec.Struct):
    """Whoever has a plan."""

    lease: Annotated[str, Meta(description="As the plan call gave it.")]


class CommitBody(msgspec.Struct):
    """The outputs are there."""

    lease: Annotated[str, Meta(description="As the plan call gave it.")]
    wait_ms: Annotated[
        U32,
        Meta(description=f"How long to wait for the end before 202; at most {limits.MERGE_WAIT_MS_MAX}."),
    ] = 10_000


class SnapshotBody(msgspec.Struct):
    """How long the files stay."""

    ttl_ms: Annotated[U64, Meta(description=f"Clamped to 1000 to {limits.SNAPSHOT_TTL_MS_MAX}.")] = 3_600_000


REQUESTS: tuple[type[msgspec.Struct], ...] = (PlanBody, LeaseBody, CommitBody, SnapshotBody)
