"""Output formats for records: text, JSON, data only, or a template. Data is printed exactly as it was written."""

from __future__ import annotations

import functools
import os
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import click
import msgspec

from topics.cli.formatting import format_time
from topics.client.answers import Record

Format: TypeAlias = Callable[[Record], bytes]

# Control characters that JSON does not escape.
_CONTROL = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 95)


def as_text(record: Record, *, with_meta: bool = False) -> bytes:
    """`topic seq time [tag=TAG] [meta=META] data`. Unambiguous: no JSON value begins with tag= or meta=."""
    return f"{record.topic} {record.seq} {format_time(record.ts)} {_rest(record, with_meta)}\n".encode()


def as_coloured_text(record: Record, *, with_meta: bool = False) -> bytes:
    """The same for a terminal. The colour is derived from the topic's name."""
    colour = _COLOURS[zlib.crc32(record.topic.encode()) % len(_COLOURS)]
    rest = _rest(record, with_meta).translate(_CONTROL)
    return f"\x1b[{colour}m{record.topic}\x1b[0m {record.seq} \x1b[2m{format_time(record.ts)}\x1b[0m {rest}\n".encode()


def _rest(record: Record, with_meta: bool) -> str:
    parts = [_data(record)]
    if with_meta and record.meta is not None:
        parts.insert(0, f"meta={_meta(record)}")
    if record.tag is not None:
        parts.insert(0, f"tag={_word(record.tag)}")
    return " ".join(parts)


def as_json(record: Record) -> bytes:
    return msgspec.json.encode(fields(record)) + b"\n"


def fields(record: Record) -> dict[str, Any]:
    """The topic and all fields, named as in the HTTP API. `topics pub --records` reads them."""
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


def as_data(record: Record) -> bytes:
    return bytes(record.data) + b"\n"


def _data(record: Record) -> str:
    text = bytes(record.data).decode("utf-8", "replace")
    return "base64:" + text.strip('"') if record.encoding == "base64" else text


def _meta(record: Record) -> str:
    return "" if record.meta is None else msgspec.json.encode(record.meta).decode()


def _word(name: str | None) -> str:
    """A tag or a node. Quoted as JSON if it contains spaces, quotes or unprintable characters."""
    if name is None or (name.isprintable() and not any(c in name for c in ' "')):
        return name or ""
    return msgspec.json.encode(name).decode()


_FIELDS: dict[str, Callable[[Record], str]] = {
    "%t": lambda record: record.topic,
    "%s": lambda record: str(record.seq),
    "%T": lambda record: format_time(record.ts),
    "%d": _data,
    "%g": lambda record: _word(record.tag),
    "%n": lambda record: _word(record.node),
    "%m": _meta,
    "%%": lambda _: "%",
    r"\n": lambda _: "\n",
    r"\t": lambda _: "\t",
    r"\\": lambda _: "\\",
}
_LEGEND = r"%t topic, %s seq, %T time, %d data, %g tag, %n node, %m meta, %%, \n, \t, \\"


def template(text: str) -> Format:
    """The format given by --format, for example `%t %s %T %d`."""
    parts = []
    for part in re.findall(r"[%\\].?|[^%\\]+", text, re.DOTALL):
        if part[0] in "%\\" and part not in _FIELDS:
            raise click.BadParameter(f"{part} is not one of {_LEGEND}")
        parts.append(_FIELDS.get(part, lambda _, plain=part: plain))
    escapes = _CONTROL if sys.stdout.isatty() else {}

    def show(record: Record) -> bytes:
        line = "".join(part(record) for part in parts)
        return f"{line.translate(escapes)}\n".encode()

    return show


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Output options other than --json: the arguments of `choose`."""
    for option in (
        click.option("--meta", "with_meta", is_flag=True, help="Also show meta."),
        click.option("--format", "line", type=template, metavar="FORMAT", help=f"Line format: {_LEGEND}."),
        click.option("--raw", "is_raw", is_flag=True, help="Print only the data, as JSON; binary data as base64."),
    ):  # fmt: skip
        command = option(command)
    return command


def choose(
    *, is_json: bool = False, is_raw: bool = False, line: Format | None = None, with_meta: bool = False
) -> Format:
    if is_json + is_raw + (line is not None) > 1:
        raise click.UsageError("give only one of --json, --raw and --format")
    if is_json:
        return as_json
    if is_raw:
        return as_data
    if line is not None:
        return line
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return functools.partial(as_coloured_text if is_coloured else as_text, with_meta=with_meta)
