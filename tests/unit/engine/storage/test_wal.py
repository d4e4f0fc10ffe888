"""Goal: scanning the log returns what was written, where it ends, and what is damaged; it never guesses.

Method: files are made by `Wal` on the simulated disk, or byte by byte, and passed to `scan`. One test decodes an
envelope with the offsets of docs/decisions/0001. Damage is placed by Hypothesis or exhaustively.
"""

from __future__ import annotations

import errno
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from tests.support.faults import fault
from tests.support.sim_disk import SimDisk
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.storage import frames
from topics.engine.storage import wal as wal_module
from topics.engine.storage.control import WalStart
from topics.engine.storage.files import read_file
from topics.engine.storage.frames import decode_columns, encode_control, frame_is_valid
from topics.engine.storage.wal import (
    ENVELOPE_BYTES,
    FILE_HEADER_BYTES,
    Envelope,
    ScannedFile,
    Wal,
    WalFile,
    encode_envelope,
    file_header,
    file_name,
    file_number,
    scan,
)

DIR = "shard/wal"
SALT = 0x1122334455667788
CAPACITY = 4096


def new_wal(disk: SimDisk) -> Wal:
    disk.make_dir(DIR)
    return Wal(disk, DIR, shard=3, file_bytes=CAPACITY)


def begin(wal: Wal, ts: int = 5) -> WalFile:
    file = wal.make_file(wal.take_number(), CAPACITY)
    wal.begin_file(file, ts)
    return file


def scan_path(disk: SimDisk, file: WalFile) -> ScannedFile:
    found = scan(file.path, file.number, read_file(disk, file.path))
    assert found is not None
    return found


def bodies(found: ScannedFile) -> list[bytes]:
    return [found.data[envelope.start : envelope.end] for envelope in found.envelopes]


def build(
    contents: list[bytes], *, number: int = 1, salt: int = SALT, rest: int = 256
) -> tuple[bytes, list[int]]:
    """A file of these envelopes, padded with zeros, and where each envelope begins."""
    data = file_header(shard=0, number=number, salt=salt)
    starts = []
    for i, body in enumerate(contents):
        starts.append(len(data))
        data += encode_envelope(salt, i + 1, i, 0, body)
        data += bytes(-len(data) % 8)
    return data + bytes(rest), starts


def changed(data: bytes, at: int, replacement: bytes) -> bytes:
    return data[:at] + replacement + data[at + len(replacement) :]


def must_scan(data: bytes, number: int = 1) -> ScannedFile:
    found = scan("w", number, data)
    assert found is not None
    return found


# -- layout ------------------------------------------------------------------------------------------------


def test_the_file_header_lies_as_the_document_says() -> None:
    head = file_header(shard=3, number=9, salt=SALT, capacity=4096)
    assert len(head) == FILE_HEADER_BYTES == 64
    assert head[:8] == b"TPCSWAL\0"
    assert struct.unpack("<IIQQQ", head[8:40]) == (1, 3, 9, SALT, 4096)
    assert head[40:56] == bytes(16)
    assert head[56:] == xxh3_64_digest(head[:56])


def test_an_envelope_lies_as_the_document_says() -> None:
    data = encode_envelope(SALT, 7, 6, 5, b"frames here")
    assert data[:4] == b"ENV1"
    assert struct.unpack("<I", data[4:8]) == (11,)
    assert struct.unpack("<QQQQ", data[8:40]) == (SALT, 7, 6, 5)
    assert data[40:48] == xxh3_64_digest(b"frames here", xxh3_64_intdigest(data[:40]))
    assert data[48:] == b"frames here"
    assert ENVELOPE_BYTES == 48


def test_envelopes_of_a_file_are_aligned_to_eight_bytes() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    file = begin(wal)
    for length in range(1, 20):
        offset = wal.next_frame_offset
        wal.append(bytes([length]) * length)
        assert offset % 8 == 0
        assert disk.read(file.handle, offset, length) == bytes([length]) * length
        assert disk.read(file.handle, offset - ENVELOPE_BYTES, 4) == b"ENV1"


@settings(deadline=None)
@given(st.integers(0, 10**16 - 1))
def test_a_file_name_holds_its_number(number: int) -> None:
    assert file_number(file_name(number)) == number


def test_file_names_sort_as_their_numbers_and_others_are_not_ours() -> None:
    names = [file_name(number) for number in (1, 9, 10, 99, 100, 12345)]
    assert names == sorted(names)
    assert names[0] == "wal-0000000000000001.log"
    for name in ("wal-.log", "wal-1.log.tmp", "wal-1x.log", "snap-1", "wal-1", "1.log", "wal-+1.log", ""):
        assert file_number(name) is None, name


