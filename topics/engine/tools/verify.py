"""`topics verify`: check all files of a shard and their consistency, read-only.

First each file on its own and against the others: digests, versions, numbering, references. Segments in the cold tier are
read through a disk that shows both tiers (tiered.py). Then a recovery on an overlay, which reads every record of every
topic through the reader that serves clients, to find whatever the file checks miss.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from topics.api.config import EngineConfig
from topics.api.errors import Corrupt, ShardReadOnly, TopicsError, UnknownFrame, UnsupportedFormat
from topics.api.limits import MIB
from topics.engine.commands import topics as cmd
from topics.engine.core.placement import shard_of
from topics.engine.core.ports import Clock, Disk, SegmentStore
from topics.engine.core.topic_ids import OwnedIds
from topics.engine.runtime.engine import Engine
from topics.engine.storage import frames
from topics.engine.storage.control import KINDS, Advanced, Merged, Opened, Swapped
from topics.engine.storage.files import (
    HEADER_BYTES,
    TEMP_SUFFIX,
    VERSION,
    WATCH_NAME,
    header,
    read_file,
)
from topics.engine.storage.intents import apply_patches, pending_intents
from topics.engine.storage.layout import generation_of
from topics.engine.storage.manifest import (
    CURRENT_NAME,
    MANIFEST_BYTES_MAX,
    SMALL_BYTES_MAX,
    Manifest,
    dead_name,
    decode_current,
    decode_dead,
    decode_manifest,
    decode_pin,
    is_manifest_file,
    manifest_name,
    manifest_number,
    pin_id,
)
from topics.engine.storage.overlay import OverlayDisk
from topics.engine.storage.reserve import RESERVE_NAME
from topics.engine.storage.sealing import read_sum, verify
from topics.engine.storage.segment_store import read_small_file
from topics.engine.storage.segments import (
    COLD,
    DEL_MAGIC,
    DEL_VERSION,
    HOT,
    SegmentMeta,
    parse_segment_name,
    read_dict,
    read_rows,
    segment_name,
    segment_path,
)
from topics.engine.storage.snapshot import list_snapshots, read_snapshot, snapshot_path
from topics.engine.storage.transaction_file import file_name, read_chunks, read_decision
from topics.engine.storage.wal import Envelope
from topics.engine.storage.watch_file import read_entries
from topics.engine.tools.salvage_log import LogFile, LogWalk, SalvagedLog, read_log
from topics.engine.tools.salvage_segments import file_or_nothing, read_marks, salvage_segment
from topics.engine.topic.log import TopicLog
from topics.engine.topic.merges import NO_MERGES
from topics.engine.topic.snapshot_row import ShardRow, TopicRow
from topics.engine.upkeep.checkpoint import LATCH_FILE
from topics.engine.upkeep.loading import SegmentIndex, index_of_records
from topics.engine.upkeep.recovery import has_latch
from topics.engine.upkeep.replay import decode

REASONS = {"cap", "ttl", "crash", "corrupt", "mixed", "recreated"}


class Finding(msgspec.Struct, frozen=True):
    """One finding. `kind` is one of

    - damage: bytes are wrong or missing
    - torn: a write that a crash interrupted, and that was not acknowledged
    - extra: a file that nothing needs; harmless
    - pending: work that the next start will finish
    - unsupported: a later format version; left alone
    """

    kind: str
    path: str
    offset: int
    what: str
    topic: str = ""
    first_seq: int = 0  # 0: no records are lost, or it is unknown which
    last_seq: int = 0
    records: int = 0


@dataclass(slots=True)
class ShardFiles:
    """Result of verifying a shard: the findings, and the readable state that a repair starts from."""

    findings: list[Finding] = field(default_factory=list)
    snapshots: dict[int, tuple[ShardRow, list[TopicRow]]] = field(default_factory=dict)  # intact snapshots
    bad_snapshots: list[int] = field(default_factory=list)
    is_clean: bool = False  # the newest snapshot, intact or not, is from a clean stop
    is_sound: bool = (
        False  # no power failure or failed write since the log was written: missing entries are damage
    )
    bad_intents: list[str] = field(default_factory=list)
    bad_watch: str = ""  # path of the watch session file if it is damaged
    log: SalvagedLog = field(default_factory=lambda: SalvagedLog([]))
    bad_segments: dict[tuple[int, int, int], SegmentMeta] = field(
        default_factory=dict
    )  # topic, seq, generation
    miscounted: dict[int, int] = field(
        default_factory=dict
    )  # topic → live records minus the snapshot's count
    opens: str = ""  # how a start would go wrong; empty if it would not
    topics: int = 0
    records: int = 0

    @property
    def newest(self) -> tuple[ShardRow, list[TopicRow]] | None:
        return self.snapshots[max(self.snapshots)] if self.snapshots else None

    @property
    def older(self) -> tuple[ShardRow, list[TopicRow]]:
        """The snapshot before the newest. An even older one can only reappear after a power failure; its files are gone."""
        return self.snapshots[sorted(self.snapshots)[-2]]

    @property
    def base_lsn(self) -> int:
        return self.newest[0].base_lsn if self.newest is not None else 0

    def add(self, kind: str, path: str, offset: int, what: str, **lost: int | str) -> None:
        self.findings.append(
            msgspec.convert({"kind": kind, "path": path, "offset": offset, "what": what, **lost}, Finding)
        )

    @property
    def damage(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind in {"damage", "unsupported"}]


def verify_shard(
    disk: Disk, clock: Clock, config: EngineConfig, shards: int, cold: SegmentStore | None = None
) -> Generator[str, None, ShardFiles]:
    """Check one shard without writing to the disk; yields progress texts. With a cold tier, `disk` shows both tiers."""
    view = OverlayDisk(disk)
    checker = _Checker(view, config, shards, cold)
    try:
        yield from checker.steps()
        found = checker.found
        if not any(finding.kind == "unsupported" for finding in found.findings):
            yield from _dry_run(OverlayDisk(view), clock, config, found)
    finally:
        view.close_all()
    return found


class _Checker:
    """The checks of files, in order."""

    def __init__(
        self, disk: OverlayDisk, config: EngineConfig, shards: int, cold: SegmentStore | None
    ) -> None:
        self._disk = disk
        self._cold = cold
        self._config = config
        self._shards = shards
        self._meta_dir = f"{config.shard_dir}/meta"
        self._wal_dir = f"{config.shard_dir}/wal"
        self.found = ShardFiles()
        # Transactions: files by topic; progress of commits according to the log, by topic and transaction id.
        self._staged_names: set[tuple[int, str]] = set()
        self._advanced: dict[tuple[int, int], int] = {}

    def steps(self) -> Generator[str, None, None]:
        yield "erase intents"
        self._check_intents()
        yield "snapshots"
        self._check_snapshots()
        yield "log"
        self._check_log()
        newest = self.found.newest
        rows = newest[1] if newest is not None else []
        self._check_rows(rows)
        for row in rows:
            if row.segments:
                yield f"topic {row.name}"
                self._check_topic(row)
            if self._cold is not None and any(meta.tier == COLD for meta in row.segments):
                self._check_manifests(self._cold, row)
        yield "watch sessions"
        self._check_watch()
        yield "unreferenced files"
        self._check_older()
        self._check_unreferenced()

    # -- meta ----------------------------------------------------------------------------------------------

    def _check_intents(self) -> None:
        """Apply pending intents to the overlay first: a half-applied patch looks like corruption."""
        found = self.found
        while True:
            try:
                pending = pending_intents(self._disk, self._meta_dir)
                break
            except UnsupportedFormat as error:
                found.add("unsupported", str(error.path), 8, str(error))
                return
            except Corrupt as error:
                self._drop_intent(error.path, error.offset, error.problem)
        for number, patches in pending:
            path = f"{self._meta_dir}/intent-{number:016x}"
            found.add(
                "pending",
                path,
                0,
                f"an erase was interrupted by a crash; a start finishes its {len(patches)} writes",
            )
            apply_patches(self._disk, patches)

    def _drop_intent(self, path: str, offset: int, problem: str) -> None:
        what = f"{problem}; the bytes it was to overwrite may be partly overwritten"
        self.found.add("damage", path, offset, what)
        self.found.bad_intents.append(path)
        self._disk.remove(path)

    def _check_snapshots(self) -> None:
        found = self.found
        for number in list_snapshots(self._disk, self._meta_dir):
            path = snapshot_path(self._meta_dir, number)
            try:
                head, rows = read_snapshot(self._disk, self._meta_dir, number)
                shard_row = msgspec.msgpack.decode(head, type=ShardRow)
                topic_rows = [msgspec.msgpack.decode(row, type=TopicRow) for row in rows]
            except UnsupportedFormat as error:
                found.add("unsupported", path, 8, str(error))
                continue
            except Corrupt as error:
                found.add("damage", path, error.offset, error.problem)
            except (msgspec.DecodeError, OSError) as error:
                found.add("damage", path, HEADER_BYTES, f"cannot be read: {error}")
            else:
                found.snapshots[number] = shard_row, topic_rows
                if shard_row.number != number:
                    found.add("damage", path, HEADER_BYTES, f"contains the number {shard_row.number}")
                continue
            found.bad_snapshots.append(number)

    def _check_watch(self) -> None:
        """Damage to watch sessions loses no records: a server starts without them, and clients create new ones."""
        path = f"{self._config.shard_dir}/{WATCH_NAME}"
        if not self._disk.exists(path):
            return
        try:
            for _ in read_entries(self._disk, path):
                pass
        except UnsupportedFormat as error:
            self.found.add("unsupported", path, 8, str(error))
            return
        except Corrupt as error:
            offset, problem = error.offset, error.problem
        except OSError as error:
            offset, problem = 0, f"cannot be read: {error}"
        else:
            return
        self.found.bad_watch = path
        self.found.add("extra", path, offset, f"{problem}; a start ignores the watch sessions after that")

    def _check_log(self) -> None:
        found = self.found
        newest = found.newest
        applied = max([found.base_lsn, *(row.applied_lsn for row in (newest[1] if newest else []))])
        try:
            files = read_log(self._disk, self._wal_dir, self._config.shard)
            for file in files:
                _check_kinds(file, found.base_lsn)
        except UnsupportedFormat as error:
            found.add("unsupported", str(error.path), getattr(error, "offset", 8), str(error))
            return
        clean = newest is not None and newest[0].clean_lsn == found.base_lsn
        if newest is not None and max(found.bad_snapshots, default=0) > newest[0].number:
            clean = False  # a later snapshot existed
        found.is_clean = clean
        found.is_sound = self._disk_was_sound(files)
        found.log = LogWalk(files, found.base_lsn, applied, clean=clean, sound=found.is_sound).run()
        for note in found.log.damage:
            found.add("damage", note.path or self._wal_dir, note.offset, note.what)
        for note in found.log.torn:
            found.add("torn", note.path, note.offset, note.what)
        self._check_older_log()

    def _disk_was_sound(self, files: list[LogFile]) -> bool:
        """Whether the machine has not rebooted since the log was written, and no write or sync failed, as in recovery."""
        used = [file for file in files if file.scanned is not None and file.scanned.envelopes]
        boot_id = next((file.start.boot_id for file in reversed(used) if file.start is not None), "")
        number = used[-1].number if used else 0
        return boot_id == self._disk.boot_id() and not has_latch(self._disk, self._meta_dir, number)

    def _check_older_log(self) -> None:
        """Check the log since the older snapshot, which is kept in case the newest one is damaged."""
        found = self.found
        if len(found.snapshots) < 2 or found.log.damage:
            return
        older = found.older[0].base_lsn
        walked = LogWalk(found.log.files, older, older).run()
        for note in walked.damage:
            what = f"{note.what}; only a start from the older snapshot would need it"
            found.add("damage", note.path or self._wal_dir, note.offset, what)

    # -- rows ----------------------------------------------------------------------------------------------

    def _check_rows(self, rows: list[TopicRow]) -> None:
        newest = self.found.newest
        if newest is None:
            return
        path = snapshot_path(self._meta_dir, newest[0].number)
        seen: set[str | int] = set()
        for row in rows:
            for problem in self._row_problems(row, newest[0]):
                self.found.add("damage", path, HEADER_BYTES, problem, topic=row.name)
            for key in (row.id, row.name):
                if key in seen:
                    self.found.add("damage", path, HEADER_BYTES, f"{key} is listed twice", topic=row.name)
                seen.add(key)

    def _row_problems(self, row: TopicRow, shard: ShardRow) -> list[str]:
        problems: list[str] = []
        if row.id not in owned_ids(shard, self._config) or row.id >= shard.next_id:
            problems.append(f"the topic's id {row.id} does not belong to this shard")
        if shard_of(row.name, self._shards) != self._config.shard:
            problems.append("the topic belongs to another shard")
        end = 0
        for meta in row.segments:
            if meta.first_seq < end:
                problems.append(f"the segment at seq {meta.first_seq} overlaps the previous one")
            end = meta.first_seq + meta.rows
        if row.inline is not None:
            end = row.inline[0] + row.inline[1]
        if end > row.head + 1:
            problems.append(f"the last record is seq {end - 1}, but the head is {row.head}")
        if not 0 <= row.first_seq <= row.head + 1 or max(row.cap_lost, row.ttl_lost) > row.head:
            problems.append("the first seq or a loss floor is beyond the head")
        if any(
            first > last or last > row.head or reason not in REASONS for first, last, reason in row.losses
        ):
            problems.append("a loss range is invalid or beyond the head")
        if any(first < 1 or count < 1 or first + count - 1 > row.head for _, (first, count, _) in row.dedupe):
            problems.append("an idempotency key refers to records that the topic does not have")
        return problems

    # -- segments ------------------------------------------------------------------------------------------

    def _topic_dir(self, topic_id: int) -> str:
        return f"{self._config.topics_dir}/{topic_id:016x}"

    def _check_topic(self, row: TopicRow) -> None:
        sound = True
        before: SegmentMeta | None = None
        for meta in row.segments:
            sound &= self._check_segment(row, meta, expected_chain(before, meta))
            before = meta
        if sound:
            self._check_count(row)

    def _check_segment(self, row: TopicRow, meta: SegmentMeta, chain: bytes | None) -> bool:
        directory, found = self._topic_dir(row.id), self.found
        if meta.tier == COLD:
            if not self._check_cold(row, directory, meta):
                return False
            meta = msgspec.structs.replace(meta, tier=HOT)  # the disk shows both tiers as one
        try:
            faults = check_segment(self._disk, directory, row.id, meta, chain)
        except UnsupportedFormat as error:
            found.add("unsupported", str(error.path), 8, str(error), topic=row.name)
            return False
        if not faults:
            return True
        found.bad_segments[row.id, meta.first_seq, meta.generation] = meta
        for fault in faults:
            what = fault.what
            if fault.path.endswith(".del"):
                what += "; deleted records may reappear"
            found.add("damage", fault.path, fault.offset, what, topic=row.name)
        salvage = salvage_segment(self._disk, directory, row.id, meta)
        for first, last in salvage.lost_ranges(meta.first_seq):
            if last >= row.first_seq:
                first = max(first, row.first_seq)
                found.add(
                    "damage", segment_path(directory, meta, "data"), self._offset_of(directory, meta, first),
                    "records cannot be read", topic=row.name, first_seq=first, last_seq=last, records=last - first + 1,
                )  # fmt: skip
        return False

    def _check_cold(self, row: TopicRow, directory: str, meta: SegmentMeta) -> bool:
        """Whether the records of a cold segment are accessible. Also compares its index files in both tiers."""
        if self._cold is None:
            path = segment_path(directory, meta, "data")
            if not self._disk.exists(path):
                what = f"{path} is in the cold tier; pass its directory with --cold-dir"
                self.found.add("unsupported", path, 0, what, topic=row.name)
            return self._disk.exists(path)
        for suffix in ("idx", "dict", "sum"):
            path = segment_path(directory, meta, suffix)
            if suffix == "dict" and not meta.dict_bytes:
                continue
            try:
                content = read_file(self._disk, path)
                same = self._cold.read_range(path, 0, len(content) + 1) == content
            except OSError:
                same = False
            if not same:
                what = "the copy in the cold tier differs from the hot tier; a server does not need it"
                self.found.add("extra", path, 0, what, topic=row.name)
        return True

    def _check_manifests(self, cold: SegmentStore, row: TopicRow) -> None:
        try:
            problems = check_manifests(cold, self._topic_dir(row.id))
        except OSError as error:
            problems = [(self._topic_dir(row.id), str(error))]
        for path, what in problems:
            self.found.add("extra", path, 0, f"{what}; only jobs need it, not a server", topic=row.name)

    def _offset_of(self, directory: str, meta: SegmentMeta, seq: int) -> int:
        try:
            return int(read_rows(self._disk, directory, meta)["offset"][seq - meta.first_seq])
        except (TopicsError, OSError):
            return 0

    def _check_count(self, row: TopicRow) -> None:
        """Compare the number of live records with the snapshot's count: version 1 deletion marks have no digests."""
        if row.may_expire or row.config.ttl_ms or row.ram_ranges or self._deletes(row):
            return  # expired and deleted records may be marked before the next snapshot counts them
        live = 0
        for meta in row.segments:
            is_live = (read_rows(self._disk, self._topic_dir(row.id), meta)["length"] > 0) & ~read_marks(
                self._disk, self._topic_dir(row.id), meta
            )
            is_live[: max(0, row.first_seq - meta.first_seq)] = False
            live += int(np.count_nonzero(is_live))
        if live == row.count:
            return
        marked = next((meta for meta in row.segments if meta.has_del), row.segments[0])
        path = segment_path(self._topic_dir(row.id), marked, "del" if marked.has_del else "idx")
        self.found.miscounted[row.id] = live - row.count
        what = (
            f"{live - row.count} records too many: deleted ones have reappeared"
            if live > row.count
            else f"{row.count - live} records too few: they are marked as deleted but were not"
        )
        self.found.add("damage", path, HEADER_BYTES, what, topic=row.name, records=abs(live - row.count))

    def _deletes(self, row: TopicRow) -> bool:
        """Whether the log has entries other than appends for this topic after the snapshot."""
        for entry in self.found.log.entries:
            if entry.lsn > row.applied_lsn:
                headers = _headers(entry.body)
                if ((headers["topic"] == row.id) & (headers["type"] != frames.APPEND)).any():
                    return True
        return False

    # -- references ----------------------------------------------------------------------------------------

    def _referenced(self, rows: list[TopicRow]) -> dict[tuple[int, int, int], tuple[TopicRow, SegmentMeta]]:
        return {
            (row.id, meta.first_seq, meta.generation): (row, meta) for row in rows for meta in row.segments
        }

    def _check_older(self) -> None:
        """Check segments that only the older snapshot refers to."""
        found = self.found
        if len(found.snapshots) < 2:
            return
        known = self._referenced(found.snapshots[max(found.snapshots)][1])
        for key, (row, meta) in self._referenced(found.older[1]).items():
            if key not in known and self._disk.exists(self._topic_dir(row.id)):
                path = segment_path(self._topic_dir(row.id), meta, "data")
                if meta.tier == COLD and (self._cold is None or not self._disk.exists(path)):
                    continue  # an erase removes the old generation immediately; the log has the swap
                try:
                    meta = msgspec.structs.replace(meta, tier=HOT)
                    faults = check_segment(self._disk, self._topic_dir(row.id), row.id, meta, None)
                except UnsupportedFormat as error:
                    found.add("unsupported", str(error.path), 8, str(error), topic=row.name)
                    continue
                for fault in faults:
                    what = f"{fault.what}; only a start from the older snapshot would need it"
                    found.add("damage", fault.path, fault.offset, what, topic=row.name)

    def _check_unreferenced(self) -> None:
        """Find files that no snapshot and no log entry refers to."""
        referenced: set[tuple[int, str]] = set()
        ids: set[int] = set()
        for _, rows in self.found.snapshots.values():
            for topic, first, generation in self._referenced(rows):
                referenced.add((topic, segment_name(first, generation)))
            ids |= {row.id for row in rows}
            for row in rows:
                names = (row.merges or NO_MERGES).retired_names
                referenced |= {(row.id, segment_name(first, generation)) for first, generation in names}
        swapped, made = self._from_log()
        for _, rows in self.found.snapshots.values():
            self._staged_names |= staged_names(rows)
        newest = self.found.newest
        for row in newest[1] if newest is not None else ():
            for path, offset, what, records in decided_faults(
                self._disk, self._config.topics_dir, row, self._advanced
            ):
                self.found.add("damage", path, offset, what, topic=row.name, records=records)
        own = owned_ids(newest[0] if newest is not None else None, self._config)
        for name in self._disk.list(self._config.topics_dir):
            try:
                topic = int(name.removesuffix(".deleted"), 16)
            except ValueError:
                continue
            if topic in own:
                self._check_directory(name, topic, referenced | swapped, known=topic in ids | made)
        for directory, ours in (
            (self._meta_dir, ("snap-", "intent-", LATCH_FILE)),
            (self._wal_dir, ("wal-",)),
            (self._config.shard_dir, ("LOCK", "meta", "wal", WATCH_NAME, RESERVE_NAME)),
        ):
            for name in self._disk.list(directory):
                if not name.startswith(ours) or name.endswith(TEMP_SUFFIX):
                    self.found.add("extra", f"{directory}/{name}", 0, "nothing needs this file")

    def _check_directory(
        self, name: str, topic: int, referenced: set[tuple[int, str]], *, known: bool
    ) -> None:
        directory = f"{self._config.topics_dir}/{name}"
        if not known or name.endswith(".deleted"):
            self.found.add("extra", directory, 0, "no snapshot or log entry refers to this topic")
            return
        for file in self._disk.list(directory):
            parsed = parse_segment_name(file)
            if (topic, file) in self._staged_names:
                continue
            if parsed is None or (topic, segment_name(parsed[0], parsed[1])) not in referenced:
                self.found.add(
                    "extra", f"{directory}/{file}", 0, "no snapshot or log entry refers to this file"
                )

    def _from_log(self) -> tuple[set[tuple[int, str]], set[int]]:
        """Segments that the log has swapped in since the snapshots, and topics that it has created."""
        swapped: set[tuple[int, str]] = set()
        made: set[int] = set()
        for entry in self.found.log.entries:
            columns = decode(entry.body, [Envelope(entry.lsn, 0, 0, 0, len(entry.body), b"")])[0]
            kinds = columns.headers["type"]
            made |= set(columns.headers["topic"][kinds == frames.TOPIC_CREATE].tolist())
            for i in np.flatnonzero(kinds == frames.SEGMENT_SWAP).tolist():
                swap = msgspec.msgpack.decode(columns.payload(i), type=Swapped)
                swapped.add((int(columns.headers["topic"][i]), segment_name(swap.first_seq, swap.generation)))
            for i in np.flatnonzero(kinds == frames.SEGMENT_MERGE).tolist():
                merged = msgspec.msgpack.decode(columns.payload(i), type=Merged)
                topic = int(columns.headers["topic"][i])
                swapped |= {(topic, segment_name(one.first_seq, one.generation)) for one in merged.groups}
            for i in np.flatnonzero(kinds == frames.TXN_OPENED).tolist():
                opened = msgspec.msgpack.decode(columns.payload(i), type=Opened)
                name = file_name(opened.txn, opened.number)
                self._staged_names.add((int(columns.headers["topic"][i]), name))
            for i in np.flatnonzero(kinds == frames.TXN_ADVANCED).tolist():
                mark = msgspec.msgpack.decode(columns.payload(i), type=Advanced)
                self._advanced[int(columns.headers["topic"][i]), mark.txn] = mark.done
        return swapped, made


