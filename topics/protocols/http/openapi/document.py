"""The OpenAPI document: every route, and the schemas made from the types that check the bodies.

`python -m topics.protocols.http.openapi.document` prints it.
"""

from __future__ import annotations

import msgspec

import topics
from topics.api import limits
from topics.api.http_errors import STATUS
from topics.api.requests import U64_MAX
from topics.link.watch import SESSION_TTL_MS
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
from topics.protocols.http.openapi.schemas import REF, SUBJECT_PATTERN, TAG_CHARACTERS_MAX, Json, components
from topics.protocols.http.openapi.transactions import transaction_paths
from topics.protocols.http.unknown_fields import PATHS_MAX

FRAMES_TYPE, TEXT_TYPE = "application/vnd.topics.frames", "text/plain"

IGNORED: Json = {
    "type": "array",
    "items": TEXT,
    "minItems": 1,
    "maxItems": PATHS_MAX,
    "uniqueItems": True,
    "description": "Present when the request had fields that are not known, which were ignored: their paths, as `durabilty` or `records[].delay_ms`.",
}
CODES = {
    "invalid_request": "The request is malformed, has a wrong type, misses a field or exceeds a length.",
    "batch_too_large": "Too many records in a write, or seqs in a delete or an ack. `detail`: `records` or `seqs`, `max`.",
    "record_too_large": "A record is above the size limit, or the write is above the whole cap of a `reject` topic.",
    "unauthorized": "No valid key.",
    "forbidden": "The key lacks the scope, or the name is outside of its prefixes, or so is a router that would end with the topic.",
    "forbidden_origin": "Without keys, or on an upgrade to a WebSocket: a web page of another origin asks. `detail`: `origin`.",
    "topic_not_found": "There is no such topic. `detail`: `topic`.",
    "router_not_found": "There is no such router. `detail`: `router`.",
    "plan_not_found": "There is no such plan of merges: it never was, it was abandoned, or an erase has ended it. `detail`: `plan_id`.",
    "snapshot_not_found": "There is no such snapshot, or it has ended. `detail`: `snapshot_id`.",
    "txn_not_found": "There is no such transaction open: it was aborted, has expired, or never was. Begin it again. `detail`: `topic`, `txn`.",
    "txn_incomplete": "A commit names what was not staged. `detail`: `topic`, `txn`, and `parts` with what is wrong with each.",
    "txn_committed": "The transaction is committed, or is being so. `detail`: `topic`, `txn`.",
    "not_found": "There is no such route, or no such watch: it was never made, or nobody has streamed it for too long.",
    "method_not_allowed": "The route exists, but not with this method.",
    "not_acceptable": "`Accept` excludes `text/event-stream`.",
    "request_timeout": "The request did not arrive in time.",
    "topic_exists_incompatible": "A topic's `type` cannot change (`detail`: `topic`, `existing_type`, `requested_type`); a dest has another source "
    "already (`topic`, `reason` is `router_dest_fan_in`); a router cannot be pointed elsewhere (`router`, `reason` is `router_repoint_forbidden`, "
    "`existing_source`, `existing_dest`).",
    "router_cycle": "Copies would come back to where they come from. `detail`: `cycle`, names of topics, first and last the same; `*` for those that the key may not see.",
    "topic_not_empty": "`if_empty` was given and records are left. `detail`: `topic`, `count`.",
    "not_a_queue": "The topic is a log. `detail`: `topic`.",
    "consumer_overlap": "Two consumers of a topic with `retention: work_queue` would get the same records. "
    "`detail`: `topic`, and `consumer`, which is there already (empty: the queue's own).",
    "no_cold_tier": "The server has no cold tier.",
    "plan_leased": "Somebody else has the lease on the topic's plan. `detail`: `plan_id`, `retry_after_ms`.",
    "inputs_changed": "The segments of the plan are not the topic's any more, or records are being erased; nothing was published.",
    "lease_lost": "The lease on the plan has ended. `detail`: `plan_id`.",
    "output_invalid": "What a job has made is not what the plan asked for; nothing was published. `detail`: `group`, `reason`.",
    "consumer_not_found": "There is no such consumer. `detail`: `topic`, `consumer`.",
    "wrong_epoch": "The seq of a reset is of another epoch of the topic. `detail`: `topic`, `expected`, `actual`.",
    "wrong_last_seq": "A conditional write met another last seq. `detail`: `topic`, `expected`, `actual`.",
    "payload_too_large": "The body is above the size limit.",
    "unsupported_media_type": "The content type is missing or not one of those listed.",
    "misdirected_request": "Without keys: `Host` is a name that the server does not answer to. `detail`: `host`.",
    "topic_full": "A topic with `discard: reject` is full. "
    "`detail`: `topic`, `cap_records`, `cap_bytes`, `head_seq`, `earliest_seq`.",
    "throttled": "A cap is reached or the server is under pressure; try again later. `detail`: `limit` and `max` of a cap.",
    "header_fields_too_large": "The header fields are too large.",
    "internal": "An unexpected fault, or storage that failed. `detail`: `read_only` and `reason` in the latter case; "
    '`outcome: "unknown"` when a change may be back after a restart.',
    "not_ready": "The topic's worker is starting, failing or gone. `detail`: `replay_progress`; `shard` and `failures`, of readiness `shards`, "
    "`failing` (`shard`, `failures`, `reason` of each) and `locked`; "
    '`outcome: "unknown"` when a change may or may not have been made.',
    "shutting_down": "The server is stopping.",
}


