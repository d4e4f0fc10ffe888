"""Slices so small that a few records take many turns: work in several slices must give the same result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from topics.api import limits
from topics.engine.shard.consumers import admin as consumers
from topics.engine.shard.consumers import leases as handing_out
from topics.engine.shard.consumers import settle as settling
from topics.engine.topic import consumer


@contextmanager
def slices_of(seed: int) -> Iterator[None]:
    """Small ones for every other run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if seed % 2:
            use_small_slices(monkeypatch)
        yield


def use_small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (consumer, "COUNT_BLOCK", 2),
        (consumer, "COUNT_BLOCK_UNFILTERED", 2),
        (consumer, "COUNT_INLINE_US", 1),
        (consumer, "ROWS_PER_US", 1),
        (consumer, "TIMEOUTS_PER_SLICE", 1),
        (handing_out, "CATCH_UP_US", 2),
        (handing_out, "TIMEOUTS_PER_SLICE", 2),
        (consumers, "TIMEOUTS_PER_SLICE", 2),
        (handing_out, "PRUNE_INLINE_MAX", 2),
        (handing_out, "PRUNE_PER_TURN", 4),
        (handing_out, "PRUNE_PER_SLICE", 2),
        (handing_out, "PRUNE_WINDOW", 2),
        (consumers, "SCANNED_PER_SLICE", 2),
        (settling, "SETTLED_PER_SLICE", 2),
        (limits, "CLAIM_MAX", 3),
        (limits, "LONG_TURN_UNITS", 4),
        (limits, "LONG_SLICE_UNITS", 2),
    ):
        assert hasattr(module, name), name
        monkeypatch.setattr(module, name, value)
