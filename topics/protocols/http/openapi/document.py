"""The OpenAPI document: every route, with schemas generated from the request and response types.

`python -m topics.protocols.http.openapi.document` prints it.
"""

from __future__ import annotations

import msgspec

import topics
from topics.api import limits
from topics.api.fields import U64_MAX
from topics.api.requests import TAG_CHARACTERS_MAX
from topics.link.watch import SESSION_TTL_MS
from topics.protocols.http.errors import STATUS
from topics.protocols.http.openapi.consumers import consumer_paths
from topics.protocols.http.openapi.forwards import forward_paths
from topics.protocols.http.openapi.merges import merge_paths
from topics.protocols.http.openapi.operations import (
    ANY_ROUTE,
    BOOLEAN,
    EVENTS_TYPE,
    JSON_TYPE,
    KEYED,
    LINES_TYPE,
    STRICT,
    TEXT,
    WITH_BODY,
    WITH_TOPIC,
    content_of,
    flag,
    header,
    json_answer,
    operation,
    page_of,
    query,
    topic_name,
)
from topics.protocols.http.openapi.schemas import REF, SUBJECT_PATTERN, Json, components
from topics.protocols.http.openapi.transactions import transaction_paths
from topics.protocols.json.unknown_fields import PATHS_MAX

FRAMES_TYPE, TEXT_TYPE = "application/vnd.topics.frames", "text/plain"

IGNORED: Json = {
    "type": "array",
    "items": TEXT,
    "minItems": 1,
    "maxItems": PATHS_MAX,
    "uniqueItems": True,
    "description": "Paths of unknown fields in the request, which were ignored, such as `durabilty` or `records[].delay_ms`. Absent if there are none.",
}
CODES = {
    "invalid_request": "The request is malformed, has a wrong type, lacks a field or exceeds a length.",
    "batch_too_large": "Too many records in a write, or seqs in a delete or an ack. `detail`: `records` or `seqs`, `max`.",
    "record_too_large": "A record is above the size limit, or a write is larger than the whole cap of a `reject` topic.",
    "unauthorized": "No valid key.",
    "forbidden": "The key lacks the scope, or a name is outside its prefixes: that of the topic, or of a router that would be deleted with it.",
    "forbidden_origin": "Without keys, or on an upgrade to a WebSocket: the request comes from a web page of another origin. `detail`: `origin`.",
    "topic_not_found": "The topic does not exist. `detail`: `topic`.",
    "router_not_found": "The router does not exist. `detail`: `router`.",
    "plan_not_found": "The merge plan does not exist: it never did, was abandoned, or was cancelled by an erase. `detail`: `plan_id`.",
    "snapshot_not_found": "The snapshot does not exist, or has expired. `detail`: `snapshot_id`.",
    "txn_not_found": "The transaction is not open: it was aborted, has expired, or never existed. Begin it again. `detail`: `topic`, `txn`.",
    "txn_incomplete": "A commit names parts that were not staged. `detail`: `topic`, `txn`, and `parts` with the problem of each.",
    "txn_committed": "The transaction is committed, or its commit is decided. `detail`: `topic`, `txn`.",
    "not_found": "The route does not exist; or the watch does not exist, or has expired because no stream was open.",
    "method_not_allowed": "The route does not support this method.",
    "not_acceptable": "`Accept` excludes `text/event-stream`.",
    "request_timeout": "The request did not arrive in time.",
    "topic_exists_incompatible": "A topic's `type` cannot change (`detail`: `topic`, `existing_type`, `requested_type`); a dest already has another "
    "source (`topic`, `reason` is `router_dest_fan_in`); a router's source and dest cannot change (`router`, `reason` is "
    "`router_repoint_forbidden`, `existing_source`, `existing_dest`).",
    "router_cycle": "Copies would form a cycle. `detail`: `cycle`, topic names, first and last the same; `*` for those outside the key's prefixes.",
    "topic_not_empty": "`if_empty` was given, and the topic has records. `detail`: `topic`, `count`.",
    "not_a_queue": "The topic is a log. `detail`: `topic`.",
    "consumer_overlap": "Two consumers of a topic with `retention: work_queue` would get the same records. "
    "`detail`: `topic`, and `consumer`, the existing one (empty: the queue's own).",
    "no_cold_tier": "The server has no cold tier.",
    "plan_leased": "Another client holds the lease on the topic's plan. `detail`: `plan_id`, `retry_after_ms`.",
    "inputs_changed": "The segments of the plan no longer belong to the topic, or records are being erased; nothing was published.",
    "lease_lost": "The lease on the plan has expired. `detail`: `plan_id`.",
    "output_invalid": "The output of a job does not match the plan; nothing was published. `detail`: `group`, `reason`.",
    "consumer_not_found": "The consumer does not exist. `detail`: `topic`, `consumer`.",
    "wrong_epoch": "The seq of a reset belongs to another epoch of the topic. `detail`: `topic`, `expected`, `actual`.",
    "wrong_last_seq": "The condition of a conditional write does not hold. `detail`: `topic`, `expected`, `actual`.",
    "payload_too_large": "The body is above the size limit.",
    "unsupported_media_type": "The content type is missing or not supported by the route.",
    "misdirected_request": "Without keys: the server does not accept the name in `Host`. `detail`: `host`.",
    "topic_full": "A topic with `discard: reject` is full. "
    "`detail`: `topic`, `cap_records`, `cap_bytes`, `head_seq`, `earliest_seq`.",
    "throttled": "A cap is reached, or the server is under pressure; try again later. `detail`: `limit` and, for a cap, `max`.",
    "header_fields_too_large": "The header fields are too large.",
    "internal": "An unexpected fault, or a storage failure. `detail`: `read_only` and `reason` in the latter case; "
    '`outcome: "unknown"` if a change may reappear after a restart.',
    "not_ready": "The topic's worker is starting, failing or gone. `detail`: `replay_progress`; `shard` and `failures`; of readiness `shards`, "
    "`failing` (`shard`, `failures`, `reason` of each) and `locked`; "
    '`outcome: "unknown"` if a change may or may not have been made.',
    "shutting_down": "The server is stopping.",
}


