"""Sink transactions in the OpenAPI document."""

from __future__ import annotations

from topics.protocols.http.openapi.operations import (
    JSON_TYPE,
    KEYED,
    TEXT,
    WITH_BODY,
    WITH_TOPIC,
    content_of,
    json_answer,
    operation,
    topic_name,
)
from topics.protocols.http.openapi.schemas import Json

_PATH = "/v0/topics/{topic}/transactions"


def transaction_paths() -> Json:
    return {
        _PATH: {"post": _begin()},
        f"{_PATH}/{{txn}}/stage": {"post": _stage()},
        f"{_PATH}/{{txn}}/commit": {"post": _commit()},
        f"{_PATH}/{{txn}}/abort": {"post": _abort()},
    }


def _names() -> list[Json]:
    text = "`txn` returned by the begin call."
    txn = {
        "name": "txn",
        "in": "path",
        "required": True,
        "schema": TEXT | {"minLength": 1},
        "description": text,
    }
    return [topic_name(), txn]


def _begin() -> Json:
    return operation(
        "begin_transaction",
        "transactions",
        "Open the transaction of a batch, or get its state",
        scopes=["write"],
        description="Idempotent. A batch up to the producer's last committed one is reported as `committed`. A topic that does not exist "
        "is created, as by a write.",
        parameters=[topic_name(creates=True)],
        body={"required": True, "content": {JSON_TYPE: content_of("BeginBody")}},
        answers={"200": json_answer("Transaction", "The state of the transaction.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _stage() -> Json:
    return operation(
        "stage_chunk",
        "transactions",
        "Stage a chunk of records in a transaction",
        scopes=["write"],
        description="The records are validated like those of a write, and become visible when the transaction is committed. A chunk that is "
        "already staged is not replaced.",
        parameters=_names(),
        body={"required": True, "content": {JSON_TYPE: content_of("StageBody")}},
        answers={"200": json_answer("ChunkStaged", "The chunk is staged.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _commit() -> Json:
    return operation(
        "commit_transaction",
        "transactions",
        "Append the staged records",
        scopes=["write"],
        description="Once decided, the server completes the commit by itself, even after a crash, and the batch is appended exactly once, "
        "however often this call is repeated. A batch that fits into one log entry becomes visible at once, a larger one in steps.",
        parameters=_names(),
        body={"required": True, "content": {JSON_TYPE: content_of("CommitPartsBody")}},
        answers={
            "200": json_answer("Transaction", "Committed and synced, whatever the topic's durability."),
            "202": json_answer("Transaction", "Not finished within `wait_ms`; repeat the call."),
        },
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 422),
    )


def _abort() -> Json:
    return operation(
        "abort_transaction",
        "transactions",
        "Abort a transaction",
        scopes=["write"],
        description="The staged records are discarded. A body is ignored.",
        parameters=_names(),
        answers={"200": json_answer("TransactionAborted", "Aborted.")},
        errors=(*KEYED, 404, 409, 503),
    )
