"""Codec of the metadata files of the cold tier, for readers without a server: manifests, dead rows, pins.

    MANIFEST-<n>      one line of JSON, and a line with 16 hex digits: XXH3-64 of the first line without its newline
    DEAD-<n>          header · msgpack {first seq: bitmap of rows that must not be read, little-endian bit order} · digest;
                      absent if there are none
    CURRENT           one line, the name of the newest manifest
    PIN-<id>          JSON: the manifest whose files must be kept, and until when

A reader of manifest n returns exactly the rows that have a length and no bit in DEAD-<n>. Manifests are an export: a server never
relies on them. The files of a segment never change under one name, so a manifest is valid as long as they exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import xxhash

from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.storage.files import with_digest, without_digest
from topics.engine.storage.segments import Mask, segment_name

VERSION = 1
DEAD_MAGIC = b"TPCSDED\0"
CURRENT_NAME = "CURRENT"
MANIFEST_BYTES_MAX = 1 << 30  # also of dead rows
SMALL_BYTES_MAX = 4096  # of CURRENT and pins

_NAME = re.compile(r"(MANIFEST|DEAD)-([1-9][0-9]{0,18})")
_PIN = re.compile(r"PIN-([0-9a-f]{16})")
_DIGEST_DIGITS = 16


class Segment(msgspec.Struct, frozen=True):
    """A segment of the cold tier. `sum_digest` is the digest at the end of its .sum, which holds those of the other files."""

    name: str
    first_seq: int
    generation: int
    rows: int
    live: int
    data_bytes: int
    dead_bytes: int
    idx_bytes: int
    dict_bytes: int
    tag_names: int
    node_names: int
    ts_min: int
    ts_max: int
    sum_digest: str

    @property
    def next_seq(self) -> int:
        return self.first_seq + self.rows


class RetiredSegment(msgspec.Struct, frozen=True):
    """A segment that was replaced by a merge; its files are kept for a while."""

    name: str
    retired_at_ms: int
    plan_id: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    number: int
    topic: str
    topic_id: str
    written_at_ms: int
    delete_epoch: int  # lsn up to which deletes are included
    earliest_seq: int
    cold_next_seq: int  # the first seq that is not in the cold tier
    head_seq: int
    ttl_ms: int
    segments: list[Segment]
    losses: list[tuple[int, int, str]] = []
    retired: list[RetiredSegment] = []
    plans: list[str] = []  # most recently committed


class Pin(msgspec.Struct, frozen=True):
    manifest: int
    expires_at_ms: int


# ── Names ─────────────────────────────────────────────────────────────────────────────


def topic_dir(topic_id: int) -> str:
    return f"topics/{topic_id:016x}"


def manifest_name(number: int) -> str:
    return f"MANIFEST-{number}"


def dead_name(number: int) -> str:
    return f"DEAD-{number}"


def pin_name(snapshot_id: str) -> str:
    return f"PIN-{snapshot_id}"


def manifest_number(name: str) -> int | None:
    """The number of a MANIFEST or DEAD file; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else None


def pin_id(name: str) -> str | None:
    match = _PIN.fullmatch(name)
    return match[1] if match else None


def is_manifest_file(name: str) -> bool:
    """Whether a file in a topic's directory is one of the files above."""
    return name == CURRENT_NAME or manifest_number(name) is not None or pin_id(name) is not None


# ── Manifests ─────────────────────────────────────────────────────────────────────────


def encode_manifest(manifest: Manifest) -> bytes:
    line = msgspec.json.encode(manifest)
    return line + b"\n" + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"


def decode_manifest(path: str, data: bytes) -> Manifest:
    line, newline, rest = data.partition(b"\n")
    if not newline or len(rest) < _DIGEST_DIGITS:
        raise Corrupt(path, len(data), "ends before its digest")
    if rest.strip() != xxhash.xxh3_64_hexdigest(line).encode():
        raise Corrupt(path, len(line) + 1, "digest does not match")
    try:
        version = msgspec.json.decode(line, type=_Version).version
        if version != VERSION:
            raise UnsupportedFormat(path, version)
        manifest = msgspec.json.decode(line, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(path, 0, f"cannot be decoded: {error}") from error
    _check(path, manifest)
    return manifest


class _Version(msgspec.Struct):
    version: int


def _check(path: str, manifest: Manifest) -> None:
    """Check what readers rely on: names that match their numbers, and ordered segments that do not overlap."""
    end = 0
    for segment in manifest.segments:
        if segment.name != segment_name(segment.first_seq, segment.generation):
            raise Corrupt(path, 0, f"the name {segment.name[:64]!r} does not match the segment")
        if segment.first_seq < end or segment.rows < 1:
            raise Corrupt(path, 0, f"{segment.name} is empty, or overlaps the previous segment")
        end = segment.next_seq
    if end > manifest.cold_next_seq:
        raise Corrupt(path, 0, f"the segments extend to seq {end - 1}, beyond cold_next_seq")


def encode_current(number: int) -> bytes:
    return f"{manifest_name(number)}\n".encode()


def decode_current(path: str, data: bytes) -> int:
    name = data.decode("ascii", "replace").strip()
    number = manifest_number(name)
    if number is None or name != manifest_name(number):
        raise Corrupt(path, 0, "does not name a manifest")
    return number


# ── Dead rows ─────────────────────────────────────────────────────────────────────────


def encode_dead(masks: Mapping[int, Mask]) -> bytes:
    """Encode masks by first seq; segments without dead rows are left out."""
    packed = {
        first_seq: np.packbits(mask, bitorder="little").tobytes()
        for first_seq, mask in masks.items()
        if mask.any()
    }
    return with_digest(DEAD_MAGIC, msgspec.msgpack.encode(packed))


def decode_dead(path: str, data: bytes, segments: Iterable[Segment]) -> dict[int, Mask]:
    """Masks by first seq, for the segments that have dead rows."""
    payload = without_digest(path, data, DEAD_MAGIC)
    try:
        packed = msgspec.msgpack.decode(payload, type=dict[int, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(path, 0, f"cannot be decoded: {error}") from error
    rows = {segment.first_seq: segment.rows for segment in segments}
    masks: dict[int, Mask] = {}
    for first_seq, bits in packed.items():
        count = rows.get(first_seq)
        if count is None or len(bits) != -(-count // 8):
            raise Corrupt(path, 0, f"does not match the segment at seq {first_seq}")
        found = np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little")
        masks[first_seq] = found.astype(np.bool_)
    return masks


# ── Pins ──────────────────────────────────────────────────────────────────────────────


def encode_pin(pin: Pin) -> bytes:
    return msgspec.json.encode(pin) + b"\n"


def decode_pin(path: str, data: bytes) -> Pin:
    try:
        return msgspec.json.decode(data, type=Pin)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(path, 0, f"cannot be decoded: {error}") from error
