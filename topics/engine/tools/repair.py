"""`topics verify --repair`: make a damaged shard usable again, with every loss announced and no byte deleted.

Everything happens on an overlay first: snapshots, segments and log are rebuilt from the readable data, recovery runs on
the result, every record is read, a checkpoint is written, and the result is verified. Only then are files changed: the new
ones are written to a separate directory and synced, a plan with all renames is synced, and the renames are executed. A
crash before the plan leaves the damaged directory unchanged; after a later crash the next run finishes the repair.
Replaced files are moved to the quarantine under their old paths.
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
from topics.engine.shard.state import as_ranges
from topics.engine.storage.delete_marks import read_deleted
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
    read_everything,
    read_only_config,
    verify_shard,
)
from topics.engine.topic.log import add_loss
from topics.engine.topic.snapshot_row import ShardRow, TopicRow

PLAN_MAGIC = b"TPCSPLN\0"
QUARANTINE = "quarantine"
TOPIC_DIR = re.compile(r"[0-9a-f]{16}")
LOST_IDS = (
    1 << 36
)  # ids to skip if the last one given is unknown: more than can have been given, few of all there are


class CannotRepair(TopicsError):
    """The repair is not possible; the text says why. Nothing was changed."""


class UnsupportedFiles(CannotRepair):
    """There are files of a later version, or files in a cold tier that was not given."""


class RepairPlan(msgspec.Struct, frozen=True, array_like=True):
    """The renames of a repair, in this order: old files into the quarantine, then new files to their paths."""

    away: list[tuple[str, str]]
    into: list[tuple[str, str]]


@dataclass(slots=True)
class Repaired:
    """Result of a repair."""

    found: ShardFiles  # before the repair
    after: ShardFiles | None = None  # None: nothing was damaged
    losses: list[tuple[str, int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # consequences that the operator has to know
    named: dict[str, str] = field(default_factory=dict)  # topics with a new name, and where the real one was
    recovered: dict[str, int] = field(default_factory=dict)  # the same topics and their numbers of records
    quarantined: list[str] = field(default_factory=list)
    cold: list[str] = field(default_factory=list)  # files in the cold tier that are no longer needed


def repair_shard(
    disk: Disk, clock: Clock, config: EngineConfig, shards: int, run: int, cold: SegmentStore | None = None
) -> Generator[str, None, Repaired]:
    """Repair one shard; replaced files are moved to `quarantine/<run>`. Without damage nothing is changed.

    With a cold tier, `disk` shows both tiers. Damaged cold segments are rewritten on the hot tier.
    """
    if finish_repairs(disk, config.shard):
        yield "finished a repair that a crash had interrupted"
    found = yield from verify_shard(disk, clock, config, shards, cold)
    refused = [finding for finding in found.findings if finding.kind == "unsupported"]
    if refused:
        raise UnsupportedFiles(f"{refused[0].what}; nothing was changed")
    done = Repaired(found)
    if not found.damage and not found.bad_watch:
        return done
    overlay = OverlayDisk(disk)
    try:
        if found.damage:
            yield "rebuilding from readable data"
            _ShardRepair(overlay, clock, config, shards, found, done).run()
            yield from _checkpoint(overlay, clock, config, done)
        if found.bad_watch:
            overlay.remove(found.bad_watch)
            done.notes.append(f"{found.bad_watch}: its watch sessions are gone; clients create new ones")
        done.after = yield from _verify_result(overlay, clock, config, shards, cold)
        yield "moving files"
        _replace_files(disk, overlay, config.shard, run, done)
    finally:
        overlay.close_all()
    return done


def _checkpoint(
    overlay: OverlayDisk, clock: Clock, config: EngineConfig, done: Repaired
) -> Generator[str, None, None]:
    """Start on the rebuilt files, read everything and write a checkpoint, so that recovery no longer meets the damage."""
    engine = Engine.open(overlay, clock, read_only_config(config))
    engine.stop_tasks()
    if engine.shard.state.read_only is not None:
        raise CannotRepair(
            f"the shard would still be read-only: {engine.shard.state.read_only}; nothing was changed"
        )
    seen = {log.name: list(log.view.losses) for log in engine.shard.state.by_id.values()}
    lost = [(name, first, last) for name, first, last, reason in engine.report.losses if reason == "corrupt"]
    yield from read_everything(engine, ShardFiles())
    for log in engine.shard.state.by_id.values():
        lost += [(log.name, first, last) for first, last, reason in log.view.losses
                 if reason == "corrupt" and (first, last, reason) not in seen[log.name]]  # fmt: skip
    done.losses += [loss for loss in lost if loss not in done.losses]
    for name, where in done.named.items():
        count = done.recovered[name] = engine.shard.state.published[name].view.count
        done.notes.append(
            f"topic {name}: its real name was in {where}. It has {count} records; "
            f"`topics read {name} --json | topics pub NAME --records` copies them to a topic with the right name"
        )
    engine.close()


def _verify_result(
    overlay: OverlayDisk, clock: Clock, config: EngineConfig, shards: int, cold: SegmentStore | None
) -> Generator[str, None, ShardFiles]:
    found = yield from verify_shard(overlay, clock, config, shards, cold)
    if found.damage:
        first = found.damage[0]
        raise CannotRepair(
            f"after the repair {first.path} would still be damaged at byte {first.offset}: {first.what}; nothing was changed"
        )
    return found


# ── Rebuilding from readable data ─────────────────────────────────────────────────────


class _ShardRepair:
    """Rebuilds the damaged files of a shard on the overlay."""

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

    def run(self) -> None:
        found, disk = self._found, self._disk
        for path in found.bad_intents:
            disk.remove(path)
            self._done.notes.append(f"{path}: bytes that an erase was to overwrite may remain")
        for number, patches in pending_intents(disk, self._meta_dir):
            apply_patches(disk, patches)
            finish_intent(disk, self._meta_dir, number)
        head, rows = self._state()
        changed = head is not None and self._repair_segments(rows)
        rebuilt = head is not None and found.newest is None
        base_lsn = head.base_lsn if head is not None else 0
        if found.log.damage or rebuilt:
            self._repair_log(rows, base_lsn)
            changed = changed or head is not None
        if head is not None and (changed or rebuilt):
            self._write_snapshot(head, rows)
        else:
            for number in found.bad_snapshots:
                disk.remove(snapshot_path(self._meta_dir, number))

    def _state(self) -> tuple[ShardRow | None, list[TopicRow]]:
        """The newest intact snapshot; otherwise nothing if the log is complete; otherwise a state from the segments."""
        newest = self._found.newest
        if newest is not None:
            return newest
        files = [file.scanned.envelopes for file in self._found.log.files if file.scanned is not None]
        if min((envelope.lsn for envelopes in files for envelope in envelopes), default=0) == 1:
            return None, []
        rebuilder = _Rebuilder(self._disk, self._config, self._shards, self._found, self._done)
        # A layout written by resharding starts with snapshots. The first layout does not: before the first checkpoint
        # there is only the log, and here its first entry is missing.
        is_first = self._config.shard_dir.startswith("layout-1/")
        if is_first and not self._found.bad_snapshots and not rebuilder.has_segments:
            return None, []
        return rebuilder.state()

    def _repair_log(self, rows: list[TopicRow], base_lsn: int) -> None:
        log = self._found.log
        if self._found.newest is None:
            applied = max([base_lsn, *(row.applied_lsn for row in rows)])
            log = LogWalk(log.files, base_lsn, applied, sound=self._found.is_sound).run()
            if base_lsn:
                # The segments have the records from before the first entry, but not the names of topics without segments.
                log.holes.insert(0, Hole(0, 0, 0, "", 0, 0, "", begins_file=False))
        rewritten = rewrite_log(
            self._disk, self._config.shard_dir, log, rows,
            base_lsn=base_lsn, ts=self._now_ms, shard=self._config.shard, shards=self._shards,
        )  # fmt: skip
        holes = [hole for hole in log.holes if hole.what]
        if self._found.is_clean and log.last_lsn == base_lsn and not holes:
            self._clean_lsn = (
                rewritten.last_lsn
            )  # still a clean stop: a power failure cannot have lost anything
        self._done.losses += rewritten.losses
        self._done.named.update(dict.fromkeys(rewritten.named, "the lost part of the log"))
        for hole in holes:
            self._done.notes.append(
                f"{hole.path}: {hole.what}; deletes and topic changes in lost entries are undone"
            )

    def _write_snapshot(self, head: ShardRow, rows: list[TopicRow]) -> None:
        """Write a snapshot and remove all others: they refer to segments that were replaced."""
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

    def _repair_segments(self, rows: list[TopicRow]) -> bool:
        changed = False
        for row in rows:
            bad = [
                meta for meta in row.segments
                if (row.id, meta.first_seq, meta.generation) in self._found.bad_segments
            ]  # fmt: skip
            if bad:
                self._repair_topic(row)
                changed = True
            elif row.id in self._found.miscounted:
                self._repair_count(row)
                changed = True
        return changed

    def _topic_dir(self, row: TopicRow) -> str:
        return f"{self._config.topics_dir}/{row.id:016x}"

    def _repair_topic(self, row: TopicRow) -> None:
        kept: list[SegmentMeta] = []
        before: SegmentMeta | None = None
        for meta in row.segments:
            made: SegmentMeta | None = meta
            if (row.id, meta.first_seq, meta.generation) in self._found.bad_segments:
                made = self._repair_segment(row, meta, expected_chain(before, meta))
            if made is not None:
                kept.append(made)
            before = meta
        row.segments = kept
        self._count(row)

    def _repair_segment(self, row: TopicRow, meta: SegmentMeta, chain: bytes | None) -> SegmentMeta | None:
        directory = self._topic_dir(row)
        self._disk.make_dir(directory)
        salvage = salvage_segment(self._disk, directory, row.id, meta)
        try:
            read_deleted(self._disk, directory, meta)
        except (TopicsError, OSError):
            note = f"topic {row.name}: deleted records between seqs {meta.first_seq} and {meta.first_seq + meta.rows - 1} have reappeared"
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

    def _repair_count(self, row: TopicRow) -> None:
        """Handle a wrong mark in .del when it is unknown which one is wrong. Marked records stay deleted. If there are
        more marks than deletes, each marked record is announced as possibly lost.
        """
        if self._found.miscounted[row.id] < 0:
            for meta in row.segments:
                marks = np.flatnonzero(read_marks(self._disk, self._topic_dir(row), meta))
                for first, last in as_ranges((marks + meta.first_seq).tolist()):
                    if last >= row.first_seq:
                        self._lose(row, max(first, row.first_seq), last)
        else:
            self._done.notes.append(f"topic {row.name}: deleted records have reappeared")
        self._count(row)

    def _lose(self, row: TopicRow, first: int, last: int) -> None:
        add_loss(row.losses, (first, last, "corrupt"))
        self._done.losses.append((row.name, first, last))

    def _count(self, row: TopicRow) -> None:
        """Recompute the live records and bytes from the index."""
        row.count = row.live_bytes = 0
        for meta in row.segments:
            rows = read_rows(self._disk, self._topic_dir(row), meta)
            live = (rows["length"] > 0) & ~read_marks(self._disk, self._topic_dir(row), meta)
            live[: max(0, row.first_seq - meta.first_seq)] = False
            row.count += int(np.count_nonzero(live))
            row.live_bytes += int(rows["size"][live].sum(dtype=np.int64))


def _free_generation(disk: Disk, directory: str, meta: SegmentMeta) -> int:
    """A generation above all that have or may have files in the directory."""
    parsed = [found for name in disk.list(directory) if (found := parse_segment_name(name)) is not None]
    return 1 + max(
        [meta.generation, *(generation for first, generation, _ in parsed if first == meta.first_seq)]
    )


class _Rebuilder:
    """Rebuilds the state of a shard without an intact snapshot: topics from their segments.

    Readable rows of damaged snapshots are used where they can be checked: names, configs, idempotency keys, and the
    records of small topics, each of which has its own digest. Counts and floors are recomputed.
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
            if topic < 1 << 62:  # larger numbers are not topic ids
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
            # Only the snapshots knew the first id of this layout. A lower id would be taken for that of a topic dropped
            # earlier, so skip far more ids than can have been given.
            next_id += LOST_IDS
        if head is not None:
            next_id = max(next_id, head.next_id) if head.next_id < next_id + (1 << 40) else next_id
        self._done.notes.append("no snapshot could be read: topics were rebuilt from their segments")
        made = ShardRow(0, base_lsn, next_id, 0, 0, 0, "", 0)
        if (
            own.first_id > next_id
        ):  # the shard's adopted topics are unknown: none of the others may be removed
            own = OwnedIds(self._config.shard, next_id, pack_ids(ids))
            self._done.notes.append(
                "it is unknown which older topics belong to this shard: files of topics without a readable row are kept"
            )
        made.first_id, made.adopted, made.others = own.first_id, own.packed, own.others
        return made, rows

    def _hints(self) -> tuple[ShardRow | None, dict[int, TopicRow]]:
        """The rows of damaged snapshots that can be decoded, the newest for each topic."""
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
            self._done.named[name] = "the lost snapshots"
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
        self._add_losses(row)
        return row

    def _add_losses(self, row: TopicRow) -> None:
        """Announce the seqs outside the segments as lost. Deleted ones cannot be told apart."""
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
                continue  # overlaps the previous one; it is quarantined
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
        found, is_complete = find_records(data, 16, row.id, meta)
        last = max(found, default=-1)
        lost = [] if is_complete else [i for i in range(last + 1) if i not in found]
        return Salvage(found, data, is_complete, np.zeros(last + 1, dtype=np.bool_), lost)

    def _inline(self, row: TopicRow, inline: tuple[int, int, bytes]) -> None:
        first, count, data = inline
        if not 0 < first < 1 << 53 or not 0 < count <= 1 << 16:
            return
        meta = SegmentMeta(first, rows=count)
        found, is_complete = find_records(data, 0, row.id, meta)
        if not found:
            return
        pieces = [data[start:end] for _, (start, end) in sorted(found.items())]
        row.inline = first, count, b"".join(pieces)
        row.head, row.count = first + count - 1, len(found)
        row.live_bytes = sum(HEADER.unpack_from(piece)[8] for piece in pieces)
        if not is_complete:
            for lost_first, lost_last in as_ranges([first + i for i in range(count) if i not in found]):
                add_loss(row.losses, (lost_first, lost_last, "corrupt"))
                self._done.losses.append((row.name, lost_first, lost_last))


