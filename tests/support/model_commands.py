"""Commands for the engine and the same operations for the model (tests/support/model.py), and the comparison of their
results.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.model import Conf, Gap, Match, Model, NewRec, PageView, Refused, Topic
from topics.api.config import TopicConfig
from topics.api.errors import TopicsError
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch

WRITES = ("append", "skip", "delete", "put", "drop")
_FRAME = struct.Struct("<IBBQQQHHI")


class Divergence(AssertionError):
    """Engine and model disagree."""


@dataclass(slots=True, eq=False)
class Sent:
    """One request in flight."""

    kind: str
    topic: str
    args: dict[str, Any]  # arguments of the model's operation
    command: c.Command
    index: int = 0  # position in the order of submissions
    now: int = 0
    expected: Any = None
    acked: bool = False
    synced: bool = False  # its ack promised durability
    wait_until: int = 0  # monotonic time at which a long poll must answer; 0: at once
    changes_seen: int = 0
    may_be_full: bool = False
    changed: bool = True  # whether a reader could notice it
    applied: bool = False  # applied to the model already
    options: list[Any] = field(default_factory=list)  # the results that a read may have, as of its turn
    erases: list[bytes] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        return self.kind in WRITES

    @property
    def is_erase(self) -> bool:
        return isinstance(self.command, c.Delete) and self.command.erase

    def apply(self, model: Model, now: int) -> Any:
        if self.kind == "list":
            return model.list(now, **self.args)
        return getattr(model, self.kind)(now, self.topic, **self.args)


# ---- requests, for engine and model


def _conf(conf: Conf) -> TopicConfig:
    return TopicConfig(**{name: getattr(conf, name) for name in Conf.__slots__})


def _match(match: Match | None) -> TagMatch | None:
    if match is None:
        return None
    kind, text = match
    return TagMatch("Eq", text) if kind == "eq" else TagMatch("Glob", text + b"*")


def append(topic: str, records: list[NewRec], **args: Any) -> Sent:
    columns = c.Records(payloads=[rec.payload for rec in records])
    if any(rec.tag is not None for rec in records):
        columns.tags = [rec.tag for rec in records]
    if any(rec.node is not None for rec in records):
        columns.nodes = [rec.node for rec in records]
    if any(rec.ttl_ms for rec in records):
        columns.ttls_ms = [rec.ttl_ms for rec in records]
    if any(rec.size is not None for rec in records):
        columns.sizes = [rec.accounted() for rec in records]
    command = c.Append(
        topic,
        columns,
        idempotency_key=args.get("key"),
        create=args.get("create"),
        config=_conf(args["conf"]) if args.get("conf") else None,
        if_last_seq=args.get("if_last_seq"),
        if_tag_last_seq=args.get("if_tag_last_seq"),
    )
    return Sent("append", topic, {"records": records, **args}, command)


def skip(topic: str, count: int) -> Sent:
    return Sent("skip", topic, {"count": count}, c.Skip(topic, count))


def delete(topic: str, *, erase: bool = False, **args: Any) -> Sent:
    command = c.Delete(
        topic,
        before_seq=args.get("before_seq"),
        match=_match(args.get("match")),
        seqs=args.get("seqs"),
        keep=args.get("keep"),
        erase=erase,
    )
    return Sent("delete", topic, args, command)


def put(topic: str, conf: Conf) -> Sent:
    return Sent("put", topic, {"conf": conf}, c.PutTopic(topic, _conf(conf)))


def drop(topic: str, *, if_empty: bool = False) -> Sent:
    return Sent("drop", topic, {"if_empty": if_empty}, c.DropTopic(topic, if_empty))


def diff(topic: str, from_seq: int = 0, *, wait_ms: int = 0, touch: bool = True, **args: Any) -> Sent:
    options = {**args, "match": _match(args.get("match"))}
    command = c.Diff(topic, from_seq, wait_ms=wait_ms, touch=touch, **options)
    return Sent("diff", topic, {"from_seq": from_seq, **args}, command, wait_until=wait_ms)


def state(topic: str, *, touch: bool = True) -> Sent:
    return Sent("state", topic, {}, c.State(topic, touch))


def list_topics(**args: Any) -> Sent:
    return Sent("list", "", args, c.ListTopics(**args))


def last_by_tag(topic: str, match: Match, *, each: bool = False) -> Sent:
    return Sent("last_by_tag", topic, {"match": match, "each": each}, c.LastByTag(topic, _match(match), each))  # type: ignore[arg-type]


def next_by_tag(topic: str, match: Match, from_seq: int) -> Sent:
    command = c.NextByTag(topic, _match(match), from_seq)  # type: ignore[arg-type]
    return Sent("next_by_tag", topic, {"match": match, "from_seq": from_seq}, command)


def count_by_tag(topic: str, match: Match) -> Sent:
    return Sent("count_by_tag", topic, {"match": match}, c.CountByTag(topic, _match(match)))  # type: ignore[arg-type]


# ---- results of the engine, as the model has them


def page_rows(page: c.Page) -> list[tuple[int, int, bytes | None, bytes | None, bytes]]:
    """The records of a page, decoded here from their frames and compared with the page's columns."""
    rows = []
    for i, seq in enumerate(page.seqs):
        buffer = page.frames[page.which[i] if page.which is not None else 0]
        start = page.starts[i]
        frame = bytes(buffer[start : start + page.lengths[i]])
        length, kind, _, _, frame_seq, ts, *_ = _FRAME.unpack_from(frame)
        if length + 4 != len(frame) or kind != 1 or frame_seq != seq or ts != page.timestamps[i]:
            raise Divergence(f"row {i} of {page.topic!r}: the frame is not of seq {seq}: {frame!r}")
        _, _, tag, node, data = _frame_row(frame, 0)
        if page.tags is not None and page.tags[i] != tag:
            raise Divergence(f"seq {seq} of {page.topic!r}: column tag {page.tags[i]!r}, frame {tag!r}")
        if page.nodes is not None and page.nodes[i] != node:
            raise Divergence(f"seq {seq} of {page.topic!r}: column node {page.nodes[i]!r}, frame {node!r}")
        rows.append((seq, ts, tag, node, data))
    return rows


