"""Unknown fields in JSON bodies: finds their paths, and suggests the nearest known name.

Bodies are first decoded by strict types, so this runs only if a body has unknown fields. A path is the field names joined by dots, with
`[]` for list elements: `records[].delay_ms`. Opaque values (`data`, `meta`) are not searched.

The body may be large and hostile. An object is decoded to a dict whose keys are an enum of the known names: all unknown names share
one entry. The search stops after PATHS_MAX paths or SCANNED_MAX unknown fields, and skips lists longer than that.
"""

from __future__ import annotations

import difflib
import enum
import functools
import operator
import re
import secrets
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import quote

import msgspec
from msgspec import NODEFAULT, Raw

PATHS_MAX = 16
SCANNED_MAX = 50_000
NAME_CHARACTERS_MAX = 64
HEADER_BYTES_MAX = 1024

# msgspec's error message: the name, and the path of the object.
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$([^`]*)`)?", re.DOTALL)
_dict = msgspec.json.Decoder(dict[str, Raw]).decode
_OTHER = secrets.token_hex()  # key of all unknown names; random, so that no client can send it


# -- strict types ------------------------------------------------------------------------------------------


@functools.cache
def strict(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A subclass that rejects unknown fields, also in nested structs."""
    # All fields, because redefining a single one moves it, and fields in the usual order are decoded fastest.
    fields = [_strict_field(field) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), module=kind.__module__, forbid_unknown_fields=True, kw_only=True
    )


def _strict_field(field: msgspec.structs.FieldInfo) -> tuple[str, Any, Any] | tuple[str, Any]:
    kind = _strict_type(field.type)
    if field.default_factory is not NODEFAULT:
        return field.name, kind, msgspec.field(default_factory=field.default_factory)
    return (field.name, kind) if field.default is NODEFAULT else (field.name, kind, field.default)


def _strict_type(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return strict(kind)
    inner = get_args(kind)
    if not inner or get_origin(kind) is Literal:
        return kind
    if get_origin(kind) is Annotated:
        return Annotated[(_strict_type(inner[0]), *inner[1:])]
    inner = tuple(map(_strict_type, inner))
    if isinstance(kind, types.UnionType):
        return functools.reduce(operator.or_, inner)
    return get_origin(kind)[inner]


# -- the search --------------------------------------------------------------------------------------------


class _Name(enum.Enum):
    """Keys of an object. Unknown ones are reported to the running search, and share one member."""

    @classmethod
    def _missing_(cls, value: object) -> _Name:
        _searching[-1].note(str(value))
        return cls(_OTHER)


@dataclass(slots=True)
class _Inner:
    """A field that contains structs: one, or a list or dict of them."""

    key: _Name
    name: str
    container: type | None
    fields: Fields


class Fields:
    """The known fields of one struct, and of the structs in it."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        infos = msgspec.structs.fields(kind)
        self.names = [info.encode_name for info in infos]
        keys: Any = _Name(kind.__name__, {"OTHER": _OTHER} | {f"f_{name}": name for name in self.names})  # type: ignore[call-arg]
        self.decoder = msgspec.json.Decoder(dict[keys, Raw])
        self.list_decoder = msgspec.json.Decoder(list[dict[keys, Raw]])
        self.inner = [
            _Inner(keys(info.encode_name), info.encode_name, container, Fields(struct))
            for info in infos
            for container, struct in _structs_in(info.type)
        ]

    def unknown(self, text: bytes, body: Any, *, lines: bool = False) -> list[str]:
        """The paths of unknown fields. `body` is the decoded text."""
        search = _Search()
        _searching.append(search)
        try:
            if not lines:
                search.visit(self, self.decoder.decode(text), "", body)
            elif len(body) <= SCANNED_MAX:
                self.decoder.decode_lines(text)
        except (msgspec.DecodeError, RecursionError):
            pass  # the search was stopped: the body itself is known to be valid
        finally:
            _searching.pop()
        return list(search.found)

    def refusal(self, error: msgspec.DecodeError) -> str | None:
        """The error message for an unknown field found by a strict decoder; None for other errors."""
        found = _UNKNOWN.fullmatch(str(error))
        if found is None:
            return None
        name, where = found[1], found[2] or ""
        path = re.sub(r"\[\d+\]", "[]", where).replace("[...]", ".*").removeprefix("[]").lstrip(".")
        near = difflib.get_close_matches(name[:NAME_CHARACTERS_MAX], self._names_at(path), 1)
        path = f"{path}.{_printable(name)}" if path else _printable(name)
        return f'unknown field "{path}"' + (f'; did you mean "{near[0]}"?' if near else "")

    def _names_at(self, path: str) -> list[str]:
        fields = self
        for step in path.split("."):
            name = step.removesuffix("[]")
            fields = next((inner.fields for inner in fields.inner if inner.name == name), fields)
        return fields.names


def _structs_in(kind: Any) -> Iterator[tuple[type | None, type[msgspec.Struct]]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield None, kind
    elif get_origin(kind) is Annotated:
        yield from _structs_in(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for one in get_args(kind):
            yield from _structs_in(one)
    elif get_origin(kind) in (list, dict):
        for _, struct in _structs_in(get_args(kind)[-1]):
            yield get_origin(kind), struct


class _Search:
    """One search, in a body that is otherwise valid."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._left = SCANNED_MAX
        self._where = ""

    def note(self, name: str) -> None:
        self._left -= 1
        self.found[self._where + _printable(name)] = None
        if self._is_over:
            raise ValueError  # stops the decoder, which raises its own error

    @property
    def _is_over(self) -> bool:
        return self._left <= 0 or len(self.found) >= PATHS_MAX

    def visit(self, fields: Fields, known: dict[_Name, Raw], where: str, body: Any) -> None:
        """Search the structs in a decoded object."""
        for inner in fields.inner:
            value = getattr(body, inner.name)
            is_present = inner.key in known and isinstance(value, inner.container or msgspec.Struct)
            # Requests with longer lists are rejected anyway.
            if is_present and (inner.container is None or len(value) <= SCANNED_MAX):
                self._enter(inner, known[inner.key], where + inner.name, value)

    def _enter(self, inner: _Inner, text: Raw, where: str, value: Any) -> None:
        fields = inner.fields
        if inner.container is list:
            self._where = where + "[]."
            for known, each in zip(fields.list_decoder.decode(text), value):
                self.visit(fields, known, where + "[].", each)
        elif inner.container is dict:
            for name, part in _dict(text).items():
                self._where = f"{where}.{_printable(name)}."
                self.visit(fields, fields.decoder.decode(part), self._where, value[name])
        else:
            self._where = where + "."
            self.visit(fields, fields.decoder.decode(text), self._where, value)


_searching: list[_Search] = []  # the running search, if any


# -- output ------------------------------------------------------------------------------------------------


def _printable(name: str) -> str:
    """A name sent by a client, shortened and without control characters."""
    if len(name) > NAME_CHARACTERS_MAX:
        name = name[:NAME_CHARACTERS_MAX] + "…"
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def add_ignored(body: bytes, paths: list[str]) -> bytes:
    """Add the member `ignored` to a JSON object."""
    return body[:-1] + b',"ignored":' + msgspec.json.encode(paths) + b"}"


def ignored_header(paths: list[str]) -> bytes:
    """The ignored fields as a header line, for other bodies: percent-encoded, separated by commas, as many as fit."""
    values: list[str] = []
    for path in paths:
        values.append(quote(path, safe="[]"))
        if len(", ".join(values)) > HEADER_BYTES_MAX:
            values.pop()
            break
    return f"Topics-Ignored: {', '.join(values)}\r\n".encode()
