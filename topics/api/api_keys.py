"""API keys: comma-separated entries `secret[:scopes[:prefixes]]`, stored as digests.

    secret                   every scope, any name
    secret:read+write        those scopes, any name
    secret:r:orders.|bills.  those scopes, names that start with one of the prefixes
    secret::orders.          every scope, names with that prefix

Only the first two colons are separators, so prefixes may contain colons. Error messages
give the number of the entry and the scope, never a secret.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal

import msgspec

Scope = Literal["read", "write", "delete", "admin"]

ALL_SCOPES: frozenset[Scope] = frozenset({"read", "write", "delete", "admin"})

_TOKENS: dict[str, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "r": frozenset({"read"}),
    "write": frozenset({"write"}),
    "w": frozenset({"write"}),
    "rw": frozenset({"read", "write"}),
    "delete": frozenset({"delete"}),
    "del": frozenset({"delete"}),
    "d": frozenset({"delete"}),
    "admin": frozenset({"admin"}),
    "a": frozenset({"admin"}),
}


class ApiKey(msgspec.Struct, frozen=True):
    """Permissions of one secret. Without prefixes it may use any name."""

    digest: bytes
    scopes: frozenset[Scope]
    prefixes: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)


def parse_keys(text: str) -> list[ApiKey]:
    """Parse the value of TOPICS_API_KEYS. Raises ValueError if an entry is malformed."""
    entries = list(_entries(text))
    known = [secret for _, secret, _, _ in entries]
    return [
        ApiKey(digest_of(secret), _parse_scopes(scopes, number, known), _parse_prefixes(prefixes, number))
        for number, secret, scopes, prefixes in entries
    ]


def secrets_of(text: str) -> list[str]:
    """The secrets in a value of TOPICS_API_KEYS, to keep them out of logs."""
    return [secret for _, secret, _, _ in _entries(text)]


def find_key(keys: Iterable[ApiKey], secret: str) -> ApiKey | None:
    """The first key with this secret. All keys are compared, so the time does not reveal which one matched."""
    digest = digest_of(secret)
    matches = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return matches[0] if matches else None


def digest_of(secret: str) -> bytes:
    # Bytes that are not UTF-8 arrive as lone surrogates, from the environment and from HTTP headers.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _entries(text: str) -> Iterable[tuple[int, str, str, str]]:
    """Number (from 1), secret, scopes and prefixes of each entry that has a secret."""
    for number, entry in enumerate(text.split(","), 1):
        secret, scopes, prefixes, *_ = [*(field.strip() for field in entry.split(":", 2)), "", ""]
        if secret:
            yield number, secret, scopes, prefixes


def _parse_scopes(text: str, number: int, secrets: list[str]) -> frozenset[Scope]:
    if not text:
        return ALL_SCOPES
    tokens = _items(text, "+")
    # A field of separators could mean all scopes or none; neither is a safe guess.
    if not tokens:
        raise ValueError(f"entry {number} has only separators in its scopes field")
    scopes: frozenset[Scope] = frozenset()
    for token in tokens:
        granted = _TOKENS.get(token.lower())
        if granted is None:
            # A missing comma can put a secret in the scopes field.
            shown = "" if any(secret in token for secret in secrets) else f" {token!r}"
            raise ValueError(
                f"entry {number} has an unknown scope{shown}; valid scopes are read, write, delete, admin and rw"
            )
        scopes |= granted
    return scopes


def _parse_prefixes(text: str, number: int) -> tuple[str, ...]:
    prefixes = tuple(_items(text, "|"))
    if text and not prefixes:
        raise ValueError(f"entry {number} has only separators in its prefixes field")
    return prefixes


def _items(text: str, separator: str) -> list[str]:
    return [item for part in text.split(separator) if (item := part.strip())]
