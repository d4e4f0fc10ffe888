"""Records on their way out, as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class NewRecord(msgspec.Struct, omit_defaults=True):
    """A record to write. `data` is anything that msgspec makes JSON of, or bytes.

    `None` in `data` is a value (`null`). Bytes have no `meta`, and do not share a write with other values.
    Numbers that JSON has no word for (NaN, infinity) would become `null`.
    """

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: Mapping[str, Any] | None = None
    ttl_ms: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.data, NewRecord):  # its tag would become part of the data, without a word
            raise TypeError("a NewRecord is no data: give its fields one by one, or use write_many")


class _Bytes(msgspec.Struct, omit_defaults=True):
    data_base64: str
    tag: str | None = None
    node: str | None = None
    ttl_ms: int = 0


_encode = msgspec.json.Encoder().encode


def is_bytes(record: Any) -> bool:
    data = record.data if isinstance(record, NewRecord) else record
    return isinstance(data, bytes | bytearray | memoryview)


def encode(record: Any) -> bytes:
    """A record of a write's body. TypeError says what has no form in JSON."""
    if not isinstance(record, NewRecord):
        record = NewRecord(record)
    if not is_bytes(record):
        return _encode(record)
    if record.meta is not None:
        raise TypeError("a record of bytes has no meta")
    text = base64.b64encode(record.data).decode()
    return _encode(_Bytes(text, record.tag, record.node, record.ttl_ms))


def body_of(records: Sequence[bytes], said: Mapping[str, Any] | None = None) -> bytes:
    """The body of a write: encoded records, and what is said beside them."""
    joined = b'{"records":[' + b",".join(records) + b"]"
    return joined + b"," + _encode(said)[1:] if said else joined + b"}"
