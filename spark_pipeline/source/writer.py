"""Writing to a topic: `frame.write.format("topics")` and `stream.writeStream.format("topics")`.

With `staged`, the default, tasks stage their rows in a transaction on the server, and the driver commits what the
successful tasks have staged. A batch of a stream uses the same transaction in every attempt, derived from the query's id
and the number of the batch, so it is written once however often Spark repeats a task, a batch or a commit.

Spark passes these ids only to tasks, as local properties; the driver gets the transaction from the tasks' results.
A failed task returns None. Spark also calls abort after a failed commit: if the commit was already decided, the server
refuses to abort.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from spark_pipeline.source.options import BadOption, SinkOptions
from spark_pipeline.tasks.sending import (
    BatchFailed,
    Fields,
    Staged,
    Target,
    abort,
    abort_batch,
    chunks_of,
    commit,
    stage,
    write_directly,
)

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    """Result of a task. Without `staged` it had no rows, or has written them directly."""

    partition: int
    staged: Staged | None = None


class _Writer:
    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOption(
                'topics cannot be overwritten: use mode("append"), or foreachBatch for changing results'
            )
        self._fields = fields_of(options, schema)
        self._target = Target(options.url, options.topic, options.token_env, options.txn_ttl_ms)
        self._is_direct = options.delivery == "direct"

    def _write(self, batches: Iterator[Any], task: Any, producer: str, batch: int) -> Written:
        partition = task.partitionId()
        chunks = chunks_of(batches, self._fields)
        if self._is_direct:
            write_directly(self._target, f"{producer}:{batch}:{partition}", chunks)
            return Written(partition)
        name = f"{partition}-{task.taskAttemptId()}"
        return Written(partition, stage(self._target, producer, batch, name, chunks))

    def _commit(self, messages: Sequence[Any]) -> None:
        commit(self._target, _staged(messages))


class TopicsWriter(_Writer, DataSourceArrowWriter):
    """Batch writes. A repeated write is a new batch, unless the option `batch` identifies it."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        # These are pickled for the tasks and for the commit.
        self._run = options.producer or f"spark-run-{uuid.uuid4().hex}"
        # By default higher than all earlier batches of this producer: the server takes a lower one as already written.
        self._batch = time.time_ns() // 1000 if options.batch is None else options.batch
        self._is_new = options.batch is None

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        found = self._write(iterator, _task(), self._run, self._batch)
        if self._is_new and found.staged is not None and not found.staged.chunks:
            raise BatchFailed(
                f"a concurrent write of producer {self._run} finished first, or the clock was set back: nothing was written. "
                "Run it again; use a different producer for concurrent writes"
            )
        return found

    def commit(self, messages: list[Any]) -> None:
        self._commit(messages)

    def abort(self, messages: list[Any]) -> None:
        if not self._is_direct:
            abort_batch(self._target, self._run, self._batch)


class TopicsStreamWriter(_Writer, DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if options.producer:
            raise BadOption(
                "the options producer and batch are for batch writes; a stream is identified by its checkpoint"
            )
        super().__init__(options, schema, overwrite)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        task = _task()
        query, batch = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if not query or batch is None:
            raise RuntimeError(
                f"this version of Spark does not set {_QUERY_ID} and {_BATCH_ID}, which identify a repeated batch; use PySpark 4.3"
            )
        return self._write(iterator, task, f"spark-query-{query}", int(batch))

    def commit(self, messages: list[Any], batchId: int) -> None:
        self._commit(messages)

    def abort(self, messages: list[Any], batchId: int) -> None:
        # If no task returned a transaction, it stays for the next attempt of this batch.
        abort(self._target, {one.txn for one in _staged(messages)})


def _task() -> Any:
    task = TaskContext.get()
    assert task is not None, "only tasks write rows"
    return task


def _staged(messages: Sequence[Any]) -> list[Staged]:
    """Staged parts in the order of partitions, which is the order of the rows."""
    written = sorted((one for one in messages if one is not None), key=lambda one: one.partition)
    return [one.staged for one in written if one.staged is not None]


def fields_of(options: SinkOptions, schema: StructType) -> Fields:
    """Raises BadOption for a missing column or one of an unsupported type."""
    types = {field.name: field.dataType for field in schema}

    def named(option: str, given: str, default: str) -> str | None:
        name = given or default
        if name not in types:
            if given:
                raise BadOption(f"{option}: there is no column {name}; the columns are {', '.join(types)}")
            return None
        if not isinstance(types[name], StringType):
            raise BadOption(
                f"column {name} is {types[name].simpleString()}, but {option} needs a string: cast it, or choose another column"
            )
        return name

    data = options.data_column or "data"
    if data not in types:
        raise BadOption(
            f"no column {data} to write: choose one with dataColumn, or create one with to_json(struct(*)) AS data; the columns are {', '.join(types)}"
        )
    if not isinstance(types[data], (StringType, BinaryType)):
        raise BadOption(
            f"column {data} is {types[data].simpleString()}; it must be JSON text, as from to_json, or binary"
        )
    is_text = isinstance(types[data], StringType)
    return Fields(
        data=data,
        is_text=is_text,
        tag=named("tagColumn", options.tag_column, "tag"),
        node=named("nodeColumn", options.node_column, "node"),
        meta=named("metaColumn", options.meta_column, "meta"),
        # Only for frames read from a topic, which have these columns.
        flags="flags" if not is_text and {"flags", "seq", "topic"} <= set(types) else None,
    )