def _check_kinds(file: LogFile, base_lsn: int) -> None:
    """Raise UnknownFrame if a start would need a frame that only a later version can read."""
    if file.scanned is None:
        return
    data = file.scanned.data
    columns, _ = decode(data, [one for one in file.scanned.envelopes if one.lsn > base_lsn])
    i = columns.first_not_in(KINDS)
    if i is not None:
        raise UnknownFrame(file.path, int(columns.starts[i]), int(columns.headers["type"][i]))


def owned_ids(head: ShardRow | None, config: EngineConfig) -> OwnedIds:
    """The topic ids that belong to the shard. Without a snapshot they are only known in the first layout: later ones
    also have adopted topics."""
    if head is not None:
        return OwnedIds(config.shard, head.first_id, head.adopted, head.others)
    is_first = generation_of(config.shard_dir.partition("/")[0]) == 1
    return OwnedIds(config.shard) if is_first else OwnedIds(config.shard, 1 << 63)


def _headers(body: bytes) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    columns, _ = decode(body, [Envelope(0, 0, 0, 0, len(body), b"")])
    return columns.headers


def expected_chain(before: SegmentMeta | None, meta: SegmentMeta) -> bytes | None:
    """The digest of the previous segment that a segment's .sum must contain; None if there is no previous segment."""
    if before is None or not before.link or before.first_seq + before.rows != meta.first_seq:
        return None
    return before.link


