"""Makes a damaged shard open and serve again, with every loss announced and no byte deleted.

Everything is first done on an overlay: snapshots, segments and log are made again from what is readable, recovery
runs on the result, every record is read, a checkpoint is written, and the whole is verified. Only then are files
touched: the new ones are written aside and synced, a plan of all renames is synced, and the renames are done. A crash
before the plan leaves the damaged directory as it was; a crash after it is finished by the next run. What was replaced
lies under its old path in the quarantine.
"""

from __future__ import annotations

import re
from collections.abc import Container, Generator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from topics.api.config import EngineConfig, TopicConfig
from topics.api.errors import Corrupt, TopicsError
from topics.engine.core.ports import Clock, Disk, SegmentStore
from topics.engine.core.topic_ids import OwnedIds, first_id_after, pack_ids
from topics.engine.runtime.engine import Engine
from topics.engine.shard.appends import NAME
from topics.engine.shard.staging import as_ranges
from topics.engine.storage.files import (
    ensure_dir,
    parent,
    read_digest_file,
    read_file,
    write_digest_file,
    write_whole,
)
from topics.engine.storage.frames import HEADER
from topics.engine.storage.intents import apply_patches, finish_intent, pending_intents
from topics.engine.storage.marks import read_deleted
from topics.engine.storage.overlay import OverlayDisk
from topics.engine.storage.sealing import meta_from_sum
from topics.engine.storage.segments import (
    COLD,
    SegmentMeta,
    parse_segment_name,
    read_rows,
    segment_name,
    segment_path,
)
from topics.engine.storage.snapshot import SnapshotWriter, list_snapshots, snapshot_path, split_rows
from topics.engine.storage.tiered import TieredDisk
from topics.engine.tools.salvage_log import SEQS_UNKNOWN, Hole, LogWalk, new_name, rewrite_log
from topics.engine.tools.salvage_segments import (
    Salvage,
    file_or_nothing,
    find_records,
    read_marks,
    rewrite,
    salvage_segment,
)
from topics.engine.tools.verify import (
    ShardFiles,
    expected_chain,
    owned_ids,
    quiet,
    read_everything,
    verify_shard,
)
from topics.engine.topic.log import add_loss
from topics.engine.upkeep.checkpoint import ShardRow, TopicRow

PLAN_MAGIC = b"TPCSPLN\0"
QUARANTINE = "quarantine"
TOPIC_DIR = re.compile(r"[0-9a-f]{16}")
LOST_IDS = 1 << 36  # as many ids as nobody can have given, and few of those that there are


class CannotRepair(TopicsError):
    """Nothing was changed; the text says why."""


class RepairPlan(msgspec.Struct, frozen=True, array_like=True):
    """The renames of one repair, in this order: old files to the quarantine, then new ones to their places."""

    away: list[tuple[str, str]]
    into: list[tuple[str, str]]


