"""Logic of a worker without I/O: how many jobs to claim, which leases to extend, how to settle a job.

    claim ──► running ── handler returns ──► ack
                 │ ────── raises ──────────► nack, with backoff
                 │ ────── raises GiveUp ───► dead letter
                 │ ────── lease lost ──────► not settled
                 └ stopped before it ran ──► nack with kind release: not counted as a delivery

Jobs are claimed, not streamed: leases of a stream end with its connection.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from dataclasses import dataclass

from topics.client.answers import Claimed, Job, Settled
from topics.client.errors import ClientError, InvalidRequest
from topics.client.flows import Core, Flow, Repeat, Retries, may_repeat
from topics.client.queue_calls import ack, claim, extend, fetch, nack, term

log = logging.getLogger("topics.worker")

BACKOFF = Retries(first_s=1.0, most_s=300.0)
EXTENSIONS_PER_LEASE = 3  # so that two may fail
REASON_CHARS_MAX = 250  # of up to four bytes each; the server's limit is 1024 bytes


class GiveUp(Exception):
    """Raised by a handler whose job can never succeed: the job becomes a dead letter with this reason."""


class RetryLater(Exception):
    """Raised by a handler to have the job redelivered after this delay."""

    def __init__(self, delay_s: float, reason: str = "") -> None:
        super().__init__(reason or f"retry in {delay_s:g} s")
        self.delay_s = delay_s


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker. `poll_ms` is also how long a stop may wait for a claim in flight."""

    concurrency: int = 1
    lease_ms: int = 30_000
    poll_ms: int = 2_000
    backoff: Retries = BACKOFF
    grace_s: float = 25.0  # for running jobs when it stops

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 1000:
            raise ValueError("concurrency must be 1 to 1000")
        if self.lease_ms < 100:
            raise ValueError("lease_ms must be at least 100")


@dataclass(slots=True)
class WorkerStats:
    done: int = 0
    failed: int = 0  # nacked after an exception
    given_up: int = 0
    lost: int = 0  # the lease ended before the job was done
    released: int = 0  # returned by a stop before they ran


