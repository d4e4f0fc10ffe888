"""Commit of a merge plan: outputs are accepted one by one, then one log entry publishes all of them.

accept     compare an output with its inputs and copy it into place, in both tiers; a crash leaves files that nothing uses
publish    write the log entry and update memory, then sync the log, and only then reply to clients
"""

from __future__ import annotations

from collections.abc import Generator
from errno import ENOSPC
from functools import partial
from typing import Any

from topics.api.errors import InputsChanged, OutputInvalid, TopicNotFound
from topics.engine.cold.manifests import Manifests
from topics.engine.cold.merge.planner import ActivePlan, Planner
from topics.engine.cold.merge.verify import CommitStopped, InputDamaged, OutputRefused, OutputVerifier
from topics.engine.cold.retirement import Retirement
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Step, Steps, WaitSynced, WaitUntil
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.storage import frames
from topics.engine.storage.control import FailedGroup, Merged, MergedGroup, MergeInput
from topics.engine.storage.index import Chunk
from topics.engine.storage.merge_plan_file import PlanGroup, sidecar_key
from topics.engine.storage.sealing import sealed_rows
from topics.engine.storage.segment_store import COLD_IO_KIND, delete_keys, delete_segment
from topics.engine.storage.segments import SegmentMeta, remove_files, segment_name
from topics.engine.topic.log import TopicLog
from topics.engine.topic.merges import Committed, JoinedRows, chunks_of, join_rows, retired_meta, swap_chunks
from topics.engine.upkeep.checkpoint import Checkpointer

CHANGED = "inputs_changed"  # prefix of the failure reason of a group whose inputs were replaced
REPLACED = f"{CHANGED}: the topic no longer uses these segments"

Prepared = dict[int, tuple[SegmentMeta, JoinedRows]]  # by group: the new segment and its rows in memory


