"""Figures of an engine: plain values, as the worker reports them."""

from __future__ import annotations

from tests.support.engine_harness import Harness, append
from topics.api.config import TopicConfig
from topics.engine.commands import consumers as con


def test_a_queue_is_reported_with_its_jobs_and_counts_towards_the_caps() -> None:
    h = Harness()
    h.put("jobs", TopicConfig(type="queue"))
    for n in range(3):
        h.send(append("jobs", b"%d" % n))
    h.send(con.Claim("jobs", node=b"n", lease_ms=1000))
    stats = h.engine.stats
    (row,) = stats.topic_figures(10)
    assert (row.name, row.is_queue, row.head, row.count, row.ready, row.in_flight) == (
        "jobs",
        True,
        3,
        3,
        2,
        1,
    )
    assert stats.used == (1, stats.bytes_live)
    assert (stats.queue_totals().queues, stats.queue_totals().in_flight) == (1, 1)
    assert (stats.topics, stats.records_live, stats.read_only, stats.is_full) == (1, 3, None, False)


def test_stats_of_an_unknown_topic_are_none_or_empty() -> None:
    stats = Harness().engine.stats
    assert stats.topic_id("t") is None and stats.leases_of("t", "c", 1) is None
    assert stats.inflow_total("t", 1) is None and not list(stats.inflows("t"))
    assert not (stats.has_topic("t") or stats.is_published("t") or stats.is_fsync("t"))