# ── Segments ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Fault:
    """Damage to one file of a segment."""

    path: str
    offset: int
    what: str


def check_segment(
    disk: Disk, topic_dir: str, topic_id: int, meta: SegmentMeta, chain: bytes | None
) -> list[Fault]:
    """All damage to a segment. Raises UnsupportedFormat for a later format version."""
    _check_versions(disk, topic_dir, meta)
    faults = [Fault(p.path, p.offset, p.what) for p in verify(disk, topic_dir, meta, chain)]
    faults += _check_marks(disk, topic_dir, meta)
    if not meta.sealed and not faults and meta.rows:
        faults += _check_open(disk, topic_dir, topic_id, meta)
    return faults


def _check_versions(disk: Disk, topic_dir: str, meta: SegmentMeta) -> None:
    """Raise UnsupportedFormat for a file of a later version. If digests show that this version wrote it, it is corrupt."""
    try:
        has_sum = meta.sealed and bool(read_sum(disk, topic_dir, meta.first_seq, meta.generation))
    except (Corrupt, OSError):
        has_sum = False
    problems = verify(disk, topic_dir, msgspec.structs.replace(meta, sealed=False), None)
    for problem in problems:
        if has_sum and not problem.path.endswith(".del"):
            continue
        if meta.idx_digest and problem.path.endswith((".idx", ".dict")):
            continue
        if meta.del_bytes and problem.path.endswith(".del"):
            continue  # the snapshot shows that this version wrote it
        head = file_or_nothing(disk, problem.path)[:12]
        version = int.from_bytes(head[8:12], "little")
        latest = DEL_VERSION if problem.path.endswith(".del") else VERSION
        if len(head) == 12 and head.startswith(b"TPCS") and version > latest:
            raise UnsupportedFormat(problem.path, version)


