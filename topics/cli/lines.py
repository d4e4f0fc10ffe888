"""A record as a line: for people, as JSON, or its data alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeAlias

import msgspec
from msgspec import Raw

from topics.cli.tables import as_time

Format: TypeAlias = Callable[[str, Raw], bytes]

# JSON text has no control characters below 32, but these, and a terminal may obey them.
_UNSAFE = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 95)


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    encoding: str | None = msgspec.field(name="$encoding", default=None)
    data: Raw = Raw(b"")


_decode = msgspec.json.Decoder(_Record).decode


def human(topic: str, record: Raw) -> bytes:
    found = _decode(record)
    return f"{topic} {found.seq} {as_time(found.ts)} {_data(found)}\n".encode()


def coloured(topic: str, record: Raw) -> bytes:
    """The same for a terminal. A topic keeps its colour."""
    found = _decode(record)
    colour = _COLOURS[zlib.crc32(topic.encode()) % len(_COLOURS)]
    data = _data(found).translate(_UNSAFE)
    return f"\x1b[{colour}m{topic}\x1b[0m {found.seq} \x1b[2m{as_time(found.ts)}\x1b[0m {data}\n".encode()


def as_json(topic: str, record: Raw) -> bytes:
    """The record as the server sent it, and its topic in front."""
    return b'{"topic":%b,%b\n' % (msgspec.json.encode(topic), bytes(record).lstrip()[1:])


def data_only(_topic: str, record: Raw) -> bytes:
    return bytes(_decode(record).data) + b"\n"


def _data(record: _Record) -> str:
    text = bytes(record.data).decode("utf-8", "replace")
    return "base64:" + text.strip('"') if record.encoding == "base64" else text
