"""API keys: entries `secret[:scopes[:prefixes]]`, separated by commas, kept as digests.

    secret                   every scope, any name
    secret:read+write        those scopes, any name
    secret:r:orders.|bills.  those scopes, names that start with one of the prefixes
    secret::orders.          every scope, names with that prefix

Only the first two colons split, so prefixes may contain more. Errors count entries
and name scopes, never a secret.
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
    """What one secret may do. No prefixes means any name."""

    digest: bytes
    scopes: frozenset[Scope]
    prefixes: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)


def parse_keys(text: str) -> list[ApiKey]:
    """The keys of a TOPICS_API_KEYS text, in its order; ValueError when an entry cannot be what was meant."""
    entries = list(_entries(text))
    known = [secret for _, secret, _, _ in entries]
    return [
        ApiKey(digest_of(secret), _parse_scopes(scopes, number, known), _parse_prefixes(prefixes, number))
        for number, secret, scopes, prefixes in entries
    ]


def secrets_of(text: str) -> list[str]:
    """The secrets of a TOPICS_API_KEYS text, for keeping them out of logs."""
    return [secret for _, secret, _, _ in _entries(text)]


def find_key(keys: Iterable[ApiKey], secret: str) -> ApiKey | None:
    """The first key with this secret. Every key is compared, so the time taken does not tell which one matched."""
    digest = digest_of(secret)
    matches = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return matches[0] if matches else None


def digest_of(secret: str) -> bytes:
    # The environment and HTTP headers both bring bytes that are no UTF-8 as lone surrogates.
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
    # Neither "all" nor "none" is a safe guess for what a lone separator means.
    if not tokens:
        raise ValueError(f"entry {number} has a scopes field with separators only")
    scopes: frozenset[Scope] = frozenset()
    for token in tokens:
        granted = _TOKENS.get(token.lower())
        if granted is None:
            # A slip of the comma can put a secret where the scopes belong.
            shown = "" if any(secret in token for secret in secrets) else f" {token!r}"
            raise ValueError(
                f"entry {number} has an unknown scope{shown}; known are read, write, delete, admin and rw"
            )
        scopes |= granted
    return scopes


def _parse_prefixes(text: str, number: int) -> tuple[str, ...]:
    prefixes = tuple(_items(text, "|"))
    if text and not prefixes:
        raise ValueError(f"entry {number} has a prefixes field with separators only")
    return prefixes


def _items(text: str, separator: str) -> list[str]:
    return [item for part in text.split(separator) if (item := part.strip())]