def document(version: str) -> Json:
    """The whole document. `version` is that of the server."""
    paths, schemas = _paths(), components()
    _add_ignored(paths, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "topics",
            "version": version,
            "summary": "A durable event log over HTTP.",
            "description": "Records go into named topics, get a seq each, and stay readable from any point until a limit, "
            "an age or a delete removes them. Unknown fields are ignored on both sides, and named in `ignored` of the answer. Times are milliseconds. "
            "A query boolean is `true`, `1`, `false` or `0`; anything else counts as absent, and so does a query number that is none.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        # Without keys the server asks for none.
        "security": [{}, {"bearerAuth": []}],
        "tags": [
            {"name": "topics", "description": "Topics and their configuration."},
            {"name": "records", "description": "Writing, reading and deleting records."},
            {"name": "queues", "description": "Jobs: handed out under leases, acked, handed out again."},
            {
                "name": "consumers",
                "description": "Places in a topic that the server keeps, with leases and acks.",
            },
            {
                "name": "routers",
                "description": "Rules that copy what is written to a topic into another one.",
            },
            {
                "name": "consolidation",
                "description": "Merging old segments with jobs, and reading them as files.",
            },
            {
                "name": "transactions",
                "description": "Batches that appear once and whole, however often they are sent.",
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
                    "description": "One of the server's keys. Not needed when the server has none.",
                }
            },
        },
    }


def _add_ignored(paths: Json, schemas: Json) -> None:
    """Any JSON answer to a request that may be strict may have it."""
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
        "/v0/health": {"get": _probe("health", "Whether the server is alive", health, ())},
        "/v0/ready": {"get": _probe("ready", "Whether all topics are served", ready, (503,))},
        "/healthz": {"get": _probe("healthz", "The same as `/v0/health`", health, ())},
        "/readyz": {"get": _probe("readyz", "The same as `/v0/ready`", ready, (503,))},
        "/v0/metrics": {"get": _metrics("metrics", "Metrics")},
        "/metrics": {"get": _metrics("metrics_alias", "The same as `/v0/metrics`")},
        "/v0/openapi.json": {"get": _openapi()},
    }


