"""Background work between turns, in slices.

Each lane runs one task at a time: the main lane checkpoints, erases and file removals; one for the cold tier; one for
compaction; one per transaction. So none of them waits for the disk access of another.
"""

from __future__ import annotations

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import TopicsError
from topics.engine.cold.relocation import Relocator
from topics.engine.core.ports import Clock, Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Lane, Steps, TaskOwner, WaitSynced, WaitUntil
from topics.engine.reading.cold_blocks import ColdReads
from topics.engine.runtime.group_commit import GroupCommit
from topics.engine.shard.state import EraseRequest
from topics.engine.storage.files import is_out_of_resources
from topics.engine.topic.log import TopicLog
from topics.engine.upkeep.compaction import Compactor
from topics.engine.upkeep.erase import erase_steps

SLICES_PER_TURN = 64
SLICE_MS = 1  # the clock has whole milliseconds, so a slice takes one to two


class Background(GroupCommit):
    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        config: EngineConfig,
        cold: SegmentStore | None,
        absent: frozenset[str],
    ) -> None:
        super().__init__(disk, clock, config, cold, absent)
        self.relocator = Relocator(
            disk, cold, self.shard, self.reader, self.checkpointer, config, self.merge_service
        )
        self.compactor = Compactor(disk, self.shard, self.reader, self.checkpointer, config)
        self.shard.state.cold = self.cold = ColdReads(cold, self.reader.cold_blocks, self._submit)
        self._task_kind = ""  # of the current task of the main lane, or of the last one while others wait
        self._checkpoint_wanted = False
        self._tasks_stopped = False
        self._cold_stopped = False

    def checkpoint(self) -> None:
        """Start a checkpoint with the next turn."""
        self._checkpoint_wanted = True

    def _next_task(self) -> Steps | None:
        shard = self.shard
        if shard.state.read_only is not None:
            return None
        gone = self._removable()
        if gone:
            self._task_kind = "removal"
            shard.state.dropped_topics = [log for log in shard.state.dropped_topics if log not in gone]
            return self.checkpointer.remove_topics(gone)
        ready = self._ready_erases()
        # A checkpoint waits for one erase at most, else constant erases would let the log grow forever. Only the final
        # checkpoint at shutdown waits for all of them.
        if ready and not (
            self._checkpoint_wanted and self._task_kind == "erase" and not self.checkpointer.closing
        ):
            self._task_kind = "erase"
            shard.state.erase_requests.remove(ready[0])
            return erase_steps(
                self._disk,
                shard,
                self.wal,
                self.reader,
                self.checkpointer,
                ready[0],
                self.relocator.take_over,
            )
        if self._checkpoint_wanted:
            self._task_kind = "checkpoint"
            self._checkpoint_wanted = False
            return self.checkpointer.steps()
        self._task_kind = ""
        return None

    def _removable(self) -> list[TopicLog]:
        """Dropped topics, except those with a file being written."""
        state = self.shard.state
        return [log for log in state.dropped_topics if not any(is_busy(log) for is_busy in state.busy)]

    def _ready_erases(self) -> list[EraseRequest]:
        """Erases that can run now. One with a waiting client runs at once; one that was deferred waits for disk space."""
        full = self._full_retry_ms is not None
        return [
            request
            for request in self.shard.state.erase_requests
            if (request.token is not None or not full)
            and request.log not in (self.relocator.erasing, self.compactor.working_on)
        ]

    def _has_background_work(self) -> bool:
        shard = self.shard
        return bool(
            self._main_lane.task is not None
            or self._checkpoint_wanted
            or (shard.state.dropped_topics and self._removable())
            or (shard.state.erase_requests and self._ready_erases())
        )

    def _run_background(self) -> None:
        """Run steps of the main lane until SLICE_MS is used up or the task blocks."""
        began_ms = self.clock.mono_ms
        for _ in range(SLICES_PER_TURN):
            if self._main_lane.task is None:
                self._main_lane.task = self._next_task()
                if self._main_lane.task is None:
                    return
            if not self._main_lane.is_runnable:
                return
            self._step(self._main_lane, None, None)
            if self.shard.state.frames and self.shard.state.frame_bytes > limits.GROUP_BYTES_MAX:
                self._commit()
            self.clock.read()
            if self.clock.mono_ms - began_ms >= SLICE_MS:
                return

    def _run_cold(self) -> None:
        """Run steps of the cold tier's lane; its actual work is done by the store."""
        self.cold.pass_time(self.clock.mono_ms)
        self.merge_service.send_progress()
        lane = self._cold_lane
        for _ in range(SLICES_PER_TURN):
            if lane.task is None:
                waits = self._cold_stopped or self.clock.mono_ms < self.relocator.retry_ms
                if waits or not self.relocator.has_work:
                    return
                lane.task = self.relocator.next_task()
            if not lane.is_runnable:
                return
            self._step(lane, None, None)

    def _run_tasks(self, owner: TaskOwner) -> None:
        """Run one step per turn for each task of a feature, so that requests are handled in between."""
        state = self.shard.state
        if self._tasks_stopped or state.read_only is not None:
            return
        for lane in owner.begin_tasks():
            if lane.is_runnable:
                self._step(lane, None, None)
                if state.frame_bytes > limits.GROUP_BYTES_MAX:
                    self._commit()
        owner.tasks_stepped()

    def _run_compaction(self) -> None:
        """Run steps of the compaction lane until SLICE_MS is used up or the task blocks."""
        lane, compactor, began_ms = self._compaction_lane, self.compactor, self.clock.mono_ms
        for _ in range(SLICES_PER_TURN):
            if lane.task is None:
                if not compactor.has_work or self.clock.mono_ms < compactor.retry_ms:
                    return
                lane.task = compactor.next_task()
            if not lane.is_runnable:
                return
            self._step(lane, None, None)
            if self.shard.state.frames:
                self._commit()
            self.clock.read()
            if self.clock.mono_ms - began_ms >= SLICE_MS:
                return

    def _step(self, lane: Lane, value: object, error: BaseException | None) -> None:
        task, lane.task, lane.until = lane.task, None, None  # so that it cannot be closed while it runs
        assert task is not None
        try:
            wanted = task.throw(error) if error is not None else task.send(value)
        except StopIteration:
            return
        except (OSError, TopicsError) as failure:
            self._failed(lane, failure)
            return
        lane.task = task
        if self.shard.state.read_only is not None:  # the step made it read-only
            lane.close()
            return
        if isinstance(wanted, Blocking):
            lane.blocked = True
            self._submit(wanted.kind, wanted.work, lambda value, error: self._unblocked(lane, value, error))
        elif isinstance(wanted, WaitSynced):
            self._commit()
            lsn = wanted.lsn or self.wal.last_lsn
            lane.wait_lsn = lsn if lsn > self.wal.synced_lsn else 0
            self._awaited_lsn = max(self._awaited_lsn, lsn)
        elif isinstance(wanted, WaitUntil):
            lane.until = wanted.holds

    def _failed(self, lane: Lane, failure: OSError | TopicsError) -> None:
        if lane is self._cold_lane:
            self.relocator.failed(failure, self.clock.mono_ms)
        elif lane is not self._main_lane and lane is not self._compaction_lane:
            self._fail_shard(f"{lane.what} failed with an unexpected error: {failure}")
        elif isinstance(failure, TopicsError):
            self._fail_shard(f"{lane.what} found damaged data: {failure}")
        elif is_out_of_resources(failure):
            self._note_full(failure)
        else:
            self._fail_shard(f"{lane.what} could not be written: {failure}")

    def _unblocked(self, lane: Lane, value: object, error: BaseException | None) -> None:
        lane.blocked = False
        if self.shard.state.read_only is not None:
            lane.close()
            return
        if error is not None and not isinstance(error, OSError | TopicsError):
            raise error
        self._step(lane, value, error)

    # -- when work is due ----------------------------------------------------------------------------------

    def _cold_times(self) -> list[int]:
        times = [self.cold.due_ms] if self.cold.due_ms is not None else []
        if self._cold_lane.task is None:
            if self.relocator.has_work:
                times.append(max(self.relocator.retry_ms, self.clock.mono_ms))
        elif self._cold_lane.is_runnable:
            times.append(self.clock.mono_ms)
        elif self.relocator.pace.wake_ms is not None:
            times.append(self.relocator.pace.wake_ms)
        times += self._merge_times()
        return times

    def _merge_times(self) -> list[int]:
        """When a merge commit's wait ends, and when plans or retired segments expire."""
        merge_service, clock = self.merge_service, self.clock
        times = [merge_service.next_progress_ms] if merge_service.next_progress_ms is not None else []
        due_ms = merge_service.next_due_ms()
        if due_ms is not None and self._cold_lane.task is None and due_ms > clock.now_ms:
            times.append(clock.mono_ms + due_ms - clock.now_ms)
        return times

    def _compaction_times(self) -> list[int]:
        lane, now_ms = self._compaction_lane, self.clock.mono_ms
        if lane.task is None:
            return [max(self.compactor.retry_ms, now_ms)] if self.compactor.has_work else []
        if lane.is_runnable:
            return [now_ms]
        wake_ms = self.compactor.pace.wake_ms
        return [wake_ms] if wake_ms is not None else []

    # -- shutdown ------------------------------------------------------------------------------------------

    def stop_cold(self) -> None:
        """Abandon cold tier work: its jobs are not waited for, and their results are ignored.

        Compaction stops as well, and decided commits pause after their current slice.
        """
        if self._cold_stopped:
            return
        self._cold_stopped = self.compactor.stopped = True
        self.cold.stop()
        self.merge_service.stop()
        for owner in self.shard.state.task_owners:
            owner.defer_tasks()
        self._cold_lane.close()

    def stop_tasks(self) -> None:
        """Stop the features' tasks; they continue after the next start."""
        self._tasks_stopped = True
        for owner in self.shard.state.task_owners:
            owner.stop_tasks()