class MergeCommitter:
    """Runs the commits of merge plans, one step at a time."""

    def __init__(
        self,
        disk: Disk,
        store: SegmentStore | None,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        planner: Planner,
        manifests: Manifests,
        retirement: Retirement,
    ) -> None:
        self._disk = disk
        self._store = store
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._planner = planner
        self._manifests = manifests
        self._retirement = retirement
        # Files in place that will not be published, by topic, first seq and generation. Another attempt or an erase may
        # use the same name: the entry has to be removed here before such a file is written.
        self.unpublished: dict[tuple[int, int, int], SegmentMeta] = {}

    def is_current(self, log: TopicLog, group: PlanGroup) -> bool:
        """Whether the group's inputs are still segments of the topic."""
        chunks = chunks_of(log, group.first_seq, group.next_seq)
        if chunks is None or len(chunks) != len(group.inputs):
            return False
        return all(
            chunk.meta is not None
            and self._planner.may_merge(log, chunk)
            and (chunk.meta.first_seq, chunk.meta.generation) == (planned.first_seq, planned.generation)
            for chunk, planned in zip(chunks, group.inputs, strict=True)
        )

    def advance(self, plan: ActivePlan) -> Generator[Step, Any, bool]:
        """Accept the next group, or publish if there is none. True once the plan is published."""
        log = plan.log
        if log.dropped:
            raise TopicNotFound(log.name)
        self._checkpointer.cold_job_topic = log
        self._shard.state.upkeep_now(log)
        yield WaitSynced(0)
        while log.is_unloaded:
            self._shard.state.loader(log)
            yield WaitSynced(0)
        if log.erasing:
            raise InputsChanged(
                "records of this topic are being erased; request a new plan when that is done"
            )
        if not plan.todo:
            yield from self._publish(plan)
            return True
        yield from self._accept(plan, plan.groups[plan.todo[0]])
        plan.todo.pop(0)
        return False

    def _accept(self, plan: ActivePlan, group: PlanGroup) -> Steps:
        """Compare the job's output for a group with the inputs, and copy it into place."""
        if group.group in plan.made:
            return
        log = plan.log
        # An earlier attempt may have left files of the same name.
        yield from self.remove_unpublished()
        if not self.is_current(log, group):
            plan.fail(group, "", REPLACED)
            return
        chunks = chunks_of(log, group.first_seq, group.next_seq) or []
        sources = [self._planner.source(log, chunk) for chunk in chunks]
        directory = self._reader.topic_dir(log.id)
        assert self._store is not None
        verifier = OutputVerifier(self._disk, self._store, directory, plan.id, group, sources, plan.watch)
        meta = SegmentMeta(group.first_seq, group.generation)
        self.unpublished.pop((log.id, meta.first_seq, meta.generation), None)
        try:
            made = yield Blocking(COLD_IO_KIND, verifier.run)
            if plan.watch.stopped:
                raise CommitStopped("the plan was abandoned")
            plan.made[group.group] = made
        except InputDamaged as error:
            plan.fail(group, error.segment, error.reason)
            self._planner.exclude(log.id, group, error.segment)
            self._mark_unpublished(log.id, meta)
        except OutputRefused as error:
            self._mark_unpublished(log.id, meta)
            if error.outdated:
                plan.fail(group, "", f"{CHANGED}: {error.reason}")
                return
            # So that the next job for this plan repeats the group.
            yield from delete_keys(self._store, [sidecar_key(plan.id, group.group)])
            raise OutputInvalid(group.group, error.reason) from None
        except (OSError, CommitStopped):
            self._mark_unpublished(log.id, meta)
            raise

    def _publish(self, plan: ActivePlan) -> Steps:
        log, shard = plan.log, self._shard
        prepared: Prepared = {}
        changes = log.flag_changes
        for number, meta in sorted(plan.made.items()):
            group = plan.groups[number]
            chunks = chunks_of(log, group.first_seq, group.next_seq)
            if not self.is_current(log, group) or chunks is None:
                continue
            joined = yield Blocking(COLD_IO_KIND, partial(self._join, log, meta, chunks))
            prepared[number] = meta, joined
        # A running checkpoint still installs the old segments in memory when it finishes.
        yield WaitUntil(lambda: not self._checkpointer.capturing)
        if log.dropped or log.erasing or log.is_unloaded:
            raise InputsChanged("the topic changed during the commit; request a new plan")
        for number in list(plan.made):
            if number not in prepared or not self.is_current(log, plan.groups[number]):
                prepared.pop(number, None)
                self._mark_unpublished(log.id, plan.made.pop(number))
                plan.fail(plan.groups[number], "", REPLACED)
        if not prepared and all(one.reason.startswith(CHANGED) for one in plan.failed.values()):
            raise InputsChanged("the topic no longer uses any of the plan's segments; request a new plan")
        merged = self._merged(plan, prepared)
        frame = frames.encode_control(frames.SEGMENT_MERGE, log.id, shard.state.now_ms, merged)
        if not shard.state.has_room(len(frame)):
            raise OSError(ENOSPC, "no room in the log")
        # Not applied: the rows are in memory here. Before any yield: a checkpoint that starts now must see the new segments.
        shard.state.add_frame(frame)
        self._swap(plan, merged, prepared, is_fresh=log.flag_changes == changes)
        yield WaitSynced(0)

    def _join(self, log: TopicLog, meta: SegmentMeta, chunks: list[Chunk]) -> JoinedRows:
        """Build the rows of the new segment for memory; runs on another thread."""
        return join_rows(chunks, sealed_rows(self._disk, self._reader.topic_dir(log.id), meta))

    def _merged(self, plan: ActivePlan, prepared: Prepared) -> Merged:
        log = plan.log
        groups: list[MergedGroup] = []
        inputs: list[list[MergeInput]] = []
        for number, (meta, _) in prepared.items():
            group = plan.groups[number]
            groups.append(
                MergedGroup(
                    number,
                    group.first_seq,
                    group.next_seq,
                    group.generation,
                    group.data_bytes,
                    meta.data_bytes,
                    meta.live,
                )
            )
            inputs.append(
                [
                    MergeInput(one.first_seq, one.generation, one.data_bytes + one.idx_bytes + one.dict_bytes)
                    for one in group.inputs
                ]
            )
        failed = [plan.failed[number] for number in sorted(plan.failed)]
        manifest = self._manifests.next_number(log.id)
        return Merged(plan.id, manifest, log.cap_lost, log.ttl_lost, groups, inputs, failed)

    def _swap(self, plan: ActivePlan, merged: Merged, prepared: Prepared, *, is_fresh: bool) -> None:
        log, shard, checkpointer = plan.log, self._shard, self._checkpointer
        for group, inputs in zip(merged.groups, merged.inputs, strict=True):
            chunks = chunks_of(log, group.first_seq, group.next_seq)
            assert chunks is not None
            swap_chunks(log, chunks, *prepared[group.group], is_fresh=is_fresh)
            for one in inputs:
                self._reader.close_segment(log.id, one.first_seq, one.generation)
                checkpointer.delete_later(log.id, retired_meta(one))
        log.merges = log.merges.with_plan(merged, shard.state.now_ms)
        self._retirement.add(log, merged)
        plan.made.clear()
        checkpointer.usage.set(log.id, [chunk.meta for chunk in log.chunks if chunk.meta is not None])
        shard.state.touched[log.id] = log
        shard.state.counters["merges"] = shard.state.counters.get("merges", 0) + len(merged.groups)

    def remove_unpublished(self) -> Steps:
        """Remove unpublished files, before a merge or an erase creates a segment of the same name."""
        store = self._store
        assert store is not None
        while self.unpublished:
            key = next(iter(self.unpublished))
            if not self._is_in_use(*key):
                directory = self._reader.topic_dir(key[0])
                yield Blocking(COLD_IO_KIND, partial(self._remove_both, directory, self.unpublished[key]))
            del self.unpublished[key]

    def _mark_unpublished(self, topic_id: int, meta: SegmentMeta) -> None:
        self.unpublished[topic_id, meta.first_seq, meta.generation] = meta

    def _is_in_use(self, topic_id: int, first_seq: int, generation: int) -> bool:
        log = self._shard.state.by_id.get(topic_id)
        if log is None:
            return False
        metas = log.stored if log.stored is not None else [chunk.meta for chunk in log.chunks]
        return any(
            meta is not None and (meta.first_seq, meta.generation) == (first_seq, generation)
            for meta in metas
        )

    def _remove_both(self, directory: str, meta: SegmentMeta) -> None:
        assert self._store is not None
        delete_segment(self._store, directory, meta)
        remove_files(self._disk, directory, meta, "sum", "dict", "idx")

    def discard(self, plan: ActivePlan) -> None:
        """Schedule removal of the accepted outputs of an abandoned plan."""
        for meta in plan.made.values():
            self._mark_unpublished(plan.log.id, meta)
        plan.made.clear()


def committed_body(done: Committed) -> dict[str, object]:
    return {
        "plan_id": done.plan_id,
        "state": "committed",
        "manifest": done.manifest,
        "groups": [
            {
                "group": one.group,
                "name": segment_name(one.first_seq, one.generation),
                "first_seq": one.first_seq,
                "next_seq": one.next_seq,
                "bytes_in": one.bytes_in,
                "bytes_out": one.bytes_out,
                "rows": one.rows,
                "live": one.live,
            }
            for one in done.groups
        ],
        "failed": [_failed_body(one) for one in done.failed],
    }


def _failed_body(one: FailedGroup) -> dict[str, object]:
    return {"group": one.group, "segment": one.segment, "reason": one.reason}