def _check_marks(disk: Disk, topic_dir: str, meta: SegmentMeta) -> list[Fault]:
    if not meta.has_del or meta.del_bytes:
        return []  # version 2 marks have digests
    path = segment_path(topic_dir, meta, "del")
    data = file_or_nothing(disk, path)
    if not data.startswith(header(DEL_MAGIC)):
        return []  # a bad header, which is reported elsewhere, or version 2
    marks = np.frombuffer(data, dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + meta.rows]
    odd = np.flatnonzero(marks > 1)
    if not len(odd):
        return []
    seq = meta.first_seq + int(odd[0])
    return [Fault(path, HEADER_BYTES + int(odd[0]), f"the mark of seq {seq} is neither 0 nor 1")]


def _check_open(disk: Disk, topic_dir: str, topic_id: int, meta: SegmentMeta) -> list[Fault]:
    """Check an open segment, which has no .sum: its records have digests, and the index must match them."""
    salvage = salvage_segment(disk, topic_dir, topic_id, meta)
    path = segment_path(topic_dir, meta, "data")
    if not salvage.is_complete:
        at = HEADER_BYTES
        for start, end in sorted(salvage.found.values()):
            if start != at:
                break
            at = end
        return [Fault(path, at, "a record does not match its digest")]
    try:
        rows = read_rows(disk, topic_dir, meta)
        tags, nodes, expiries = read_dict(disk, topic_dir, meta)
    except Corrupt as error:
        return [Fault(error.path, error.offset, error.problem)]
    made = index_of_records(path, salvage.data, HEADER_BYTES, meta, None, topic_id)
    return _compare(topic_dir, meta, SegmentIndex(rows, tags, nodes, expiries, None), made)