@dataclass(slots=True)
class Repaired:
    found: ShardFiles  # before the repair
    after: ShardFiles | None = None  # None: nothing was damaged
    losses: list[tuple[str, int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what cannot be known or undone
    named: dict[str, str] = field(default_factory=dict)  # topics that got a name, and where theirs was
    recovered: dict[str, int] = field(default_factory=dict)  # the same, and how many records they have
    quarantined: list[str] = field(default_factory=list)
    cold: list[str] = field(default_factory=list)  # files of the cold tier that are not needed any more


def repair_shard(
    disk: Disk, clock: Clock, config: EngineConfig, shards: int, run: int, cold: SegmentStore | None = None
) -> Generator[str, None, Repaired]:
    """Repair one shard; what is replaced goes to `quarantine/<run>`. Nothing is touched when nothing is damaged.

    With a cold tier the disk shows both. What is damaged there is written again on the hot one.
    """
    if finish_repairs(disk, config.shard):
        yield "finished a repair that a crash had stopped"
    found = yield from verify_shard(disk, clock, config, shards, cold)
    refused = [finding for finding in found.findings if finding.kind == "unsupported"]
    if refused:
        raise CannotRepair(f"{refused[0].what}; nothing was changed")
    done = Repaired(found)
    if not found.damage and not found.bad_watch:
        return done
    overlay = OverlayDisk(disk)
    try:
        if found.damage:
            yield "what can be read is put together"
            _Mender(overlay, clock, config, shards, found, done).mend()
            yield from _settle(overlay, clock, config, done)
        if found.bad_watch:
            overlay.remove(found.bad_watch)
            done.notes.append(f"{found.bad_watch}: its watch sessions are gone; clients make new ones")
        done.after = yield from _prove(overlay, clock, config, shards, cold)
        yield "files are moved"
        _carry_out(disk, overlay, config.shard, run, done)
    finally:
        overlay.close_all()
    return done


def _settle(
    overlay: OverlayDisk, clock: Clock, config: EngineConfig, done: Repaired
) -> Generator[str, None, None]:
    """Start on what was put together, read it all, and checkpoint: the damage is then behind the newest snapshot."""
    engine = Engine.open(overlay, clock, quiet(config))
    engine.stop_transactions()
    if engine.shard.read_only is not None:
        raise CannotRepair(
            f"the shard would still be read-only: {engine.shard.read_only}; nothing was changed"
        )
    seen = {log.name: list(log.view.losses) for log in engine.shard.by_id.values()}
    lost = [(name, first, last) for name, first, last, reason in engine.report.losses if reason == "corrupt"]
    yield from read_everything(engine, ShardFiles())
    for log in engine.shard.by_id.values():
        lost += [(log.name, first, last) for first, last, reason in log.view.losses
                 if reason == "corrupt" and (first, last, reason) not in seen[log.name]]  # fmt: skip
    done.losses += [loss for loss in lost if loss not in done.losses]
    for name, where in done.named.items():
        count = done.recovered[name] = engine.shard.published[name].view.count
        done.notes.append(
            f"topic {name}: its real name was in {where}; it has {count} records, and "
            f"`topics read {name} --json | topics pub NAME --records` copies them to a topic of that name"
        )
    engine.close()


def _prove(
    overlay: OverlayDisk, clock: Clock, config: EngineConfig, shards: int, cold: SegmentStore | None
) -> Generator[str, None, ShardFiles]:
    found = yield from verify_shard(overlay, clock, config, shards, cold)
    if found.damage:
        first = found.damage[0]
        raise CannotRepair(
            f"after the repair {first.path} would still be damaged at byte {first.offset}: {first.what}; nothing was changed"
        )
    return found


# ── Putting together what can be read ─────────────────────────────────────────────────


class _Mender:
    def __init__(
        self,
        disk: OverlayDisk,
        clock: Clock,
        config: EngineConfig,
        shards: int,
        found: ShardFiles,
        done: Repaired,
    ) -> None:
        self._disk = disk
        self._now_ms = clock.wall_ms()
        self._config = config
        self._shards = shards
        self._found = found
        self._done = done
        self._meta_dir = f"{config.shard_dir}/meta"
        self._clean_lsn = 0

    def mend(self) -> None:
        found, disk = self._found, self._disk
        for path in found.bad_intents:
            disk.remove(path)
            self._done.notes.append(f"{path}: what an erase was to overwrite may still be there in part")
        for number, patches in pending_intents(disk, self._meta_dir):
            apply_patches(disk, patches)
            finish_intent(disk, self._meta_dir, number)
        head, rows = self._state()
        changed = head is not None and self._mend_segments(rows)
        rebuilt = head is not None and found.newest is None
        base_lsn = head.base_lsn if head is not None else 0
        if found.log.damage or rebuilt:
            self._mend_log(rows, base_lsn)
            changed = changed or head is not None
        if head is not None and (changed or rebuilt):
            self._write_snapshot(head, rows)
        else:
            for number in found.bad_snapshots:
                disk.remove(snapshot_path(self._meta_dir, number))

    def _state(self) -> tuple[ShardRow | None, list[TopicRow]]:
        """The newest sound snapshot; without one the log from its beginning; without that the segments."""
        newest = self._found.newest
        if newest is not None:
            return newest
        files = [file.scanned.envelopes for file in self._found.log.files if file.scanned is not None]
        if min((envelope.lsn for envelopes in files for envelope in envelopes), default=0) == 1:
            return None, []
        rebuilder = _Rebuilder(self._disk, self._config, self._shards, self._found, self._done)
        # A layout that resharding wrote begins with a snapshot. The first one begins without: before a checkpoint the log is
        # all there is, and its first entry is missing.
        is_first = self._config.shard_dir.startswith("layout-1/")
        if is_first and not self._found.bad_snapshots and not rebuilder.has_segments:
            return None, []
        return rebuilder.state()

    def _mend_log(self, rows: list[TopicRow], base_lsn: int) -> None:
        log = self._found.log
        if self._found.newest is None:
            applied = max([base_lsn, *(row.applied_lsn for row in rows)])
            log = LogWalk(log.files, base_lsn, applied, sound=self._found.is_sound).run()
            if base_lsn:
                # Segments hold what lies before the first entry, but for the names of topics that had none yet.
                log.holes.insert(0, Hole(0, 0, 0, "", 0, 0, "", begins_file=False))
        said = rewrite_log(
            self._disk, self._config.shard_dir, log, rows,
            base_lsn=base_lsn, ts=self._now_ms, shard=self._config.shard, shards=self._shards,
        )  # fmt: skip
        holes = [hole for hole in log.holes if hole.what]
        if self._found.is_clean and log.last_lsn == base_lsn and not holes:
            self._clean_lsn = said.last_lsn  # still a clean stop: no power cut can have taken anything
        self._done.losses += said.losses
        self._done.named.update(dict.fromkeys(said.named, "the part of the log that is lost"))
        for hole in holes:
            self._done.notes.append(
                f"{hole.path}: {hole.what}; deletes and changes of topics in them are undone"
            )

    def _write_snapshot(self, head: ShardRow, rows: list[TopicRow]) -> None:
        """The only one from here on: what the others name is no longer all there."""
        old = list_snapshots(self._disk, self._meta_dir)
        head = msgspec.structs.replace(head, number=max([0, *old]) + 1, clean_lsn=self._clean_lsn)
        writer = SnapshotWriter(self._disk, self._meta_dir, head.number)
        writer.add(head)
        for row in rows:
            writer.add(row)
        writer.finish()
        writer.publish()
        for number in old:
            self._disk.remove(snapshot_path(self._meta_dir, number))

    # -- segments ------------------------------------------------------------------------------------------

    def _mend_segments(self, rows: list[TopicRow]) -> bool:
        changed = False
        for row in rows:
            bad = [
                meta for meta in row.segments
                if (row.id, meta.first_seq, meta.generation) in self._found.bad_segments
            ]  # fmt: skip
            if bad:
                self._mend_topic(row)
                changed = True
            elif row.id in self._found.miscounted:
                self._mend_count(row)
                changed = True
        return changed

    def _topic_dir(self, row: TopicRow) -> str:
        return f"{self._config.topics_dir}/{row.id:016x}"

    def _mend_topic(self, row: TopicRow) -> None:
        kept: list[SegmentMeta] = []
        before: SegmentMeta | None = None
        for meta in row.segments:
            made: SegmentMeta | None = meta
            if (row.id, meta.first_seq, meta.generation) in self._found.bad_segments:
                made = self._mend_segment(row, meta, expected_chain(before, meta))
            if made is not None:
                kept.append(made)
            before = meta
        row.segments = kept
        self._count(row)

    def _mend_segment(self, row: TopicRow, meta: SegmentMeta, chain: bytes | None) -> SegmentMeta | None:
        directory = self._topic_dir(row)
        self._disk.make_dir(directory)
        salvage = salvage_segment(self._disk, directory, row.id, meta)
        try:
            read_deleted(self._disk, directory, meta)
        except (TopicsError, OSError):
            note = f"topic {row.name}: records deleted from seqs {meta.first_seq} to {meta.first_seq + meta.rows - 1} are back"
            self._done.notes.append(note)
        for first, last in salvage.lost_ranges(meta.first_seq):
            if last >= row.first_seq:
                self._lose(row, max(first, row.first_seq), last)
        made = rewrite(
            self._disk, directory, row.id, meta, salvage, _free_generation(self._disk, directory, meta), chain
        )
        name = segment_name(meta.first_seq, meta.generation)
        if meta.tier == COLD and self._disk.exists(segment_path(directory, meta, "data")):
            self._done.cold.append(segment_path(directory, meta, "data"))
        for file in self._disk.list(directory):
            if file.startswith(f"{name}."):
                self._disk.remove(f"{directory}/{file}")
        return made

    def _mend_count(self, row: TopicRow) -> None:
        """Some mark in .del is wrong and nobody can say which. What was deleted stays deleted; when there
        are more marks than deletes, each marked record is announced as possibly lost."""
        if self._found.miscounted[row.id] < 0:
            for meta in row.segments:
                marks = np.flatnonzero(read_marks(self._disk, self._topic_dir(row), meta))
                for first, last in as_ranges((marks + meta.first_seq).tolist()):
                    if last >= row.first_seq:
                        self._lose(row, max(first, row.first_seq), last)
        else:
            self._done.notes.append(f"topic {row.name}: deleted records have come back")
        self._count(row)

    def _lose(self, row: TopicRow, first: int, last: int) -> None:
        add_loss(row.losses, (first, last, "corrupt"))
        self._done.losses.append((row.name, first, last))

    def _count(self, row: TopicRow) -> None:
        """Live records and bytes again from the index."""
        row.count = row.live_bytes = 0
        for meta in row.segments:
            rows = read_rows(self._disk, self._topic_dir(row), meta)
            live = (rows["length"] > 0) & ~read_marks(self._disk, self._topic_dir(row), meta)
            live[: max(0, row.first_seq - meta.first_seq)] = False
            row.count += int(np.count_nonzero(live))
            row.live_bytes += int(rows["size"][live].sum(dtype=np.int64))


def _free_generation(disk: Disk, directory: str, meta: SegmentMeta) -> int:
    """One above every generation that has or may have files here."""
    parsed = [found for name in disk.list(directory) if (found := parse_segment_name(name)) is not None]
    return 1 + max(
        [meta.generation, *(generation for first, generation, _ in parsed if first == meta.first_seq)]
    )


class _Rebuilder:
    """The state of a shard without a sound snapshot: topics from their segments.

    What the damaged snapshots still say is used where it can be checked: names, configs, idempotency keys, and
    the records of small topics, each of which has its own digest. Counts and floors are made again.
    """

    def __init__(
        self, disk: OverlayDisk, config: EngineConfig, shards: int, found: ShardFiles, done: Repaired
    ) -> None:
        self._disk = disk
        self._config = config
        self._shards = shards
        self._found = found
        self._done = done
        self._meta_dir = f"{config.shard_dir}/meta"

    @property
    def has_segments(self) -> bool:
        own = owned_ids(None, self._config)
        names = self._disk.list(self._config.topics_dir)
        return any(int(name, 16) in own for name in names if TOPIC_DIR.fullmatch(name))

    def state(self) -> tuple[ShardRow, list[TopicRow]]:
        head, hints = self._hints()
        own = owned_ids(head, self._config)
        ids = set(hints)
        seen = set(hints)
        for name in self._disk.list(self._config.topics_dir):
            try:
                topic = int(name, 16)
            except ValueError:
                continue
            if topic < 1 << 62:  # whatever is larger is nothing of ours
                seen.add(topic)
            if topic in own:
                ids.add(topic)
        taken = {hint.name for hint in hints.values()}
        rows = [self._row(topic, hints.get(topic), taken) for topic in sorted(ids)]
        first = min(
            (e.lsn for file in self._found.log.files if file.scanned for e in file.scanned.envelopes),
            default=1,
        )
        base_lsn = first - 1
        next_id = first_id_after(seen) + self._config.shard
        if head is None and own.first_id > next_id:
            # In this layout new ids begin at a place that only the snapshots knew. What is given below it would be taken for a
            # topic that was dropped before; so leave far more than there can have been.
            next_id += LOST_IDS
        if head is not None:
            next_id = max(next_id, head.next_id) if head.next_id < next_id + (1 << 40) else next_id
        self._done.notes.append("no snapshot could be read: topics were made again from their segments")
        made = ShardRow(0, base_lsn, next_id, 0, 0, 0, "", 0)
        if own.first_id > next_id:  # which others were this shard's is not known: none of them may be removed
            own = OwnedIds(self._config.shard, next_id, pack_ids(ids))
            self._done.notes.append(
                "which topics had come to this shard is not known: those whose rows cannot be read stay as files"
            )
        made.first_id, made.adopted, made.others = own.first_id, own.packed, own.others
        return made, rows

    def _hints(self) -> tuple[ShardRow | None, dict[int, TopicRow]]:
        """Rows of damaged snapshots that can be decoded, the newest of each topic."""
        head: ShardRow | None = None
        hints: dict[int, TopicRow] = {}
        for number in reversed(self._found.bad_snapshots):
            path = snapshot_path(self._meta_dir, number)
            try:
                for i, raw in enumerate(split_rows(path, file_or_nothing(self._disk, path)[16:-8])):
                    try:
                        if i == 0:
                            head = head or msgspec.msgpack.decode(raw, type=ShardRow)
                            continue
                        row = msgspec.msgpack.decode(raw, type=TopicRow)
                    except msgspec.DecodeError:
                        continue
                    if NAME.match(row.name) and self._may_own(row, head):
                        hints.setdefault(row.id, row)
            except Corrupt:
                continue
        return head, hints

    def _may_own(self, row: TopicRow, head: ShardRow | None) -> bool:
        own = owned_ids(head, self._config)
        return row.id in own or (head is None and own.first_id > row.id)

    def _row(self, topic: int, hint: TopicRow | None, taken: Container[str]) -> TopicRow:
        directory = f"{self._config.topics_dir}/{topic:016x}"
        name = hint.name if hint is not None else new_name(topic, taken, self._config.shard, self._shards)
        config = hint.config if hint is not None else TopicConfig(durability="fsync")
        row = TopicRow(topic, name, config, 0, 0, 1, 0, 0, 0, 0, [], 0, [], [], 0, [], [], bytes(8), False)
        if hint is None:
            self._done.named[name] = "the snapshots that are lost"
        self._segments(row, directory)
        if hint is not None and not row.segments and hint.inline is not None:
            self._inline(row, hint.inline)
        known = row.head
        links = [meta.link for meta in row.segments if meta.sealed]
        if links:
            row.sum_chain = links[-1]
        if hint is not None:
            row.may_expire = hint.may_expire
            if known < hint.head <= known + SEQS_UNKNOWN:
                row.head = hint.head
            row.ceiling = hint.ceiling if row.head <= hint.ceiling <= row.head + SEQS_UNKNOWN else 0
            row.dedupe = [entry for entry in hint.dedupe if 0 < entry[1][0] <= row.head - entry[1][1] + 1]
        self._announce(row, known)
        return row

    def _announce(self, row: TopicRow, known: int) -> None:
        """Whatever lies outside the segments is gone, or was removed and nobody knows."""
        at = 1
        spans = [(meta.first_seq, meta.first_seq + meta.rows) for meta in row.segments]
        if row.inline is not None:
            spans = [(row.inline[0], row.inline[0] + row.inline[1])]
        for first, stop in [*spans, (row.head + 1, row.head + 1)]:
            if first > at:
                add_loss(row.losses, (at, first - 1, "corrupt"))
                self._done.losses.append((row.name, at, first - 1))
            at = max(at, stop)

    def _segments(self, row: TopicRow, directory: str) -> None:
        newest: dict[int, int] = {}
        for file in self._disk.list(directory):
            parsed = parse_segment_name(file)
            if parsed is not None and parsed[2] == "data":
                newest[parsed[0]] = max(newest.get(parsed[0], 0), parsed[1])
        for first in sorted(newest):
            if first <= row.head:
                continue  # overlaps the one before: left to the quarantine
            meta = self._segment(row, directory, first, newest[first])
            if meta is not None:
                row.segments.append(meta)
                row.head = first + meta.rows - 1
        for meta in row.segments:
            rows = read_rows(self._disk, directory, meta)
            live = (rows["length"] > 0) & ~read_marks(self._disk, directory, meta)
            row.count += int(np.count_nonzero(live))
            row.live_bytes += int(rows["size"][live].sum(dtype=np.int64))

    def _segment(self, row: TopicRow, directory: str, first: int, generation: int) -> SegmentMeta | None:
        has_del = self._disk.exists(f"{directory}/{segment_name(first, generation)}.del")
        try:
            meta = meta_from_sum(self._disk, directory, first, generation, has_del=has_del)
        except (Corrupt, OSError):
            meta = SegmentMeta(first, generation, rows=1 << 32, data_bytes=1 << 32)
        salvage = self._salvage(row, directory, meta)
        if not salvage.found:
            return None
        if not meta.sealed:
            meta = msgspec.structs.replace(meta, rows=max(salvage.found) + 1, has_del=has_del)
            salvage.deleted = read_marks(self._disk, directory, meta)
        for lost_first, lost_last in salvage.lost_ranges(first):
            add_loss(row.losses, (lost_first, lost_last, "corrupt"))
            self._done.losses.append((row.name, lost_first, lost_last))
        return rewrite(
            self._disk, directory, row.id, meta, salvage, _free_generation(self._disk, directory, meta), None
        )

    def _salvage(self, row: TopicRow, directory: str, meta: SegmentMeta) -> Salvage:
        if meta.sealed:
            return salvage_segment(self._disk, directory, row.id, meta)
        data = file_or_nothing(
            self._disk, f"{directory}/{segment_name(meta.first_seq, meta.generation)}.data"
        )
        found, whole = find_records(data, 16, row.id, meta)
        last = max(found, default=-1)
        lost = [] if whole else [i for i in range(last + 1) if i not in found]
        return Salvage(found, data, whole, np.zeros(last + 1, dtype=np.bool_), lost)

    def _inline(self, row: TopicRow, inline: tuple[int, int, bytes]) -> None:
        first, count, data = inline
        if not 0 < first < 1 << 53 or not 0 < count <= 1 << 16:
            return
        meta = SegmentMeta(first, rows=count)
        found, whole = find_records(data, 0, row.id, meta)
        if not found:
            return
        pieces = [data[start:end] for _, (start, end) in sorted(found.items())]
        row.inline = first, count, b"".join(pieces)
        row.head, row.count = first + count - 1, len(found)
        row.live_bytes = sum(HEADER.unpack_from(piece)[8] for piece in pieces)
        if not whole:
            for lost_first, lost_last in as_ranges([first + i for i in range(count) if i not in found]):
                add_loss(row.losses, (lost_first, lost_last, "corrupt"))
                self._done.losses.append((row.name, lost_first, lost_last))


# ── Moving files ──────────────────────────────────────────────────────────────────────


def _carry_out(disk: Disk, overlay: OverlayDisk, shard: int, run: int, done: Repaired) -> None:
    """Write the new files aside and the plan of all renames; from then on the repair counts."""
    root = f"{QUARANTINE}/{run}"
    aside = f"{root}/new-{shard:02d}"
    old, new = overlay.changes()
    ensure_dir(disk, aside)
    into: list[tuple[str, str]] = []
    for i, path in enumerate(new):
        handle = overlay.open(path)
        try:
            write_whole(disk, f"{aside}/{i}", overlay.read(handle, 0, overlay.size(handle)))
        finally:
            overlay.close(handle)
        into.append((f"{aside}/{i}", path))
    disk.sync_dir(aside)
    for path in done.cold:
        # A server removes from the cold tier what nothing names; here it is kept.
        ensure_dir(disk, parent(f"{root}/cold/{path}"))
        write_whole(disk, f"{root}/cold/{path}", read_file(disk, path))
        disk.sync_dir(parent(f"{root}/cold/{path}"))
    hot = disk.hot if isinstance(disk, TieredDisk) else disk
    plan = RepairPlan([(path, f"{root}/{path}") for path in old if hot.exists(path)], into)
    write_digest_file(disk, f"{root}/plan-{shard:02d}", PLAN_MAGIC, msgspec.msgpack.encode(plan))
    finish_repairs(disk, shard)
    done.quarantined = [new_place for _, new_place in plan.away] + [
        f"{root}/cold/{path}" for path in done.cold
    ]


def finish_repairs(disk: Disk, shard: int) -> bool:
    """Do the renames of plans that were made; doing them again changes nothing."""
    finished = False
    for run in disk.list(QUARANTINE):
        path = f"{QUARANTINE}/{run}/plan-{shard:02d}"
        if disk.exists(path):
            plan = msgspec.msgpack.decode(read_digest_file(disk, path, PLAN_MAGIC), type=RepairPlan)
            _rename_all(disk, plan.away, once=True)
            _rename_all(disk, plan.into, once=False)
            disk.remove(path)
            disk.sync_dir(f"{QUARANTINE}/{run}")
            finished = True
        aside = f"{QUARANTINE}/{run}/new-{shard:02d}"
        for name in disk.list(aside):
            disk.remove(f"{aside}/{name}")
        disk.remove_dir(aside)
    return finished


def _rename_all(disk: Disk, moves: list[tuple[str, str]], *, once: bool) -> None:
    """`once`: a target that is there says that this one was done, and what is at the source now is the new file."""
    touched: dict[str, None] = {}
    for source, target in moves:
        touched[parent(source)] = touched[parent(target)] = None
    for directory in dict.fromkeys(parent(target) for _, target in moves):
        ensure_dir(disk, directory)  # lasting, before anything lies in it
    for source, target in moves:
        if disk.exists(source) and not (once and disk.exists(target)):
            disk.rename(source, target)
    for directory in touched:
        if disk.exists(directory):
            disk.sync_dir(directory)
