"""Trace context: the W3C header `traceparent`, parsed from a request and stored in the record's `meta`.

    traceparent   version "-" trace-id "-" parent-id "-" flags       2, 32, 16 and 2 lower-case hex digits

Neither id may be all zeros, and version ff is invalid. Versions after 00 may append fields after the flags; they are
forwarded as version 00. A malformed header counts as absent: tracing must never make a request fail.
"""

from __future__ import annotations

import re

META_KEY = "traceparent"

_HEADER = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?"
)


def read_traceparent(header: bytes) -> str:
    """The header's value as version 00; empty if it is malformed."""
    found = _HEADER.fullmatch(header)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return ""
    # In later versions only the lowest flag, sampled, has a known meaning.
    flags = found[4] if found[1] == b"00" else b"%02x" % (int(found[4], 16) & 1)
    return b"-".join((b"00", found[2], found[3], flags)).decode()