def document(version: str) -> Json:
    """The complete document. `version` is that of the server."""
    paths, schemas = _paths(), components()
    _add_ignored(paths, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "topics",
            "version": version,
            "summary": "A durable event log over HTTP.",
            "description": "Records are written to named topics, where each gets a seq, and can be read from any point until a limit, "
            "an age or a delete removes them. Unknown fields are ignored on both sides; those of a request are listed in `ignored` of the answer. "
            "Times are in milliseconds. A query boolean is `true`, `1`, `false` or `0`; other values, and query numbers that are not numbers, count as absent.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        # A server without keys requires none.
        "security": [{}, {"bearerAuth": []}],
        "tags": [
            {"name": "topics", "description": "Topics and their configuration."},
            {"name": "records", "description": "Writing, reading and deleting records."},
            {"name": "queues", "description": "Job queues with leases, acks and redelivery."},
            {
                "name": "consumers",
                "description": "Named positions in a topic, kept by the server, with leases and acks.",
            },
            {
                "name": "routers",
                "description": "Rules that copy the records written to a topic into another topic.",
            },
            {
                "name": "consolidation",
                "description": "Merging cold segments with external jobs, and reading them as files.",
            },
            {
                "name": "transactions",
                "description": "Batches that are appended exactly once, however often they are sent.",
            },
            {"name": "watch", "description": "Following topics, as server-sent events or over a WebSocket."},
            {"name": "server", "description": "The server itself."},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": _error_responses(),
            "securitySchemes": {
                "bearerAuth": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key of the server. Not needed if the server has none.",
                }
            },
        },
    }


