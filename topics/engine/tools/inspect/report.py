"""The report of `topics inspect`."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import msgspec

from topics.api.errors import Corrupt, TopicsError, UnsupportedFormat
from topics.engine.storage import frames
from topics.engine.storage.control import kind_name

T = TypeVar("T")
Fact = str | int | bool | list[str] | None

_FLAGS = {
    frames.HAS_TAG: "tag",
    frames.HAS_NODE: "node",
    frames.RAW: "raw",
    frames.HAS_EXT: "ext",
    frames.ERASED: "erased",
}
NAME_SHOWN_MAX = 200  # longest tag, node or topic shown, in characters


class Damage(msgspec.Struct, frozen=True):
    """Damage to a file, at this byte."""

    path: str
    offset: int
    what: str


class Digest(msgspec.Struct, frozen=True):
    of: str
    holds: bool


class Record(msgspec.Struct, frozen=True):
    """One frame. `size` is that of its payload, `bytes` that of the whole frame, or 0 if the frame is gone."""

    type: str
    topic_id: int
    seq: int
    ts: int
    offset: int
    bytes: int
    size: int
    flags: list[str]
    tag: str | None = None
    node: str | None = None
    lsn: int | None = None  # only in a log
    whole: bool | None = None  # whether it matches its digest; None: it was not read


class EnvelopeLine(msgspec.Struct, frozen=True):
    lsn: int
    prev_lsn: int
    synced_lsn: int
    offset: int
    bytes: int
    frames: dict[str, int]  # number of frames by type


class TopicLine(msgspec.Struct, frozen=True):
    """A topic's row in a snapshot."""

    id: int
    name: str
    records: int
    first_seq: int
    head: int
    live_bytes: int
    applied_lsn: int
    segments: int
    cold_segments: int
    inline_bytes: int
    consumers: int


class PatchLine(msgspec.Struct, frozen=True):
    path: str
    offset: int
    bytes: int


class FileLine(msgspec.Struct, frozen=True):
    """One file of a segment."""

    name: str
    bytes: int
    version: int | None = None


class Inspection(msgspec.Struct, omit_defaults=True):
    path: str
    kind: str
    bytes: int
    version: int | None
    sound: bool = True
    problems: list[Damage] = []
    notes: list[str] = []
    facts: dict[str, Fact] = {}
    digests: list[Digest] = []
    files: list[FileLine] = []
    records: list[Record] = []
    envelopes: list[EnvelopeLine] = []
    topics: list[TopicLine] = []
    patches: list[PatchLine] = []
    left_out: dict[str, int] = {}  # number of items of each list that are not shown

    def add_problem(self, path: str, offset: int, what: str) -> None:
        self.problems.append(Damage(path, offset, what))
        self.sound = False

    def add_error(self, error: TopicsError | OSError, path: str) -> None:
        if isinstance(error, Corrupt):
            self.add_problem(error.path, error.offset, error.problem)
        elif isinstance(error, UnsupportedFormat):
            what = f"has format version {error.version}, which this version of topics does not support"
            self.add_problem(error.path, 8, what)
        else:
            self.add_problem(path, 0, f"cannot be read: {getattr(error, 'strerror', None) or error}")


class FirstAndLast(Generic[T]):
    """Keeps the first and last few of many items, and their number."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=each)
        self.count = 0

    def add(self, item: T) -> None:
        self.count += 1
        if len(self._first) < self._each:
            self._first.append(item)
        else:
            self._last.append(item)

    @property
    def shown(self) -> list[T]:
        return [*self._first, *self._last]

    @property
    def left_out(self) -> int:
        return self.count - len(self._first) - len(self._last)


def flag_names(flags: int) -> list[str]:
    known = [name for bit, name in _FLAGS.items() if flags & bit]
    rest = flags & ~sum(_FLAGS)
    return [*known, f"0x{rest:02x}"] if rest else known


def text_of(name: bytes) -> str:
    """A name as text. In a damaged file it may be any bytes."""
    text = name[: 4 * NAME_SHOWN_MAX].decode("utf-8", "backslashreplace")
    return text if len(text) <= NAME_SHOWN_MAX else text[:NAME_SHOWN_MAX] + "…"


def record_of(frame: bytes, offset: int, lsn: int | None = None, *, whole: bool | None = None) -> Record:
    """Describe a frame, which may be truncated after its header."""
    _, kind, flags, topic_id, seq, ts, node_len, tag_len, data_len = frames.HEADER.unpack_from(frame)
    tag_at = frames.HEADER_BYTES + node_len
    return Record(
        type=kind_name(kind),
        topic_id=topic_id,
        seq=seq,
        ts=ts,
        offset=offset,
        bytes=len(frame),
        size=data_len,
        flags=flag_names(flags),
        tag=text_of(frame[tag_at : tag_at + tag_len]) if flags & frames.HAS_TAG else None,
        node=text_of(frame[frames.HEADER_BYTES : tag_at]) if flags & frames.HAS_NODE else None,
        lsn=lsn,
        whole=frames.frame_is_valid(frame) if whole is None else whole,
    )
