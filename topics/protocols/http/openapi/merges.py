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

FOR_JOBS = "For jobs that read and write the files of the cold tier; see docs/consolidation.md. "


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
    text = "Id returned by the call that created it."
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
        + "An existing plan is returned again, with a new lease if the old one has expired. "
        "An empty body means all defaults and needs no content type.",
        parameters=[topic_name()],
        body=_body("PlanBody", required=False),
        answers={"200": json_answer("MergePlan", "The plan, or none.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _state() -> Json:
    return operation(
        "merge_state",
        "consolidation",
        "Get the plan, replaced segments and manifest of a topic",
        scopes=["admin"],
        parameters=[topic_name()],
        answers={"200": json_answer("MergeState", "The state of the topic's cold segments.")},
        errors=(*WITH_TOPIC, 409),
    )


def _renew() -> Json:
    return operation(
        "renew_plan",
        "consolidation",
        "Renew the lease on a plan",
        scopes=["admin"],
        parameters=_named("plan_id"),
        body=_body("LeaseBody"),
        answers={"200": json_answer("LeaseRenewed", "Renewed, for the original duration.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 410),
    )


def _commit() -> Json:
    return operation(
        "commit_plan",
        "consolidation",
        "Publish the outputs of a job",
        scopes=["admin"],
        description="Every output is compared with its inputs first. Idempotent: repeated after the commit, the call returns the same result.",
        parameters=_named("plan_id"),
        body=_body("CommitBody"),
        answers={
            "200": json_answer("PlanCommitted", "All outputs are published."),
            "202": json_answer("PlanCommitting", "Still in progress; repeat the call."),
        },
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 410, 422),
    )


def _abandon() -> Json:
    return operation(
        "abandon_plan",
        "consolidation",
        "Abandon a plan",
        scopes=["admin"],
        parameters=_named("plan_id"),
        body=_body("LeaseBody"),
        answers={"200": json_answer("PlanAbandoned", "Abandoned.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 410),
    )


def _pin() -> Json:
    return operation(
        "pin_snapshot",
        "consolidation",
        "Create a snapshot: a manifest whose files are kept",
        scopes=["admin"],
        description=FOR_JOBS + "An empty body means all defaults and needs no content type.",
        parameters=[topic_name()],
        body=_body("SnapshotBody", required=False),
        answers={"200": json_answer("SnapshotPinned", "The manifest, and when the snapshot expires.")},
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
        answers={"200": json_answer("SnapshotRenewed", "When the snapshot expires now.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _release() -> Json:
    return operation(
        "release_snapshot",
        "consolidation",
        "Release a snapshot",
        scopes=["admin"],
        parameters=_named("snapshot_id"),
        answers={"200": json_answer("SnapshotReleased", "Released: its files may be removed.")},
        errors=(*WITH_TOPIC, 409),
    )
