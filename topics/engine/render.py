"""From a page of frames to JSON text, without parsing either.

Payloads are JSON already and are spliced in as they lie. What is left to write per record is a seq and a time: for a
page of some size their digits are made column by column, which costs a third of formatting them one by one.
"""

from __future__ import annotations

from base64 import b64encode

import msgspec
import numpy as np
import numpy.typing as npt

from topics.engine.commands import Column, Page
from topics.engine.frames import (
    DIGEST_BYTES,
    EXT_HEADERS,
    EXT_META,
    HAS_EXT,
    HEADER_BYTES,
    RAW,
    read_extensions,
)

Ints = npt.NDArray[np.int64]

_DATA_KEY = b',"data":'
_META_KEY = b',"meta":'
_CLOSE = b"},"  # of the record before; it is cut off in front of the first one
_COLUMNS_FROM = 48  # rows; below it the fixed cost of the numpy calls shows
_FOUR_DIGITS = np.array([b"%04d" % i for i in range(10_000)], dtype="S4").view(np.uint32)
_PAYLOAD_LENGTHS = np.dtype([("node", "<u2"), ("tag", "<u2"), ("data", "<u4")])
_PAYLOAD_LENGTHS_AT = 30  # in the frame header


def render_records(
    page: Page, *, include_tags: bool = False, include_meta: bool = True, include_data: bool = True
) -> bytes:
    """The records as JSON objects with commas between, without the brackets of an array.

    Keys that a record has no value for are left out. A raw record has `"$encoding":"base64"`, and its data and its
    header block are base64.
    """
    if not len(page.seqs):
        return b""
    flags = int(np.bitwise_or.reduce(page.flags))
    labels = _labels(page.nodes, page.tags if include_tags else None)
    special = bool(flags & (RAW | HAS_EXT))
    if labels is None and not special and include_data:
        columns = [_heads(page, _DATA_KEY), _payloads(page, flags)]
    else:
        columns = [_heads(page, b"")]
        if labels is not None:
            columns.append(labels)
        if special:
            columns.append(_special_bodies(page, include_meta, include_data))
        elif include_data:
            columns += [[_DATA_KEY] * len(page.seqs), _payloads(page, flags)]
    return _interleave(columns)


def _interleave(columns: list[list[bytes]]) -> bytes:
    """Row by row the pieces of every column. The first column also ends the object before."""
    stride = len(columns)
    pieces = [b""] * (stride * len(columns[0]))
    for i, column in enumerate(columns):
        pieces[i::stride] = column
    pieces[0] = pieces[0][len(_CLOSE) :]
    pieces.append(b"}")
    return b"".join(pieces)


# -- seq and time ------------------------------------------------------------------------------------------


def _heads(page: Page, suffix: bytes) -> list[bytes]:
    """`},{"$seq":1,"$ts":1748470000123` and the suffix, for every record."""
    times = np.asarray(page.timestamps, dtype=np.int64)
    time_width = len(str(int(times[0])))
    if len(page.seqs) < _COLUMNS_FROM or time_width != len(str(int(times[-1]))):
        return _heads_one_by_one(page.seqs, page.timestamps, suffix)
    seqs = np.asarray(page.seqs, dtype=np.int64)
    heads: list[bytes] = []
    start = 0
    while start < len(seqs):
        # The seqs ascend: those with as many digits as this one lie in front of the next power of ten.
        seq_width = len(str(int(seqs[start])))
        end = int(np.searchsorted(seqs, 10**seq_width)) if int(seqs[-1]) >= 10**seq_width else len(seqs)
        if end - start < _COLUMNS_FROM:
            heads += _heads_one_by_one(page.seqs[start:end], times[start:end].tolist(), suffix)
        else:
            heads += _heads_in_columns(seqs[start:end], times[start:end], seq_width, time_width, suffix)
        start = end
    return heads


def _heads_one_by_one(seqs: Column, times: Column, suffix: bytes) -> list[bytes]:
    template = _CLOSE + b'{"$seq":%d,"$ts":%d' + suffix
    return [template % pair for pair in zip(seqs, times)]


def _heads_in_columns(seqs: Ints, times: Ints, seq_width: int, time_width: int, suffix: bytes) -> list[bytes]:
    before, between = _CLOSE + b'{"$seq":', b',"$ts":'
    blank = before + bytes(seq_width) + between + bytes(time_width) + suffix
    text = np.empty((len(seqs), len(blank)), dtype=np.uint8)
    text[:] = np.frombuffer(blank, dtype=np.uint8)
    seqs_end = len(before) + seq_width
    _put_digits(text[:, len(before) : seqs_end], seqs)
    times_start = seqs_end + len(between)
    _put_digits(text[:, times_start : times_start + time_width], times)
    heads: list[bytes] = text.reshape(-1).view(f"S{len(blank)}").tolist()
    return heads


