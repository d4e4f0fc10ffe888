"""Space back from the dead: sealed segments of the hot tier that are mostly dead are written again without them.

    look      a checkpoint counts what is dead in each segment that it touches; what has too much is noted here
    copy      checked against .sum, then copied without the dead: in pieces, off the loop, no faster than allowed
    swap      a log entry names the new generation, and memory points at it
    remove    the old one goes when neither kept snapshot names it, which is the checkpoints' work

A segment in which nothing lives needs no copy: the next snapshot does not name it. All of it is a task of its own, beside checkpoints and
the cold tier, so neither waits for minutes of copying. A crash anywhere leaves the old generation in charge, and
what was copied is removed when the topic is loaded. Whoever wants to erase a record of the topic does not wait either: the copy is given up.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import numpy as np

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Corrupt, TopicsError
from topics.engine.core.pacing import Made, RateLimit, Work
from topics.engine.core.ports import Disk
from topics.engine.core.tasks import Blocking, Steps, WaitSynced, WaitUntil
from topics.engine.reading.reader import Reader
from topics.engine.shard.staging import CONTROL_BYTES
from topics.engine.shard.state_machine import Shard
from topics.engine.storage import frames
from topics.engine.storage.files import HEADER_BYTES, is_out_of_resources
from topics.engine.storage.index import Chunk, Rows
from topics.engine.storage.sealing import read_sum, rewrite_steps, verify_steps
from topics.engine.storage.segments import BLOCK_BYTES, HOT, Mask, SegmentMeta, read_rows, remove_segment
from topics.engine.topic.log import TopicLog
from topics.engine.upkeep.checkpoint import Checkpointer

REWRITE_KIND = "rewrite"
CHECK_STEP_BYTES = 4 * BLOCK_BYTES  # what one step of checking reads, at most
COPY_STEP_BYTES = 2 * BLOCK_BYTES  # what one step of copying reads and writes
COPY_STEPS = 2  # in one job


class Compactor:
    def __init__(
        self, disk: Disk, shard: Shard, reader: Reader, checkpointer: Checkpointer, config: EngineConfig
    ) -> None:
        self._disk = disk
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self._look_at: dict[int, TopicLog] = {}  # topics that may have a segment to be written again
        self._refused: dict[tuple[int, int, int], None] = {}  # damaged: a copy would bless what is rotten
        self.pace = RateLimit(shard.clock, self._rate)
        self._pause_ms = 0
        self.retry_ms = 0  # nothing is begun before
        self.working_on: TopicLog | None = None  # files of it are being read and written
        self.stopped = False
        checkpointer.on_captured = self.look

    # -- what there is to do -------------------------------------------------------------------------------

    def start(self) -> None:
        """Recovery is over. What is dead is known from the snapshot alone."""
        for log in self._shard.by_id.values():
            if any(map(self._is_wanted, _metas_of(log))):
                self._look_at[log.id] = log

    def look(self, logs: list[TopicLog]) -> None:
        """These topics have just been captured: `dead_bytes` of their segments is right."""
        for log in logs:
            if log.view.dropped or log.is_away:
                continue
            if self._config.rewrite_dead_share <= 1:  # more: nothing is to be given back
                for chunk in [chunk for chunk in log.chunks if _is_dead(chunk.meta)]:
                    self._forget_dead(log, chunk)
            metas = _metas_of(log)
            self._checkpointer.usage.set(log.id, metas)
            if any(map(self._is_wanted, metas)):
                self._look_at[log.id] = log

    def _is_wanted(self, meta: SegmentMeta) -> bool:
        size = meta.data_bytes - HEADER_BYTES
        is_sparse = meta.dead_bytes > 0 and meta.dead_bytes >= self._config.rewrite_dead_share * size
        return is_sparse and meta.sealed and meta.tier == HOT

    def _forget_dead(self, log: TopicLog, chunk: Chunk) -> None:
        """Nothing lives in it: the next snapshot does not name it. The last one stays, since the head is in it."""
        if chunk is log.chunks[-1] or chunk.stored != chunk.count or not _dead_rows(log, chunk).all():
            return
        assert chunk.meta is not None
        log.remove_chunk(chunk)
        log.doomed.append(chunk.meta)
        self._shard.touched[log.id] = log

    @property
    def has_work(self) -> bool:
        if self.stopped or self._shard.read_only is not None:
            return False
        return bool(self._shard.trimming or self._look_at)

    def next_task(self) -> Steps:
        if self._shard.trimming:
            return self._trim(next(iter(self._shard.trimming.values())))
        return self._reclaim(self._look_at.pop(next(iter(self._look_at))))

    # -- pace ----------------------------------------------------------------------------------------------

    def _rate(self) -> int:
        """Nobody waits when the disk runs full: then space is wanted more than anything else."""
        is_short = self._shard.low_space or self._shard.disk_full
        return 0 if is_short or self.stopped else self._config.reclaim_bytes_per_s

    def _pause(self) -> None:
        self._pause_ms = min(max(2 * self._pause_ms, limits.COLD_PAUSE_MS_MIN), limits.COLD_PAUSE_MS_MAX)
        self.retry_ms = self._shard.clock.mono_ms + self._pause_ms

    def _later(self, log: TopicLog) -> None:
        self._pause()
        self._look_at[log.id] = log

    def _load(self, log: TopicLog) -> Generator[None, Any, bool]:
        """Whether the topic is in memory. What keeps it away is for those to hear who ask for it."""
        try:
            for _ in self._shard.load_slices(log):
                yield None
        except (OSError, TopicsError):
            self._pause()
            return False
        return True

    # -- caps that came later ------------------------------------------------------------------------------

    def _trim(self, log: TopicLog) -> Steps:
        """Take what a new cap per tag leaves no room for, in slices that requests come between."""
        shard = self._shard
        while shard.trimming.get(log.id) is log and not self.stopped:
            if log.is_away:
                if not (yield from self._load(log)):
                    return
                yield WaitSynced(0)
            if not shard.trim_slice(log):
                self._pause()  # a full disk
                return
            yield None

    # -- one topic -----------------------------------------------------------------------------------------

    def _reclaim(self, log: TopicLog) -> Steps:
        """Write again what is mostly dead of one topic, one segment after the other."""
        checkpointer = self._checkpointer
        try:
            while not self._is_off(log):
                self.working_on = checkpointer.compacting_topic = log
                if log.is_away:
                    if not (yield from self._load(log)):
                        break
                    yield WaitSynced(0)
                chunk = self._next_chunk(log)
                if chunk is None:
                    break
                checkpointer.compacting_chunk = chunk
                was_done = yield from self._rewrite(log, chunk)
                checkpointer.compacting_chunk = None
                if not was_done:
                    break
                self._pause_ms = 0
        except OSError as error:
            if log.dropped:
                return  # its directory went while it was written to
            if is_out_of_resources(error):
                self._later(log)
            raise
        finally:
            checkpointer.compacting_chunk = checkpointer.compacting_topic = self.working_on = None
        if not log.dropped and any(map(self._is_wanted, _metas_of(log))) and not self._is_settled(log):
            self._later(log)

    def _is_off(self, log: TopicLog) -> bool:
        """Whether this topic is to be left alone: what is copied now might hold what must not be anywhere."""
        return self.stopped or log.dropped or bool(log.erasing)

    def _is_settled(self, log: TopicLog) -> bool:
        return all(
            (log.id, meta.first_seq, meta.generation) in self._refused
            for meta in _metas_of(log)
            if self._is_wanted(meta)
        )

    def _next_chunk(self, log: TopicLog) -> Chunk | None:
        for chunk in log.chunks:
            meta = chunk.meta
            if meta is None or not self._is_wanted(meta) or chunk.stored != chunk.count:
                continue
            if (log.id, meta.first_seq, meta.generation) in self._refused:
                continue
            if chunk is not self._checkpointer.cold_job_chunk and not _is_dead(meta):
                return chunk
        return None

    def _rewrite(self, log: TopicLog, chunk: Chunk) -> Generator[Any, Any, bool]:
        """Whether the segment need not be looked at again soon."""
        meta = chunk.meta
        assert meta is not None
        directory = self._reader.topic_dir(log.id)
        try:
            made = yield from self._copy(log, chunk, meta, directory)
        except (Corrupt, FileNotFoundError):
            if log.dropped:
                return False
            made = None  # a reader will find out which records
            self._refuse(log, meta)
        if made is None or not self._is_current(log, chunk, meta):
            new = meta.generation + 1
            yield Blocking(REWRITE_KIND, lambda: remove_segment(self._disk, directory, meta.first_seq, new))
            return (log.id, meta.first_seq, meta.generation) in self._refused
        shard = self._shard
        new_meta, new_rows = made
        # Time may have ended some of the dead without a frame of its own: the floors go along.
        swap = [meta.first_seq, new_meta.generation, log.cap_lost, log.ttl_lost]
        shard.add_frame(frames.encode_control(frames.SEGMENT_SWAP, log.id, shard.now_ms, swap))
        # At once: a checkpoint that is begun from here on must not take the old generation for the newest.
        old = chunk.meta
        assert old is not None
        self._checkpointer.replace_segment(log, chunk, new_meta, new_rows)
        self._checkpointer.delete_later(log.id, old)
        self._checkpointer.usage.set(log.id, _metas_of(log))
        shard.touched[log.id] = log
        shard.counters["swaps"] += 1
        yield WaitSynced(0)
        return True

    def _refuse(self, log: TopicLog, meta: SegmentMeta) -> None:
        if len(self._refused) >= limits.REFUSED_MAX:
            del self._refused[next(iter(self._refused))]  # looked at once more: no harm but the time
        self._refused[log.id, meta.first_seq, meta.generation] = None

    def _is_current(self, log: TopicLog, chunk: Chunk, meta: SegmentMeta) -> bool:
        """Whether the copy may take its place. A checkpoint may have marked more of it as deleted meanwhile."""
        now = chunk.meta
        if self._is_off(log) or now is None or chunk not in log.chunks:
            return False
        if not self._shard.has_room(CONTROL_BYTES):
            return False  # a full disk
        return (now.generation, now.tier) == (meta.generation, HOT)

    def _copy(
        self, log: TopicLog, chunk: Chunk, meta: SegmentMeta, directory: str
    ) -> Generator[Any, Any, tuple[SegmentMeta, Rows] | None]:
        """The new generation, or None when there must not be one."""
        # Marks are in memory, and a checkpoint may be writing them to .del right now.
        unmarked = msgspec.structs.replace(meta, has_del=False, del_bytes=0, del_digest=b"")
        check = verify_steps(self._disk, directory, unmarked, None)
        problems = yield from self._paced(log, check, 1, CHECK_STEP_BYTES, meta.data_bytes + meta.idx_bytes)
        if problems is None:
            return None
        if problems:
            self._refuse(log, meta)
            return None
        dead = _dead_rows(log, chunk)
        rows = chunk.rows.copy()
        kept = int(rows["length"][~dead].sum(dtype=np.int64))
        copy = self._copying(directory, unmarked, rows, dead)
        total = meta.data_bytes + 2 * (
            kept + meta.idx_bytes
        )  # what is written is read once more for its digests
        made = yield from self._paced(log, copy, COPY_STEPS, COPY_STEP_BYTES, total)
        # A checkpoint that has looked at the segment puts what it has seen into memory when it is done.
        yield WaitUntil(lambda: not self._checkpointer.capturing)
        return made

    def _copying(
        self, directory: str, meta: SegmentMeta, rows: Rows, dead: Mask
    ) -> Work[tuple[SegmentMeta, Rows]]:
        # The file's own ids, which memory replaced by the topic's.
        stored = read_rows(self._disk, directory, meta)
        rows["tag"], rows["node"] = stored["tag"], stored["node"]
        chain = read_sum(self._disk, directory, meta.first_seq, meta.generation)[0].chain
        made = yield from rewrite_steps(self._disk, directory, meta, rows, dead, meta.generation + 1, chain)
        return made

    def _paced(
        self, log: TopicLog, work: Work[Made], steps: int, step_bytes: int, total: int
    ) -> Generator[Any, Any, Made | None]:
        return self.pace.steps(
            work,
            kind=REWRITE_KIND,
            steps=steps,
            step_bytes=step_bytes,
            total=total,
            is_off=lambda: self._is_off(log),
        )


def _metas_of(log: TopicLog) -> list[SegmentMeta]:
    if log.stored is not None:
        return log.stored
    return [chunk.meta for chunk in log.chunks if chunk.meta is not None]


def _is_dead(meta: SegmentMeta | None) -> bool:
    return meta is not None and meta.sealed and meta.dead_bytes == meta.data_bytes - HEADER_BYTES


def _dead_rows(log: TopicLog, chunk: Chunk) -> Mask:
    """What no reader sees any more: deletes that are staged may still come to nothing."""
    dead: Mask = ~chunk.live(0, chunk.count, frames.DELETED)
    dead[: max(0, log.view.first_seq - chunk.first_seq)] = True
    return dead
