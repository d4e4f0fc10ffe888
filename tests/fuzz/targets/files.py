"""The files of a data directory one by one: each reader refuses damage with a documented error, without huge allocations.

An input names a file of an image and gives its new contents or an edit of the old ones. With an odd second byte the
digest at the end of the file is corrected, so that the contents behind it are parsed as well. `topics inspect` must
show something of every one of them.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.images import images
from tests.fuzz.mutate import Choices
from tests.fuzz.runner import Target
from tests.support.engine_harness import META_DIR
from tests.support.sim_disk import SimDisk
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.cli.inspect_file import json_text, lines
from topics.engine.core.ports import Disk
from topics.engine.storage.delete_marks import read_deleted
from topics.engine.storage.files import HEADER_BYTES, xxh
from topics.engine.storage.frames import frame_is_valid
from topics.engine.storage.intents import intent_path, pending_intents, write_intent
from topics.engine.storage.sealing import meta_from_sum, read_sum
from topics.engine.storage.segments import SegmentMeta, parse_segment_name, read_dict, read_rows
from topics.engine.storage.snapshot import list_snapshots, read_snapshot
from topics.engine.storage.wal import file_number, scan
from topics.engine.tools.inspect.files import inspect
from topics.engine.upkeep.loading import index_of_records

_INTENT = intent_path(META_DIR, 1)
_KINDS = ("idx", "dict", "del", "sum", "snapshot", "intent", "log", "data")


def run(data: bytes) -> None:
    choices = Choices(data)
    kind = _KINDS[choices.number(len(_KINDS))]
    how = choices.byte()
    path, content = _good(kind, how >> 2)
    changed = choices.rest() if how & 2 else _edited(content, choices)
    if how & 1 and len(changed) > 8:
        changed = changed[:-8] + xxh(changed[:-8])
    disk = SimDisk(1)
    _put(disk, path, changed)
    try:
        _READERS[kind](disk, path)
    except (Corrupt, UnsupportedFormat):
        pass
    check_inspection(disk, path, 3 if how & 4 else None)


def check_inspection(disk: Disk, path: str, from_seq: int | None) -> None:
    """`topics inspect` must show any file, whatever is in it."""
    found = inspect(disk, path, records=2, from_seq=from_seq)
    assert found.sound == (not found.problems)
    assert json_text(found) and lines(found)


def _good(kind: str, number: int) -> tuple[str, bytes]:
    """One of the valid files of a kind."""
    if kind == "intent":
        disk = SimDisk(1)
        write_intent(disk, META_DIR, 1, [("a/b", 3, b"xyz"), ("c", 0, b"")])
        handle = disk.open(_INTENT)
        return _INTENT, disk.read(handle, 0, disk.size(handle))
    ending = {"snapshot": "snap-", "log": "wal-"}.get(kind, f".{kind}")
    found = [
        (path, content)
        for image in images()
        for path, content in image.files.items()
        if path.endswith(ending) or path.rpartition("/")[2].startswith(ending)
    ]
    return found[number % len(found)]


def _edited(content: bytes, choices: Choices) -> bytes:
    data = bytearray(content)
    while not choices.is_used_up:
        at = choices.number(len(data) + 1)
        new = choices.bytes(choices.number(9))
        data[at : at + len(new)] = new
        if choices.byte() == 255:
            del data[at:]
    return bytes(data)


def _put(disk: SimDisk, path: str, data: bytes) -> None:
    folder = path.rpartition("/")[0].split("/")
    for i in range(1, len(folder) + 1):
        disk.make_dir("/".join(folder[:i]))
    handle = disk.open(path, create=True)
    disk.write(handle, 0, data)
    disk.close(handle)


# -- readers -----------------------------------------------------------------------------------------------


def _segment(disk: SimDisk, path: str) -> tuple[str, SegmentMeta]:
    """As long as the file is: the lengths that a snapshot with this file would have."""
    folder, _, name = path.rpartition("/")
    parsed = parse_segment_name(name)
    assert parsed is not None
    handle = disk.open(path)
    size = disk.size(handle)
    return folder, SegmentMeta(parsed[0], parsed[1], max(0, size - 16) // 32, size, size, has_del=True)


def _read_idx(disk: SimDisk, path: str) -> None:
    folder, meta = _segment(disk, path)
    assert len(read_rows(disk, folder, meta)) == meta.rows


def _read_dict(disk: SimDisk, path: str) -> None:
    folder, meta = _segment(disk, path)
    for tags in range(4) if meta.dict_bytes else ():
        meta.tag_names, meta.node_names = tags, 1
        try:
            found, nodes, _ = read_dict(disk, folder, meta)
        except Corrupt:
            continue
        assert (len(found), len(nodes)) == (tags, 1)
        return


def _read_del(disk: SimDisk, path: str) -> None:
    folder, meta = _segment(disk, path)
    meta.rows = 4
    mask = read_deleted(disk, folder, meta)
    assert mask is not None and len(mask) == 4


def _read_sum(disk: SimDisk, path: str) -> None:
    folder, meta = _segment(disk, path)
    summary, _ = read_sum(disk, folder, meta.first_seq, meta.generation)
    assert (summary.first_seq, summary.generation) == (meta.first_seq, meta.generation)
    meta_from_sum(disk, folder, meta.first_seq, meta.generation)


def _read_snapshot(disk: SimDisk, path: str) -> None:
    for number in list_snapshots(disk, META_DIR):
        _, rows = read_snapshot(disk, META_DIR, number)
        assert all(isinstance(row, bytes) for row in rows)


def _read_intent(disk: SimDisk, path: str) -> None:
    pending_intents(disk, META_DIR)


def _read_log(disk: SimDisk, path: str) -> None:
    number = file_number(path.rpartition("/")[2])
    assert number is not None
    handle = disk.open(path)
    scan(path, number, disk.read(handle, 0, disk.size(handle)))


def _read_data(disk: SimDisk, path: str) -> None:
    """As when a damaged index is rebuilt from the records."""
    folder, meta = _segment(disk, path)
    meta.rows = 4
    handle = disk.open(path)
    data = disk.read(handle, 0, disk.size(handle))
    content = index_of_records(path, data, HEADER_BYTES, meta, None, int(folder.rpartition("/")[2], 16))
    assert len(content.rows) == 4
    for row in content.rows[content.rows["length"] > 0]:
        at, length = int(row["offset"]), int(row["length"])
        assert frame_is_valid(data[at : at + length]), "a row points to an invalid frame"


_READERS: dict[str, Callable[[SimDisk, str], None]] = {
    "idx": _read_idx,
    "dict": _read_dict,
    "del": _read_del,
    "sum": _read_sum,
    "snapshot": _read_snapshot,
    "intent": _read_intent,
    "log": _read_log,
    "data": _read_data,
}


def seeds() -> list[bytes]:
    made = []
    for number, kind in enumerate(_KINDS):
        for which in range(3):
            made += [bytes([number, which << 2 | fixed]) + b"\0\x18\x02\xff\xff\0" for fixed in (0, 1)]
            made += [
                bytes([number, which << 2 | 2 | fixed]) + _good(kind, which)[1][:6000] for fixed in (0, 1)
            ]
    return made


TOKENS = (
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xcf\x10\0\0\0\0\0\0\0",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x01\0\0\0",
)
TARGET = Target("files", run, seeds, TOKENS, rounds=6000)
