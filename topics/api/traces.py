"""Where a record belongs in a distributed trace: the W3C header `traceparent`, read from a request and kept in `meta`.

    traceparent   version "-" trace-id "-" parent-id "-" flags       2, 32, 16 and 2 digits, hex, lower case

Neither id is all zeros, and version ff is none. A later version than 00 may say more behind its flags; what we know of it is
passed on as version 00. What is malformed is as good as absent: a trace must never make a request fail.
"""

from __future__ import annotations

import re

META_KEY = "traceparent"

_HEADER = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?"
)


def read_traceparent(header: bytes) -> str:
    """The header's value as version 00; empty when it is malformed."""
    found = _HEADER.fullmatch(header)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return ""
    # Of a later version only the lowest flag means what we know: sampled.
    flags = found[4] if found[1] == b"00" else b"%02x" % (int(found[4], 16) & 1)
    return b"-".join((b"00", found[2], found[3], flags)).decode()