def _compare(topic_dir: str, meta: SegmentMeta, stored: SegmentIndex, made: SegmentIndex) -> list[Fault]:
    idx, names = segment_path(topic_dir, meta, "idx"), segment_path(topic_dir, meta, "dict")
    live = made.rows["length"] > 0
    made.rows["flags"] &= 0xFF ^ frames.ERASED  # an erase changes records and their digests, not the index
    stored.rows["flags"] &= 0xFF ^ frames.ERASED
    for column in ("length", "offset", "ts", "flags", "size"):
        here = np.ones(meta.rows, dtype=np.bool_) if column == "length" else live
        wrong = np.flatnonzero(here & (stored.rows[column] != made.rows[column]))
        if len(wrong):
            offset = HEADER_BYTES + 32 * int(wrong[0])
            return [
                Fault(
                    idx,
                    offset,
                    f"the {column} of seq {meta.first_seq + int(wrong[0])} does not match its record",
                )
            ]
    for column, old, new in (("tag", stored.tags, made.tags), ("node", stored.nodes, made.nodes)):
        ids = stored.rows[column]
        for row in np.flatnonzero(live).tolist():
            right = made.rows[column][row]
            known = int(ids[row]) <= len(old)
            name = old[int(ids[row]) - 1] if ids[row] and known else None
            if not known or name != (new[int(right) - 1] if right else None):
                where = names if name is not None and right else idx
                offset = 0 if where is names else HEADER_BYTES + 32 * row
                return [
                    Fault(
                        where, offset, f"the {column} of seq {meta.first_seq + row} does not match its record"
                    )
                ]
    kept = {(int(e["row"]), int(e["time"])) for e in stored.expiries}
    if kept != {(int(e["row"]), int(e["time"])) for e in made.expiries}:
        return [Fault(names, 0, "the expiry times do not match the records")]
    return []


