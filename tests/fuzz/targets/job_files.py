"""Files that server and Spark jobs exchange: manifests, dead rows, pins, plans, sidecars, staged transactions.

An input names a kind and gives new contents or an edit of valid ones; with an odd second byte the digest is corrected,
so that the contents behind it are parsed as well. Each reader accepts the file or refuses it with a documented error, and what it accepts has
the structure that its users rely on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from tests.fuzz.mutate import Choices
from tests.fuzz.runner import Target
from tests.fuzz.targets.files import _edited, _put, check_inspection
from tests.support.sim_disk import SimDisk
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.commands.merges import MergeParameters
from topics.engine.commands.topics import Records
from topics.engine.storage.files import HEADER_BYTES, read_file, xxh
from topics.engine.storage.manifest import (
    Manifest,
    Pin,
    RetiredSegment,
    Segment,
    decode_current,
    decode_dead,
    decode_manifest,
    decode_pin,
    encode_current,
    encode_dead,
    encode_manifest,
    encode_pin,
)
from topics.engine.storage.merge_plan_file import (
    FailedSidecar,
    PlanFile,
    PlanGroup,
    PlanInput,
    decode_plan,
    decode_sidecar,
    encode_plan,
)
from topics.engine.storage.segments import segment_name
from topics.engine.storage.transaction_file import (
    ChunkHead,
    encode_chunk,
    encode_decision,
    file_name,
    read_chunks,
    read_decision,
    read_staged,
    write_entries,
)

_FOLDER = "topics/0000000000000400"
_STAGING = "staging/plans/00b17d0922b690cb"


def _segment(first_seq: int, rows: int) -> Segment:
    name = segment_name(first_seq, 1)
    return Segment(name, first_seq, 1, rows, rows - 1, 4096, 40, 16 + 32 * rows, 0, 0, 0, 5, 9, "0f" * 8)


_SEGMENTS = [_segment(1, 10), _segment(11, 20)]
_MANIFEST = Manifest(
    number=3, topic="orders", topic_id="0000000000000400", written_at_ms=9, delete_epoch=7, earliest_seq=1,
    cold_next_seq=31, head_seq=40, ttl_ms=0, segments=_SEGMENTS, losses=[(4, 5, "corrupt")],
    retired=[RetiredSegment("seg-0000000000000001-0", 8, "00b17d0922b690cb")], plans=["00b17d0922b690cb"],
)  # fmt: skip
_INPUT = PlanInput(**{name: getattr(_SEGMENTS[0], name) for name in Segment.__struct_fields__}, dead=None)
_PLAN = PlanFile(
    topic="orders", topic_id="0000000000000400", plan_id="00b17d0922b690cb", delete_epoch=7, created_at_ms=9,
    staging=_STAGING, parameters=MergeParameters(), groups=[PlanGroup(0, 1, 11, 2, "00" * 8, "0f" * 8, [_INPUT])],
)  # fmt: skip
_SIDECAR = (
    b'{"group":0,"attempt":"a-1","rows":10,"live":9,"data_bytes":400,"idx_bytes":336,"dict_bytes":0,"tag_names":0,'
    b'"node_names":0,"ts_min":5,"ts_max":9,"sum_digest":"0f0f0f0f0f0f0f0f"}'
)
_TXN = f"{_FOLDER}/{file_name(7, 3)}"


def _staged() -> bytes:
    disk = SimDisk(1)
    _put(disk, _TXN, b"")
    chunk = encode_chunk(ChunkHead("0-17", 0, 2, 20, 12), Records([b'{"a":1}', b"2"]))
    order = [(HEADER_BYTES, len(chunk), 2, 20)]
    write_entries(disk, _TXN, HEADER_BYTES, [chunk, encode_decision(order)], sync=False)
    return read_file(disk, _TXN)


# -- readers -----------------------------------------------------------------------------------------------


def _read_manifest(disk: SimDisk, path: str, data: bytes) -> None:
    found = decode_manifest(path, data)
    ends = [0, *(segment.next_seq for segment in found.segments)]
    assert all(segment.first_seq >= end for segment, end in zip(found.segments, ends))
    assert decode_manifest(path, encode_manifest(found)) == found


def _read_dead(disk: SimDisk, path: str, data: bytes) -> None:
    rows = {segment.first_seq: segment.rows for segment in _SEGMENTS}
    assert all(len(mask) == rows[seq] for seq, mask in decode_dead(path, data, _SEGMENTS).items())


def _read_sidecar(disk: SimDisk, path: str, data: bytes) -> None:
    try:
        found = decode_sidecar(path, data, 0)
    except ValueError:
        return
    assert found.group == 0
    assert isinstance(found, FailedSidecar) or "/" not in found.attempt


def _read_txn(disk: SimDisk, path: str, data: bytes) -> None:
    for entry in read_staged(disk, path):
        assert entry.offset + entry.bytes <= len(data)
        if entry.chunk is None:
            read_decision(disk, path, entry.offset)
        else:
            (records,) = read_chunks(disk, path, [(entry.offset, entry.bytes, entry.chunk.records, 0)])
            assert records is None or len(records.payloads) == entry.chunk.records


_KINDS: tuple[tuple[str, bytes, Callable[[SimDisk, str, bytes], object]], ...] = (
    (f"{_FOLDER}/MANIFEST-3", encode_manifest(_MANIFEST), _read_manifest),
    (f"{_FOLDER}/DEAD-3", encode_dead({1: np.arange(10) % 3 == 0, 11: np.arange(20) > 5}), _read_dead),
    (f"{_FOLDER}/CURRENT", encode_current(3), lambda disk, path, data: decode_current(path, data)),
    (f"{_FOLDER}/PIN-00000000000000aa", encode_pin(Pin(3, 9)), lambda disk, path, data: decode_pin(path, data)),
    (f"{_STAGING}/plan.json", encode_plan(_PLAN), lambda disk, path, data: decode_plan(path, data)),
    (f"{_STAGING}/group-0.json", _SIDECAR, _read_sidecar),
    (_TXN, _staged(), _read_txn),
)  # fmt: skip


def run(data: bytes) -> None:
    choices = Choices(data)
    path, good, read = _KINDS[choices.number(len(_KINDS))]
    how = choices.byte()
    changed = choices.rest() if how & 2 else _edited(good, choices)
    if how & 1:
        changed = _agreeing(path, changed)
    disk = SimDisk(1)
    _put(disk, path, changed)
    try:
        read(disk, path, changed)
    except (Corrupt, UnsupportedFormat):
        pass
    check_inspection(disk, path, None)


def _agreeing(path: str, data: bytes) -> bytes:
    if "MANIFEST" in path:
        line = data.partition(b"\n")[0]
        return line + b"\n" + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"
    return data[:-8] + xxh(data[:-8]) if "DEAD" in path and len(data) > 8 else data


def seeds() -> list[bytes]:
    made = []
    for number, (_, good, _) in enumerate(_KINDS):
        made += [bytes([number, fixed]) + b"\0\x18\x02\xff\xff\0" for fixed in (0, 1)]
        made += [bytes([number, 2 | fixed]) + good for fixed in (0, 1)]
    return made


TOKENS = (
    b"\xff\xff\xff\xff",
    b"null",
    b"-1",
    b"1e99",
    b'"\xff"',
    b"[]",
    b"{}",
    b"\n",
    b"9" * 25,
    b"\\ud800",
    b"../x",
)
TARGET = Target("job_files", run, seeds, TOKENS, rounds=4000)
