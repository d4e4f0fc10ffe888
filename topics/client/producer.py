"""Batching producers for threads and for asyncio."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from topics.client.batching import Batch, Batcher, Result, deliver, part_of
from topics.client.batching import Batching as Batching
from topics.client.errors import BufferFull, ClientError

if TYPE_CHECKING:
    from topics.client.asynchronous import AsyncClient
    from topics.client.blocking import Client


class Receipt:
    """The pending result of `send`: the record's seq, once it is written."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch[threading.Event], index: int) -> None:
        self._batch, self._index = batch, index

    def done(self) -> bool:
        return self._batch.settled.is_set()

    def result(self, timeout_s: float | None = None) -> int:
        """Wait for the seq. Raises the error if the record was not written, TimeoutError if that is not known yet."""
        if not self._batch.settled.wait(timeout_s):
            raise TimeoutError("the record is not written yet")
        return self._batch.seq_of(self._index)


class Producer:
    """Writes records of one topic in batches and in order, in a background thread. Thread-safe."""

    def __init__(self, client: Client, topic: str, options: Batching) -> None:
        self._client, self._options = client, options
        self._batcher: Batcher[threading.Event] = Batcher(topic, options)
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._write, name=f"topics producer {topic}", daemon=True)
        self._thread.start()
        # Write the buffer even if the program forgets to close the producer.
        atexit.register(self.close)

    def send(
        self,
        data: Any,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: Mapping[str, Any] | None = None,
        ttl_ms: int = 0,
    ) -> Receipt:
        """Queue a record. Blocks while the buffer is full; raises BufferFull when that takes too long."""
        part, is_bytes = part_of(data, tag, node, meta, ttl_ms)
        batcher = self._batcher
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._is_closing or batcher.has_room(len(part)), self._options.send_timeout_s
            ):
                raise BufferFull(batcher.topic, self._options.max_buffer_bytes)
            if self._is_closing:
                raise RuntimeError("this producer is closed")
            if batcher.needs_batch(part, is_bytes=is_bytes):
                batcher.begin(threading.Event(), self._client._core.now(), is_bytes=is_bytes)
                self._changed.notify_all()
            batch, index = batcher.add(part)
            if batch.due_at == 0.0:
                self._changed.notify_all()
        return Receipt(batch, index)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all records sent so far are written. ProducerFailed: some since the last flush were not."""
        batcher = self._batcher
        with self._changed:
            target = batcher.added
            batcher.flush()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: batcher.settled >= target, timeout_s):
                raise TimeoutError(f"{target - batcher.settled} records are not written yet")
            failure = batcher.failure()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Flush, and accept no more records."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closing = True
            self._batcher.flush()
            self._changed.notify_all()
        self._thread.join()
        failure = self._batcher.failure()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # do not hide the first error
                raise

    def _write(self) -> None:
        while (batch := self._next()) is not None:
            flow = deliver(self._client._core, self._batcher.topic, self._options, batch)
            try:
                results = self._client.run(flow)
            except Exception as error:
                results = list[Result]([error] * len(batch.parts))
            with self._changed:
                self._batcher.settle(batch, results)
                batch.settled.set()
                self._changed.notify_all()

    def _next(self) -> Batch[threading.Event] | None:
        """Wait for the next due batch. None: the producer is closed and empty."""
        with self._changed:
            while True:
                due_at = self._batcher.due_at()
                if due_at is None:
                    if self._is_closing:
                        return None
                    self._changed.wait()
                    continue
                left_s = due_at - self._client._core.now()
                if left_s <= 0:
                    return self._batcher.take()
                self._changed.wait(left_s)


def _reason(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    cancelled = ClientError("the producer was cancelled while this record was in flight")
    cancelled.outcome = "unknown"
    return cancelled


class AsyncReceipt:
    """The pending result of `send`: `await` it for the record's seq."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch[asyncio.Event], index: int) -> None:
        self._batch, self._index = batch, index

    def done(self) -> bool:
        return self._batch.settled.is_set()

    def __await__(self) -> Generator[Any, None, int]:
        yield from self._batch.settled.wait().__await__()
        return self._batch.seq_of(self._index)