# ── Replacing files ───────────────────────────────────────────────────────────────────


def _replace_files(disk: Disk, overlay: OverlayDisk, shard: int, run: int, done: Repaired) -> None:
    """Write the new files to a separate directory, then the plan, which is the commit point, then rename."""
    root = f"{QUARANTINE}/{run}"
    new_dir = f"{root}/new-{shard:02d}"
    old, new = overlay.changes()
    ensure_dir(disk, new_dir)
    into: list[tuple[str, str]] = []
    for i, path in enumerate(new):
        handle = overlay.open(path)
        try:
            write_whole(disk, f"{new_dir}/{i}", overlay.read(handle, 0, overlay.size(handle)))
        finally:
            overlay.close(handle)
        into.append((f"{new_dir}/{i}", path))
    disk.sync_dir(new_dir)
    for path in done.cold:
        # A server removes unreferenced files from the cold tier, so keep a copy.
        ensure_dir(disk, parent(f"{root}/cold/{path}"))
        write_whole(disk, f"{root}/cold/{path}", read_file(disk, path))
        disk.sync_dir(parent(f"{root}/cold/{path}"))
    hot = disk.hot if isinstance(disk, TieredDisk) else disk
    plan = RepairPlan([(path, f"{root}/{path}") for path in old if hot.exists(path)], into)
    write_digest_file(disk, f"{root}/plan-{shard:02d}", PLAN_MAGIC, msgspec.msgpack.encode(plan))
    finish_repairs(disk, shard)
    done.quarantined = [target for _, target in plan.away] + [f"{root}/cold/{path}" for path in done.cold]


def finish_repairs(disk: Disk, shard: int) -> bool:
    """Execute the renames of existing plans. This is idempotent."""
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
        new_dir = f"{QUARANTINE}/{run}/new-{shard:02d}"
        for name in disk.list(new_dir):
            disk.remove(f"{new_dir}/{name}")
        disk.remove_dir(new_dir)
    return finished


def _rename_all(disk: Disk, moves: list[tuple[str, str]], *, once: bool) -> None:
    """Rename and sync. `once`: if the target exists, the rename was done, and the source is already the new file."""
    touched: dict[str, None] = {}
    for source, target in moves:
        touched[parent(source)] = touched[parent(target)] = None
    for directory in dict.fromkeys(parent(target) for _, target in moves):
        ensure_dir(disk, directory)  # synced before files are moved into it
    for source, target in moves:
        if disk.exists(source) and not (once and disk.exists(target)):
            disk.rename(source, target)
    for directory in touched:
        if disk.exists(directory):
            disk.sync_dir(directory)
