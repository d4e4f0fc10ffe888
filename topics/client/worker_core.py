"""What a worker decides: how much to take, which leases to keep alive, and what becomes of a job.

    claim ──► in hand ── handler returns ──► ack
                 │ ────── raises ──────────► nack, later and later
                 │ ────── raises GiveUp ───► dead letter
                 │ ────── heartbeat skips it: the lease is lost, and with it the say
                 └ stop before it began ───► nack, kind release: as if it had never been handed out

Jobs are claimed, not streamed: a broken connection would take the leases of a stream with it.
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
BEATS = 3  # of a lease: two may fail
REASON_CHARS_MAX = 250  # of at most four bytes each; the server takes 1024


class GiveUp(Exception):
    """Raised by a handler: this job can never be done. It goes to the dead letters, with this reason."""


class RetryLater(Exception):
    """Raised by a handler: not now. The job comes back after this time."""

    def __init__(self, delay_s: float, reason: str = "") -> None:
        super().__init__(reason or f"again in {delay_s:g} s")
        self.delay_s = delay_s


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker works. `poll_ms` is also how long a stop may wait for a claim that is on its way."""

    concurrency: int = 1
    lease_ms: int = 30_000
    poll_ms: int = 2_000
    backoff: Retries = BACKOFF
    grace_s: float = 25.0  # for what is in hand when it stops

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 1000:
            raise ValueError("concurrency is 1 to 1000")
        if self.lease_ms < 100:
            raise ValueError("lease_ms is at least 100")


@dataclass(slots=True)
class WorkerStats:
    done: int = 0
    failed: int = 0  # handed back after an exception
    given_up: int = 0
    lost: int = 0  # the lease was gone before the job was done
    released: int = 0  # handed back untouched, by a stop


class WorkerCore:
    """Jobs in hand. Its flows may run in several threads at once."""

    def __init__(self, core: Core, topic: str, consumer: str | None, options: WorkerOptions) -> None:
        self._topic, self._consumer = topic, consumer
        self.options = options
        self._lock = threading.RLock()
        self.stats = WorkerStats()
        self._active = 0  # claimed, and neither settled nor handed back
        self._held: dict[int, Job] = {}  # by seq: those whose leases are kept alive
        # A claim that fails is not tried for long by itself: a stop has to be noticed.
        self._core = dataclasses.replace(core, retries=dataclasses.replace(core.retries, for_s=0.0))
        # What holds a lease must be told before the lease ends.
        self._settling = dataclasses.replace(
            core, retries=dataclasses.replace(core.retries, for_s=options.lease_ms / 1000)
        )
        self._failures = 0  # of claims, in a row

    @property
    def beat_s(self) -> float:
        return self.options.lease_ms / 1000 / BEATS

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
                    # Handed out again, to us: somebody took the lease of the other delivery.
                    self._lost(job.seq)
                self._held[job.seq] = job

    def claim_failed(self, error: ClientError) -> float:
        """How long to wait. Raises what no waiting will change."""
        if not may_repeat(error, Repeat.SAFE):
            raise error
        if not self._failures:
            log.warning("cannot claim, and will try until it works: %s", error)
        asked_s = getattr(error, "retry_after_s", None)
        self._failures += 1
        return self._core.retries.pause_s(self._failures - 1, self._core.chance, asked_s)

    # -- what becomes of a job -----------------------------------------------------------------------------

    def finish(self, job: Job, error: BaseException | None) -> Flow[None]:
        """The handler has returned, or raised this."""
        # From here on the lease is not extended: an extension that crosses an ack would look like a loss.
        is_held = self._let_go(job)
        try:
            if not is_held:
                return  # its lease was lost, and that was counted
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
                # Or an earlier attempt was carried out and its answer lost: nobody can tell.
                self._lost(job.seq)
        except ClientError as failure:
            self._count(lost=1)
            log.warning(
                "%s seq %d: cannot be settled, so it will come again: %s", job.topic, job.seq, failure
            )
        finally:
            self._count(active=-1)

    def _let_go(self, job: Job) -> bool:
        """Whether it was held. Another delivery of the same job is another one."""
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
            log.warning("%s has no dead_letter topic, so seq %d comes again: %s", job.topic, job.seq, reason)
            delay_ms = round(self.options.backoff.most_s * 1000)
            return (yield from nack(self._settling, job, delay_ms=delay_ms))

    def _delay_ms(self, job: Job, error: BaseException) -> int:
        if isinstance(error, RetryLater):
            return max(0, round(error.delay_s * 1000))
        return round(self.options.backoff.pause_s(job.deliveries - 1, self._core.chance) * 1000)

    def release(self, jobs: list[Job]) -> Flow[None]:
        """Hand back what was not begun, as if it had never been handed out."""
        mine = [job for job in jobs if self._let_go(job)]
        try:
            settled = yield from nack(self._settling, mine, kind="release")
            self._count(released=settled.done)
        except ClientError as failure:
            log.warning("%d jobs come back when their leases end: %s", len(mine), failure)
        finally:
            self._count(active=-len(jobs))

    # -- leases --------------------------------------------------------------------------------------------

    def beat(self) -> Flow[None]:
        """Keep the leases of what is in hand. Those that are lost are not ours to settle any more."""
        jobs = {job.seq: job for job in self.held}
        try:
            settled = yield from extend(self._core, jobs.values(), self.options.lease_ms)
        except ClientError as error:
            log.warning("cannot extend %d leases now: %s", len(jobs), error)
            return
        for seq in settled.skipped:
            # What was settled while this was on its way is not held any more.
            if self._let_go(jobs[seq]):
                self._lost(seq)

    def _lost(self, seq: int) -> None:
        self._count(lost=1)
        log.warning("%s seq %d: the lease is lost; it may be done twice", self._topic, seq)
