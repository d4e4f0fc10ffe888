"""Forwarded copies: turns frames of a source into records for a dest, with what the rule keeps, drops and adds.

A batch of plain records is sliced by columns; other batches are decoded record by record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from topics.api.limits import META_KEYS_MAX
from topics.engine.commands.forwards import HOPS_MAX, Copies, Forward
from topics.engine.commands.topics import Records
from topics.engine.storage import frames
from topics.engine.storage.index import SMALL
from topics.engine.topic.flows import current_epoch

Offsets = npt.NDArray[np.int64]

CYCLE_FLAG = 0x80  # in the hop count: the record passed a rule that may be part of a cycle
HOPS_MASK = 0x7F

ROUTER_KEY = "_topics_router"
ORIGINAL_KEY = "_topics_original_meta"

_meta = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class CopyRun:
    """Records of one write: either all JSON or all raw bytes."""

    raw: bool
    seqs: list[int] = field(default_factory=list)  # at the source
    payloads: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    tags: list[bytes | None] = field(default_factory=list)
    nodes: list[bytes | None] = field(default_factory=list)
    meta_lens: list[int] = field(default_factory=list)
    header_lens: list[int] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)
    _records: Records | None = None

    def cut(self, count: int) -> None:
        """Keep the first `count` of them."""
        self._records = None
        columns: tuple[list[Any], ...] = (
            self.seqs, self.payloads, self.sizes, self.tags, self.nodes, self.meta_lens, self.header_lens,
            self.hops,
        )  # fmt: skip
        for column in columns:
            if len(column) > count:  # two columns may be the same list
                del column[count:]

    def records(self) -> Records:
        """All of them as one write. Must not be changed."""
        if self._records is None:
            self._records = Records(
                self.payloads,
                _column(self.tags),
                _column(self.nodes),
                self.meta_lens if not self.raw and any(self.meta_lens) else None,
                self.header_lens if self.raw else None,
                sizes=self.sizes if self.sizes != [len(payload) for payload in self.payloads] else None,
                raw=self.raw,
                hops=self.hops,
            )
        return self._records


class CopyUnpacker:
    """Unpacks batches, with a cache of one. The dests of a source on one shard get the same batch one after the other, and comparing
    it with the last one costs a fraction of unpacking it. Equal frames have equal topic ids, seqs and digests.
    """

    def __init__(self) -> None:
        self._frames = b""
        self._options: tuple[int, bool, bool, bool] | None = None
        self._runs: list[CopyRun] = []

    def runs_of(self, copies: Copies, after: int) -> list[CopyRun]:
        """`runs_of`; the result is shared and must not be changed."""
        forward = copies.forward
        if forward.guarantee == "exactly_once":  # each record names the rule
            return runs_of(copies, after)
        options = after, forward.preserve_node, forward.preserve_tag, forward.allow_cycle
        if options != self._options or copies.frames != self._frames:
            self._runs = runs_of(copies, after)
            self._frames, self._options = copies.frames, options
        return self._runs


def runs_of(copies: Copies, after: int) -> list[CopyRun]:
    """The records of a batch after seq `after` of the source, in order."""
    starts: list[int] = []
    frames.frame_starts(copies.frames, 0, len(copies.frames), starts)
    if len(starts) < SMALL:
        return _one_by_one(copies, starts, after)
    columns = frames.decode_columns(copies.frames, starts)
    fresh = np.flatnonzero(columns.headers["seq"] > after)
    columns = columns.take(fresh) if len(fresh) < len(starts) else columns
    if not len(columns.starts):
        return []
    special = int(np.bitwise_or.reduce(columns.headers["flags"])) & (frames.RAW | frames.HAS_EXT)
    if special or copies.forward.guarantee == "exactly_once":
        return _one_by_one(copies, columns.starts.tolist(), after)
    return [_plain_run(copies.forward, columns)]


def _plain_run(forward: Forward, columns: frames.Columns) -> CopyRun:
    """Records with only data, tag and node that are not copies themselves."""
    data, headers = columns.buffer, columns.headers
    node_at = columns.starts + frames.HEADER_BYTES
    tag_at = node_at + headers["node_len"]
    payload_at = tag_at + headers["tag_len"]
    ends = payload_at + headers["data_len"]
    count = len(columns.starts)
    none: list[bytes | None] = [None] * count
    zeros = [0] * count
    run = CopyRun(
        False, headers["seq"].tolist(), _slices(data, payload_at, ends), headers["data_len"].tolist()
    )
    run.tags = _present(data, tag_at, payload_at, headers, frames.HAS_TAG) if forward.preserve_tag else none
    run.nodes = _present(data, node_at, tag_at, headers, frames.HAS_NODE) if forward.preserve_node else none
    run.meta_lens = run.header_lens = zeros
    run.hops = [_next_hop(0, forward.allow_cycle)] * count
    return run


def _slices(data: bytes, starts: Offsets, ends: Offsets) -> list[bytes]:
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist())]


def _present(
    data: bytes, starts: Offsets, ends: Offsets, headers: npt.NDArray[np.void], flag: int
) -> list[bytes | None]:
    has = headers["flags"] & flag
    if not has.any():
        return [None] * len(has)
    found = zip(_slices(data, starts, ends), has.tolist())
    return [text if is_there else None for text, is_there in found]


def _one_by_one(copies: Copies, starts: list[int], after: int) -> list[CopyRun]:
    data, forward = copies.frames, copies.forward
    runs: list[CopyRun] = []
    run: CopyRun | None = None
    unpack = frames.HEADER.unpack_from
    exact = forward.guarantee == "exactly_once"
    for start in starts:
        _, _, flags, _, seq, _, node_len, tag_len, data_len = unpack(data, start)
        if seq <= after:
            continue
        found = frames.read_extensions(data, start) if flags & frames.HAS_EXT else {}
        hops = int.from_bytes(found.get(frames.EXT_HOPS, b""), "little")
        if hops & CYCLE_FLAG and hops & HOPS_MASK >= HOPS_MAX:
            continue
        raw = bool(flags & frames.RAW)
        if run is None or run.raw != raw:
            run = CopyRun(raw)
            runs.append(run)
        node_at = start + frames.HEADER_BYTES
        tag_at = node_at + node_len
        payload_at = tag_at + tag_len
        payload = data[payload_at : payload_at + data_len]
        size = int.from_bytes(found[frames.EXT_SIZE], "little") if frames.EXT_SIZE in found else data_len
        meta_len = int.from_bytes(found.get(frames.EXT_META, b""), "little")
        if exact and not raw:
            text = payload[: data_len - meta_len]
            meta = _with_origin(payload[data_len - meta_len :], copies, seq)
            size += len(meta) - meta_len
            payload, meta_len = text + meta, len(meta)
        run.seqs.append(seq)
        run.payloads.append(payload)
        run.sizes.append(size)
        run.tags.append(data[tag_at:payload_at] if flags & frames.HAS_TAG and forward.preserve_tag else None)
        run.nodes.append(data[node_at:tag_at] if flags & frames.HAS_NODE and forward.preserve_node else None)
        run.meta_lens.append(meta_len)
        run.header_lens.append(int.from_bytes(found.get(frames.EXT_HEADERS, b""), "little"))
        run.hops.append(_next_hop(hops, forward.allow_cycle))
    return runs


def _next_hop(hops: int, may_cycle: bool) -> int:
    """Hops are counted on every path, but limited only on a path that may be a cycle: long chains are allowed."""
    counted = min((hops & HOPS_MASK) + 1, HOPS_MASK)
    return counted | (CYCLE_FLAG if may_cycle else hops & CYCLE_FLAG)


def _column(values: list[bytes | None]) -> list[bytes | None] | None:
    return values if any(value is not None for value in values) else None


def _with_origin(meta: bytes, copies: Copies, seq: int) -> bytes:
    """The meta of a record with its origin added."""
    epoch = current_epoch(copies.epochs)
    name = copies.forward.name
    origin = msgspec.json.encode(
        {
            "idempotency_key": f"router:{name}:{copies.source_id}:{epoch}:{seq}",
            "router": name,
            "source_topic": copies.source,
            "source_topic_id": copies.source_id,
            "source_epoch": epoch,
            "source_seq": seq,
        }
    )
    if not meta:
        return b'{"%s":%s}' % (ROUTER_KEY.encode(), origin)
    try:
        fields = _meta.decode(meta)
    except msgspec.MsgspecError:
        fields = None
    if fields is None or len(fields.keys() - {ROUTER_KEY}) >= META_KEYS_MAX:
        return b'{"%s":%s,"%s":%s}' % (ORIGINAL_KEY.encode(), meta, ROUTER_KEY.encode(), origin)
    if ROUTER_KEY in fields:  # a copy of a copy: the last origin is kept
        fields[ROUTER_KEY] = msgspec.Raw(origin)
        return msgspec.json.encode(fields)
    # Insert into the original text: numbers, order and repeated keys stay as sent.
    body = meta.rstrip()[:-1].rstrip()
    comma = b"" if body.endswith(b"{") and not fields else b","
    return b'%s%s"%s":%s}' % (body, comma, ROUTER_KEY.encode(), origin)