# ── Manifests ─────────────────────────────────────────────────────────────────────────


def check_manifests(store: SegmentStore, directory: str) -> list[tuple[str, str]]:
    """Path and problem of each damaged, missing or unknown file among a topic's files in the cold tier."""
    keys = store.list(f"{directory}/")
    names = {key.rpartition("/")[2] for key in keys}
    problems: list[tuple[str, str]] = []
    manifests: dict[int, Manifest] = {}
    for name in sorted(names):
        path = f"{directory}/{name}"
        number = manifest_number(name)
        try:
            if number is not None and name == manifest_name(number):
                manifests[number] = decode_manifest(path, read_small_file(store, path, MANIFEST_BYTES_MAX))
            elif pin_id(name) is not None:
                decode_pin(path, read_small_file(store, path, SMALL_BYTES_MAX))
            elif not is_manifest_file(name) and parse_segment_name(name) is None:
                problems.append((path, "is not a file of topics"))
        except (TopicsError, OSError) as error:
            problems.append((path, str(error)))
    for number, manifest in manifests.items():
        problems += _check_manifest(store, directory, names, number, manifest)
    if CURRENT_NAME in names:
        path = f"{directory}/{CURRENT_NAME}"
        try:
            current = decode_current(path, read_small_file(store, path, SMALL_BYTES_MAX))
            if current not in manifests:
                problems.append((path, f"refers to {manifest_name(current)}, which is missing or damaged"))
            else:
                problems += _missing_files(directory, names, manifests[current])
        except (TopicsError, OSError) as error:
            problems.append((path, str(error)))
    return problems


