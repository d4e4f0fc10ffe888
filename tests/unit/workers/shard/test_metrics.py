"""Goal: a shard's metrics are correct, and no label contains client input.

Method: a shard without processes gets various requests, and its report is checked, also as text.
"""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.support.engine_harness import SMALL
from tests.support.shard_rig import Rig
from topics.link import wire
from topics.link.reports import CONSUMER_ROWS_MAX, LATENCY_BUCKETS_US, ShardReport, Timed
from topics.link.watch import FeedOptions, Follow, encode
from topics.protocols.http.errors import STATUS
from topics.protocols.http.metrics_text import Totals, as_text
from workers.shard.metrics import OPERATIONS, Timer

CONSUMER = wire.encode_args(wire.Args(consumer="mine"))


def report(rig: Rig) -> ShardReport:
    reply = rig.ask(wire.METRICS)
    assert reply is not None
    return msgspec.msgpack.decode(reply.body, type=ShardReport)


def write(*values: object) -> dict[str, object]:
    return {"records": [{"data": value} for value in values]}


def counts(rig: Rig) -> dict[str, int]:
    return {name: sum(timed.buckets) for name, timed in report(rig).requests.items() if any(timed.buckets)}


def test_requests_are_timed_by_operation() -> None:
    rig = Rig()
    rig.ask(wire.WRITE, body=write(1, 2))
    rig.ask(wire.DIFF)
    rig.ask(wire.GET_TOPIC)
    rig.ask(wire.DELETE, body={"before_seq": 2})
    assert counts(rig) == {"write": 1, "read": 1, "topic": 1, "delete": 1}


def test_the_time_is_that_since_the_arrival() -> None:
    rig = Rig()
    rig.clock.advance(1000)
    rig.ask(wire.WRITE, body=write(1), received_us=rig.now_us() - 30_000)
    timed = report(rig).requests["write"]
    assert timed.micros == 30_000
    assert timed.buckets.index(1) == LATENCY_BUCKETS_US.index(50_000)


def test_a_read_that_waits_is_a_poll() -> None:
    rig = Rig()
    rig.ask(wire.WRITE, body=write(1))
    assert rig.ask(wire.DIFF, body={"from_seq": 1, "wait_ms": 1000}) is None
    rig.ask(wire.WRITE, body=write(2))
    assert counts(rig) == {"write": 2, "poll": 1}


def test_refusals_are_counted_by_code_and_not_timed() -> None:
    rig = Rig()
    rig.ask(wire.DIFF, topic="none")
    rig.ask(wire.WRITE, body=b"{")
    assert counts(rig) == {}
    assert report(rig).refusals == {"topic_not_found": 1, "invalid_request": 1}
    assert set(report(rig).refusals) <= set(STATUS)


def test_the_log_that_a_start_would_do_again_is_measured() -> None:
    rig = Rig()
    before = report(rig).log_bytes
    rig.ask(wire.WRITE, body=write("x" * 1000))
    found = report(rig)
    assert before + 1000 < found.log_bytes < before + 2000
    text = as_text(Totals([found], 1, 0, 0)).decode()
    assert f'topics_log_bytes_to_replay{{shard="{found.shard}"}} {found.log_bytes}\n' in text
    rig.clock.advance(rig.config.snapshot_interval_ms)
    rig.ask(wire.WRITE, body=write(1))
    rig.rest()
    assert report(rig).checkpoints > found.checkpoints
    assert report(rig).log_bytes < found.log_bytes


def test_losses_are_counted_when_readers_hear_of_them() -> None:
    rig = Rig()
    rig.ask(wire.PUT_TOPIC, body={"cap_records": 1})
    rig.ask(wire.WRITE, body=write(1, 2, 3))
    assert report(rig).tombstones == {}
    rig.ask(wire.DIFF)
    rig.ask(wire.DIFF, body={"from_seq": 2})  # nothing is missing there
    rig.ask(wire.DIFF, body={"from_seq": 9})
    assert report(rig).tombstones == {"cap": 1, "recreated": 1}


def test_live_delivery_is_timed() -> None:
    rig = Rig()
    rig.ask(wire.WRITE, body=write(1))
    rig.ask(wire.FOLLOW, body=encode(Follow(FeedOptions())))
    assert sum(deliveries(rig).buckets) == 0  # what was there before is not a live record
    rig.replies.clear()  # more comes under the same number
    rig.ask(wire.WRITE, body=write(2))
    assert sum(deliveries(rig).buckets) == 1


