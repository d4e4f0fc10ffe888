"""Goal: a frame is exactly the bytes specified in docs/decisions/0001, and encoding and decoding lose nothing.

Method: one frame is decoded by hand, with offsets from the document and without the codec. Round trips of whole
batches are drawn by Hypothesis and compared column by column. Damage is exhaustive: every byte of a frame is replaced
by every other value.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from topics.api.config import TopicConfig
from topics.engine.commands.topics import Records
from topics.engine.storage import frames
from topics.engine.storage.control import ConfigChanged, Deletion, TimeCeiling, TopicCreated
from topics.engine.storage.frames import (
    APPEND,
    EXT_BATCH,
    EXT_EXPIRES,
    EXT_HEADERS,
    EXT_HOPS,
    EXT_KEY,
    EXT_META,
    EXT_SIZE,
    HAS_EXT,
    HAS_NODE,
    HAS_TAG,
    HEADER_BYTES,
    OVERHEAD_BYTES,
    RAW,
    Columns,
    decode_columns,
    encode_appends,
    encode_control,
    frame_is_valid,
    frame_starts,
    read_extensions,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TS = st.integers(0, 2**62)


def encode(
    records: Records, *, topic_id: int = 7, first_seq: int = 1, ts: int = 1000, key: bytes | None = None
) -> tuple[bytes, list[int], list[int] | None]:
    """The joined frames of a write, their lengths and flags."""
    pieces: list[bytes] = []
    lengths, flags = encode_appends(pieces, records, topic_id=topic_id, first_seq=first_seq, ts=ts, key=key)
    return b"".join(pieces), lengths, flags


def split(data: bytes) -> list[bytes]:
    starts: list[int] = []
    frame_starts(data, 0, len(data), starts)
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)])]


@st.composite
def writes(draw: st.DrawFn) -> Records:
    payloads = draw(st.lists(st.binary(max_size=40), min_size=1, max_size=8))

    def column(values: st.SearchStrategy) -> list | None:
        return draw(st.none() | st.lists(values, min_size=len(payloads), max_size=len(payloads)))

    return Records(
        payloads=payloads,
        tags=column(st.none() | st.binary(max_size=30)),
        nodes=column(st.none() | st.binary(max_size=30)),
        meta_lens=column(U32),
        header_lens=column(U32),
        ttls_ms=column(st.integers(0, 2**40)),
        sizes=column(st.integers(0, 60)),
        raw=draw(st.booleans()),
        hops=column(st.integers(0, 255)),
    )


def expected_extensions(records: Records, i: int, ts: int, key: bytes | None) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    if records.meta_lens is not None and records.meta_lens[i]:
        found[EXT_META] = struct.pack("<I", records.meta_lens[i])
    if records.header_lens is not None and records.header_lens[i]:
        found[EXT_HEADERS] = struct.pack("<I", records.header_lens[i])
    if records.ttls_ms is not None and records.ttls_ms[i]:
        found[EXT_EXPIRES] = struct.pack("<Q", ts + records.ttls_ms[i])
    if records.sizes is not None and records.sizes[i] != len(records.payloads[i]):
        found[EXT_SIZE] = struct.pack("<I", records.sizes[i])
    if records.hops is not None:
        found[EXT_HOPS] = struct.pack("<B", records.hops[i])
    if key is not None and i == 0:
        found[EXT_KEY] = key
        found[EXT_BATCH] = struct.pack("<I", len(records.payloads))
    return found


# -- round trips -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(writes(), U64, st.integers(1, 2**63), TS, st.none() | st.binary(min_size=1, max_size=256))
def test_a_write_comes_back_from_its_frames_whole(
    records: Records, topic_id: int, first_seq: int, ts: int, key: bytes | None
) -> None:
    data, lengths, flags = encode(records, topic_id=topic_id, first_seq=first_seq, ts=ts, key=key)
    starts: list[int] = []
    frame_starts(data, 0, len(data), starts)
    columns = decode_columns(data, starts)
    headers = columns.headers
    count = len(records.payloads)
    assert headers["type"].tolist() == [APPEND] * count
    assert headers["topic"].tolist() == [topic_id] * count
    assert headers["seq"].tolist() == list(range(first_seq, first_seq + count))
    assert headers["ts"].tolist() == [ts] * count
    assert (headers["length"] + 4).tolist() == lengths
    assert headers["flags"].tolist() == (flags if flags is not None else [0] * count)
    for i, start in enumerate(starts):
        frame = data[start : start + lengths[i]]
        assert frame_is_valid(frame)
        flag = int(headers["flags"][i])
        node_at = HEADER_BYTES
        tag_at = node_at + int(headers["node_len"][i])
        data_at = tag_at + int(headers["tag_len"][i])
        data_end = data_at + int(headers["data_len"][i])
        assert (frame[node_at:tag_at] if flag & HAS_NODE else None) == (
            records.nodes[i] if records.nodes is not None else None
        )
        assert (frame[tag_at:data_at] if flag & HAS_TAG else None) == (
            records.tags[i] if records.tags is not None else None
        )
        assert frame[data_at:data_end] == records.payloads[i]
        assert bool(flag & RAW) == records.raw
        extensions = expected_extensions(records, i, ts, key)
        assert bool(flag & HAS_EXT) == bool(extensions)
        assert read_extensions(frame) == read_extensions(data, start) == extensions


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_the_plain_way_and_the_full_way_make_the_same_bytes(payloads: list[bytes]) -> None:
    plain, plain_lengths, plain_flags = encode(Records(payloads))
    full, full_lengths, full_flags = encode(
        Records(
            payloads,
            tags=[None] * len(payloads),
            nodes=[None] * len(payloads),
            meta_lens=[0] * len(payloads),
            header_lens=[0] * len(payloads),
            ttls_ms=[0] * len(payloads),
            sizes=[len(payload) for payload in payloads],
        )
    )
    assert (plain, plain_lengths) == (full, full_lengths)
    assert plain_flags is None
    assert full_flags == [0] * len(payloads)


@settings(deadline=None)
@given(writes())
def test_records_without_tags_and_nodes_have_the_same_bytes_either_way(records: Records) -> None:
    records.tags = records.nodes = None
    short = encode(records)[:2]
    records.tags = [None] * len(records.payloads)
    assert short == encode(records)[:2]


@settings(deadline=None)
@given(writes())
def test_frames_go_behind_what_is_already_in_the_list(records: Records) -> None:
    alone, _, _ = encode(records)
    pieces = [b"before"]
    encode_appends(pieces, records, topic_id=7, first_seq=1, ts=1000)
    assert b"".join(pieces) == b"before" + alone


def test_encoding_leaves_the_columns_alone() -> None:
    records = Records([b"{}", b"{}"], meta_lens=[1, 0], ttls_ms=[0, 5], sizes=[2, 9])
    before = msgspec.to_builtins(records)
    first, _, _ = encode(records, key=b"k")
    assert msgspec.to_builtins(records) == before
    assert encode(records, key=b"k")[0] == first


def test_an_empty_tag_is_not_the_same_as_no_tag() -> None:
    empty, _, flags = encode(Records([b"x", b"x"], tags=[b"", None], nodes=[None, b""]))
    assert flags == [HAS_TAG, HAS_NODE]
    assert len(split(empty)[0]) == len(split(empty)[1]) == OVERHEAD_BYTES + 1


def test_the_key_rides_in_the_first_frame_only() -> None:
    data, _, flags = encode(Records([b"a", b"b", b"c"]), key=b"job-1")
    assert flags == [HAS_EXT, 0, 0]
    first, *others = split(data)
    assert read_extensions(first) == {EXT_KEY: b"job-1", EXT_BATCH: struct.pack("<I", 3)}
    assert [read_extensions(frame) for frame in others] == [{}, {}]


# -- the layout, by hand -----------------------------------------------------------------------------------


def test_one_frame_lies_as_the_document_says() -> None:
    data, lengths, flags = encode(
        Records(
            [b'{"a":1}{"m":2}'],
            tags=[b"tag"],
            nodes=[b"node1"],
            meta_lens=[7],
            ttls_ms=[500],
            sizes=[99],
        ),
        topic_id=0x0102030405060708,
        first_seq=0x1112131415161718,
        ts=0x2122232425262728,
        key=b"key!",
    )
    assert lengths == [len(data)]
    assert data[0:4] == struct.pack("<I", len(data) - 4)
    assert data[4] == 1  # append
    assert data[5] == 1 | 2 | 16 == (flags or [0])[0]
    assert data[6:14] == bytes.fromhex("0807060504030201")
    assert data[14:22] == bytes.fromhex("1817161514131211")
    assert data[22:30] == bytes.fromhex("2827262524232221")
    assert struct.unpack("<HHI", data[30:38]) == (5, 3, 14)
    assert data[38:43] == b"node1"
    assert data[43:46] == b"tag"
    assert data[46:60] == b'{"a":1}{"m":2}'
    area = data[60:-8]
    assert area == b"".join(
        [
            struct.pack("<BHI", 3, 4, 7),
            struct.pack("<BHQ", 5, 8, 0x2122232425262728 + 500),
            struct.pack("<BHI", 6, 4, 99),
            struct.pack("<BH", 1, 4) + b"key!",
            struct.pack("<BHI", 2, 4, 1),
        ]
    )
    assert data[-8:] == xxh3_64_digest(data[:-8])
    assert OVERHEAD_BYTES == 46


def test_a_raw_frame_says_so_and_holds_the_length_of_its_headers() -> None:
    data, _, flags = encode(Records([b"H: 1\r\nbody"], header_lens=[6], raw=True))
    assert flags == [8 | 16]
    assert data[5] == 8 | 16
    assert data[38:48] == b"H: 1\r\nbody"
    assert data[48:-8] == struct.pack("<BHI", 4, 4, 6)


# -- damage ------------------------------------------------------------------------------------------------

SAMPLES = {
    "plain": encode(Records([b'{"n":1}']))[0],
    "empty": encode(Records([b""]))[0],
    "full": encode(Records([b"{}{}"], tags=[b"t"], nodes=[b"n"], meta_lens=[2], ttls_ms=[9]), key=b"k")[0],
    "control": encode_control(frames.DELETE, 7, 1000, Deletion([(1, 3), (9, 9)], True)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_changed_byte_is_noticed(name: str) -> None:
    frame = SAMPLES[name]
    assert frame_is_valid(frame)
    for at in range(len(frame)):
        for value in range(256):
            if value != frame[at]:
                assert not frame_is_valid(frame[:at] + bytes([value]) + frame[at + 1 :]), (at, value)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_frame_that_is_cut_or_has_something_behind_it_is_not_valid(name: str) -> None:
    frame = SAMPLES[name]
    for length in range(len(frame)):
        assert not frame_is_valid(frame[:length])
    assert not frame_is_valid(frame + b"\0")
    assert not frame_is_valid(frame + frame)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_frame(data: bytes) -> None:
    assert not frame_is_valid(data)


def test_zeros_are_no_frame() -> None:
    assert not any(frame_is_valid(bytes(length)) for length in range(200))


# -- following the lengths ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.binary(max_size=64))
def test_frames_are_found_in_the_middle_of_a_buffer(payloads: list[bytes], before: bytes) -> None:
    data, lengths, _ = encode(Records(payloads))
    starts: list[int] = [-1]
    frame_starts(before + data + b"behind", len(before), len(before) + len(data), starts)
    at = len(before)
    expected = [-1]
    for length in lengths:
        expected.append(at)
        at += length
    assert starts == expected


@settings(deadline=None)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=3), st.data())
def test_an_end_that_is_not_a_frames_end_is_refused(payloads: list[bytes], data: st.DataObject) -> None:
    encoded, lengths, _ = encode(Records(payloads))
    ends = {sum(lengths[:i]) for i in range(len(lengths) + 1)}
    end = data.draw(st.integers(0, len(encoded)).filter(lambda at: at not in ends))
    with pytest.raises(ValueError, match="do not end"):
        frame_starts(encoded, 0, end, [])


def test_no_frames_make_empty_columns() -> None:
    columns = decode_columns(b"", [])
    assert len(columns.headers) == len(columns.starts) == 0
    assert columns.headers.dtype == frames.HEADER_DTYPE


def test_columns_are_sliced_and_picked_with_their_places() -> None:
    data = b"".join(encode_control(frames.LOSS, 10 + i, 5, [i, i, "corrupt"]) for i in range(5))
    starts: list[int] = []
    frame_starts(data, 0, len(data), starts)
    columns = decode_columns(data, starts)

    def shown(part: Columns) -> list[tuple[int, object]]:
        return [
            (int(part.headers["topic"][i]), msgspec.msgpack.decode(part.payload(i)))
            for i in range(len(part.starts))
        ]

    every = [(10 + i, [i, i, "corrupt"]) for i in range(5)]
    assert shown(columns) == every
    assert shown(columns.slice(1, 3)) == every[1:3]
    assert shown(columns.take(np.array([4, 0]))) == [every[4], every[0]]
    assert columns.slice(1, 3).starts.tolist() == starts[1:3]


def test_the_last_frame_may_be_the_smallest_there_is() -> None:
    data, _, _ = encode(Records([b"long enough", b""]))
    columns = decode_columns(data, [0, OVERHEAD_BYTES + 11])
    assert columns.headers["data_len"].tolist() == [11, 0]


# -- extensions --------------------------------------------------------------------------------------------


def with_area(area: bytes) -> bytes:
    """A frame with this extension area."""
    body = frames.HEADER.pack(42 + 3 + len(area), APPEND, HAS_EXT, 1, 1, 1, 1, 1, 1) + b"ntp" + area
    return body + xxh3_64_digest(body)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 255), st.binary(max_size=70), max_size=6), st.binary(max_size=9))
def test_extensions_are_read_whatever_their_ids_and_order(found: dict[int, bytes], before: bytes) -> None:
    frame = with_area(b"".join(struct.pack("<BH", i, len(value)) + value for i, value in found.items()))
    assert frame_is_valid(frame)
    assert read_extensions(frame) == found
    assert read_extensions(before + frame + b"behind", len(before)) == found


def test_an_extension_may_be_as_long_as_its_length_field_allows() -> None:
    value = bytes(65535)
    assert read_extensions(with_area(struct.pack("<BH", 200, 65535) + value)) == {200: value}


# -- control frames ----------------------------------------------------------------------------------------

CONTROLS: list[tuple[int, object]] = [
    (frames.TOPIC_CREATE, TopicCreated("orders", TopicConfig(cap_records=5, durability="fsync"), 1024)),
    (frames.CONFIG, ConfigChanged(TopicConfig(ttl_ms=9), 0, 17)),
    (frames.DELETE, Deletion([(1, 2), (7, 7)], True)),
    (frames.TIME_CEILING, TimeCeiling(10_000, 5_000, 77, "boot-1")),
]


@pytest.mark.parametrize(("frame_type", "payload"), CONTROLS)
def test_a_control_payload_comes_back_as_what_it_was(frame_type: int, payload: object) -> None:
    frame = encode_control(frame_type, 2**64 - 1, 1234, payload, seq=99)
    assert frame_is_valid(frame)
    columns = decode_columns(frame, [0])
    head = columns.headers[0]
    assert (int(head["type"]), int(head["flags"])) == (frame_type, 0)
    assert (int(head["topic"]), int(head["seq"]), int(head["ts"])) == (2**64 - 1, 99, 1234)
    assert (int(head["node_len"]), int(head["tag_len"])) == (0, 0)
    assert msgspec.msgpack.decode(columns.payload(0), type=type(payload)) == payload
    assert read_extensions(frame) == {}


def test_a_control_frame_has_seq_0_unless_told() -> None:
    frame = encode_control(frames.SEQ_CEILING, 3, 4, 5)
    assert struct.unpack("<Q", frame[14:22]) == (0,)
    assert frame[38:-8] == msgspec.msgpack.encode(5)


def test_control_payloads_are_arrays_so_that_fields_can_be_added_at_the_end() -> None:
    for _, payload in CONTROLS:
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
        assert isinstance(fields, list)
        longer = msgspec.msgpack.encode([*fields, "from a later version"])
        assert msgspec.msgpack.decode(longer, type=type(payload)) == payload


def test_the_flag_numbers_are_those_of_the_document() -> None:
    assert (HAS_TAG, HAS_NODE, RAW, HAS_EXT, frames.ERASED) == (1, 2, 8, 16, 32)
    extensions = [EXT_KEY, EXT_BATCH, EXT_META, EXT_HEADERS, EXT_EXPIRES, EXT_SIZE]
    assert [*extensions, frames.EXT_HOPS, frames.EXT_DELIVER_AT] == list(range(1, 9))
