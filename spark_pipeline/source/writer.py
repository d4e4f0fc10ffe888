"""Writing to a topic: `frame.write.format("topics")` and `stream.writeStream.format("topics")`.

Staged, the default: tasks put their rows into a transaction of the server's, and the driver publishes what the tasks that
count have staged. A stream's batch has the same transaction in every try, since that follows from the id of the query and
the number of the batch; so however often Spark repeats a task, a batch or a commit, the batch appears once.

Spark tells these ids to tasks alone, in properties of theirs; the driver's side learns of the transaction by what tasks return.
A task that failed returns nothing (None), and an abort is called after a commit that failed, too: it may be decided by then,
and the server refuses to abort it.
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
    """What a task tells the driver. No `staged`: it had no rows, or has written them."""

    partition: int
    staged: Staged | None = None


class _Writer:
    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOption(
                'a topic is a log, which is not overwritten: mode("append"), and for results that change foreachBatch'
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
    """A batch: one that is run again is another one, unless it has a number that says otherwise."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        # These travel to the tasks, and to where the commit is made.
        self._run = options.producer or f"spark-run-{uuid.uuid4().hex}"
        # Without a number of the user's, one above all that this name has had: the server counts a lower one as written.
        self._batch = time.time_ns() // 1000 if options.batch is None else options.batch
        self._is_new = options.batch is None

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        found = self._write(iterator, _task(), self._run, self._batch)
        if self._is_new and found.staged is not None and not found.staged.chunks:
            raise BatchFailed(
                f"another write of the producer {self._run} was faster, or the clock was set back: nothing of this one was written. "
                "Run it again; writes that go on at once need a producer each"
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
            raise BadOption("a stream is known by its checkpoint: producer and batch are for batch writes")
        super().__init__(options, schema, overwrite)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        task = _task()
        query, batch = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if not query or batch is None:
            raise RuntimeError(
                f"this Spark does not tell tasks {_QUERY_ID} and {_BATCH_ID}, without which a batch that is repeated cannot be known; PySpark 4.3 does"
            )
        return self._write(iterator, task, f"spark-query-{query}", int(batch))

    def commit(self, messages: list[Any], batchId: int) -> None:
        self._commit(messages)

    def abort(self, messages: list[Any], batchId: int) -> None:
        # Where no task tells of a transaction it stays for the next try of this batch.
        abort(self._target, {one.txn for one in _staged(messages)})


def _task() -> Any:
    task = TaskContext.get()
    assert task is not None, "rows are written by tasks"
    return task


def _staged(messages: Sequence[Any]) -> list[Staged]:
    """By partition: that is the order of the rows."""
    told = sorted((one for one in messages if one is not None), key=lambda one: one.partition)
    return [one.staged for one in told if one.staged is not None]


def fields_of(options: SinkOptions, schema: StructType) -> Fields:
    """BadOption for a column that is missing, or of a type that a record cannot have."""
    types = {field.name: field.dataType for field in schema}

    def named(option: str, given: str, default: str) -> str | None:
        name = given or default
        if name not in types:
            if given:
                raise BadOption(f"{option} names the column {name}, but there are {', '.join(types)}")
            return None
        if not isinstance(types[name], StringType):
            raise BadOption(
                f"column {name} is {types[name].simpleString()}, and {option} wants a string: cast it, or name another column"
            )
        return name

    data = options.data_column or "data"
    if data not in types:
        raise BadOption(
            f"no column {data} to write: name one with dataColumn, or make one with to_json(struct(*)) AS data; there are {', '.join(types)}"
        )
    if not isinstance(types[data], (StringType, BinaryType)):
        raise BadOption(
            f"column {data} is {types[data].simpleString()}; it has to be JSON text, as to_json makes it, or binary"
        )
    is_text = isinstance(types[data], StringType)
    return Fields(
        data=data,
        is_text=is_text,
        tag=named("tagColumn", options.tag_column, "tag"),
        node=named("nodeColumn", options.node_column, "node"),
        meta=named("metaColumn", options.meta_column, "meta"),
        # Only with a frame that was read from a topic, which says so by its columns.
        flags="flags" if not is_text and {"flags", "seq", "topic"} <= set(types) else None,
    )
