"""Schemas of the OpenAPI document, generated from the request and response types.

Constraints that the types cannot express (lengths, combinations of fields) are added here. A schema never rejects what
the server accepts: the server limits UTF-8 bytes, and `maxLength` limits characters to the same number.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import NODEFAULT

from topics.api import limits, requests
from topics.api.responses import consumers as consumer_responses
from topics.api.responses import forwards as forward_responses
from topics.api.responses import merges as merge_responses
from topics.api.responses import records as responses
from topics.api.responses import transactions as transaction_responses
from topics.link.watch import STREAM_TOPICS_MAX, WATCH_TOPICS_MAX

Json: TypeAlias = dict[str, Any]

REF = "#/components/schemas/{name}"
TOPIC_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$"
ROUTER_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$"
# A pattern of topic names: tokens between dots, at least one of which is a wildcard; see `_narrow_forward`.
SOURCE_PATTERN = r"^(?:(?:[A-Za-z0-9_:-]+|[*])\.)*(?:[A-Za-z0-9_:-]+|[*]|>)$"
BASE64_PATTERN = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
# Tokens between dots; only the last may be a lone `>`.
SUBJECT_PATTERN = r"^(?:(?:[^.>]|[^.][^.]+)\.)*[^.]+$"
WILDCARD = r"(?:^|\.)(?:[*](?:\.|$)|>$)"
TAG_CHARACTERS_MAX = 256
META_KEYS_MAX = 64
SEQS_MAX = 10_000
GROUP_BYTES_MAX = 128
SETTLE_SEQS_MAX = 1000
REASON_BYTES_MAX = 1024
BACKOFF_STEPS_MAX = 32
FILTERS_MAX = 32

CONFIG_TEXT = {
    "type": "Fixed when the topic is created.",
    "ttl_ms": "Records older than this are no longer delivered; 0: no limit.",
    "cap_records": "Maximum number of records to keep; 0: no limit.",
    "cap_bytes": "Maximum number of bytes to keep; 0: no limit.",
    "discard": "When a cap is reached: drop the oldest records, or reject the write with 422.",
    "durability": "When a write is acknowledged. Takes precedence over `durable`.",
    "priority": "Clamped to -1000 to 1000 when used.",
    "auto_priority": "Derive the priority from recent reads if `priority` is null.",
    "auto_create": "Whether a write without `create` may create the topic.",
    "idempotency_window_ms": "How long an idempotency key is remembered; 0: not at all.",
    "dedupe_node": "false: readers also get the records of their own node.",
    "lease_ms": "Queues. Default duration of a lease; clamped to 100 to 86400000.",
    "claim_jitter_ms": "Queues. Jobs are divided evenly among the claims that arrive within this time; clamped to at most 5000.",
    "max_deliveries": "Queues. Maximum number of deliveries before a job goes to `dead_letter`; 0: no limit.",
    "dead_letter": "Queues. Name of another topic.",
    "leases_durable": "Queues. Whether leases and delivery counts survive a restart.",
    "cap_per_tag": "Maximum number of records to keep per tag; 0: no limit.",
    "retention": "When acks of consumers delete records: never (`limits`), once every consumer has acked them (`interest`), or "
    "with the first ack (`work_queue`, whose consumers must not overlap).",
    "max_record_bytes": "Maximum bytes of a record, if below the server's limit; 0: the server's limit.",
}
DURABLE_TEXT = "Used if `durability` is absent: true means `fsync`, false means `disk`."

EPOCH_TEXT = (
    "The topic's `epoch` when `from_seq` was obtained: if the topic has been deleted and created again since, or its head went back, a "
    "tombstone reports it. Without it the cursor is not checked."
)

FIELD_TEXT: dict[str, dict[str, str]] = {
    "ConfigBody": CONFIG_TEXT | {"durable": DURABLE_TEXT},
    "Config": CONFIG_TEXT,
    "RecordBody": {
        "data": "Any JSON value, `null` included; returned unchanged.",
        "tag": "At most 256 bytes of UTF-8.",
        "node": "The writer; at most 128 bytes of UTF-8. Default: `node` of the write.",
        "meta": "Small headers: an object of at most 64 keys and 16 KiB of compact JSON.",
        "ttl_ms": "Time to live of this record; an expired record leaves no tombstone. 0: none.",
        "data_base64": "Bytes instead of `data`, without `meta`; for all records of a write or none.",
    },
    "TagLastSeq": {"tag": "Exactly this tag.", "seq": "Seq of its newest record; 0: it has none."},
    "WriteBody": {
        "records": "1 to 10000; they get consecutive seqs in this order.",
        "node": "Default `node` of the records; at most 128 bytes of UTF-8.",
        "idempotency_key": "1 to 256 bytes of UTF-8; takes precedence over the header `Idempotency-Key`.",
        "create": "If the topic does not exist: create it, or answer 404. Default: `config.auto_create`.",
        "config": "Configuration of the topic if this write creates it; requires the scope `admin`.",
        "disable_backpressure": "Do not reject this write under pressure; it waits instead.",
        "if_last_seq": "Write only if this is the topic's head; 0: if it has no records yet.",
        "if_tag_last_seq": "Write only if this is the newest seq of a tag.",
        "include_epoch": "Whether the answer includes the topic's `epoch`.",
    },
    "DiffBody": {
        "from_seq": "Records after this seq.",
        "limit": "Maximum number of records. 0 means 256; at most 1000. For frames: at most 1000000, and as many as fit if absent.",
        "node": "Exclude records of these nodes.",
        "include_tags": "Whether records have `$tag`.",
        "include_meta": "Whether records have `meta`.",
        "include_data": "Whether records have `data`.",
        "wait_ms": "How long to wait for a record if there is none; at most 30000.",
        "max_batch_bytes": "Maximum record bytes of the page, which has at least one record. 0 means 1 MiB (frames: 8 MiB); "
        "at most 8 MiB.",
        "tag": "Only records whose tag matches.",
        "from_ts": "Only records written at this time or later, in milliseconds since the Unix epoch.",
        "epoch": f"{EPOCH_TEXT} The answer includes the current one.",
        "include_epoch": "Whether the answer includes the topic's `epoch`.",
    },
    "DeleteBody": {
        "before_seq": "Records with a smaller seq.",
        "match": "Records whose tag matches.",
        "subject": "Records whose tag matches this dotted pattern: `*` matches one token, a final `>` one or more.",
        "seqs": "These records; at most 10000.",
        "keep": "Number of newest records to keep: in all, or per tag if `match` or `subject` is given.",
        "erase": "Overwrite the bytes on disk before answering.",
    },
    "StartBody": {
        "from_seq": "Records after this seq.",
        "tail": "Only records written from now on; takes precedence over `from_seq`.",
        "epoch": EPOCH_TEXT,
    },
    "WatchBody": {
        "topics": f"1 to {WATCH_TOPICS_MAX} topic names or name patterns, each with its start. In a pattern the token `*` matches any one "
        f"token, and a last token `>` one or more; topics created later are included. At most {STREAM_TOPICS_MAX} topics in all.",
        "node": "Exclude records of these nodes.",
        "limit": "Maximum number of records per event. 0 means 256; at most 1000.",
        "max_batch_bytes": "Maximum record bytes per event, which has at least one record. 0 means 1 MiB; at most 8 MiB.",
        "heartbeat_ms": "Maximum time between two writes to the stream; clamped to 1000 to 60000.",
        "include_data": "Whether records have `data`.",
        "include_meta": "Whether records have `meta`.",
        "include_tags": "Whether records have `$tag`.",
        "consistency": "`strong`: only records that are synced to disk.",
        "group": "1 to 128 bytes of UTF-8; not together with `node`. Each record is delivered to exactly one member of the group.",
        "include_epoch": "Whether the answer and the events `record` and `tombstone` include the topic's `epoch`. Implied if an entry has an `epoch`.",
    },
}

NODE_TEXT = "Name of the caller: 1 to 128 bytes of UTF-8."
SETTLE_TEXT = {
    "node": "Holder of the leases: 1 to 128 bytes of UTF-8.",
    "seqs": "At most 1000. Seqs on which `node` holds no lease are skipped.",
    "lease_ids": "Empty, or one for each seq: its `lease_id`, or an empty string for any lease.",
}
REASON_TEXT = "At most 1024 bytes of UTF-8; stored in the `meta` of the dead letter."
FIELD_TEXT |= {
    "ClaimBody": {
        "node": NODE_TEXT,
        "max": "Maximum number of jobs; clamped to 1 to 1000.",
        "lease_ms": "Duration of the leases; clamped to 100 to 86400000. Default: the topic's `lease_ms`.",
        "wait_ms": "How long to wait for a job if there is none; at most 30000.",
    },
    "FetchBody": {
        "node": NODE_TEXT,
        "max": "Maximum number of records; clamped to 1 to 1000.",
        "max_bytes": "Maximum record bytes of the answer, which has at least one record if any is ready. 0 means 1 MiB; at most 8 MiB.",
        "wait_ms": "How long to wait for a record if there is none; at most 30000.",
        "lease_ms": "Duration of the leases; clamped to 100 to 86400000. Default: that of the consumer.",
    },
    "AckBody": SETTLE_TEXT,
    "NackBody": SETTLE_TEXT
    | {
        "delay_ms": "Delay before the next delivery; at most 86400000.",
        "kind": "`retry`: deliver again. `release`: the same, without counting this delivery. `dead`: move to the dead letter topic.",
        "reason": REASON_TEXT,
    },
    "ExtendBody": SETTLE_TEXT
    | {"lease_ms": "The leases expire this long from now; clamped to 100 to 86400000."},
    "TermBody": SETTLE_TEXT | {"reason": REASON_TEXT},
    "DeliverFrom": {
        "from_seq": "Start at this seq.",
        "from_ts": "Start at the first record written at this time or later.",
    },
    "ConsumerBody": {
        "ack": "`explicit`: each record is acked; `all`: an ack includes all records before it; `none`: no acks and no leases.",
        "ack_wait_ms": "Duration of a lease; clamped to 100 to 86400000.",
        "max_deliver": "Maximum number of deliveries of a record; 0: no limit.",
        "backoff_ms": "Lease durations of the first, second, … delivery, instead of `ack_wait_ms`; at most 32, each clamped to "
        "100 to 86400000.",
        "filter": "Only records whose tag matches: a predicate, or a list of at most 32 subject patterns and predicates in brackets, any of "
        "which must match. Each has at most 256 bytes. Write a single subject pattern as a list of one: a plain string is a predicate, in which "
        "only a final `*` is special, and is rejected if it looks like a subject pattern.",
        "deliver": "Start position of a new consumer.",
        "max_ack_pending": "Maximum number of records delivered and not acked; clamped to 1 to 100000.",
        "max_waiting": "Maximum number of waiting fetches and streams; clamped to 1 to 10000.",
        "headers_only": "Omit `data`.",
        "dead_letter": "Topic for records whose last delivery failed; not the consumer's own topic.",
        "inactive_ttl_ms": "Remove the consumer after this long without use; 0: never, otherwise clamped to 1000 to 2592000000.",
        "replay": "`original`: at the pace at which the records were written.",
    },
    "PauseBody": {"until_ts": "In milliseconds since the Unix epoch; 0: until resumed."},
    "ResetTo": {
        "seq": "Start at this seq.",
        "ts": "Start at the first record written at this time or later.",
    },
    "ResetBody": {
        "to": "The new position.",
        "dry_run": "Change nothing, and return what would change.",
        "epoch": "With a seq: the topic's `epoch` when the seq was obtained. 409 if the seq belongs to another record now.",
    },
    "ForwardBody": {
        "source": "A topic, created if it does not exist; or a name pattern (the token `*` matches any one token, a last token `>` one or more), "
        "which includes topics created later and must not match `dest`.",
        "dest": "Another topic. All routers into it must have the same `source`.",
        "preserve_node": "Whether copies keep the `node` of the record.",
        "preserve_tag": "Whether copies keep the `tag` of the record.",
        "create_dest": "Whether to create `dest` if it does not exist; otherwise the answer is 404.",
        "filter": "Only records whose tag matches: a predicate, or a list of at most 32 subject patterns with a wildcard and predicates in brackets, "
        "any of which must match. Each has at most 256 bytes.",
        "allow_cycle": "Whether copies may return to their origin; they are forwarded for at most 8 hops.",
        "guarantee": "`exactly_once`: each copy has its origin in `meta`, and is skipped if the dest already has it.",
    },
}
FIELD_TEXT |= {
    "BeginBody": {
        "producer": "Writer of the batches, such as the id of a query: 1 to 256 bytes of UTF-8.",
        "batch": "Number of the batch; a producer commits batches in increasing order.",
        "ttl_ms": "The transaction expires after this long without a call; clamped to 1000 to 604800000.",
        "create": "If the topic does not exist: create it, or answer 404. Default: create it.",
    },
    "StageBody": {
        "part": "Output of one task of the producer, named for example after partition and attempt: 1 to 128 bytes of UTF-8.",
        "chunk": "Number of the chunk within its part, starting at 0.",
        "records": "1 to 10000, as in a write.",
        "node": "Default `node` of the records; at most 128 bytes of UTF-8.",
    },
    "CommitPart": {
        "part": "Name of the part.",
        "chunks": "Number of chunks: those with numbers below it are appended, in order.",
        "records": "Number of records in these chunks.",
    },
    "CommitPartsBody": {
        "parts": "In the order in which they are appended; staged parts that are not listed are discarded.",
        "wait_ms": "Maximum time to wait for completion; at most 30000.",
    },
}
CONSUMER_REQUESTS = (
    requests.ClaimBody,
    requests.FetchBody,
    requests.AckBody,
    requests.NackBody,
    requests.ExtendBody,
    requests.TermBody,
    requests.ConsumerBody,
    requests.PauseBody,
    requests.ResetBody,
)

NODE_LENGTH: Json = {"minLength": 1, "maxLength": limits.NODE_BYTES_MAX}
PART_LENGTH: Json = {"minLength": 1, "maxLength": limits.TXN_PART_BYTES_MAX}
SETTLE_LIMITS: dict[str, Json] = {
    "node": NODE_LENGTH,
    "seqs": {"maxItems": SETTLE_SEQS_MAX},
    "lease_ids": {"items": {"type": "string", "pattern": "^(lease_[0-9a-f]{1,16})?$"}},
}
# Limits by component and field. `pattern` and lengths apply to strings only, so `null` still passes where it is allowed.
_LIMITS: dict[str, dict[str, Json]] = {
    "ConfigBody": {"dead_letter": {"pattern": TOPIC_PATTERN}},
    "RecordBody": {
        "tag": {"maxLength": TAG_CHARACTERS_MAX},
        "node": {"maxLength": limits.NODE_BYTES_MAX},
        "meta": {"maxProperties": META_KEYS_MAX},
        "data_base64": {
            "contentEncoding": "base64",
            "pattern": BASE64_PATTERN,
            "maxLength": -(-limits.RECORD_BYTES_MAX // 3) * 4,
        },
    },
    "WriteBody": {
        "records": {"minItems": 1, "maxItems": limits.BATCH_RECORDS_MAX},
        "node": {"maxLength": limits.NODE_BYTES_MAX},
        "idempotency_key": {"minLength": 1, "maxLength": limits.KEY_BYTES_MAX},
    },
    "DeleteBody": {"seqs": {"maxItems": SEQS_MAX}},
    "ClaimBody": {"node": NODE_LENGTH},
    "FetchBody": {"node": NODE_LENGTH},
    "AckBody": SETTLE_LIMITS,
    "NackBody": SETTLE_LIMITS | {"reason": {"maxLength": REASON_BYTES_MAX}},
    "ExtendBody": SETTLE_LIMITS,
    "TermBody": SETTLE_LIMITS | {"reason": {"maxLength": REASON_BYTES_MAX}},
    "ConsumerBody": {
        "dead_letter": {"pattern": TOPIC_PATTERN},
        "backoff_ms": {"maxItems": BACKOFF_STEPS_MAX},
    },
    "ForwardBody": {"dest": {"pattern": TOPIC_PATTERN}},
    "BeginBody": {"producer": {"minLength": 1, "maxLength": limits.KEY_BYTES_MAX}},
    "StageBody": {
        "part": PART_LENGTH,
        "records": {"minItems": 1, "maxItems": limits.BATCH_RECORDS_MAX},
        "node": {"maxLength": limits.NODE_BYTES_MAX},
    },
    "CommitPart": {"part": PART_LENGTH},
    "CommitPartsBody": {"parts": {"maxItems": limits.TXN_PARTS_MAX}},
    "WatchBody": {
        "topics": {"minProperties": 1, "maxProperties": WATCH_TOPICS_MAX},
        "group": {"minLength": 1, "maxLength": GROUP_BYTES_MAX},
    },
}


def components() -> Json:
    """All schemas, by name."""
    record = _without_raw_default(requests.RecordBody)
    write = _copy(requests.WriteBody, records=list[record])  # type: ignore[valid-type]
    stage = _copy(requests.StageBody, records=list[record])  # type: ignore[valid-type]
    types = [
        requests.ConfigBody,
        record,
        write,
        requests.DiffBody,
        requests.DeleteBody,
        requests.WatchBody,
        *CONSUMER_REQUESTS,
        requests.ForwardBody,
        *requests.MERGE_REQUESTS,
        requests.BeginBody,
        stage,
        requests.CommitPartsBody,
        *responses.BODIES,
        *consumer_responses.BODIES,
        *forward_responses.BODIES,
        *merge_responses.BODIES,
        *transaction_responses.BODIES,
    ]
    _, found = msgspec.json.schema_components(types, ref_template=REF)
    for name, texts in FIELD_TEXT.items():
        for field, text in texts.items():
            found[name]["properties"][field].setdefault("description", text)
    for name, fields in _LIMITS.items():
        for field, bounds in fields.items():
            found[name]["properties"][field] |= bounds
    _narrow(found)
    return dict(sorted(found.items()))


def _without_raw_default(body: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A copy whose Raw fields have no default: msgspec cannot put a Raw default into a schema."""
    return _copy(
        body, **{f.name: f.type for f in msgspec.structs.fields(body) if isinstance(f.default, msgspec.Raw)}
    )


