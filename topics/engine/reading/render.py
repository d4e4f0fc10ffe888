"""JSON rendering of a page, without parsing the records.

Payloads are JSON already and are copied as they are. Only seq and time have to be formatted. On larger pages their digits are
computed column by column, which costs a third of formatting them one by one. If all records have the same size, so do their
texts, and the whole page is built column by column.
"""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from topics.engine.commands.page import Column, Page
from topics.engine.storage.frames import (
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
_CLOSE = b"},"  # of the previous record; removed before the first one
_COLUMNS_FROM = 48  # rows; below, the fixed cost of numpy calls dominates
_FOUR_DIGITS = np.array([b"%04d" % i for i in range(10_000)], dtype="S4").view(np.uint32)
_PAYLOAD_LENGTHS = np.dtype([("node", "<u2"), ("tag", "<u2"), ("data", "<u4")])
_PAYLOAD_LENGTHS_AT = 30  # in the frame header
_EXTENSION_VALUE_AT = 3  # after its id and size


def render_records(
    page: Page, *, include_tags: bool = False, include_meta: bool = True, include_data: bool = True
) -> bytes:
    """The records as JSON objects separated by commas, without the brackets of an array.

    Keys without a value are left out. A raw record has `"$encoding":"base64"`, and its data and header block are base64.
    """
    if not len(page.seqs):
        return b""
    flags = int(np.bitwise_or.reduce(page.flags))
    labels = _labels(page.nodes, page.tags if include_tags else None)
    if labels is None and not flags and include_data:
        rows = _payloads_of_one_size(page)
        if rows is not None:
            return b"".join(_texts(page, _DATA_KEY, rows))[len(_CLOSE) :] + b"}"
    if flags & RAW:
        bodies = [_mixed_bodies(page, include_meta, include_data)]
    else:
        bodies = _bodies(page, flags, include_meta, include_data)
    if labels is None and bodies and not flags & RAW and include_data:
        columns = [_heads(page, _DATA_KEY), *bodies[1:]]
    else:
        columns = [_heads(page, b""), *([labels] if labels is not None else []), *bodies]
    return _interleave(columns)


def _interleave(columns: list[list[bytes]]) -> bytes:
    """Join the pieces row by row. The first column also closes the previous object."""
    stride = len(columns)
    pieces = [b""] * (stride * len(columns[0]))
    for i, column in enumerate(columns):
        pieces[i::stride] = column
    pieces[0] = pieces[0][len(_CLOSE) :]
    pieces.append(b"}")
    return b"".join(pieces)


# -- seq and time ------------------------------------------------------------------------------------------


def _heads(page: Page, suffix: bytes) -> list[bytes]:
    """`},{"$seq":1,"$ts":1748470000123` and the suffix, for each record."""
    if len(page.seqs) < _COLUMNS_FROM or not _times_have_one_width(page.timestamps):
        return _heads_one_by_one(page.seqs, page.timestamps, suffix)
    heads: list[bytes] = []
    for first, stop in _same_width(page.seqs):
        seqs, times = page.seqs[first:stop], page.timestamps[first:stop]
        if stop - first < _COLUMNS_FROM:
            heads += _heads_one_by_one(seqs, times, suffix)
        else:
            text = _columns(seqs, times, suffix)
            heads += text.reshape(-1).view(f"S{text.shape[1]}").tolist()
    return heads


def _texts(page: Page, suffix: bytes, payloads: npt.NDArray[np.uint8]) -> list[bytes]:
    """The heads followed by the payloads, as few texts of many records each."""
    texts: list[bytes] = []
    for first, stop in _same_width(page.seqs):
        text = _columns(page.seqs[first:stop], page.timestamps[first:stop], suffix, room=payloads.shape[1])
        text[:, text.shape[1] - payloads.shape[1] :] = payloads[first:stop]
        texts.append(text.tobytes())
    return texts


def _times_have_one_width(times: Column) -> bool:
    return len(str(int(times[0]))) == len(str(int(times[-1])))


def _same_width(seqs: Column) -> Iterator[tuple[int, int]]:
    """Ranges of ascending seqs with the same number of digits."""
    start, count, last = 0, len(seqs), int(seqs[-1])
    while start < count:
        above = 10 ** len(str(int(seqs[start])))
        stop = bisect_left(seqs, above) if last >= above else count
        yield start, stop
        start = stop


def _heads_one_by_one(seqs: Column, times: Column, suffix: bytes) -> list[bytes]:
    template = _CLOSE + b'{"$seq":%d,"$ts":%d' + suffix
    return [template % pair for pair in zip(seqs, times)]


def _columns(seqs: Column, times: Column, suffix: bytes, room: int = 0) -> npt.NDArray[np.uint8]:
    """One head per row, with `room` bytes left after it. All seqs have the same number of digits, and so do all times."""
    before, between = _CLOSE + b'{"$seq":', b',"$ts":'
    seq_width, time = len(str(int(seqs[0]))), b"%d" % int(times[0])
    blank = before + bytes(seq_width) + between + time + suffix
    text = np.empty((len(seqs), len(blank) + room), dtype=np.uint8)
    text[:, : len(blank)] = np.frombuffer(blank, dtype=np.uint8)
    seqs_end = len(before) + seq_width
    _put_digits(text[:, len(before) : seqs_end], seqs)
    if (np.asarray(times) != times[0]).any():  # records of one write have the same time
        times_start = seqs_end + len(between)
        _put_digits(text[:, times_start : times_start + len(time)], times)
    return text


def _put_digits(text: npt.NDArray[np.uint8], numbers: Column) -> None:
    """Write one number per row, with as many digits as there are columns."""
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
    """`,"$node":"…","$tag":"…"` for each record, or None if no record has either."""
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
        # Bytes that are not valid UTF-8 were decoded as lone surrogates, which JSON can express as escapes.
        encoded = b'"' + b"".join(map(_escaped, text)) + b'"'
    return b',"%b":%b' % (key, encoded)


def _escaped(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":
        return b"\\u%04x" % ord(character)
    return msgspec.json.encode(character)[1:-1]


# -- payloads ----------------------------------------------------------------------------------------------


def _bodies(page: Page, flags: int, include_meta: bool, include_data: bool) -> list[list[bytes]]:
    """The columns after the labels if no record is raw: key of the data, data, and meta."""
    buffer, starts = _one_buffer(page)
    if flags:
        begins, ends = _payload_bounds(buffer, starts)
    else:
        begins = starts + HEADER_BYTES
        ends = starts + np.asarray(page.lengths, dtype=np.int64) - DIGEST_BYTES
    metas: list[list[bytes]] = []
    if flags & HAS_EXT:
        splits = ends - _meta_lengths(page, buffer, ends)
        if include_meta and (splits != ends).any():
            metas = [_metas(buffer, splits.tolist(), ends.tolist())]
        ends = splits
    if not include_data:
        return metas
    data = [buffer[begin:end] for begin, end in zip(begins.tolist(), ends.tolist())]
    return [[_DATA_KEY] * len(data), data, *metas]


def _meta_lengths(page: Page, buffer: bytes, payload_ends: Ints) -> Ints:
    """The length of the meta in each payload. It is the first extension, if there is one."""
    lengths = np.zeros(len(payload_ends), dtype=np.int64)
    extended = np.flatnonzero(np.asarray(page.flags) & HAS_EXT)
    at = payload_ends[extended]
    every = np.frombuffer(buffer, dtype=np.uint8)
    has_meta = every[at] == EXT_META
    at = at[has_meta] + _EXTENSION_VALUE_AT
    values = every[at].astype(np.int64)
    for i in range(1, 4):
        values |= every[at + i].astype(np.int64) << (8 * i)
    lengths[extended[has_meta]] = values
    return lengths


def _metas(buffer: bytes, begins: list[int], ends: list[int]) -> list[bytes]:
    return [_META_KEY + buffer[begin:end] if begin < end else b"" for begin, end in zip(begins, ends)]


def _payloads_of_one_size(page: Page) -> npt.NDArray[np.uint8] | None:
    """The payloads, one per row, if all frames have the same size and are back to back in one buffer."""
    count = len(page.seqs)
    if page.which is not None or count < _COLUMNS_FROM or not _times_have_one_width(page.timestamps):
        return None
    lengths, starts = np.asarray(page.lengths), np.asarray(page.starts)
    size, start = int(lengths[0]), int(starts[0])
    if int(starts[-1]) - start != size * (count - 1):
        return None
    if not ((lengths == size).all() and (starts == np.arange(start, start + size * count, size)).all()):
        return None
    frames = np.frombuffer(page.frames[0], dtype=np.uint8, count=size * count, offset=start)
    return frames.reshape(count, size)[:, HEADER_BYTES : size - DIGEST_BYTES]


def _one_buffer(page: Page) -> tuple[bytes, Ints]:
    """One buffer with all frames, and their offsets."""
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
    """Start and end of each payload, by one gather of the length fields (as in `frames.decode_columns`)."""
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


def _mixed_bodies(page: Page, include_meta: bool, include_data: bool) -> list[bytes]:
    """What follows the labels, if some records are raw."""
    buffer, starts = _one_buffer(page)
    begins, ends = _payload_bounds(buffer, starts)
    bodies: list[bytes] = []
    for start, begin, end, flags in zip(starts.tolist(), begins.tolist(), ends.tolist(), page.flags):
        extensions = read_extensions(buffer, start) if flags & HAS_EXT else {}
        payload = buffer[begin:end]
        if flags & RAW:
            body = _raw_body(payload, _length(extensions, EXT_HEADERS)) if include_data else b""
        else:
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
