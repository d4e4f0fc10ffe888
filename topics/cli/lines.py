"""A record as a line: for people, as JSON, or its data alone. Data is the JSON text that was written."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from topics.cli.tables import as_time
from topics.client.answers import Record

Format: TypeAlias = Callable[[Record], bytes]

# JSON text has no control characters below 32, but these, and a terminal may obey them.
_UNSAFE = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 95)


def human(record: Record) -> bytes:
    return f"{record.topic} {record.seq} {as_time(record.ts)} {_data(record)}\n".encode()


def coloured(record: Record) -> bytes:
    """The same for a terminal. A topic keeps its colour."""
    colour = _COLOURS[zlib.crc32(record.topic.encode()) % len(_COLOURS)]
    data = _data(record).translate(_UNSAFE)
    return f"\x1b[{colour}m{record.topic}\x1b[0m {record.seq} \x1b[2m{as_time(record.ts)}\x1b[0m {data}\n".encode()


def as_json(record: Record) -> bytes:
    """All of the record, with its topic in front."""
    return msgspec.json.encode(fields(record)) + b"\n"


def fields(record: Record) -> dict[str, Any]:
    """Named as in the server's answers; `topics pub --records` takes them."""
    found: dict[str, Any] = {"topic": record.topic, "$seq": record.seq, "$ts": record.ts}
    if record.tag is not None:
        found["$tag"] = record.tag
    if record.node is not None:
        found["$node"] = record.node
    if record.encoding is not None:
        found["$encoding"] = record.encoding
    if record.meta is not None:
        found["meta"] = record.meta
    return found | {"data": record.data}


def data_only(record: Record) -> bytes:
    return bytes(record.data) + b"\n"


def _data(record: Record) -> str:
    text = bytes(record.data).decode("utf-8", "replace")
    return "base64:" + text.strip('"') if record.encoding == "base64" else text


def chosen(*, is_json: bool, is_raw: bool) -> Format:
    if is_json:
        return as_json
    if is_raw:
        return data_only
    return coloured if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else human