def _list_topics() -> Json:
    return operation(
        "list_topics",
        "topics",
        "List topics",
        scopes=["read"],
        description="In ascending order of their names; a key with prefixes sees its own only.",
        parameters=[
            query("prefix", TEXT, "Only names that start with this."),
            *page_of("topics"),
            flag("touch", False, "Whether this counts as a read of every topic listed."),
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
        description="What the body leaves out returns to its default. An empty body is all defaults and needs no content type.",
        parameters=[topic_name(creates=True)],
        body={"required": False, "content": {JSON_TYPE: content_of("ConfigBody")}},
        answers={
            "200": json_answer("TopicPut", "The topic existed; this is its configuration now."),
            "201": json_answer("TopicPut", "Created."),
        },
        errors=(*KEYED, *WITH_BODY, 409, 503),
    )


def _get_topic() -> Json:
    return operation(
        "get_topic",
        "topics",
        "State and configuration of a topic",
        scopes=["read"],
        parameters=[topic_name(), flag("touch", True, "Whether this counts as a read.")],
        answers={"200": json_answer("TopicState", "The topic.")},
        errors=WITH_TOPIC,
    )


def _delete_topic() -> Json:
    return operation(
        "delete_topic",
        "topics",
        "Delete a topic with all its records",
        scopes=["delete"],
        description="A topic that does not exist is no error: `deleted` is false.",
        parameters=[topic_name(), flag("if_empty", False, "Refuse with 409 while records are left.")],
        answers={"200": json_answer("TopicDeleted", "The topic is gone.")},
        errors=(*KEYED, 409, 503),
    )


def _write() -> Json:
    lines = {"schema": TEXT | {"description": "One RecordBody a line."}}
    return operation(
        "write",
        "records",
        "Write records",
        scopes=["write"],
        description="All records or none. With `application/x-ndjson` each line is one record (RecordBody), and what a JSON body says "
        "beside its records comes in the query.",
        parameters=[
            topic_name(creates=True),
            *_WRITE_OPTIONS,
            query("node", _NODE, "Lines only: for records without one."),
            query("create", BOOLEAN, "Lines only: as `create` of WriteBody."),
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
        description="Whatever its content type. `application/json` must be valid JSON. Otherwise an object or an array is stored as JSON, "
        "other UTF-8 text as a string, and anything else as bytes.",
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
    flag("return_seqs", True, "false leaves `seqs` out of the answer."),
    flag("include_epoch", False, "As `include_epoch` of WriteBody."),
    {
        "name": "Idempotency-Key",
        "in": "header",
        "schema": TEXT | {"minLength": 1, "maxLength": limits.KEY_BYTES_MAX},
        "description": "A write with a key that was used before returns the seqs of the first one. 1 to 256 bytes.",
    },
]
_WRITTEN: Json = {
    "200": json_answer("Written", "Written, or known by its idempotency key."),
    "201": json_answer("Written", "Written; the topic was created."),
}


def _read_page() -> Json:
    fields = components()["DiffBody"]["properties"]
    numbers = ("from_seq", "from_ts", "limit", "max_batch_bytes", "wait_ms")
    flags = ("include_tags", "include_meta", "include_data", "include_epoch")
    return operation(
        "read_page",
        "records",
        "Read what comes after a seq, with GET",
        scopes=["read"],
        description="The same as `POST /v0/topics/{topic}/diff`, with the fields of DiffBody in the query.",
        parameters=[
            topic_name(),
            *(query(name, fields[name], fields[name].pop("description")) for name in (*numbers, *flags)),
            query("epoch", TEXT | {"maxLength": 64}, "As `epoch` of DiffBody."),
            query("node", TEXT, "Leave out records of this node."),
            query(
                "tag",
                TEXT,
                "Only records with this tag, or whose tag begins with what is before a final `*`.",
            ),
            query(
                "subject",
                TEXT | {"pattern": SUBJECT_PATTERN},
                "Only records whose tag matches this dotted pattern: `*` stands for one token, a final `>` for one or more. Wins over `tag`.",
            ),
        ],
        answers={"200": _diff_page()},
        errors=WITH_TOPIC,
    )


def _diff_page() -> Json:
    number: Json = {"type": "integer", "minimum": 0}
    pages = json_answer("DiffPage", "A page of records; in the form that `Accept` asks for.")
    # Frames are bytes: there is no schema for them.
    pages["content"][FRAMES_TYPE] = {}
    pages["headers"] = {
        "Topics-Next-From-Seq": header(number, "With frames: the next `from_seq`."),
        "Topics-Head-Seq": header(number, "With frames: highest seq of the topic."),
        "Topics-Earliest-Seq": header(number, "With frames: first seq that is still there."),
        "Topics-Count": header(number, "With frames: how many."),
        "Topics-Caught-Up": header(BOOLEAN, "With frames: `true` or `false`."),
        "Topics-Epoch": header(TEXT, "With frames, when it is asked for: `epoch`."),
        "Topics-Ignored": header(
            TEXT, "With frames, in place of `ignored`: the paths, percent-encoded, separated by commas."
        ),
        "Topics-Tombstone": {
            "description": "With frames, when there is one: a Tombstone as JSON.",
            "content": {JSON_TYPE: content_of("Tombstone")},
        },
    }
    return pages


def _read() -> Json:
    return operation(
        "read",
        "records",
        "Read what comes after a seq",
        scopes=["read"],
        description="An empty body is all defaults and needs no content type. With `Accept: application/vnd.topics.frames` the answer "
        f"is binary frames; `limit` then goes up to {limits.FRAMES_LIMIT_MAX} and is as many as fit when absent, and "
        "`max_batch_bytes` is 8 MiB when absent.",
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
        description="Permanent and silent: readers get no tombstone. What is written later is not affected.",
        parameters=[topic_name()],
        body={"required": True, "content": {JSON_TYPE: content_of("DeleteBody")}},
        answers={"200": json_answer("Deleted", "What was removed, and what is left.")},
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
        description="Seqs whose records were removed on purpose: by deletes, acks, moves to a dead-letter topic, `cap_per_tag` or a TTL of "
        "their own. Seqs that readers get a tombstone for are not among them.",
        parameters=[
            topic_name(),
            query("from_seq", seq, "Only seqs after this one."),
            query("limit", limit, "Most ranges of the page; 0 means 256, more than 1000 means 1000."),
        ],
        answers={
            "200": json_answer("DeletedRanges", "A page of ranges; it may be short or empty before the end.")
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
        "Newest record by tag",
        scopes=["read"],
        description="Needs `tag` or `subject`; `subject` wins. Records show `$tag`.",
        parameters=[
            topic_name(),
            query("tag", TEXT, "A tag, or a prefix and a final `*`."),
            query(
                "subject",
                TEXT | {"pattern": SUBJECT_PATTERN},
                "Dotted pattern: `*` stands for one token, a final `>` for one or more.",
            ),
            flag("each", False, "The newest record of every matching tag, not of all of them together."),
            *page_of("records"),
        ],
        answers={"200": json_answer("LastRecords", "The newest records.")},
        errors=WITH_TOPIC,
    )


def _make_watch() -> Json:
    return operation(
        "make_watch",
        "watch",
        "Say what a stream shall follow",
        scopes=["read"],
        description="The answer names the stream. The session behind it keeps the cursors, also over restarts, and is forgotten "
        f"{SESSION_TTL_MS // 1000} s after its stream was closed, or if it never was opened.",
        parameters=[flag("lenient", False, "Leave out topics that do not exist, instead of 404.")],
        body={"required": True, "content": {JSON_TYPE: content_of("WatchBody")}},
        answers={"200": json_answer("WatchMade", "The session, and where each topic begins.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _stream() -> Json:
    return operation(
        "stream_watch",
        "watch",
        "Follow topics as server-sent events",
        description="Needs the key that made the watch, if it was made with one. Events: `record` (`topic`, `records`, `from_seq`, "
        "`to_seq`, `head_seq`), `tombstone` (`topic`, `reason`, `gap_from`, `gap_to`, `earliest_seq`, `head_seq`), `caught-up` (`topic`, "
        "`head_seq`), `topic-deleted` (`topic`, `head_seq`, `reason`), `error` (`code`, `error`, `message`). Each but the last has "
        "an id; a client that comes back with it misses nothing, without it what was on its way. A second stream of the same watch ends the first.",
        parameters=[
            {
                "name": "wid",
                "in": "path",
                "required": True,
                "schema": TEXT | {"minLength": 1},
                "description": "The watch: `wid` of the answer that made it.",
            },
            query("token", TEXT, "The key, for clients that cannot send a header, as browsers' EventSource."),
            {
                "name": "Last-Event-ID",
                "in": "header",
                "schema": TEXT,
                "description": "Id of the last event that was seen: go on after it, if the server thinks further ahead.",
            },
        ],
        answers={
            "200": {"description": "Events, without an end.", "content": {EVENTS_TYPE: {"schema": TEXT}}}
        },
        errors=(*ANY_ROUTE, 404, 406, 429, 503),
    )


def _websocket() -> Json:
    return operation(
        "websocket",
        "watch",
        "Follow and write over one WebSocket",
        description="JSON messages both ways; `op` says what they are. To the server: `subscribe`, `unsubscribe`, `publish`, `ping`. From it: "
        "`subscribed`, `unsubscribed`, `ack`, `pong`, `error`, and pushed `record`, `caught_up`, `tombstone`, `topic_deleted`. Any valid key "
        "may connect; each message is checked on its own. A request that does not ask for a WebSocket is 400.",
        answers={"101": {"description": "The connection is a WebSocket."}},
        errors=(*ANY_ROUTE, 429, 503),
    )


def _probe(operation_id: str, summary: str, answers: Json, errors: tuple[int, ...]) -> Json:
    return operation(
        operation_id,
        "server",
        summary,
        description="Needs no key, unless the server was told to ask for one here too.",
        answers=answers,
        errors=(*ANY_ROUTE, *errors),
    )


def _metrics(operation_id: str, summary: str) -> Json:
    answer = json_answer(
        "Metrics", "The server's figures: Prometheus text, or JSON when `Accept` asks for it."
    )
    answer["content"][TEXT_TYPE] = {"schema": TEXT}
    return operation(operation_id, "server", summary, scopes=["read"], answers={"200": answer}, errors=KEYED)


def _openapi() -> Json:
    answer = {"description": "OpenAPI 3.1.", "content": {JSON_TYPE: {"schema": {"type": "object"}}}}
    return operation(
        "openapi",
        "server",
        "This document",
        description="Needs any valid key, when the server has keys.",
        answers={"200": answer},
        errors=(*ANY_ROUTE, 429, 503),
    )


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(document(topics.__version__)), indent=2).decode())
