"""Marks the test of a fault; docs/appendix/faults.md is generated from these marks.

@fault("disk", "fsync of the log fails with EIO", "the shard turns read-only; nothing unsynced is acked")
def test_...

@pytest.mark.parametrize("field", [pytest.param("lsn", marks=fault("log file", "…", "…")), …])
"""

from __future__ import annotations

import pytest


def fault(where: str, what: str, expected: str) -> pytest.MarkDecorator:
    """`where` is the part of the system, `what` the fault in it, and `expected` what users see.

    Each pair of `where` and `what` is one row of the catalogue. Several tests may belong to one row; they must have
    the same `expected`.
    """
    return pytest.mark.fault(where=where, what=what, expected=expected)
