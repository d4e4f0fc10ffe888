"""Incremental decoding of large writes, in slices between turns and one body at a time, so that other topics do not wait.

A body is split between records into groups, which are decoded one after another. The rest of the body, outside the list
of records, has a size limit. The body is valid JSON if and only if each group is, and the rest is with one placeholder
record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from topics.api import limits
from topics.api.errors import InvalidRequest, RecordTooLarge, TopicsError
from topics.api.requests import RecordBody, RecordsBody
from topics.engine.commands import topics as cmd
from topics.engine.commands import transactions as txc
from topics.link import wire
from topics.protocols.encoding import Read, Steps
from topics.protocols.json.bodies import TOO_DEEP, BodyType
from topics.protocols.json.count_bound import too_many_records
from topics.protocols.json.json_text import Scan
from topics.protocols.json.requests import MIXED, check_count, read_records
from topics.protocols.json.unknown_fields import PATHS_MAX

SLICE_BYTES = 128 * 1024  # takes 2 ms
REST_BYTES_MAX = 1 << 20  # of a body, outside its records
RECORD_TEXT_MAX = 8 << 20  # bytes of one record as sent: an escape takes up to six times the space
RECORD_COMPACT_MAX = 2 << 20  # without whitespace and escapes; leaves room for base64 and ignored fields
NESTING_MAX = 4096  # more than the decoder supports

_KEY = re.compile(rb'"records"[ \t\r\n]*:[ \t\r\n]*\[')
_KEY_BYTES_MAX = 256  # of a key and its whitespace across two slices
_POSITION = re.compile(r"(\[|record |byte )(\d+)")  # in error messages about a group
_BEFORE, _AFTER = b'{"records":[', b"]}"
_PLACEHOLDER = b'{"data":0}'
_COLUMNS: tuple[tuple[str, int | None], ...] = (
    ("tags", None),
    ("nodes", None),
    ("meta_lens", 0),
    ("ttls_ms", 0),
)

_records = BodyType(RecordsBody)
_lines = BodyType(RecordBody, lines=True)


class RestTooLarge(TopicsError):
    code = "payload_too_large"


# -- splitting ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RecordGroup:
    """Consecutive records of a body: its bytes from `start` to `end`, without the commas around them."""

    start: int
    end: int
    first: int  # index of its first record
    count: int


class RecordSplitter:
    """Splits a JSON body at commas between its records."""

    def __init__(self, body: wire.Buffer) -> None:
        self.groups: list[RecordGroup] = []
        self._body = memoryview(body)
        self._scan = Scan(body, SLICE_BYTES)
        self._in_records = False
        self._start = 0  # of the current group, or of the current part of the rest
        self._first = 0  # index of the group's first record
        self._compact = 0  # compact size so far of a record that spans slices
        self._rest: list[bytes] = []
        self._tail = b""  # of the previous slice

    @property
    def rest(self) -> bytes:
        """The body with one placeholder instead of its records."""
        return b"".join(self._rest)

    def steps(self) -> Generator[None]:
        while self._scan.next():
            if self._scan.depths.max() > NESTING_MAX:
                raise InvalidRequest(TOO_DEEP)
            self._split_slice()
            yield
        if not self._in_records:
            self._add_rest(self._scan.end)

    def _split_slice(self) -> None:
        scan, at = self._scan, 0
        closing = np.sort(np.concatenate((scan.find(ord("]"), 1), scan.find(ord("}"), 1))))
        commas = scan.find(ord(","), 2)
        while True:
            if not self._in_records:
                at = self._find_records(at)
                if at < 0:
                    break
            ends = closing[np.searchsorted(closing, at) :]
            end = int(ends[0]) if len(ends) else len(scan.text)
            cuts = commas[np.searchsorted(commas, at) : np.searchsorted(commas, end)]
            if len(cuts):
                self._end_group(scan.at + int(cuts[-1]), len(cuts))
                self._start += 1  # the comma
            elif not len(ends):
                self._compact += scan.compact_bytes_min
            self._check_record()
            if not len(ends):
                break
            self._end_records(scan.at + end)
            at = end + 1
        self._tail = scan.text[-_KEY_BYTES_MAX:]

    def _find_records(self, at: int) -> int:
        """Offset in the slice after the bracket of the next list of records; -1 if there is none."""
        scan, before = self._scan, len(self._tail)
        for found in _KEY.finditer(self._tail + scan.text, max(0, at + before - _KEY_BYTES_MAX)):
            place = found.end() - 1 - before
            if place >= at and scan.depths[place] == 2 and scan.outside[place]:
                self._add_rest(scan.at + place + 1)
                if self.groups:
                    raise InvalidRequest("the body has two lists of records")
                self._in_records = True
                return place + 1
        self._check_rest(scan.end - self._start)
        return -1

    def _end_group(self, end: int, count: int) -> None:
        self.groups.append(RecordGroup(self._start, end, self._first, count))
        self._first += count
        self._start, self._compact = end, 0
        if self._first >= limits.BATCH_RECORDS_MAX:
            raise too_many_records()

    def _check_record(self) -> None:
        """Refuse a record that is too large before it is decoded."""
        if self._scan.end - self._start > RECORD_TEXT_MAX or self._compact > RECORD_COMPACT_MAX:
            raise record_too_large(self._first)

    def _end_records(self, end: int) -> None:
        is_empty = not self.groups and not bytes(self._body[self._start : end]).strip()
        if not is_empty:
            self.groups.append(RecordGroup(self._start, end, self._first, 1))
            self._rest.append(_PLACEHOLDER)
        self._start, self._in_records, self._compact = end, False, 0

    def _add_rest(self, end: int) -> None:
        self._check_rest(end - self._start)
        self._rest.append(bytes(self._body[self._start : end]))
        self._start = end

    def _check_rest(self, more: int) -> None:
        if sum(map(len, self._rest)) + more > REST_BYTES_MAX:
            raise RestTooLarge(
                f"a body may have at most {REST_BYTES_MAX} bytes besides its records", max=REST_BYTES_MAX
            )


class LineSplitter:
    """Splits a body at line ends."""

    rest = _PLACEHOLDER

    def __init__(self, body: wire.Buffer) -> None:
        self.groups: list[RecordGroup] = []
        self._scan = Scan(body, SLICE_BYTES)

    def steps(self) -> Generator[None]:
        scan, start, lines, compact = self._scan, 0, 0, 0
        while scan.next():
            cut = scan.text.rfind(b"\n") + 1
            if cut:
                lines, compact = lines + scan.text.count(b"\n"), 0
                self.groups.append(RecordGroup(start, scan.at + cut, 0, 0))
                start = scan.at + cut
            else:
                compact += scan.compact_bytes_min
            # Too many even if half of the lines are blank.
            if lines > 2 * limits.BATCH_RECORDS_MAX:
                raise too_many_records()
            if scan.end - start > RECORD_TEXT_MAX or compact > RECORD_COMPACT_MAX:
                raise record_too_large(lines)
            yield
        self.groups.append(RecordGroup(start, scan.end, 0, 0))


def record_too_large(number: int) -> RecordTooLarge:
    most = limits.RECORD_BYTES_MAX
    return RecordTooLarge(f"record {number} is too large; at most {most} bytes are allowed")


# -- decoding ----------------------------------------------------------------------------------------------


def read_large(request: wire.Request, traceparent: str, read_rest: Callable[[], Read]) -> Steps:
    """Decode a body in steps. `read_rest` decodes the request with a placeholder instead of its records."""
    body = memoryview(request.body)
    is_lines = request.encoding == wire.LINES
    splitter = LineSplitter(body) if is_lines else RecordSplitter(body)
    yield from splitter.steps()
    request.body = splitter.rest
    command, options = read_rest()
    assert isinstance(command, cmd.Append | txc.StageChunk)
    nodes = command.records.nodes
    node = nodes[0].decode() if nodes is not None and nodes[0] is not None else None
    records = cmd.Records([])
    ignored = dict.fromkeys(request.ignored if request.flags & wire.IGNORED else ())
    for group in splitter.groups:
        yield
        group.first = len(records.payloads)
        text = bytes(body[group.start : group.end])
        try:
            rows, unknown = _read_group(request, text, is_lines=is_lines)
            if not is_lines and len(rows) != group.count:
                raise InvalidRequest(
                    f"the body is invalid: JSON is malformed: a comma too many (byte {len(text)})"
                )
            if rows:
                _add(records, read_records(rows, text, node, traceparent))
        except (InvalidRequest, RecordTooLarge) as error:
            raise type(error)(_shifted(str(error), group)) from None
        ignored |= dict.fromkeys(unknown)
        if len(records.payloads) > limits.BATCH_RECORDS_MAX:
            raise too_many_records()
    check_count(len(records.payloads))
    if ignored:
        request.flags |= wire.IGNORED
        request.ignored = list(ignored)[:PATHS_MAX]
    command.records = records
    return command, options


def read_large_record(body: wire.Buffer, read: Callable[[], Read]) -> Steps:
    """Decode a body that is a single record, after checking its size."""
    scan, compact = Scan(body, SLICE_BYTES), 0
    while scan.next():
        compact += scan.compact_bytes_min
        if scan.end > RECORD_TEXT_MAX or compact > RECORD_COMPACT_MAX:
            raise record_too_large(0)
        yield
    return read()


def _read_group(request: wire.Request, text: bytes, *, is_lines: bool) -> tuple[list[RecordBody], list[str]]:
    is_strict = bool(request.flags & wire.STRICT)
    if is_lines:
        return _lines.read(text, is_strict=is_strict)
    body, unknown = _records.read(_BEFORE + text + _AFTER, is_strict=is_strict)
    return body.records, unknown


def _shifted(message: str, group: RecordGroup) -> str:
    """An error message about a group, with positions in the group turned into positions in the body."""
    by = {"[": group.first, "record ": group.first, "byte ": group.start - len(_BEFORE)}
    return _POSITION.sub(lambda found: f"{found[1]}{int(found[2]) + by[found[1]]}", message, count=1)


def _add(records: cmd.Records, more: cmd.Records) -> None:
    had, added = len(records.payloads), len(more.payloads)
    if had and records.raw != more.raw:
        raise InvalidRequest(MIXED)
    records.raw = more.raw
    if records.sizes is not None or more.sizes is not None:
        records.sizes = _sizes(records) + _sizes(more)
    for name, default in _COLUMNS:
        column, tail = getattr(records, name), getattr(more, name)
        if column is not None or tail is not None:
            setattr(records, name, (column or [default] * had) + (tail or [default] * added))
    records.payloads += more.payloads


def _sizes(records: cmd.Records) -> list[int]:
    return records.sizes if records.sizes is not None else list(map(len, records.payloads))
