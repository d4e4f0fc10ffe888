"""The file of watch sessions.

Goal: a save is there as a whole or not at all, and its cost depends on the size of the change; damage is detected and
loses no record, and the tools that check a data directory support the file. Method: round trips, a crash or an error
at every disk call, every flipped bit; then a shard with such a file is verified and repaired.
"""

from __future__ import annotations

import errno
import logging
import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import length
from tests.support.damaged_shard import CONFIG, judge, rich
from tests.support.engine_harness import file_bytes, overwrite
from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.storage.files import TEMP_SUFFIX, WATCH_MAGIC, header, with_digest, xxh
from topics.engine.storage.watch_file import (
    ENTRY_BYTES,
    MARK,
    START_BYTES,
    WatchEntry,
    append,
    read_entries,
    write_base,
)
from topics.engine.tools.inspect.files import inspect
from topics.engine.tools.repair import CannotRepair
from topics.link.watch import CreateSession, EpochChange, FeedOptions, OpenSession, SaveSession, SessionSpec
from workers.watch import session_file
from workers.watch.feeds import GroupRow
from workers.watch.session_file import WatchFile, WatchRows
from workers.watch.sessions import CursorUndo, SessionRow, Sessions

DIR = CONFIG.shard_dir
PATH = f"{DIR}/watch"
T0 = 1_000_000
FRONT = b"front"

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
undos = st.builds(CursorUndo, numbers, numbers, st.dictionaries(names, st.none() | numbers, max_size=3))
rows = st.builds(
    SessionRow,
    names,
    st.binary(max_size=32),
    specs,
    st.dictionaries(names, numbers, max_size=5),
    numbers,
    numbers,
    st.booleans(),
    st.lists(names, max_size=3, unique=True).map(sorted),
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


def shard_disk(seed: int = 1) -> SimDisk:
    disk = SimDisk(seed)
    disk.make_dir(DIR)
    disk.sync_all()
    return disk


_CONTENT = msgspec.msgpack.Decoder(dict[str, SessionRow])


class Table:
    """Sessions and their file, as a worker has them."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.file = WatchFile(disk, DIR)
        self.sessions = Sessions(0)
        self.groups: dict[tuple[str, str], GroupRow] = {}
        self.saves: dict[str, int] = {}

    def create(self, wid: str, names: int = 1, bytes_of_patterns: int = 0) -> None:
        spec = SessionSpec(
            FeedOptions(), 15_000, [], ["p" * bytes_of_patterns] if bytes_of_patterns else ["t.>"]
        )
        self.sessions.create(CreateSession(wid, b"", spec, {f"t.{i}": 0 for i in range(names)}), T0)
        self.saves.pop(wid, None)

    def move(self, wid: str, topic: str = "t.0", cursor: int = 1) -> None:
        if wid not in self.saves:
            self.saves[wid] = self.sessions.open(FRONT, OpenSession(wid, b"", 1), T0).save  # type: ignore[union-attr]
        self.saves[wid] += 1
        change = {topic: EpochChange(f"1.{cursor}")} if cursor % 3 == 0 else {}
        request = SaveSession(wid, 1, self.saves[wid], {topic: cursor}, epochs=change)
        assert self.sessions.save(FRONT, request, T0)

    def save(self, *, limit: int = 1000, ended_groups: list[tuple[str, str]] | None = None) -> None:
        taken = self.sessions.take(limit)
        groups = list(self.groups.values())
        if self.file.wants_all:
            self.file.write(self.sessions.rows(), self.sessions.changes(), groups)
        else:
            rows, changes = [list(map(msgspec.Raw, some)) for some in (taken.rows, taken.changes)]
            entry = WatchEntry(
                rows, session_file.group_rows(groups), changes, taken.ended, ended_groups or []
            )
            self.file.append(entry)

    def content(self) -> dict[str, SessionRow]:
        rows = {wid: session.row(wid) for wid, session in self.sessions._sessions.items()}
        return _CONTENT.decode(msgspec.msgpack.encode(rows))  # a copy


def stored(disk: SimDisk) -> dict[str, SessionRow]:
    found = session_file.read(disk, DIR)
    return {row.wid: row for row in found.sessions} if found is not None else {}


# ---- round trips


@given(st.lists(rows, max_size=5, unique_by=lambda row: row.wid), st.lists(groups, max_size=5))
def test_stored_sessions_are_read_back(sessions: list[SessionRow], group_rows: list[GroupRow]) -> None:
    disk = shard_disk()
    session_file.write(disk, DIR, WatchRows(sessions, group_rows))
    last = {(group[0], group[2]): group for group in group_rows}
    assert session_file.read(disk, DIR) == WatchRows(sessions, list(last.values()))


@given(st.binary(max_size=100), st.integers(0, 2))
def test_noise_is_refused(noise: bytes, framed: int) -> None:
    disk = shard_disk()
    data = (noise, with_digest(WATCH_MAGIC, b"\xc1" + noise), header(WATCH_MAGIC, 2) + noise)[framed]
    overwrite(disk, PATH, data)
    with pytest.raises((Corrupt, UnsupportedFormat)):
        list(read_entries(disk, PATH))


def test_stored_sessions_survive_a_power_cut() -> None:
    disk = shard_disk()
    assert session_file.read(disk, DIR) is None
    for n in (3, 1, 0):
        session_file.write(disk, DIR, content(n))
        disk.crash()
        assert session_file.read(disk, DIR) == content(n)
    assert disk.list(DIR) == ["watch"]


def test_a_file_of_more_rows_than_fit_into_one_entry_is_read_back() -> None:
    disk = shard_disk()
    many = WatchRows(
        [
            SessionRow(f"w{i}", b"", SessionSpec(FeedOptions(), 1, ["n" * 200_000]), {}, 1, 0, False, [], [])
            for i in range(20)
        ],
        [(f"t{i}", i, "g", i) for i in range(2500)],
    )
    session_file.write(disk, DIR, many)
    assert len(list(read_entries(disk, PATH))) > 5
    assert session_file.read(disk, DIR) == many


def test_a_file_of_version_1_is_read() -> None:
    disk = shard_disk()
    overwrite(disk, PATH, bytes.fromhex(VERSION_1))
    spec = SessionSpec(FeedOptions(nodes=("n",)), 15_000, ["orders"], ["a.>"], "crew", True)
    undo = CursorUndo(3, 2, {"orders": 6, "a.1": None})
    told = EpochChange("1.0", "0.9", 1, 5)
    session = SessionRow(
        "wid_1", b"key", spec, {"orders": 7}, 3, 9, True, ["a.1"], [undo], {"orders": "1.0"}, {"orders": told}
    )
    assert session_file.read(disk, DIR) == WatchRows([session], [("orders", 1024, "crew", 5)])
    assert inspect(disk, PATH).facts == {"sessions": 1, "groups": 1}
    for bit in range(8):  # a damaged version is not a later version
        disk.flip_bit(PATH, 8, bit)
        with pytest.raises(Corrupt):
            list(read_entries(disk, PATH))
        disk.flip_bit(PATH, 8, bit)


VERSION_1 = (
    "5450435357434800010000000000000092919ba57769645f31c4036b6579969791a16ecd0100ce00040000c3c3c2c2cd3a9891a66f7264657273"
    "91a3612e3ea463726577c381a66f7264657273070309c391a3612e319193030282a66f726465727306a3612e31c081a66f7264657273a3312e30"
    "81a66f726465727394a3312e30a3302e3901059194a66f7264657273cd0400a463726577054c9bbd2a9d3aa3a7"
)


def test_files_of_version_2_are_read() -> None:
    """Written by the first program with this version: a base of two sessions and a group, and an appended change."""
    disk = shard_disk()
    overwrite(disk, PATH, bytes.fromhex(VERSION_2))
    found = session_file.read(disk, DIR)
    assert found is not None
    assert [(row.wid, row.cursors, row.save) for row in found.sessions] == [
        ("v", {"t.0": 0}, 0),
        ("w", {"t.0": 3}, 1),
    ]
    assert found.sessions[1].epochs == {"t.0": "1.3"}
    assert found.groups == [("orders", 1024, "crew", 6)]
    assert [offset for offset, _, _ in read_entries(disk, PATH)] == OFFSETS_2


VERSION_2 = (
    "54504353574348000200000000000000f4cb3cc84e64cc27cd00000000000000ea2aeb521d25ded8c17763685e000000388c8cb82f9b80b3f8ee"
    "6e4ea2bacdc695929ba176c400969790cd0100ce00040000c3c3c2c2cd3a989091a3742e3ec0c281a3742e30000000c2909080809ba177c40096"
    "9790cd0100ce00040000c3c3c2c2cd3a989091a3742e3ec0c281a3742e30000000c29090808090909090c177636817000000969395fd1e425093"
    "a6a9dee20f4dde3995909194a66f7264657273cd0400a46372657705909090c1776368300000008fce72e8e19a437a7b04047e16c7daa2959091"
    "94a66f7264657273cd0400a463726577069195a17701c291920181a3742e300381a3742e3092a3312e33c09090"
)
OFFSETS_2 = [40, 158, 205]


# ---- the cost of a save


def test_a_save_appends_what_has_changed_and_no_more() -> None:
    """A session of 60 kB whose cursor moves costs as much as one of 60 bytes."""
    disk = shard_disk()
    table = Table(disk)
    for n in range(100):
        table.create(f"w{n}", bytes_of_patterns=60_000)
    table.save()
    size = len(file_bytes(disk, PATH))
    assert size > 6_000_000
    for n in range(10):
        table.move(f"w{n}", cursor=n + 1)
    disk.trace = []
    table.save()
    assert [call.split()[0] for call in disk.trace] == ["open", "write", "sync", "close"]
    assert len(file_bytes(disk, PATH)) - size < 10 * 60
    assert stored(disk) == table.content()


def test_a_large_session_costs_what_moved_in_it() -> None:
    disk = shard_disk()
    table = Table(disk)
    table.create("w", names=2000)
    table.save()
    for n in range(1, 100):
        table.move("w", f"t.{n}", n)
        size = len(file_bytes(disk, PATH))
        table.save()
        assert len(file_bytes(disk, PATH)) - size < 120
    assert stored(disk) == table.content()


def test_the_file_is_written_anew_when_what_was_appended_outgrows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_file, "APPENDED_BYTES_MIN", 20_000)
    disk = shard_disk()
    table = Table(disk)
    for n in range(50):
        table.create(f"w{n}")
    sizes = []
    for turn in range(1, 60):
        for n in range(50):
            table.move(f"w{n}", cursor=turn)
        table.save()
        sizes.append(len(file_bytes(disk, PATH)))
    assert max(sizes) < 50_000
    assert any(later < earlier for earlier, later in pairwise(sizes))
    assert stored(disk) == table.content()


def test_pending_saves_to_a_stalled_disk_are_bounded() -> None:
    table = Table(shard_disk())
    table.create("w", names=100)
    table.save()
    for n in range(1, 10_000):
        table.move("w", f"t.{n % 100}", n)
    session = table.sessions._sessions["w"]
    assert session.saves is None
    taken = table.sessions.take(10)
    assert (len(taken.rows), taken.changes) == (1, [])
    assert len(taken.rows[0]) < 20_000


def test_rows_that_many_sessions_need_at_once_are_encoded_in_turns() -> None:
    disk = shard_disk()
    table = Table(disk)
    wids = [f"w{n}" for n in range(60)]
    for wid in wids:
        table.create(wid, bytes_of_patterns=60_000)
    table.save()
    for turn in range(1, 40):  # all of them have had many changes at the same time
        for wid in wids:
            table.move(wid, cursor=turn)
        before = table.sessions.rows()
        table.save()
        assert sum(old is not new for old, new in zip(before, table.sessions.rows(), strict=True)) < 20
        assert len(table.sessions.changes()) < 60 * 20
    for wid in wids:
        for turn in range(100):
            table.move(wid, f"t.{turn}", turn)
    sizes = []
    while table.sessions.is_dirty:
        table.save()
        sizes.append(len(table.sessions._changed))
    assert len(sizes) > 3
    assert stored(disk) == table.content()


@pytest.mark.parametrize("seed", range(20))
def test_random_saves_are_read_as_the_table_is(seed: int) -> None:
    """A save may take only a part of the table: the rest is as it was."""
    rng = random.Random(seed)
    disk = shard_disk(seed)
    table = Table(disk)
    for step in range(200):
        wid = f"w{rng.randrange(12)}"
        match rng.randrange(8):
            case 0:
                table.create(wid, names=rng.choice([1, 3, 80]))
            case 1 if wid in table.sessions._sessions:
                table.sessions._remove(wid)
                table.saves.pop(wid, None)
            case 2:
                key = ("t", f"g{rng.randrange(3)}")
                gone = [key] if table.groups.pop(key, None) else []
                table.save(ended_groups=gone)
            case 3:
                name = f"g{rng.randrange(3)}"
                table.groups["t", name] = ("t", 1, name, step)
                table.save(limit=rng.choice([2, 1000]))
            case _ if wid in table.sessions._sessions:
                table.move(wid, f"t.{rng.randrange(90)}", step)
        if rng.random() < 0.05:  # a worker restarts with the saved state
            while table.sessions.is_dirty:
                table.save()
            table.save()
            before = session_file.read(disk, DIR)
            assert before is not None
            again = Table(disk)
            again.sessions.load(before.sessions, T0)
            again.groups = table.groups
            table = again
    while table.sessions.is_dirty:
        table.save(limit=3)
    table.save()
    found = session_file.read(disk, DIR)
    assert found is not None
    replaced = {row.wid: msgspec.structs.replace(row, maybe_stale=False) for row in found.sessions}
    wanted = {wid: msgspec.structs.replace(row, maybe_stale=False) for wid, row in table.content().items()}
    assert replaced == wanted
    assert {(group[0], group[2]): group for group in found.groups} == table.groups


# ---- crashes and errors


def saved_twice(disk: SimDisk) -> tuple[Table, list[dict[str, SessionRow]]]:
    """A table with a base and an appended save."""
    table = Table(disk)
    for n in range(40):
        table.create(f"w{n}")
    table.save()
    contents = [table.content()]
    table.move("w1", cursor=5)
    table.save()
    return table, [*contents, table.content()]


@fault(
    "disk",
    "the power goes, or the worker dies, at any disk call while watch sessions are saved",
    "they are there as they were before or as they should be",
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "append"])
@pytest.mark.parametrize("power", [True, False], ids=["power", "kill"])
@pytest.mark.parametrize("seed", length.seeds(short=2, long=10))
def test_a_crash_at_any_call_leaves_the_old_or_the_new_content(seed: int, power: bool, whole: bool) -> None:
    for call in range(1, 100):
        disk = shard_disk(seed * 1000 + call)
        table, (_, old) = saved_twice(disk)
        for n in range(0, 40, 2):
            table.move(f"w{n}", cursor=7)
        table.sessions._remove("w3")
        table.create("new", names=60)
        if whole:
            table.file = WatchFile(disk, DIR)
        disk.crash_at(call, midway=True)
        try:
            table.save()
            finished = True
        except SimulatedCrash:
            finished = False
        if power:
            disk.crash()
        else:
            disk.kill()
        assert stored(disk) in ([table.content()] if finished else [old, table.content()])
        # Leftovers of the crash do not appear in the next save.
        again = Table(disk)
        again.create("only")
        again.save()
        again.move("only")
        again.save()
        disk.crash()
        assert stored(disk) == again.content()
        if finished:
            return
    raise AssertionError("never finished")


@fault(
    "disk",
    "a disk call fails while watch sessions are saved",
    "the old ones stay, and the next save has all",
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "append"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_leaves_the_old_or_the_new_content(error: int, whole: bool) -> None:
    for call in range(1, 100):
        disk = shard_disk(call)
        table, (_, old) = saved_twice(disk)
        if whole:
            table.file = WatchFile(disk, DIR)
        table.move("w2", cursor=9)
        disk.fail_at(call, error)
        try:
            table.save()
            return
        except OSError:
            pass
        assert stored(disk) in (old, table.content())
        table.move("w4", cursor=9)
        table.save()
        disk.crash()
        assert stored(disk) == table.content()
    raise AssertionError("never finished")


# ---- damage

LOST = "the shard starts with the sessions before the damage: the others are 404, and clients make new ones"


@fault("data directory", "any single bit of the file of watch sessions flips, or its end is lost", LOST)
def test_every_flipped_bit_and_every_lost_end_costs_only_what_comes_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = shard_disk()
    table = Table(disk)
    table.create("w")
    table.create("v")
    table.save()
    contents = [table.content()]
    for turn in (1, 2):
        table.move("w", cursor=turn)
        table.save()
        contents.append(table.content())
    offsets = [offset for offset, _, _ in read_entries(disk, PATH)]
    whole = file_bytes(disk, PATH)
    caplog.set_level(logging.WARNING, "topics.shard")

    def look(damaged_at: int, *, is_cut: bool) -> None:
        caplog.clear()
        found = stored(disk)
        entries = sum(offset <= damaged_at for offset in offsets)  # the last of these is damaged
        assert found == (contents[entries - 2] if entries >= 2 else {}), damaged_at
        # The end of an append may be left by a crash; anything else is damage.
        is_torn = entries == len(offsets) or (is_cut and entries >= 2)
        assert bool(caplog.records) == (not is_torn), damaged_at

    for offset in range(len(whole)):
        for bit in range(8):
            disk.flip_bit(PATH, offset, bit)
            look(offset, is_cut=False)
            disk.flip_bit(PATH, offset, bit)
    handle = disk.open(PATH)
    for size in reversed(range(len(whole))):
        disk.truncate(handle, size)
        if size not in offsets[1:]:
            look(size, is_cut=True)


def test_an_entry_of_an_earlier_file_or_of_another_place_does_not_count() -> None:
    disk = shard_disk()
    table, (base, _) = saved_twice(disk)
    (_, first, _), (offset, end, _) = read_entries(disk, PATH)
    entry = file_bytes(disk, PATH)[offset:end]
    overwrite(disk, PATH, file_bytes(disk, PATH) + entry)
    assert len(list(read_entries(disk, PATH))) == 2
    table.file = WatchFile(disk, DIR)  # the same rows, in another file
    table.file.write(table.sessions.rows(), [], [])
    overwrite(disk, PATH, file_bytes(disk, PATH)[:first] + entry)
    assert stored(disk) == base


def test_a_mark_in_what_a_crash_left_is_no_entry() -> None:
    disk = shard_disk()
    _, (_, new) = saved_twice(disk)
    overwrite(disk, PATH, file_bytes(disk, PATH) + b"torn" + MARK * 1000)
    assert stored(disk) == new
    assert "no complete entry" in inspect(disk, PATH).notes[0]


@pytest.mark.parametrize("torn", [0, 100, (1 << 20) - ENTRY_BYTES, (1 << 20) - 2, 1 << 20, 3_000_000])
def test_an_entry_behind_damage_is_found_however_far_it_is(torn: int) -> None:
    disk = shard_disk()
    table, _ = saved_twice(disk)
    *_, (_, end, _) = read_entries(disk, PATH)
    append(disk, PATH, table.file._salt, end + 1 + torn, WatchEntry())
    with pytest.raises(Corrupt, match=f"{PATH} at byte {end}"):
        list(read_entries(disk, PATH))


@fault("data directory", "the file of watch sessions cannot be read", LOST)
def test_a_file_that_cannot_be_read_is_lost_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    disk = shard_disk()
    session_file.write(disk, DIR, content(2))
    disk.fail_at(1, errno.EIO, of="read")
    assert session_file.read(disk, DIR) == WatchRows([], [])
    disk.flip_bit(PATH, START_BYTES + 40)
    assert session_file.read(disk, DIR) == WatchRows([], [])
    first, second = (record.getMessage() for record in caplog.records)
    assert "watch sessions are lost" in first
    assert f"{PATH} at byte {START_BYTES}" in second
    disk.fail_at(1, errno.EIO, of="read")
    with pytest.raises(OSError):
        session_file.read(disk, DIR, may_fail=False)


@pytest.mark.parametrize("payload", [b"", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({})])
def test_rows_that_make_no_sense_are_damage_though_the_digest_fits(payload: bytes) -> None:
    disk = shard_disk()
    overwrite(disk, PATH, with_digest(WATCH_MAGIC, payload))
    with pytest.raises(Corrupt, match=f"{PATH} at byte 16"):
        list(read_entries(disk, PATH))


@pytest.mark.parametrize(
    "entry",
    [
        WatchEntry(sessions=[msgspec.Raw(b"\x01")]),
        WatchEntry(groups=[msgspec.Raw(b"\x90")]),
        WatchEntry(changes=[msgspec.Raw(msgspec.msgpack.encode(["unknown", 0, False, [], {}]))]),
    ],
)
def test_rows_of_an_entry_that_make_no_sense_are_damage(
    entry: WatchEntry, caplog: pytest.LogCaptureFixture
) -> None:
    disk = shard_disk()
    write_base(disk, PATH, 1, [WatchEntry(), entry])
    assert session_file.read(disk, DIR) == WatchRows([], [])
    assert "the rows cannot be read" in caplog.text


def later_version() -> bytes:
    disk = shard_disk()
    session_file.write(disk, DIR, content(1))
    data = bytearray(file_bytes(disk, PATH))
    data[8] = 9
    data[START_BYTES - 8 : START_BYTES] = xxh(bytes(data[: START_BYTES - 8]))
    return bytes(data)


def test_a_later_version_is_refused_by_name_and_not_written_over() -> None:
    disk = shard_disk()
    overwrite(disk, PATH, later_version())
    with pytest.raises(UnsupportedFormat, match=f"{PATH} has format version 9"):
        session_file.read(disk, DIR)


# ---- verify and repair


def test_verify_and_a_start_know_the_file() -> None:
    d = rich(clean=False)
    session_file.write(d.disk, DIR, content(3))
    assert d.verify().findings == []
    h = d.open()
    judge(h, d.rows)
    h.close()
    assert session_file.read(d.disk, DIR) == content(3)
    assert d.verify().findings == []


def test_a_partial_write_left_by_a_crash_is_harmless() -> None:
    d = rich(clean=False)
    overwrite(d.disk, PATH + TEMP_SUFFIX, b"half")
    assert [(finding.kind, finding.path) for finding in d.verify().findings] == [
        ("extra", PATH + TEMP_SUFFIX)
    ]
    h = d.open()
    judge(h, d.rows)
    h.close()
    session_file.write(d.disk, DIR, content(3))
    assert d.verify().findings == []


@fault(
    "verify",
    "the file of watch sessions is damaged",
    "verify names it as harmless to records; a repair puts it into the quarantine and touches nothing else",
)
def test_damage_is_named_and_goes_to_the_quarantine() -> None:
    d = rich(clean=False)
    session_file.write(d.disk, DIR, content(3))
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
        session_file.write(d.disk, DIR, content(3))
        if damaged:
            d.flip(PATH, 50)
        d.flip(next(path for path in d.disk.paths() if path.endswith("400/seg-0000000000000001-0.idx")), 20)
        d.repair()
        assert d.verify().findings == []
        assert (session_file.read(d.disk, DIR) is None) == damaged


def test_verify_refuses_a_later_version_and_a_repair_changes_nothing() -> None:
    d = rich(clean=False)
    overwrite(d.disk, PATH, later_version())
    before = d.everything()
    assert [(finding.kind, finding.path) for finding in d.verify().findings] == [("unsupported", PATH)]
    with pytest.raises(CannotRepair):
        d.repair()
    assert d.everything() == before
