"""Decoding of JSON bodies, with error messages that help the client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

from topics.api import requests
from topics.api.config import ConsumerBody
from topics.api.errors import InvalidRequest
from topics.api.requests import beyond_u64
from topics.link import wire
from topics.protocols.json.unknown_fields import Fields, strict

NODES_MAX = 256  # excluded nodes per read; each is compared with every row
TOO_DEEP = "the JSON is nested too deeply"

_ENUM_ERROR = re.compile(r"Invalid enum value .* - at `\$(?:.*\.)?(\w+)`", re.DOTALL)


def _enum_fields() -> Iterator[tuple[str, str]]:
    """Every field with a fixed set of values, and these values. Fields of the same name have the same values in all bodies."""
    for body in (*vars(requests).values(), ConsumerBody):
        if isinstance(body, type) and issubclass(body, msgspec.Struct):
            for field in msgspec.structs.fields(body):
                kind = _plain(inspect.type_info(field.type))
                for one in map(_plain, kind.types) if isinstance(kind, inspect.UnionType) else (kind,):
                    if isinstance(one, inspect.LiteralType):
                        yield field.name, ", ".join(map(str, one.values))


def _plain(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


_ENUM_VALUES = dict(_enum_fields())


def decode(decoder: Callable[[Any], Any], body: wire.Buffer) -> Any:
    """Decode JSON. Raises InvalidRequest with the reason."""
    text = utf8_bytes(body)
    if not text:
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        return decoder(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is invalid: {error}{_allowed_values(error)}") from None
    except RecursionError:
        raise InvalidRequest(TOO_DEEP) from None


class UnknownField(InvalidRequest):
    """An unknown field in a strict request."""


class BodyType:
    """Decoder of one body type. Decoding is strict; only if it fails, the body is searched for unknown fields."""

    def __init__(self, kind: type[msgspec.Struct], *, lines: bool = False) -> None:
        """`lines`: newline-delimited, one object per line."""
        decoders = (msgspec.json.Decoder(strict(kind)), msgspec.json.Decoder(kind))
        self.strict, self._tolerant = [each.decode_lines if lines else each.decode for each in decoders]
        self._fields = Fields(kind)
        self._lines = lines

    def read(self, body: wire.Buffer, *, is_strict: bool) -> tuple[Any, list[str]]:
        """The decoded body, and the paths of ignored fields."""
        text = utf8_bytes(body)
        try:
            return self.strict(text), []
        except msgspec.DecodeError as error:
            refusal = self._fields.refusal(error) if is_strict else None
        except RecursionError:
            refusal = None
        if refusal is not None:
            raise UnknownField(refusal)
        found = decode(self._tolerant, text)
        return found, self._fields.unknown(text, found, lines=self._lines)


def read_body(kind: BodyType, request: wire.Request) -> Any:
    """Decode the body of a request, and record the ignored fields in the request."""
    try:
        return kind.strict(utf8_bytes(request.body))
    except (msgspec.DecodeError, RecursionError):
        pass
    body, ignored = kind.read(request.body, is_strict=bool(request.flags & wire.STRICT))
    if ignored:
        request.flags |= wire.IGNORED
        request.ignored = ignored
    return body


def _allowed_values(error: msgspec.DecodeError) -> str:
    """msgspec names the invalid value, but not the valid ones."""
    found = _ENUM_ERROR.fullmatch(str(error))
    values = _ENUM_VALUES.get(found[1]) if found else None
    return f"; send one of {values}" if values else ""


def utf8_bytes(body: wire.Buffer) -> bytes:
    """The body, checked to be UTF-8 as a whole: payloads are stored without decoding."""
    text = body if isinstance(body, bytes) else bytes(body)
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}") from None
    return text


def check_u64(**numbers: int | None) -> None:
    name = beyond_u64(**numbers)
    if name is not None:
        raise InvalidRequest(f"{name} does not fit into 64 bits")


def node_names(node: str | list[str] | None) -> list[str]:
    """The nodes whose records are excluded from a read."""
    names = [node] if isinstance(node, str) else list(dict.fromkeys(node or []))
    if len(names) > NODES_MAX:
        raise InvalidRequest(f"node has {len(names)} names; at most {NODES_MAX} can be excluded")
    return names
