"""An engine with a cold tier: topics whose first segments are about to be relocated, or have been."""

from __future__ import annotations

import msgspec

from tests.support.engine_harness import (
    FSYNC,
    SMALL,
    Harness,
    numbered,
)
from tests.support.stores import ObjectStore
from topics.api import limits
from topics.engine.storage.manifest import is_manifest_file

TIERED = msgspec.structs.replace(SMALL, hot_retain_segments=1, cold_cache_bytes=1 << 20)
SECRET = b'"the secret that nobody may find again: 4711-0815"'
NEEDLE = b"nobody may find again"


def records(*seqs: int) -> list[tuple[int, bytes]]:
    return [(seq, numbered(seq, 1)[0]) for seq in seqs]


def filled(store: ObjectStore | None = None, *, count: int = 14, secret: int = 0) -> Harness:
    """Segments of 4 records, the first ones due for relocation."""
    h = Harness(TIERED, cold=store if store is not None else ObjectStore())
    h.put("t", FSYNC)
    for seq in range(1, count + 1):
        payload = SECRET if seq == secret else numbered(seq, 1)[0]
        h.append("t", payload, tag=b"a" if seq % 2 else b"b")
    return h


def relocated(store: ObjectStore | None = None, **options: int) -> Harness:
    """Two segments in the cold tier only, one sealed and one open on the hot tier."""
    h = filled(store, **options)
    for _ in range(3):
        h.checkpoint()
    assert data_files(h) == ["seg-0000000000000009-0.data", "seg-000000000000000d-0.data"]
    return h


def moved(store: ObjectStore) -> Harness:
    """Four segments in the cold tier only."""
    h = filled(store, count=22)
    for _ in range(3):
        h.checkpoint()
    assert tiers(h)[:4] == ["cold"] * 4
    return h


def data_files(h: Harness) -> list[str]:
    return [name for name in h.segment_files("t") if name.endswith(".data")]


def cold_files(h: Harness) -> list[str]:
    assert isinstance(h.cold, ObjectStore)
    names = [key.rpartition("/")[2] for key in sorted(h.cold.objects)]
    return [name for name in names if not is_manifest_file(name)]


def tiers(h: Harness, topic: str = "t") -> list[str]:
    log = h.engine.shard.state.published[topic]
    metas = log.stored if log.stored is not None else [chunk.meta for chunk in log.chunks]
    return [meta.tier for meta in metas if meta is not None]


def check_kept(h: Harness, note: object) -> None:
    """Every acknowledged record is there, and the next relocation succeeds."""
    seqs = h.seqs("t")
    assert set(range(1, 15)) - {3} <= set(seqs), note
    assert h.gaps("t") == [], note
    h.rest()
    for _ in range(3):
        h.pass_time(limits.COLD_PAUSE_MS_MAX)
        h.append("t", b'"after"')
        h.checkpoint()
    assert h.rows("t")[: len(seqs)] == [(seq, numbered(seq, 1)[0]) for seq in seqs if seq in range(1, 16)], (
        note
    )
    assert "seg-0000000000000001-0.data" not in data_files(h), note
    h.kill_and_open()
    assert h.seqs("t")[: len(seqs)] == seqs, note