def _put_digits(text: npt.NDArray[np.uint8], numbers: Column) -> None:
    """Write one number a row, as many digits as there are columns."""
    rest = np.asarray(numbers, dtype=np.int64)
    end = text.shape[1]
    while end > 0:
        upper = rest // 10_000
        digits = _FOUR_DIGITS[rest - upper * 10_000].view(np.uint8).reshape(-1, 4)
        size = min(4, end)
        text[:, end - size : end] = digits[:, 4 - size :]
        rest, end = upper, end - size


# -- node and tag ------------------------------------------------------------------------------------------


def _labels(nodes: list[bytes | None] | None, tags: list[bytes | None] | None) -> list[bytes] | None:
    """`,"$node":"…","$tag":"…"` for every record, or None when no record has either."""
    named = [(key, names) for key, names in ((b"$node", nodes), (b"$tag", tags)) if names is not None]
    if not named:
        return None
    columns: list[list[bytes]] = []
    for key, names in named:
        texts = {name: _member(key, name) for name in dict.fromkeys(names)}
        columns.append([texts[name] for name in names])
    return columns[0] if len(columns) == 1 else [a + b for a, b in zip(*columns)]


def _member(key: bytes, value: bytes | None) -> bytes:
    if value is None:
        return b""
    text = value.decode("utf-8", "surrogateescape")
    try:
        encoded = msgspec.json.encode(text)
    except UnicodeEncodeError:
        # Bytes that are no UTF-8 came in as lone surrogates; JSON can say those as escapes.
        encoded = b'"' + b"".join(map(_escaped, text)) + b'"'
    return b',"%b":%b' % (key, encoded)


def _escaped(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":
        return b"\\u%04x" % ord(character)
    return msgspec.json.encode(character)[1:-1]


# -- payloads ----------------------------------------------------------------------------------------------


def _payloads(page: Page, flags: int) -> list[bytes]:
    """The payload bytes of every record; `flags` is what the rows have between them."""
    buffer, starts = _one_buffer(page)
    if flags:
        begins, ends = _payload_bounds(buffer, starts)
    else:
        begins = starts + HEADER_BYTES
        ends = starts + np.asarray(page.lengths, dtype=np.int64) - DIGEST_BYTES
    return [buffer[begin:end] for begin, end in zip(begins.tolist(), ends.tolist())]


def _one_buffer(page: Page) -> tuple[bytes, Ints]:
    """A buffer that holds all frames, and where they start."""
    if page.which is None:
        return page.frames[0], np.asarray(page.starts, dtype=np.int64)
    frames = page.frames
    parts = [
        frames[which][start : start + length]
        for which, start, length in zip(page.which, page.starts, page.lengths)
    ]
    lengths = np.asarray(page.lengths, dtype=np.int64)
    return b"".join(parts), np.cumsum(lengths) - lengths


def _payload_bounds(buffer: bytes, starts: Ints) -> tuple[Ints, Ints]:
    """Where payloads begin and end, by one gather of the length fields (as in `frames.decode_columns`)."""
    every = np.ndarray(
        shape=(len(buffer) - HEADER_BYTES + 1,),
        dtype=_PAYLOAD_LENGTHS,
        buffer=buffer,
        offset=_PAYLOAD_LENGTHS_AT,
        strides=(1,),
    )
    lengths = every[starts]
    begins = starts + HEADER_BYTES + lengths["node"] + lengths["tag"]
    return begins, begins + lengths["data"]


def _special_bodies(page: Page, include_meta: bool, include_data: bool) -> list[bytes]:
    """What follows the labels, on a page where some records are raw or have extensions."""
    buffer, starts = _one_buffer(page)
    begins, ends = _payload_bounds(buffer, starts)
    bodies: list[bytes] = []
    for start, begin, end, flags in zip(starts.tolist(), begins.tolist(), ends.tolist(), page.flags):
        extensions = read_extensions(buffer, start) if flags & HAS_EXT else {}
        payload = buffer[begin:end]
        if flags & RAW:
            if include_data:
                bodies.append(_raw_body(payload, _length(extensions, EXT_HEADERS)))
            else:
                bodies.append(b"")
            continue
        split = len(payload) - _length(extensions, EXT_META)
        body = _DATA_KEY + payload[:split] if include_data else b""
        if include_meta and split < len(payload):
            body += _META_KEY + payload[split:]
        bodies.append(body)
    return bodies


def _raw_body(payload: bytes, header_length: int) -> bytes:
    body = b',"$encoding":"base64","data":"%b"' % b64encode(payload[header_length:])
    if header_length:
        body += b',"headers":"%b"' % b64encode(payload[:header_length])
    return body


def _length(extensions: dict[int, bytes], which: int) -> int:
    return int.from_bytes(extensions.get(which, b""), "little")