def _frame_row(buffer: bytes, start: int) -> tuple[int, int, bytes | None, bytes | None, bytes]:
    """Seq, time, tag, node and payload of the frame at `start`."""
    _, _, flags, _, seq, ts, node_len, tag_len, data_len = _FRAME.unpack_from(buffer, start)
    at = start + _FRAME.size
    node, tag = buffer[at : at + node_len], buffer[at + node_len : at + node_len + tag_len]
    data = buffer[at + node_len + tag_len : at + node_len + tag_len + data_len]
    return seq, ts, tag if flags & 1 else None, node if flags & 2 else None, data


def frame_rows(page: c.FramePage) -> list[tuple[int, int, bytes | None, bytes | None, bytes]]:
    """The records of a page that consists of frames only."""
    data, at, rows = b"".join(page.chunks), 0, []
    while at < len(data):
        length, kind, *_ = _FRAME.unpack_from(data, at)
        if kind != 1 or at + length + 4 > len(data):
            raise Divergence(f"{page.topic!r}: incomplete frame at byte {at} of {data!r}")
        rows.append(_frame_row(data, at))
        at += length + 4
    if len(rows) != page.count:
        raise Divergence(f"{page.topic!r}: {len(rows)} frames in a page that says {page.count}")
    return rows


def conf_of(config: TopicConfig) -> Conf:
    return Conf(**{name: getattr(config, name) for name in Conf.__slots__})


def plain(kind: str, result: Any) -> Any:
    """An engine's result in the form of the model's."""
    if isinstance(result, TopicsError):
        actual = result.detail.get("actual")
        return Refused(result.code, actual if isinstance(actual, int) else None)
    if isinstance(result, c.Appended):
        if kind == "skip":
            return ("skipped", result.first_seq, result.count, result.head_seq)
        return ("appended", result.first_seq, result.count, result.head_seq, result.created, result.deduped)
    if isinstance(result, c.Deleted):
        return ("deleted", result.deleted, result.earliest_seq, result.head_seq, result.count, result.bytes)
    if isinstance(result, c.TopicPut):
        return ("put", result.created, conf_of(result.config))
    if isinstance(result, c.TopicDropped):
        return ("dropped", result.deleted)
    if isinstance(result, c.TopicState):
        return (
            "state",
            result.head_seq,
            result.earliest_seq,
            result.count,
            result.bytes,
            conf_of(result.config),
        )
    if isinstance(result, c.TopicList):
        return ("list", [(t.topic, t.head_seq, t.earliest_seq, t.count, t.bytes) for t in result.topics])
    if isinstance(result, c.TagCounts):
        return ("counts", sorted(result.counts))
    assert isinstance(result, c.Page | c.FramePage), result
    if kind in ("last_by_tag", "next_by_tag"):
        return ("rows", sorted(page_rows(result)))
    stone = result.tombstone
    gap = Gap(stone.gap_from, stone.gap_to, stone.reason) if stone is not None else None
    nxt = result.next_from_seq
    rows = frame_rows(result) if isinstance(result, c.FramePage) else page_rows(result)
    return PageView(rows, nxt, nxt, result.head_seq, result.earliest_seq, gap)


def agree(got: Any, wanted: Any) -> bool:
    if isinstance(got, PageView) and isinstance(wanted, PageView):
        return (got.rows, got.head_seq, got.earliest_seq, got.gap) == (
            wanted.rows,
            wanted.head_seq,
            wanted.earliest_seq,
            wanted.gap,
        ) and wanted.next_from_seq <= got.next_from_seq <= wanted.next_from_seq_max
    return bool(got == wanted)


@dataclass(slots=True)
class Seen:
    """Everything that a reader finds in one topic, reading from the start."""

    conf: Conf
    head: int
    earliest: int
    count: int
    bytes: int
    rows: list[Any]
    gaps: list[Gap]


def is_cut(got: Any, wanted: Any) -> bool:
    """Whether `got` is the beginning of the wanted page: a page that would span too many cold blocks ends early."""
    if not (isinstance(got, PageView) and isinstance(wanted, PageView)):
        return False
    count = len(got.rows)
    same = got.rows == wanted.rows[:count] and (got.gap, got.head_seq) == (wanted.gap, wanted.head_seq)
    return same and 0 < count < len(wanted.rows) and got.next_from_seq == wanted.rows[count][0] - 1


def read_all(read: Callable[[int], PageView]) -> tuple[list[Any], list[Gap]]:
    rows: list[Any] = []
    gaps: list[Gap] = []
    cursor = 0
    for _ in range(10_000):
        page = read(cursor)
        if page.gap is not None:
            gaps.append(page.gap)
        rows += page.rows
        if page.next_from_seq >= page.head_seq:
            return rows, gaps
        if page.next_from_seq == cursor and page.gap is None:
            raise Divergence(f"a reader at {cursor} makes no progress: {page}")
        cursor = page.next_from_seq
    raise Divergence("reading never ends")


def seen_of(topic: Topic, now: int) -> Seen:
    topic.expire(now)
    rows, gaps = read_all(lambda cursor: topic.diff(now, cursor, limit=1000, max_bytes=8 << 20))
    return Seen(topic.conf, topic.head, topic.earliest, topic.count, topic.bytes, rows, gaps)
