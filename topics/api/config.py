"""Configuration of topics and consumers, and of the engine.

The one declaration of a setting: its name, type, default, description and range. Stored configurations, requests, responses,
the OpenAPI document and the client take them from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta

from topics.api import limits
from topics.api.fields import ALWAYS, I32, U32, U64, U64_MAX, Count, doc, one_of, schema

TopicType = Literal["log", "queue"]
Durability = Literal["ephemeral", "memory", "disk", "fsync"]
TagOp = Literal["Eq", "Glob", "Subject"]
TOPIC_TYPES, DURABILITIES = get_args(TopicType), get_args(Durability)
TOPIC_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$"

# Left out of responses when it has its default: settings that came later.
IF_SET = Meta(extra={"if_set": True})


def clamped(low: int, high: int) -> Meta:
    """A number outside of this range is set to its nearest end."""
    return Meta(extra={"clamped": (low, high)})


def _in_requests(number: Any) -> Meta:
    """The bounds of a stored number, where it comes in with a request."""
    return Meta(extra={"in_requests": number})


IN_U64, IN_I32 = _in_requests(U64), _in_requests(I32)

LEASE_MS_MIN, LEASE_MS_MAX = 100, 86_400_000
Lease = Annotated[U64, clamped(LEASE_MS_MIN, LEASE_MS_MAX)]


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Configuration of a topic. Every create and config frame stores all of it; an absent field has its default.

    Only requests are checked against the bounds: what is stored must stay readable when they change.
    """

    type: Annotated[TopicType, doc("Fixed when the topic is created.")] = "log"
    ttl_ms: Annotated[int, IN_U64, doc("Records older than this are no longer delivered; 0: no limit.")] = 0
    cap_records: Annotated[int, IN_U64, doc("Maximum number of records to keep; 0: no limit.")] = 0
    cap_bytes: Annotated[int, IN_U64, doc("Maximum number of bytes to keep; 0: no limit.")] = 0
    discard: Annotated[
        Literal["old", "reject"],
        doc("When a cap is reached: drop the oldest records, or reject the write with 422."),
    ] = "old"
    durability: Annotated[
        Durability, doc("When a write is acknowledged. Takes precedence over `durable`.")
    ] = "disk"
    priority: Annotated[int | None, IN_I32, doc("Clamped to -1000 to 1000 when used.")] = None
    auto_priority: Annotated[bool, doc("Derive the priority from recent reads if `priority` is null.")] = True
    auto_create: Annotated[bool, doc("Whether a write without `create` may create the topic.")] = True
    idempotency_window_ms: Annotated[
        int, IN_U64, doc("How long an idempotency key is remembered; 0: not at all.")
    ] = 120_000
    dedupe_node: Annotated[bool, doc("false: readers also get the records of their own node.")] = True
    lease_ms: Annotated[
        int,
        IN_U64,
        clamped(LEASE_MS_MIN, LEASE_MS_MAX),
        doc("Queues. Default duration of a lease; clamped to 100 to 86400000."),
    ] = 30_000
    claim_jitter_ms: Annotated[
        int,
        IN_U64,
        clamped(0, 5_000),
        doc(
            "Queues. Jobs are divided evenly among the claims that arrive within this time; clamped to at most 5000."
        ),
    ] = 0
    max_deliveries: Annotated[
        int,
        IN_U64,
        doc("Queues. Maximum number of deliveries before a job goes to `dead_letter`; 0: no limit."),
    ] = 0
    dead_letter: Annotated[str | None, doc("Queues. Name of another topic.", pattern=TOPIC_PATTERN)] = None
    leases_durable: Annotated[bool, doc("Queues. Whether leases and delivery counts survive a restart.")] = (
        False
    )
    cap_per_tag: Annotated[
        int, IN_U64, IF_SET, doc("Maximum number of records to keep per tag; 0: no limit.")
    ] = 0
    max_record_bytes: Annotated[
        int,
        IN_U64,
        IF_SET,
        doc("Maximum bytes of a record, if below the server's limit; 0: the server's limit."),
    ] = 0
    # A queue's own consumer always deletes what it acks.
    retention: Annotated[
        Literal["limits", "interest", "work_queue"],
        IF_SET,
        doc(
            "When acks of consumers delete records: never (`limits`), once every consumer has acked them (`interest`), or "
            "with the first ack (`work_queue`, whose consumers must not overlap)."
        ),
    ] = "limits"


