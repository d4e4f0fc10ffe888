"""What merges keep in the log and in snapshots. In replay a topic's rows are pointed at the merged segments. During normal operation, `MergeCommitter` has their rows in memory."""

from __future__ import annotations

import msgspec

from topics.engine.shard.state import ShardState
from topics.engine.storage import frames
from topics.engine.storage.control import Merged, MergedGroup, MergeInput
from topics.engine.storage.segments import COLD
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.merges import NO_MERGES, chunks_of, join_rows, retired_meta, swap_chunks
from topics.engine.topic.snapshot_row import RowPart, TopicRow
from topics.engine.upkeep.segment_swaps import SegmentSwaps


class StoredMerges:
    def __init__(self, state: ShardState, swaps: SegmentSwaps) -> None:
        self._swaps = swaps
        state.appliers[frames.SEGMENT_MERGE] = self._apply_merge
        state.row_parts["merges"] = RowPart(self._capture, self._restore)

    @staticmethod
    def _capture(log: TopicLog, row: TopicRow) -> None:
        row.merges = log.merges if log.merges is not NO_MERGES else None

    @staticmethod
    def _restore(log: TopicLog, row: TopicRow) -> None:
        log.merges = row.merges or NO_MERGES

    def _apply_merge(self, log: TopicLog, merged: Merged, op: Op) -> None:
        """Replace each run of segments by the segment they were merged into.

        A run stays as it is if the merged segment cannot be read, or if recovery from the older snapshot has divided the
        records into different segments.
        """
        log.stage_floors(merged.cap_lost, merged.ttl_lost, op)
        groups: list[MergedGroup] = []
        inputs_done: list[list[MergeInput]] = []
        for group, inputs in zip(merged.groups, merged.inputs, strict=True):
            chunks = chunks_of(log, group.first_seq, group.next_seq)
            if chunks is None:
                continue
            found = self._swaps.read_sealed(log, chunks, group.first_seq, group.generation, COLD)
            if found is None or len(found[1]) != group.rows:
                continue
            meta, rows = found
            self._swaps.delete_omitted(log, chunks, rows, op)
            swap_chunks(log, chunks, meta, join_rows(chunks, rows))
            for one in inputs:
                self._swaps.checkpointer.delete_later(log.id, retired_meta(one))
            groups.append(group)
            inputs_done.append(inputs)
        replayed = msgspec.structs.replace(merged, groups=groups, inputs=inputs_done)
        log.merges = log.merges.with_plan(replayed, op.logged_ms)
