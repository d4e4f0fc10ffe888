"""First touch: a topic's index rows, tags and nodes from its segments, and what cannot be read announced as lost."""

from __future__ import annotations

import heapq

import msgspec
import numpy as np
import numpy.typing as npt

from topics.engine import frames
from topics.engine.checkpoint import Checkpointer, TopicRow
from topics.engine.config import EngineConfig
from topics.engine.errors import Corrupt
from topics.engine.index import Chunk
from topics.engine.ports import Disk
from topics.engine.reader import Reader
from topics.engine.recovery_report import RecoveryReport
from topics.engine.segments import (
    SegmentMeta,
    cut_to_meta,
    parse_segment_name,
    read_deleted,
    read_dict,
    read_rows,
)
from topics.engine.shard import Shard
from topics.engine.snapshot import read_snapshot
from topics.engine.tags import LoadPart
from topics.engine.topic_log import Op, TopicLog


class Loader:
    def __init__(
        self,
        disk: Disk,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        config: EngineConfig,
        report: RecoveryReport,
    ) -> None:
        self._disk = disk
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self._report = report
        self._loaded: dict[int, TopicLog] = {}  # touched before recovery was over
        self._named: dict[tuple[int, int, int], int] | None = None
        self._announcements: list[tuple[int, int, int, str]] = []
        self._recovered = False

    def load(self, log: TopicLog) -> None:
        """Read a topic's index rows, and do what replay put off."""
        log.may_expire = False
        if log.stored is not None:
            metas, log.stored = log.stored, None
            self._load_segments(log, metas)
        deferred, log.deferred = log.deferred, []
        for work in deferred:
            work()
        # Only now is it known which generations count: replay may have swapped some.
        if self._recovered:
            self._sort_out_files(log)
        else:
            self._loaded[log.id] = log

    def _load_segments(self, log: TopicLog, metas: list[SegmentMeta]) -> None:
        directory = self._reader.topic_dir(log.id)
        chunks: list[Chunk] = []
        parts: list[LoadPart] = []
        node_parts: list[tuple[Chunk, list[bytes], npt.NDArray[np.bool_]]] = []
        for meta in metas:
            try:
                cut_to_meta(self._disk, directory, meta)
                rows = read_rows(self._disk, directory, meta)
                tags, nodes, expiries = read_dict(self._disk, directory, meta)
                deleted = read_deleted(self._disk, directory, meta)
            except (Corrupt, FileNotFoundError) as error:
                self._lose_segment(log, meta, str(error))
                continue
            live = rows["length"] != 0
            if deleted is not None:
                rows["flags"][deleted] |= frames.DEAD
                live &= ~deleted
            live[: max(0, log.first_seq - meta.first_seq)] = False
            chunk = Chunk.loaded(meta, rows, self._config.segment_max_events, self._shard.now_ms)
            if not meta.sealed:
                chunk.tag_ids = {name: i + 1 for i, name in enumerate(tags)}
                chunk.node_ids = {name: i + 1 for i, name in enumerate(nodes)}
            chunks.append(chunk)
            parts.append(LoadPart(meta.first_seq, chunk.rows["tag"].astype(np.uint32), tags, live))
            node_parts.append((chunk, nodes, live))
            for entry in expiries:
                if live[int(entry["row"])]:
                    heapq.heappush(log.expiries, (int(entry["time"]), meta.first_seq + int(entry["row"])))
        log.adopt(chunks)
        for chunk, ids in zip(chunks, log.tags.load(parts), strict=True):
            chunk.rows["tag"] = ids
        for chunk, names, live in node_parts:
            column = chunk.rows["node"]
            if names:
                counts = np.bincount(column[live], minlength=len(names) + 1)[1:]
                mapping = np.concatenate([np.zeros(1, np.uint32), log.nodes.add_counted(names, counts)])
                chunk.rows["node"] = np.where(live, mapping[column], 0)
        self._shard.bytes_live -= log.bytes
        self._recount(log)
        self._shard.bytes_live += log.bytes

    @staticmethod
    def _recount(log: TopicLog) -> None:
        """Counts from the rows: they are the truth when a segment could not be read."""
        count = size = 0
        for chunk, first, stop in log.spans(log.first_seq, log.next_seq):
            alive = chunk.live(first, stop, frames.DEAD)
            count += int(alive.sum())
            size += int(chunk.rows["size"][first:stop][alive].sum(dtype=np.int64))
        log.count = log.view.count = count
        log.bytes = log.view.bytes = size
        log.settle_first()
        log.view.first_seq = log.first_seq

    def _lose_segment(self, log: TopicLog, meta: SegmentMeta, problem: str) -> None:
        first, last = max(meta.first_seq, log.first_seq), meta.first_seq + meta.rows - 1
        if last >= first and meta.rows:
            self.announce(log, first, last, "corrupt")
            self._report.rotten.append(problem)
            self._shard.counters["corrupt"] = self._shard.counters.get("corrupt", 0) + 1

    # -- losses --------------------------------------------------------------------------------------------

    def announce(self, log: TopicLog, first: int, last: int, reason: str) -> None:
        """A range is gone and readers must hear of it; logged at the end of recovery."""
        if log.stored is not None and first < log.next_seq:
            self.load(log)
        op = Op(log)
        log.stage_loss((first, last, reason), op)
        self._shard.bytes_live += op.bytes
        log.publish(op)
        self._shard.touched[log.id] = log
        self._report.losses.append((log.name, first, last, reason))
        if self._recovered:
            frame = frames.encode_control(frames.LOSS, log.id, self._shard.now_ms, [first, last, reason])
            if self._shard.read_only is None:
                self._shard.add_frame(frame)
        else:
            self._announcements.append((log.id, first, last, reason))

    def announcements(self) -> list[bytes]:
        """The frames that log what was lost so far."""
        shard = self._shard
        return [
            frames.encode_control(frames.LOSS, topic_id, shard.now_ms, [first, last, reason])
            for topic_id, first, last, reason in self._announcements
            if topic_id in shard.by_id
        ]

    # -- leftovers -----------------------------------------------------------------------------------------

    def recovered(self) -> None:
        """Replay is over: which generations count is known, and losses found from now on are logged at once."""
        self._recovered = True
        for log in self._loaded.values():
            if not log.dropped:
                self._sort_out_files(log)
        self._loaded = {}

    def _sort_out_files(self, log: TopicLog) -> None:
        """Remove files that are explained (older generations, crashed checkpoints, dead fronts); keep the rest aside."""
        directory = self._reader.topic_dir(log.id)
        metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None] + log.doomed
        named = {(meta.first_seq, meta.generation) for meta in metas}
        firsts = {meta.first_seq for meta in metas}
        end = max((meta.first_seq + meta.rows for meta in metas), default=0)
        for name in self._disk.list(directory):
            parsed = parse_segment_name(name)
            if parsed is not None and (parsed[0], parsed[1]) in named:
                continue
            snapshot = self._last_naming(log.id, parsed)
            if snapshot is not None and parsed is not None:
                self._checkpointer.doom(log.id, SegmentMeta(parsed[0], parsed[1]), last_snapshot=snapshot)
                continue
            explained = parsed is None and name.endswith(".tmp")
            if parsed is not None:
                explained = parsed[0] in firsts or parsed[0] < log.first_seq or parsed[0] >= end
            if explained:
                self._disk.remove(f"{directory}/{name}")
            else:
                self._disk.make_dir("lost+found")
                self._disk.rename(f"{directory}/{name}", f"lost+found/{log.id:016x}-{name}")

    def _last_naming(self, topic_id: int, parsed: tuple[int, int, str] | None) -> int | None:
        """The newest kept snapshot that names this file: the next recovery may start from it."""
        if self._named is None:
            self._named = {}
            for number, _ in self._checkpointer.snapshots:
                for raw in read_snapshot(self._disk, self._checkpointer.meta_dir, number)[1]:
                    row = msgspec.msgpack.decode(raw, type=TopicRow)
                    for meta in row.segments:
                        self._named[(row.id, meta.first_seq, meta.generation)] = number
        return self._named.get((topic_id, parsed[0], parsed[1])) if parsed is not None else None
