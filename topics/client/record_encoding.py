"""JSON encoding of records for write requests."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class NewRecord(msgspec.Struct, omit_defaults=True):
    """A record to write. `data` is any value that msgspec can encode as JSON, or bytes.

    `None` is a value (`null`). Records of bytes have no `meta` and cannot share a write with other values.
    Numbers that JSON cannot represent (NaN, infinity) become `null`.
    """

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: Mapping[str, Any] | None = None
    ttl_ms: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.data, NewRecord):  # it would be encoded as the data, tag and all
            raise TypeError("data cannot be a NewRecord: pass its fields, or use write_many")


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
    """Encode one record. TypeError: a value has no JSON representation."""
    if not isinstance(record, NewRecord):
        record = NewRecord(record)
    if not is_bytes(record):
        return _encode(record)
    if record.meta is not None:
        raise TypeError("a record of bytes cannot have meta")
    text = base64.b64encode(record.data).decode()
    return _encode(_Bytes(text, record.tag, record.node, record.ttl_ms))


def body_of(records: Sequence[bytes], fields: Mapping[str, Any] | None = None) -> bytes:
    """The body of a write: encoded records and further fields."""
    joined = b'{"records":[' + b",".join(records) + b"]"
    return joined + b"," + _encode(fields)[1:] if fields else joined + b"}"
