"""The engine of one shard: state machine, log, checkpoints and background work behind one call per turn.

    outcome = engine.turn(requests)      stage → write one envelope → publish and answer what needs no sync
    job.run()                            by the caller, on another thread: blocking work (syncs, zero-filling, sealing, cold reads)
    outcome = engine.finish(job, error)  its result, good or bad, is just another event

A reply that promises durability is held back until the job that makes it durable is reported done, so the caller cannot
acknowledge too early (`group_commit.py`). The clock is read once per turn, so a batch has one "now". Background work runs in
slices between turns (`background.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Stopping
from topics.engine.cold.merge.stored import StoredMerges
from topics.engine.commands.copies import CopySource
from topics.engine.commands.standing_reads import StandingReads
from topics.engine.core.ports import Clock, Disk, SegmentStore
from topics.engine.runtime.background import Background
from topics.engine.runtime.boundary import COLD_KINDS, DeadLetterSource, Job, Outcome, Request, Shell
from topics.engine.runtime.group_commit import FULL_RETRY_MS
from topics.engine.runtime.stats import Stats
from topics.engine.upkeep.recovery import Recovery
from topics.engine.upkeep.recovery_report import RecoveryReport

CHECKPOINT_CHECK_MS = 5000
TRUST_MS = 60_000  # how long verified data is trusted: disks may corrupt data at any time


class Engine(Background):
    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        config: EngineConfig,
        cold: SegmentStore | None = None,
        *,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        """`cold`: the store for old segments; without it they stay on the disk. `absent`: features to leave out; a log
        that has frames of one of them is refused.
        """
        super().__init__(disk, clock, config, cold, absent)
        self.report = RecoveryReport()
        self._jobs: list[Job] = []
        self._outstanding = 0  # jobs handed out and not reported yet, except cold ones
        self._checkpoint_check_ms = 0
        self._trust_until_ms = 0
        self.closed = False
        self.stats = Stats(self)

    @classmethod
    def open(cls, disk: Disk, clock: Clock, config: EngineConfig, cold: SegmentStore | None = None) -> Engine:
        """Recover a shard, or create a new one."""
        engine = cls(disk, clock, config, cold)
        for _ in engine.recover_steps():
            pass
        return engine

    def recover_steps(self) -> Generator[float, None, None]:
        """Recover in slices, yielding the progress from 0 to 1."""
        recovery = Recovery(
            self._disk,
            self.shard,
            self.wal,
            self.reader,
            self.checkpointer,
            self.config,
            self._cold_store,
            self.reserve,
        )
        if self._has_merges:
            StoredMerges(self.shard.state, recovery.swaps)
        self.report = recovery.report
        yield from recovery.steps()
        self.counters["recoveries"] += 1
        self.counters["torn"] += len(self.report.torn)
        self._checkpoint_check_ms = self.clock.mono_ms + CHECKPOINT_CHECK_MS
        self.shard.state.recovered(self.wal.active.salt if self.wal.files else 0)
        self.report.overlaps = self.shard.consumers.overlaps
        self.relocator.start(recovery.loader)
        self.shard.state.load_steps = recovery.loader.steps
        self.compactor.start()
        if self.shard.state.read_only is None:
            self._request_spare()

    # -- the boundary, see boundary.py -----------------------------------------------------------------------

    def attach(self, shell: Shell) -> None:
        delivery = self.shard.delivery
        self.shard.state.can_send = shell.can_send
        self.shard.consumers.is_followed = shell.is_followed
        delivery.copier, delivery.measures = shell.copier, shell.measures

    @property
    def copies(self) -> CopySource:
        return self.shard.forwards

    @property
    def standing_reads(self) -> StandingReads:
        return self.shard.reads

    @property
    def dead_letters(self) -> DeadLetterSource:
        return self.shard.dead_letters

    def withdraw(self, matches: Callable[[object], bool], *, claims: bool) -> None:
        state = self.shard.state
        if claims:
            self.shard.claims.withdraw_claims(matches)
        self.cold.withdraw(matches)
        state.long.end(matches)
        state.upkeep.withdraw(matches)

    def withdraw_claim(self, topic: str, consumer: str, matches: Callable[[object], bool]) -> bool:
        return self.shard.claims.withdraw_claim(topic, consumer, matches)

    def end_long_commands(self, matches: Callable[[object], bool]) -> list[tuple[object, dict[str, str]]]:
        long = self.shard.state.long
        return [(ended.token, ended.outcome) for ended in long.end(matches)]

    def set_quota(self, topics: int | None, size: int | None) -> None:
        self.shard.state.topics_granted, self.shard.state.bytes_granted = topics, size

    def resume_sending(self) -> None:
        self.shard.delivery.sending_resumed()

    # -- turns ---------------------------------------------------------------------------------------------

    def turn(self, requests: Sequence[Request]) -> Outcome:
        if self.closed:
            raise RuntimeError("the engine is closed")
        shard, state = self.shard, self.shard.state
        self.reader.cold_blocks.trim()  # reads that waited for cold blocks have used them in the last turn
        self._begin_group()
        state.begin_turn(self.clock.read(), busy=bool(requests or state.long.queue or state.upkeep.queue))
        if self.clock.mono_ms >= self._trust_until_ms:
            self._trust_until_ms = self.clock.mono_ms + TRUST_MS
            self.reader.forget_checks()
        if self.config.min_free_bytes and self.clock.mono_ms >= self._space_check_ms:
            self._check_free_space()
        if state.upkeep.queue:
            for _ in state.upkeep.run_slices():
                if state.frame_bytes > limits.GROUP_BYTES_MAX or state.frame_count > limits.GROUP_FRAMES_MAX:
                    self._commit()
        handle = state.handle
        for token, command in requests:
            if state.frame_bytes > limits.GROUP_BYTES_MAX or state.frame_count > limits.GROUP_FRAMES_MAX:
                self._commit()
            handle(token, command)
        if state.long.queue:
            state.long.run_slices()
        if shard.leases.pruning:
            shard.leases.run_pruning()
        self._commit()
        return self._finish_turn()

    @property
    def has_jobs(self) -> bool:
        """Whether jobs were submitted since the last turn; only a turn hands them out."""
        return bool(self._jobs)

    def finish(self, job: Job, error: BaseException | None = None) -> Outcome:
        """Report that a job has ended."""
        if job.kind not in COLD_KINDS:
            self._outstanding -= 1
        elif self._cold_stopped:
            return Outcome([], [], self._wake_at_ms())
        self.reader.cold_blocks.trim()
        self._begin_group()
        self.shard.state.begin_turn(self.clock.read(), busy=False)
        job.done(job.value, error)
        self._commit()
        return self._finish_turn()

    def _finish_turn(self) -> Outcome:
        shard, state = self.shard, self.shard.state
        self._check_checkpoint_due()
        if self._has_background_work():
            self._run_background()
        if self._cold_store is not None:
            self._run_cold()
        for owner in state.task_owners:
            if owner.has_tasks:
                self._run_tasks(owner)
        if self.compactor.has_work or self._compaction_lane.task is not None:
            self._run_compaction()
        if shard.delivery.is_due(self.clock.mono_ms):
            shard.delivery.deliver()
        if state.ops or state.frames:
            self._commit()
        self._schedule_sync()
        if self._full_retry_ms is not None and self.clock.mono_ms >= self._full_retry_ms:
            self._retry_when_full()
        if self.config.verify:
            self.check_invariants()
        replies, state.ready = state.ready, []
        jobs, self._jobs = self._jobs, []
        if jobs:
            self._outstanding += sum(job.kind not in COLD_KINDS for job in jobs)
        outcome = Outcome(replies, jobs, self._wake_at_ms())
        if state.created:
            outcome.created, state.created = state.created, []
        if shard.leases.settled:
            outcome.settled = shard.leases.settled[:]
            shard.leases.settled.clear()  # consumers append to this list
        return outcome

    def _retry_when_full(self) -> None:
        self._full_retry_ms = None
        # A checkpoint may free log files.
        self._checkpoint_wanted = bool(self.shard.state.touched) or self.checkpointer.would_free_space()
        released = self.reserve.for_checkpoint
        is_free = self._checkpoint_wanted and not self._spare_running
        if released and is_free and self.checkpointer.fits_in(released):
            # Only for the checkpoint: a spare log file being created would use up the space.
            self.reserve.release(released)
            self._full_retry_ms = self.clock.mono_ms + FULL_RETRY_MS
        else:
            self._request_spare()

    def _submit(
        self,
        kind: str,
        work: Callable[[], object],
        done: Callable[[object, BaseException | None], None],
        held_ms: int = 0,
    ) -> None:
        self._jobs.append(Job(kind, work, done, held_ms=held_ms))

    def _would_relieve_low_space(self) -> bool:
        """Whether appends are refused for lack of space and a checkpoint may free some. It may take two: the log files that
        the older snapshot needs go with the second, and no change requests that one.
        """
        state = self.shard.state
        if not state.low_space or self._full_retry_ms is not None:
            return False
        return bool(state.touched) or self.checkpointer.would_free_space()

    def _check_checkpoint_due(self) -> None:
        """Request a checkpoint if one is due: periodically, or at once if the log is long.

        After a failure for lack of space it waits for the retry.
        """
        is_running = self._main_lane.task is not None and self._task_kind == "checkpoint"
        is_long = self.checkpointer.log_share * limits.LOG_CHECKPOINT_PARTS >= 1
        is_due = is_long and self._full_retry_ms is None
        if self.clock.mono_ms >= self._checkpoint_check_ms:
            self._checkpoint_check_ms = self.clock.mono_ms + CHECKPOINT_CHECK_MS
            is_due = is_due or self.checkpointer.is_due(self.clock.mono_ms) or self._would_relieve_low_space()
        if is_due and not is_running:
            self._checkpoint_wanted = True

    def _wake_at_ms(self) -> int | None:
        """The earliest time at which something is due without a request."""
        times: list[int] = []
        if self.shard.reads.polls:
            times.append(self.shard.reads.polls[0][0])
        if self.shard.state.long.queue or self.shard.state.upkeep.queue:
            times.append(self.clock.mono_ms)
        deliver_at_ms = self.shard.delivery.deliver_at_ms
        if deliver_at_ms is not None:
            times.append(deliver_at_ms)
        if self.shard.state.read_only is not None:
            return min(times, default=None)  # read-only: no claims, syncs, background work or retries
        if self.shard.claims.timers:
            times.append(self.shard.claims.timers[0][0])
        if self.shard.consumers.idle_timers:
            times.append(self.shard.consumers.idle_timers[0][0])
        if self.shard.leases.pruning:
            times.append(self.clock.mono_ms)
        if self._unsynced_since_ms is not None and not self._sync_running:
            times.append(self._unsynced_since_ms + limits.BACKGROUND_SYNC_MS)
            if self._parked:
                times.append(self._parked_since_ms + self.shard.delivery.measures.window_ms)
        if self._full_retry_ms is not None:
            times.append(self._full_retry_ms)
        if self._main_lane.is_runnable or (self._main_lane.task is None and self._has_background_work()):
            times.append(self.clock.mono_ms)
        if self.shard.state.touched or self.checkpointer.has_hot_copies:
            times.append(self._checkpoint_check_ms)
        for owner in self.shard.state.task_owners if not self._tasks_stopped else ():
            due_ms = owner.due_ms if owner.has_tasks else None
            if due_ms is not None:
                times.append(due_ms or self.clock.mono_ms)
        if self._cold_store is not None and not self._cold_stopped:
            times += self._cold_times()
        times += self._compaction_times()
        return min(times, default=None)

    # -- shutdown ------------------------------------------------------------------------------------------

    def close(self) -> Outcome:
        """Clean shutdown: commit, sync, checkpoint. Runs its own jobs; jobs handed out before must be finished first."""
        if self.closed:
            return Outcome()
        self.stop_cold()
        if self._outstanding:
            raise RuntimeError(
                f"{self._outstanding} jobs are outstanding; finish them before closing the engine"
            )
        self.stop_tasks()
        total = Outcome()
        while True:
            for long in self.shard.state.long.end():
                error = Stopping("the server is stopping; retry after it has restarted", **long.outcome)
                self.shard.state.ready.append((long.token, error))
            self.shard.leases.end_pruning()
            self._drain(self.turn([]), total)
            # Requests that wait for a topic's upkeep resume when that is done, perhaps as long commands.
            if not (
                self.shard.state.upkeep.queue or self.shard.state.long.queue or self.shard.leases.pruning
            ):
                break
        self._compaction_lane.close()
        self.checkpointer.closing = True
        self.checkpoint()
        self._drain(self.turn([]), total)
        self.closed = True
        self.reader.close()
        for file in [*self.wal.files, *([self.wal.spare] if self.wal.spare else [])]:
            self._disk.close(file.handle)
        return total

    def _drain(self, outcome: Outcome, total: Outcome) -> None:
        """Run jobs and turns until nothing is left to do."""
        queue = [outcome]
        while queue:
            outcome = queue.pop()
            total.replies += outcome.replies
            total.created += outcome.created
            total.settled += outcome.settled
            for job in outcome.jobs:
                error: BaseException | None = None
                try:
                    job.run()
                except OSError as failure:
                    error = failure
                queue.append(self.finish(job, error))
            if not queue and self.shard.state.read_only is None and self._has_background_work():
                queue.append(self.turn([]))

    def check_invariants(self) -> None:
        self.shard.state.check_invariants()
