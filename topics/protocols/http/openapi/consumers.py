"""Queues and consumers in the OpenAPI document."""

from __future__ import annotations

from topics.api import limits
from topics.link.job_streams import MAX_MAX, MAX_MIN, STREAM_MAX_DEFAULT, WORK_MAX_DEFAULT
from topics.protocols.http.openapi.operations import (
    EVENTS_TYPE,
    JSON_TYPE,
    TEXT,
    WITH_BODY,
    WITH_TOPIC,
    content_of,
    json_answer,
    operation,
    page_of,
    query,
    topic_name,
)
from topics.protocols.http.openapi.schemas import TOPIC_PATTERN, Json

LEASES = (
    "Applies to seqs on which `node` holds an active lease and, if `lease_ids` are given, exactly that one. Others are returned in "
    "`skipped`, which is not an error."
)


def consumer_paths() -> Json:
    queue, consumer = "/v0/topics/{topic}", "/v0/topics/{topic}/consumers/{consumer}"
    return {
        f"{queue}/claim": {"post": _claim()},
        f"{queue}/ack": {"post": _settle("ack", "Acked", "Acknowledge jobs, which deletes them")},
        f"{queue}/nack": {"post": _settle("nack", "Nacked", "Return jobs")},
        f"{queue}/extend": {"post": _settle("extend", "Extended", "Extend the leases of jobs")},
        f"{queue}/work": {"get": _work()},
        f"{queue}/consumers": {"get": _list()},
        consumer: {"put": _put(), "get": _get(), "delete": _drop()},
        f"{consumer}/fetch": {"post": _fetch()},
        f"{consumer}/stream": {"get": _stream()},
        f"{consumer}/ack": {"post": _settle_for("ack", "Acked", "Acknowledge records")},
        f"{consumer}/nack": {"post": _settle_for("nack", "Nacked", "Return records")},
        f"{consumer}/extend": {"post": _settle_for("extend", "Extended", "Extend the leases of records")},
        f"{consumer}/term": {"post": _settle_for("term", "Termed", "Stop delivering records")},
        f"{consumer}/pause": {"post": _pause()},
        f"{consumer}/resume": {"post": _resume()},
        f"{consumer}/reset": {"post": _reset()},
    }


def _consumer_name(*, creates: bool = False) -> Json:
    schema: Json = TEXT | ({"pattern": TOPIC_PATTERN} if creates else {"minLength": 1})
    text = "Name of the consumer."
    return {"name": "consumer", "in": "path", "required": True, "schema": schema, "description": text}


def _named() -> list[Json]:
    return [topic_name(), _consumer_name()]


def _body(name: str, *, required: bool = True) -> Json:
    return {"required": required, "content": {JSON_TYPE: content_of(name)}}


# -- queues ------------------------------------------------------------------------------------------------


