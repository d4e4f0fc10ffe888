"""Query strings: forgiving where the contract is. What cannot be read counts as absent."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from urllib.parse import unquote_to_bytes

from topics.api.errors import InvalidRequest
from topics.api.requests import U64_MAX

_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def parse_query(query: bytes) -> dict[str, str]:
    """Decoded pairs; of a name that comes twice the first counts."""
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


def optional_number(pairs: dict[str, str], name: str, most: int = U64_MAX) -> int | None:
    """A number, clamped to `most`."""
    text = pairs.get(name, "")
    if not (text.isascii() and text.isdigit()):
        return None
    # Twenty-one digits are beyond 64 bits; longer text would only cost time to convert.
    return min(int(text.lstrip("0")[:21] or "0"), most)


def encode_cursor(name: str) -> str:
    """Rows after this name. The text may be pasted into a URL as it is."""
    return urlsafe_b64encode(name.encode()).decode().rstrip("=")


def decode_cursor(text: str) -> str:
    if not text:
        return ""
    try:
        if not text.isascii() or not text.replace("-", "").replace("_", "").isalnum():
            raise ValueError(text)
        return urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        raise InvalidRequest("the cursor is not one of ours; start again without it") from None
