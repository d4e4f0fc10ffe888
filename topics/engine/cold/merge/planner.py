"""Merge plans: creation and in-memory state. The file format and the choice of segments are in merge_plan_file.py."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from topics.api import limits
from topics.api.errors import Corrupt, InputsChanged, LeaseLost, Throttled
from topics.engine.cold.manifests import Name, describe
from topics.engine.cold.merge.verify import CommitProgress, MergeInput
from topics.engine.commands.merges import MergeParameters
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Step, WaitSynced
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.storage.control import FailedGroup
from topics.engine.storage.delete_marks import encode_marks
from topics.engine.storage.files import HEADER_BYTES
from topics.engine.storage.index import Chunk
from topics.engine.storage.merge_plan_file import (
    PLAN_NAME,
    Candidate,
    PlanFile,
    PlanGroup,
    PlanInput,
    choose,
    decode_plan,
    encode_plan,
    plan_id_of,
    staging_dir,
)
from topics.engine.storage.sealing import read_sum
from topics.engine.storage.segment_store import COLD_IO_KIND, read_small_file
from topics.engine.storage.segments import COLD, Mask, Rows, SegmentMeta
from topics.engine.topic.log import TopicLog

PLAN_BYTES_MAX = 64 * limits.MIB
NO_CHAIN = bytes(8)


class ActivePlan:
    """A plan in memory, with its lease and the progress of its commit. The plan survives a restart, the lease does not."""

    def __init__(self, log: TopicLog, made: PlanFile, now_ms: int) -> None:
        self.log = log
        self.id = made.plan_id
        self.parameters = made.parameters
        self.groups = made.groups
        self.inputs = frozenset(
            (one.first_seq, one.generation) for group in made.groups for one in group.inputs
        )
        self.data_bytes = sum(group.data_bytes for group in made.groups)
        self.used_ms = now_ms  # last time it was leased
        self.lease = ""
        self.lease_ms = 0
        self._lease_until_ms = 0  # by the monotonic clock
        self.committing = False
        self.todo: list[int] = []  # groups still to accept
        self.made: dict[int, SegmentMeta] = {}  # outputs in place, not published yet
        self.failed: dict[int, FailedGroup] = {}
        self.waiting: list[tuple[int, object]] = []  # deadlines and reply tokens of clients
        self.watch = CommitProgress()

    # -- the lease -----------------------------------------------------------------------------------------

    def take(self, lease: str, lease_ms: int, mono_ms: int) -> None:
        self.lease, self.lease_ms = lease, lease_ms
        self._lease_until_ms = mono_ms + lease_ms

    def lease_left_ms(self, mono_ms: int) -> int:
        """Time left on the lease; 0 if there is none. It does not expire during a commit."""
        left_ms = max(0, self._lease_until_ms - mono_ms) if self.lease else 0
        return max(left_ms, 1000) if self.committing else left_ms

    def check_lease(self, lease: str, mono_ms: int) -> None:
        if not lease or lease != self.lease or not self.lease_left_ms(mono_ms):
            raise LeaseLost(self.id)

    # -- the commit ----------------------------------------------------------------------------------------

    def begin_commit(self) -> None:
        if not self.committing:
            self.committing = True
            self.failed = {}
            self.todo = [group.group for group in self.groups]
            self.watch = CommitProgress()

    def fail(self, group: PlanGroup, segment: str, reason: str) -> None:
        self.failed[group.group] = FailedGroup(group.group, segment, reason)

    def end_commit(self, reply: Callable[[object], None]) -> None:
        self.committing = False
        waiting, self.waiting = self.waiting, []
        for _, token in waiting:
            reply(token)

    @property
    def progress(self) -> float:
        return min(0.99, self.watch.done_bytes / max(1, self.data_bytes))


@dataclass(slots=True)
class _ChosenGroup:
    """The chosen segments of one group, as in memory."""

    metas: list[SegmentMeta]
    rows: list[Rows]
    dead: list[Mask]

    @classmethod
    def of(cls, sources: list[MergeInput]) -> _ChosenGroup:
        return cls(
            [one.meta for one in sources], [one.rows for one in sources], [one.dead() for one in sources]
        )


def _candidate(source: MergeInput | None) -> Candidate | None:
    if source is None:
        return None
    size = source.meta.data_bytes - HEADER_BYTES
    kept = int(source.rows["length"][~source.dead()].sum(dtype="int64"))
    return Candidate(source.meta.first_seq, source.meta.rows, size, size - kept)


class Planner:
    """Chooses segments to merge and writes plans."""

    def __init__(self, disk: Disk, store: SegmentStore | None, shard: Shard, reader: Reader) -> None:
        self._disk = disk
        self._store = store
        self._shard = shard
        self._reader = reader
        self._excluded: dict[int, set[Name]] = {}  # by topic: segments found to be damaged since the start

    def exclude(self, topic_id: int, group: PlanGroup, segment: str) -> None:
        """Make no more plans with a damaged segment. After a repair it has another generation."""
        damaged = [one for one in group.inputs if one.name == segment] or group.inputs
        self._excluded.setdefault(topic_id, set()).update((one.first_seq, one.generation) for one in damaged)

    def forget(self, topic_id: int) -> None:
        self._excluded.pop(topic_id, None)

    @staticmethod
    def may_merge(log: TopicLog, chunk: Chunk) -> bool:
        meta = chunk.meta
        return (
            meta is not None
            and meta.tier == COLD
            and meta.sealed
            and chunk.stored == chunk.count == meta.rows
            and not log.dropped
        )

    @staticmethod
    def source(log: TopicLog, chunk: Chunk) -> MergeInput:
        assert chunk.meta is not None
        return MergeInput(chunk.meta, chunk.rows, log.view.first_seq)

    def make(self, log: TopicLog, parameters: MergeParameters) -> Generator[Step, Any, PlanFile | None]:
        """Choose segments and write a plan. None if there is nothing to merge."""
        if log.erasing:
            raise InputsChanged("records of this topic are being erased; try again when that is done")
        if log.merges.retired_segments > limits.RETIRED_MAX - limits.PLAN_SEGMENTS_MAX:
            raise Throttled(
                "too many retired segments of this topic still have files; wait until some are removed",
                limit="retired_segments",
                max=limits.RETIRED_MAX,
            )
        self._shard.state.upkeep_now(log)
        yield WaitSynced(0)  # until expirations are published
        while log.is_unloaded:
            self._shard.state.loader(log)
            yield WaitSynced(0)
        sources = [
            self.source(log, chunk) if self._is_candidate(log, chunk) else None for chunk in log.chunks
        ]
        epoch, now_ms = self._shard.state.written_lsn, self._shard.state.now_ms
        made: PlanFile | None = yield Blocking(
            COLD_IO_KIND, partial(self._write, log.id, log.name, epoch, now_ms, parameters, sources)
        )
        return made

    def _is_candidate(self, log: TopicLog, chunk: Chunk) -> bool:
        meta = chunk.meta
        if meta is None or not self.may_merge(log, chunk):
            return False
        return (meta.first_seq, meta.generation) not in self._excluded.get(log.id, ())

    # -- files ---------------------------------------------------------------------------------------------

    def _write(
        self,
        topic_id: int,
        topic: str,
        epoch: int,
        now_ms: int,
        parameters: MergeParameters,
        sources: list[MergeInput | None],
    ) -> PlanFile | None:
        """Write the plan; runs on another thread. Concurrent deletes may or may not be included in the marks."""
        store = self._store
        assert store is not None
        chosen = [
            _ChosenGroup.of([source for source in sources[first:stop] if source is not None])
            for first, stop in choose([_candidate(source) for source in sources], parameters)
        ]
        described: list[tuple[PlanGroup, _ChosenGroup]] = []
        for one in chosen:
            try:
                described.append((self._describe(topic_id, len(described), one), one))
            except (Corrupt, FileNotFoundError):
                # Its index cannot be verified. Readers can do without, a merge cannot.
                names = {(meta.first_seq, meta.generation) for meta in one.metas}
                self._excluded.setdefault(topic_id, set()).update(names)
        if not described:
            return None
        id_text = f"{topic_id:016x}"
        inputs = [one for group, _ in described for one in group.inputs]
        plan_id = plan_id_of(id_text, epoch, parameters, inputs)
        staging = staging_dir(plan_id)
        groups: list[PlanGroup] = []
        marks: dict[str, Mask] = {}
        for group, one in described:
            placed: list[PlanInput] = []
            for planned, rows, dead in zip(group.inputs, one.rows, one.dead, strict=True):
                marked = dead & (rows["length"] > 0)
                key = f"{staging}/{planned.name}.del" if marked.any() else None
                if key is not None:
                    marks[key] = marked
                placed.append(msgspec.structs.replace(planned, dead=key))
            groups.append(msgspec.structs.replace(group, inputs=placed))
        made = PlanFile(
            topic=topic,
            topic_id=id_text,
            plan_id=plan_id,
            delete_epoch=epoch,
            created_at_ms=now_ms,
            staging=staging,
            parameters=parameters,
            groups=groups,
        )
        store.put(f"{staging}/{PLAN_NAME}", [encode_plan(made)])
        for key, mask in marks.items():
            store.put(key, [encode_marks(mask)])
        return made

    def _describe(self, topic_id: int, number: int, chosen: _ChosenGroup) -> PlanGroup:
        directory = self._reader.topic_dir(topic_id)
        inputs: list[PlanInput] = []
        chain = origin = NO_CHAIN
        for i, (meta, rows, dead) in enumerate(zip(chosen.metas, chosen.rows, chosen.dead, strict=True)):
            summary, digest = read_sum(self._disk, directory, meta.first_seq, meta.generation)
            if not i:
                chain = summary.chain
            origin = (
                summary.origin if any(summary.origin) else digest
            )  # the next segment's chain refers to it
            found = describe(meta, rows, dead & (rows["length"] > 0), digest.hex())
            inputs.append(PlanInput(**msgspec.structs.asdict(found), dead=None))
        first, last = chosen.metas[0], chosen.metas[-1]
        return PlanGroup(
            group=number,
            first_seq=first.first_seq,
            next_seq=last.first_seq + last.rows,
            generation=max(meta.generation for meta in chosen.metas) + 1,
            chain=chain.hex(),
            origin=origin.hex(),
            inputs=inputs,
        )

    def read(self, plan_id: str) -> PlanFile | None:
        """Read a plan back; runs on another thread. None if a file of it is missing or corrupt."""
        store = self._store
        assert store is not None
        key = f"{staging_dir(plan_id)}/{PLAN_NAME}"
        try:
            made = decode_plan(key, read_small_file(store, key, PLAN_BYTES_MAX))
        except (Corrupt, FileNotFoundError):
            return None
        marks = [one.dead for group in made.groups for one in group.inputs if one.dead is not None]
        return made if all(map(store.exists, marks)) else None
