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
    "A seq counts if `node` has a lease on it that has not ended, and, with `lease_ids`, that very one; else it is in `skipped`, "
    "which is no error."
)


def consumer_paths() -> Json:
    queue, consumer = "/v0/topics/{topic}", "/v0/topics/{topic}/consumers/{consumer}"
    return {
        f"{queue}/claim": {"post": _claim()},
        f"{queue}/ack": {"post": _settle("ack", "Acked", "Done: delete jobs")},
        f"{queue}/nack": {"post": _settle("nack", "Nacked", "Not done: give jobs back")},
        f"{queue}/extend": {"post": _settle("extend", "Extended", "Hold jobs longer")},
        f"{queue}/work": {"get": _work()},
        f"{queue}/consumers": {"get": _list()},
        consumer: {"put": _put(), "get": _get(), "delete": _drop()},
        f"{consumer}/fetch": {"post": _fetch()},
        f"{consumer}/stream": {"get": _stream()},
        f"{consumer}/ack": {"post": _settle_for("ack", "Acked", "Records are done")},
        f"{consumer}/nack": {"post": _settle_for("nack", "Nacked", "Give records back")},
        f"{consumer}/extend": {"post": _settle_for("extend", "Extended", "Hold records longer")},
        f"{consumer}/term": {"post": _settle_for("term", "Termed", "Never deliver records again")},
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
        "Take jobs",
        scopes=["read", "write"],
        description="Jobs that came back first, then the oldest. Each is leased to `node` and handed to nobody else until it is settled or "
        "the lease has ended. Fewer than `max` or none is normal.",
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
        answers={"200": json_answer(name, "What was done, and what was skipped.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _work() -> Json:
    return operation(
        "work",
        "queues",
        "Get jobs as they come, as server-sent events",
        scopes=["read", "write"],
        description="Events: `job` (a claimed job and `topic`; its id is the seq), `error` (`code`, `error`, `message`, and `topic` when the "
        "stream ends because of it). Whatever is not settled when the stream ends is ready for others at once.",
        parameters=[topic_name(), *_pushed(WORK_MAX_DEFAULT)],
        answers={"200": _events()},
        errors=(*WITH_TOPIC, 406, 409),
    )


def _pushed(max_default: int) -> list[Json]:
    """The query of a stream of jobs."""
    node: Json = TEXT | {"minLength": 1, "maxLength": limits.NODE_BYTES_MAX}
    most: Json = {"type": "integer", "minimum": MAX_MIN, "maximum": MAX_MAX, "default": max_default}
    return [
        query("node", node, "Who works. In bytes of UTF-8.") | {"required": True},
        query(
            "max",
            most,
            "Most leases that the stream holds at a time; what is outside of the range is clamped.",
        ),
        query(
            "lease_ms",
            {"type": "integer", "minimum": 100, "maximum": 86_400_000},
            "How long leases hold, if not as configured; what is outside of the range is clamped.",
        ),
        query("token", TEXT, "The key, for clients that cannot send a header, as browsers' EventSource."),
    ]


def _events() -> Json:
    return {"description": "Events, without an end.", "content": {EVENTS_TYPE: {"schema": TEXT}}}


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
        description="What the body leaves out returns to its default; the consumer keeps its place. An empty body is all defaults and "
        "needs no content type.",
        parameters=[topic_name(), _consumer_name(creates=True)],
        body=_body("ConsumerBody", required=False),
        answers={
            "200": json_answer("ConsumerPut", "It existed; this is its configuration now."),
            "201": json_answer("ConsumerPut", "Created."),
        },
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _get() -> Json:
    return operation(
        "get_consumer",
        "consumers",
        "Configuration and state of a consumer",
        scopes=["read"],
        parameters=_named(),
        answers={"200": json_answer("Consumer", "The consumer.")},
        errors=WITH_TOPIC,
    )


def _drop() -> Json:
    return operation(
        "delete_consumer",
        "consumers",
        "Delete a consumer with its place",
        scopes=["delete"],
        description="A consumer that does not exist is no error: `deleted` is false.",
        parameters=_named(),
        answers={"200": json_answer("ConsumerDeleted", "The consumer is gone.")},
        errors=WITH_TOPIC,
    )


def _fetch() -> Json:
    return operation(
        "fetch",
        "consumers",
        "Get records of a consumer",
        scopes=["read", "write"],
        description="Records that came back first, then the next ones. Each is leased to `node`, unless the consumer needs no acks. "
        "Fewer than `max` or none is normal.",
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
        answers={"200": json_answer(name, "What was done, and what was skipped.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _pause() -> Json:
    return operation(
        "pause_consumer",
        "consumers",
        "Hand out nothing for a while",
        scopes=["admin"],
        description="An empty body means until it is resumed, and needs no content type.",
        parameters=_named(),
        body=_body("PauseBody", required=False),
        answers={"200": json_answer("Consumer", "The consumer, paused.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _resume() -> Json:
    return operation(
        "resume_consumer",
        "consumers",
        "End a pause",
        scopes=["admin"],
        parameters=_named(),
        answers={"200": json_answer("Consumer", "The consumer.")},
        errors=WITH_TOPIC,
    )


def _reset() -> Json:
    return operation(
        "reset_consumer",
        "consumers",
        "Begin again elsewhere",
        scopes=["admin"],
        description="What is in hand is forgotten. With `dry_run` nothing changes, and the answer says what would.",
        parameters=_named(),
        body=_body("ResetBody"),
        answers={"200": json_answer("ConsumerReset", "What changed.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _stream() -> Json:
    return operation(
        "stream_consumer",
        "consumers",
        "Get records as they come, as server-sent events",
        scopes=["read", "write"],
        description="Events: `record` (a fetched record, `topic` and `consumer`; its id is the seq), `tombstone` (`topic`, `consumer`, "
        "`reason`, `gap_from`, `gap_to`, `earliest_seq`, `head_seq`), `error` (`code`, `error`, `message`). It goes on where acks stand. "
        "Whatever is not settled when the stream ends is ready for others at once.",
        parameters=[*_named(), *_pushed(STREAM_MAX_DEFAULT)],
        answers={"200": _events()},
        errors=(*WITH_TOPIC, 406),
    )