def _add_ignored(paths: Json, schemas: Json) -> None:
    """Add `ignored` to the JSON answers of all requests that can be strict."""
    for operations in paths.values():
        for made in operations.values():
            for status, answer in made["responses"].items() if STRICT in made.get("parameters", ()) else ():
                if status.startswith("2"):
                    name = answer["content"][JSON_TYPE]["schema"]["$ref"].rpartition("/")[2]
                    schemas[name]["properties"]["ignored"] = IGNORED


# -- errors ------------------------------------------------------------------------------------------------


def _error_responses() -> Json:
    return {f"Error{status}": _error_response(status) for status in sorted(set(STATUS.values()))}


def _error_response(status: int) -> Json:
    codes = [code for code, its in STATUS.items() if its == status]
    found: Json = {
        "description": "\n".join(f"- `{code}`: {CODES[code]}" for code in codes),
        "content": {JSON_TYPE: {"schema": {"$ref": REF.format(name="ErrorBody")}}},
    }
    if status in (429, 503):
        found["headers"] = {
            "Retry-After": header({"type": "integer", "minimum": 0}, "Seconds to wait.", required=True)
        }
    return found


def _paths() -> Json:
    health = {"200": json_answer("Health", "The front is alive.")}
    ready = {"200": json_answer("Readiness", "All topics are served.")}
    return {
        "/v0/topics": {"get": _list_topics()},
        "/v0/topics/{topic}": {
            "put": _put_topic(),
            "get": _get_topic(),
            "delete": _delete_topic(),
            "post": _write(),
        },
        "/v0/topics/{topic}/raw": {"post": _write_raw()},
        "/v0/topics/{topic}/records": {"get": _read_page()},
        "/v0/topics/{topic}/diff": {"post": _read()},
        "/v0/topics/{topic}/delete": {"post": _delete_records()},
        "/v0/topics/{topic}/deleted": {"get": _deleted()},
        "/v0/topics/{topic}/tags": {"get": _tags()},
        "/v0/topics/{topic}/last": {"get": _last()},
        **consumer_paths(),
        **forward_paths(),
        **merge_paths(),
        **transaction_paths(),
        "/v0/watch": {"post": _make_watch()},
        "/v0/watch/{wid}": {"get": _stream()},
        "/v0/ws": {"get": _websocket()},
        "/v0/health": {"get": _probe("health", "Check whether the server is alive", health, ())},
        "/v0/ready": {"get": _probe("ready", "Check whether all topics are served", ready, (503,))},
        "/healthz": {"get": _probe("healthz", "Same as `/v0/health`", health, ())},
        "/readyz": {"get": _probe("readyz", "Same as `/v0/ready`", ready, (503,))},
        "/v0/metrics": {"get": _metrics("metrics", "Get metrics")},
        "/metrics": {"get": _metrics("metrics_alias", "Same as `/v0/metrics`")},
        "/v0/openapi.json": {"get": _openapi()},
    }


def _list_topics() -> Json:
    return operation(
        "list_topics",
        "topics",
        "List topics",
        scopes=["read"],
        description="Ordered by name. A key with prefixes sees only topics with one of them.",
        parameters=[
            query("prefix", TEXT, "Only names that start with this."),
            *page_of("topics"),
            flag("touch", False, "Whether this counts as a read of each listed topic."),
        ],
        answers={"200": json_answer("TopicList", "A page of topics.")},
        errors=(*KEYED, 503),
    )


def _put_topic() -> Json:
    return operation(
        "put_topic",
        "topics",
        "Create a topic or replace its configuration",
        scopes=["admin"],
        description="Omitted fields return to their defaults. An empty body means all defaults and needs no content type.",
        parameters=[topic_name(creates=True)],
        body={"required": False, "content": {JSON_TYPE: content_of("ConfigBody")}},
        answers={
            "200": json_answer("TopicPut", "The topic existed; this is its new configuration."),
            "201": json_answer("TopicPut", "Created."),
        },
        errors=(*KEYED, *WITH_BODY, 409, 503),
    )


def _get_topic() -> Json:
    return operation(
        "get_topic",
        "topics",
        "Get the state and configuration of a topic",
        scopes=["read"],
        parameters=[topic_name(), flag("touch", True, "Whether this counts as a read.")],
        answers={"200": json_answer("Topic", "The topic.")},
        errors=WITH_TOPIC,
    )