def marks_of(field: Any) -> list[Meta]:
    """The marks of a field, from the outside in."""
    return [mark for mark in get_args(field.type)[1:] if isinstance(mark, Meta)][::-1]


def _checked(config: type[msgspec.Struct]) -> Any:
    """The same settings with the bounds of requests."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(config):
        kind, *marks = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        for mark in marks:
            if mark.extra and "in_requests" in mark.extra:
                number = mark.extra["in_requests"]
                kind = number if kind is int else number | None
        fields.append((field.name, Annotated[(kind, *marks)] if marks else kind, field.default))
    return msgspec.defstruct("_CheckedConfig", fields, bases=(config,), module=__name__, frozen=True)


if TYPE_CHECKING:
    _CheckedConfig = TopicConfig
else:
    _CheckedConfig = _checked(TopicConfig)


class ConfigBody(_CheckedConfig, frozen=True):
    """Configuration of a topic. Omitted fields have their defaults; a PUT replaces all of it."""

    durability: Annotated[
        Durability | None, doc("When a write is acknowledged. Takes precedence over `durable`.")
    ] = None  # type: ignore[assignment]
    durable: Annotated[
        bool, doc("Used if `durability` is absent: true means `fsync`, false means `disk`.")
    ] = False

    def config(self) -> TopicConfig:
        """What takes effect: within the ranges, and with a durability."""
        settings = clamp(self, CLAMPED)
        durable = settings.pop("durable")
        settings["durability"] = self.durability or ("fsync" if durable else "disk")
        return TopicConfig(**settings)


class TopicOptions(TypedDict, total=False):
    """Settings of a topic, as keyword arguments of the client. A test compares them with those above."""

    type: TopicType
    ttl_ms: int
    cap_records: int
    cap_bytes: int
    discard: Literal["old", "reject"]
    durable: bool
    durability: Durability
    priority: int | None
    auto_priority: bool
    auto_create: bool
    idempotency_window_ms: int
    dedupe_node: bool
    lease_ms: int
    claim_jitter_ms: int
    max_deliveries: int
    dead_letter: str | None
    leases_durable: bool
    cap_per_tag: int
    max_record_bytes: int
    retention: Literal["limits", "interest", "work_queue"]


# -- consumers ---------------------------------------------------------------------------------------------

BACKOFF_STEPS_MAX = 32
FilterText = Annotated[
    str | list[str | list[str]] | None,
    doc(
        "Only records whose tag matches: a predicate, or a list of at most 32 subject patterns and predicates in brackets, any of "
        "which must match. Each has at most 256 bytes. Write a single subject pattern as a list of one: a plain string is a predicate, in which "
        "only a final `*` is special, and is rejected if it looks like a subject pattern."
    ),
]
_DELIVER = "Start position of a new consumer."
_BACKOFF = (
    "Lease durations of the first, second, … delivery, instead of `ack_wait_ms`; at most 32, each clamped to 100 to 86400000. "
    "The last one applies to all further deliveries."
)


class DeliverFrom(msgspec.Struct):
    """Start at a seq or at a time; exactly one of the two."""

    from_seq: Annotated[U64, doc("Start at this seq.")] | msgspec.UnsetType = UNSET
    from_ts: (
        Annotated[U64, doc("Start at the first record written at this time or later.")] | msgspec.UnsetType
    ) = UNSET


class ConsumerBody(msgspec.Struct, frozen=True):
    """Configuration of a consumer. Omitted fields have their defaults; a PUT replaces all of it."""

    ack: Annotated[
        Literal["none", "all", "explicit"],
        doc(
            "`explicit`: each record is acked; `all`: an ack includes all records before it; `none`: no acks and no leases."
        ),
    ] = "explicit"
    ack_wait_ms: Annotated[Lease, doc("Duration of a lease; clamped to 100 to 86400000.")] = 30_000
    max_deliver: Annotated[U32, doc("Maximum number of deliveries of a record; 0: no limit.")] = 0
    backoff_ms: Annotated[list[U64], doc(_BACKOFF, maxItems=BACKOFF_STEPS_MAX)] = []
    filter: FilterText = None
    deliver: Annotated[Literal["all", "new", "last", "last_per_tag"] | DeliverFrom, doc(_DELIVER)] = "all"
    max_ack_pending: Annotated[
        U64,
        clamped(1, 100_000),
        doc("Maximum number of records delivered and not acked; clamped to 1 to 100000."),
    ] = 1000
    max_waiting: Annotated[
        U64,
        clamped(1, 10_000),
        doc("Maximum number of waiting fetches and streams; clamped to 1 to 10000."),
    ] = 512
    headers_only: Annotated[bool, doc("Omit `data`.")] = False
    dead_letter: Annotated[
        str | None,
        doc(
            "Topic for records whose last delivery failed; not the consumer's own topic.",
            pattern=TOPIC_PATTERN,
        ),
    ] = None
    inactive_ttl_ms: Annotated[
        U64,
        doc(
            "Remove the consumer after this long without use; 0: never, otherwise clamped to 1000 to 2592000000."
        ),
    ] = 0
    replay: Annotated[
        Literal["instant", "original"], doc("`original`: at the pace at which the records were written.")
    ] = "instant"


class ConsumerConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The same, checked, as it is stored: its keys keep their order. Every change stores all of it; an absent field has its default."""

    ack: Literal["none", "all", "explicit"] = "explicit"
    ack_wait_ms: int = 30_000
    max_deliver: int = 0
    backoff_ms: tuple[int, ...] = ()
    filter: tuple[tuple[TagOp, str], ...] = ()  # any of them; empty: every record
    deliver: Literal["all", "new", "last", "last_per_tag", "from_seq", "from_ts"] = "all"
    deliver_value: int = 0  # of from_seq and from_ts
    max_ack_pending: int = 1000
    max_waiting: int = 512
    headers_only: bool = False
    dead_letter: str | None = None
    inactive_ttl_ms: int = 0
    replay: Literal["instant", "original"] = "instant"


