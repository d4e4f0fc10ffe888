"""Resharding: change the number of shards by writing a new layout next to the current one and switching with one rename.

    1  settle     recover and cleanly stop each shard, so that its newest snapshot contains its whole state
    2  write      assign the topics' rows to the new shards and write them as the new layout's first snapshots
    3  verify     read them back: every topic must be there exactly once
    4  switch     replace `layout.json`
    5  clean up   remove the old layout

Segments do not move: a topic keeps its id and so its directory. Records of small topics are in the rows. After a crash
before step 4 the old layout is in use, after a later one the new layout; the next run removes the other one. All state is
in the files, so an interrupted run is simply started again.

**Log positions.** The log of a new shard starts above the last LSN of all old shards, with an empty entry, and all rows
count as applied up to there. Old logs are therefore never needed, and a log that starts with LSN 1 is still known to be
complete. If both snapshots are lost, a start is refused because of the gap instead of finding an empty shard.

**Ids.** New ids start above all that were ever given; see topic_ids.py.

**Time** continues from the latest time of the old shards. **Dead letters** in transit and positions of **forwards** are kept
by topic id on both sides, so they are valid wherever the two topics are. The outflow of a pattern is on every shard. While
its rule is being created it may be missing on some old shards: their sources are then copied from their current heads on.
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
from topics.engine.topic.snapshot_row import ShardRow, TopicRow

SETTLE_ATTEMPTS = 3
SNAPSHOTS = (1, 2)  # as many as a shard keeps, in case one is damaged
LOG_FILE_BYTES = 4 * limits.KIB  # for one entry: a start creates a new file
ROWS_PER_STEP = 64

Progress: TypeAlias = tuple[str, float]  # what is being done, and how much of all is done, from 0 to 1
Steps: TypeAlias = Generator[Progress, None, None]
# Copies the other files of shards (watch sessions): old shards' directories, new shards' directories.
Carry: TypeAlias = Callable[[list[str], list[str]], None]

_ID = re.compile(r"[0-3][0-9a-f]{15}")  # larger numbers are not topic ids

_decode_shard = msgspec.msgpack.Decoder(ShardRow).decode
_decode_topic = msgspec.msgpack.Decoder(TopicRow).decode


class CannotReshard(TopicsError):
    """Resharding failed; the text says why, and what to do. The current layout is unchanged."""


@dataclass(slots=True)
class _OldShard:
    """One shard of the current layout, cleanly stopped."""

    shard: int
    meta_dir: str
    number: int  # its newest snapshot, which contains everything
    head: ShardRow
    next_file: int  # above the numbers of all log files
    topics: int = 0

    def rows(self, disk: Disk) -> Iterator[TopicRow]:
        for raw in read_snapshot(disk, self.meta_dir, self.number)[1]:
            yield _decode_topic(raw)


@dataclass(slots=True)
class _NewShard:
    """One shard of the new layout."""

    shard: int
    meta_dir: str
    ids: list[int] = field(default_factory=list)
    outflows: list[OutflowRow] = field(default_factory=list)
    writers: list[SnapshotWriter] = field(default_factory=list)


class Reshard:
    """Changes the number of shards.

    `config`: any shard's, for the engines that settle the old shards. `cold`: the cold tier, if there is one. It is only
    read, to rebuild damaged indexes; its pending work continues after the next start.
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
        self._old: list[_OldShard] = []
        self._new = [_NewShard(shard, f"{self._next.shard_dir(shard)}/meta") for shard in range(shards)]
        self._homes: dict[int, int] = {}  # topic id → new shard
        self.left = ""  # why the old layout could not be removed
        self.records = 0

    @property
    def topics(self) -> int:
        return len(self._homes)

    def steps(self) -> Steps:
        """Run all steps. On success the new layout is in use. On an exception it is the old one, unless the switch itself
        failed; then the next start determines which one it is.
        """
        clear_stale(self._disk, self._layout)
        for shard in range(self._layout.shards):
            yield from self._settle(shard)
        # The directories of dropped topics must not reappear once no shard knows them.
        self._disk.sync_dir(self._config.topics_dir)
        try:
            yield from self._write()
            yield "verifying the new layout", 0.9
            self._verify()
            prepare_layout(self._disk, self._next)
        except (OSError, TopicsError):
            self._discard()
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
            # Only a stop writes to the log, so a small file is enough. No compaction or checkpoint in between.
            wal_file_bytes=limits.MIB,
            rewrite_dead_share=2.0,
            snapshot_wal_bytes=1 << 62,
            snapshot_interval_ms=1 << 62,
        )
        for _ in range(SETTLE_ATTEMPTS):
            engine = Engine(self._disk, self._clock, config, self._cold)
            yield from self._recover(engine, shard)
            if engine.shard.state.read_only is not None:
                raise CannotReshard(_damaged(shard, engine.shard.state.read_only))
            engine.close()
            if engine.shard.state.read_only is not None:
                raise CannotReshard(f"shard {shard} could not be written: {engine.shard.state.read_only}")
            old = self._settled(engine, shard)
            if old is not None:
                self._old.append(old)
                return
            if engine.counters.get("disk_full"):
                raise CannotReshard(f"not enough disk space for a snapshot of shard {shard}")
        raise CannotReshard(f"shard {shard} could not be stopped cleanly; check its log and try again")

    def _recover(self, engine: Engine, shard: int) -> Steps:
        try:
            for done in engine.recover_steps():
                yield f"recovering shard {shard}", 0.7 * (shard + done) / self._layout.shards
        except (Corrupt, LogGap) as error:
            raise CannotReshard(_damaged(shard, str(error))) from error

    def _settled(self, engine: Engine, shard: int) -> _OldShard | None:
        """The stopped shard; None if there are log entries after its last snapshot, or no space for one."""
        meta_dir = engine.checkpointer.meta_dir
        numbers = list_snapshots(self._disk, meta_dir)
        if not numbers:
            return None
        raw, rows = read_snapshot(self._disk, meta_dir, numbers[-1])
        head = _decode_shard(raw)
        if not head.clean_lsn == head.base_lsn == engine.wal.last_lsn:
            return None
        return _OldShard(shard, meta_dir, numbers[-1], head, engine.wal.next_number, len(rows))

    # -- write ---------------------------------------------------------------------------------------------

    def _write(self) -> Steps:
        for new in self._new:
            ensure_dir(self._disk, new.meta_dir)
        for old in self._old:
            yield f"assigning the topics of shard {old.shard}", 0.7
            self._assign(old)
        self._assign_outflows()
        heads = self._heads()
        self._create_logs(heads[0].base_lsn, heads[0].now_ms)
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

    def _assign(self, old: _OldShard) -> None:
        for row in old.rows(self._disk):
            if shard_of(row.name, self._layout.shards) != old.shard or row.id in self._homes:
                what = f"topic {row.name!r} does not belong to it"
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
        # The old shards' clocks were saved during this run, on this boot. The latest time paired with the earliest
        # monotonic reading is not before any of them.
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
        # The catalog is on shard 0 in every layout.
        made[0].forwards = heads[0].forwards
        made[0].forward_uid = heads[0].forward_uid
        made[0].others = pack_ids(topic_id for topic_id, home in self._homes.items() if home)
        return made

    def _ids_on_disk(self) -> Iterator[int]:
        """All ids with files, including unknown topics: a new topic must not find files in its directory."""
        for folder in (self._config.topics_dir, "lost+found"):
            for name in self._disk.list(folder):
                if match := _ID.match(name):
                    yield int(match[0], 16)

    def _create_logs(self, lsn: int, now_ms: int) -> None:
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

    def _assign_outflows(self) -> None:
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
                own_starts = [
                    (topic, *mark) for topic, mark in starts[uid].items() if self._homes.get(topic) == home
                ]
                self._new[home].outflows.append(OutflowRow(rule, own_starts))

    def _heads_of_sources(self, rule: Forward, known_at: list[int]) -> dict[int, tuple[int, int]]:
        """The heads of sources on shards that do not have the rule yet."""
        pattern = parse_pattern(rule.source.encode())
        return {
            row.id: (current_epoch(row.epochs), row.head)
            for old in self._old
            if old.shard not in known_at
            for row in old.rows(self._disk)
            if pattern.matches(row.name.encode())
        }

    # -- verify --------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Read back both snapshots of every new shard. If a topic is missing, the switch does not happen."""
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
                        raise CannotReshard(
                            f"topic {row.name!r} was assigned to the wrong shard; this is a bug, nothing was changed"
                        )
            if found != self._homes or len(found) != expected:
                raise CannotReshard(
                    f"{expected} topics became {len(found)}; this is a bug, nothing was changed"
                )

    def _discard(self) -> None:
        """Remove the new layout to free its space. If that fails, the next run does it."""
        with suppress(OSError):
            for new in self._new:
                while new.writers:
                    new.writers.pop().abandon()
            _remove_layout(self._disk, self._next.directory)
            self._disk.remove(LAYOUT_NAME + TEMP_SUFFIX)


def clear_stale(disk: Disk, layout: Layout) -> bool:
    """Remove layouts that are not in use. First `layout.json` is written again and synced: what was read may be only in the
    page cache.
    """
    stale = stale_layouts(disk.list(""), layout.generation)
    if not stale:
        return False
    if not disk.exists(layout.directory):
        raise CannotReshard(
            f"{LAYOUT_NAME} refers to {layout.directory}, which does not exist, but {stale[-1]} does; "
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
