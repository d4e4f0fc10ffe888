"""The records of one write as columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Records:
    """The columns of one write. An optional column is None if no record has a value.

    A payload is the JSON text of `data` followed by that of `meta` (its length in `meta_lens`), or, if `raw`, a header
    block (its length in `header_lens`) followed by bytes.
    """

    payloads: list[bytes]
    tags: list[bytes | None] | None = None
    nodes: list[bytes | None] | None = None
    meta_lens: list[int] | None = None
    header_lens: list[int] | None = None
    ttls_ms: list[int] | None = None  # 0: none
    sizes: list[int] | None = None  # accounted bytes, if they differ from the payload lengths
    raw: bool = False
    hops: list[int] | None = None  # of copies: forwards passed so far
