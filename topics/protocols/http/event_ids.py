"""The id of an event: where all topics of its stream stand.

An id is base64url without padding of a JSON object, topic → cursor. It is made of pieces, one a topic, each padded with
blanks to a multiple of three bytes, so that the texts of the pieces can be kept and just joined.

An id comes back in the head of a request, which is bounded. A stream of more topics than `name_all` allows names only those
that have moved since a save of its session, and under `#`, which no topic is called, the number of that save.

A cursor alone does not say which epoch it is of. After a stream has told that a topic was created again, and while its cursor
could be one of the epoch before, its ids say so under `#` and the topic's name, with a checksum of the epoch: the client that
sends one has heard of it.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable
from zlib import crc32

import msgspec

from topics.link.watch import ID_TOPICS_MAX

_END = urlsafe_b64encode(b"}  ")
_EMPTY = urlsafe_b64encode(b"{} ")
_BRACE = urlsafe_b64encode(b'{" ')[:2]  # the text up to here depends on `{"` alone, or in a piece on `,"`
SAVE = "#"
ID_BYTES_MAX = 1 << 20
ID_NAMES_BYTES_MAX = 4096  # with their cursors, and as base64, names of that length make 8 KiB at most
_CURSOR_MAX = (1 << 64) - 1

_decoder = msgspec.json.Decoder(dict[str, int])


def name_all(topics: Collection[str]) -> bool:
    """Whether the ids of a stream of these topics name all of them."""
    return len(topics) <= ID_TOPICS_MAX and sum(map(len, topics)) <= ID_NAMES_BYTES_MAX


def piece(topic: str, cursor: int) -> bytes:
    """One topic's part of an id, for any place but the first."""
    return _padded(b",%b:%d" % (msgspec.json.encode(topic), cursor))


def heard_piece(topic: str, epoch: str) -> bytes:
    """Says that the client has heard of this epoch of a topic."""
    return piece(SAVE + topic, crc32(epoch.encode()))


def first_piece(topic: str, cursor: int) -> bytes:
    return _padded(b"{%b:%d" % (msgspec.json.encode(topic), cursor))


def _padded(text: bytes) -> bytes:
    return urlsafe_b64encode(text + b"  "[: -len(text) % 3])


def join(pieces: Iterable[bytes]) -> bytes:
    """A whole id. Any piece may be the first: the topics before it may be gone since it was made."""
    joined = b"".join(pieces)
    return _BRACE + joined[2:] + _END if joined else _EMPTY


def decode(text: str) -> tuple[int | None, dict[str, int]] | None:
    """The save that it builds on, if it does, and cursors; None when it is not one of ours."""
    named = _decode(text)
    if named is None:
        return None
    return named.pop(SAVE, None), {name: at for name, at in named.items() if not name.startswith(SAVE)}


def has_heard(text: str, topic: str, epoch: str) -> bool:
    """Whether a client that sends this id has been told of this epoch of a topic."""
    named = _decode(text)
    return named is not None and named.get(SAVE + topic) == crc32(epoch.encode())


def _decode(text: str) -> dict[str, int] | None:
    if not text or len(text) > ID_BYTES_MAX or not text.isascii():
        return None
    try:
        named = _decoder.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, msgspec.DecodeError):
        return None
    return named if all(0 <= number <= _CURSOR_MAX for number in named.values()) else None
