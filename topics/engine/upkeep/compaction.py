"""Compaction of hot tier segments: sealed segments with mostly deleted records are rewritten without them.

    select    each checkpoint counts the dead bytes of the segments it touches; those above the limit become candidates
    copy      verify the segment against .sum, then copy its live records: in pieces, off the event loop, rate limited
    swap      a log entry names the new generation, and memory points at it
    remove    checkpoints remove the old generation once neither kept snapshot refers to it

A segment without live records is not copied: the next snapshot just leaves it out. Compaction runs as its own task, so
checkpoints and the cold tier never wait for minutes of copying. After a crash the old generation is still in use, and
the partial copy is removed when the topic is loaded. An erase does not wait either: it aborts the copy.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import numpy as np

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Corrupt, TopicsError
from topics.engine.core.pacing import PacedWork, RateLimit, Result
from topics.engine.core.ports import Disk
from topics.engine.core.tasks import Blocking, Steps, WaitSynced, WaitUntil
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.shard.state import CONTROL_BYTES
from topics.engine.storage import frames
from topics.engine.storage.files import HEADER_BYTES, is_out_of_resources
from topics.engine.storage.index import Chunk, Rows
from topics.engine.storage.sealing import read_sum, rewrite_steps, verify_steps
from topics.engine.storage.segments import BLOCK_BYTES, HOT, Mask, SegmentMeta, read_rows, remove_segment
from topics.engine.topic.log import TopicLog
from topics.engine.upkeep.checkpoint import Checkpointer

REWRITE_KIND = "rewrite"
CHECK_STEP_BYTES = 4 * BLOCK_BYTES  # most bytes that one verification step reads
COPY_STEP_BYTES = 2 * BLOCK_BYTES  # bytes that one copy step reads and writes
COPY_STEPS = 2  # copy steps in one job


class Compactor:
    """Background task that compacts one segment after the other and enforces lowered per-tag caps."""

    def __init__(
        self, disk: Disk, shard: Shard, reader: Reader, checkpointer: Checkpointer, config: EngineConfig
    ) -> None:
        self._disk = disk
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self._candidates: dict[int, TopicLog] = {}  # topics that may have a segment to compact
        # Damaged segments. They are left alone: a copy would put valid digests on corrupt data.
        self._damaged: dict[tuple[int, int, int], None] = {}
        self.pace = RateLimit(shard.state.clock, self._rate)
        self._pause_ms = 0
        self.retry_ms = 0  # no task starts before this time
        self.working_on: TopicLog | None = None  # topic whose files are being read and written
        self.stopped = False
        checkpointer.on_captured = self.find_candidates

    # -- candidates ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect candidates after recovery, using the dead byte counts of the snapshot."""
        for log in self._shard.state.by_id.values():
            if any(map(self._needs_compaction, _metas_of(log))):
                self._candidates[log.id] = log

    def find_candidates(self, logs: list[TopicLog]) -> None:
        """Check topics that were just captured: the `dead_bytes` of their segments is up to date."""
        for log in logs:
            if log.view.dropped or log.is_unloaded:
                continue
            if self._config.rewrite_dead_share <= 1:  # above 1: compaction is disabled
                for chunk in [chunk for chunk in log.chunks if _is_dead(chunk.meta)]:
                    self._drop_dead_segment(log, chunk)
            metas = _metas_of(log)
            self._checkpointer.usage.set(log.id, metas)
            if any(map(self._needs_compaction, metas)):
                self._candidates[log.id] = log

    def _needs_compaction(self, meta: SegmentMeta) -> bool:
        size = meta.data_bytes - HEADER_BYTES
        is_sparse = meta.dead_bytes > 0 and meta.dead_bytes >= self._config.rewrite_dead_share * size
        return is_sparse and meta.sealed and meta.tier == HOT

    def _drop_dead_segment(self, log: TopicLog, chunk: Chunk) -> None:
        """Drop a segment without live records, so that the next snapshot leaves it out.

        The last segment stays because it holds the head.
        """
        if chunk is log.chunks[-1] or chunk.stored != chunk.count or not _dead_rows(log, chunk).all():
            return
        assert chunk.meta is not None
        log.remove_chunk(chunk)
        log.dead_segments.append(chunk.meta)
        self._shard.state.touched[log.id] = log

    @property
    def has_work(self) -> bool:
        if self.stopped or self._shard.state.read_only is not None:
            return False
        return bool(self._shard.appends.trimming or self._candidates)

    def next_task(self) -> Steps:
        if self._shard.appends.trimming:
            return self._trim(next(iter(self._shard.appends.trimming.values())))
        return self._compact_topic(self._candidates.pop(next(iter(self._candidates))))

    # -- pace ----------------------------------------------------------------------------------------------

    def _rate(self) -> int:
        """Bytes per second; 0 is unlimited. There is no limit while disk space is low."""
        is_short = self._shard.state.low_space or self._shard.state.disk_full
        return 0 if is_short or self.stopped else self._config.reclaim_bytes_per_s

    def _pause(self) -> None:
        self._pause_ms = min(max(2 * self._pause_ms, limits.COLD_PAUSE_MS_MIN), limits.COLD_PAUSE_MS_MAX)
        self.retry_ms = self._shard.state.clock.mono_ms + self._pause_ms

    def _retry_later(self, log: TopicLog) -> None:
        self._pause()
        self._candidates[log.id] = log

    def _load(self, log: TopicLog) -> Generator[None, Any, bool]:
        """Load the topic; False if that failed. Requests for the topic report the error."""
        try:
            for _ in self._shard.state.load_slices(log):
                yield None
        except (OSError, TopicsError):
            self._pause()
            return False
        return True

    # -- lowered caps --------------------------------------------------------------------------------------

    def _trim(self, log: TopicLog) -> Steps:
        """Delete the records above a new per-tag cap, in slices so that requests can run in between."""
        shard = self._shard
        while shard.appends.trimming.get(log.id) is log and not self.stopped:
            if log.is_unloaded:
                if not (yield from self._load(log)):
                    return
                yield WaitSynced(0)
            if not shard.appends.trim_slice(log):
                self._pause()  # a full disk
                return
            yield None

    # -- one topic -----------------------------------------------------------------------------------------

    def _compact_topic(self, log: TopicLog) -> Steps:
        """Compact the candidate segments of one topic, one after the other."""
        checkpointer = self._checkpointer
        try:
            while not self._must_stop(log):
                self.working_on = checkpointer.compacting_topic = log
                if log.is_unloaded:
                    if not (yield from self._load(log)):
                        break
                    yield WaitSynced(0)
                chunk = self._next_chunk(log)
                if chunk is None:
                    break
                checkpointer.compacting_chunk = chunk
                was_done = yield from self._compact_segment(log, chunk)
                checkpointer.compacting_chunk = None
                if not was_done:
                    break
                self._pause_ms = 0
        except OSError as error:
            if log.dropped:
                return  # its directory was removed during the copy
            if is_out_of_resources(error):
                self._retry_later(log)
            raise
        finally:
            checkpointer.compacting_chunk = checkpointer.compacting_topic = self.working_on = None
        if (
            not log.dropped
            and any(map(self._needs_compaction, _metas_of(log)))
            and not self._only_damaged_left(log)
        ):
            self._retry_later(log)

    def _must_stop(self, log: TopicLog) -> bool:
        """Whether compaction of this topic must stop. While an erase is pending, a copy might keep bytes it must remove."""
        return self.stopped or log.dropped or bool(log.erasing)

    def _only_damaged_left(self, log: TopicLog) -> bool:
        return all(
            (log.id, meta.first_seq, meta.generation) in self._damaged
            for meta in _metas_of(log)
            if self._needs_compaction(meta)
        )

    def _next_chunk(self, log: TopicLog) -> Chunk | None:
        for chunk in log.chunks:
            meta = chunk.meta
            if meta is None or not self._needs_compaction(meta) or chunk.stored != chunk.count:
                continue
            if (log.id, meta.first_seq, meta.generation) in self._damaged:
                continue
            if chunk is not self._checkpointer.cold_job_chunk and not _is_dead(meta):
                return chunk
        return None

    def _compact_segment(self, log: TopicLog, chunk: Chunk) -> Generator[Any, Any, bool]:
        """Compact one segment. False: aborted, try again later."""
        meta = chunk.meta
        assert meta is not None
        directory = self._reader.topic_dir(log.id)
        try:
            made = yield from self._copy(log, chunk, meta, directory)
        except (Corrupt, FileNotFoundError):
            if log.dropped:
                return False
            made = None  # reads will report which records are damaged
            self._mark_damaged(log, meta)
        if made is None or not self._is_current(log, chunk, meta):
            new = meta.generation + 1
            yield Blocking(REWRITE_KIND, lambda: remove_segment(self._disk, directory, meta.first_seq, new))
            return (log.id, meta.first_seq, meta.generation) in self._damaged
        shard = self._shard
        new_meta, new_rows = made
        # Some of the omitted records may have expired without a log entry, so the entry carries the floors.
        swap = [meta.first_seq, new_meta.generation, log.cap_lost, log.ttl_lost]
        # Not applied: the rows are in memory here. Before any yield: a checkpoint that starts now must see the new generation.
        shard.state.log_only(frames.SEGMENT_SWAP, log, swap)
        old = chunk.meta
        assert old is not None
        self._checkpointer.replace_segment(log, chunk, new_meta, new_rows)
        self._checkpointer.delete_later(log.id, old)
        self._checkpointer.usage.set(log.id, _metas_of(log))
        shard.state.touched[log.id] = log
        shard.state.counters["swaps"] += 1
        yield WaitSynced(0)
        return True

    def _mark_damaged(self, log: TopicLog, meta: SegmentMeta) -> None:
        if len(self._damaged) >= limits.DAMAGED_SEGMENTS_MAX:
            del self._damaged[next(iter(self._damaged))]  # costs one more check of that segment
        self._damaged[log.id, meta.first_seq, meta.generation] = None

    def _is_current(self, log: TopicLog, chunk: Chunk, meta: SegmentMeta) -> bool:
        """Whether the copy may replace the segment. A checkpoint may have marked more records as deleted meanwhile."""
        now = chunk.meta
        if self._must_stop(log) or now is None or chunk not in log.chunks:
            return False
        if not self._shard.state.has_room(CONTROL_BYTES):
            return False  # a full disk
        return (now.generation, now.tier) == (meta.generation, HOT)

    def _copy(
        self, log: TopicLog, chunk: Chunk, meta: SegmentMeta, directory: str
    ) -> Generator[Any, Any, tuple[SegmentMeta, Rows] | None]:
        """Write the new generation. None if the segment is damaged or compaction must stop."""
        # Without .del: the marks are in memory, and a checkpoint may be writing the file right now.
        unmarked = msgspec.structs.replace(meta, has_del=False, del_bytes=0, del_digest=b"")
        check = verify_steps(self._disk, directory, unmarked, None)
        problems = yield from self._paced(log, check, 1, CHECK_STEP_BYTES, meta.data_bytes + meta.idx_bytes)
        if problems is None:
            return None
        if problems:
            self._mark_damaged(log, meta)
            return None
        dead = _dead_rows(log, chunk)
        rows = chunk.rows.copy()
        kept = int(rows["length"][~dead].sum(dtype=np.int64))
        copy = self._copy_steps(directory, unmarked, rows, dead)
        total = meta.data_bytes + 2 * (kept + meta.idx_bytes)  # output is read back to compute the digests
        made = yield from self._paced(log, copy, COPY_STEPS, COPY_STEP_BYTES, total)
        # A running checkpoint still installs the old generation in memory when it finishes.
        yield WaitUntil(lambda: not self._checkpointer.capturing)
        return made

    def _copy_steps(
        self, directory: str, meta: SegmentMeta, rows: Rows, dead: Mask
    ) -> PacedWork[tuple[SegmentMeta, Rows]]:
        # Tag and node ids as stored in the file; in memory they were replaced by the topic's.
        stored = read_rows(self._disk, directory, meta)
        rows["tag"], rows["node"] = stored["tag"], stored["node"]
        chain = read_sum(self._disk, directory, meta.first_seq, meta.generation)[0].chain
        made = yield from rewrite_steps(self._disk, directory, meta, rows, dead, meta.generation + 1, chain)
        return made

    def _paced(
        self, log: TopicLog, work: PacedWork[Result], steps: int, step_bytes: int, total: int
    ) -> Generator[Any, Any, Result | None]:
        return self.pace.steps(
            work,
            kind=REWRITE_KIND,
            steps=steps,
            step_bytes=step_bytes,
            total=total,
            is_cancelled=lambda: self._must_stop(log),
        )


def _metas_of(log: TopicLog) -> list[SegmentMeta]:
    if log.stored is not None:
        return log.stored
    return [chunk.meta for chunk in log.chunks if chunk.meta is not None]


def _is_dead(meta: SegmentMeta | None) -> bool:
    return meta is not None and meta.sealed and meta.dead_bytes == meta.data_bytes - HEADER_BYTES


def _dead_rows(log: TopicLog, chunk: Chunk) -> Mask:
    """Rows that no reader can see any more. Staged deletes do not count: they may still fail."""
    dead: Mask = ~chunk.live(0, chunk.count, frames.DELETED)
    dead[: max(0, log.view.first_seq - chunk.first_seq)] = True
    return dead
