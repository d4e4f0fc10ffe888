"""JSON request bodies, as msgspec types that decode and validate them.

Decoding is strict: an integer must be a JSON integer, and `null` is accepted only where the type has `| None`. For unknown
fields see `unknown_fields`. Limits that types cannot express (the maximum of a u64, lengths in bytes) are checked after
decoding. The OpenAPI document is generated from these types.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from topics.api import limits

U64_MAX = 2**64 - 1
U32_MAX = 2**32 - 1

# msgspec's own bounds are int64; `beyond_u64` checks the rest.
U64 = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})]
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Epoch = Annotated[str, Meta(max_length=64)]  # ours are shorter
Predicate = Annotated[
    str | list[str],
    Meta(
        description='A tag, a prefix with a final `*`, or `["tag", op, value]` with op `Eq`, `Glob` or, for reads, `Subject`.'
    ),
]

NO_DATA = Raw(b"")


class ConfigBody(msgspec.Struct, frozen=True):
    """Configuration of a topic. Omitted fields have their defaults; a PUT replaces all of it."""

    type: Literal["log", "queue"] = "log"
    ttl_ms: U64 = 0
    cap_records: U64 = 0
    cap_bytes: U64 = 0
    discard: Literal["old", "reject"] = "old"
    durable: bool = False
    durability: Literal["ephemeral", "memory", "disk", "fsync"] | None = None
    priority: I32 | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: U64 = 120_000
    dedupe_node: bool = True
    lease_ms: U64 = 30_000
    claim_jitter_ms: U64 = 0
    max_deliveries: U64 = 0
    dead_letter: str | None = None
    leases_durable: bool = False
    cap_per_tag: U64 = 0
    max_record_bytes: U64 = 0
    retention: Literal["limits", "interest", "work_queue"] = "limits"


class RecordBody(msgspec.Struct, gc=False):
    """One record of a write: `data`, or bytes as `data_base64`."""

    data: Raw = NO_DATA
    tag: str | None = None
    node: str | None = None
    meta: Raw = NO_DATA  # not `Raw | None`, which msgspec decodes only from null
    ttl_ms: U64 = 0
    data_base64: str | None = None


class PlainRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A record with `data` and perhaps a tag, the common case: a body of such records takes a faster decoder."""

    data: Raw
    tag: str | msgspec.UnsetType | None = msgspec.UNSET


class PlainWrite(msgspec.Struct, forbid_unknown_fields=True):
    records: list[PlainRecord]


class RecordsBody(msgspec.Struct):
    """Part of the records of a body that is decoded in slices."""

    records: list[RecordBody]


class TagLastSeq(msgspec.Struct):
    tag: str
    seq: U64


class WriteBody(msgspec.Struct):
    """A write: all of its records are stored, or none."""

    records: list[RecordBody]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: ConfigBody | None = None
    disable_backpressure: bool = False
    if_last_seq: U64 | None = None
    if_tag_last_seq: TagLastSeq | None = None
    include_epoch: bool = False


class PublishBody(WriteBody, kw_only=True):
    """The `publish` command of a WebSocket."""

    op: str
    topic: str
    request_id: Raw = NO_DATA
    return_seqs: bool = True


class DiffBody(msgspec.Struct):
    """A read of the records after `from_seq`."""

    from_seq: U64 = 0
    limit: U32 = 0  # 0: 256, or for frames as many as fit
    node: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    include_data: bool = True
    wait_ms: U32 = 0
    max_batch_bytes: U64 = 0
    tag: Predicate | None = None
    from_ts: U64 = 0
    epoch: Epoch | None = None
    include_epoch: bool = False


class StartBody(msgspec.Struct):
    """Start of a watch of one topic: after a seq, or at the end."""

    from_seq: U64 = 0
    tail: bool = False
    epoch: Epoch | None = None


class WatchBody(msgspec.Struct):
    """A watch: topics by name, or by name patterns."""

    topics: dict[str, StartBody]
    node: str | list[str] | None = None
    limit: U32 = 0
    max_batch_bytes: U64 = 262_144
    heartbeat_ms: U64 = 15_000
    include_data: bool = True
    include_meta: bool = True
    include_tags: bool = False
    consistency: Literal["eventual", "strong"] = "eventual"
    group: str | None = None
    include_epoch: bool = False


class DeleteBody(msgspec.Struct):
    """A delete of the records that match all of these selectors."""

    before_seq: U64 | None = None
    match: Predicate | None = None
    subject: str | None = None
    seqs: list[U64] | None = None
    keep: U64 | None = None
    erase: bool = False


# -- queues and consumers ----------------------------------------------------------------------------------

LeaseIds = list[str]
Filter = str | list[str | list[str]]  # a predicate, or a list of subject patterns and predicates
# Subject wildcards in a plain string, which is a predicate: there they are ordinary characters and would hardly match any tag.
PATTERN_IN_A_STRING = r"(?:^|\.)(?:>(?![\s\S])|\*\.)"


class ClaimBody(msgspec.Struct):
    """Lease jobs of a queue."""

    node: str
    max: U32 = 1
    lease_ms: U64 | None = None
    wait_ms: U32 = 0


class FetchBody(msgspec.Struct):
    """Fetch records of a consumer. They are leased unless the consumer has `ack: none`."""

    node: str
    max: U32 = 1
    max_bytes: U64 = 0
    wait_ms: U32 = 0
    lease_ms: U64 | None = None


class AckBody(msgspec.Struct):
    """Acknowledge records."""

    node: str
    seqs: list[U64]
    lease_ids: LeaseIds = []


