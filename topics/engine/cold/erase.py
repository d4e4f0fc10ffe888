"""Erasure in the cold tier: segments with erased records are rewritten without them, and unused copies are removed.

The new generation is written on the hot tier and put into the store. The old one is removed only after the log entry for
the new one is synced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from errno import EIO, ENOSPC

import msgspec
import numpy as np

from topics.engine.cold.merge.service import MergeService
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Steps, WaitSynced, WaitUntil
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.shard.state import CONTROL_BYTES
from topics.engine.storage import frames
from topics.engine.storage.files import read_exact
from topics.engine.storage.index import Chunk, Rows
from topics.engine.storage.sealing import drain, read_sum, rewrite_steps
from topics.engine.storage.segment_store import COLD_IO_KIND, SEGMENT_SUFFIXES, delete_keys, delete_segment
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    COLD,
    Mask,
    SegmentMeta,
    parse_segment_name,
    read_rows,
    remove_files,
    segment_path,
)
from topics.engine.topic.log import Range, TopicLog
from topics.engine.upkeep.checkpoint import Checkpointer

ERASE_ROUNDS = 8


class ColdEraser:
    """Erases records of one topic at a time from the segment store."""

    def __init__(
        self,
        disk: Disk,
        store: SegmentStore,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        merge_service: MergeService,
    ) -> None:
        self._disk = disk
        self._store = store
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._merge_service = merge_service

    def steps(self, log: TopicLog, ranges: list[Range]) -> Steps:
        """Rewrite current segments and remove other files until the store has no copy of the erased records."""
        yield from self._merge_service.erase_steps(log)
        prefix = f"{self._reader.topic_dir(log.id)}/"
        for _ in range(ERASE_ROUNDS):
            if log.is_unloaded and not log.dropped:
                self._shard.state.loader(log)
                yield WaitSynced(0)
            keys = yield _run(lambda: self._list_again(prefix))
            current = {
                (chunk.meta.first_seq, chunk.meta.generation): chunk
                for chunk in log.chunks
                if chunk.meta is not None and chunk.meta.tier == COLD
            }
            stale: list[str] = []
            holding: list[Chunk] = []
            for key in keys:
                parsed = parse_segment_name(key.rpartition("/")[2])
                if parsed is None or parsed[0] > ranges[-1][1] or log.dropped:
                    continue
                chunk = current.get((parsed[0], parsed[1]))
                if chunk is None:
                    stale.append(key)
                elif parsed[2] == "data" and _holds(chunk, ranges):
                    holding.append(chunk)
            yield from delete_keys(self._store, stale)
            self._merge_service.retirement.erased(log, ranges[-1][1])
            if not holding:
                self._merge_service.manifests.check(log)
                return
            for chunk in holding:
                yield from self._replace(log, chunk)
        raise OSError(EIO, f"the cold segments of {log.name} keep changing")

    def _list_again(self, prefix: str) -> list[str]:
        # Any delete also removes the leftovers of interrupted puts.
        self._store.delete(f"{prefix}nothing")
        return self._store.list(prefix)

    def _replace(self, log: TopicLog, chunk: Chunk) -> Steps:
        """Replace a segment by a new generation without dead records, and remove the old one from the store."""
        meta, shard = chunk.meta, self._shard
        if meta is None or chunk not in log.chunks:
            return
        directory = self._reader.topic_dir(log.id)
        rows = chunk.rows.copy()
        dead = ~chunk.live(0, chunk.count, frames.DELETED)
        dead[: max(0, log.view.first_seq - chunk.first_seq)] = True
        self._checkpointer.cold_job_chunk = chunk
        made = yield _run(lambda: self._rewrite(log.id, directory, meta, rows, dead))
        new_meta, new_rows = made
        yield WaitUntil(lambda: not self._checkpointer.capturing)
        if log.dropped or chunk.meta is not meta or chunk not in log.chunks:
            return  # the next round removes both
        if not shard.state.has_room(CONTROL_BYTES):
            raise OSError(ENOSPC, "no room in the log")
        swapped = [meta.first_seq, new_meta.generation, log.cap_lost, log.ttl_lost, COLD]
        # Not applied: the rows are in memory here. Before any yield: a checkpoint that starts now must see the new generation.
        shard.state.log_only(frames.SEGMENT_SWAP, log, swapped)
        self._checkpointer.replace_segment(log, chunk, new_meta, new_rows)
        self._checkpointer.delete_later(log.id, meta)
        shard.state.touched[log.id] = log
        shard.state.counters["swaps"] += 1
        yield WaitSynced(0)

        def clear() -> None:
            delete_segment(self._store, directory, meta)
            remove_files(self._disk, directory, new_meta, "data")
            self._disk.sync_dir(directory)

        yield _run(clear)
        self._reader.close_topic(log.id)

    def _rewrite(
        self, topic_id: int, directory: str, meta: SegmentMeta, rows: Rows, dead: Mask
    ) -> tuple[SegmentMeta, Rows]:
        """Write the new generation; runs on another thread. Damaged records stay damaged: their blocks keep wrong digests."""
        store, disk = self._store, self._disk
        path = segment_path(directory, meta, "data")

        def read(offset: int, length: int) -> bytes:
            data = store.read_range(path, offset, length)
            if len(data) != length:
                raise OSError(EIO, f"{path} in the cold tier is truncated")
            return data

        # Tag and node ids as stored in the file; in memory they were replaced by the topic's.
        stored = read_rows(disk, directory, meta)
        rows["tag"], rows["node"] = stored["tag"], stored["node"]
        chain = read_sum(disk, directory, meta.first_seq, meta.generation)[0].chain
        steps = rewrite_steps(
            disk, directory, meta, rows, dead, meta.generation + 1, chain, read=read, topic_id=topic_id
        )
        made, new_rows = drain(steps)
        copied = self._copy_unverified(directory, made)
        if copied:
            raise OSError(EIO, copied)
        return msgspec.structs.replace(made, tier=COLD), new_rows

    def _copy_unverified(self, directory: str, meta: SegmentMeta) -> str:
        """Put the files into the store and read them back. No block digests are checked: there may be damaged records."""
        store, disk = self._store, self._disk
        for suffix in SEGMENT_SUFFIXES:
            if suffix == "dict" and not meta.dict_bytes:
                continue
            path = segment_path(directory, meta, suffix)
            store.put(path, _blocks(disk, path))
            if any(
                store.read_range(path, number * BLOCK_BYTES, BLOCK_BYTES) != block
                for number, block in enumerate(_blocks(disk, path))
            ):
                return f"{path} in the cold tier differs from what was written"
        return ""


def _run(work: Callable[[], object]) -> Blocking:
    return Blocking(COLD_IO_KIND, work)


def _blocks(disk: Disk, path: str) -> Iterator[bytes]:
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        for offset in range(0, size, BLOCK_BYTES):
            yield read_exact(disk, handle, path, offset, min(BLOCK_BYTES, size - offset))
    finally:
        disk.close(handle)


def _holds(chunk: Chunk, ranges: list[Range]) -> bool:
    """Whether .data still has the bytes of any of these records."""
    lengths = chunk.rows["length"]
    for first, last in ranges:
        low, high = max(0, first - chunk.first_seq), min(chunk.count, last + 1 - chunk.first_seq)
        if low < high and bool(np.any(lengths[low:high])):
            return True
    return False
