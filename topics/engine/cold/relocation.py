"""Relocation of sealed segments to the cold tier, and removal of segments from it. Also queues erases there (erase.py).

A segment is moved in these steps. It stays readable if the server crashes between any two of them:

    copy      put .data, .idx, .dict and .sum into the store, each atomically, .sum last
    verify    read back .data and compare each block with its digest in .sum; compare the other files byte by byte
    flip      mark the segment as cold in memory, and so in the next snapshot; both tiers have it, reads use the hot one
    delete    remove .data from the hot tier once neither kept snapshot lists the segment as hot

.idx, .dict, .sum and .del also stay on the hot tier: they are small, loading a topic reads them on the event loop, and
deletes of cold records are marked in .del. Leftovers of a crash in the store are found by the sweep after the next start,
or overwritten when the move is repeated.

One cold tier task runs at a time, separate from the task for checkpoints and erases. A slow or hanging store therefore
delays only the cold tier. After a failure the shard keeps serving, and the task is retried later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import EIO
from functools import partial

import msgspec

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import ColdStoreFailed, Corrupt, EraseDeferred, ShardReadOnly, TopicsError
from topics.engine.cold.erase import ColdEraser
from topics.engine.cold.merge.service import MergeService
from topics.engine.core.pacing import GrowthRate, PacedWork, RateLimit
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Steps, WaitSynced, WaitUntil
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.shard.state import EraseRequest
from topics.engine.storage.files import is_out_of_resources, read_exact, read_file, xxh
from topics.engine.storage.index import Chunk
from topics.engine.storage.layout import COLD_ID_NAME
from topics.engine.storage.sealing import read_sum
from topics.engine.storage.segment_store import COLD_IO_KIND, INDEX_SUFFIXES, delete_keys, delete_segment
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    COLD,
    HOT,
    SegmentMeta,
    parse_segment_name,
    segment_path,
)
from topics.engine.topic.log import TopicLog
from topics.engine.upkeep.checkpoint import Checkpointer
from topics.engine.upkeep.erase import finish_erase
from topics.engine.upkeep.loading import Loader, is_known_leftover

CHECK_BLOCKS = 4  # blocks that one step reads back


@dataclass(frozen=True, slots=True)
class _Copied:
    """Result of copying a segment. `problem`: why it must stay on the hot tier, empty if the copy succeeded."""

    problem: str = ""


class Relocator:
    """Chooses and runs the next cold tier task of a shard."""

    def __init__(
        self,
        disk: Disk,
        store: SegmentStore | None,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        config: EngineConfig,
        merge_service: MergeService,
    ) -> None:
        self._merge_service = merge_service
        self._disk = disk
        self._store = store
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self.loader: Loader | None = None  # set after recovery
        self._candidates: dict[int, TopicLog] = {}  # topics that may have too many hot segments
        self._erases: list[EraseRequest] = []
        self._removable: list[tuple[int, SegmentMeta]] = []  # segments to remove from the store
        self._dropped: list[int] = []
        self._swept = False
        # Files of topics that had deferred log entries during the sweep.
        self._unswept: dict[int, list[tuple[str, str]]] = {}
        self._leftovers: list[str] = []  # files of those topics to remove
        self._may_have_files: set[int] = set()  # topics that may have files in the store
        # Hot segments with a copy in the store, by topic: left by unfinished moves, which may never be finished.
        self._copies: dict[int, set[tuple[int, int]]] = {}
        self._damaged: set[tuple[int, int, int]] = set()  # damaged segments, which stay on the hot tier
        self._pause_ms = 0
        self._retry_ms = 0  # no task starts before this time
        self._growth = GrowthRate(shard.state.clock, lambda: shard.state.counters["bytes_written"])
        self.pace = RateLimit(shard.state.clock, self._rate)
        self.erasing: TopicLog | None = None  # topic whose segments are being rewritten
        self.problem = ""  # why the last attempt failed
        if store is not None:
            self._eraser = ColdEraser(disk, store, shard, reader, checkpointer, merge_service)
            checkpointer.on_checkpointed = self._checkpointed
            checkpointer.on_segment_removed = self._segment_removed
            checkpointer.on_topic_removed = self._dropped.append
            merge_service.retirement.on_removable = lambda topic_id, meta: self._removable.append(
                (topic_id, meta)
            )
            merge_service.manifests.on_written = self._may_have_files.add

    def start(self, loader: Loader) -> None:
        """Collect candidates after recovery, using the segments in the snapshot."""
        self.loader = loader
        for log in self._shard.state.by_id.values():
            metas = self._metas_of(log)
            self._checkpointer.usage.set(log.id, metas)
            if self._store is not None and self._surplus(metas):
                self._candidates[log.id] = log

    @property
    def has_work(self) -> bool:
        if self._store is None or self._shard.state.read_only is not None or self.loader is None:
            return False
        own = (
            self._erases
            or self._removable
            or self._leftovers
            or self._dropped
            or self._candidates
            or not self._swept
        )
        return bool(own) or self._merge_service.has_work

    @property
    def retry_ms(self) -> int:
        """No task starts before this time, unless a client is waiting for a reply."""
        is_awaited = self._erases and self._erases[0].token is not None
        return 0 if is_awaited or self._merge_service.is_awaited else self._retry_ms

    def next_task(self) -> Steps:
        """The most urgent task first: a client may be waiting for an erase."""
        if self._erases and self._swept:
            return self._erase(self._erases.pop(0))
        if self._erases:
            return self._sweep()  # plans may have copies in their staging, which only the sweep finds
        if self._merge_service.is_urgent:
            return self._merge_service.next_task() if self._swept else self._sweep()
        if self._removable:
            return self._remove_segments()
        if self._leftovers:
            return self._remove_leftovers()
        if self._dropped:
            return self._remove_topic(self._dropped.pop(0))
        if not self._swept:
            return self._sweep()
        if self._candidates:
            return self._relocate(self._candidates.pop(next(iter(self._candidates))))
        return self._merge_service.next_task()

    def failed(self, error: BaseException, now_ms: int) -> None:
        """A task failed, because of the store or the disk. Nothing is lost; it is retried after a pause."""
        self._pause_ms = min(max(2 * self._pause_ms, limits.COLD_PAUSE_MS_MIN), limits.COLD_PAUSE_MS_MAX)
        self._retry_ms = now_ms + self._pause_ms
        self.problem = str(error)
        self._count("cold_failures")
        if not self._swept:
            self._merge_service.refuse(ColdStoreFailed(f"cannot list the cold tier: {error}"))
            for request in self._erases:
                self._defer_erase(request, cold=True)

    def _succeeded(self) -> None:
        self._pause_ms = self._retry_ms = 0
        self.problem = ""

    def _count(self, name: str) -> None:
        self._shard.state.counters[name] = self._shard.state.counters.get(name, 0) + 1

    def _run(self, work: Callable[[], object]) -> Blocking:
        return Blocking(COLD_IO_KIND, work)

    # -- moving --------------------------------------------------------------------------------------------

    def _checkpointed(self, logs: list[TopicLog]) -> None:
        for log in logs:
            if not log.dropped and self._surplus(self._metas_of(log)):
                self._candidates[log.id] = log
            self._merge_service.manifests.check(log)
            if log.id in self._unswept and not log.deferred:
                files = self._unswept.pop(log.id)
                self._load_retired(log.id, files)
                self._leftovers += self._find_leftovers(log.id, files)

    @staticmethod
    def _metas_of(log: TopicLog) -> list[SegmentMeta]:
        if log.stored is not None:
            return log.stored
        return [chunk.meta for chunk in log.chunks if chunk.meta is not None]

    def _surplus(self, metas: list[SegmentMeta]) -> list[SegmentMeta]:
        """Hot sealed segments beyond the configured number or bytes to retain, oldest first."""
        found: list[SegmentMeta] = []
        count = size = 0
        config = self._config
        for meta in reversed(metas):
            if not meta.sealed:
                continue
            count += 1
            size += meta.data_bytes
            kept = count <= config.hot_retain_segments
            kept = kept and not (config.hot_retain_bytes and size > config.hot_retain_bytes)
            if not kept and meta.tier == HOT:
                found.append(meta)
        return found[::-1]

    def _relocate(self, log: TopicLog) -> Steps:
        """Move the surplus segments of one topic, one after the other, until a more urgent task is waiting."""
        checkpointer = self._checkpointer
        candidates: list[Chunk] | None = None  # oldest last
        try:
            # Not during an erase: a copy might contain erased records. Afterwards the topic becomes a candidate again.
            while not log.dropped and not log.erasing:
                if log.is_unloaded:
                    for _ in self._shard.state.load_slices(log):
                        yield None
                    candidates = None
                    yield WaitSynced(0)
                    continue
                if candidates is None:
                    surplus = {meta.first_seq for meta in self._surplus(self._metas_of(log))}
                    candidates = [chunk for chunk in log.chunks if chunk.first_seq in surplus][::-1]
                if not candidates:
                    break
                chunk = candidates.pop()
                if not self._may_move(log, chunk):
                    continue
                checkpointer.cold_job_chunk, checkpointer.cold_job_topic = chunk, log
                try:
                    yield from self._move(log, chunk)
                finally:
                    checkpointer.cold_job_chunk = checkpointer.cold_job_topic = None
                if self._has_urgent_task:
                    self._candidates[log.id] = log
                    return
            self._merge_service.manifests.check(log)
        except (OSError, TopicsError):
            self._candidates[log.id] = log
            raise
        finally:
            if not log.dropped:
                checkpointer.usage.set(log.id, self._metas_of(log))

    @property
    def _has_urgent_task(self) -> bool:
        """Whether a more urgent task is waiting. A backlog of moves may take hours."""
        return bool(self._erases) or self._merge_service.is_urgent

    def _rate(self) -> int:
        """Bytes per second that may be moved; 0 is unlimited.

        The limit grows with the write rate, otherwise the hot tier would grow forever. There is none while disk space is low.
        """
        bound, shard = self._config.relocate_bytes_per_s, self._shard
        if not bound or shard.state.low_space or shard.state.disk_full or self._has_urgent_task:
            return 0
        return max(bound, limits.MOVES_PER_GROWTH * self._growth.per_s)

    def _may_move(self, log: TopicLog, chunk: Chunk) -> bool:
        meta = chunk.meta
        return (
            meta is not None
            and meta.tier == HOT
            and meta.sealed
            and chunk.stored == chunk.count
            and chunk is not self._checkpointer.compacting_chunk
            and chunk.next_seq > log.first_seq
            and (log.id, meta.first_seq, meta.generation) not in self._damaged
        )

    def _move(self, log: TopicLog, chunk: Chunk) -> Steps:
        meta = chunk.meta
        assert meta is not None
        directory = self._reader.topic_dir(log.id)
        self._may_have_files.add(log.id)
        copies = self._copies.setdefault(log.id, set())
        copies.add((meta.first_seq, meta.generation))
        copied = yield from self.pace.steps(
            self._copy_steps(directory, meta),
            kind=COLD_IO_KIND,
            steps=1,
            step_bytes=BLOCK_BYTES,
            total=meta.data_bytes + meta.idx_bytes,
            is_cancelled=lambda: log.dropped or bool(log.erasing),
        )
        self._succeeded()
        if copied is not None and copied.problem:
            yield from self._drop_copy(log, meta)
            self._damaged.add((log.id, meta.first_seq, meta.generation))
            self.problem = copied.problem
            self._count("cold_refused")
            return
        # A running checkpoint still installs the segment as hot in memory when it finishes.
        yield WaitUntil(lambda: not self._checkpointer.capturing)
        is_current = chunk.meta is meta and chunk in log.chunks
        if copied is None or log.dropped or log.erasing or not is_current:
            yield from self._drop_copy(log, meta)
            return
        copies.discard((meta.first_seq, meta.generation))
        chunk.meta = msgspec.structs.replace(meta, tier=COLD)
        self._checkpointer.delete_hot_copy_later(log.id, chunk.meta)
        self._shard.state.touched[log.id] = log
        self._count("relocations")

    def _drop_copy(self, log: TopicLog, meta: SegmentMeta) -> Steps:
        """Remove the copy of an aborted move. It may be pinned if it is older than the last start: only an erase or a
        drop of the topic ignores that.
        """
        name = (meta.first_seq, meta.generation)
        if log.dropped or log.erasing or not self._merge_service.retirement.keeps(log.id, name):
            yield self._run(partial(self._delete_segment, self._reader.topic_dir(log.id), meta))
        self._copies.get(log.id, set()).discard(name)

    def _copy_steps(self, directory: str, meta: SegmentMeta) -> PacedWork[_Copied]:
        """Put the segment's files into the store and read them back; runs on another thread, a MiB at a time."""
        store, disk = self._store, self._disk
        assert store is not None
        try:
            summary = read_sum(disk, directory, meta.first_seq, meta.generation)[0]
            blocks, digests = summary.blocks, {"idx": summary.idx_digest, "dict": summary.dict_digest}
            path = segment_path(directory, meta, "data")
            if not (yield from self._is_stored(path, meta, blocks)):
                yield from store.put_steps(path, _verified_blocks(disk, path, meta.data_bytes, blocks))
                if not (yield from self._is_stored(path, meta, blocks)):
                    raise OSError(EIO, f"{path} in the cold tier differs from what was written")
            for suffix in INDEX_SUFFIXES:
                if suffix == "dict" and not meta.dict_bytes:
                    continue
                path = segment_path(directory, meta, suffix)
                content = read_file(disk, path)
                if suffix in digests and xxh(content) != digests[suffix]:
                    raise Corrupt(path, 0, "the file does not match its digest")
                store.put(path, [content])
                if store.read_range(path, 0, len(content) + 1) != content:
                    raise OSError(EIO, f"{path} in the cold tier differs from what was written")
        except (Corrupt, FileNotFoundError) as error:
            if not isinstance(error, Corrupt) and disk.exists(segment_path(directory, meta, "data")):
                raise  # the file is missing in the store
            # Reads will report which records are damaged; a copy would only spread the damage.
            return _Copied(str(error))
        return _Copied()

    def _is_stored(self, path: str, meta: SegmentMeta, blocks: list[bytes]) -> PacedWork[bool]:
        """Whether the store has an intact copy of .data, perhaps from an earlier attempt."""
        store = self._store
        assert store is not None
        if not store.exists(path) or store.length(path) != meta.data_bytes:
            return False
        for number, digest in enumerate(blocks):
            if number and number % CHECK_BLOCKS == 0:
                yield
            if xxh(store.read_range(path, number * BLOCK_BYTES, BLOCK_BYTES)) != digest:
                return False
        return True

    # -- removal -------------------------------------------------------------------------------------------

    def _segment_removed(self, topic_id: int, meta: SegmentMeta) -> None:
        """No kept snapshot refers to the segment any more."""
        copies, name = self._copies.get(topic_id, set()), (meta.first_seq, meta.generation)
        if meta.tier == COLD or name in copies:
            copies.discard(name)
            self._merge_service.retirement.unreferenced(topic_id, meta)

    def _delete_segment(self, directory: str, meta: SegmentMeta) -> None:
        assert self._store is not None
        delete_segment(self._store, directory, meta)

    def _remove_segments(self) -> Steps:
        removable, self._removable = self._removable, []
        try:
            while removable:
                topic_id, meta = removable[-1]
                # Not if it was replaced while a manifest that lists it was written, and that manifest is pinned now. Nor
                # if it is in use again: a pin kept the copy of an aborted move, and a later move succeeded.
                name = (meta.first_seq, meta.generation)
                if not self._is_cold(topic_id, name) and not self._merge_service.retirement.keeps(
                    topic_id, name
                ):
                    directory = self._reader.topic_dir(topic_id)
                    yield self._run(partial(self._delete_segment, directory, meta))
                    self._succeeded()
                removable.pop()
                if self._has_urgent_task:
                    return
        finally:
            self._removable += removable

    def _is_cold(self, topic_id: int, name: tuple[int, int]) -> bool:
        """Whether this is a current segment of its topic and in the cold tier."""
        log = self._shard.state.by_id.get(topic_id)
        metas = self._metas_of(log) if log is not None and not log.dropped else []
        return any((meta.first_seq, meta.generation) == name and meta.tier == COLD for meta in metas)

    def _is_current(self, key: str) -> bool:
        """Whether a merge has created a segment of this name since the file was found to be a leftover."""
        directory, _, name = key.rpartition("/")
        parsed, log = (
            parse_segment_name(name),
            self._shard.state.by_id.get(int(directory.rpartition("/")[2], 16)),
        )
        if parsed is None or log is None:
            return False
        return any((meta.first_seq, meta.generation) == parsed[:2] for meta in self._metas_of(log))

    def _remove_leftovers(self) -> Steps:
        leftovers, self._leftovers = self._leftovers, []
        try:
            yield from self._delete_keys([key for key in leftovers if not self._is_current(key)])
        except (OSError, GeneratorExit):
            self._leftovers += leftovers
            raise
        self._succeeded()

    def _remove_topic(self, topic_id: int) -> Steps:
        prefix = f"{self._reader.topic_dir(topic_id)}/"
        self._copies.pop(topic_id, None)
        self._merge_service.dropped(topic_id)
        if self._swept and topic_id not in self._may_have_files:
            return
        try:
            keys = yield self._run(lambda: self._list(prefix))
            yield from self._delete_keys(keys)
        except OSError:
            self._dropped.append(topic_id)
            raise
        self._may_have_files.discard(topic_id)
        self._succeeded()

    def _list(self, prefix: str) -> list[str]:
        assert self._store is not None
        return self._store.list(prefix)

    def _delete_keys(self, keys: list[str]) -> Steps:
        assert self._store is not None
        yield from delete_keys(self._store, keys)

    # -- sweep after a start -------------------------------------------------------------------------------

    def _sweep(self) -> Steps:
        """List all files of this shard in the store and remove known leftovers. Unknown files are left alone."""
        root = f"{self._config.topics_dir}/"
        keys = yield self._run(lambda: self._list(root))
        by_topic: dict[int, list[tuple[str, str]]] = {}
        for i, key in enumerate(keys):
            directory, _, name = key.removeprefix(root).partition("/")
            if i % limits.SLICE_NAMES == 0:
                yield None
            try:
                topic_id = int(directory, 16)
            except ValueError:
                continue
            if topic_id in self._shard.state.owned_ids and len(directory) == 16:
                by_topic.setdefault(topic_id, []).append((key, name))
        yield from self._merge_service.load(by_topic)
        for topic_id, files in by_topic.items():
            self._may_have_files.add(topic_id)
            log = self._shard.state.by_id.get(topic_id)
            if log is not None and log.deferred:
                self._unswept[topic_id] = (
                    files  # the deferred log entries may change the segments' generations
                )
                continue
            self._load_retired(topic_id, files)
            yield from self._delete_keys(self._find_leftovers(topic_id, files))
            yield None
        for log in self._shard.state.by_id.values():
            if log.merges.retired and log.id not in by_topic and not log.deferred:
                log.merges = log.merges.without(log.merges.retired_names)
        self._swept = self._merge_service.is_loaded = True
        self._succeeded()
        yield from self._sweep_hot(set(keys))

    def _load_retired(self, topic_id: int, files: list[tuple[str, str]]) -> None:
        """Load the retired segments that still have files, and schedule a manifest if there may be none for the topic."""
        log = self._shard.state.by_id.get(topic_id)
        if log is None:
            return
        assert self.loader is not None
        existing = {parsed[:2] for _, name in files if (parsed := parse_segment_name(name)) is not None}
        last_references = self.loader.last_references
        retirement, manifests = self._merge_service.retirement, self._merge_service.manifests
        retirement.load(log, existing, lambda name: last_references(log.id, *name)[0] > 0)
        if existing and (manifests.newest(log.id) is None or log.merges.committed):
            manifests.due[log.id] = log

    def _sweep_hot(self, keys: set[str]) -> Steps:
        """Find the hot copies of cold segments that a stop left behind, for topics that are not loaded.

        Loading a topic does the same for its segments.
        """
        assert self.loader is not None
        away = [
            log for log in self._shard.state.by_id.values() if log.stored is not None and not log.deferred
        ]
        cold_segments = [
            (log, segment_path(self._reader.topic_dir(log.id), meta, "data"), meta)
            for log in away
            for meta in log.stored or ()
            if meta.tier == COLD
        ]
        for first in range(0, len(cold_segments), limits.SLICE_TOPICS):
            some = cold_segments[first : first + limits.SLICE_TOPICS]
            exist = yield self._run(partial(self._exist, [path for _, path, _ in some]))
            for (log, path, meta), exists in zip(some, exist, strict=True):
                if exists and path in keys and log.stored is not None and not log.dropped:
                    last = self.loader.last_references(log.id, meta.first_seq, meta.generation)[1]
                    self._checkpointer.delete_hot_copy_later(log.id, meta, last_snapshot=last)

    def _exist(self, paths: list[str]) -> list[bool]:
        return [self._disk.exists(path) for path in paths]

    def _find_leftovers(self, topic_id: int, files: list[tuple[str, str]]) -> list[str]:
        log = self._shard.state.by_id.get(topic_id)
        if log is None:
            # A topic that this shard has deleted, or one that it never had, whose files are left alone.
            return [key for key, _ in files] if topic_id < self._shard.state.next_id else []
        assert self.loader is not None
        metas = [*self._metas_of(log), *log.dead_segments]
        in_use = {(meta.first_seq, meta.generation): meta.tier for meta in metas}
        found: list[str] = []
        for key, name in files:
            parsed = parse_segment_name(name)
            if parsed is None:
                continue
            tier = in_use.get(parsed[:2])
            if tier is not None:
                if tier == HOT:
                    self._copies.setdefault(topic_id, set()).add(parsed[:2])
                continue
            last = self.loader.last_references(topic_id, parsed[0], parsed[1])[0]
            if last:
                meta = SegmentMeta(parsed[0], parsed[1], tier=COLD)
                self._checkpointer.delete_later(topic_id, meta, last_snapshot=last)
            elif self._merge_service.retirement.keeps(topic_id, (parsed[0], parsed[1])):
                continue
            elif is_known_leftover(log, parsed[0], metas):
                found.append(key)
        return found

    # -- erasure -------------------------------------------------------------------------------------------

    def take_over(self, request: EraseRequest) -> bool:
        """Take over an erase that is done on the hot tier if the cold tier may have copies. False: it has none."""
        log = request.log
        if self._store is None:
            # There may be a copy of any segment that was ever sealed, from an unfinished move or from when it was cold.
            may_be_cold = self._disk.exists(COLD_ID_NAME) and any(log.sum_chain)
            if may_be_cold or any(meta.tier == COLD for meta in self._metas_of(log)):
                self._defer_erase(request, cold=True)  # resumed by a start with the cold tier
                return True
            return False
        if self._swept and log.id not in self._may_have_files:
            return False
        self._merge_service.abandon_plan_of(log)
        awaited = sum(other.token is not None for other in self._erases)
        self._erases.insert(awaited if request.token is not None else len(self._erases), request)
        return True

    def _defer_erase(self, request: EraseRequest, *, cold: bool) -> None:
        deleted = request.result.deleted if request.result is not None else 0
        self._reply(request, EraseDeferred(deleted, cold=cold))

    def _reply(self, request: EraseRequest, answer: TopicsError) -> None:
        if request.token is not None:
            self._shard.state.ready.append((request.token, answer))
            request.token = None

    def _erase(self, request: EraseRequest) -> Steps:
        log = request.log
        checkpointer = self._checkpointer
        try:
            # The eraser of the hot tier must not search files that are being written.
            yield WaitUntil(lambda: not checkpointer.erase_running)
            checkpointer.cold_job_topic = self.erasing = log
            yield from self._eraser.steps(log, request.ranges)
            self._succeeded()
            yield from finish_erase(self._shard, request)
        except (OSError, TopicsError) as error:
            # The records are deleted already. The erase is retried.
            self._defer_erase(request, cold=not is_out_of_resources(error))
            self._erases.append(request)
            raise
        except GeneratorExit:
            self._reply(
                request, ShardReadOnly(self._shard.state.read_only or "the server is stopping", unknown=True)
            )
            raise
        finally:
            checkpointer.cold_job_chunk = checkpointer.cold_job_topic = self.erasing = None
            self._candidates[log.id] = log  # it was not relocated during the erase


def _verified_blocks(disk: Disk, path: str, length: int, digests: list[bytes]) -> Iterator[bytes]:
    """The blocks of a hot .data file; raises Corrupt if one does not match its digest."""
    handle = disk.open(path)
    try:
        for number, digest in enumerate(digests):
            offset = number * BLOCK_BYTES
            block = read_exact(disk, handle, path, offset, min(BLOCK_BYTES, length - offset))
            if xxh(block) != digest:
                raise Corrupt(path, offset, "a block does not match its digest")
            yield block
    finally:
        disk.close(handle)
