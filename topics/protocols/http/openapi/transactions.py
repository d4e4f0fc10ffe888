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
    text = "`txn` as the begin gave it."
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
        "Open the transaction of a batch, or learn what became of it",
        scopes=["write"],
        description="Repeating it changes nothing. A batch at or before the producer's last committed one is `committed`. A topic that does not exist "
        "is created as by a write.",
        parameters=[topic_name(creates=True)],
        body={"required": True, "content": {JSON_TYPE: content_of("BeginBody")}},
        answers={"200": json_answer("Transaction", "Where it is.")},
        errors=(*WITH_TOPIC, *WITH_BODY),
    )


def _stage() -> Json:
    return operation(
        "stage_chunk",
        "transactions",
        "Put a chunk of records into a transaction",
        scopes=["write"],
        description="The records are checked as those of a write are, and appear when the transaction is committed. A chunk that is there already "
        "stays as it is.",
        parameters=_names(),
        body={"required": True, "content": {JSON_TYPE: content_of("StageBody")}},
        answers={"200": json_answer("ChunkStaged", "The chunk is in the transaction.")},
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _commit() -> Json:
    return operation(
        "commit_transaction",
        "transactions",
        "Append what was staged",
        scopes=["write"],
        description="Once it is decided the server finishes by itself, also after a crash, and the batch is there once, however often this is "
        "repeated. A batch that fits one entry of the log appears at once, a larger one bit by bit.",
        parameters=_names(),
        body={"required": True, "content": {JSON_TYPE: content_of("CommitPartsBody")}},
        answers={
            "200": json_answer("Transaction", "Committed, and synced whatever the topic's durability."),
            "202": json_answer("Transaction", "Not at its end within `wait_ms`; ask again."),
        },
        errors=(*WITH_TOPIC, *WITH_BODY, 409, 422),
    )


def _abort() -> Json:
    return operation(
        "abort_transaction",
        "transactions",
        "Give a transaction up",
        scopes=["write"],
        description="What was staged is thrown away. A body is ignored.",
        parameters=_names(),
        answers={"200": json_answer("TransactionAborted", "It is gone.")},
        errors=(*KEYED, 404, 409, 503),
    )