def _copy(body: type[msgspec.Struct], **types: Any) -> type[msgspec.Struct]:
    """A copy with other types for some fields, which lose their defaults."""
    fields: list[Any] = []
    for f in msgspec.structs.fields(body):
        if f.name in types:
            fields.append((f.name, types[f.name]))
        elif f.default is not NODEFAULT:
            fields.append((f.name, f.type, f.default))
        else:
            fields.append((f.name, f.type))
    return msgspec.defstruct(body.__name__, fields, namespace={"__doc__": body.__doc__}, kw_only=True)


def _narrow(found: Json) -> None:
    """Add constraints on combinations of fields."""
    record, write, delete = found["RecordBody"], found["WriteBody"], found["DeleteBody"]
    absent, text = {"type": "null"}, {"type": "string"}
    record.pop("required", None)
    record["anyOf"] = [
        {"required": ["data"], "properties": {"data_base64": absent}},
        {
            "required": ["data_base64"],
            "properties": {"data_base64": text, "data": False, "meta": absent},
        },
    ]
    for body in (write, found["StageBody"]):
        body["properties"]["records"]["anyOf"] = [
            {"items": {"properties": {"data_base64": absent}}},
            {"items": {"required": ["data_base64"], "properties": {"data_base64": text}}},
        ]
    delete["anyOf"] = [
        {"required": [name], "properties": {name: {"not": absent}}}
        for name in ("before_seq", "match", "subject", "seqs", "keep")
    ]
    delete["properties"]["subject"]["anyOf"] = [text | {"pattern": SUBJECT_PATTERN}, absent]
    found["WatchBody"]["not"] = {
        "required": ["group", "node"],
        "properties": {"group": text, "node": {"not": absent}},
    }
    for body, field, name in (("DiffBody", "tag", "ReadPredicate"), ("DeleteBody", "match", "TagPredicate")):
        properties = found[body]["properties"]
        # A reference or `null`; the description stays with the field.
        properties[field] = {
            "anyOf": [{"$ref": REF.format(name=name)}, absent],
            "default": None,
            "description": FIELD_TEXT[body][field],
        }
    for name in ("DeliverFrom", "ResetTo"):
        found[name]["oneOf"] = [{"required": [field]} for field in found[name]["properties"]]
    forms = {"Eq": text, "Glob": text | {"pattern": "[*]$"}, "Subject": text | {"pattern": SUBJECT_PATTERN}}
    found["TagPredicate"] = _predicate({op: forms[op] for op in ("Eq", "Glob")})
    found["ReadPredicate"] = _predicate(forms)
    _narrow_filter(found, forms)
    _narrow_forward(found, forms)