def test_large_pages_are_counted_like_small_ones() -> None:
    """Their columns are numpy arrays, whose numbers cannot be encoded in messages."""
    rig = Rig()
    rig.ask(wire.PUT_TOPIC, body={"durability": "fsync"})
    rig.ask(wire.FOLLOW, body=encode(Follow(FeedOptions(limit=1000))))
    rig.ask(wire.PUT_CONSUMER, body={"deliver": "all", "filter": "b"}, args=CONSUMER)
    rig.replies.clear()
    rig.receive(wire.WRITE, body={"records": [{"data": i, "tag": "ab"[i % 2]} for i in range(800)]})
    rig.turn()
    rig.clock.advance(40)  # the duration of the sync
    rig.rest()
    rig.ask(wire.CLAIM, body={"node": "w", "max": 100}, args=CONSUMER)
    found = report(rig)
    assert found.deliveries is not None
    assert found.deliveries.buckets[LATENCY_BUCKETS_US.index(50_000)] == 1
    (row,) = found.consumer_rows
    assert (row.lag, row.ack_pending, row.lag_ms) == (300, 100, -1)


def test_figures_that_cannot_be_told_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.core.metrics, "report", lambda progress: 1 / 0)
    reply = rig.ask(wire.METRICS)
    assert reply is not None and reply.status == 500
    monkeypatch.undo()
    rig.ask(wire.WRITE, body=write(1))
    assert counts(rig) == {"write": 1}


def deliveries(rig: Rig) -> Timed:
    timed = report(rig).deliveries
    assert timed is not None
    return timed


def test_lag_of_consumers_and_queues() -> None:
    rig = Rig()
    rig.ask(wire.PUT_TOPIC, body={"type": "queue"})
    rig.ask(wire.WRITE, body=write(1, 2, 3))
    rig.ask(wire.PUT_CONSUMER, body={"deliver": "all"}, args=CONSUMER)
    rig.clock.advance(5000)
    found = report(rig)
    (row,) = found.consumer_rows
    assert (row.topic, row.consumer, row.lag, row.ack_pending, row.lag_ms) == ("t", "mine", 3, 0, 5000)
    assert found.topics[0].oldest_ms == 5000
    rig.ask(wire.CLAIM, body={"node": "w", "max": 2}, args=CONSUMER)
    (row,) = report(rig).consumer_rows
    assert (row.lag, row.ack_pending) == (1, 2)


def test_consumers_with_rows_are_so_many() -> None:
    rig = Rig(msgspec.structs.replace(SMALL, verify=False))
    rig.ask(wire.WRITE, body=write(1))
    for i in range(3):
        rig.ask(wire.WRITE, topic=f"t{i}", body=write(1))
    for i in range(CONSUMER_ROWS_MAX + 1):
        args = wire.encode_args(wire.Args(consumer=f"c{i:03}"))
        rig.ask(wire.PUT_CONSUMER, topic=f"t{i % 3}", args=args)
    found = report(rig)
    assert found.consumers == CONSUMER_ROWS_MAX + 1
    assert len(found.consumer_rows) == CONSUMER_ROWS_MAX
    text = as_text(Totals([found], 1, 0, 0)).decode()
    assert "\ntopics_consumer_metrics_truncated 1\n" in text
    # Topics that a key may not see are not shown.
    hidden = as_text(Totals([found], 1, 0, 0, covers=lambda name: name == "t0")).decode()
    assert set(re.findall(r'consumer_lag_records{topic="(\w+)"', hidden)) == {"t0"}


def test_histograms_add_up_over_shards() -> None:
    timers = [Timer(), Timer()]
    timers[0].add(100)
    timers[0].add(101)
    timers[1].add(10**9)
    reports = [report(Rig()), report(Rig())]
    for one, timer in zip(reports, timers):
        one.requests["write"] = timer.timed()
    text = as_text(Totals(reports, 2, 0, 0)).decode()
    lines = re.findall(r'topics_request_duration_seconds_(\w+){operation="write"(?:,le="(.+)")?} (.+)', text)
    assert lines[0] == ("bucket", "0.0001", "1")
    assert lines[1] == ("bucket", "0.00025", "2")
    assert lines[-3:] == [("bucket", "+Inf", "3"), ("sum", "", "1000.000201"), ("count", "", "3")]
    assert set(re.findall(r'operation="(\w+)"', text)) == set(OPERATIONS)


def test_every_operation_of_a_client_has_a_name() -> None:
    """Except messages between processes; what the catalog does for routers has no shard of its own to be timed at."""
    named = {op for ops in OPERATIONS.values() for op in ops}
    assert named == {op for op in range(1, wire.READY) if op not in (2, 4, 25, 26)}
