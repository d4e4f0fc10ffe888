"""Another number of shards: a whole new layout beside the present one, and one rename that makes it count.

    1  settle     each shard is recovered and closed, as by a start and a clean stop: its newest snapshot is all there is to it
    2  write      the topics' rows, placed anew, become the first snapshots of the next generation's shards
    3  prove      what was written is read again: no topic is missing, none is there twice
    4  flip       `layout.json` is replaced
    5  clear      the old layout goes

Segments do not move: a topic keeps its id, and so its directory. Neither do records: those of small topics ride in the rows.
A crash before 4 leaves the old layout as it was, a crash after it the new one; whichever does not count is stale, and is
removed by the next run. Each step begins from what the files say, so a run that was stopped anywhere is begun anew.

**Log positions.** A new shard's log begins above every position of every old one, with an entry that says nothing, and all
rows are applied up to there. So nothing of an old log is ever needed, and a log that begins with number 1 still means that
it is all there. Should both snapshots be lost, a start is refused by the gap instead of finding an empty shard.

**Ids.** New ones begin beyond all that were ever given; see topic_ids.py.

**Time** goes on from the latest of the old shards. **Letters** that are moving, and marks of **forwards**, are kept by topic id on
both sides, so they mean the same wherever the two topics are. The outflow of a pattern is at every shard. It may be missing at
some of the old ones while its rule is being made: what they have of its sources is then copied from its present head on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Corrupt, LogGap, TopicsError
from topics.engine.commands.forwards import Forward
from topics.engine.core.placement import shard_of
from topics.engine.core.ports import Clock, Disk, SegmentStore
from topics.engine.core.subjects import parse_pattern
from topics.engine.core.topic_ids import first_id_after, pack_ids
from topics.engine.runtime.engine import Engine
from topics.engine.storage.files import TEMP_SUFFIX, ensure_dir
from topics.engine.storage.layout import (
    LAYOUT_NAME,
    Layout,
    generation_of,
    prepare_layout,
    publish_layout,
    stale_layouts,
)
from topics.engine.storage.snapshot import SnapshotWriter, list_snapshots, read_snapshot
from topics.engine.storage.wal import Wal
from topics.engine.topic.flows import OutflowRow, current_epoch
from topics.engine.upkeep.checkpoint import ShardRow, TopicRow

SETTLE_TRIES = 3
SNAPSHOTS = (1, 2)  # as many as a shard keeps, so that one may rot
LOG_FILE_BYTES = 4 * limits.KIB  # for one entry: a start makes a file of its own
ROWS_PER_STEP = 64

Progress: TypeAlias = tuple[str, float]  # what is being done, and how much of all is done, from 0 to 1
Steps: TypeAlias = Generator[Progress, None, None]
# What lies beside log and snapshots is carried over by whoever knows it: from old shards' directories to those of new ones.
Carry: TypeAlias = Callable[[list[str], list[str]], None]

_ID = re.compile(r"[0-3][0-9a-f]{15}")  # whatever has a larger one is nothing of ours

_decode_shard = msgspec.msgpack.Decoder(ShardRow).decode
_decode_topic = msgspec.msgpack.Decoder(TopicRow).decode


class CannotReshard(TopicsError):
    """The present layout is as it was; the text says why, and what to do."""


@dataclass(slots=True)
class _Old:
    """One shard of the present layout, settled."""

    shard: int
    meta_dir: str
    number: int  # of its newest snapshot, which holds everything
    head: ShardRow
    next_file: int  # no log file has this number or a higher one
    topics: int = 0

    def rows(self, disk: Disk) -> Iterator[TopicRow]:
        for raw in read_snapshot(disk, self.meta_dir, self.number)[1]:
            yield _decode_topic(raw)


@dataclass(slots=True)
class _New:
    """One shard of the next layout."""

    shard: int
    meta_dir: str
    ids: list[int] = field(default_factory=list)
    outflows: list[OutflowRow] = field(default_factory=list)
    writers: list[SnapshotWriter] = field(default_factory=list)


class Reshard:
    """`config` is any shard's: sizes and bounds of the engine that settles them. `cold`: the cold tier, if there is one. It is asked
    only for records whose index is damaged, and nothing there is changed: what is to be done goes on after the next start.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        config: EngineConfig,
        layout: Layout,
        shards: int,
        carry: Carry,
        cold: SegmentStore | None = None,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._config = config
        self._layout = layout
        self._next = Layout.of(layout.generation + 1, shards)
        self._carry = carry
        self._cold = cold
        self._old: list[_Old] = []
        self._new = [_New(shard, f"{self._next.shard_dir(shard)}/meta") for shard in range(shards)]
        self._homes: dict[int, int] = {}  # topic id → new shard
        self.left = ""  # why the old layout is still there, when it is
        self.records = 0

    @property
    def topics(self) -> int:
        return len(self._homes)

    def steps(self) -> Steps:
        """The layout that counts when this has ended is the next one; when it raises, it is the present one, or the error is
        that of the flip itself, and then the next start finds out."""
        clear_stale(self._disk, self._layout)
        for shard in range(self._layout.shards):
            yield from self._settle(shard)
        # What was dropped is gone from the topics' directory, and may not be back once nobody knows whose it was.
        self._disk.sync_dir(self._config.topics_dir)
        try:
            yield from self._write()
            yield "checking what was written", 0.9
            self._prove()
            prepare_layout(self._disk, self._next)
        except (OSError, TopicsError):
            self._give_up()
            raise
        yield "switching", 0.95
        publish_layout(self._disk)
        yield "removing the old layout", 0.97
        try:
            _remove_layout(self._disk, self._layout.directory)
            self._disk.sync_dir("")
        except OSError as error:
            self.left = str(error)  # the next start removes it
        yield "done", 1.0

    # -- settle --------------------------------------------------------------------------------------------

    def _settle(self, shard: int) -> Steps:
        config = msgspec.structs.replace(
            self._config,
            shard=shard,
            shard_dir=self._layout.shard_dir(shard),
            # Nothing is written but what a stop writes: a small file is enough, and no segment is rewritten behind the snapshot.
            wal_file_bytes=limits.MIB,
            rewrite_dead_share=2.0,
            snapshot_wal_bytes=1 << 62,
            snapshot_interval_ms=1 << 62,
        )
        for _ in range(SETTLE_TRIES):
            engine = Engine(self._disk, self._clock, config, self._cold)
            yield from self._recover(engine, shard)
            if engine.shard.read_only is not None:
                raise CannotReshard(_damaged(shard, engine.shard.read_only))
            engine.close()
            if engine.shard.read_only is not None:
                raise CannotReshard(f"shard {shard} could not be written: {engine.shard.read_only}")
            old = self._settled(engine, shard)
            if old is not None:
                self._old.append(old)
                return
            if engine.counters.get("disk_full"):
                raise CannotReshard(f"there is no space on the disk for a snapshot of shard {shard}")
        raise CannotReshard(f"shard {shard} does not come to rest; look at its log and try again")

    def _recover(self, engine: Engine, shard: int) -> Steps:
        try:
            for done in engine.recover_steps():
                yield f"recovering shard {shard}", 0.7 * (shard + done) / self._layout.shards
        except (Corrupt, LogGap) as error:
            raise CannotReshard(_damaged(shard, str(error))) from error

    def _settled(self, engine: Engine, shard: int) -> _Old | None:
        """None: something was logged behind the last snapshot, or there was no room for one."""
        meta_dir = engine.checkpointer.meta_dir
        numbers = list_snapshots(self._disk, meta_dir)
        if not numbers:
            return None
        raw, rows = read_snapshot(self._disk, meta_dir, numbers[-1])
        head = _decode_shard(raw)
        if not head.clean_lsn == head.base_lsn == engine.wal.last_lsn:
            return None
        return _Old(shard, meta_dir, numbers[-1], head, engine.wal.next_number, len(rows))

    # -- write ---------------------------------------------------------------------------------------------

    def _write(self) -> Steps:
        for new in self._new:
            ensure_dir(self._disk, new.meta_dir)
        for old in self._old:
            yield f"placing the topics of shard {old.shard}", 0.7
            self._place(old)
        self._place_outflows()
        heads = self._heads()
        self._begin_logs(heads[0].base_lsn, heads[0].now_ms)
        for new, head in zip(self._new, heads, strict=True):
            for number in SNAPSHOTS:
                writer = SnapshotWriter(self._disk, new.meta_dir, number)
                new.writers.append(writer)
                writer.add(msgspec.structs.replace(head, number=number))
        yield from self._write_rows(heads[0].base_lsn)
        for new in self._new:
            yield f"syncing shard {new.shard}", 0.8 + 0.1 * new.shard / len(self._new)
            while new.writers:
                new.writers[0].finish()
                new.writers.pop(0).publish()
        old_dirs = [self._layout.shard_dir(old.shard) for old in self._old]
        self._carry(old_dirs, [self._next.shard_dir(new.shard) for new in self._new])

    def _place(self, old: _Old) -> None:
        for row in old.rows(self._disk):
            if shard_of(row.name, self._layout.shards) != old.shard or row.id in self._homes:
                what = f"topic {row.name!r} has no business there"
                raise CannotReshard(_damaged(old.shard, what))
            home = shard_of(row.name, self._next.shards)
            self._homes[row.id] = home
            self._new[home].ids.append(row.id)

    def _write_rows(self, base_lsn: int) -> Steps:
        done = 0
        for old in self._old:
            for row in old.rows(self._disk):
                row.applied_lsn = base_lsn
                raw = msgspec.Raw(msgspec.msgpack.encode(row))
                for writer in self._new[self._homes[row.id]].writers:
                    writer.add(raw)
                done += 1
                if done % ROWS_PER_STEP == 0:
                    yield f"writing topics, {done} of {self.topics}", 0.7 + 0.1 * done / self.topics

    def _heads(self) -> list[ShardRow]:
        heads = [old.head for old in self._old]
        first_id = first_id_after([*(head.next_id for head in heads), *self._ids_on_disk()])
        # The lines of the old shards were written down within this run, one after the other, on this boot: the latest time
        # at the earliest moment is not before any of them.
        common = ShardRow(
            number=0,
            base_lsn=max(head.base_lsn for head in heads) + 2,
            next_id=0,
            time_ceiling_ms=max(head.time_ceiling_ms for head in heads),
            now_ms=max(head.now_ms for head in heads),
            mono_ms=min(head.mono_ms for head in heads),
            boot_id=self._disk.boot_id(),
            clean_lsn=0,
            first_id=first_id,
        )
        common.clean_lsn = common.base_lsn
        replace = msgspec.structs.replace
        made = [
            replace(common, next_id=first_id + new.shard, outflows=new.outflows, adopted=pack_ids(new.ids))
            for new in self._new
        ]
        # The catalog is at shard 0, before and after.
        made[0].forwards = heads[0].forwards
        made[0].forward_uid = heads[0].forward_uid
        made[0].others = pack_ids(topic_id for topic_id, home in self._homes.items() if home)
        return made

    def _ids_on_disk(self) -> Iterator[int]:
        """Also of what nobody knows any more: a new topic must not find files in its directory."""
        for folder in (self._config.topics_dir, "lost+found"):
            for name in self._disk.list(folder):
                if match := _ID.match(name):
                    yield int(match[0], 16)

    def _begin_logs(self, lsn: int, now_ms: int) -> None:
        number = max(old.next_file for old in self._old)
        for new in self._new:
            directory = f"{self._next.shard_dir(new.shard)}/wal"
            ensure_dir(self._disk, directory)
            wal = Wal(self._disk, directory, shard=new.shard, file_bytes=LOG_FILE_BYTES)
            wal.last_lsn = wal.synced_lsn = lsn - 1
            file = wal.make_file(number, LOG_FILE_BYTES)
            try:
                wal.begin_file(file, now_ms)
                self._disk.sync(file.handle)
            finally:
                self._disk.close(file.handle)

    # -- forwards ------------------------------------------------------------------------------------------

    def _place_outflows(self) -> None:
        rules: dict[int, Forward] = {}
        starts: dict[int, dict[int, tuple[int, int]]] = {}
        known_at: dict[int, list[int]] = {}  # uid → old shards
        for old in self._old:
            for row in old.head.outflows:
                uid = row.forward.uid
                rules.setdefault(uid, row.forward)
                known_at.setdefault(uid, []).append(old.shard)
                starts.setdefault(uid, {}).update({topic: (epoch, seq) for topic, epoch, seq in row.starts})
        for uid, rule in sorted(rules.items()):
            if rule.is_pattern:
                starts[uid] |= self._heads_of_sources(rule, known_at[uid])
                homes = list(range(self._next.shards))
            else:
                homes = [shard_of(rule.source, self._next.shards)]
            for home in homes:
                there = [
                    (topic, *mark) for topic, mark in starts[uid].items() if self._homes.get(topic) == home
                ]
                self._new[home].outflows.append(OutflowRow(rule, there))

    def _heads_of_sources(self, rule: Forward, known_at: list[int]) -> dict[int, tuple[int, int]]:
        """Where sources end that lie on shards which do not have the rule yet."""
        pattern = parse_pattern(rule.source.encode())
        return {
            row.id: (current_epoch(row.epochs), row.head)
            for old in self._old
            if old.shard not in known_at
            for row in old.rows(self._disk)
            if pattern.matches(row.name.encode())
        }

    # -- prove ---------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """Both snapshots of every new shard, from the disk: with a topic less than there were nothing is switched."""
        expected = sum(old.topics for old in self._old)
        for number in SNAPSHOTS:
            found: dict[int, int] = {}
            self.records = 0
            for new in self._new:
                raw, rows = read_snapshot(self._disk, new.meta_dir, number)
                head = _decode_shard(raw)
                for row in map(_decode_topic, rows):
                    found[row.id] = new.shard
                    self.records += row.count
                    if shard_of(row.name, self._next.shards) != new.shard or row.applied_lsn != head.base_lsn:
                        raise CannotReshard(f"topic {row.name!r} came to the wrong place; this is a bug")
            if found != self._homes or len(found) != expected:
                raise CannotReshard(
                    f"{expected} topics became {len(found)}; this is a bug, and nothing was changed"
                )

    def _give_up(self) -> None:
        """Make room again, as far as that goes; what is left is removed by the next run."""
        with suppress(OSError):
            for new in self._new:
                while new.writers:
                    new.writers.pop().abandon()
            _remove_layout(self._disk, self._next.directory)
            self._disk.remove(LAYOUT_NAME + TEMP_SUFFIX)


