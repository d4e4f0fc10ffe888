"""The file of watch sessions.

Goal: it is what it was or what it should be, damage is noticed and costs no record, and the tools that check a data
directory know it. Method: round trips, a crash or an error at every disk call, every flipped bit; then a shard with such
a file is verified and repaired.
"""

from __future__ import annotations

import errno
import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.damaged_shard import CONFIG, judge, rich
from tests.support.engine_harness import file_bytes, overwrite
from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from topics.engine.errors import Corrupt, UnsupportedFormat
from topics.engine.files import TEMP_SUFFIX, WATCH_MAGIC, with_digest, xxh
from topics.engine.repair import CannotRepair
from topics.watching import EpochChange, FeedOptions, SessionSpec
from workers import watch_file
from workers.sessions import SessionRow, Undo
from workers.watch_file import GroupRow, WatchRows

DIR = CONFIG.shard_dir
PATH = f"{DIR}/watch"

numbers = st.integers(0, (1 << 64) - 1)
names = st.text(max_size=10)
specs = st.builds(
    SessionSpec,
    st.builds(FeedOptions, nodes=st.lists(names, max_size=2).map(tuple), limit=numbers, strong=st.booleans()),
    numbers,
    names=st.lists(names, max_size=2),
    patterns=st.lists(names, max_size=2),
    group=st.none() | names,
)
undos = st.builds(Undo, numbers, numbers, st.dictionaries(names, st.none() | numbers, max_size=3))
rows = st.builds(
    SessionRow,
    names,
    st.binary(max_size=32),
    specs,
    st.dictionaries(names, numbers, max_size=5),
    numbers,
    numbers,
    st.booleans(),
    st.lists(names, max_size=3),
    st.lists(undos, max_size=3),
    st.dictionaries(names, names, max_size=3),
    st.dictionaries(names, st.builds(EpochChange, names, names, numbers, numbers), max_size=3),
)
groups = st.tuples(names, numbers, names, numbers)


def row(wid: str, cursor: int = 0) -> SessionRow:
    spec = SessionSpec(FeedOptions(), 15_000)
    return SessionRow(wid, b"key", spec, {"orders": cursor}, 1, 0, False, [], [])


def content(n: int) -> WatchRows:
    return WatchRows([row(f"wid_{i}", n) for i in range(n)], [("orders", 1024, "group", n)])


def encoded(rows: WatchRows) -> bytes:
    return watch_file.encode(rows.sessions, rows.groups)


def shard_disk(seed: int = 1) -> SimDisk:
    disk = SimDisk(seed)
    disk.make_dir(DIR)
    disk.sync_all()
    return disk


@given(st.lists(rows, max_size=5), st.lists(groups, max_size=5))
def test_what_is_encoded_decodes_back(sessions: list[SessionRow], group_rows: list[GroupRow]) -> None:
    assert watch_file.decode(watch_file.encode(sessions, group_rows)) == WatchRows(sessions, group_rows)


@given(st.binary(max_size=100), st.booleans())
def test_noise_is_refused(noise: bytes, framed: bool) -> None:
    with pytest.raises((Corrupt, UnsupportedFormat)):
        watch_file.decode(with_digest(WATCH_MAGIC, noise) if framed else noise)


def test_what_is_written_is_read_after_a_power_cut() -> None:
    disk = shard_disk()
    assert watch_file.read(disk, DIR) is None
    for n in (3, 1):
        watch_file.write(disk, DIR, encoded(content(n)))
        disk.crash()
        assert watch_file.read(disk, DIR) == content(n)
    assert disk.list(DIR) == ["watch"]


@fault(
    "disk",
    "the power goes, or the worker dies, at any disk call while watch sessions are written",
    "they are there as they were before or as they should be",
)
@pytest.mark.parametrize("power", [True, False], ids=["power", "kill"])
@pytest.mark.parametrize("seed", range(10))
def test_a_crash_at_any_call_leaves_the_old_or_the_new_content(seed: int, power: bool) -> None:
    old, new, next_one = content(50), content(30), content(2)
    for call in range(1, 100):
        disk = shard_disk(seed * 1000 + call)
        watch_file.write(disk, DIR, encoded(old))
        disk.crash_at(call, midway=True)
        try:
            watch_file.write(disk, DIR, encoded(new))
            finished = True
        except SimulatedCrash:
            finished = False
        if power:
            disk.crash()
        else:
            disk.kill()
        assert watch_file.read(disk, DIR) in ([new] if finished else [old, new])
        # A longer leftover of the crashed attempt does not show in the next one.
        watch_file.write(disk, DIR, encoded(next_one))
        disk.crash()
        assert watch_file.read(disk, DIR) == next_one
        if finished:
            return
    raise AssertionError("never finished")


@fault(
    "disk",
    "a disk call fails while watch sessions are written",
    "the old ones stay, and the next writing goes well",
)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_leaves_the_old_or_the_new_content(error: int) -> None:
    for call in range(1, 100):
        disk = shard_disk(call)
        watch_file.write(disk, DIR, encoded(content(5)))
        disk.fail_at(call, error)
        try:
            watch_file.write(disk, DIR, encoded(content(6)))
            return
        except OSError:
            pass
        assert watch_file.read(disk, DIR) in (content(5), content(6))
        watch_file.write(disk, DIR, encoded(content(7)))
        disk.crash()
        assert watch_file.read(disk, DIR) == content(7)
    raise AssertionError("never finished")