class AsyncProducer:
    """Writes records of one topic in batches and in order, in a background task."""

    def __init__(self, client: AsyncClient, topic: str, options: Batching) -> None:
        self._client, self._options = client, options
        self._batcher: Batcher[asyncio.Event] = Batcher(topic, options)
        self._changed = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    async def send(
        self,
        data: Any,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: Mapping[str, Any] | None = None,
        ttl_ms: int = 0,
    ) -> AsyncReceipt:
        """Queue a record. Blocks while the buffer is full; raises BufferFull when that takes too long."""
        part, is_bytes = part_of(data, tag, node, meta, ttl_ms)
        batcher = self._batcher
        if self._task is None and not self._is_closing:
            self._task = asyncio.create_task(self._write(), name=f"topics producer {batcher.topic}")
        if not batcher.has_room(len(part)):
            try:
                await self._until(
                    lambda: self._is_closing or batcher.has_room(len(part)), self._options.send_timeout_s
                )
            except TimeoutError:
                raise BufferFull(batcher.topic, self._options.max_buffer_bytes) from None
        if self._is_closing:
            raise RuntimeError("this producer is closed")
        if batcher.needs_batch(part, is_bytes=is_bytes):
            batcher.begin(asyncio.Event(), self._client._core.now(), is_bytes=is_bytes)
            self._changed.set()
        batch, index = batcher.add(part)
        if batch.due_at == 0.0:
            self._changed.set()
        return AsyncReceipt(batch, index)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all records sent so far are written. ProducerFailed: some since the last flush were not."""
        batcher = self._batcher
        target = batcher.added
        batcher.flush()
        self._changed.set()
        await self._until(lambda: batcher.settled >= target, timeout_s)
        failure = batcher.failure()
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Flush, and accept no more records."""
        self._is_closing = True
        self._batcher.flush()
        self._changed.set()
        if self._task is not None:
            await self._task
        failure = self._batcher.failure()
        if failure is not None:
            raise failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except Exception:
            if error is None:  # do not hide the first error
                raise

    async def _write(self) -> None:
        try:
            while (batch := await self._next()) is not None:
                flow = deliver(self._client._core, self._batcher.topic, self._options, batch)
                try:
                    results = await self._client.run(flow)
                except BaseException as error:
                    self._settle(batch, [_reason(error)] * len(batch.parts))
                    if not isinstance(error, Exception):
                        raise
                else:
                    self._settle(batch, results)
        finally:
            # The task was cancelled, for example by a closing loop. Fail what is left, so that no caller waits forever.
            self._is_closing = True
            while self._batcher.due_at() is not None:
                batch = self._batcher.take()
                self._settle(batch, [RuntimeError("the producer was cancelled")] * len(batch.parts))

    def _settle(self, batch: Batch[asyncio.Event], results: Sequence[Result]) -> None:
        self._batcher.settle(batch, list(results))
        batch.settled.set()
        self._changed.set()

    async def _next(self) -> Batch[asyncio.Event] | None:
        """Wait for the next due batch. None: the producer is closed and empty."""
        while True:
            due_at = self._batcher.due_at()
            if due_at is None:
                if self._is_closing:
                    return None
                await self._until(lambda: self._is_closing or self._batcher.due_at() is not None, None)
                continue
            left_s = due_at - self._client._core.now()
            if left_s <= 0:
                return self._batcher.take()
            try:
                await self._until(self._is_due, left_s)
            except TimeoutError:
                pass  # it is due

    def _is_due(self) -> bool:
        due_at = self._batcher.due_at()
        return due_at is None or due_at <= self._client._core.now()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()
