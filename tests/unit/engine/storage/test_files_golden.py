"""Goal: files of version 1 stay readable, and version 1 is still written byte for byte.

Method: `golden/` has one small file of every kind, written once. The tests read them with the current code, compare
the result with literal contents, and check that encoding the same contents gives the same bytes.

**A later version must still read these files.** When a format changes, its version number goes up, the new version
gets files of its own, and the reading tests stay as they are. Only the encoding tests of the old version are removed:
it is not written any more (`READ_ONLY`). A reading test that fails means that an upgrade would lose data. Fields that
were added at the end have their defaults when an old file is read.

`python -m tests.unit.engine.storage.test_files_golden --write` writes files that are missing and refuses to change
existing ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.sim_disk import SimDisk
from topics.api.config import ConsumerConfig, TopicConfig
from topics.api.errors import UnsupportedFormat
from topics.engine.commands.forwards import Forward
from topics.engine.commands.topics import Records
from topics.engine.core.topic_ids import pack_ids
from topics.engine.storage import frames
from topics.engine.storage.control import (
    Advanced,
    ConfigChanged,
    ConsumerStored,
    Copied,
    DeadLettersReceived,
    Decided,
    Decision,
    Deletion,
    Event,
    FailedGroup,
    InflowOpen,
    Merged,
    MergedGroup,
    MergeInput,
    Opened,
    OutflowOpen,
    TimeCeiling,
    TopicCreated,
    WalStart,
)
from topics.engine.storage.delete_marks import mark_deleted, read_deleted
from topics.engine.storage.files import read_file, xxh
from topics.engine.storage.frames import Columns, decode_columns, encode_appends, encode_control, frame_starts
from topics.engine.storage.intents import Patch, pending_intents, write_intent
from topics.engine.storage.sealing import meta_from_sum, read_sum, seal, verify
from topics.engine.storage.segments import (
    ROW,
    SegmentMeta,
    SegmentWriter,
    read_dict,
    read_rows,
)
from topics.engine.storage.snapshot import SnapshotWriter, list_snapshots, read_snapshot
from topics.engine.storage.transaction_file import (
    ChunkHead,
    encode_chunk,
    encode_decision,
    parse_name,
    read_chunks,
    read_decision,
    read_staged,
    write_entries,
)
from topics.engine.storage.wal import encode_envelope, file_header, file_name, file_number, scan
from topics.engine.topic.consumer import ConsumerRow, DeadLettersRow
from topics.engine.topic.flows import InflowRow, OutflowRow
from topics.engine.topic.merges import Merges
from topics.engine.topic.snapshot_row import ShardRow, TopicRow
from topics.engine.topic.transactions import OpenRow, Producer, TransactionsRow

GOLDEN = Path(__file__).parent / "golden"
TS = 1_700_000_000_000
TOPIC = 0x0A0B0C0D0E0F

# -- what is in the files ----------------------------------------------------------------------------------

CONFIG = TopicConfig(ttl_ms=60_000, cap_records=100, durability="fsync", dead_letter="dead", cap_per_tag=3)

# One write with every field that a record can have, one with none, one of raw bytes.
FULL = Records(
    payloads=[b'{"n":1}{"m":true}', '{"n":"zwei ✓"}'.encode()],
    tags=[b"orders.eu", None],
    nodes=[b"node-1", b"node-2"],
    meta_lens=[10, 0],
    ttls_ms=[0, 5000],
    sizes=[17, 99],
)
PLAIN = Records([b"[]", b"3"])
RAW = Records([b"A: 1\r\n\0\xff"], tags=[b"raw"], header_lens=[6], raw=True)
KEY = b"idempotency-key"

SALT = 0x1234_5678_9ABC_DEF0
WAL_NUMBER = 7
WAL_NAME = file_name(WAL_NUMBER)
WAL_BYTES = 2048

CONTROLS: list[tuple[int, object]] = [
    (frames.WAL_START, WalStart(WAL_NUMBER, 6, 41, bytes(range(8)), "boot-1")),
    (frames.TIME_CEILING, TimeCeiling(TS + 5000, TS, 123, "boot-1")),
    (frames.TOPIC_CREATE, TopicCreated("orders", CONFIG, 1024)),
    (frames.CONFIG, ConfigChanged(TopicConfig(), 2048, 5)),
    (frames.DELETE, Deletion([(1, 2), (4, 4)], True)),
    (frames.EVICT, [3, 2]),
    (frames.SEQ_CEILING, 4096),
    (frames.SEGMENT_SWAP, [1, 1, 3, 2]),
    (frames.SKIP, [6, 1000]),
    (frames.LOSS, [1006, 1010, "corrupt"]),
    (frames.ERASE_DONE, [[1, 2], [4, 4]]),
    (frames.TOPIC_DELETE, None),
]

# A log file that stores its length.
SIZED_NUMBER = 8
SIZED_NAME = file_name(SIZED_NUMBER)

SEGMENT = "seg-0000000000000001-0"
SEGMENT_FILES = [f"{SEGMENT}.{suffix}" for suffix in ("data", "idx", "dict", "sum", "del")]
CHAIN = bytes.fromhex("0011223344556677")
# offset, length, ts, flags, tag, node, size: the third record was deleted before the checkpoint.
SEGMENT_ROWS = [
    (16, 85, TS, 19, 1, 1, 17),
    (101, 86, TS, 18, 0, 2, 99),
    (0, 0, TS + 1, 0, 0, 0, 0),
    (187, 64, TS + 2, 25, 2, 0, 8),
]

SHARD_ROW = ShardRow(3, 41, 17, TS + 5000, TS, 123, "boot-1", 0)
SEGMENT_META = SegmentMeta(
    1,
    generation=0,
    rows=4,
    data_bytes=251,
    dict_bytes=96,
    tag_names=2,
    node_names=2,
    sealed=True,
    has_del=True,
    live=3,
    ts_min=TS,
    ts_max=TS + 2,
    link=bytes.fromhex("8899aabbccddeeff"),
)
TOPIC_ROWS = [
    TopicRow(
        id=TOPIC,
        name="orders",
        config=CONFIG,
        applied_lsn=41,
        head=5,
        first_seq=2,
        count=2,
        live_bytes=107,
        cap_lost=0,
        ttl_lost=1,
        losses=[(3, 3, "corrupt")],
        ceiling=1024,
        dedupe=[(KEY, (1, 2, TS))],
        segments=[SEGMENT_META],
        last_write_ts=TS + 2,
        ram_ranges=[(5, 5)],
        erasing=[[(1, 1)]],
        sum_chain=bytes.fromhex("8899aabbccddeeff"),
        may_expire=True,
    ),
    TopicRow(
        id=TOPIC + 1,
        name="empty",
        config=TopicConfig(),
        applied_lsn=40,
        head=0,
        first_seq=1,
        count=0,
        live_bytes=0,
        cap_lost=0,
        ttl_lost=0,
        losses=[],
        ceiling=0,
        dedupe=[],
        segments=[],
        last_write_ts=0,
        ram_ranges=[],
        erasing=[],
        sum_chain=bytes(8),
        may_expire=False,
    ),
]
SNAPSHOT = "snap-0000000000000003"

# Marks in blocks with digests, which the snapshot has, as it has those of an open index.
MARKS = "seg-0000000000000002-0.del"
MARKED_META = SegmentMeta(
    2,
    rows=9,
    data_bytes=251,
    dict_bytes=96,
    has_del=True,
    live=9,
    idx_digest=bytes.fromhex("0102030405060708"),
    dict_digest=bytes.fromhex("1112131415161718"),
    del_bytes=64,
    del_digest=bytes.fromhex("64e0a5790c01bee6"),
)
MARKED_SNAPSHOT = "snap-0000000000000004"
MARKED_SHARD_ROW = msgspec.structs.replace(SHARD_ROW, number=4)
MARKED_ROWS = [msgspec.structs.replace(TOPIC_ROWS[0], segments=[SEGMENT_META, MARKED_META])]
# A topic with a queue's own consumer and a named one, and dead letters that are being moved.
CONSUMER_CONFIG = ConsumerConfig(max_deliver=3, filter=(("Subject", "orders.*"),), dead_letter="dead")
CONSUMER_SNAPSHOT = "snap-0000000000000005"
CONSUMER_SHARD_ROW = msgspec.structs.replace(SHARD_ROW, number=5)
CONSUMER_ROWS = [
    msgspec.structs.replace(
        TOPIC_ROWS[1],
        consumers=[
            ConsumerRow("", ConsumerConfig(), 9, [(4, 3, 2, b"w-1", 77, 0)], [], 0, 0, [5, 1, 3, 0, 0]),
            ConsumerRow(
                "mail",
                CONSUMER_CONFIG,
                7,
                [(2, 1, 1, b"w-1", 78, TS + 30_000), (3, 0, 2, b"w-2", 79, 0), (5, 2, 1, b"", 0, TS + 9)],
                [1],
                TS,
                -1,
                [6, 1, 2, 1, 1],
                [(3, 2, "why")],
                [2],
            ),
        ],
        dead_letters=DeadLettersRow(3, [(2, "", 4, "dead", 2, "why")], [(1024, 8)], 1),
    )
]
# Changes of consumers, as logged.
CONSUMER_EVENTS: list[tuple[int, object]] = [
    (frames.CONSUMER_PUT, ConsumerStored("mail", CONSUMER_CONFIG, 7, [1], TS)),
    (frames.LEASE, Event("mail", 1, [2, 3], TS + 30_000, b"w-1", 78, [1, 2], 4, streamed=True)),
    (frames.LEASE, Event("", 6, [4], deliveries=[2], number=2, target="dead", reason="why")),
    (frames.LETTERS_TAKEN, DeadLettersReceived(1024, 8)),
    (frames.CONSUMER_DELETE, "mail"),
]
EVENTS_NUMBER = 9
EVENTS_NAME = file_name(EVENTS_NUMBER)
# Rules of the catalog, what a shard copies, and a topic that takes copies and has had its own epochs.
FORWARD = Forward(
    7, "o->a", "orders.>", "audit", False, True, (("Glob", "eu*"), ("Subject", "a.*")), True, True,
    "exactly_once", "active", True, False,
)  # fmt: skip
FORWARD_SNAPSHOT = "snap-0000000000000006"
FORWARD_SHARD_ROW = msgspec.structs.replace(
    SHARD_ROW, number=6, forwards=[FORWARD], forward_uid=9, outflows=[OutflowRow(FORWARD, [(1024, 2, 41)])]
)
FORWARD_ROWS = [
    msgspec.structs.replace(
        TOPIC_ROWS[1], inflows=[InflowRow(7, "o->a", 12, [(1024, 2, 50)])], epochs=[(1, 30), (3, 44)]
    )
]
FORWARD_EVENTS: list[tuple[int, object]] = [
    (frames.FORWARD_PUT, FORWARD),
    (frames.OUTFLOW_OPEN, OutflowOpen(FORWARD, [(1024, 2, 41)])),
    (frames.INFLOW_OPEN, InflowOpen(7, "o->a")),
    (frames.COPIED, Copied(7, 1024, 2, 50, 12)),
    (frames.EPOCH, 44),
    (frames.INFLOW_CLOSE, 7),
    (frames.OUTFLOW_CLOSE, 7),
    (frames.FORWARD_DELETE, 7),
]
FORWARD_EVENTS_NUMBER = 10
FORWARD_EVENTS_NAME = file_name(FORWARD_EVENTS_NUMBER)
# A shard that took over topics when the number of shards changed.
ADOPTING_SNAPSHOT = "snap-0000000000000020"
ADOPTING_SHARD_ROW = msgspec.structs.replace(
    FORWARD_SHARD_ROW, number=32, next_id=4098, first_id=4096, adopted=pack_ids([1024, 2049])
)
# A topic whose segments were merged, and the log entry of such a merge.
MERGED = Merged(
    "00b17d0922b690cb", 7, 3, 2, [MergedGroup(0, 1, 25, 4, 1479, 1285, 22)], [[MergeInput(1, 3, 424), MergeInput(5, 0, 424)]],
    [FailedGroup(1, "seg-0000000000000019-0", "a block does not agree with its digest")],
)  # fmt: skip
MERGED_SNAPSHOT = "snap-0000000000000021"
MERGED_SHARD_ROW = msgspec.structs.replace(ADOPTING_SHARD_ROW, number=33)
MERGED_ROWS = [msgspec.structs.replace(FORWARD_ROWS[0], merges=Merges().with_plan(MERGED, TS))]
MERGE_EVENTS: list[tuple[int, object]] = [(frames.SEGMENT_MERGE, MERGED)]
MERGE_EVENTS_NUMBER = 11
MERGE_EVENTS_NAME = file_name(MERGE_EVENTS_NUMBER)
# A topic with transactions: the state of producers, an open one, and a decided one that is half done.
TXN_SNAPSHOT = "snap-0000000000000030"
TXN_SHARD_ROW = msgspec.structs.replace(SHARD_ROW, number=48)
OPENED = Opened(0x1122334455667788, 3, "query-1", 12, 3_600_000)
TXN_ROWS = [
    msgspec.structs.replace(
        TOPIC_ROWS[1],
        transactions=TransactionsRow(
            4,
            [Producer("query-1", 11, 5, 9, 5, TS), Producer("query-2", 0, 0, 0, 0, TS)],
            [
                OpenRow(OPENED, None),
                OpenRow(Opened(7, 4, "query-2", 1, 60_000), Decision(310, 3, 30, 900, 1, 10, 19, 10, 300)),
            ],
        ),
    )
]
TXN_EVENTS: list[tuple[int, object]] = [
    (frames.TXN_OPENED, OPENED),
    (frames.TXN_DECIDED, Decided(7, Decision(310, 3, 30, 900))),
    (frames.TXN_ADVANCED, Advanced(7, True, 3, 10, 39, 30, 900, TS, ["query-0"])),
    (frames.TXN_ENDED, 0x1122334455667788),
]
TXN_EVENTS_NUMBER = 48
TXN_EVENTS_NAME = file_name(TXN_EVENTS_NUMBER)
TXN_FILE = "txn-1122334455667788-3"
TXN_HEAD = ChunkHead("0-17", 0, 2, 116, 99)
# With a topic that has more records of some tags than its cap allows, since the cap came later.
TRIMMING_SNAPSHOT = "snap-0000000000000022"
TRIMMING_SHARD_ROW = msgspec.structs.replace(ADOPTING_SHARD_ROW, number=34)
TRIMMING_ROWS = [msgspec.structs.replace(FORWARD_ROWS[0], is_trimmed=False), *FORWARD_ROWS[1:]]
# A dest that stores the source of its copies.
SOURCED_SNAPSHOT = "snap-0000000000000023"
SOURCED_SHARD_ROW = msgspec.structs.replace(ADOPTING_SHARD_ROW, number=35)
SOURCED_ROWS = [
    msgspec.structs.replace(MERGED_ROWS[0], inflows=[InflowRow(7, "o->a", 12, [(1024, 2, 50)], "orders.>")]),
    msgspec.structs.replace(TRIMMING_ROWS[0], inflows=[]),
]
SOURCED_EVENTS: list[tuple[int, object]] = [
    (kind, InflowOpen(7, "o->a", "orders.>") if kind == frames.INFLOW_OPEN else event)
    for kind, event in FORWARD_EVENTS
]
SOURCED_EVENTS_NUMBER = 12
SOURCED_EVENTS_NAME = file_name(SOURCED_EVENTS_NUMBER)
# Written by earlier versions, read by this one.
READ_ONLY = {
    f"{SEGMENT}.del", SNAPSHOT, MARKED_SNAPSHOT, CONSUMER_SNAPSHOT, FORWARD_SNAPSHOT, ADOPTING_SNAPSHOT,
    MERGED_SNAPSHOT, TRIMMING_SNAPSHOT, FORWARD_EVENTS_NAME,
}  # fmt: skip

PATCHES: list[Patch] = [
    ("topics/0000000000000001/seg-0000000000000001-0.data", 54, bytes(17)),
    (f"layout-1/shard-00/wal/{WAL_NAME}", 150, b"\x20\xff"),
]
INTENT = "intent-0000000000000002"


# -- writing them ------------------------------------------------------------------------------------------


def encoded(records: Records, first_seq: int, ts: int, key: bytes | None = None) -> list[bytes]:
    pieces: list[bytes] = []
    encode_appends(pieces, records, topic_id=TOPIC, first_seq=first_seq, ts=ts, key=key)
    return [body + digest for body, digest in zip(pieces[::2], pieces[1::2], strict=True)]


def build_sized_wal() -> dict[str, bytes]:
    data = file_header(shard=2, number=SIZED_NUMBER, salt=SALT, capacity=WAL_BYTES)
    start = encode_control(frames.WAL_START, 0, TS, WalStart(SIZED_NUMBER, 7, 44, bytes(8), "boot-1"))
    data += encode_envelope(SALT, 45, 44, 44, start)
    return {SIZED_NAME: data + bytes(WAL_BYTES - len(data))}


def build_marks() -> dict[str, bytes]:
    disk = SimDisk(1)
    disk.make_dir("t")
    meta = SegmentMeta(2, rows=9)
    mark_deleted(disk, "t", meta, [0, 4, 5])
    mark_deleted(disk, "t", meta, [8])
    return {MARKS: read_file(disk, f"t/{MARKS}")}


def build_wal() -> dict[str, bytes]:
    start, *controls = [encode_control(kind, TOPIC, TS, payload) for kind, payload in CONTROLS]
    appends = encoded(FULL, 1, TS, KEY) + encoded(PLAIN, 3, TS + 1) + encoded(RAW, 5, TS + 2)
    data = file_header(shard=2, number=WAL_NUMBER, salt=SALT)
    for i, body in enumerate([start, b"".join(appends), b"".join(controls)]):
        data += encode_envelope(SALT, 42 + i, 41 + i, 41, body)
        data += bytes(-len(data) % 8)
    return {WAL_NAME: data + bytes(WAL_BYTES - len(data))}


def build_segment() -> dict[str, bytes]:
    disk = SimDisk(1)
    writer = SegmentWriter(disk, "t", SegmentMeta(1))
    rows = np.zeros(4, dtype=ROW)
    for i, row in enumerate(SEGMENT_ROWS):
        rows[i] = (*row[:4], (0, 0, 0), *row[4:])
    content = b"".join(encoded(FULL, 1, TS) + encoded(RAW, 4, TS + 2))
    writer.append(content, rows, [b"orders.eu", b"raw"], [b"node-1", b"node-2"], [(1, TS + 5000)])
    writer.sync()
    writer.close()
    mark_deleted(disk, "t", writer.meta, [0])
    seal(disk, "t", writer.meta, CHAIN)
    return {name: read_file(disk, f"t/{name}") for name in SEGMENT_FILES if name not in READ_ONLY}


def build_snapshot() -> dict[str, bytes]:
    disk = SimDisk(1)
    writer = SnapshotWriter(disk, "meta", 48)
    writer.add(TXN_SHARD_ROW)
    for row in TXN_ROWS:
        writer.add(row)
    writer.finish()
    writer.publish()
    writer = SnapshotWriter(disk, "meta", 35)
    writer.add(SOURCED_SHARD_ROW)
    for row in SOURCED_ROWS:
        writer.add(row)
    writer.finish()
    writer.publish()
    names = (TXN_SNAPSHOT, SOURCED_SNAPSHOT)
    return {name: read_file(disk, f"meta/{name}") for name in names}


def build_staged() -> dict[str, bytes]:
    disk = SimDisk(1)
    chunk = encode_chunk(TXN_HEAD, FULL)
    order = [(16, len(chunk), 2, 116)]
    write_entries(disk, f"t/{TXN_FILE}", 16, [chunk, encode_decision(order)], sync=True)
    return {TXN_FILE: read_file(disk, f"t/{TXN_FILE}")}


def build_events() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, number, events in (
        (EVENTS_NAME, EVENTS_NUMBER, CONSUMER_EVENTS),
        (SOURCED_EVENTS_NAME, SOURCED_EVENTS_NUMBER, SOURCED_EVENTS),
        (MERGE_EVENTS_NAME, MERGE_EVENTS_NUMBER, MERGE_EVENTS),
        (TXN_EVENTS_NAME, TXN_EVENTS_NUMBER, TXN_EVENTS),
    ):
        data = file_header(shard=2, number=number, salt=SALT, capacity=WAL_BYTES)
        encoded_events = [encode_control(kind, TOPIC, TS, payload) for kind, payload in events]
        data += encode_envelope(SALT, 46, 45, 45, b"".join(encoded_events))
        files[name] = data + bytes(WAL_BYTES - len(data))
    return files


def build_intent() -> dict[str, bytes]:
    disk = SimDisk(1)
    write_intent(disk, "meta", 2, PATCHES)
    return {INTENT: read_file(disk, f"meta/{INTENT}")}


BUILDERS: list[Callable[[], dict[str, bytes]]] = [
    build_wal,
    build_sized_wal,
    build_segment,
    build_marks,
    build_snapshot,
    build_staged,
    build_events,
    build_intent,
]


def build_all() -> dict[str, bytes]:
    return {name: data for build in BUILDERS for name, data in build().items()}


def write_missing() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, data in build_all().items():
        path = GOLDEN / name
        if path.exists() and path.read_bytes() != data:
            sys.exit(f"{path} holds other bytes; what version 1 wrote once is never written again")
        path.write_bytes(data)
        print(f"{path}: {len(data)} bytes")


# -- reading them ------------------------------------------------------------------------------------------


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def on_disk(directory: str, *names: str) -> SimDisk:
    disk = SimDisk(1)
    disk.make_dir(directory)
    for name in names:
        handle = disk.open(f"{directory}/{name}", create=True)
        disk.write(handle, 0, golden(name))
        disk.close(handle)
    return disk


def columns_of(data: bytes, start: int, end: int) -> Columns:
    starts: list[int] = []
    frame_starts(data, start, end, starts)
    return decode_columns(data, starts)


Shown = tuple[int, int, bytes | None, bytes | None, bytes, int, dict[int, bytes]]


def shown(columns: Columns) -> list[Shown]:
    """seq, ts, tag, node, payload, flags and extensions of append frames."""
    out: list[Shown] = []
    for start, head in zip(columns.starts.tolist(), columns.headers):
        flags = int(head["flags"])
        node_at = start + 38
        tag_at = node_at + int(head["node_len"])
        data_at = tag_at + int(head["tag_len"])
        data = columns.buffer
        assert (int(head["type"]), int(head["topic"])) == (1, TOPIC)
        assert frames.frame_is_valid(data[start : start + 4 + int(head["length"])])
        out.append(
            (
                int(head["seq"]),
                int(head["ts"]),
                data[tag_at:data_at] if flags & 1 else None,
                data[node_at:tag_at] if flags & 2 else None,
                data[data_at : data_at + int(head["data_len"])],
                flags,
                frames.read_extensions(data, start),
            )
        )
    return out


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def expected_full(*, key: bool) -> list[Shown]:
    key_extensions = {1: b"idempotency-key", 2: u32(2)} if key else {}
    ends = (TS + 5000).to_bytes(8, "little")
    return [
        (1, TS, b"orders.eu", b"node-1", b'{"n":1}{"m":true}', 19, {3: u32(10)} | key_extensions),
        (2, TS, None, b"node-2", b'{"n":"zwei \xe2\x9c\x93"}', 18, {5: ends, 6: u32(99)}),
    ]


def expected_raw(seq: int) -> Shown:
    return (seq, TS + 2, b"raw", None, b"A: 1\r\n\0\xff", 25, {4: u32(6)})


def test_the_log_file_is_read_to_what_was_written() -> None:
    assert file_number(WAL_NAME) == 7
    found = scan(WAL_NAME, 7, golden(WAL_NAME))
    assert found is not None
    assert (found.salt, found.bad_at) == (0x123456789ABCDEF0, [])
    assert [(e.lsn, e.prev_lsn, e.synced_lsn) for e in found.envelopes] == [
        (42, 41, 41),
        (43, 42, 41),
        (44, 43, 41),
    ]
    first, second, third = [columns_of(found.data, e.start, e.end) for e in found.envelopes]
    assert shown(second) == [
        *expected_full(key=True),
        (3, TS + 1, None, None, b"[]", 0, {}),
        (4, TS + 1, None, None, b"3", 0, {}),
        expected_raw(5),
    ]
    controls = [(part, i) for part in (first, third) for i in range(len(part.starts))]
    assert len(controls) == len(CONTROLS)
    for (part, i), (kind, payload) in zip(controls, CONTROLS):
        head = part.headers[i]
        fields = [int(head[name]) for name in ("type", "flags", "topic", "seq", "ts")]
        assert fields == [kind, 0, TOPIC, 0, TS]
        wanted = type(payload) if isinstance(payload, msgspec.Struct) else object
        assert msgspec.msgpack.decode(part.payload(i), type=wanted) == payload


def test_the_log_file_that_knows_its_length_is_read_to_what_was_written() -> None:
    found = scan(SIZED_NAME, 8, golden(SIZED_NAME))
    assert found is not None
    assert (found.capacity, found.is_short, len(found.envelopes)) == (2048, False, 1)
    cut = scan(SIZED_NAME, 8, golden(SIZED_NAME)[:2047])
    assert cut is not None and cut.is_short
    old = scan(WAL_NAME, 7, golden(WAL_NAME)[:1500])
    assert old is not None and not old.is_short


def test_the_marks_are_read_to_what_was_written() -> None:
    deleted = read_deleted(on_disk("t", MARKS), "t", MARKED_META)
    assert deleted is not None
    assert np.flatnonzero(deleted).tolist() == [0, 4, 5, 8]


def test_the_segment_is_read_to_what_was_written() -> None:
    disk = on_disk("t", *SEGMENT_FILES)
    meta = meta_from_sum(disk, "t", 1, 0, has_del=True)
    assert verify(disk, "t", meta, CHAIN) == []
    summary, digest = read_sum(disk, "t", 1, 0)
    assert (summary.first_seq, summary.generation, summary.rows, summary.live) == (1, 0, 4, 2)
    assert (summary.data_bytes, summary.dict_bytes) == (251, 96)
    assert (summary.tag_names, summary.node_names) == (2, 2)
    assert (summary.ts_min, summary.ts_max) == (TS, TS + 2)
    assert (summary.chain, summary.origin, len(summary.blocks)) == (CHAIN, bytes(8), 1)
    assert meta.link == digest == golden(f"{SEGMENT}.sum")[-8:]
    rows = read_rows(disk, "t", meta)
    assert [(*row[:4], *row[5:]) for row in rows.tolist()] == SEGMENT_ROWS
    tags, nodes, expiries = read_dict(disk, "t", meta)
    assert (tags, nodes) == ([b"orders.eu", b"raw"], [b"node-1", b"node-2"])
    assert expiries.tolist() == [(1, TS + 5000)]
    deleted = read_deleted(disk, "t", meta)
    assert deleted is not None
    assert deleted.tolist() == [True, False, False, False]
    data = golden(f"{SEGMENT}.data")
    assert shown(columns_of(data, 16, len(data))) == [*expected_full(key=False), expected_raw(4)]
    for offset, length, *_ in SEGMENT_ROWS:
        assert frames.frame_is_valid(data[offset : offset + length]) == (length > 0)


def test_the_snapshot_is_read_to_what_was_written() -> None:
    disk = on_disk("meta", SNAPSHOT)
    assert list_snapshots(disk, "meta") == [3]
    shard, topics = read_snapshot(disk, "meta", 3)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == TOPIC_ROWS
    disk = on_disk("meta", MARKED_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 4)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == MARKED_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == MARKED_ROWS
    disk = on_disk("meta", CONSUMER_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 5)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == CONSUMER_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == CONSUMER_ROWS
    disk = on_disk("meta", FORWARD_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 6)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == FORWARD_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == FORWARD_ROWS
    disk = on_disk("meta", ADOPTING_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 32)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == ADOPTING_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == FORWARD_ROWS
    disk = on_disk("meta", MERGED_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 33)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == MERGED_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == MERGED_ROWS
    disk = on_disk("meta", TXN_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 48)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == TXN_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == TXN_ROWS
    disk = on_disk("meta", TRIMMING_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 34)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == TRIMMING_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == TRIMMING_ROWS
    disk = on_disk("meta", SOURCED_SNAPSHOT)
    shard, topics = read_snapshot(disk, "meta", 35)
    assert msgspec.msgpack.decode(shard, type=ShardRow) == SOURCED_SHARD_ROW
    assert [msgspec.msgpack.decode(row, type=TopicRow) for row in topics] == SOURCED_ROWS


def test_staged_chunks_are_read_to_what_was_written() -> None:
    disk = on_disk("t", TXN_FILE)
    chunk, decision = read_staged(disk, f"t/{TXN_FILE}")
    assert (chunk.offset, chunk.chunk, decision.chunk) == (16, TXN_HEAD, None)
    order = read_decision(disk, f"t/{TXN_FILE}", decision.offset)
    assert order == [(16, chunk.bytes, 2, 116)]
    assert read_chunks(disk, f"t/{TXN_FILE}", order) == [FULL]
    assert parse_name(TXN_FILE) == (0x1122334455667788, 3)


@pytest.mark.parametrize(
    ("name", "number", "events"),
    [
        (EVENTS_NAME, EVENTS_NUMBER, CONSUMER_EVENTS),
        (FORWARD_EVENTS_NAME, FORWARD_EVENTS_NUMBER, FORWARD_EVENTS),
        (SOURCED_EVENTS_NAME, SOURCED_EVENTS_NUMBER, SOURCED_EVENTS),
        (MERGE_EVENTS_NAME, MERGE_EVENTS_NUMBER, MERGE_EVENTS),
        (TXN_EVENTS_NAME, TXN_EVENTS_NUMBER, TXN_EVENTS),
    ],
)
def test_events_are_read_to_what_was_written(
    name: str, number: int, events: list[tuple[int, object]]
) -> None:
    data = golden(name)
    scanned = scan(name, number, data)
    assert scanned is not None
    (envelope,) = scanned.envelopes
    columns = columns_of(data, envelope.start, envelope.end)
    kinds = columns.headers["type"].tolist()
    assert kinds == [kind for kind, _ in events]
    for i, (_, written) in enumerate(events):
        assert msgspec.msgpack.decode(columns.payload(i), type=type(written)) == written


def test_the_intent_is_read_to_what_was_written() -> None:
    assert pending_intents(on_disk("meta", INTENT), "meta") == [(2, PATCHES)]


@pytest.mark.parametrize("name", [WAL_NAME, *SEGMENT_FILES, SNAPSHOT, INTENT, SIZED_NAME, MARKS])
def test_every_file_says_its_magic_and_version(name: str) -> None:
    kinds = {"log": b"WAL", "data": b"DAT", "idx": b"IDX", "dict": b"DIC", "sum": b"SUM", "del": b"DEL"}
    kind = kinds.get(name.rpartition(".")[2], b"SNP" if name.startswith("snap") else b"INT")
    assert golden(name)[:12] == b"TPCS" + kind + b"\0" + u32(2 if name == MARKS else 1)


def with_version_3(directory: str, *names: str) -> SimDisk:
    disk = on_disk(directory, *names)
    for name in names:
        handle = disk.open(f"{directory}/{name}")
        disk.write(handle, 8, u32(3))
        if name in (SNAPSHOT, INTENT) or name.endswith(".sum"):  # these end in a digest of all before it
            content = disk.read(handle, 0, disk.size(handle))
            disk.write(handle, len(content) - 8, xxh(content[:-8]))
        disk.close(handle)
    return disk


def test_the_same_files_of_a_later_version_are_refused_by_name() -> None:
    disk = with_version_3("d", *SEGMENT_FILES, SNAPSHOT, INTENT)
    meta = msgspec.structs.replace(SEGMENT_META)
    reads: dict[str, Callable[[], object]] = {
        f"{SEGMENT}.idx": lambda: read_rows(disk, "d", meta),
        f"{SEGMENT}.dict": lambda: read_dict(disk, "d", meta),
        f"{SEGMENT}.sum": lambda: read_sum(disk, "d", 1, 0),
        f"{SEGMENT}.del": lambda: read_deleted(disk, "d", meta),
        SNAPSHOT: lambda: read_snapshot(disk, "d", 3),
        INTENT: lambda: pending_intents(disk, "d"),
    }
    for name, read in reads.items():
        with pytest.raises(UnsupportedFormat, match=f"d/{name} has format version 3"):
            read()


# -- encoding ----------------------------------------------------------------------------------------------


def test_the_same_contents_give_the_same_bytes() -> None:
    built = build_all()
    assert sorted([*built, *READ_ONLY]) == sorted(path.name for path in GOLDEN.iterdir())
    for name, data in built.items():
        assert data == golden(name), name


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.unit.engine.storage.test_files_golden --write")
    write_missing()