def clear_stale(disk: Disk, layout: Layout) -> bool:
    """Remove layouts that do not count. What says which one does is first made to last: a page-cache hit proves nothing."""
    stale = stale_layouts(disk.list(""), layout.generation)
    if not stale:
        return False
    if not disk.exists(layout.directory):
        raise CannotReshard(
            f"{LAYOUT_NAME} speaks of {layout.directory}, which is not there, and there is {stale[-1]}; "
            f"{LAYOUT_NAME} is probably an old copy: restore the right one"
        )
    prepare_layout(disk, layout)
    publish_layout(disk)
    for name in sorted(stale, key=lambda name: generation_of(name) or 0):
        _remove_layout(disk, name)
    disk.sync_dir("")
    return True


def _remove_layout(disk: Disk, directory: str) -> None:
    for shard in disk.list(directory):
        for name in disk.list(f"{directory}/{shard}"):
            path = f"{directory}/{shard}/{name}"
            if name in ("wal", "meta"):
                for file in disk.list(path):
                    disk.remove(f"{path}/{file}")
                disk.remove_dir(path)
            else:
                disk.remove(path)
        disk.remove_dir(f"{directory}/{shard}")
    disk.remove_dir(directory)


def _damaged(shard: int, problem: str) -> str:
    return f"shard {shard} is damaged: {problem}; run `topics verify --repair` first"