def _check_manifest(
    store: SegmentStore, directory: str, names: set[str], number: int, manifest: Manifest
) -> list[tuple[str, str]]:
    if manifest.number != number:
        return [(f"{directory}/{manifest_name(number)}", f"contains the number {manifest.number}")]
    path = f"{directory}/{dead_name(number)}"
    if dead_name(number) not in names:
        return []
    try:
        decode_dead(path, read_small_file(store, path, MANIFEST_BYTES_MAX), manifest.segments)
    except (TopicsError, OSError) as error:
        return [(path, str(error))]
    return []


def _missing_files(directory: str, names: set[str], manifest: Manifest) -> list[tuple[str, str]]:
    return [
        (f"{directory}/{name}", f"is listed in {manifest_name(manifest.number)} but missing")
        for segment in manifest.segments
        for name in (f"{segment.name}.{suffix}" for suffix in ("data", "idx", "sum"))
        if name not in names
    ]


# ── Transactions ──────────────────────────────────────────────────────────────────────


def staged_names(rows: list[TopicRow]) -> set[tuple[int, str]]:
    """Topic and file name of each transaction in these rows. A torn end of such a file was never acknowledged."""
    return {
        (row.id, file_name(one.opened.txn, one.opened.number))
        for row in rows
        if row.transactions is not None
        for one in row.transactions.opened
    }


def decided_faults(
    disk: Disk, topics_dir: str, row: TopicRow, advanced: dict[tuple[int, int], int]
) -> Iterator[tuple[str, int, str, int]]:
    """Damage to the files of decided commits: path, offset, problem and number of records affected.

    Everything that a commit has not appended yet must be readable. If the file is gone, the commit has finished since the
    snapshot. `advanced`: progress of commits according to the log.
    """
    for one in row.transactions.opened if row.transactions is not None else ():
        decision = one.decision
        path = f"{topics_dir}/{row.id:016x}/{file_name(one.opened.txn, one.opened.number)}"
        if decision is None or not disk.exists(path):
            continue
        order = read_decision(disk, path, decision.offset)
        if order is None:
            what = "the list of chunks of a decided commit cannot be read"
            yield path, decision.offset, what, decision.records - decision.count
            continue
        done = max(decision.done, advanced.get((row.id, one.opened.txn), 0))
        for placed in order[done:]:
            if read_chunks(disk, path, [placed]) == [None]:
                what = "a chunk of a decided commit is corrupt; its records will be announced as lost"
                yield path, placed[0], what, placed[2]