def _delete_topic() -> Json:
    return operation(
        "delete_topic",
        "topics",
        "Delete a topic with all its records",
        scopes=["delete"],
        description="If the topic does not exist, `deleted` is false.",
        parameters=[topic_name(), flag("if_empty", False, "Fail with 409 if the topic has records.")],
        answers={"200": json_answer("TopicDeleted", "Deleted.")},
        errors=(*KEYED, 409, 503),
    )


def _write() -> Json:
    lines = {"schema": TEXT | {"description": "One RecordBody per line."}}
    return operation(
        "write",
        "records",
        "Write records",
        scopes=["write"],
        description="All records are stored, or none. With `application/x-ndjson` each line is one record (RecordBody), and the other fields "
        "are query parameters.",
        parameters=[
            topic_name(creates=True),
            *_WRITE_OPTIONS,
            query("node", _NODE, "NDJSON only: as `node` of WriteBody."),
            query("create", BOOLEAN, "NDJSON only: as `create` of WriteBody."),
        ],
        body={"required": True, "content": {JSON_TYPE: content_of("WriteBody"), LINES_TYPE: lines}},
        answers=_WRITTEN,
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 422),
    )


def _write_raw() -> Json:
    return operation(
        "write_raw",
        "records",
        "Write the body as one record",
        scopes=["write"],
        description="Accepts any content type. A body of type `application/json` must be valid JSON. Otherwise a JSON object or array is stored "
        "as JSON, other UTF-8 text as a string, and anything else as bytes.",
        parameters=[
            topic_name(creates=True),
            *_WRITE_OPTIONS,
            query("tag", TEXT | {"maxLength": TAG_CHARACTERS_MAX}, "The record's `tag`."),
            query("node", _NODE, "The record's `node`."),
            query("create", BOOLEAN, "As `create` of WriteBody."),
        ],
        body={"required": False, "content": {JSON_TYPE: {"schema": {}}, "*/*": {}}},
        answers=_WRITTEN,
        errors=(*WITH_TOPIC, *WITH_BODY, 422),
    )


_NODE: Json = TEXT | {"maxLength": limits.NODE_BYTES_MAX}
_WRITE_OPTIONS: list[Json] = [
    flag("return_seqs", True, "false omits `seqs` from the answer."),
    flag("include_epoch", False, "As `include_epoch` of WriteBody."),
    {
        "name": "Idempotency-Key",
        "in": "header",
        "schema": TEXT | {"minLength": 1, "maxLength": limits.KEY_BYTES_MAX},
        "description": "A write with a key that was used before returns the seqs of the first write. 1 to 256 bytes.",
    },
]
_WRITTEN: Json = {
    "200": json_answer("Written", "Written, now or before with the same idempotency key."),
    "201": json_answer("Written", "Written; the topic was created."),
}


def _read_page() -> Json:
    fields = components()["DiffBody"]["properties"]
    numbers = ("from_seq", "from_ts", "limit", "max_batch_bytes", "wait_ms")
    flags = ("include_tags", "include_meta", "include_data", "include_epoch")
    return operation(
        "read_page",
        "records",
        "Read records after a seq, with GET",
        scopes=["read"],
        description="Same as `POST /v0/topics/{topic}/diff`, with the fields of DiffBody in the query.",
        parameters=[
            topic_name(),
            *(query(name, fields[name], fields[name].pop("description")) for name in (*numbers, *flags)),
            query("epoch", TEXT | {"maxLength": 64}, "As `epoch` of DiffBody."),
            query("node", TEXT, "Exclude records of this node."),
            query("tag", TEXT, "Only records with this tag or, with a final `*`, this tag prefix."),
            query(
                "subject",
                TEXT | {"pattern": SUBJECT_PATTERN},
                "Only records whose tag matches this dotted pattern: `*` matches one token, a final `>` one or more. Takes precedence over `tag`.",
            ),
        ],
        answers={"200": _diff_page()},
        errors=WITH_TOPIC,
    )


