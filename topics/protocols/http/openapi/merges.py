"""Merges and snapshots of cold segments in the OpenAPI document."""

from __future__ import annotations

from topics.protocols.http.openapi.operations import (
    JSON_TYPE,
    TEXT,
    WITH_BODY,
    WITH_TOPIC,
    content_of,
    json_answer,
    operation,
    topic_name,
)
from topics.protocols.http.openapi.schemas import Json

FOR_JOBS = "For jobs that read and write the cold tier's files; see docs/consolidation.md. "


def merge_paths() -> Json:
    base = "/v0/topics/{topic}/consolidation"
    pins = "/v0/topics/{topic}/snapshots"
    return {
        base: {"post": _plan(), "get": _state()},
        f"{base}/{{plan_id}}/renew": {"post": _renew()},
        f"{base}/{{plan_id}}/commit": {"post": _commit()},
        f"{base}/{{plan_id}}/abandon": {"post": _abandon()},
        pins: {"post": _pin()},
        f"{pins}/{{snapshot_id}}/renew": {"post": _renew_pin()},
        f"{pins}/{{snapshot_id}}": {"delete": _release()},
    }


def _named(what: str) -> list[Json]:
    text = "As the call that made it has answered."
    return [
        topic_name(),
        {
            "name": what,
            "in": "path",
            "required": True,
            "schema": TEXT | {"minLength": 1},
            "description": text,
        },
    ]


def _body(name: str, *, required: bool = True) -> Json:
    return {"required": required, "content": {JSON_TYPE: content_of(name)}}


def _plan() -> Json:
    return operation(
        "plan_merge",
        "consolidation",
        "Plan a merge of cold segments",
        scopes=["admin"],
        description=FOR_JOBS
        + "A plan that is there is answered again, with a new lease when the old one has ended. "
        "An empty body is all defaults and needs no content type.",
        parameters=[topic_name()],
        body=_body("PlanBody", required=False),
        answers={"200": json_answer("MergePlan", "The plan, or none.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _state() -> Json:
    return operation(
        "merge_state",
        "consolidation",
        "The plan, replaced segments and manifest of a topic",
        scopes=["admin"],
        parameters=[topic_name()],
        answers={"200": json_answer("MergeState", "What is going on.")},
        errors=(*WITH_TOPIC, 409),
    )


def _renew() -> Json:
    return operation(
        "renew_plan",
        "consolidation",
        "Hold the lease on a plan longer",
        scopes=["admin"],
        parameters=_named("plan_id"),
        body=_body("LeaseBody"),
        answers={"200": json_answer("LeaseRenewed", "Renewed, for as long as it was given.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 410),
    )


def _commit() -> Json:
    return operation(
        "commit_plan",
        "consolidation",
        "Publish what a job has made",
        scopes=["admin"],
        description="Every output is compared with its inputs first. Asked again after the end, it answers the same.",
        parameters=_named("plan_id"),
        body=_body("CommitBody"),
        answers={
            "200": json_answer("PlanCommitted", "All of it is published."),
            "202": json_answer("PlanCommitting", "It goes on; ask again."),
        },
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 410, 422),
    )


def _abandon() -> Json:
    return operation(
        "abandon_plan",
        "consolidation",
        "Give up a plan",
        scopes=["admin"],
        parameters=_named("plan_id"),
        body=_body("LeaseBody"),
        answers={"200": json_answer("PlanAbandoned", "It is forgotten.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 410),
    )


def _pin() -> Json:
    return operation(
        "pin_snapshot",
        "consolidation",
        "Have a manifest whose files stay",
        scopes=["admin"],
        description=FOR_JOBS + "An empty body is all defaults and needs no content type.",
        parameters=[topic_name()],
        body=_body("SnapshotBody", required=False),
        answers={"200": json_answer("SnapshotPinned", "The manifest, and until when its files stay.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _renew_pin() -> Json:
    return operation(
        "renew_snapshot",
        "consolidation",
        "Keep the files of a snapshot longer",
        scopes=["admin"],
        parameters=_named("snapshot_id"),
        body=_body("SnapshotBody", required=False),
        answers={"200": json_answer("SnapshotRenewed", "Until when they stay.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _release() -> Json:
    return operation(
        "release_snapshot",
        "consolidation",
        "Let the files of a snapshot go",
        scopes=["admin"],
        parameters=_named("snapshot_id"),
        answers={"200": json_answer("SnapshotReleased", "They may go.")},
        errors=(*WITH_TOPIC, 409),
    )
