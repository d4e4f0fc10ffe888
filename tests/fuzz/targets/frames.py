"""Frames: decoding returns what was encoded, and arbitrary bytes are a valid frame or refused.

An input whose first byte is even describes records, which are encoded and decoded. Any other is read as bytes of
a disk: as a stream of frames, and frame by frame.
"""

from __future__ import annotations

import struct

from tests.fuzz.mutate import Choices
from tests.fuzz.runner import Target
from topics.engine.commands.topics import Records
from topics.engine.storage import frames

_NAMES = (b"", b"a", b"a.b.c", b"\xc3\xa9", b"x" * 300)
_MS = 1_700_000_000_000


def run(data: bytes) -> None:
    if data[:1] and data[0] % 2 == 0:
        _encode_and_decode(Choices(data[1:]))
    else:
        _read(data[1:])


# -- encode and decode -------------------------------------------------------------------------------------


def _encode_and_decode(choices: Choices) -> None:
    records = _records(choices)
    key = choices.bytes(choices.number(257)) if choices.byte() % 2 else None
    topic_id, seq = choices.number(1 << 64), choices.number(1 << 63)
    pieces: list[bytes] = []
    lengths, flags = frames.encode_appends(pieces, records, topic_id=topic_id, first_seq=seq, ts=_MS, key=key)
    buffer = b"".join(pieces)
    starts: list[int] = []
    frames.frame_starts(buffer, 0, len(buffer), starts)
    columns = frames.decode_columns(buffer, starts)
    assert len(starts) == len(records.payloads)
    for i, start in enumerate(starts):
        header = columns.headers[i]
        assert frames.frame_is_valid(buffer[start : start + lengths[i]])
        assert (int(header["topic"]), int(header["seq"]), int(header["ts"])) == (topic_id, seq + i, _MS)
        assert int(header["flags"]) == (flags[i] if flags is not None else 0)
        _check_record(records, i, buffer, start, key)


def _records(choices: Choices) -> Records:
    count = 1 + choices.number(20)
    same = choices.byte() % 2  # records of one size are decoded in a vectorised way
    payload = choices.bytes(choices.number(64))
    records = Records([payload if same else choices.bytes(choices.number(64)) for _ in range(count)])
    chosen = choices.byte()
    if chosen & 1:
        records.tags = [_NAMES[choices.number(5)] if choices.byte() % 2 else None for _ in range(count)]
    if chosen & 2:
        records.nodes = [_NAMES[choices.number(4)] if choices.byte() % 2 else None for _ in range(count)]
    if chosen & 4:
        records.meta_lens = [choices.number(len(payload) + 1) for payload in records.payloads]
    if chosen & 8:
        records.ttls_ms = [choices.number(1 << 53) for _ in range(count)]
    if chosen & 16:
        records.sizes = [choices.number(1 << 32) for _ in range(count)]
    records.raw = bool(chosen & 32)
    return records


def _check_record(records: Records, i: int, buffer: bytes, start: int, key: bytes | None) -> None:
    _, kind, flags, _, _, _, node_len, tag_len, data_len = frames.HEADER.unpack_from(buffer, start)
    assert kind == frames.APPEND
    at = start + frames.HEADER_BYTES
    node, tag = buffer[at : at + node_len], buffer[at + node_len : at + node_len + tag_len]
    at += node_len + tag_len
    assert buffer[at : at + data_len] == records.payloads[i]
    assert (tag if flags & frames.HAS_TAG else None) == (records.tags[i] if records.tags else None)
    assert (node if flags & frames.HAS_NODE else None) == (records.nodes[i] if records.nodes else None)
    found = frames.read_extensions(buffer, start) if flags & frames.HAS_EXT else {}
    assert found.get(frames.EXT_KEY) == (key if i == 0 else None)
    ttl_ms = records.ttls_ms[i] if records.ttls_ms else 0
    assert _number(found, frames.EXT_EXPIRES) == (_MS + ttl_ms if ttl_ms else None)
    assert (_number(found, frames.EXT_META) or 0) == (records.meta_lens[i] if records.meta_lens else 0)
    size = records.sizes[i] if records.sizes else data_len
    assert (_number(found, frames.EXT_SIZE) if frames.EXT_SIZE in found else data_len) == size


def _number(found: dict[int, bytes], extension: int) -> int | None:
    return int.from_bytes(found[extension], "little") if extension in found else None


# -- bytes from a disk -------------------------------------------------------------------------------------


def _read(data: bytes) -> None:
    if frames.frame_is_valid(data):
        _check_same(data)
    starts: list[int] = []
    try:
        frames.frame_starts(data, 0, len(data), starts)
        columns = frames.decode_columns(data, starts)
    except (ValueError, IndexError, struct.error):
        return
    assert starts == sorted(set(starts)) and all(0 <= start < len(data) for start in starts)
    ends = [*starts[1:], len(data)]
    for i, (start, end) in enumerate(zip(starts, ends)):
        assert start + 4 + int(columns.headers["length"][i]) == end, "there is a gap between two frames"
        if frames.frame_is_valid(data[start:end]):
            _check_same(data[start:end])


def _check_same(frame: bytes) -> None:
    """A valid frame, decoded and encoded again, is the same."""
    head, body = frame[: frames.HEADER_BYTES], frame[frames.HEADER_BYTES : -frames.DIGEST_BYTES]
    again = frames.HEADER.pack(*frames.HEADER.unpack(head)) + body
    assert again + frames.xxh3_64_digest(again) == frame


def seeds() -> list[bytes]:
    plain: list[bytes] = []
    frames.encode_appends(
        plain, Records([b'{"n":%d}' % i for i in range(20)]), topic_id=256, first_seq=1, ts=_MS
    )
    full: list[bytes] = []
    records = Records([b"1", b"[2,3]"], tags=[b"a", None], nodes=[b"n", b"m"], ttls_ms=[5, 0], sizes=[1, 4])
    frames.encode_appends(full, records, topic_id=256, first_seq=7, ts=_MS, key=b"key")
    control = frames.encode_control(frames.LOSS, 256, _MS, [1, 2, "crash"])
    recipes = [bytes([2 * i]) + bytes(range(i, 256, i + 3)) for i in range(1, 8)]
    return [
        b"\x01" + b"".join(plain),
        b"\x01" + b"".join(full),
        b"\x01" + control,
        b"\x01" + full[0] + full[1],
        *recipes,
    ]


TARGET = Target("frames", run, seeds, (b"\x2a\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\0"), rounds=8000)