class ConsumerOptions(TypedDict, total=False):
    """Settings of a consumer, as keyword arguments of the client. A test compares them with those above."""

    ack: Literal["none", "all", "explicit"]
    ack_wait_ms: int
    backoff_ms: list[int]
    max_deliver: int
    filter: str | list[str | list[str]] | None
    deliver: Literal["all", "new", "last", "last_per_tag"] | dict[Literal["from_seq", "from_ts"], int]
    max_ack_pending: int
    max_waiting: int
    headers_only: bool
    dead_letter: str | None
    inactive_ttl_ms: int
    replay: Literal["instant", "original"]


# -- in responses ------------------------------------------------------------------------------------------

PREDICATE: dict[str, Any] = {
    "type": "array",
    "prefixItems": [{"const": "tag"}, {"enum": ["Eq", "Glob", "Subject"]}, {"type": "string"}],
    "items": False,
    "minItems": 3,
}


def _clamps(config: type[msgspec.Struct]) -> dict[str, tuple[int, int]]:
    found = {}
    for field in msgspec.structs.fields(config):
        for mark in marks_of(field):
            if mark.extra and "clamped" in mark.extra:
                found[field.name] = mark.extra["clamped"]
    return found


def _u64s(config: type[msgspec.Struct]) -> list[str]:
    return [
        field.name
        for field in msgspec.structs.fields(config)
        if any(mark.ge == 0 and mark.le is None for mark in marks_of(field))
    ]


