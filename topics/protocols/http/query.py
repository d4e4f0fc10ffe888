"""Query string parsing. A value that cannot be parsed counts as absent."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from urllib.parse import unquote_to_bytes

from topics.api.errors import InvalidRequest
from topics.api.fields import U64_MAX

_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def parse_query(query: bytes) -> dict[str, str]:
    """Decoded name-value pairs. If a name occurs twice, the first one counts."""
    pairs: dict[str, str] = {}
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        if name:
            pairs.setdefault(_text(name), _text(value))
    return pairs


def _text(encoded: bytes) -> str:
    return unquote_to_bytes(encoded.replace(b"+", b" ")).decode("utf-8", "replace")


def flag(pairs: dict[str, str], name: str, default: bool) -> bool:
    return _BOOLS.get(pairs.get(name, ""), default)


def optional_flag(pairs: dict[str, str], name: str) -> bool | None:
    return _BOOLS.get(pairs.get(name, ""))


def number(pairs: dict[str, str], name: str, default: int) -> int:
    found = optional_number(pairs, name)
    return default if found is None else found


def optional_number(pairs: dict[str, str], name: str, maximum: int = U64_MAX) -> int | None:
    """A number, clamped to `maximum`."""
    text = pairs.get(name, "")
    if not (text.isascii() and text.isdigit()):
        return None
    # 21 digits exceed 64 bits; converting more would only take time.
    return min(int(text.lstrip("0")[:21] or "0"), maximum)


def encode_cursor(name: str) -> str:
    """A cursor for the rows after this name; URL-safe."""
    return urlsafe_b64encode(name.encode()).decode().rstrip("=")


def decode_cursor(text: str) -> str:
    if not text:
        return ""
    try:
        if not text.isascii() or not text.replace("-", "").replace("_", "").isalnum():
            raise ValueError(text)
        return urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        raise InvalidRequest("the cursor is invalid; start again without it") from None
