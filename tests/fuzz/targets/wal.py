"""Log files: a scan of arbitrary contents ends with a verdict, and every envelope that it finds is complete.

With an odd first byte the digest of the file header is corrected, and with the next bit that of every envelope,
so that the scan gets past it.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from tests.fuzz.runner import Target
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.commands.topics import Records
from topics.engine.storage import frames, wal
from topics.engine.upkeep.replay import decode

_SALT = 0x5A17_5A17_5A17_5A17
_NUMBER = 7


def run(data: bytes) -> None:
    how, data = (data[0], data[1:]) if data else (0, b"")
    if how & 1:
        data = _with_header(data)
    if how & 2:
        data = _with_envelopes(data)
    try:
        found = wal.scan("wal", _NUMBER, data)
    except (Corrupt, UnsupportedFormat):
        return
    if found is None:
        return
    last = wal.FILE_HEADER_BYTES
    for envelope in found.envelopes:
        head = envelope.start - wal.ENVELOPE_BYTES
        assert head >= last and head % 8 == 0 and envelope.end <= len(data)
        body = data[envelope.start : envelope.end]
        again = wal.encode_envelope(found.salt, envelope.lsn, envelope.prev_lsn, envelope.synced_lsn, body)
        assert again == data[head : envelope.end], "an envelope encodes to other bytes than it was read from"
        last = envelope.end
        try:
            decode(data, [envelope])
        except (ValueError, IndexError, struct.error):
            pass  # valid by its digest, but not made of frames: no engine wrote it
    assert found.bad_at == sorted(set(found.bad_at))
    assert all(at >= wal.FILE_HEADER_BYTES for at in found.bad_at)


def _with_header(data: bytes) -> bytes:
    return data[:56] + xxh3_64_digest(data[:56]) + data[64:] if len(data) >= 64 else data


def _with_envelopes(data: bytes) -> bytes:
    made = bytearray(data)
    at = made.find(wal.ENVELOPE_MAGIC)
    while at >= 0 and at + wal.ENVELOPE_BYTES <= len(made):
        (length,) = struct.unpack_from("<I", made, at + 4)
        start = at + wal.ENVELOPE_BYTES
        if start + length <= len(made):
            seed = xxh3_64_intdigest(bytes(made[at : at + 40]))
            made[at + 40 : start] = xxh3_64_digest(bytes(made[start : start + length]), seed)
        at = made.find(wal.ENVELOPE_MAGIC, at + 1)
    return bytes(made)


def seeds() -> list[bytes]:
    data = bytearray(wal.file_header(shard=0, number=_NUMBER, salt=_SALT))
    for lsn in range(1, 5):
        pieces: list[bytes] = []
        frames.encode_appends(pieces, Records([b"%d" % lsn] * lsn), topic_id=256, first_seq=lsn, ts=1)
        data += wal.encode_envelope(_SALT, lsn, lsn - 1, max(0, lsn - 2), b"".join(pieces))
        data += bytes(-len(data) % 8)
    rest = bytes(512)
    return [bytes([how]) + bytes(data) + rest for how in range(4)] + [b"\x01" + bytes(data[:64]) + rest]


TOKENS = (wal.ENVELOPE_MAGIC, wal.MAGIC, struct.pack("<Q", _SALT), b"\xff\xff\xff\xff", bytes(8))
TARGET = Target("wal", run, seeds, TOKENS, rounds=8000)
