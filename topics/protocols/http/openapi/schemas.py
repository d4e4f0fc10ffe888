"""The schemas of the OpenAPI document, made from the types that check the bodies.

What those types cannot say (lengths, which fields go together) is added here, and only as far as JSON Schema can tell
the truth: a length limit counts UTF-8 bytes, `maxLength` characters, so it refuses nothing that the server takes.
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
# A pattern of topics: tokens between dots, of which one at least is a wildcard; see `_narrow_source`.
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
    "cap_records": "Most records that are kept; 0: no limit.",
    "cap_bytes": "Most bytes that are kept; 0: no limit.",
    "discard": "At a cap: drop the oldest, or refuse the write with 422.",
    "durability": "When a write is acknowledged. It wins over `durable`.",
    "priority": "Clamped to -1000 to 1000 when used.",
    "auto_priority": "Priority by recent reads, when `priority` is null.",
    "auto_create": "Whether a write without `create` may create the topic.",
    "idempotency_window_ms": "How long an idempotency key is remembered; 0: not at all.",
    "dedupe_node": "false: readers get the records of their own node too.",
    "lease_ms": "Queues. How long a lease holds, if a claim does not say; clamped to 100 to 86400000.",
    "claim_jitter_ms": "Queues. Claims that come within this time share evenly; clamped to at most 5000.",
    "max_deliveries": "Queues. A job that was handed out so often goes to `dead_letter`; 0: no limit.",
    "dead_letter": "Queues. A topic name, not the queue's own.",
    "leases_durable": "Queues. Whether leases and counts of deliveries survive a restart.",
    "cap_per_tag": "Most records of one tag that are kept; 0: no limit.",
    "retention": "What acks of consumers do to records: nothing, or they go when every consumer is done with them (`interest`), or "
    "with the first ack (`work_queue`, whose consumers must not overlap).",
    "max_record_bytes": "Most bytes of one record, if less than the server's limit; 0: the server's limit.",
}
DURABLE_TEXT = "Read when `durability` is absent: true means `fsync`, false means `disk`."

EPOCH_TEXT = (
    "The topic's `epoch` when `from_seq` was read: if the topic was deleted and created again since, or its head went back, a "
    "tombstone says so. Without it the cursor is taken as it is."
)

FIELD_TEXT: dict[str, dict[str, str]] = {
    "ConfigBody": CONFIG_TEXT | {"durable": DURABLE_TEXT},
    "Config": CONFIG_TEXT,
    "RecordBody": {
        "data": "Any JSON value, `null` included; it is returned as it came.",
        "tag": "At most 256 bytes of UTF-8.",
        "node": "Who wrote it; at most 128 bytes of UTF-8. Default: the write's `node`.",
        "meta": "Small headers: at most 16 KiB of compact JSON, an object of at most 64 keys.",
        "ttl_ms": "The record's own time to live; when it ends the record goes silently. 0: none.",
        "data_base64": "Bytes instead of `data`, without `meta`: in all records of a write or in none.",
    },
    "TagLastSeq": {"tag": "Exactly this tag.", "seq": "Seq of its newest record; 0: it has none."},
    "WriteBody": {
        "records": "1 to 10000; they get consecutive seqs in this order.",
        "node": "For records without one; at most 128 bytes of UTF-8.",
        "idempotency_key": "1 to 256 bytes of UTF-8; it wins over the header `Idempotency-Key`.",
        "create": "What to do when the topic does not exist: create it, or answer 404. Default: `config.auto_create`.",
        "config": "Used if this write creates the topic; it then needs the scope `admin`.",
        "disable_backpressure": "Do not refuse this write under pressure; it waits instead.",
        "if_last_seq": "Write only if this is the topic's head; 0: if it has no records yet.",
        "if_tag_last_seq": "Write only if this is the newest seq of a tag.",
        "include_epoch": "Whether the answer names the topic's `epoch`.",
    },
    "DiffBody": {
        "from_seq": "Records after this seq.",
        "limit": "0 means 256; more than 1000 means 1000. For frames: up to 1000000, and as many as fit when absent.",
        "node": "Leave out records of these nodes.",
        "include_tags": "Whether records show `$tag`.",
        "include_meta": "Whether records show `meta`.",
        "include_data": "Whether records show `data`.",
        "wait_ms": "How long to wait for a record when there is none; at most 30000.",
        "max_batch_bytes": "Record bytes of the page, but at least one record. 0 means 1 MiB (frames: 8 MiB); "
        "at most 8 MiB.",
        "tag": "Only records whose tag matches.",
        "from_ts": "Only records written at this time or later, in milliseconds since the Unix epoch.",
        "epoch": f"{EPOCH_TEXT} The answer names the present one.",
        "include_epoch": "Whether the answer names the topic's `epoch`.",
    },
    "DeleteBody": {
        "before_seq": "Records with a smaller seq.",
        "match": "Records whose tag matches.",
        "subject": "Records whose tag matches this dotted pattern: `*` stands for one token, a final `>` for one or more.",
        "seqs": "These records; at most 10000.",
        "keep": "All but the newest so many; of each tag, when `match` or `subject` is given.",
        "erase": "Overwrite the bytes on disk before answering.",
    },
    "StartBody": {
        "from_seq": "Records after this seq.",
        "tail": "Only what comes from now on; it wins over `from_seq`.",
        "epoch": EPOCH_TEXT,
    },
    "WatchBody": {
        "topics": f"1 to {WATCH_TOPICS_MAX} names of topics, or patterns of names, and where each begins. A pattern has a token `*` (any "
        f"one token) or a last token `>` (one or more), and covers later topics too; {STREAM_TOPICS_MAX} topics in all.",
        "node": "Leave out records of these nodes.",
        "limit": "Most records of an event; 0 means 256, more than 1000 means 1000.",
        "max_batch_bytes": "Record bytes of an event, but at least one record. 0 means 1 MiB; at most 8 MiB.",
        "heartbeat_ms": "A stream says something at least this often; clamped to 1000 to 60000.",
        "include_data": "Whether records show `data`.",
        "include_meta": "Whether records show `meta`.",
        "include_tags": "Whether records show `$tag`.",
        "consistency": "`strong`: only what is synced to disk.",
        "group": "1 to 128 bytes of UTF-8; not together with `node`. Members of a group share: each record goes to exactly one of them.",
        "include_epoch": "Whether the answer and the events `record` and `tombstone` name the `epoch` of their topic. So it is too when an entry has one.",
    },
}

NODE_TEXT = "Who asks: 1 to 128 bytes of UTF-8."
SETTLE_TEXT = {
    "node": "Whose leases: 1 to 128 bytes of UTF-8.",
    "seqs": "At most 1000. What `node` has no lease on is skipped.",
    "lease_ids": "Empty, or one for each seq: the `lease_id` that came with it, or an empty string for whichever there is.",
}
REASON_TEXT = "At most 1024 bytes of UTF-8; goes into the `meta` of the dead letter."
FIELD_TEXT |= {
    "ClaimBody": {
        "node": NODE_TEXT,
        "max": "Most jobs; clamped to 1 to 1000.",
        "lease_ms": "How long the leases hold; clamped to 100 to 86400000. Default: the topic's `lease_ms`.",
        "wait_ms": "How long to wait for a job when there is none; at most 30000.",
    },
    "FetchBody": {
        "node": NODE_TEXT,
        "max": "Most records; clamped to 1 to 1000.",
        "max_bytes": "Record bytes of the answer, but at least one record. 0 means 1 MiB; at most 8 MiB.",
        "wait_ms": "How long to wait for a record when there is none; at most 30000.",
        "lease_ms": "How long the leases hold; clamped to 100 to 86400000. Default: as the consumer says.",
    },
    "AckBody": SETTLE_TEXT,
    "NackBody": SETTLE_TEXT
    | {
        "delay_ms": "Not before this time has passed; at most 86400000.",
        "kind": "`retry`: hand it out again. `release`: the same, and this delivery does not count. `dead`: to the dead letter topic.",
        "reason": REASON_TEXT,
    },
    "ExtendBody": SETTLE_TEXT | {"lease_ms": "The leases end so long from now; clamped to 100 to 86400000."},
    "TermBody": SETTLE_TEXT | {"reason": REASON_TEXT},
    "DeliverFrom": {
        "from_seq": "Begin at this seq.",
        "from_ts": "Begin at the first record written at this time or later.",
    },
    "ConsumerBody": {
        "ack": "`explicit`: each record by itself; `all`: an ack covers all before it; `none`: nothing is leased.",
        "ack_wait_ms": "How long a lease holds; clamped to 100 to 86400000.",
        "max_deliver": "Most deliveries of a record; 0: no end.",
        "backoff_ms": "How long the lease of the first, second … delivery holds, instead of `ack_wait_ms`; at most 32 steps, each clamped to "
        "100 to 86400000.",
        "filter": "Only records whose tag matches: a predicate, or a list of at most 32 of which any is enough, subject patterns and "
        "predicates in brackets. Each has at most 256 bytes. A subject pattern alone is a list of one: a plain string is a predicate, where only a final "
        "`*` is special, and one that looks like a subject pattern is refused.",
        "deliver": "Where it begins when it is created.",
        "max_ack_pending": "Most records that are handed out and not done; clamped to 1 to 100000.",
        "max_waiting": "Most fetches and streams that wait at once; clamped to 1 to 10000.",
        "headers_only": "Leave `data` out.",
        "dead_letter": "Topic for records whose last delivery was in vain; not the consumer's own.",
        "inactive_ttl_ms": "Remove the consumer after so long without use; 0: never, else clamped to 1000 to 2592000000.",
        "replay": "`original`: with the pauses that the records were written with.",
    },
    "PauseBody": {"until_ts": "In milliseconds since the Unix epoch; 0: until it is resumed."},
    "ResetTo": {
        "seq": "Begin at this seq.",
        "ts": "Begin at the first record written at this time or later.",
    },
    "ResetBody": {
        "to": "Where to begin again.",
        "dry_run": "Change nothing, and tell what would change.",
        "epoch": "With a seq: the `epoch` of the topic when it was read. 409 if that seq is another record now.",
    },
    "ForwardBody": {
        "source": "A topic, created if it does not exist; or a pattern of names (a token `*` is any one token, a last token `>` one or more), "
        "which covers later topics too and may not match `dest`.",
        "dest": "Another topic. All that feeds it has the same `source`.",
        "preserve_node": "Whether copies have the `node` of the record.",
        "preserve_tag": "Whether copies have the `tag` of the record.",
        "create_dest": "Whether `dest` is created if it does not exist; else that is a 404.",
        "filter": "Only records whose tag matches: a predicate, or a list of at most 32 of which any is enough, subject patterns with a wildcard "
        "and predicates in brackets. Each has at most 256 bytes.",
        "allow_cycle": "Whether copies may come back to where they come from; they go on for at most 8 hops.",
        "guarantee": "`exactly_once`: each copy says in its `meta` where it comes from, and is left out if the dest has it already.",
    },
}
FIELD_TEXT |= {
    "BeginBody": {
        "producer": "Who makes the batches, such as the id of a query: 1 to 256 bytes of UTF-8.",
        "batch": "Number of the batch; a producer commits them in rising order.",
        "ttl_ms": "After so long without a call the transaction is gone; clamped to 1000 to 604800000.",
        "create": "What to do when the topic does not exist: create it, or answer 404. Default: create it.",
    },
    "StageBody": {
        "part": "What a task of the producer made, such as the names of partition and attempt: 1 to 128 bytes of UTF-8.",
        "chunk": "Number of the chunk within its part, from 0.",
        "records": "1 to 10000, as in a write.",
        "node": "For records without one; at most 128 bytes of UTF-8.",
    },
    "CommitPart": {
        "part": "Name of the part.",
        "chunks": "How many it has: 0 to one less of them are appended, in this order.",
        "records": "How many records these have together.",
    },
    "CommitPartsBody": {
        "parts": "In the order in which they appear; what is staged and not named here is thrown away.",
        "wait_ms": "How long to wait for the end of it; at most 30000.",
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
# Limits by component and field. `pattern` and the lengths concern strings only, so `null` passes where it may.
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
    """Every schema, by its name."""
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
    """A copy whose Raw fields have no default: msgspec cannot write such a default into a schema."""
    return _copy(
        body, **{f.name: f.type for f in msgspec.structs.fields(body) if isinstance(f.default, msgspec.Raw)}
    )


def _copy(body: type[msgspec.Struct], **types: Any) -> type[msgspec.Struct]:
    """The same struct with other types for some fields, which lose their default."""
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
    """Which fields go together."""
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
        # A bare reference beside `null`; the description stays with the field.
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
    """A predicate, or a list of patterns and predicates that does not look like a predicate itself."""
    short: Json = {"maxLength": TAG_CHARACTERS_MAX}
    predicates = [_tuple(op, value | short) for op, value in forms.items()]
    looks_so: Json = {
        "prefixItems": [{"const": "tag"}, {"enum": [*forms]}, {"type": "string"}],
        "minItems": 3,
        "maxItems": 3,
    }
    several: Json = {
        "type": "array",
        "maxItems": FILTERS_MAX,
        "items": {"anyOf": [forms["Subject"] | short, *predicates]},
        "not": looks_so,
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
    # Only what has a wildcard: a wrong predicate is not to be taken for three patterns.
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
    text = 'A tag; a prefix and a final `*`; or `["tag", op, value]`: `Eq` is the tag itself, `Glob` a prefix and a final `*`'
    if "Subject" in forms:
        text += ", `Subject` a dotted pattern where `*` stands for one token and a final `>` for one or more"
    return {
        "description": text + ". Records without a tag never match.",
        "anyOf": [{"type": "string"}, *tuples],
    }
