"""`verify`: what it finds and names, and that it changes nothing.

Goal: every kind of damage to every kind of file is reported with its place, an intact directory is reported as such,
also after a power cut at any moment, and not a byte is written. Method: a shard with one file of every kind on a
SimDisk is stopped, one field is damaged, and the findings are checked, and so is the result of a repair.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import msgspec
import pytest
from xxhash import xxh3_64_digest

from tests.support import length
from tests.support.damaged_shard import CONFIG, TOPICS, Damaged, judge, rich
from tests.support.engine_harness import (
    DISK,
    EPHEMERAL,
    FSYNC,
    MEMORY,
    META_DIR,
    WAL_DIR,
    Harness,
    numbered,
    overwrite,
)
from tests.support.faults import fault
from tests.support.sim_disk import SimulatedCrash
from topics.api.errors import TopicsError
from topics.engine.commands import topics as c
from topics.engine.storage.files import xxh
from topics.engine.storage.overlay import OverlayDisk
from topics.engine.storage.wal import ENVELOPE_BYTES, FILE_HEADER_BYTES
from topics.engine.tools.repair import CannotRepair


@cache
def made(clean: bool) -> Damaged:
    return rich(clean=clean)


def shard(*, clean: bool = False) -> Damaged:
    return made(clean).copy()


# ---- no damage


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
def test_a_sound_shard_is_sound_and_left_alone(clean: bool) -> None:
    d = shard(clean=clean)
    before = d.everything()
    d.disk.trace = []
    found = d.verify()
    assert found.findings == []
    assert found.opens == ""
    assert (found.topics, found.records) == (4, sum(map(len, d.rows.values())))
    assert {line.split()[0] for line in d.disk.trace} <= {
        "open",
        "close",
        "size",
        "read",
        "list",
        "exists",
        "boot_id",
        "random_u64",
    }
    assert d.everything() == before


@fault("verify", "the power went at some moment", "the directory is called sound: a start will settle it")
@pytest.mark.parametrize("seed", length.seeds(short=4, long=20))
def test_a_shard_after_a_power_cut_at_any_moment_is_sound(seed: int) -> None:
    rng = random.Random(seed)
    h = Harness(msgspec.structs.replace(CONFIG, rewrite_dead_share=0.3), seed=seed)
    try:
        h.disk.crash_at(rng.randrange(20, 1500), midway=rng.random() < 0.5)
        for topic in TOPICS:
            h.put(topic, rng.choice([DISK, FSYNC, MEMORY, EPHEMERAL]))
        for _ in range(60):
            topic, choice = rng.choice(TOPICS), rng.random()
            if choice < 0.6:
                h.append(topic, *numbered(1, rng.randrange(1, 4)), tag=rng.choice([None, b"x", b"y"]))
            elif choice < 0.75:
                seqs = [rng.randrange(1, 20) for _ in range(3)]
                h.do(c.Delete(topic, seqs=seqs, erase=rng.random() < 0.3))
            elif choice < 0.9:
                h.checkpoint()
            else:
                h.sync()
    except SimulatedCrash:
        pass
    h._die()
    if rng.random() < 0.5:
        h.disk.crash()
    else:
        h.disk.kill()
    assert Damaged(h.disk, {}, h.clock.wall_ms()).damage() == []


# ---- one field of one file


class Place:
    """A field: its file, and where it is."""

    def __init__(
        self, ending: str, offset: int, bit: int = 0, *, clean: bool = False, back: bool = False
    ) -> None:
        self.ending, self.offset, self.bit, self.clean = ending, offset, bit, clean
        self.back = back  # deleted records may come back

    def find(self, d: Damaged) -> tuple[str, int]:
        path = next(path for path in d.disk.paths() if path.endswith(self.ending))
        return path, self.offset % len(d.bytes(path))


class InEntry(Place):
    """A field of the third log entry that the newest snapshot does not contain."""

    def __init__(self, offset: int, bit: int = 0) -> None:
        super().__init__(".log", offset, bit)

    def find(self, d: Damaged) -> tuple[str, int]:
        path, envelope = [(p, e) for p, e in d.envelopes() if e.lsn > d.verify().base_lsn][2]
        return path, envelope.start - ENVELOPE_BYTES + self.offset


SEALED, OPEN = "400/seg-0000000000000001-0", "400/seg-0000000000000009-0"
WAL, OLD_SNAP, SNAP = (
    "wal/wal-0000000000000003.log",
    "meta/snap-0000000000000001",
    "meta/snap-0000000000000002",
)

LOG = "verify names the file; a repair rebuilds the header from the entries and loses nothing"
ENTRY = "verify names the entry; a repair keeps what follows it and announces the seqs it may have held"
FALLBACK = "verify names it; a repair starts from the snapshot before and loses nothing"
SPARE = "verify names it; nothing is lost, and a repair puts it into the quarantine"
RECORD = "verify names the record; a repair announces its seq and keeps all others"
REBUILT = "verify names the file; a repair makes it again from the records and loses nothing"
MARKS = "verify names the file; what it marked stays deleted as far as the marks can be read"

FIELDS = [
    ("log file", "magic of the file header", LOG, Place(WAL, 0)),
    ("log file", "version of the file header", LOG, Place(WAL, 8, 1)),
    ("log file", "shard of the file header", LOG, Place(WAL, 12)),
    ("log file", "number of the file header", LOG, Place(WAL, 16)),
    ("log file", "salt of the file header", LOG, Place(WAL, 24)),
    ("log file", "reserved bytes of the file header", LOG, Place(WAL, 40)),
    ("log file", "digest of the file header", LOG, Place(WAL, 60)),
    ("log file", "magic of an entry", ENTRY, InEntry(0)),
    ("log file", "length of an entry", ENTRY, InEntry(4, 3)),
    ("log file", "salt of an entry", ENTRY, InEntry(9)),
    ("log file", "number of an entry", ENTRY, InEntry(16)),
    ("log file", "previous number of an entry", ENTRY, InEntry(24)),
    ("log file", "synced number of an entry", ENTRY, InEntry(32)),
    ("log file", "digest of an entry", ENTRY, InEntry(44)),
    ("log file", "first record of an entry", ENTRY, InEntry(60)),
    ("snapshot", "magic of the newest", FALLBACK, Place(SNAP, 1)),
    ("snapshot", "version of the newest", FALLBACK, Place(SNAP, 8, 1)),
    ("snapshot", "reserved bytes of the newest", FALLBACK, Place(SNAP, 13)),
    ("snapshot", "row length in the newest", FALLBACK, Place(SNAP, 16)),
    ("snapshot", "shard row of the newest", FALLBACK, Place(SNAP, 24)),
    ("snapshot", "topic row of the newest", FALLBACK, Place(SNAP, 120)),
    ("snapshot", "closing row of the newest", FALLBACK, Place(SNAP, -9)),
    ("snapshot", "digest of the newest", FALLBACK, Place(SNAP, -3)),
    ("snapshot", "a row of the older one", SPARE, Place(OLD_SNAP, 200)),
    ("segment", "header of sealed records", REBUILT, Place(f"{SEALED}.data", 3)),
    ("segment", "version of sealed records", REBUILT, Place(f"{SEALED}.data", 8, 1)),
    ("segment", "length of a sealed record", RECORD, Place(f"{SEALED}.data", 16)),
    ("segment", "type of a sealed record", RECORD, Place(f"{SEALED}.data", 20)),
    ("segment", "flags of a sealed record", RECORD, Place(f"{SEALED}.data", 21)),
    ("segment", "topic of a sealed record", RECORD, Place(f"{SEALED}.data", 23)),
    ("segment", "seq of a sealed record", RECORD, Place(f"{SEALED}.data", 30)),
    ("segment", "time of a sealed record", RECORD, Place(f"{SEALED}.data", 38)),
    ("segment", "payload of a sealed record", RECORD, Place(f"{SEALED}.data", 60)),
    ("segment", "digest of the last sealed record", RECORD, Place(f"{SEALED}.data", -1)),
    ("segment", "header of records in the open segment", REBUILT, Place(f"{OPEN}.data", 3)),
    ("segment", "length of a record in the open segment", RECORD, Place(f"{OPEN}.data", 16)),
    ("segment", "payload of a record in the open segment", RECORD, Place(f"{OPEN}.data", 70)),
    ("segment", "magic of the sums", REBUILT, Place(f"{SEALED}.sum", 1)),
    ("segment", "version of the sums", REBUILT, Place(f"{SEALED}.sum", 8, 1)),
    ("segment", "body of the sums", REBUILT, Place(f"{SEALED}.sum", 100)),
    ("segment", "digest of the sums", REBUILT, Place(f"{SEALED}.sum", -2)),
    ("segment", "header of the deletion marks", MARKS, Place(f"{SEALED}.del", 1)),
    ("segment", "count of a block of deletion marks", MARKS, Place(f"{SEALED}.del", 16, 0, back=True)),
    ("segment", "first row of a range of deletion marks", MARKS, Place(f"{SEALED}.del", 20, 0, back=True)),
    ("segment", "end of a range of deletion marks", MARKS, Place(f"{SEALED}.del", 24, 0, back=True)),
    ("segment", "digest of a block of deletion marks", MARKS, Place(f"{SEALED}.del", -1, 0, back=True)),
    ("index", "header of a sealed index", REBUILT, Place(f"{SEALED}.idx", 2)),
    ("index", "offset in a sealed index", REBUILT, Place(f"{SEALED}.idx", 16)),
    ("index", "length in a sealed index", REBUILT, Place(f"{SEALED}.idx", 20)),
    ("index", "time in a sealed index", REBUILT, Place(f"{SEALED}.idx", 24)),
    ("index", "tag in a sealed index", REBUILT, Place(f"{SEALED}.idx", 36)),
    ("index", "name in the dictionary of a sealed segment", REBUILT, Place(f"{SEALED}.dict", 34)),
    ("index", "version of the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 8, 1)),
    ("index", "offset in the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 16)),
    ("index", "length in the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 20)),
    ("index", "time in the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 24)),
    ("index", "flags in the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 32, 3)),
    ("index", "tag in the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 36)),
    ("index", "node in the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 40)),
    ("index", "size in the index of the open segment", REBUILT, Place(f"{OPEN}.idx", 44)),
    ("index", "block head in the dictionary of the open segment", REBUILT, Place(f"{OPEN}.dict", 16, 3)),
    ("index", "name in the dictionary of the open segment", REBUILT, Place(f"{OPEN}.dict", 34)),
]  # fmt: skip


def of_each_field(test: Callable[..., None]) -> Callable[..., None]:
    for where, what, expected, _ in FIELDS:
        test = fault(where, f"repair of a flipped bit: {what}", expected)(test)
    return test


EACH = length.pick(short=2, long=1)


@of_each_field
@pytest.mark.parametrize(
    ("expected", "place"),
    [
        pytest.param(expected, place, id=what)
        for _, what, expected, place in FIELDS[length.turn(EACH) :: EACH]
    ],
)
def test_a_flipped_bit_is_named_and_repaired(expected: str, place: Place) -> None:
    d = shard()
    path, offset = place.find(d)
    d.flip(path, offset, place.bit)
    before = d.everything()
    returning = {2, 4} if place.back else set()

    found = d.damage()
    named = [finding for finding in found if finding.path == path]
    assert named, [(finding.path, finding.what) for finding in found]
    assert all(finding.offset <= len(before[path]) for finding in named)

    assert_the_engine_does_not_lie(d.copy(), place)
    d.repair()
    h = d.open()
    assert h.engine.shard.state.read_only is None
    gone = judge(h, d.rows, may_return=returning)
    may_lose = expected in (ENTRY, RECORD) or place.ending.endswith(".del")
    assert sum(map(len, gone.values())) <= (4 if may_lose else 0)
    h.close()
    assert d.damage() == []
    quarantined = {
        p.removeprefix("quarantine/1/"): d.bytes(p) for p in d.disk.paths() if p.startswith("quarantine/1/")
    }
    kept = quarantined.get(path) or d.bytes(path)
    assert kept == before[path], "replaced files must be kept unchanged"


def assert_the_engine_does_not_lie(d: Damaged, place: Place) -> None:
    """A start on the damage serves intact records and announces the others, is read-only, or refuses."""
    try:
        h = d.open()
    except TopicsError:
        return
    if h.engine.shard.state.read_only is None:
        judge(h, d.rows)
        return
    for topic in h.engine.shard.state.published:
        assert set(h.rows(topic)) <= set(d.rows[topic])


# ---- the findings


def test_lost_records_are_named_by_topic_and_seq() -> None:
    d = shard()
    d.flip(*Place(f"{SEALED}.data", 60).find(d))
    lost = [finding for finding in d.damage() if finding.first_seq]
    assert [(f.topic, f.first_seq, f.last_seq, f.records) for f in lost] == [("sealed", 1, 1, 1)]
    assert lost[0].path.endswith(f"{SEALED}.data")
    assert lost[0].offset == 16


def test_it_says_how_a_start_would_go() -> None:
    d = shard()
    path, offset = InEntry(44).find(d)
    d.flip(path, offset)
    assert "read-only" in d.verify().opens
    d = shard()
    d.flip(*Place(WAL, 24).find(d))
    assert "not at all" in d.verify().opens


def test_the_last_entry_is_called_torn_with_what_it_may_have_held() -> None:
    d = shard()
    path, last = list(d.envelopes())[-1]
    d.flip(path, last.start + 20)
    found = d.verify()
    assert found.damage == []
    (torn,) = found.findings
    assert (torn.kind, torn.path, torn.offset) == ("torn", path, last.start - ENVELOPE_BYTES)
    assert "if it was complete once" in torn.what


def test_the_reserve_of_a_shard_is_not_extra() -> None:
    d = rich(clean=True)
    overwrite(d.disk, f"{CONFIG.shard_dir}/reserve", bytes(4096))
    assert d.verify().findings == []


@fault("verify", "files that nothing names", "they are listed as harmless")
def test_files_that_nothing_names_are_extra() -> None:
    d = shard()
    extra = [
        f"{META_DIR}/notes.txt",
        f"{WAL_DIR}/old.bak",
        "topics/0000000000000400/seg-0000000000000099-0.data",
        "topics/0000000000f00400/seg-0000000000000001-0.data",
    ]
    for path in extra:
        overwrite(d.disk, path, b"whatever")
    found = d.verify()
    assert found.damage == []
    assert {f.path for f in found.findings if f.kind == "extra"} == {*extra[:3], "topics/0000000000f00400"}


@fault(
    "verify",
    "an erase that a crash stopped half-way",
    "it is pending, and its half-written records are no damage",
)
@pytest.mark.parametrize("call", range(1, 14))
def test_an_erase_that_a_crash_stopped_is_no_damage(call: int) -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 6))
    h.checkpoint()
    h.ask(c.Delete("t", seqs=[2, 3], erase=True))
    while not any(job.kind == "erase" for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    h.disk.crash_at(call * 3, midway=True)
    try:
        h.rest()
        pytest.skip("the erase is finished by then")
    except SimulatedCrash:
        h.power_cut()
    found = Damaged(h.disk, {}, h.clock.wall_ms()).verify()
    assert found.damage == []


@fault("verify", "a file of a later version", "verify refuses by name and a repair changes nothing")
@pytest.mark.parametrize("ending", [WAL, SNAP, OLD_SNAP, f"{OPEN}.data"])
def test_a_later_version_is_refused(ending: str) -> None:
    d = shard()
    path = next(path for path in d.disk.paths() if path.endswith(ending))
    data = bytearray(d.bytes(path))
    data[8:12] = (3).to_bytes(4, "little")
    if ending == WAL:
        data = data[:56] + xxh3_64_digest(bytes(data[:56])) + bytes(len(data) - FILE_HEADER_BYTES)
    elif "snap" in ending:
        data[-8:] = xxh(bytes(data[:-8]))
    overwrite(d.disk, path, bytes(data))
    before = d.everything()
    assert [f.path for f in d.verify().findings if f.kind == "unsupported"] == [path]
    with pytest.raises(CannotRepair):
        d.repair()
    assert d.everything() == before


# ---- errors of the disk


def test_an_overlay_reads_through_and_keeps_writes_to_itself() -> None:
    d = shard()
    before = d.everything()
    overlay = OverlayDisk(d.disk)
    path = next(iter(before))
    handle = overlay.open(path)
    overlay.write(handle, 5, b"changed")
    overlay.write(handle, 200_000, b"far away")
    assert overlay.read(handle, 0, 14) == before[path][:5] + b"changed" + before[path][12:14]
    assert overlay.read(handle, len(before[path]), 10) == bytes(10)
    overlay.truncate(handle, 8)
    assert overlay.read(handle, 0, 100) == before[path][:5] + b"cha"
    overlay.allocate(handle, 20)
    assert overlay.read(handle, 0, 100) == before[path][:5] + b"cha" + bytes(12)
    overlay.rename("topics", "gone")
    overlay.make_dir("topics")
    assert overlay.list("topics") == []
    assert overlay.list("gone") == d.disk.list("topics")
    overlay.remove(path)
    assert not overlay.exists(path)
    old, new = overlay.changes()
    assert set(old) == {path, *(p for p in before if p.startswith("topics/"))}
    assert set(new) == {f"gone/{p.removeprefix('topics/')}" for p in before if p.startswith("topics/")}
    assert d.everything() == before