def _diff_page() -> Json:
    number: Json = {"type": "integer", "minimum": 0}
    pages = json_answer("Page", "A page of records, in the format selected by `Accept`.")
    pages["content"][FRAMES_TYPE] = {}  # binary: no schema
    pages["headers"] = {
        "Topics-Next-From-Seq": header(number, "With frames: the next `from_seq`."),
        "Topics-Head-Seq": header(number, "With frames: highest seq of the topic."),
        "Topics-Earliest-Seq": header(number, "With frames: first seq that still exists."),
        "Topics-Count": header(number, "With frames: number of frames."),
        "Topics-Caught-Up": header(BOOLEAN, "With frames: `true` or `false`."),
        "Topics-Epoch": header(TEXT, "With frames, if requested: `epoch`."),
        "Topics-Ignored": header(
            TEXT, "With frames, instead of `ignored`: the paths, percent-encoded and separated by commas."
        ),
        "Topics-Tombstone": {
            "description": "With frames, if there is one: a Tombstone as JSON.",
            "content": {JSON_TYPE: content_of("Tombstone")},
        },
    }
    return pages


def _read() -> Json:
    return operation(
        "read",
        "records",
        "Read records after a seq",
        scopes=["read"],
        description="An empty body means all defaults and needs no content type. With `Accept: application/vnd.topics.frames` the answer "
        f"is binary frames; `limit` is then at most {limits.FRAMES_LIMIT_MAX} and by default as many as fit, and "
        "`max_batch_bytes` is 8 MiB by default.",
        parameters=[topic_name()],
        body={"required": False, "content": {JSON_TYPE: content_of("DiffBody")}},
        answers={"200": _diff_page()},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _delete_records() -> Json:
    return operation(
        "delete_records",
        "records",
        "Delete records",
        scopes=["delete"],
        description="Permanent. Readers get no tombstone. Records written later are not affected.",
        parameters=[topic_name()],
        body={"required": True, "content": {JSON_TYPE: content_of("DeleteBody")}},
        answers={"200": json_answer("Deleted", "The number of deleted records, and what is left.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _deleted() -> Json:
    seq: Json = {"type": "integer", "minimum": 0, "maximum": U64_MAX, "default": 0}
    limit: Json = {"type": "integer", "minimum": 0, "default": limits.DIFF_LIMIT_DEFAULT}
    return operation(
        "list_deleted",
        "records",
        "List the deleted seqs of a topic",
        scopes=["read"],
        description="Seqs whose records were removed by deletes, acks, moves to a dead-letter topic, `cap_per_tag` or the record's own TTL. "
        "Seqs reported to readers in a tombstone are not included.",
        parameters=[
            topic_name(),
            query("from_seq", seq, "Only seqs after this one."),
            query("limit", limit, "Maximum number of ranges on the page. 0 means 256; at most 1000."),
        ],
        answers={
            "200": json_answer(
                "DeletedRanges", "A page of ranges; it may be short or empty before the last page."
            )
        },
        errors=WITH_TOPIC,
    )


def _tags() -> Json:
    return operation(
        "list_tags",
        "records",
        "List the tags of a topic",
        scopes=["read"],
        parameters=[topic_name(), query("prefix", TEXT, "Only tags that start with this."), *page_of("tags")],
        answers={"200": json_answer("TagList", "A page of tags.")},
        errors=WITH_TOPIC,
    )


def _last() -> Json:
    return operation(
        "last_records",
        "records",
        "Get the newest record by tag",
        scopes=["read"],
        description="Requires `tag` or `subject`; `subject` takes precedence. Records have `$tag`.",
        parameters=[
            topic_name(),
            query("tag", TEXT, "A tag, or a prefix with a final `*`."),
            query(
                "subject",
                TEXT | {"pattern": SUBJECT_PATTERN},
                "Dotted pattern: `*` matches one token, a final `>` one or more.",
            ),
            flag(
                "each", False, "Return the newest record of each matching tag, instead of the newest of all."
            ),
            *page_of("records"),
        ],
        answers={"200": json_answer("LastRecords", "The newest records.")},
        errors=WITH_TOPIC,
    )


def _make_watch() -> Json:
    return operation(
        "make_watch",
        "watch",
        "Create a watch",
        scopes=["read"],
        description="The answer has the path of its stream. The session keeps the cursors, also across restarts, and expires "
        f"{SESSION_TTL_MS // 1000} s after its stream was closed, or after it was created if no stream is opened.",
        parameters=[flag("lenient", False, "Skip topics that do not exist, instead of answering 404.")],
        body={"required": True, "content": {JSON_TYPE: content_of("WatchBody")}},
        answers={"200": json_answer("WatchMade", "The session, and the start of each topic.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _stream() -> Json:
    return operation(
        "stream_watch",
        "watch",
        "Follow topics as server-sent events",
        description="Requires the key that created the watch, if any. Events: `record` (`topic`, `records`, `from_seq`, "
        "`to_seq`, `head_seq`), `tombstone` (`topic`, `reason`, `gap_from`, `gap_to`, `earliest_seq`, `head_seq`), `caught-up` (`topic`, "
        "`head_seq`), `topic-deleted` (`topic`, `head_seq`, `reason`), `error` (`code`, `error`, `message`). All but `error` have "
        "an id. A client that reconnects with the last id misses nothing; without it, it may miss events that were in transit. A second stream "
        "of the same watch ends the first.",
        parameters=[
            {
                "name": "wid",
                "in": "path",
                "required": True,
                "schema": TEXT | {"minLength": 1},
                "description": "`wid` of the watch.",
            },
            query(
                "token",
                TEXT,
                "The API key, for clients that cannot set headers, such as a browser's EventSource.",
            ),
            {
                "name": "Last-Event-ID",
                "in": "header",
                "schema": TEXT,
                "description": "Id of the last event received; the stream continues after it, even if the session's cursors are further ahead.",
            },
        ],
        answers={
            "200": {"description": "An endless stream of events.", "content": {EVENTS_TYPE: {"schema": TEXT}}}
        },
        errors=(*ANY_ROUTE, 404, 406, 429, 503),
    )


def _websocket() -> Json:
    return operation(
        "websocket",
        "watch",
        "Follow and write over one WebSocket",
        description="JSON messages in both directions, with their type in `op`. To the server: `subscribe`, `unsubscribe`, `publish`, `ping`. "
        "From the server: `subscribed`, `unsubscribed`, `ack`, `pong`, `error`, and pushed `record`, `caught_up`, `tombstone`, `topic_deleted`. "
        "Any valid key may connect; each message is authorized separately. A request without a WebSocket upgrade gets 400.",
        answers={"101": {"description": "The connection is a WebSocket."}},
        errors=(*ANY_ROUTE, 429, 503),
    )


def _probe(operation_id: str, summary: str, answers: Json, errors: tuple[int, ...]) -> Json:
    return operation(
        operation_id,
        "server",
        summary,
        description="Requires no key, unless the server is configured to require one for probes.",
        answers=answers,
        errors=(*ANY_ROUTE, *errors),
    )


def _metrics(operation_id: str, summary: str) -> Json:
    answer = json_answer("Metrics", "Metrics as Prometheus text, or as JSON if `Accept` asks for it.")
    answer["content"][TEXT_TYPE] = {"schema": TEXT}
    return operation(operation_id, "server", summary, scopes=["read"], answers={"200": answer}, errors=KEYED)


def _openapi() -> Json:
    answer = {"description": "OpenAPI 3.1.", "content": {JSON_TYPE: {"schema": {"type": "object"}}}}
    return operation(
        "openapi",
        "server",
        "This document",
        description="Requires any valid key, if the server has keys.",
        answers={"200": answer},
        errors=(*ANY_ROUTE, 429, 503),
    )


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(document(topics.__version__)), indent=2).decode())