class NackBody(msgspec.Struct):
    """Return records for redelivery, or move them to the dead letters."""

    node: str
    seqs: list[U64]
    lease_ids: LeaseIds = []
    delay_ms: U64 = 0
    kind: Literal["retry", "release", "dead"] = "retry"
    reason: str = ""


class ExtendBody(msgspec.Struct):
    """Extend leases: they expire `lease_ms` from now."""

    node: str
    seqs: list[U64]
    lease_ms: U64
    lease_ids: LeaseIds = []


class TermBody(msgspec.Struct):
    """Stop delivering records; they go to the dead letter topic, if there is one."""

    node: str
    seqs: list[U64]
    lease_ids: LeaseIds = []
    reason: str = ""


class DeliverFrom(msgspec.Struct):
    """Start at a seq or at a time; exactly one of the two."""

    from_seq: U64 | UnsetType = UNSET
    from_ts: U64 | UnsetType = UNSET


class ConsumerBody(msgspec.Struct):
    """Configuration of a consumer. Omitted fields have their defaults; a PUT replaces all of it."""

    ack: Literal["none", "all", "explicit"] = "explicit"
    ack_wait_ms: U64 = 30_000
    max_deliver: U32 = 0
    backoff_ms: list[U64] = []
    filter: Filter | None = None
    deliver: Literal["all", "new", "last", "last_per_tag"] | DeliverFrom = "all"
    max_ack_pending: U64 = 1000
    max_waiting: U64 = 512
    headers_only: bool = False
    dead_letter: str | None = None
    inactive_ttl_ms: U64 = 0
    replay: Literal["instant", "original"] = "instant"


class PauseBody(msgspec.Struct):
    """Pause a consumer: it delivers nothing until then."""

    until_ts: U64 = 0


class ResetTo(msgspec.Struct):
    """A seq or a time; exactly one of the two."""

    seq: U64 | UnsetType = UNSET
    ts: U64 | UnsetType = UNSET


class ResetBody(msgspec.Struct):
    """Reset a consumer to another position."""

    to: Literal["start", "end"] | ResetTo
    dry_run: bool = False
    epoch: Epoch | None = None


# -- forwards ----------------------------------------------------------------------------------------------


class ForwardBody(msgspec.Struct):
    """A rule that copies the records written to one topic into another."""

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Filter | None = None
    allow_cycle: bool = False
    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"


# -- transactions ------------------------------------------------------------------------------------------


class BeginBody(msgspec.Struct):
    """Open the transaction of a batch, or get its state."""

    producer: str
    batch: U64
    ttl_ms: U64 = 3_600_000
    create: bool | None = None


class StageBody(msgspec.Struct):
    """A chunk of a part: records that become visible when the transaction is committed."""

    part: str
    chunk: U32
    records: list[RecordBody]
    node: str | None = None


class CommitPart(msgspec.Struct):
    part: str
    chunks: U32
    records: U64


class CommitPartsBody(msgspec.Struct):
    """The parts of the batch, in the order in which they are appended."""

    parts: list[CommitPart]
    wait_ms: U32 = 10_000


# -- merges and snapshots of cold segments -------------------------------------------------------------------


class PlanBody(msgspec.Struct):
    """Parameters of a merge plan. Omitted fields have their defaults."""

    target_bytes: Annotated[
        U64, Meta(description="Maximum record bytes of an output segment; at most 2 GiB.")
    ] = 1 << 30
    min_garbage: Annotated[
        float,
        Meta(
            ge=0, le=1, description="A segment with at least this share of dead bytes is merged, even alone."
        ),
    ] = 0.1
    min_segments: Annotated[
        U32, Meta(description="Number of adjacent segments that are merged in any case; at least 2.")
    ] = 2
    max_groups: Annotated[
        U32, Meta(description=f"Maximum number of outputs of the plan; 1 to {limits.PLAN_GROUPS_MAX}.")
    ] = limits.PLAN_GROUPS_MAX
    lease_ms: Annotated[
        U64,
        Meta(
            description="Duration of the exclusive lease on the plan, unless renewed; clamped to "
            f"{limits.PLAN_LEASE_MS_MIN} to {limits.PLAN_LEASE_MS_MAX}."
        ),
    ] = 60_000
    lease: Annotated[
        str, Meta(description="The caller's current lease, when it requests the plan again.")
    ] = ""


class LeaseBody(msgspec.Struct):
    """The lease on a plan."""

    lease: Annotated[str, Meta(description="The lease returned with the plan.")]


class CommitBody(msgspec.Struct):
    """Publish the outputs of a plan."""

    lease: Annotated[str, Meta(description="The lease returned with the plan.")]
    wait_ms: Annotated[
        U32,
        Meta(
            description="Maximum time to wait for completion before the answer is 202; "
            f"at most {limits.MERGE_WAIT_MS_MAX}."
        ),
    ] = 10_000


class SnapshotBody(msgspec.Struct):
    """Lifetime of a snapshot."""

    ttl_ms: Annotated[
        U64,
        Meta(description=f"How long the files are kept; clamped to 1000 to {limits.SNAPSHOT_TTL_MS_MAX}."),
    ] = 3_600_000


MERGE_REQUESTS: tuple[type[msgspec.Struct], ...] = (PlanBody, LeaseBody, CommitBody, SnapshotBody)


def beyond_u64(**numbers: int | None) -> str | None:
    """The name of the first number that does not fit into 64 bits, if any."""
    for name, number in numbers.items():
        if number is not None and number > U64_MAX:
            return name
    return None