def clamp(body: msgspec.Struct, ranges: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The settings of a request, within their ranges."""
    settings = msgspec.structs.asdict(body)
    for name, (low, high) in ranges.items():
        settings[name] = min(max(settings[name], low), high)
    return settings


CLAMPED = _clamps(TopicConfig)
CONSUMER_CLAMPED = _clamps(ConsumerBody)
# Numbers that may still be above 64 bits after decoding.
CONFIG_U64, CONSUMER_U64 = _u64s(ConfigBody), _u64s(ConsumerBody)


def _in_responses(
    name: str, text: str, config: type[msgspec.Struct], changed: dict[str, tuple[Any, Any]]
) -> Any:
    """The same settings as a response has them: all there, within their ranges, and with values that this version may not know."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(config):
        kind, *marks = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        if field.name in changed:
            kind, default = changed[field.name]
            marks = []
        elif get_origin(kind) is Literal:
            kind = Annotated[str, one_of(*(v for v in get_args(kind) if IF_SET not in marks or v != default))]
        elif kind is int:
            low, high = _clamps(config).get(field.name, (int(IF_SET in marks), U64_MAX))
            kind, marks = (
                Annotated[int, schema(minimum=low, maximum=high)],
                [m for m in marks if m.ge is None],
            )
        if IF_SET not in marks:
            marks.append(ALWAYS)
        if field.name == "durability":
            durable = Annotated[bool, doc("Whether `durability` is `fsync`."), ALWAYS]
            fields.append(("durable", durable, False))
        fields.append((field.name, Annotated[(kind, *marks)], default))
    return msgspec.defstruct(
        name, fields, namespace={"__doc__": text}, module=__name__, frozen=True, kw_only=True
    )


if TYPE_CHECKING:

    class TopicSettings(TopicConfig, frozen=True):
        durable: bool = False

    class ConsumerSettings(ConsumerBody, frozen=True):
        filter: list[list[str]] | None = None  # type: ignore[assignment]
        deliver: str | dict[str, int] = "all"  # type: ignore[assignment]

else:
    TopicSettings = _in_responses(
        "TopicConfig", "The effective configuration of a topic.", _CheckedConfig, {}
    )
    ConsumerSettings = _in_responses(
        "ConsumerConfig",
        "The effective configuration of a consumer.",
        ConsumerBody,
        {
            "backoff_ms": (list[Count], []),
            "filter": (
                Annotated[
                    Any,  # a list of lists
                    doc(
                        "A record must match any of these; null: every record.",
                        anyOf=[{"type": "array", "items": PREDICATE}, {"type": "null"}],
                    ),
                ],
                None,
            ),
            "deliver": (
                Annotated[
                    Annotated[str, one_of("all", "new", "last", "last_per_tag")] | dict[str, Count],
                    doc(_DELIVER),
                ],
                "all",
            ),
        },
    )


_SHOWN_IF_SET = {f.name: f.default for f in msgspec.structs.fields(TopicConfig) if IF_SET in marks_of(f)}


def topic_settings(config: TopicConfig) -> TopicSettings:
    values = msgspec.structs.asdict(config)
    for name, default in _SHOWN_IF_SET.items():
        if values[name] == default:
            values[name] = UNSET
    return TopicSettings(durable=config.durability == "fsync", **values)


def consumer_settings(config: ConsumerConfig) -> ConsumerSettings:
    values = msgspec.structs.asdict(config)
    value = values.pop("deliver_value")
    if config.deliver in ("from_seq", "from_ts"):
        values["deliver"] = {config.deliver: value}
    values["filter"] = [("tag", op, value) for op, value in config.filter] or None
    return ConsumerSettings(**values)


# -- the engine --------------------------------------------------------------------------------------------


class EngineConfig(msgspec.Struct, frozen=True):
    """Configuration of one shard's engine: paths and limits."""

    shard: int = 0
    shard_dir: str = "layout-1/shard-00"
    topics_dir: str = "topics"
    wal_file_bytes: int = 64 * limits.MIB
    segment_max_events: int = 10_000
    segment_max_bytes: int = 64 * limits.MIB
    segment_max_age_ms: int = 3_600_000
    snapshot_wal_bytes: int = 64 * limits.MIB
    snapshot_interval_ms: int = 60_000
    log_bytes_max: int = 0  # since the last checkpoint; writes beyond it are refused; 0: no limit
    cache_bytes: int = 32 * limits.MIB
    memory_bytes_max: int = 256 * limits.MIB  # payloads that are only in memory
    index_rows_max: int = 50_000_000  # rows in memory before idle topics are unloaded
    inline_bytes: int = 4096  # a topic with fewer bytes of frames is stored in the snapshot, without files
    rewrite_dead_share: float = 0.5  # a sealed segment with a larger share of dead bytes is compacted
    reclaim_bytes_per_s: int = 32 * limits.MIB  # read and written by compaction; 0: no limit
    max_topics: int = 100_000
    max_total_bytes: int = 0
    min_free_bytes: int = 0  # appends are refused with less free disk space; 0: only when there is none
    reserve_bytes: int = 0  # size of a file that is released when the disk is full; see reserve.py
    hot_retain_segments: int = 4  # newest sealed segments of a topic that stay out of the cold tier
    hot_retain_bytes: int = 0  # limit on their bytes; 0: none
    relocate_bytes_per_s: int = 32 * limits.MIB  # moved to the cold tier; 0: no limit
    cold_cache_bytes: int = 32 * limits.MIB  # cache of recently read cold blocks
    cold_dir: str = ""  # reported to jobs, never opened by the engine
    retire_grace_ms: int = 86_400_000  # how long the files of merged segments are kept
    plan_ttl_ms: int = 7 * 86_400_000  # how long an unleased plan is kept
    txn_bytes_max: int = 16 << 30  # staged per transaction
    txn_shard_bytes_max: int = 64 << 30  # staged in all open transactions
    verify: bool = False  # check every invariant after every turn
