"""Shards with small files for tests of checkpoints."""

from __future__ import annotations

import msgspec

from tests.support.engine_harness import (
    FSYNC,
    SMALL,
    Harness,
    numbered,
)
from topics.api.config import EngineConfig, TopicConfig

INLINE = msgspec.structs.replace(SMALL, inline_bytes=1024)
REWRITING = msgspec.structs.replace(SMALL, rewrite_dead_share=0.5)


def filled(count: int, config: EngineConfig = SMALL, topic: TopicConfig = FSYNC) -> Harness:
    h = Harness(config)
    h.put("t", topic)
    for i in range(1, count + 1):
        h.append("t", *numbered(i, 1))
    return h


def expected(*seqs: int) -> list[tuple[int, bytes]]:
    return [(seq, numbered(seq, 1)[0]) for seq in seqs]


def with_suffix(names: list[str], suffix: str) -> list[str]:
    return [name for name in names if name.endswith(suffix)]