# -- scanning ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8), st.integers(0, 200))
def test_a_scan_finds_all_that_was_written(contents: list[bytes], rest: int) -> None:
    data, starts = build(contents, rest=rest)
    found = must_scan(data)
    assert bodies(found) == contents
    assert found.bad_at == []
    assert [(e.lsn, e.prev_lsn, e.synced_lsn) for e in found.envelopes] == [
        (i + 1, i, 0) for i in range(len(contents))
    ]
    assert [e.start - ENVELOPE_BYTES for e in found.envelopes] == starts
    assert [e.digest for e in found.envelopes] == [data[at + 40 : at + 48] for at in starts]
    assert (found.salt, found.number, found.path) == (SALT, 1, "w")


def test_a_scan_finds_what_the_wal_writes() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    file = begin(wal)
    written = [b"a" * 10, b"b" * 33, b"c" * 8]
    lsns = [wal.append(body) for body in written]
    assert lsns == [2, 3, 4]
    found = scan_path(disk, file)
    assert bodies(found)[1:] == written
    assert found.bad_at == []
    assert found.salt == file.salt
    assert [e.lsn for e in found.envelopes] == [1, *lsns]
    assert (file.first_lsn, file.last_lsn, wal.last_lsn) == (1, 4, 4)
    assert wal.last_digest == found.envelopes[-1].digest


def test_an_envelope_says_what_was_synced_when_it_was_written() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    file = begin(wal)
    wal.append(b"one")
    wal.synced_lsn = 2
    wal.append(b"two")
    assert [e.synced_lsn for e in scan_path(disk, file).envelopes] == [0, 0, 2]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4), st.data())
def test_a_torn_tail_ends_the_log_before_it(contents: list[bytes], data: st.DataObject) -> None:
    content, starts = build(contents, rest=256)
    length = ENVELOPE_BYTES + len(contents[-1])
    kept = data.draw(st.integers(0, length - 1))
    torn = content[: starts[-1] + kept] + bytes(len(content) - starts[-1] - kept)
    found = must_scan(torn)
    if torn == content:
        return  # the torn part was zeros: nothing is missing
    assert bodies(found) == contents[:-1]
    # Only zeros are left of it: it looks like a rest that was never written.
    assert found.bad_at == ([starts[-1]] if any(torn[starts[-1] :]) else [])


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4), st.data())
def test_a_file_cut_short_is_scanned_up_to_the_cut(contents: list[bytes], data: st.DataObject) -> None:
    content, starts = build(contents, rest=0)
    cut = data.draw(st.integers(FILE_HEADER_BYTES, len(content)))
    found = must_scan(content[:cut])
    whole = [
        body for at, body in zip(starts, contents, strict=True) if at + ENVELOPE_BYTES + len(body) <= cut
    ]
    assert bodies(found) == whole


@settings(deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=60), min_size=2, max_size=5),
    st.data(),
    st.integers(1, 255),
)
def test_a_bad_envelope_is_noted_and_the_ones_behind_it_are_found(
    contents: list[bytes], data: st.DataObject, flip: int
) -> None:
    content, starts = build(contents)
    bad = data.draw(st.integers(0, len(contents) - 1))
    at = starts[bad] + data.draw(st.integers(0, ENVELOPE_BYTES + len(contents[bad]) - 1))
    found = must_scan(changed(content, at, bytes([content[at] ^ flip])))
    assert bodies(found) == contents[:bad] + contents[bad + 1 :]
    assert found.bad_at == [starts[bad]]
    assert [e.lsn for e in found.envelopes] == [i + 1 for i in range(len(contents)) if i != bad]


def test_several_bad_stretches_are_noted_one_by_one() -> None:
    content, starts = build([b"a" * 20, b"b" * 20, b"c" * 20, b"d" * 20, b"e" * 20])
    for i in (1, 3):
        content = changed(content, starts[i] + 50, b"!")
    found = must_scan(content)
    assert bodies(found) == [b"a" * 20, b"c" * 20, b"e" * 20]
    assert found.bad_at == [starts[1], starts[3]]


def test_an_envelope_that_became_zeros_is_noted_when_something_follows_it() -> None:
    content, starts = build([b"a" * 20, b"b" * 20, b"c" * 20])
    found = must_scan(changed(content, starts[1], bytes(starts[2] - starts[1])))
    assert bodies(found) == [b"a" * 20, b"c" * 20]
    assert found.bad_at == [starts[1]]