def _narrow_filter(found: Json, forms: dict[str, Json]) -> None:
    """A predicate, or a list of patterns and predicates that is not itself a predicate."""
    short: Json = {"maxLength": TAG_CHARACTERS_MAX}
    predicates = [_tuple(op, value | short) for op, value in forms.items()]
    is_predicate: Json = {
        "prefixItems": [{"const": "tag"}, {"enum": [*forms]}, {"type": "string"}],
        "minItems": 3,
        "maxItems": 3,
    }
    several: Json = {
        "type": "array",
        "maxItems": FILTERS_MAX,
        "items": {"anyOf": [forms["Subject"] | short, *predicates]},
        "not": is_predicate,
    }
    field = found["ConsumerBody"]["properties"]["filter"]
    plain: Json = {"type": "string", "not": {"pattern": requests.PATTERN_IN_A_STRING}}
    field["anyOf"] = [plain | short, *predicates, several, {"type": "null"}]


def _narrow_forward(found: Json, forms: dict[str, Json]) -> None:
    properties = found["ForwardBody"]["properties"]
    wild: Json = {"allOf": [{"pattern": SOURCE_PATTERN}, {"pattern": "[*>]"}], "maxLength": 255}
    properties["source"]["anyOf"] = [{"pattern": TOPIC_PATTERN}, wild]
    short: Json = {"maxLength": TAG_CHARACTERS_MAX}
    predicates = [_tuple(op, value | short) for op, value in forms.items()]
    # A wildcard is required: otherwise a malformed predicate would pass as three patterns.
    pattern: Json = {"type": "string", "allOf": [{"pattern": SUBJECT_PATTERN}, {"pattern": WILDCARD}]}
    several: Json = {
        "type": "array",
        "minItems": 1,
        "maxItems": FILTERS_MAX,
        "items": {"anyOf": [pattern | short, *predicates]},
    }
    properties["filter"]["anyOf"] = [{"type": "string"} | short, *predicates, several, {"type": "null"}]


def _tuple(op: str, value: Json) -> Json:
    return {
        "type": "array",
        "prefixItems": [{"const": "tag"}, {"const": op}, value],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    }


def _predicate(forms: dict[str, Json]) -> Json:
    tuples = [_tuple(op, value) for op, value in forms.items()]
    text = 'A tag; a prefix with a final `*`; or `["tag", op, value]`: `Eq` is the tag itself, `Glob` a prefix with a final `*`'
    if "Subject" in forms:
        text += ", `Subject` a dotted pattern in which `*` matches one token and a final `>` one or more"
    return {
        "description": text + ". Records without a tag never match.",
        "anyOf": [{"type": "string"}, *tuples],
    }
