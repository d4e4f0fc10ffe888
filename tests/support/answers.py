"""Comparison of JSON that is built from bytes with the type that declares it."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from topics.api.config import marks_of
from topics.api.fields import HIDDEN

T = TypeVar("T")


def assert_declared(kind: type[T], body: bytes) -> T:
    """Decode a body as its type, which must have all members, by the same names."""
    decoded = msgspec.json.decode(body, type=kind)
    _compare(decoded, json.loads(body))
    return decoded


def _compare(decoded: Any, plain: Any) -> None:
    if isinstance(decoded, msgspec.Struct):
        shown = {f.encode_name: f.name for f in msgspec.structs.fields(decoded) if HIDDEN not in marks_of(f)}
        assert plain.keys() <= shown.keys()
        for name, value in plain.items():
            _compare(getattr(decoded, shown[name]), value)
    elif isinstance(decoded, list):
        for one, value in zip(decoded, plain, strict=True):
            _compare(one, value)
    else:
        assert json.loads(msgspec.json.encode(decoded)) == plain
