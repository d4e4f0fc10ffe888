"""Ids of events of watch streams: the cursors of all topics of the stream. A front makes them, a shard reads them.

An id is a JSON object, topic → cursor, in base64url without padding. It is joined from one piece per topic, each padded with
spaces to a multiple of three bytes, so that the encoded pieces can be cached.

A client sends the id back in a request header, whose size is limited. If a stream has more topics than `lists_all` allows, its
ids list only those that have moved since the last save of the session, and the number of that save under `#`, which is
not a valid topic name.

A cursor does not include its epoch. After a stream has reported that a topic was recreated, and while the cursor could also
belong to the previous epoch, its ids contain a checksum of the new epoch under `#` plus the topic name. It shows that the client has
received the report.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable
from zlib import crc32

import msgspec

from topics.link.watch import ID_TOPICS_MAX

_END = urlsafe_b64encode(b"}  ")
_EMPTY = urlsafe_b64encode(b"{} ")
_BRACE = urlsafe_b64encode(b'{" ')[:2]  # the first two characters depend only on `{"`, or `,"` in a piece
SAVE = "#"
ID_BYTES_MAX = 1 << 20
ID_NAMES_BYTES_MAX = 4096  # total length of the names; with cursors, as base64, at most 8 KiB
_CURSOR_MAX = (1 << 64) - 1

_decoder = msgspec.json.Decoder(dict[str, int])


def lists_all(topics: Collection[str]) -> bool:
    """Whether the ids of a stream of these topics list all of them."""
    return len(topics) <= ID_TOPICS_MAX and sum(map(len, topics)) <= ID_NAMES_BYTES_MAX


def piece(topic: str, cursor: int) -> bytes:
    """The part of an id for one topic, in any position but the first."""
    return _padded(b",%b:%d" % (msgspec.json.encode(topic), cursor))


def epoch_piece(topic: str, epoch: str) -> bytes:
    """The part of an id that shows that the client knows this epoch of a topic."""
    return piece(SAVE + topic, crc32(epoch.encode()))


def first_piece(topic: str, cursor: int) -> bytes:
    return _padded(b"{%b:%d" % (msgspec.json.encode(topic), cursor))


def _padded(text: bytes) -> bytes:
    return urlsafe_b64encode(text + b"  "[: -len(text) % 3])


def join(pieces: Iterable[bytes]) -> bytes:
    """Join pieces to an id. Any piece may come first: topics before it may have been removed since it was made."""
    joined = b"".join(pieces)
    return _BRACE + joined[2:] + _END if joined else _EMPTY


def decode(text: str) -> tuple[int | None, dict[str, int]] | None:
    """The number of the save that the id refers to, if any, and its cursors; None if it is not a valid id."""
    named = _decode(text)
    if named is None:
        return None
    return named.pop(SAVE, None), {name: at for name, at in named.items() if not name.startswith(SAVE)}


def knows_epoch(text: str, topic: str, epoch: str) -> bool:
    """Whether the id shows that the client knows this epoch of a topic."""
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