class WorkerCore:
    """The claimed jobs of a worker. Thread-safe."""

    def __init__(self, core: Core, topic: str, consumer: str | None, options: WorkerOptions) -> None:
        self._topic, self._consumer = topic, consumer
        self.options = options
        self._lock = threading.RLock()
        self.stats = WorkerStats()
        self._active = 0  # claimed, and neither settled nor released
        self._held: dict[int, Job] = {}  # by seq: jobs whose leases are extended
        # Claims are not retried within a call, so that a stop is noticed.
        self._core = dataclasses.replace(core, retries=dataclasses.replace(core.retries, for_s=0.0))
        # Settling makes no sense after the lease has ended.
        self._settling = dataclasses.replace(
            core, retries=dataclasses.replace(core.retries, for_s=options.lease_ms / 1000)
        )
        self._failures = 0  # of claims, in a row

    @property
    def extend_every_s(self) -> float:
        return self.options.lease_ms / 1000 / EXTENSIONS_PER_LEASE

    @property
    def free(self) -> int:
        return self.options.concurrency - self._active

    @property
    def active(self) -> int:
        return self._active

    def holds(self, job: Job) -> bool:
        with self._lock:
            return self._held.get(job.seq) is job

    @property
    def held(self) -> list[Job]:
        with self._lock:
            return list(self._held.values())

    # -- claims --------------------------------------------------------------------------------------------

    def claim(self, count: int) -> Flow[Claimed]:
        options = self.options
        if self._consumer is None:
            return claim(self._core, self._topic, count, wait_ms=options.poll_ms, lease_ms=options.lease_ms)
        return fetch(
            self._core,
            self._topic,
            self._consumer,
            count,
            wait_ms=options.poll_ms,
            lease_ms=options.lease_ms,
        )

    def claimed(self, claimed: Claimed) -> None:
        self._failures = 0
        if claimed.tombstone is not None:
            log.warning("%s", claimed.tombstone.text)
        with self._lock:
            self._active += len(claimed.jobs)
            for job in claimed.jobs:
                if job.seq in self._held:
                    # Redelivered to this worker: the lease of the earlier delivery has ended.
                    self._count_lost(job.seq)
                self._held[job.seq] = job

    def claim_failed(self, error: ClientError) -> float:
        """How long to wait before the next claim. Raises errors that cannot be retried."""
        if not may_repeat(error, Repeat.SAFE):
            raise error
        if not self._failures:
            log.warning("cannot claim jobs, retrying: %s", error)
        asked_s = getattr(error, "retry_after_s", None)
        self._failures += 1
        return self._core.retries.pause_s(self._failures - 1, self._core.chance, asked_s)

    # -- settling ------------------------------------------------------------------------------------------

    def finish(self, job: Job, error: BaseException | None) -> Flow[None]:
        """Settle a job whose handler has returned, or raised this error."""
        # From here on the lease is not extended: an extension that crosses the ack would look like a lost lease.
        is_held = self._stop_holding(job)
        try:
            if not is_held:
                return  # the lease was lost, and has been counted
            if error is None:
                settled = yield from ack(self._settling, job)
                self._count(done=settled.done)
            elif isinstance(error, GiveUp):
                settled = yield from self._give_up(job, str(error))
                self._count(given_up=settled.done)
            else:
                settled = yield from nack(self._settling, job, delay_ms=self._delay_ms(job, error))
                self._count(failed=settled.done)
            if settled.skipped:
                # Or an earlier attempt succeeded and its response was lost: these cannot be told apart.
                self._count_lost(job.seq)
        except ClientError as failure:
            self._count(lost=1)
            log.warning(
                "%s seq %d: cannot be settled and will be redelivered: %s", job.topic, job.seq, failure
            )
        finally:
            self._count(active=-1)

    def _stop_holding(self, job: Job) -> bool:
        """Whether this delivery of the job was held."""
        with self._lock:
            if self._held.get(job.seq) is not job:
                return False
            del self._held[job.seq]
            return True

    def _count(self, active: int = 0, **more: int) -> None:
        with self._lock:
            self._active += active
            for name, count in more.items():
                setattr(self.stats, name, getattr(self.stats, name) + count)

    def _give_up(self, job: Job, reason: str) -> Flow[Settled]:
        reason = reason[:REASON_CHARS_MAX]
        if job.consumer is not None:
            return (yield from term(self._settling, job, reason=reason))
        try:
            return (yield from nack(self._settling, job, kind="dead", reason=reason))
        except InvalidRequest:
            log.warning("%s has no dead_letter topic; retrying seq %d later: %s", job.topic, job.seq, reason)
            delay_ms = round(self.options.backoff.most_s * 1000)
            return (yield from nack(self._settling, job, delay_ms=delay_ms))

    def _delay_ms(self, job: Job, error: BaseException) -> int:
        if isinstance(error, RetryLater):
            return max(0, round(error.delay_s * 1000))
        return round(self.options.backoff.pause_s(job.deliveries - 1, self._core.chance) * 1000)

    def release(self, jobs: list[Job]) -> Flow[None]:
        """Return jobs that did not run, without counting the delivery."""
        mine = [job for job in jobs if self._stop_holding(job)]
        try:
            settled = yield from nack(self._settling, mine, kind="release")
            self._count(released=settled.done)
        except ClientError as failure:
            log.warning(
                "cannot release %d jobs; they are redelivered when their leases end: %s", len(mine), failure
            )
        finally:
            self._count(active=-len(jobs))

    # -- leases --------------------------------------------------------------------------------------------

    def extend_leases(self) -> Flow[None]:
        """Extend the leases of all held jobs. Jobs whose leases are lost will not be settled."""
        jobs = {job.seq: job for job in self.held}
        try:
            settled = yield from extend(self._core, jobs.values(), self.options.lease_ms)
        except ClientError as error:
            log.warning("cannot extend %d leases now: %s", len(jobs), error)
            return
        for seq in settled.skipped:
            # Jobs settled since the request was sent are no longer held.
            if self._stop_holding(jobs[seq]):
                self._count_lost(seq)

    def _count_lost(self, seq: int) -> None:
        self._count(lost=1)
        log.warning("%s seq %d: the lease was lost; the job may run twice", self._topic, seq)