def test_an_envelope_is_found_at_any_aligned_place_behind_the_damage() -> None:
    content, starts = build([b"a" * 20, b"b" * 20])
    for noise in range(8, 200, 8):
        found = must_scan(content[: starts[1]] + b"\xee" * noise + content[starts[1] :])
        assert bodies(found) == [b"a" * 20, b"b" * 20]
        assert found.bad_at == [starts[1]]


def test_the_magic_inside_a_body_is_not_taken_for_an_envelope() -> None:
    content, starts = build([b"a", b"ENV1" * 30, b"z"])
    assert len(must_scan(content).envelopes) == 3
    found = must_scan(changed(content, starts[1] + 40, bytes(8)))
    assert bodies(found) == [b"a", b"z"]


@fault("log file", "a payload holds bytes that look like an entry of the log", "it is never taken for one")
def test_an_envelope_of_another_file_inside_a_body_is_not_taken_for_ours() -> None:
    """A client can choose the bytes of a record, but does not know the salt."""
    forged = bytes(8) + encode_envelope(SALT ^ 1, 99, 98, 98, b"forged")
    content, starts = build([b"a", forged, b"z"])
    found = must_scan(changed(content, starts[1] + 40, bytes(8)))
    assert bodies(found) == [b"a", b"z"]


def test_a_salt_of_another_file_ends_the_log() -> None:
    """A file system may reuse the blocks of an older log file: its envelopes are intact, but belong to that file."""
    mine, _ = build([b"mine"], rest=0)
    stale, starts = build([b"x" * len(b"mine"), b"older"], salt=SALT ^ 1)
    found = must_scan(mine + stale[len(mine) :])
    assert bodies(found) == [b"mine"]
    assert found.bad_at == [starts[1]]


def test_the_zero_filled_rest_is_not_damage() -> None:
    for rest in (0, 8, 40, 48, 56, 4096):
        found = must_scan(build([b"one", b"two"], rest=rest)[0])
        assert (len(found.envelopes), found.bad_at) == (2, [])
    assert must_scan(build([], rest=4096)[0]).bad_at == []


def test_noise_in_the_rest_is_noted() -> None:
    content, _ = build([b"one"], rest=4096)
    found = must_scan(content[:-5] + b"noise")
    assert bodies(found) == [b"one"]
    assert len(found.bad_at) == 1


def test_a_length_past_the_end_of_the_file_is_bad_and_not_an_error() -> None:
    content, starts = build([b"one", b"two"])
    found = must_scan(changed(content, starts[0] + 4, b"\xff\xff\xff\xff"))
    assert bodies(found) == [b"two"]
    assert found.bad_at == [starts[0]]


# -- headers -----------------------------------------------------------------------------------------------


def test_a_header_that_was_never_finished_means_a_file_that_was_never_used() -> None:
    head = file_header(shard=0, number=1, salt=SALT)
    for length in range(FILE_HEADER_BYTES):
        assert scan("w", 1, head[:length]) is None
        assert scan("w", 1, head[:length] + bytes(CAPACITY - length)) is None
    assert scan("w", 1, b"") is None
    assert scan("w", 1, bytes(CAPACITY)) is None
    assert scan("w", 1, b"\xa5" * 64 + bytes(CAPACITY)) is None


def test_a_corrupt_header_before_envelopes_is_corrupt_whichever_bit_it_is() -> None:
    content, _ = build([b"one", b"two"])
    for at in range(FILE_HEADER_BYTES):
        for bit in range(8):
            with pytest.raises(Corrupt, match=r"^some/wal at byte 0: ") as error:
                scan("some/wal", 1, changed(content, at, bytes([content[at] ^ 1 << bit])))
            assert error.value.path == "some/wal"


def test_a_corrupt_header_is_corrupt_also_when_the_first_envelope_is_bad_too() -> None:
    content, starts = build([b"one", b"two"])
    content = changed(changed(content, 9, b"\x07"), starts[0] + 50, b"!")
    with pytest.raises(Corrupt):
        scan("w", 1, content)


def header_with(*, magic: bytes = b"TPCSWAL\0", version: int = 1) -> bytes:
    head = struct.pack("<8sIIQQ24x", magic, version, 0, 1, SALT)
    return head + xxh3_64_digest(head)


@fault(
    "log file",
    "a log file that a newer version wrote",
    "refused by name as a file of another version; nothing is changed",
)
@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_an_unknown_version_is_refused_by_name(version: int) -> None:
    with pytest.raises(UnsupportedFormat, match=f"dir/{file_name(1)} has format version {version}") as error:
        scan(f"dir/{file_name(1)}", 1, header_with(version=version) + bytes(CAPACITY))
    assert (error.value.path, error.value.version) == (f"dir/{file_name(1)}", version)


