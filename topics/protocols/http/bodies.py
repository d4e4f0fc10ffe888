"""Reading JSON bodies: what is wrong with one is said in words that help whoever sent it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

from topics.api import requests
from topics.api.errors import InvalidRequest
from topics.api.requests import beyond_u64
from topics.link import wire
from topics.protocols.http.unknown_fields import Fields, strict

NODES_MAX = 256  # names of one read; each costs a look at every row
TOO_DEEP = "the JSON is nested too deeply"

_ENUM_ERROR = re.compile(r"Invalid enum value .* - at `\$(?:.*\.)?(\w+)`", re.DOTALL)


def _fields_with_words() -> Iterator[tuple[str, str]]:
    """Every field that takes one of a few words, and these. No two bodies give such a field the same name and other words."""
    for body in vars(requests).values():
        if isinstance(body, type) and issubclass(body, msgspec.Struct):
            for field in msgspec.structs.fields(body):
                kind = inspect.type_info(field.type)
                for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
                    if isinstance(one, inspect.LiteralType):
                        yield field.name, ", ".join(map(str, one.values))


_WORDS = dict(_fields_with_words())


def decode(decoder: Callable[[Any], Any], body: wire.Buffer) -> Any:
    """Decode JSON or say what is wrong with it."""
    text = checked(body)
    if not text:
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        return decoder(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body does not fit: {error}{_words_for(error)}") from None
    except RecursionError:
        raise InvalidRequest(TOO_DEEP) from None


class UnknownField(InvalidRequest):
    """A field that the body does not have, in a request that wants to know of it."""


class BodyType:
    """A type of body. It is decoded strictly; only when that fails, the unknown fields in it are looked for."""

    def __init__(self, kind: type[msgspec.Struct], *, lines: bool = False) -> None:
        """`lines`: one on each line."""
        decoders = (msgspec.json.Decoder(strict(kind)), msgspec.json.Decoder(kind))
        self.strict, self._tolerant = [each.decode_lines if lines else each.decode for each in decoders]
        self._fields = Fields(kind)
        self._lines = lines

    def read(self, body: wire.Buffer, *, is_strict: bool) -> tuple[Any, list[str]]:
        """The body, and the paths of fields that were ignored."""
        text = checked(body)
        try:
            return self.strict(text), []
        except msgspec.DecodeError as error:
            refusal = self._fields.refusal(error) if is_strict else None
        except RecursionError:
            refusal = None
        if refusal is not None:
            raise UnknownField(refusal)
        found = decode(self._tolerant, text)  # or what is wrong
        return found, self._fields.unknown(text, found, lines=self._lines)


def read_body(kind: BodyType, request: wire.Request) -> Any:
    """The body of a request, which notes what was ignored of it."""
    try:
        return kind.strict(checked(request.body))
    except (msgspec.DecodeError, RecursionError):
        pass
    body, ignored = kind.read(request.body, is_strict=bool(request.flags & wire.STRICT))
    if ignored:
        request.flags |= wire.IGNORED
        request.ignored = ignored
    return body


def _words_for(error: msgspec.DecodeError) -> str:
    """msgspec tells which word was wrong, and not which would be right."""
    found = _ENUM_ERROR.fullmatch(str(error))
    words = _WORDS.get(found[1]) if found else None
    return f"; send one of {words}" if words else ""


def checked(body: wire.Buffer) -> bytes:
    """The body as UTF-8. Payloads are kept as they came, so the text is checked as a whole."""
    text = body if isinstance(body, bytes) else bytes(body)
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not UTF-8: byte {error.start}") from None
    return text


def check_u64(**numbers: int | None) -> None:
    name = beyond_u64(**numbers)
    if name is not None:
        raise InvalidRequest(f"{name} is beyond 64 bits")


def node_names(node: str | list[str] | None) -> list[str]:
    """The nodes whose records a reader does not want."""
    names = [node] if isinstance(node, str) else list(dict.fromkeys(node or []))
    if len(names) > NODES_MAX:
        raise InvalidRequest(f"{len(names)} names in node; at most {NODES_MAX} can be left out")
    return names