# ---- damage

LOST = "the shard starts without the sessions: 404, and clients make new ones"


@fault("data directory", "any single bit of the file of watch sessions flips, or its end is lost", LOST)
def test_every_flipped_bit_and_every_lost_end_is_detected(caplog: pytest.LogCaptureFixture) -> None:
    disk = shard_disk()
    watch_file.write(disk, DIR, encoded(content(2)))
    whole = file_bytes(disk, PATH)
    caplog.set_level(logging.CRITICAL, "topics.shard")
    for offset in range(len(whole)):
        for bit in range(8):
            disk.flip_bit(PATH, offset, bit)
            assert watch_file.read(disk, DIR) is None
            disk.flip_bit(PATH, offset, bit)
    handle = disk.open(PATH)
    for length in reversed(range(len(whole))):
        disk.truncate(handle, length)
        assert watch_file.read(disk, DIR) is None


@fault("data directory", "the file of watch sessions cannot be read", LOST)
def test_a_file_that_cannot_be_read_is_lost_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    disk = shard_disk()
    watch_file.write(disk, DIR, encoded(content(2)))
    disk.fail_at(1, errno.EIO, of="read")
    assert watch_file.read(disk, DIR) is None
    disk.flip_bit(PATH, 40)
    assert watch_file.read(disk, DIR) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert "watch sessions are lost" in first
    assert f"{PATH} at byte" in second


@pytest.mark.parametrize("payload", [b"", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({})])
def test_rows_that_make_no_sense_are_damage_though_the_digest_fits(payload: bytes) -> None:
    with pytest.raises(Corrupt, match="somewhere/watch at byte 16"):
        watch_file.decode(with_digest(WATCH_MAGIC, payload), "somewhere/watch")


def later_version() -> bytes:
    data = bytearray(encoded(content(1)))
    data[8] = 9
    data[-8:] = xxh(bytes(data[:-8]))
    return bytes(data)


def test_a_later_version_is_refused_by_name_and_not_written_over() -> None:
    disk = shard_disk()
    watch_file.write(disk, DIR, later_version())
    with pytest.raises(UnsupportedFormat, match=f"{PATH} has format version 9"):
        watch_file.read(disk, DIR)


# ---- verify and repair


def test_verify_and_a_start_know_the_file() -> None:
    d = rich(clean=False)
    watch_file.write(d.disk, DIR, encoded(content(3)))
    assert d.verify().findings == []
    h = d.open()
    judge(h, d.rows)
    h.close()
    assert watch_file.read(d.disk, DIR) == content(3)
    assert d.verify().findings == []


def test_what_a_crash_left_of_a_writing_is_harmless() -> None:
    d = rich(clean=False)
    overwrite(d.disk, PATH + TEMP_SUFFIX, b"half")
    assert [(finding.kind, finding.path) for finding in d.verify().findings] == [
        ("extra", PATH + TEMP_SUFFIX)
    ]
    h = d.open()
    judge(h, d.rows)
    h.close()
    watch_file.write(d.disk, DIR, encoded(content(3)))
    assert d.verify().findings == []


@fault(
    "verify",
    "the file of watch sessions is damaged",
    "verify names it as harmless to records; a repair puts it into the quarantine and touches nothing else",
)
def test_damage_is_named_and_goes_to_the_quarantine() -> None:
    d = rich(clean=False)
    watch_file.write(d.disk, DIR, encoded(content(3)))
    d.flip(PATH, 50)
    before = d.everything()
    found = d.verify()
    assert found.damage == []
    assert [(finding.kind, finding.path) for finding in found.findings] == [("extra", PATH)]
    assert d.everything() == before

    done = d.repair()
    assert done.quarantined == [f"quarantine/1/{PATH}"]
    assert "watch sessions are gone" in done.notes[0]
    after = d.everything()
    assert after.pop(f"quarantine/1/{PATH}") == before.pop(PATH)
    assert after == before
    assert d.verify().findings == []
    assert d.repair(run=2).quarantined == []


def test_a_repair_of_other_damage_takes_it_along_and_a_sound_one_stays() -> None:
    for damaged in (True, False):
        d = rich(clean=False)
        watch_file.write(d.disk, DIR, encoded(content(3)))
        if damaged:
            d.flip(PATH, 50)
        d.flip(next(path for path in d.disk.paths() if path.endswith("400/seg-0000000000000001-0.idx")), 20)
        d.repair()
        assert d.verify().findings == []
        assert (watch_file.read(d.disk, DIR) is None) == damaged


def test_verify_refuses_a_later_version_and_a_repair_changes_nothing() -> None:
    d = rich(clean=False)
    watch_file.write(d.disk, DIR, later_version())
    before = d.everything()
    assert [(finding.kind, finding.path) for finding in d.verify().findings] == [("unsupported", PATH)]
    with pytest.raises(CannotRepair):
        d.repair()
    assert d.everything() == before
