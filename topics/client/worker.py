"""Workers for threads and for asyncio: claim jobs, run a handler while extending leases, ack or nack."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from topics.client.answers import Job
from topics.client.errors import ClientError
from topics.client.tracing import processing
from topics.client.worker_core import BACKOFF as BACKOFF
from topics.client.worker_core import WorkerCore, WorkerStats, log
from topics.client.worker_core import WorkerOptions as WorkerOptions

if TYPE_CHECKING:
    from topics.client.asynchronous import AsyncClient
    from topics.client.blocking import Client

Handler: TypeAlias = Callable[[Job], object]
AsyncHandler: TypeAlias = Callable[[Job], Awaitable[object]]
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Python handles signals between waits: one that arrives just before a wait, or in another thread, is delayed by it.
WAIT_MAX_S = 0.5


class Worker:
    """`run` works until `stop` is called from another thread, a handler, or a signal."""

    def __init__(
        self, client: Client, topic: str, handler: Handler, consumer: str | None, options: WorkerOptions
    ) -> None:
        self._client, self._handler = client, handler
        self._core = WorkerCore(client._core, topic, consumer, options)
        self._options = options
        # SimpleQueue.put is reentrant and may be called from a signal handler; a Condition may not.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopping = False

    @property
    def stats(self) -> WorkerStats:
        return self._core.stats

    def holds(self, job: Job) -> bool:
        """Whether the lease is still held, as far as is known. A long handler may stop when it is not."""
        return self._core.holds(job)

    def stop(self) -> None:
        """Claim no more jobs. `run` returns when the current jobs are done, or after `grace_s`."""
        self._is_stopping = True
        self._wakeups.put(None)

    def run(self, signals: Sequence[signal.Signals] = SIGNALS) -> WorkerStats:
        """Work until stopped. In the main thread, these signals stop it; a second one has its usual effect."""
        ended = threading.Event()
        # Daemon threads: a stuck handler must not keep the process alive.
        threads = [
            threading.Thread(target=self._work, args=(ended,), name=f"topics worker {i}", daemon=True)
            for i in range(self._options.concurrency)
        ]
        threads.append(
            threading.Thread(target=self._extend_leases, args=(ended,), name="topics leases", daemon=True)
        )
        for thread in threads:
            thread.start()
        try:
            with _stopped_by(signals, self.stop):
                self._claim_jobs()
                self._finish()
        finally:
            ended.set()
            for _ in range(self._options.concurrency):
                self._jobs.put(None)
        return self.stats

    def _claim_jobs(self) -> None:
        core = self._core
        while True:
            while not self._wakeups.empty():
                self._wakeups.get()
            if self._is_stopping:  # checked after draining the wakeups, one of which may be from stop()
                return
            if not core.free:
                self._wait(math.inf)
                continue
            try:
                claimed = self._client.run(core.claim(core.free))
            except ClientError as error:
                self._wait(core.claim_failed(error))
                continue
            core.claimed(claimed)
            for job in claimed.jobs:
                self._jobs.put(job)

    def _finish(self) -> None:
        """Wait for the current jobs; release those not done in time."""
        core, now = self._core, self._client._core.now
        give_up = now() + self._options.grace_s
        while core.active and now() < give_up:
            self._wait(give_up - now())
        left = core.held
        if left:
            log.warning("%d jobs are not done after %g s; releasing them", len(left), self._options.grace_s)
            self._client.run(core.release(left))

    def _wait(self, timeout_s: float) -> None:
        """Wait for a wakeup."""
        while timeout_s > 0:
            with contextlib.suppress(queue.Empty):
                return self._wakeups.get(timeout=min(timeout_s, WAIT_MAX_S))
            timeout_s -= WAIT_MAX_S

    def _work(self, ended: threading.Event) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._is_stopping:
                    self._client.run(self._core.release([job]))
                else:
                    self._client.run(self._core.finish(job, self._handle(job)))
            except Exception:  # keep the thread alive
                if ended.is_set():  # run() has returned, and the client may be closed
                    return
                log.exception("%s seq %d cannot be settled", job.topic, job.seq)
            self._wakeups.put(None)

    def _handle(self, job: Job) -> BaseException | None:
        try:
            with processing(self._client._core, job):
                self._handler(job)
        except BaseException as error:
            log.info("%s seq %d failed", job.topic, job.seq, exc_info=error)
            if not isinstance(error, Exception):  # sys.exit() is meant to end the program
                self.stop()
            return error
        return None

    def _extend_leases(self, ended: threading.Event) -> None:
        while not ended.wait(self._core.extend_every_s):
            try:
                self._client.run(self._core.extend_leases())
            except Exception:
                log.exception("cannot extend leases")


@contextlib.contextmanager
def _stopped_by(signals: Sequence[signal.Signals], stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        restore()  # a second signal has its usual effect
        stop()

    for number in signals:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()


class AsyncWorker:
    """`run` works until `stop` is called or a signal arrives."""

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        handler: AsyncHandler,
        consumer: str | None,
        options: WorkerOptions,
    ) -> None:
        self._client, self._handler = client, handler
        self._core = WorkerCore(client._core, topic, consumer, options)
        self._options = options
        self._changed = asyncio.Event()
        self._is_stopping = self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def stats(self) -> WorkerStats:
        return self._core.stats

    def holds(self, job: Job) -> bool:
        """Whether the lease is still held, as far as is known. A long handler may stop when it is not."""
        return self._core.holds(job)

    def stop(self) -> None:
        """Claim no more jobs. `run` returns when the current jobs are done, or after `grace_s`."""
        self._is_stopping = True
        self._changed.set()

    async def run(self, signals: Sequence[signal.Signals] = SIGNALS) -> WorkerStats:
        """Work until stopped. In the main thread, these signals stop it; a second one has its usual effect.

        Cancelling it cancels its handlers and releases their jobs at once.
        """
        extending = asyncio.create_task(self._extend_leases(), name="topics leases")
        try:
            with _loop_stopped_by(signals, self.stop):
                await self._claim_jobs()
                await self._finish()
        finally:
            self._is_ending = True
            # Leases are extended until the handlers have ended and their jobs are released.
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            extending.cancel()
            if self._core.held:
                await asyncio.shield(self._client.run(self._core.release(self._core.held)))
        return self.stats

    async def _claim_jobs(self) -> None:
        core = self._core
        while not self._is_stopping:
            if not core.free:
                await self._wait(None)
                continue
            try:
                claimed = await self._client.run(core.claim(core.free))
            except ClientError as error:
                await self._wait(core.claim_failed(error))
                continue
            core.claimed(claimed)
            if self._is_stopping:
                await self._client.run(core.release(claimed.jobs))
                return
            for job in claimed.jobs:
                task = asyncio.create_task(self._work(job), name=f"topics job {job.topic} {job.seq}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _finish(self) -> None:
        """Wait for the current jobs; `run` cancels and releases those not done in time."""
        now = self._client._core.now
        give_up = now() + self._options.grace_s
        while self._core.active and now() < give_up:
            await self._wait(give_up - now())
        if self._core.held:
            log.warning("%d jobs are not done after %g s", len(self._core.held), self._options.grace_s)

    async def _work(self, job: Job) -> None:
        error = await self._handle(job)
        await self._client.run(self._core.finish(job, error))
        self._changed.set()

    async def _handle(self, job: Job) -> BaseException | None:
        try:
            with processing(self._client._core, job):
                await self._handler(job)
        except (Exception, asyncio.CancelledError) as error:
            if self._is_ending and isinstance(error, asyncio.CancelledError):
                raise
            log.info("%s seq %d failed", job.topic, job.seq, exc_info=error)
            return error
        return None

    async def _extend_leases(self) -> None:
        while True:
            await asyncio.sleep(self._core.extend_every_s)
            try:
                await self._client.run(self._core.extend_leases())
            except Exception:
                log.exception("cannot extend leases")

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait for a change."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


@contextlib.contextmanager
def _loop_stopped_by(signals: Sequence[signal.Signals], stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        restore()
        stop()

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        restore()
