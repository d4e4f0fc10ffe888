"""The JSON bodies that clients send, as the types that decode and check them.

msgspec is strict where the contract is: an integer is a JSON integer, `null` passes only where `| None` says so. For unknown
fields see `unknown_fields`. What types cannot say (the upper bound of a u64, lengths in bytes) is checked after decoding.
The OpenAPI document is made from these same types.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from topics.api import limits

U64_MAX = 2**64 - 1
U32_MAX = 2**32 - 1

# msgspec's own bounds are int64; `within_u64` looks at the rest.
U64 = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})]
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Epoch = Annotated[str, Meta(max_length=64)]  # ours are shorter
Predicate = Annotated[
    str | list[str],
    Meta(
        description='A tag, a prefix and a final `*`, or `["tag", op, value]` with op `Eq`, `Glob` or, where it reads, `Subject`.'
    ),
]

NO_DATA = Raw(b"")


class ConfigBody(msgspec.Struct, frozen=True):
    """A topic's configuration. What is left out has its default; a PUT replaces the whole."""

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
    meta: Raw = NO_DATA  # of `Raw | None` msgspec would take null alone
    ttl_ms: U64 = 0
    data_base64: str | None = None


class BareRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A record of data alone, as most are: a body made of these is read without looking for anything else."""

    data: Raw


class BareWrite(msgspec.Struct, forbid_unknown_fields=True):
    records: list[BareRecord]


class RecordsBody(msgspec.Struct):
    """Some records of a body that is read in parts."""

    records: list[RecordBody]


class TagLastSeq(msgspec.Struct):
    tag: str
    seq: U64


class WriteBody(msgspec.Struct):
    """A write: all of its records or none."""

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
    """A write over a WebSocket: the whole command."""

    op: str
    topic: str
    request_id: Raw = NO_DATA
    return_seqs: bool = True


class DiffBody(msgspec.Struct):
    """A read: what comes after `from_seq`."""

    from_seq: U64 = 0
    limit: U32 = 0  # 256, or for frames as many as fit
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
    """Where a watcher of one topic begins: after a seq, or at the end."""

    from_seq: U64 = 0
    tail: bool = False
    epoch: Epoch | None = None


class WatchBody(msgspec.Struct):
    """What a stream follows: topics by name, or by patterns of names."""

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
    """A delete of records; the selectors are joined by AND."""

    before_seq: U64 | None = None
    match: Predicate | None = None
    subject: str | None = None
    seqs: list[U64] | None = None
    keep: U64 | None = None
    erase: bool = False


# -- queues and consumers ----------------------------------------------------------------------------------

LeaseIds = list[str]
Filter = str | list[str | list[str]]  # a predicate, or a list of subject patterns and predicates
# A plain string is a predicate, to which these are plain characters: it would wait for a tag that nobody ever writes.
PATTERN_IN_A_STRING = r"(?:^|\.)(?:>(?![\s\S])|\*\.)"


class ClaimBody(msgspec.Struct):
    """Take jobs of a queue under leases."""

    node: str
    max: U32 = 1
    lease_ms: U64 | None = None
    wait_ms: U32 = 0


class FetchBody(msgspec.Struct):
    """Take records of a consumer, under leases unless it needs no acks."""

    node: str
    max: U32 = 1
    max_bytes: U64 = 0
    wait_ms: U32 = 0
    lease_ms: U64 | None = None


class AckBody(msgspec.Struct):
    """These are done."""

    node: str
    seqs: list[U64]
    lease_ids: LeaseIds = []


class NackBody(msgspec.Struct):
    """These are not done: somebody else is to have them, now or later, or nobody."""

    node: str
    seqs: list[U64]
    lease_ids: LeaseIds = []
    delay_ms: U64 = 0
    kind: Literal["retry", "release", "dead"] = "retry"
    reason: str = ""


class ExtendBody(msgspec.Struct):
    """These take longer: their leases end so long from now."""

    node: str
    seqs: list[U64]
    lease_ms: U64
    lease_ids: LeaseIds = []


class TermBody(msgspec.Struct):
    """These are never to be delivered again: they go to the dead letter topic, if there is one."""

    node: str
    seqs: list[U64]
    lease_ids: LeaseIds = []
    reason: str = ""


class DeliverFrom(msgspec.Struct):
    """From a seq or from a time on; one of the two."""

    from_seq: U64 | UnsetType = UNSET
    from_ts: U64 | UnsetType = UNSET


class ConsumerBody(msgspec.Struct):
    """A consumer's configuration. What is left out has its default; a PUT replaces the whole."""

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
    """Nothing is handed out until then."""

    until_ts: U64 = 0


class ResetTo(msgspec.Struct):
    """A seq or a time; one of the two."""

    seq: U64 | UnsetType = UNSET
    ts: U64 | UnsetType = UNSET


class ResetBody(msgspec.Struct):
    """Where a consumer begins again."""

    to: Literal["start", "end"] | ResetTo
    dry_run: bool = False
    epoch: Epoch | None = None


# -- forwards ----------------------------------------------------------------------------------------------


class ForwardBody(msgspec.Struct):
    """A rule that copies what is written to one topic into another."""

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
    """Open the transaction of a batch, or learn what became of it."""

    producer: str
    batch: U64
    ttl_ms: U64 = 3_600_000
    create: bool | None = None


class StageBody(msgspec.Struct):
    """A chunk of a part: records that appear when the transaction is committed."""

    part: str
    chunk: U32
    records: list[RecordBody]
    node: str | None = None


class CommitPart(msgspec.Struct):
    part: str
    chunks: U32
    records: U64


class CommitPartsBody(msgspec.Struct):
    """What the batch is made of, in the order in which it appears."""

    parts: list[CommitPart]
    wait_ms: U32 = 10_000


# -- merges and snapshots of cold segments -------------------------------------------------------------------


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


MERGE_REQUESTS: tuple[type[msgspec.Struct], ...] = (PlanBody, LeaseBody, CommitBody, SnapshotBody)


def within_u64(**numbers: int | None) -> str | None:
    """The name of the first number beyond 64 bits, if one is."""
    for name, number in numbers.items():
        if number is not None and number > U64_MAX:
            return name
    return None