def _claim() -> Json:
    return operation(
        "claim",
        "queues",
        "Claim jobs",
        scopes=["read", "write"],
        description="Returned jobs come first, then the oldest. Each is leased to `node`, and not delivered to others until it is settled or "
        "the lease expires. Getting fewer than `max`, or none, is normal.",
        parameters=[topic_name()],
        body=_body("ClaimBody"),
        answers={"200": json_answer("Claimed", "The jobs.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _settle(call: str, name: str, summary: str) -> Json:
    return operation(
        call,
        "queues",
        summary,
        scopes=["write"],
        description=LEASES,
        parameters=[topic_name()],
        body=_body(f"{call.capitalize()}Body"),
        answers={"200": json_answer(name, "The result, and the skipped seqs.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _work() -> Json:
    return operation(
        "work",
        "queues",
        "Stream jobs as server-sent events",
        scopes=["read", "write"],
        description="Events: `job` (a claimed job and `topic`; its id is the seq), `error` (`code`, `error`, `message`, and `topic` if the "
        "error concerns the topic). Jobs that are not settled when the stream ends are ready again at once.",
        parameters=[topic_name(), *_pushed(WORK_MAX_DEFAULT)],
        answers={"200": _events()},
        errors=(*WITH_TOPIC, 406, 409),
    )


def _pushed(max_default: int) -> list[Json]:
    """Query parameters of a job stream."""
    node: Json = TEXT | {"minLength": 1, "maxLength": limits.NODE_BYTES_MAX}
    most: Json = {"type": "integer", "minimum": MAX_MIN, "maximum": MAX_MAX, "default": max_default}
    return [
        query("node", node, "Name of the worker; the length is in bytes of UTF-8.") | {"required": True},
        query(
            "max",
            most,
            "Maximum number of leases that the stream holds at a time; values outside the range are clamped.",
        ),
        query(
            "lease_ms",
            {"type": "integer", "minimum": 100, "maximum": 86_400_000},
            "Duration of the leases, instead of the configured one; values outside the range are clamped.",
        ),
        query(
            "token",
            TEXT,
            "The API key, for clients that cannot set headers, such as a browser's EventSource.",
        ),
    ]


def _events() -> Json:
    return {"description": "An endless stream of events.", "content": {EVENTS_TYPE: {"schema": TEXT}}}


# -- consumers ---------------------------------------------------------------------------------------------


def _list() -> Json:
    return operation(
        "list_consumers",
        "consumers",
        "List the consumers of a topic",
        scopes=["read"],
        parameters=[topic_name(), *page_of("consumers")],
        answers={"200": json_answer("ConsumerList", "A page of consumers.")},
        errors=WITH_TOPIC,
    )


def _put() -> Json:
    return operation(
        "put_consumer",
        "consumers",
        "Create a consumer or replace its configuration",
        scopes=["admin"],
        description="Omitted fields return to their defaults; the consumer keeps its position. An empty body means all defaults and "
        "needs no content type.",
        parameters=[topic_name(), _consumer_name(creates=True)],
        body=_body("ConsumerBody", required=False),
        answers={
            "200": json_answer("ConsumerPut", "The consumer existed; this is its new configuration."),
            "201": json_answer("ConsumerPut", "Created."),
        },
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _get() -> Json:
    return operation(
        "get_consumer",
        "consumers",
        "Get the configuration and state of a consumer",
        scopes=["read"],
        parameters=_named(),
        answers={"200": json_answer("ConsumerState", "The consumer.")},
        errors=WITH_TOPIC,
    )


def _drop() -> Json:
    return operation(
        "delete_consumer",
        "consumers",
        "Delete a consumer",
        scopes=["delete"],
        description="Its position is lost. If the consumer does not exist, `deleted` is false.",
        parameters=_named(),
        answers={"200": json_answer("ConsumerDeleted", "Deleted.")},
        errors=WITH_TOPIC,
    )


def _fetch() -> Json:
    return operation(
        "fetch",
        "consumers",
        "Fetch records of a consumer",
        scopes=["read", "write"],
        description="Returned records come first, then the next ones. Each is leased to `node`, unless the consumer has `ack: none`. "
        "Getting fewer than `max`, or none, is normal.",
        parameters=_named(),
        body=_body("FetchBody"),
        answers={"200": json_answer("Fetched", "The records.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _settle_for(call: str, name: str, summary: str) -> Json:
    return operation(
        f"{call}_for_consumer",
        "consumers",
        summary,
        scopes=["write"],
        description=LEASES,
        parameters=_named(),
        body=_body(f"{call.capitalize()}Body"),
        answers={"200": json_answer(name, "The result, and the skipped seqs.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _pause() -> Json:
    return operation(
        "pause_consumer",
        "consumers",
        "Pause a consumer",
        scopes=["admin"],
        description="An empty body means until resumed, and needs no content type.",
        parameters=_named(),
        body=_body("PauseBody", required=False),
        answers={"200": json_answer("ConsumerState", "The consumer, paused.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _resume() -> Json:
    return operation(
        "resume_consumer",
        "consumers",
        "Resume a paused consumer",
        scopes=["admin"],
        parameters=_named(),
        answers={"200": json_answer("ConsumerState", "The consumer.")},
        errors=WITH_TOPIC,
    )


def _reset() -> Json:
    return operation(
        "reset_consumer",
        "consumers",
        "Reset a consumer to another position",
        scopes=["admin"],
        description="Leases and pending records are dropped. With `dry_run` nothing changes, and the answer shows what would.",
        parameters=_named(),
        body=_body("ResetBody"),
        answers={"200": json_answer("ConsumerReset", "The old and the new position.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _stream() -> Json:
    return operation(
        "stream_consumer",
        "consumers",
        "Stream records of a consumer as server-sent events",
        scopes=["read", "write"],
        description="Events: `record` (a fetched record, `topic` and `consumer`; its id is the seq), `tombstone` (`topic`, `consumer`, "
        "`reason`, `gap_from`, `gap_to`, `earliest_seq`, `head_seq`), `error` (`code`, `error`, `message`). The stream continues from the "
        "consumer's position. Records that are not settled when it ends are ready again at once.",
        parameters=[*_named(), *_pushed(STREAM_MAX_DEFAULT)],
        answers={"200": _events()},
        errors=(*WITH_TOPIC, 406),
    )
