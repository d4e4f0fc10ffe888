"""One topic's log without a shard; the rig changes it as a shard would."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from topics.api.config import TopicConfig
from topics.engine.storage.frames import DEAD, DELETED
from topics.engine.topic.log import Loss, Op, TopicLog

Names = list[bytes | None]


def new_log(
    rows_max: int = 4, *, config: TopicConfig | None = None, segment_bytes: int = 1 << 30
) -> TopicLog:
    return TopicLog(
        7, "t", config or TopicConfig(), segment_max_events=rows_max, segment_max_bytes=segment_bytes
    )


def stage(
    log: TopicLog, sizes: list[int], *, tags: Names | None = None, nodes: Names | None = None, ts: int = 1
) -> Op:
    """Stage a write as the shard does."""
    for i, size in enumerate(sizes):
        chunk = log.chunk_for_append(ts)
        tag = log.tags.add(log.next_seq, tags[i]) if tags is not None else 0
        node = log.nodes.add(nodes[i]) if nodes is not None else 0
        chunk.add(0, 46 + size, ts, 0, tag, node, size)
        log.next_seq += 1
    log.count += len(sizes)
    log.bytes += sum(sizes)
    return Op(log, head=log.next_seq - 1, count=len(sizes), bytes=sum(sizes), write_ts=ts)


def append(
    log: TopicLog, sizes: list[int], *, tags: Names | None = None, nodes: Names | None = None, ts: int = 1
) -> None:
    log.publish(stage(log, sizes, tags=tags, nodes=nodes, ts=ts))


def delete(log: TopicLog, *ranges: tuple[int, int]) -> Op:
    op = Op(log)
    log.stage_delete(list(ranges), op)
    return op


def evict(log: TopicLog, last_seq: int, *, ttl: bool = False) -> Op:
    op = Op(log)
    log.stage_evict(last_seq, op, ttl=ttl)
    return op


def skip(log: TopicLog, count: int) -> Op:
    op = Op(log)
    log.stage_skip(count, op)
    return op


def lose(log: TopicLog, first: int, last: int, reason: str = "corrupt") -> Op:
    op = Op(log)
    log.stage_loss((first, last, reason), op)
    return op


def live_seqs(log: TopicLog, first: int, stop: int, dead: int) -> list[int]:
    return [
        chunk.first_seq + low + int(i)
        for chunk, low, high in log.spans(first, stop)
        for i in np.nonzero(chunk.live(low, high, dead))[0]
    ]


def readable(log: TopicLog) -> list[int]:
    """What a reader finds, by the steps of `Reader`."""
    return live_seqs(log, log.view.first_seq, log.view.head + 1, DELETED)


def staged(log: TopicLog) -> list[int]:
    return live_seqs(log, log.first_seq, log.next_seq, DEAD)


def seqs_of(losses: Iterable[Loss]) -> set[int]:
    return {seq for first, last, _ in losses for seq in range(first, last + 1)}