# ── Trial start ───────────────────────────────────────────────────────────────────────


def _dry_run(
    disk: OverlayDisk, clock: Clock, config: EngineConfig, found: ShardFiles
) -> Generator[str, None, None]:
    yield "a trial start"
    engine = Engine(disk, clock, read_only_config(config))
    try:
        for _ in engine.recover_steps():
            pass
        engine.stop_tasks()  # a server finishes decided commits
        if engine.shard.state.read_only is not None:
            found.opens = f"read-only: {engine.shard.state.read_only}"
        yield from read_everything(engine, found)
        engine.check_invariants()
    except (TopicsError, OSError) as error:
        found.opens = f"not at all: {error}"
    except AssertionError as error:
        found.add("damage", config.shard_dir, 0, f"the counts are inconsistent after a trial start: {error}")
    finally:
        disk.close_all()
    if found.opens and not found.damage:
        found.add("damage", config.shard_dir, 0, f"a server would start it {found.opens}")
    if not found.damage:
        for problem in [*engine.report.corrupt, *engine.report.rebuilt]:
            found.add("damage", config.shard_dir, 0, problem)


def read_everything(engine: Engine, found: ShardFiles) -> Generator[str, None, None]:
    """Read every record of every topic as clients do. Unreadable records become losses in the engine."""
    known = {finding.topic for finding in found.damage}
    for name, log in list(engine.shard.state.published.items()):
        yield f"records of {name}"
        before = list(log.view.losses)
        found.topics += 1
        try:
            found.records += _read_topic(engine, log)
        except ShardReadOnly:
            pass  # without the end of its log the shard does not report a topic as empty
        except Corrupt as error:
            found.add("damage", error.path, error.offset, error.problem, topic=name)
        for first, last, reason in log.view.losses:
            if (first, last, reason) not in before and reason == "corrupt" and name not in known:
                what = "records cannot be read"
                path = f"{engine.config.topics_dir}/{log.id:016x}"
                found.add(
                    "damage",
                    path,
                    0,
                    what,
                    topic=name,
                    first_seq=first,
                    last_seq=last,
                    records=last - first + 1,
                )


def _read_topic(engine: Engine, log: TopicLog) -> int:
    count, cursor = 0, 0
    while True:
        page = execute(engine, cmd.Diff(log.name, cursor, limit=1000, max_bytes=8 << 20, touch=False))
        assert isinstance(page, cmd.Page)
        _check_page(log, page)
        count += len(page.seqs)
        if page.next_from_seq >= page.head_seq or page.next_from_seq <= cursor:
            return count
        cursor = page.next_from_seq


def _check_page(log: TopicLog, page: cmd.Page) -> None:
    """Check that the index led to the right records."""
    for i, seq in enumerate(page.seqs):
        buffer = page.frames[int(page.which[i]) if page.which is not None else 0]
        start = int(page.starts[i])
        _, kind, flags, topic, frame_seq, ts, node_len, tag_len, _ = frames.HEADER.unpack_from(buffer, start)
        at = start + frames.HEADER_BYTES + node_len
        tag = bytes(buffer[at : at + tag_len]) if flags & frames.HAS_TAG else None
        expected_tag = page.tags[i] if page.tags is not None else None
        if (kind, topic, frame_seq, ts, tag) != (
            frames.APPEND,
            log.id,
            seq,
            int(page.timestamps[i]),
            expected_tag,
        ):
            raise Corrupt(f"topic {log.name}", 0, f"the index of seq {seq} points to a different record")


def execute(engine: Engine, command: cmd.Command) -> object:
    """Execute one command with its jobs; returns the reply."""
    replies: list[object] = []
    queue = [engine.turn([(0, command)])]
    while queue or not replies:  # each turn loads only part of a topic
        outcome = queue.pop() if queue else engine.turn([])
        replies += [reply for _, reply in outcome.replies]
        for job in outcome.jobs:
            job.run()
            queue.append(engine.finish(job))
    (reply,) = replies
    if isinstance(reply, BaseException):
        raise reply
    return reply


def read_only_config(config: EngineConfig) -> EngineConfig:
    """Config of an engine that only reads: no automatic checkpoints, no compaction, small log files."""
    return msgspec.structs.replace(
        config,
        wal_file_bytes=MIB,
        snapshot_wal_bytes=1 << 62,
        snapshot_interval_ms=1 << 62,
        segment_max_age_ms=0,
        rewrite_dead_share=2.0,
    )
