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
from topics.api.config import TOPIC_PATTERN, ConfigBody
from topics.api.fields import U32, U64, U64_MAX, doc, schema

Epoch = Annotated[str, Meta(max_length=64)]  # ours are shorter
Predicate = Annotated[
    str | list[str],
    Meta(
        description='A tag, a prefix with a final `*`, or `["tag", op, value]` with op `Eq`, `Glob` or, for reads, `Subject`.'
    ),
]

NO_DATA = Raw(b"")

TAG_CHARACTERS_MAX = 256
DELETE_SEQS_MAX = 10_000
GROUP_BYTES_MAX = 128
WATCH_TOPICS_MAX = 256  # topics and patterns named in a request
BASE64_PATTERN = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


class RecordBody(msgspec.Struct, gc=False):
    """One record of a write: `data`, or bytes as `data_base64`."""

    data: Annotated[Raw, doc("Any JSON value, `null` included; returned unchanged.")] = NO_DATA
    tag: Annotated[str | None, doc("At most 256 bytes of UTF-8.", maxLength=TAG_CHARACTERS_MAX)] = None
    node: Annotated[
        str | None,
        doc(
            "The writer; at most 128 bytes of UTF-8. Default: `node` of the write.",
            maxLength=limits.NODE_BYTES_MAX,
        ),
    ] = None
    meta: Annotated[
        Raw,
        doc(
            "Small headers: an object of at most 64 keys and 16 KiB of compact JSON.",
            maxProperties=limits.META_KEYS_MAX,
        ),
    ] = NO_DATA  # not `Raw | None`, which msgspec decodes only from null
    ttl_ms: Annotated[
        U64, doc("Time to live of this record; an expired record leaves no tombstone. 0: none.")
    ] = 0
    data_base64: Annotated[
        str | None,
        doc(
            "Bytes instead of `data`, without `meta`; for all records of a write or none.",
            contentEncoding="base64",
            pattern=BASE64_PATTERN,
            maxLength=-(-limits.RECORD_BYTES_MAX // 3) * 4,
        ),
    ] = None


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
    tag: Annotated[str, doc("Exactly this tag.")]
    seq: Annotated[U64, doc("Seq of its newest record; 0: it has none.")]


class WriteBody(msgspec.Struct):
    """A write: all of its records are stored, or none."""

    records: Annotated[
        list[RecordBody],
        doc(
            "1 to 10000; they get consecutive seqs in this order.",
            minItems=1,
            maxItems=limits.BATCH_RECORDS_MAX,
        ),
    ]
    node: Annotated[
        str | None,
        doc("Default `node` of the records; at most 128 bytes of UTF-8.", maxLength=limits.NODE_BYTES_MAX),
    ] = None
    idempotency_key: Annotated[
        str | None,
        doc(
            "1 to 256 bytes of UTF-8; takes precedence over the header `Idempotency-Key`.",
            minLength=1,
            maxLength=limits.KEY_BYTES_MAX,
        ),
    ] = None
    create: Annotated[
        bool | None,
        doc("If the topic does not exist: create it, or answer 404. Default: `config.auto_create`."),
    ] = None
    config: Annotated[
        ConfigBody | None,
        doc("Configuration of the topic if this write creates it; requires the scope `admin`."),
    ] = None
    disable_backpressure: Annotated[
        bool, doc("Do not reject this write under pressure; it waits instead.")
    ] = False
    if_last_seq: Annotated[
        U64 | None, doc("Write only if this is the topic's head; 0: if it has no records yet.")
    ] = None
    if_tag_last_seq: Annotated[TagLastSeq | None, doc("Write only if this is the newest seq of a tag.")] = (
        None
    )
    include_epoch: Annotated[bool, doc("Whether the answer includes the topic's `epoch`.")] = False


class PublishBody(WriteBody, kw_only=True):
    """The `publish` command of a WebSocket."""

    op: str
    topic: str
    request_id: Raw = NO_DATA
    return_seqs: bool = True


class DiffBody(msgspec.Struct):
    """A read of the records after `from_seq`."""

    from_seq: Annotated[U64, doc("Records after this seq.")] = 0
    limit: Annotated[
        U32,
        doc(
            "Maximum number of records. 0 means 256; at most 1000. For frames: at most 1000000, and as many as fit if absent."
        ),
    ] = 0  # 0: 256, or for frames as many as fit
    node: Annotated[str | list[str] | None, doc("Exclude records of these nodes.")] = None
    include_tags: Annotated[bool, doc("Whether records have `$tag`.")] = False
    include_meta: Annotated[bool, doc("Whether records have `meta`.")] = True
    include_data: Annotated[bool, doc("Whether records have `data`.")] = True
    wait_ms: Annotated[U32, doc("How long to wait for a record if there is none; at most 30000.")] = 0
    max_batch_bytes: Annotated[
        U64,
        doc(
            "Maximum record bytes of the page, which has at least one record. 0 means 1 MiB (frames: 8 MiB); at most 8 MiB."
        ),
    ] = 0
    tag: Annotated[Predicate | None, doc("Only records whose tag matches.")] = None
    from_ts: Annotated[
        U64, doc("Only records written at this time or later, in milliseconds since the Unix epoch.")
    ] = 0
    epoch: Annotated[
        Epoch | None,
        doc(
            "The topic's `epoch` when `from_seq` was obtained: if the topic has been deleted and created again since, or its head went back, a tombstone reports it. Without it the cursor is not checked. The answer includes the current one."
        ),
    ] = None
    include_epoch: Annotated[bool, doc("Whether the answer includes the topic's `epoch`.")] = False


class StartBody(msgspec.Struct):
    """Start of a watch of one topic: after a seq, or at the end."""

    from_seq: Annotated[U64, doc("Records after this seq.")] = 0
    tail: Annotated[bool, doc("Only records written from now on; takes precedence over `from_seq`.")] = False
    epoch: Annotated[
        Epoch | None,
        doc(
            "The topic's `epoch` when `from_seq` was obtained: if the topic has been deleted and created again since, or its head went back, a tombstone reports it. Without it the cursor is not checked."
        ),
    ] = None


class WatchBody(msgspec.Struct):
    """A watch: topics by name, or by name patterns."""

    topics: Annotated[
        dict[str, StartBody],
        doc(
            "1 to 256 topic names or name patterns, each with its start. In a pattern the token `*` matches any one token, and a last token `>` one or more; topics created later are included. At most 10000 topics in all.",
            minProperties=1,
            maxProperties=WATCH_TOPICS_MAX,
        ),
    ]
    node: Annotated[str | list[str] | None, doc("Exclude records of these nodes.")] = None
    limit: Annotated[U32, doc("Maximum number of records per event. 0 means 256; at most 1000.")] = 0
    max_batch_bytes: Annotated[
        U64,
        doc("Maximum record bytes per event, which has at least one record. 0 means 1 MiB; at most 8 MiB."),
    ] = 262_144
    heartbeat_ms: Annotated[
        U64, doc("Maximum time between two writes to the stream; clamped to 1000 to 60000.")
    ] = 15_000
    include_data: Annotated[bool, doc("Whether records have `data`.")] = True
    include_meta: Annotated[bool, doc("Whether records have `meta`.")] = True
    include_tags: Annotated[bool, doc("Whether records have `$tag`.")] = False
    consistency: Annotated[
        Literal["eventual", "strong"], doc("`strong`: only records that are synced to disk.")
    ] = "eventual"
    group: Annotated[
        str | None,
        doc(
            "1 to 128 bytes of UTF-8; not together with `node`. Each record is delivered to exactly one member of the group.",
            minLength=1,
            maxLength=GROUP_BYTES_MAX,
        ),
    ] = None
    include_epoch: Annotated[
        bool,
        doc(
            "Whether the answer and the events `record` and `tombstone` include the topic's `epoch`. Implied if an entry has an `epoch`."
        ),
    ] = False


class DeleteBody(msgspec.Struct):
    """A delete of the records that match all of these selectors."""

    before_seq: Annotated[U64 | None, doc("Records with a smaller seq.")] = None
    match: Annotated[Predicate | None, doc("Records whose tag matches.")] = None
    subject: Annotated[
        str | None,
        doc("Records whose tag matches this dotted pattern: `*` matches one token, a final `>` one or more."),
    ] = None
    seqs: Annotated[list[U64] | None, doc("These records; at most 10000.", maxItems=DELETE_SEQS_MAX)] = None
    keep: Annotated[
        U64 | None,
        doc("Number of newest records to keep: in all, or per tag if `match` or `subject` is given."),
    ] = None
    erase: Annotated[bool, doc("Overwrite the bytes on disk before answering.")] = False


# -- queues and consumers ----------------------------------------------------------------------------------

SETTLE_SEQS_MAX = 1000  # per request
REASON_BYTES_MAX = 1024
Reason = Annotated[
    str,
    doc("At most 1024 bytes of UTF-8; stored in the `meta` of the dead letter.", maxLength=REASON_BYTES_MAX),
]
Caller = Annotated[
    str, doc("Name of the caller: 1 to 128 bytes of UTF-8.", minLength=1, maxLength=limits.NODE_BYTES_MAX)
]
Filter = str | list[str | list[str]]  # a predicate, or a list of subject patterns and predicates
# Subject wildcards in a plain string, which is a predicate: there they are ordinary characters and would hardly match any tag.
PATTERN_IN_A_STRING = r"(?:^|\.)(?:>(?![\s\S])|\*\.)"


class ClaimBody(msgspec.Struct):
    """Lease jobs of a queue."""

    node: Caller
    max: Annotated[U32, doc("Maximum number of jobs; clamped to 1 to 1000.")] = 1
    lease_ms: Annotated[
        U64 | None,
        doc("Duration of the leases; clamped to 100 to 86400000. Default: the topic's `lease_ms`."),
    ] = None
    wait_ms: Annotated[U32, doc("How long to wait for a job if there is none; at most 30000.")] = 0


class FetchBody(msgspec.Struct):
    """Fetch records of a consumer. They are leased unless the consumer has `ack: none`."""

    node: Caller
    max: Annotated[U32, doc("Maximum number of records; clamped to 1 to 1000.")] = 1
    max_bytes: Annotated[
        U64,
        doc(
            "Maximum record bytes of the answer, which has at least one record if any is ready. 0 means 1 MiB; at most 8 MiB."
        ),
    ] = 0
    wait_ms: Annotated[U32, doc("How long to wait for a record if there is none; at most 30000.")] = 0
    lease_ms: Annotated[
        U64 | None, doc("Duration of the leases; clamped to 100 to 86400000. Default: that of the consumer.")
    ] = None


class SettleBody(msgspec.Struct, kw_only=True):
    """Leased records to settle. `lease_ids` is checked against `seqs` after decoding."""

    node: Annotated[
        str,
        doc("Holder of the leases: 1 to 128 bytes of UTF-8.", minLength=1, maxLength=limits.NODE_BYTES_MAX),
    ]
    seqs: Annotated[
        list[U64],
        doc("At most 1000. Seqs on which `node` holds no lease are skipped.", maxItems=SETTLE_SEQS_MAX),
    ]
    lease_ids: Annotated[
        list[Annotated[str, schema(pattern="^(lease_[0-9a-f]{1,16})?$")]],
        doc("Empty, or one for each seq: its `lease_id`, or an empty string for any lease."),
    ] = []


class AckBody(SettleBody):
    """Acknowledge records."""


class NackBody(SettleBody, kw_only=True):
    """Return records for redelivery, or move them to the dead letters."""

    delay_ms: Annotated[U64, doc("Delay before the next delivery; at most 86400000.")] = 0
    kind: Annotated[
        Literal["retry", "release", "dead"],
        doc(
            "`retry`: deliver again. `release`: the same, without counting this delivery. `dead`: move to the dead letter topic."
        ),
    ] = "retry"
    reason: Reason = ""


class ExtendBody(SettleBody, kw_only=True):
    """Extend leases: they expire `lease_ms` from now."""

    lease_ms: Annotated[U64, doc("The leases expire this long from now; clamped to 100 to 86400000.")]


class TermBody(SettleBody, kw_only=True):
    """Stop delivering records; they go to the dead letter topic, if there is one."""

    reason: Reason = ""


class PauseBody(msgspec.Struct):
    """Pause a consumer: it delivers nothing until then."""

    until_ts: Annotated[U64, doc("In milliseconds since the Unix epoch; 0: until resumed.")] = 0


class ResetTo(msgspec.Struct):
    """A seq or a time; exactly one of the two."""

    seq: Annotated[U64, doc("Start at this seq.")] | UnsetType = UNSET
    ts: Annotated[U64, doc("Start at the first record written at this time or later.")] | UnsetType = UNSET


class ResetBody(msgspec.Struct):
    """Reset a consumer to another position."""

    to: Annotated[Literal["start", "end"] | ResetTo, doc("The new position.")]
    dry_run: Annotated[bool, doc("Change nothing, and return what would change.")] = False
    epoch: Annotated[
        Epoch | None,
        doc(
            "With a seq: the topic's `epoch` when the seq was obtained. 409 if the seq belongs to another record now."
        ),
    ] = None


# -- forwards ----------------------------------------------------------------------------------------------


class ForwardBody(msgspec.Struct):
    """A rule that copies the records written to one topic into another."""

    source: Annotated[
        str,
        doc(
            "A topic, created if it does not exist; or a name pattern (the token `*` matches any one token, a last token `>` one or more), which includes topics created later and must not match `dest`."
        ),
    ]
    dest: Annotated[
        str, doc("Another topic. All routers into it must have the same `source`.", pattern=TOPIC_PATTERN)
    ]
    preserve_node: Annotated[bool, doc("Whether copies keep the `node` of the record.")] = True
    preserve_tag: Annotated[bool, doc("Whether copies keep the `tag` of the record.")] = True
    create_dest: Annotated[
        bool, doc("Whether to create `dest` if it does not exist; otherwise the answer is 404.")
    ] = True
    filter: Annotated[
        Filter | None,
        doc(
            "Only records whose tag matches: a predicate, or a list of at most 32 subject patterns with a wildcard and predicates in brackets, any of which must match. Each has at most 256 bytes."
        ),
    ] = None
    allow_cycle: Annotated[
        bool, doc("Whether copies may return to their origin; they are forwarded for at most 8 hops.")
    ] = False
    guarantee: Annotated[
        Literal["at_least_once", "exactly_once"],
        doc("`exactly_once`: each copy has its origin in `meta`, and is skipped if the dest already has it."),
    ] = "at_least_once"


# -- transactions ------------------------------------------------------------------------------------------


class BeginBody(msgspec.Struct):
    """Open the transaction of a batch, or get its state."""

    producer: Annotated[
        str,
        doc(
            "Writer of the batches, such as the id of a query: 1 to 256 bytes of UTF-8.",
            minLength=1,
            maxLength=limits.KEY_BYTES_MAX,
        ),
    ]
    batch: Annotated[U64, doc("Number of the batch; a producer commits batches in increasing order.")]
    ttl_ms: Annotated[
        U64, doc("The transaction expires after this long without a call; clamped to 1000 to 604800000.")
    ] = 3_600_000
    create: Annotated[
        bool | None, doc("If the topic does not exist: create it, or answer 404. Default: create it.")
    ] = None


class StageBody(msgspec.Struct):
    """A chunk of a part: records that become visible when the transaction is committed."""

    part: Annotated[
        str,
        doc(
            "Output of one task of the producer, named for example after partition and attempt: 1 to 128 bytes of UTF-8.",
            minLength=1,
            maxLength=limits.TXN_PART_BYTES_MAX,
        ),
    ]
    chunk: Annotated[U32, doc("Number of the chunk within its part, starting at 0.")]
    records: Annotated[
        list[RecordBody], doc("1 to 10000, as in a write.", minItems=1, maxItems=limits.BATCH_RECORDS_MAX)
    ]
    node: Annotated[
        str | None,
        doc("Default `node` of the records; at most 128 bytes of UTF-8.", maxLength=limits.NODE_BYTES_MAX),
    ] = None


class CommitPart(msgspec.Struct):
    part: Annotated[str, doc("Name of the part.", minLength=1, maxLength=limits.TXN_PART_BYTES_MAX)]
    chunks: Annotated[U32, doc("Number of chunks: those with numbers below it are appended, in order.")]
    records: Annotated[U64, doc("Number of records in these chunks.")]


class CommitPartsBody(msgspec.Struct):
    """The parts of the batch, in the order in which they are appended."""

    parts: Annotated[
        list[CommitPart],
        doc(
            "In the order in which they are appended; staged parts that are not listed are discarded.",
            maxItems=limits.TXN_PARTS_MAX,
        ),
    ]
    wait_ms: Annotated[U32, doc("Maximum time to wait for completion; at most 30000.")] = 10_000


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


def beyond_u64(**numbers: int | None) -> str | None:
    """The name of the first number that does not fit into 64 bits, if any."""
    for name, number in numbers.items():
        if number is not None and number > U64_MAX:
            return name
    return None
