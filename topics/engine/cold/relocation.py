"""The cold tier: sealed segments move there, and dead ones leave it. Here also waits what is to be erased there (erase.py).

A segment is moved in this order, and a crash between any two steps leaves it readable:

    copy      .data, .idx, .dict and .sum are put into the store, each whole or not at all, .sum last
    verify    every block of .data is read back and compared with its digest in .sum, the other files with their bytes
    flip      memory calls the segment cold, and so does the next snapshot; both tiers have it, and hot is read
    delete    .data leaves the hot tier once neither kept snapshot calls the segment hot

.idx, .dict, .sum and .del stay on the hot tier as well: they are small, a topic's first touch reads them on the loop,
and deletes of cold records are marked there. What a crash leaves in the store is found by the sweep after the next
start, or put there again by the same move.

All of it is one task at a time, beside the one for checkpoints and erases: a store that takes seconds a call, or does not
answer at all, holds up nothing but the cold tier. A failure is no reason to stop serving: it is tried again later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import EIO
from functools import partial

import msgspec

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import ColdStoreFailed, Corrupt, ErasePutOff, ShardReadOnly, TopicsError
from topics.engine.cold.erase import ColdEraser
from topics.engine.cold.merge.service import MergeService
from topics.engine.core.pacing import GrowthRate, RateLimit, Work
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Steps, WaitSynced, WaitUntil
from topics.engine.reading.reader import Reader
from topics.engine.shard.staging import EraseRequest
from topics.engine.shard.state_machine import Shard
from topics.engine.storage.cold_files import INDEX_SUFFIXES, MOVE_KIND, delete_keys, delete_segment
from topics.engine.storage.files import is_out_of_resources, read_exact, read_file, xxh
from topics.engine.storage.index import Chunk
from topics.engine.storage.layout import COLD_ID_NAME
from topics.engine.storage.sealing import read_sum
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

CHECK_BLOCKS = 4  # that one step reads back


@dataclass(frozen=True, slots=True)
class _Copied:
    """What came of copying a segment: an empty `problem`, or why it must stay where it is."""

    problem: str = ""


class Relocator:
    def __init__(
        self,
        disk: Disk,
        store: SegmentStore | None,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        config: EngineConfig,
        consolidator: MergeService,
    ) -> None:
        self._consolidator = consolidator
        self._disk = disk
        self._store = store
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self.loader: Loader | None = None  # once recovery is over
        self._look_at: dict[int, TopicLog] = {}  # topics that may have too many hot segments
        self._erases: list[EraseRequest] = []
        self._gone: list[tuple[int, SegmentMeta]] = []
        self._dropped: list[int] = []
        self._swept = False
        self._unsorted: dict[
            int, list[tuple[str, str]]
        ] = {}  # files of topics that replay had put off by then
        self._stale: list[str] = []  # what was found in them
        self._there: set[int] = set()  # topics with something in the store, perhaps
        # Segments that are hot and in the store as well, by topic: of moves that were not finished. They may never be.
        self._copies: dict[int, set[tuple[int, int]]] = {}
        self._refused: set[tuple[int, int, int]] = set()  # segments that are damaged: they stay
        self._pause_ms = 0
        self._retry_ms = 0  # nothing is tried before
        self._growth = GrowthRate(shard.clock, lambda: shard.counters["bytes_written"])
        self.pace = RateLimit(shard.clock, self._rate)
        self.erasing: TopicLog | None = None  # a segment of it is being written again
        self.problem = ""  # why the last try failed
        if store is not None:
            self._eraser = ColdEraser(disk, store, shard, reader, checkpointer, consolidator)
            checkpointer.on_checkpointed = self._checkpointed
            checkpointer.on_segment_removed = self._segment_gone
            checkpointer.on_topic_removed = self._dropped.append
            consolidator.retirement.on_free = lambda topic_id, meta: self._gone.append((topic_id, meta))
            consolidator.manifests.on_written = self._there.add

    def start(self, loader: Loader) -> None:
        """Recovery is over. What moves by now is known from the snapshot alone."""
        self.loader = loader
        for log in self._shard.by_id.values():
            metas = self._metas_of(log)
            self._checkpointer.usage.set(log.id, metas)
            if self._store is not None and self._surplus(metas):
                self._look_at[log.id] = log

    @property
    def has_work(self) -> bool:
        if self._store is None or self._shard.read_only is not None or self.loader is None:
            return False
        own = self._erases or self._gone or self._stale or self._dropped or self._look_at or not self._swept
        return bool(own) or self._consolidator.has_work

    @property
    def retry_ms(self) -> int:
        """Nothing is tried before, unless somebody waits: then it is tried at once, to be answered."""
        is_awaited = self._erases and self._erases[0].token is not None
        return 0 if is_awaited or self._consolidator.is_awaited else self._retry_ms

    def next_task(self) -> Steps:
        """The most urgent first: somebody may wait for an erase."""
        if self._erases and self._swept:
            return self._erase(self._erases.pop(0))
        if self._erases:
            return self._sweep()  # copies may lie in the staging of plans, which is not known before
        if self._consolidator.is_urgent:
            return self._consolidator.next_task() if self._swept else self._sweep()
        if self._gone:
            return self._remove_gone()
        if self._stale:
            return self._remove_stale()
        if self._dropped:
            return self._remove_topic(self._dropped.pop(0))
        if not self._swept:
            return self._sweep()
        if self._look_at:
            return self._relocate(self._look_at.pop(next(iter(self._look_at))))
        return self._consolidator.next_task()

    def failed(self, error: BaseException, now_ms: int) -> None:
        """The store or the disk did not do what it was asked. Nothing is lost; it is tried again after a pause."""
        self._pause_ms = min(max(2 * self._pause_ms, limits.COLD_PAUSE_MS_MIN), limits.COLD_PAUSE_MS_MAX)
        self._retry_ms = now_ms + self._pause_ms
        self.problem = str(error)
        self._count("cold_failures")
        if not self._swept:
            self._consolidator.refuse(ColdStoreFailed(f"the cold tier cannot be looked at: {error}"))
            for request in self._erases:
                self._put_off(request, cold=True)

    def _worked(self) -> None:
        self._pause_ms = self._retry_ms = 0
        self.problem = ""

    def _count(self, name: str) -> None:
        self._shard.counters[name] = self._shard.counters.get(name, 0) + 1

    def _run(self, work: Callable[[], object]) -> Blocking:
        return Blocking(MOVE_KIND, work)

    # -- moving --------------------------------------------------------------------------------------------

    def _checkpointed(self, logs: list[TopicLog]) -> None:
        for log in logs:
            if not log.dropped and self._surplus(self._metas_of(log)):
                self._look_at[log.id] = log
            self._consolidator.manifests.look(log)
            if log.id in self._unsorted and not log.deferred:
                files = self._unsorted.pop(log.id)
                self._learn_retired(log.id, files)
                self._stale += self._leftovers(log.id, files)

    @staticmethod
    def _metas_of(log: TopicLog) -> list[SegmentMeta]:
        if log.stored is not None:
            return log.stored
        return [chunk.meta for chunk in log.chunks if chunk.meta is not None]

    def _surplus(self, metas: list[SegmentMeta]) -> list[SegmentMeta]:
        """Hot segments that are neither among the newest sealed ones nor within their bytes, oldest first."""
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
        """Move what is too much of one topic, one segment after the other, until somebody waits for something else."""
        checkpointer = self._checkpointer
        wanted: list[Chunk] | None = None  # the oldest last
        try:
            # What is copied during an erase might hold what must not be anywhere; after it the topic is looked at again.
            while not log.dropped and not log.erasing:
                if log.is_unloaded:
                    for _ in self._shard.load_slices(log):
                        yield None
                    wanted = None
                    yield WaitSynced(0)
                    continue
                if wanted is None:
                    surplus = {meta.first_seq for meta in self._surplus(self._metas_of(log))}
                    wanted = [chunk for chunk in log.chunks if chunk.first_seq in surplus][::-1]
                if not wanted:
                    break
                chunk = wanted.pop()
                if not self._may_move(log, chunk):
                    continue
                checkpointer.cold_job_chunk, checkpointer.cold_job_topic = chunk, log
                try:
                    yield from self._move(log, chunk)
                finally:
                    checkpointer.cold_job_chunk = checkpointer.cold_job_topic = None
                if self._is_pressed:
                    self._look_at[log.id] = log
                    return
            self._consolidator.manifests.look(log)
        except (OSError, TopicsError):
            self._look_at[log.id] = log
            raise
        finally:
            if not log.dropped:
                checkpointer.usage.set(log.id, self._metas_of(log))

    @property
    def _is_pressed(self) -> bool:
        """Whether somebody waits. A backlog of moves may take hours."""
        return bool(self._erases) or self._consolidator.is_urgent

    def _rate(self) -> int:
        """How many bytes a second may move. What is written fast moves faster, or the hot tier would grow without end; and nobody
        waits for time to pass when the disk runs full."""
        bound, shard = self._config.relocate_bytes_per_s, self._shard
        if not bound or shard.low_space or shard.disk_full or self._is_pressed:
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
            and (log.id, meta.first_seq, meta.generation) not in self._refused
        )

    def _move(self, log: TopicLog, chunk: Chunk) -> Steps:
        meta = chunk.meta
        assert meta is not None
        directory = self._reader.topic_dir(log.id)
        self._there.add(log.id)
        copies = self._copies.setdefault(log.id, set())
        copies.add((meta.first_seq, meta.generation))
        copied = yield from self.pace.steps(
            self._copying(directory, meta),
            kind=MOVE_KIND,
            steps=1,
            step_bytes=BLOCK_BYTES,
            total=meta.data_bytes + meta.idx_bytes,
            is_cancelled=lambda: log.dropped or bool(log.erasing),
        )
        self._worked()
        if copied is not None and copied.problem:
            yield from self._drop_copy(log, meta)
            self._refused.add((log.id, meta.first_seq, meta.generation))
            self.problem = copied.problem
            self._count("cold_refused")
            return
        # A checkpoint that has looked at the segment puts what it has seen into memory when it is done.
        yield WaitUntil(lambda: not self._checkpointer.capturing)
        is_current = chunk.meta is meta and chunk in log.chunks
        if copied is None or log.dropped or log.erasing or not is_current:
            yield from self._drop_copy(log, meta)
            return
        copies.discard((meta.first_seq, meta.generation))
        chunk.meta = msgspec.structs.replace(meta, tier=COLD)
        self._checkpointer.delete_hot_copy_later(log.id, chunk.meta)
        self._shard.touched[log.id] = log
        self._count("relocations")

    def _drop_copy(self, log: TopicLog, meta: SegmentMeta) -> Steps:
        """Of a move that comes to nothing. That of a move before the last start may be pinned: only an erase and a drop do not
        heed that.
        """
        name = (meta.first_seq, meta.generation)
        if log.dropped or log.erasing or not self._consolidator.retirement.keeps(log.id, name):
            yield self._run(partial(self._delete_segment, self._reader.topic_dir(log.id), meta))
        self._copies.get(log.id, set()).discard(name)

    def _copying(self, directory: str, meta: SegmentMeta) -> Work[_Copied]:
        """On another thread, a MiB at a time: put the segment's files into the store and read them back."""
        store, disk = self._store, self._disk
        assert store is not None
        try:
            summary = read_sum(disk, directory, meta.first_seq, meta.generation)[0]
            blocks, digests = summary.blocks, {"idx": summary.idx_digest, "dict": summary.dict_digest}
            path = segment_path(directory, meta, "data")
            if not (yield from self._is_whole(path, meta, blocks)):
                yield from store.put_steps(path, _verified_blocks(disk, path, meta.data_bytes, blocks))
                if not (yield from self._is_whole(path, meta, blocks)):
                    raise OSError(EIO, f"{path} is not in the cold tier as it was put there")
            for suffix in INDEX_SUFFIXES:
                if suffix == "dict" and not meta.dict_bytes:
                    continue
                path = segment_path(directory, meta, suffix)
                content = read_file(disk, path)
                if suffix in digests and xxh(content) != digests[suffix]:
                    raise Corrupt(path, 0, "it does not agree with its digest")
                store.put(path, [content])
                if store.read_range(path, 0, len(content) + 1) != content:
                    raise OSError(EIO, f"{path} is not in the cold tier as it was put there")
        except (Corrupt, FileNotFoundError) as error:
            if not isinstance(error, Corrupt) and disk.exists(segment_path(directory, meta, "data")):
                raise  # it is the store that has lost something
            # A reader will find out which records are damaged; a copy would only spread it.
            return _Copied(str(error))
        return _Copied()

    def _is_whole(self, path: str, meta: SegmentMeta, blocks: list[bytes]) -> Work[bool]:
        """Whether the store has .data as it must be: also of an earlier try."""
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

    # -- removing ------------------------------------------------------------------------------------------

    def _segment_gone(self, topic_id: int, meta: SegmentMeta) -> None:
        """No kept snapshot names it any more."""
        copies, name = self._copies.get(topic_id, set()), (meta.first_seq, meta.generation)
        if meta.tier == COLD or name in copies:
            copies.discard(name)
            self._consolidator.retirement.gone(topic_id, meta)

    def _delete_segment(self, directory: str, meta: SegmentMeta) -> None:
        assert self._store is not None
        delete_segment(self._store, directory, meta)

    def _remove_gone(self) -> Steps:
        gone, self._gone = self._gone, []
        try:
            while gone:
                topic_id, meta = gone[-1]
                # Kept: it left its topic while a manifest was written that lists it, and that is pinned by now. Or it has
                # come back: a pin kept the copy of a move that came to nothing, and the next move has put it there again.
                name = (meta.first_seq, meta.generation)
                if not self._is_cold(topic_id, name) and not self._consolidator.retirement.keeps(
                    topic_id, name
                ):
                    directory = self._reader.topic_dir(topic_id)
                    yield self._run(partial(self._delete_segment, directory, meta))
                    self._worked()
                gone.pop()
                if self._is_pressed:
                    return
        finally:
            self._gone += gone

    def _is_cold(self, topic_id: int, name: tuple[int, int]) -> bool:
        """Whether it is a segment of its topic, and read from there."""
        log = self._shard.by_id.get(topic_id)
        metas = self._metas_of(log) if log is not None and not log.dropped else []
        return any((meta.first_seq, meta.generation) == name and meta.tier == COLD for meta in metas)

    def _is_current(self, key: str) -> bool:
        """Whether a merge has given its name to a segment since the file was found to be nobody's."""
        directory, _, name = key.rpartition("/")
        parsed, log = parse_segment_name(name), self._shard.by_id.get(int(directory.rpartition("/")[2], 16))
        if parsed is None or log is None:
            return False
        return any((meta.first_seq, meta.generation) == parsed[:2] for meta in self._metas_of(log))

    def _remove_stale(self) -> Steps:
        stale, self._stale = self._stale, []
        try:
            yield from self._delete_keys([key for key in stale if not self._is_current(key)])
        except (OSError, GeneratorExit):
            self._stale += stale
            raise
        self._worked()

    def _remove_topic(self, topic_id: int) -> Steps:
        prefix = f"{self._reader.topic_dir(topic_id)}/"
        self._copies.pop(topic_id, None)
        self._consolidator.dropped(topic_id)
        if self._swept and topic_id not in self._there:
            return
        try:
            keys = yield self._run(lambda: self._list(prefix))
            yield from self._delete_keys(keys)
        except OSError:
            self._dropped.append(topic_id)
            raise
        self._there.discard(topic_id)
        self._worked()

    def _list(self, prefix: str) -> list[str]:
        assert self._store is not None
        return self._store.list(prefix)

    def _delete_keys(self, keys: list[str]) -> Steps:
        assert self._store is not None
        yield from delete_keys(self._store, keys)

    # -- what a crash has left -----------------------------------------------------------------------------

    def _sweep(self) -> Steps:
        """Look once at all that this shard has in the store; remove what is explained, and leave what is not."""
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
            if topic_id in self._shard.owned_ids and len(directory) == 16:
                by_topic.setdefault(topic_id, []).append((key, name))
        yield from self._consolidator.learn(by_topic)
        for topic_id, files in by_topic.items():
            self._there.add(topic_id)
            log = self._shard.by_id.get(topic_id)
            if log is not None and log.deferred:
                self._unsorted[topic_id] = files  # its segments may have other generations once that is done
                continue
            self._learn_retired(topic_id, files)
            yield from self._delete_keys(self._leftovers(topic_id, files))
            yield None
        for log in self._shard.by_id.values():
            if log.merges.retired and log.id not in by_topic and not log.deferred:
                log.merges = log.merges.without(log.merges.retired_names)
        self._swept = self._consolidator.is_known = True
        self._worked()
        yield from self._sweep_hot(set(keys))

    def _learn_retired(self, topic_id: int, files: list[tuple[str, str]]) -> None:
        """Which retired segments still have files, and whether this start's snapshots name them; and whether there is a manifest."""
        log = self._shard.by_id.get(topic_id)
        if log is None:
            return
        assert self.loader is not None
        there = {parsed[:2] for _, name in files if (parsed := parse_segment_name(name)) is not None}
        last_references = self.loader.last_references
        retirement, manifests = self._consolidator.retirement, self._consolidator.manifests
        retirement.learn(log, there, lambda name: last_references(log.id, *name)[0] > 0)
        if there and (manifests.newest(log.id) is None or log.merges.committed):
            manifests.due[log.id] = log

    def _sweep_hot(self, keys: set[str]) -> Steps:
        """Find .data of cold segments that a stop left on the hot tier. Of topics in use whoever loaded them has seen to it, and of
        the others nobody would before they are used."""
        assert self.loader is not None
        away = [log for log in self._shard.by_id.values() if log.stored is not None and not log.deferred]
        wanted = [
            (log, segment_path(self._reader.topic_dir(log.id), meta, "data"), meta)
            for log in away
            for meta in log.stored or ()
            if meta.tier == COLD
        ]
        for first in range(0, len(wanted), limits.SLICE_TOPICS):
            some = wanted[first : first + limits.SLICE_TOPICS]
            exist = yield self._run(partial(self._exist, [path for _, path, _ in some]))
            for (log, path, meta), is_there in zip(some, exist, strict=True):
                if is_there and path in keys and log.stored is not None and not log.dropped:
                    last = self.loader.last_references(log.id, meta.first_seq, meta.generation)[1]
                    self._checkpointer.delete_hot_copy_later(log.id, meta, last_snapshot=last)

    def _exist(self, paths: list[str]) -> list[bool]:
        return [self._disk.exists(path) for path in paths]

    def _leftovers(self, topic_id: int, files: list[tuple[str, str]]) -> list[str]:
        log = self._shard.by_id.get(topic_id)
        if log is None:
            # Of a topic that this shard never had, nobody can say anything.
            return [key for key, _ in files] if topic_id < self._shard.next_id else []
        assert self.loader is not None
        metas = [*self._metas_of(log), *log.dead_segments]
        named = {(meta.first_seq, meta.generation): meta.tier for meta in metas}
        found: list[str] = []
        for key, name in files:
            parsed = parse_segment_name(name)
            if parsed is None:
                continue
            tier = named.get(parsed[:2])
            if tier is not None:
                if tier == HOT:
                    self._copies.setdefault(topic_id, set()).add(parsed[:2])
                continue
            last = self.loader.last_references(topic_id, parsed[0], parsed[1])[0]
            if last:
                meta = SegmentMeta(parsed[0], parsed[1], tier=COLD)
                self._checkpointer.delete_later(topic_id, meta, last_snapshot=last)
            elif self._consolidator.retirement.keeps(topic_id, (parsed[0], parsed[1])):
                continue
            elif is_known_leftover(log, parsed[0], metas):
                found.append(key)
        return found

    # -- erasing -------------------------------------------------------------------------------------------

    def takes_over(self, request: EraseRequest) -> bool:
        """Whether an erase is not done yet, though no copy is left on the hot tier."""
        log = request.log
        if self._store is None:
            # A copy may lie there of whatever was ever sealed: of a move that was not finished, or of what was cold once.
            may_be_cold = self._disk.exists(COLD_ID_NAME) and any(log.sum_chain)
            if may_be_cold or any(meta.tier == COLD for meta in self._metas_of(log)):
                self._put_off(request, cold=True)  # it goes on after a start with the cold tier
                return True
            return False
        if self._swept and log.id not in self._there:
            return False
        self._consolidator.stop_plan(log)
        awaited = sum(other.token is not None for other in self._erases)
        self._erases.insert(awaited if request.token is not None else len(self._erases), request)
        return True

    def _put_off(self, request: EraseRequest, *, cold: bool) -> None:
        deleted = request.result.deleted if request.result is not None else 0
        self._answer(request, ErasePutOff(deleted, cold=cold))

    def _answer(self, request: EraseRequest, answer: TopicsError) -> None:
        if request.token is not None:
            self._shard.ready.append((request.token, answer))
            request.token = None

    def _erase(self, request: EraseRequest) -> Steps:
        log = request.log
        checkpointer = self._checkpointer
        try:
            # Files that are being written must not be looked through for what is to be erased.
            yield WaitUntil(lambda: not checkpointer.erase_running)
            checkpointer.cold_job_topic = self.erasing = log
            yield from self._eraser.steps(log, request.ranges)
            self._worked()
            yield from finish_erase(self._shard, request)
        except (OSError, TopicsError) as error:
            # The records are deleted already; what is left of them goes as soon as it can.
            self._put_off(request, cold=not is_out_of_resources(error))
            self._erases.append(request)
            raise
        except GeneratorExit:
            self._answer(request, ShardReadOnly(self._shard.read_only or "the server stops", unknown=True))
            raise
        finally:
            checkpointer.cold_job_chunk = checkpointer.cold_job_topic = self.erasing = None
            self._look_at[log.id] = log  # it was left alone meanwhile


def _verified_blocks(disk: Disk, path: str, length: int, digests: list[bytes]) -> Iterator[bytes]:
    """What is put into the store is what was sealed; Corrupt when the hot file is not."""
    handle = disk.open(path)
    try:
        for number, digest in enumerate(digests):
            offset = number * BLOCK_BYTES
            block = read_exact(disk, handle, path, offset, min(BLOCK_BYTES, length - offset))
            if xxh(block) != digest:
                raise Corrupt(path, offset, "a block does not agree with its digest")
            yield block
    finally:
        disk.close(handle)
