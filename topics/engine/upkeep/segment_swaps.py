"""Replay of segment swaps: a topic's rows are pointed at the new generation of a segment, whose files are read.

Live, the rows of the new generation are in memory already (`Checkpointer.replace_segment`).
"""

from __future__ import annotations

import numpy as np

from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.reading.reader import Reader
from topics.engine.shard.state import ShardState, as_ranges
from topics.engine.storage import frames
from topics.engine.storage.control import Swapped
from topics.engine.storage.index import Chunk
from topics.engine.storage.sealing import meta_from_sum, sealed_rows
from topics.engine.storage.segments import COLD, Rows, SegmentMeta
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.merges import chunks_of, join_rows, swap_chunks
from topics.engine.upkeep.checkpoint import Checkpointer
from topics.engine.upkeep.loading import Loader
from topics.engine.upkeep.recovery_report import RecoveryReport


class SegmentSwaps:
    def __init__(
        self,
        disk: Disk,
        state: ShardState,
        reader: Reader,
        checkpointer: Checkpointer,
        loader: Loader,
        report: RecoveryReport,
    ) -> None:
        self._disk = disk
        self._reader = reader
        self.checkpointer = checkpointer
        self._loader = loader
        self._report = report
        state.appliers[frames.SEGMENT_SWAP] = self._apply_swap

    def _apply_swap(self, log: TopicLog, swapped: Swapped, op: Op) -> None:
        """Switch a segment to its new generation. Deletes replayed so far are flags in memory or in the old .del file."""
        log.stage_floors(swapped.cap_lost, swapped.ttl_lost, op)
        first_seq, generation = swapped.first_seq, swapped.generation
        for chunk in log.chunks:
            meta = chunk.meta
            if meta is None or meta.first_seq != first_seq or meta.generation >= generation:
                continue
            found = self.read_sealed(log, [chunk], first_seq, generation, swapped.tier)
            if found is None:
                continue
            new, rows = found
            if len(rows) != chunk.count:
                self._replace_run(log, new, rows, op)
                return
            self.delete_omitted(log, [chunk], rows, op)
            chunk.rows["offset"], chunk.rows["length"] = rows["offset"], rows["length"]
            self.checkpointer.delete_later(log.id, meta)
            chunk.meta, chunk.marked = new, None
            # When recovering from the older snapshot, some rows may have been only in the log.
            chunk.stored, chunk.closed, chunk.expiries = chunk.count, True, ()
            chunk.tag_ids, chunk.node_ids, chunk.index_hash, chunk.rebuilt_index = {}, {}, None, None
            late = np.nonzero(((chunk.rows["flags"] & frames.DEAD) != 0) & (rows["length"] > 0))[0]
            chunk.unmarked = [(int(i), int(i) + 1) for i in late]

    def _replace_run(self, log: TopicLog, new: SegmentMeta, rows: Rows, op: Op) -> None:
        """Replace several segments: the one to replace was a merge of them that is already gone.

        If their rows do not match either, nothing is replaced: the log and the old generation have all records.
        """
        chunks = chunks_of(log, new.first_seq, new.first_seq + new.rows)
        if chunks is None or len(chunks) == 1:
            return
        self.delete_omitted(log, chunks, rows, op)
        metas = [chunk.meta for chunk in chunks if chunk.meta is not None]
        swap_chunks(log, chunks, new, join_rows(chunks, rows))
        for meta in metas:
            self.checkpointer.delete_later(log.id, meta)

    @staticmethod
    def delete_omitted(log: TopicLog, chunks: list[Chunk], rows: Rows, op: Op) -> None:
        """Delete live records that the new generation omits: they had expired when it was written."""
        alive = np.concatenate([chunk.live(0, chunk.count, frames.DEAD) for chunk in chunks])
        ended = np.flatnonzero(alive & (rows["length"] == 0)) + chunks[0].first_seq
        log.stage_delete(as_ranges(ended.tolist()), op)

    def read_sealed(
        self, log: TopicLog, chunks: list[Chunk], first_seq: int, generation: int, tier: str
    ) -> tuple[SegmentMeta, Rows] | None:
        """Read the index of a new generation; if it is damaged, restore it from the cold tier.

        None: it cannot be read, and the segments of `chunks` stay in use.
        """
        directory = self._reader.topic_dir(log.id)
        while True:
            try:
                meta = meta_from_sum(self._disk, directory, first_seq, generation, tier=tier)
                return meta, sealed_rows(self._disk, directory, meta)
            except (Corrupt, FileNotFoundError) as error:
                if tier == COLD and self._loader.restore_index(directory, first_seq, generation):
                    self._report.rebuilt.append(str(error))
                    continue
                self._report.corrupt.append(str(error))
                self._loader.add_suspects(log, [chunk.meta for chunk in chunks if chunk.meta is not None])
                return None