def test_another_kind_of_file_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="not a log file"):
        scan("w", 1, header_with(magic=b"TPCSDAT\0") + bytes(CAPACITY))


def test_a_file_under_another_files_name_is_corrupt() -> None:
    content, _ = build([b"one"], number=4)
    assert must_scan(content, 4).number == 4
    with pytest.raises(Corrupt, match="number 4"):
        scan("w", 5, content)


def test_a_wrong_number_is_reported_where_it_lies() -> None:
    content, _ = build([b"one"], number=4)
    with pytest.raises(Corrupt) as error:
        scan("w", 5, content)
    at = error.value.offset
    assert struct.unpack("<Q", content[at : at + 8]) == (4,)


# -- the chain ---------------------------------------------------------------------------------------------


def start_of(disk: SimDisk, file: WalFile) -> tuple[WalStart, Envelope]:
    """The first frame of a file, and the file's last envelope."""
    found = scan_path(disk, file)
    body = bodies(found)[0]
    assert frame_is_valid(body)
    columns = decode_columns(body, [0])
    assert int(columns.headers["type"][0]) == frames.WAL_START
    return msgspec.msgpack.decode(columns.payload(0), type=WalStart), found.envelopes[-1]


def test_every_file_names_the_one_before_and_how_it_ended() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    first = begin(wal)
    wal.append(b"x" * 100)
    wal.append(b"y" * 100)
    second = begin(wal)
    wal.append(b"z")
    third = begin(wal)
    one, end_of_one = start_of(disk, first)
    two, end_of_two = start_of(disk, second)
    three, _ = start_of(disk, third)
    assert one == WalStart(1, 0, 0, bytes(8), disk.boot_id())
    assert two == WalStart(2, 1, 3, end_of_one.digest, disk.boot_id())
    assert three == WalStart(3, 2, 5, end_of_two.digest, disk.boot_id())
    assert [e.lsn for e in scan_path(disk, second).envelopes] == [4, 5]
    assert [e.prev_lsn for e in scan_path(disk, second).envelopes] == [3, 4]
    assert len({first.salt, second.salt, third.salt}) == 3


def test_the_boot_on_which_a_file_was_begun_is_in_it() -> None:
    disk = SimDisk(1)
    before = disk.boot_id()
    disk.crash()
    wal = new_wal(disk)
    start, _ = start_of(disk, begin(wal))
    assert start.boot_id == disk.boot_id() != before


def test_the_last_file_takes_the_envelopes() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    first, second = begin(wal), begin(wal)
    position = first.position
    assert wal.active is second
    wal.append(b"to the second")
    assert first.position == position
    assert wal.last_file_number == 2
    assert second.remaining == CAPACITY - second.position


def test_an_envelope_fills_its_file_to_the_last_byte_and_not_beyond() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    file = begin(wal)
    with pytest.raises(AssertionError):
        wal.append(bytes(file.remaining - ENVELOPE_BYTES + 1))
    body = b"x" * (file.remaining - ENVELOPE_BYTES)
    wal.append(body)
    assert file.remaining == 0
    found = scan_path(disk, file)
    assert (bodies(found)[-1], found.bad_at) == (body, [])
    assert len(found.data) == CAPACITY


def test_a_failed_write_leaves_the_place_in_the_log_where_it_was() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    file = begin(wal)
    wal.begin_sync()
    before = (wal.last_lsn, wal.last_digest, wal.bytes_written, file.position, file.last_lsn)
    disk.fail_at(1, errno.EIO, of="write")
    with pytest.raises(OSError):
        wal.append(b"never")
    assert (wal.last_lsn, wal.last_digest, wal.bytes_written, file.position, file.last_lsn) == before
    assert wal.unsynced_files == []


# -- syncing and dropping ----------------------------------------------------------------------------------


def test_a_sync_takes_every_file_written_since_the_last_one_oldest_first() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    first = begin(wal)
    wal.append(b"a")
    second = begin(wal)
    wal.append(b"b")
    assert wal.begin_sync() == ([first, second], 4)
    assert wal.begin_sync() == ([], 4)
    wal.append(b"c")
    wal.append(b"d")
    assert wal.begin_sync() == ([second], 6)


def test_absorbed_files_go_and_the_active_one_stays() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    files = []
    for _ in range(3):
        files.append(begin(wal))
        wal.append(b"x")
    wal.begin_sync()
    assert [(file.first_lsn, file.last_lsn) for file in files] == [(1, 2), (3, 4), (5, 6)]
    assert wal.take_obsolete(1) == []
    assert wal.take_obsolete(3) == files[:1]
    assert wal.files == files[1:]
    assert wal.take_obsolete(3) == []
    assert wal.take_obsolete(10**9) == files[1:2]
    assert wal.files == files[2:]
    assert wal.active is files[2]
    assert wal.take_obsolete(10**9) == []


