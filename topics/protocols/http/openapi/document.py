"""The OpenAPI document: the table of operations, with schemas generated from the request and response types.

`python -m topics.protocols.http.openapi.document` prints it.
"""

from __future__ import annotations

import msgspec

import topics
from topics.api.operations import (
    ANY_TYPE,
    BOOLEAN,
    EVENTS_TYPE,
    FRAMES_TYPE,
    JSON_TYPE,
    LINES_TYPE,
    OPERATIONS,
    TEXT,
    TEXT_TYPE,
    Operation,
)
from topics.api.responses.records import Tombstone
from topics.protocols.http.errors import STATUS
from topics.protocols.http.openapi.schemas import REF, ROUTER_PATTERN, TOPIC_PATTERN, Json, components
from topics.protocols.json.unknown_fields import PATHS_MAX

ANY_ROUTE = (400, 401, 403, 408, 421, 431, 500)  # statuses of errors
WITH_BODY = (413, 415)
STRICT: Json = {
    "name": "Topics-Strict",
    "in": "header",
    "schema": TEXT,
    "description": "`1`: unknown fields in the body are an error (400 `invalid_request`) instead of being ignored.",
}
_ID = "Id returned by the call that created it."
PATH_NAMES = {
    "topic": "Name of the topic; an invalid name is not found (404).",
    "consumer": "Name of the consumer.",
    "router": "Name of the router, often `<source>-><dest>`.",
    "txn": "`txn` returned by the begin call.",
    "wid": "`wid` of the watch.",
    "plan_id": _ID,
    "snapshot_id": _ID,
}

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
    schemas = components()
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
        "paths": _paths(schemas),
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
            "Retry-After": _header({"type": "integer", "minimum": 0}, "Seconds to wait.", required=True)
        }
    return found


def _header(schema: Json, description: str, *, required: bool = False) -> Json:
    return {"schema": schema, "description": description, "required": required}


# -- operations --------------------------------------------------------------------------------------------


def _paths(schemas: Json) -> Json:
    paths: Json = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schemas)
    return paths


def _operation(one: Operation, schemas: Json) -> Json:
    made: Json = {"operationId": one.name, "tags": [one.tag], "summary": one.summary}
    if one.description:
        made["description"] = one.description
    if one.scopes:
        made["security"] = [{}, {"bearerAuth": [*one.scopes]}]
    if one.accepts:
        made["requestBody"] = {
            "required": not one.body_optional,
            "content": {kind: _content(one, kind) for kind in _kinds(one)},
        }
    parameters = [*map(_path_name, [one] * len(one.names_in_path), one.names_in_path), *one.parameters]
    if one.body is not None:
        parameters.append(STRICT)
        for answer, _ in one.answers.values():
            if answer is not None:
                schemas[answer.__name__]["properties"]["ignored"] = IGNORED
    if parameters:
        made["parameters"] = parameters
    errors = {*ANY_ROUTE, *one.errors, *(WITH_BODY if one.accepts else ())}
    made["responses"] = {
        str(status): _answer(one, answer, text) for status, (answer, text) in one.answers.items()
    } | {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(errors)}
    return made


def _path_name(one: Operation, name: str) -> Json:
    schema: Json = {"minLength": 1}
    text = PATH_NAMES[name]
    if one.creates and name == one.names_in_path[-1]:
        schema = {"pattern": ROUTER_PATTERN if name == "router" else TOPIC_PATTERN}
        text = text.partition(";")[0].removesuffix(".") + "."
    return {"name": name, "in": "path", "required": True, "schema": TEXT | schema, "description": text}


def _kinds(one: Operation) -> tuple[str, ...]:
    return (JSON_TYPE, ANY_TYPE) if ANY_TYPE in one.accepts else one.accepts


def _content(one: Operation, kind: str) -> Json:
    if kind == LINES_TYPE:
        return {"schema": TEXT | {"description": "One RecordBody per line."}}
    if kind == JSON_TYPE:
        return {"schema": {}} if one.body is None else content_of(one.body)
    return {}


def content_of(body: type[msgspec.Struct]) -> Json:
    return {"schema": {"$ref": REF.format(name=body.__name__)}}


def _answer(one: Operation, answer: type[msgspec.Struct] | None, text: str) -> Json:
    made: Json = {"description": text}
    if answer is None and one.gives == (JSON_TYPE,):
        return made if 101 in one.answers else made | {"content": {JSON_TYPE: {"schema": {"type": "object"}}}}
    # Frames are binary, so they have no schema. A content type without one makes the answer `unknown` in generated types, also
    # for those who ask for JSON: the description names it.
    made["content"] = {
        kind: content_of(answer) if kind == JSON_TYPE and answer is not None else _OTHER_CONTENT[kind]
        for kind in one.gives
        if kind != FRAMES_TYPE
    }
    if FRAMES_TYPE in one.gives:
        made["headers"] = _frame_headers()
    return made


_OTHER_CONTENT: Json = {EVENTS_TYPE: {"schema": TEXT}, TEXT_TYPE: {"schema": TEXT}}


def _frame_headers() -> Json:
    number: Json = {"type": "integer", "minimum": 0}
    return {
        "Topics-Next-From-Seq": _header(number, "With frames: the next `from_seq`."),
        "Topics-Head-Seq": _header(number, "With frames: highest seq of the topic."),
        "Topics-Earliest-Seq": _header(number, "With frames: first seq that still exists."),
        "Topics-Count": _header(number, "With frames: number of frames."),
        "Topics-Caught-Up": _header(BOOLEAN, "With frames: `true` or `false`."),
        "Topics-Epoch": _header(TEXT, "With frames, if requested: `epoch`."),
        "Topics-Ignored": _header(
            TEXT, "With frames, instead of `ignored`: the paths, percent-encoded and separated by commas."
        ),
        "Topics-Tombstone": {
            "description": "With frames, if there is one: a Tombstone as JSON.",
            "content": {JSON_TYPE: content_of(Tombstone)},
        },
    }


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(document(topics.__version__)), indent=2).decode())
