"""Decompression of request bodies by admission: valid gzip is accepted, everything else refused, within the limits."""

from __future__ import annotations

import gzip

import pytest

from topics.protocols.http.admission import GUNZIP_BYTES, GUNZIP_MEMBERS_MAX, GUNZIP_SLICE, gunzip

TEXT = b"".join(b"%d," % i for i in range(40_000))
PACKED = gzip.compress(TEXT, mtime=0)


def members(*parts: bytes) -> bytes:
    return b"".join(gzip.compress(part, mtime=0) for part in parts)


@pytest.mark.parametrize(
    ("body", "decoded"),
    [
        (PACKED, TEXT),
        (members(b""), b""),
        (members(b"one, ", b"", b"two"), b"one, two"),
        (members(TEXT, b"and more"), TEXT + b"and more"),
        (members(*[b"a"] * GUNZIP_MEMBERS_MAX), b"a" * GUNZIP_MEMBERS_MAX),
    ],
)
def test_gzip_bodies_are_decoded(body: bytes, decoded: bytes) -> None:
    assert gunzip(body, 1 << 20) == decoded


def test_members_may_end_anywhere_in_a_part() -> None:
    """A member ends, and the next begins, at each of the last bytes of a part and the first of the next."""
    for size in range(GUNZIP_BYTES - 40, GUNZIP_BYTES + 2):
        stored = gzip.compress(bytes(size), compresslevel=0, mtime=0)
        assert gunzip(stored + PACKED, 1 << 20) == bytes(size) + TEXT


def test_slices_may_end_anywhere_in_what_is_unpacked() -> None:
    """A slice may end where all input is consumed, but zlib still has output."""
    for size in (*range(GUNZIP_SLICE - 2, GUNZIP_SLICE + 300, 23), 3 * GUNZIP_SLICE):
        for text in (bytes(size), TEXT[:5] + bytes(size)):
            assert gunzip(members(text), 1 << 20) == text
            assert gunzip(members(text)[:-1], 1 << 20) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"text",
        PACKED[:-1],
        PACKED[:-8] + bytes(8),
        PACKED + b"more",
        PACKED + members(b"more")[:-1],
        members(*[b"a"] * (GUNZIP_MEMBERS_MAX + 1)),
    ],
)
def test_invalid_gzip_bodies_are_refused(body: bytes) -> None:
    assert gunzip(body, 1 << 20) is None


@pytest.mark.parametrize("bytes_max", [1, 15])
def test_no_more_is_decoded_than_is_allowed(bytes_max: int) -> None:
    for body in (members(b"a" * 16), members(b"a" * 8, b"a" * 8), members(bytes(10_000_000))):
        decoded = gunzip(body, bytes_max)
        assert decoded is not None and len(decoded) == bytes_max + 1
    assert gunzip(members(b"a" * bytes_max), bytes_max) == b"a" * bytes_max
