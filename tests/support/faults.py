"""Marks a test as the one that shows what happens under a fault; docs/appendix/faults.md is made of these marks.

@fault("disk", "fsync of the log fails with EIO", "the shard turns read-only; nothing unsynced is acked")
def test_...

@pytest.mark.parametrize("field", [pytest.param("lsn", marks=fault("log file", "…", "…")), …])
"""

from __future__ import annotations

import pytest


def fault(where: str, what: str, expected: str) -> pytest.MarkDecorator:
    """`where` is the part of the system, `what` goes wrong there, and `expected` is what users see of it.

    Each pair of `where` and `what` is one row of the catalogue. Several tests may show the same row; they must agree on
    what is expected.
    """
    return pytest.mark.fault(where=where, what=what, expected=expected)
