"""Workers: they take jobs, call a handler, keep leases alive meanwhile, and settle. For threads, and for asyncio."""

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
# Python hears a signal after a wait: one that came just before it, or to another thread, waits as long.
HEAR_S = 0.5


class Worker:
    """`run` works until `stop` is called, from another thread, a handler, or by a signal."""

    def __init__(
        self, client: Client, topic: str, handler: Handler, consumer: str | None, options: WorkerOptions
    ) -> None:
        self._client, self._handler = client, handler
        self._core = WorkerCore(client._core, topic, consumer, options)
        self._options = options
        # SimpleQueue.put may be called from a signal handler, which a Condition does not survive.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopping = False

    @property
    def stats(self) -> WorkerStats:
        return self._core.stats

    def holds(self, job: Job) -> bool:
        """Whether the lease is still ours, as far as is known: a long handler may stop when it is not."""
        return self._core.holds(job)

    def stop(self) -> None:
        """Take no more jobs. `run` returns when what is in hand is done, or when `grace_s` are over."""
        self._is_stopping = True
        self._news.put(None)

    def run(self, signals: Sequence[signal.Signals] = SIGNALS) -> WorkerStats:
        """Work. In the main thread these signals stop it; a second one ends the process as usual."""
        is_over = threading.Event()
        # Threads that a stuck handler holds must not keep the process: they are daemons.
        threads = [
            threading.Thread(target=self._work, args=(is_over,), name=f"topics worker {i}", daemon=True)
            for i in range(self._options.concurrency)
        ]
        threads.append(
            threading.Thread(target=self._beat, args=(is_over,), name="topics leases", daemon=True)
        )
        for thread in threads:
            thread.start()
        try:
            with _stopped_by(signals, self.stop):
                self._take_jobs()
                self._finish()
        finally:
            is_over.set()
            for _ in range(self._options.concurrency):
                self._jobs.put(None)
        return self.stats

    def _take_jobs(self) -> None:
        core = self._core
        while True:
            while not self._news.empty():
                self._news.get()
            if self._is_stopping:  # looked at after the news, which may have told of it
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
        """Wait for what is in hand; hand back what is not done in time."""
        core, now = self._core, self._client._core.now
        give_up = now() + self._options.grace_s
        while core.active and now() < give_up:
            self._wait(give_up - now())
        left = core.held
        if left:
            log.warning("%d jobs are not done after %g s, and go to others", len(left), self._options.grace_s)
            self._client.run(core.release(left))

    def _wait(self, timeout_s: float) -> None:
        """Until something has changed."""
        while timeout_s > 0:
            with contextlib.suppress(queue.Empty):
                return self._news.get(timeout=min(timeout_s, HEAR_S))
            timeout_s -= HEAR_S

    def _work(self, is_over: threading.Event) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._is_stopping:
                    self._client.run(self._core.release([job]))
                else:
                    self._client.run(self._core.finish(job, self._handle(job)))
            except Exception:  # a thread less would do less, and say nothing
                if is_over.is_set():  # whoever ran it has gone on, and may have closed the client
                    return
                log.exception("%s seq %d cannot be settled", job.topic, job.seq)
            self._news.put(None)

    def _handle(self, job: Job) -> BaseException | None:
        try:
            with processing(self._client._core, job):
                self._handler(job)
        except BaseException as error:
            log.info("%s seq %d failed", job.topic, job.seq, exc_info=error)
            if not isinstance(error, Exception):  # sys.exit() means the program
                self.stop()
            return error
        return None

    def _beat(self, is_over: threading.Event) -> None:
        while not is_over.wait(self._core.beat_s):
            try:
                self._client.run(self._core.beat())
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
        restore()  # a second one is not for us
        stop()

    for number in signals:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()


class AsyncWorker:
    """`run` works until `stop` is called, or by a signal."""

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
        """Whether the lease is still ours, as far as is known: a long handler may stop when it is not."""
        return self._core.holds(job)

    def stop(self) -> None:
        """Take no more jobs. `run` returns when what is in hand is done, or when `grace_s` are over."""
        self._is_stopping = True
        self._changed.set()

    async def run(self, signals: Sequence[signal.Signals] = SIGNALS) -> WorkerStats:
        """Work. In the main thread these signals stop it; a second one ends the process as usual.

        When this is cancelled its handlers are, and their jobs go to others at once.
        """
        beats = asyncio.create_task(self._beat(), name="topics leases")
        try:
            with _stopping_loop(signals, self.stop):
                await self._take_jobs()
                await self._finish()
        finally:
            self._is_ending = True
            # The leases of handlers that do not end at once are kept until they are handed back.
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            beats.cancel()
            if self._core.held:
                await asyncio.shield(self._client.run(self._core.release(self._core.held)))
        return self.stats

    async def _take_jobs(self) -> None:
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
        """Wait for what is in hand; what is not done in time is cancelled, and handed back."""
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

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._core.beat_s)
            try:
                await self._client.run(self._core.beat())
            except Exception:
                log.exception("cannot extend leases")

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something has changed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


@contextlib.contextmanager
def _stopping_loop(signals: Sequence[signal.Signals], stop: Callable[[], None]) -> Iterator[None]:
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