def test_a_file_that_is_still_to_be_synced_is_not_absorbed() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    first, second = begin(wal), begin(wal)
    assert wal.take_obsolete(10**9) == []
    assert wal.files == [first, second]
    wal.begin_sync()
    assert wal.take_obsolete(10**9) == [first]


def test_numbers_are_taken_once() -> None:
    wal = new_wal(SimDisk(1))
    assert [wal.take_number() for _ in range(3)] == [1, 2, 3]


# -- making files ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_a_made_file_is_there_and_zero_filled_after_a_power_cut(seed: int) -> None:
    disk = SimDisk(seed)
    wal = new_wal(disk)
    for directory in ("", "shard"):
        disk.sync_dir(directory)
    file = wal.make_file(1, CAPACITY)
    disk.crash()
    content = read_file(disk, file.path)
    head = file_header(shard=3, number=1, salt=file.salt, capacity=CAPACITY)
    assert content == head + bytes(CAPACITY - FILE_HEADER_BYTES)
    assert scan_path(disk, file).envelopes == []


def test_making_a_file_over_an_old_one_leaves_nothing_of_it() -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    handle = disk.open(f"{DIR}/{file_name(1)}", create=True)
    disk.write(handle, 0, b"\xee" * (2 * CAPACITY))
    file = wal.make_file(1, CAPACITY)
    assert read_file(disk, file.path)[FILE_HEADER_BYTES:] == bytes(CAPACITY - FILE_HEADER_BYTES)


@fault(
    "disk",
    "the disk becomes full while a log file is made",
    "the half-made file is removed and its space given back",
)
@pytest.mark.parametrize("capacity_bytes", [0, 10, 64, CAPACITY - 1])
def test_a_full_disk_gets_back_what_a_half_made_file_took(capacity_bytes: int) -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    disk.capacity_bytes = capacity_bytes
    with pytest.raises(OSError) as error:
        wal.make_file(1, CAPACITY)
    assert error.value.errno == errno.ENOSPC
    assert disk.paths() == []
    assert disk._handles == {}
    disk.capacity_bytes = CAPACITY
    wal.begin_file(wal.make_file(1, CAPACITY), 5)
    assert disk.paths() == [f"{DIR}/{file_name(1)}"]


@fault("disk", "any call fails while a log file is made", "no half-made file is left")
@pytest.mark.parametrize("call", ["truncate", "allocate", "write", "sync", "sync_dir"])
def test_whichever_call_fails_no_half_made_file_is_left(call: str) -> None:
    disk = SimDisk(1)
    wal = new_wal(disk)
    disk.fail_at(1, errno.EIO, of=call)
    with pytest.raises(OSError):
        wal.make_file(1, CAPACITY)
    assert disk.paths() == []
    assert disk._handles == {}
    assert wal.files == []


def test_a_start_frame_is_a_whole_frame() -> None:
    wal = new_wal(SimDisk(1))
    frame = wal.start_frame(8, 1234)
    start = WalStart(8, 0, 0, bytes(8), "boot-1")
    assert frame == encode_control(frames.WAL_START, 0, 1234, start)


# -- hostile payloads --------------------------------------------------------------------------------------


@fault(
    "log file",
    "the header of a log file is corrupted, whose records look like thousands of entries",
    "the start is refused and names the file, in bounded time; nothing is changed",
)
def test_the_search_for_envelopes_without_a_header_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them claims to extend to the end of the file: hashing all of them would be quadratic."""
    count, size = 20_000, 64
    hashed = 0

    def digest(data: bytes, seed: int = 0) -> bytes:
        nonlocal hashed
        hashed += len(data)
        return xxh3_64_digest(data, seed)

    monkeypatch.setattr(wal_module, "xxh3_64_digest", digest)
    fakes = [
        struct.pack("<4sIQQQQ", b"ENV1", (count - i) * size - 48, i, 1, 0, 0) + bytes(size - 40)
        for i in range(count)
    ]
    data = b"\xff" * FILE_HEADER_BYTES + b"".join(fakes)
    with pytest.raises(Corrupt):
        scan("w", 1, data)
    assert hashed < 10 * len(data)


def test_an_unfinished_header_with_text_behind_it_that_is_no_envelope() -> None:
    assert scan("w", 1, b"\xff" * FILE_HEADER_BYTES + b"ENV1" * 1000) is None
