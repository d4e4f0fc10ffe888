"""Reading JSON bodies: what is wrong with one is said in words that help whoever sent it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from topics import wire
from topics.engine.errors import InvalidRequest
from topics.schemas import within_u64

NODES_MAX = 256  # names of one read; each costs a look at every row
TOO_DEEP = "the JSON is nested too deeply"


def decode(decoder: Callable[[Any], Any], body: wire.Buffer) -> Any:
    """Decode JSON or say what is wrong with it."""
    text = checked(body)
    if not text:
        raise InvalidRequest("the body is empty")
    try:
        return decoder(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body does not fit: {error}") from None
    except RecursionError:
        raise InvalidRequest(TOO_DEEP) from None


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
    name = within_u64(**numbers)
    if name is not None:
        raise InvalidRequest(f"{name} is beyond 64 bits")


def node_names(node: str | list[str] | None) -> list[str]:
    """The nodes whose records a reader does not want."""
    names = [node] if isinstance(node, str) else list(dict.fromkeys(node or []))
    if len(names) > NODES_MAX:
        raise InvalidRequest(f"{len(names)} names in node; at most {NODES_MAX} can be left out")
    return names
