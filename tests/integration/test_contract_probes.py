"""Goal: health, readiness and metrics have exactly the fields and names that the contract lists.

Method: a server with known contents; the text format is parsed line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import topics
from tests.support.contract import Json, ok
from tests.support.server import Server, running, until
from topics.link.reports import FSYNC_BUCKETS_US, ShardReport, TopicRow
from topics.protocols.http.metrics_text import Totals, as_text

GAUGES = {
    "topics_topics", "topics_topics_by_class", "topics_routers", "topics_records_live", "topics_bytes_live",
    "topics_topic_head_seq", "topics_topic_earliest_seq", "topics_topic_records_live", "topics_topic_bytes_live",
    "topics_topic_queue_ready", "topics_topic_queue_in_flight", "topics_topic_metrics_truncated", "topics_queue_topics",
    "topics_queue_leases_in_flight", "topics_sse_connections", "topics_watch_sessions", "topics_ready",
    "topics_recovery_progress", "topics_wal_queue_depth", "topics_wal_queue_depth_peak", "topics_wal_read_only",
}  # fmt: skip
COUNTERS = {
    "topics_uptime_ms", "topics_wal_frames_total", "topics_wal_batches_total", "topics_wal_fsyncs_total",
    "topics_wal_bytes_written_total", "topics_wal_rotations_total", "topics_wal_submit_full_total",
}  # fmt: skip
HISTOGRAM = "topics_wal_fsync_latency_us"
BOUNDS = ["50", "100", "250", "500", "1000", "5000", "10000", "50000", "100000", "+Inf"]
WAL = {
    "fsyncs", "frames", "batches", "bytes_written", "rotations", "queue_depth", "queue_depth_peak", "submit_full_total",
    "read_only", "fsync_count", "fsync_micros_total",
}  # fmt: skip

LABEL = r'[a-z]+="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"([a-z_0-9]+)(?:\{{({LABEL}(?:,{LABEL})?)\}})? (-?[0-9.]+)")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("measured")) as server:
        for name, durability in (
            ("a", "ephemeral"),
            ("b", "memory"),
            ("c", "disk"),
            ("d", "fsync"),
            ("e", "fsync"),
        ):
            server.put(f"/v0/topics/{name}.one", {"durability": durability})
        server.put("/v0/topics/jobs:q-1_", {"type": "queue"})
        server.write("c.one", 1, 22, 333)
        server.post("/v0/topics/c.one/delete", {"before_seq": 2})
        server.write("d.one", "x")
        server.write("jobs:q-1_", 1, 2)
        yield server


def samples(server: Server) -> dict[tuple[str, str], float]:
    """Values by name and label value; the text must consist of comments and samples."""
    reply = server.get("/v0/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert reply.body.endswith(b"\n")
    found: dict[tuple[str, str], float] = {}
    for line in reply.body.decode().splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            key = (match[1], ",".join(filter(None, match.group(3, 4))))
            assert key not in found
            found[key] = float(match[5])
    return found


def types(server: Server) -> dict[str, str]:
    lines = server.get("/v0/metrics").body.decode().splitlines()
    return {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}


@pytest.mark.parametrize("path", ["/v0/health", "/healthz"])
def test_health(measured: Server, path: str) -> None:
    reply = measured.get(path)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    body = reply.json
    assert body == {"status": "ok", "version": topics.__version__, "uptime_ms": body["uptime_ms"]}
    assert isinstance(body["uptime_ms"], int)
    until(lambda: measured.get(path).json["uptime_ms"] > body["uptime_ms"])


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
def test_ready(measured: Server, path: str) -> None:
    reply = measured.get(path)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == {"status": "ready", "wal_replay_complete": True, "topics": 6}


def test_every_name_has_its_type(measured: Server) -> None:
    found = types(measured)
    assert {name for name, kind in found.items() if kind == "gauge"} >= GAUGES
    assert {name for name, kind in found.items() if kind == "counter"} >= COUNTERS
    assert {name for name, kind in found.items() if kind == "histogram"} >= {HISTOGRAM}
    named = {name for name, _ in samples(measured)}
    for name in GAUGES | COUNTERS:
        assert name in named
    histograms = tuple(name for name, kind in found.items() if kind == "histogram")
    assert not {name for name in named if not name.startswith(histograms)} - set(found)


def test_the_figures(measured: Server) -> None:
    found = samples(measured)
    expected = {
        ("topics_topics", ""): 6,
        ("topics_routers", ""): 0,
        ("topics_records_live", ""): 5,
        ("topics_bytes_live", ""): 10,
        ("topics_queue_topics", ""): 1,
        ("topics_queue_leases_in_flight", ""): 0,
        ("topics_topic_metrics_truncated", ""): 0,
        ("topics_ready", ""): 1,
        ("topics_recovery_progress", ""): 1,
        ("topics_wal_read_only", ""): 0,
        ("topics_sse_connections", ""): 0,
        ("topics_watch_sessions", ""): 0,
        ("topics_topic_queue_ready", "jobs:q-1_"): 2,
        ("topics_topic_queue_in_flight", "jobs:q-1_"): 0,
    }
    expected |= {
        ("topics_topics_by_class", name): count
        for name, count in {"ephemeral": 1, "memory": 1, "disk": 2, "fsync": 2}.items()
    }
    rows = {"a.one": (0, 1, 0, 0), "c.one": (3, 2, 2, 5), "d.one": (1, 1, 1, 3), "jobs:q-1_": (2, 1, 2, 2)}
    for topic, row in rows.items():
        for name, value in zip(("head_seq", "earliest_seq", "records_live", "bytes_live"), row):
            expected[f"topics_topic_{name}", topic] = value
    assert {key: found[key] for key in expected} == expected
    # Only queues have the metrics of queues.
    assert [label for name, label in found if name == "topics_topic_queue_ready"] == ["jobs:q-1_"]


def test_counters_count(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.put("/v0/topics/d.one", {"durability": "fsync"})
        server.write("d.one", "x")
        before = samples(server)
        server.write("d.one", "more")
        after = samples(server)
    for name in ("frames", "batches", "fsyncs", "bytes_written"):
        key = (f"topics_wal_{name}_total", "")
        assert after[key] > before[key]
    for name in COUNTERS:
        assert after[name, ""] >= before[name, ""]


def test_the_histogram_of_syncs(measured: Server) -> None:
    lines = [
        line for line in measured.get("/v0/metrics").body.decode().splitlines() if line.startswith(HISTOGRAM)
    ]
    buckets = [re.fullmatch(rf'{HISTOGRAM}_bucket{{le="([^"]+)"}} (\d+)', line) for line in lines[:-2]]
    assert all(buckets)
    assert [bucket[1] for bucket in buckets if bucket] == BOUNDS
    counts = [int(bucket[2]) for bucket in buckets if bucket]
    assert counts == sorted(counts)
    total, count = (line.split() for line in lines[-2:])
    assert (total[0], count) == (f"{HISTOGRAM}_sum", [f"{HISTOGRAM}_count", str(counts[-1])])
    assert counts[-1] > 0
    assert int(total[1]) > 0


def test_metrics_as_json(measured: Server) -> None:
    for accept in ("application/json", "text/html, application/json;q=0.9"):
        body = ok(measured.get("/v0/metrics", Accept=accept))
        wal = body.pop("wal")
        assert set(wal) == WAL
        assert wal.pop("read_only") is False
        assert all(isinstance(value, int) for value in wal.values())
        assert wal["fsync_count"] > 0
        assert body.pop("uptime_ms") > 0
        assert 0 <= body.pop("pressure") <= 1  # depends on how busy this machine is
        assert {name: body[name] for name in figures()} == figures()
        assert all(body[name] == 0 for name in body.keys() - figures().keys())
    for accept in ("*/*", "text/plain", ""):
        assert measured.get("/v0/metrics", Accept=accept).headers["content-type"].startswith("text/plain")


def figures() -> Json:
    return {
        "topics": 6, "topics_ephemeral": 1, "topics_memory": 1, "topics_disk": 2, "topics_fsync": 2, "routers": 0,
        "records_live": 5, "bytes_live": 10, "queue_topics": 1, "queue_leases_in_flight": 0, "consumers": 0,
        "sse_connections": 0, "watch_sessions": 0, "ready": True, "replay_progress": 1.0,
    }  # fmt: skip


# No topic can have such a name, and a thousand topics take long to create: these two tests call the renderer itself.


def report(names: list[str], count: int) -> ShardReport:
    rows = [TopicRow(name, False, 0, 1, 0, 0) for name in names]
    buckets = [0] * (len(FSYNC_BUCKETS_US) + 1)
    return ShardReport(1.0, False, False, {"disk": count}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, buckets, rows)


def test_labels_are_escaped() -> None:
    text = as_text(Totals([report(['a"b\\c\nd'], 1)], 1, 0, 0)).decode()
    assert 'topics_topic_head_seq{topic="a\\"b\\\\c\\nd"} 0\n' in text


@pytest.mark.parametrize(("count", "truncated"), [(1000, 0), (1001, 1)])
def test_topics_beyond_a_thousand_have_no_figures_of_their_own(count: int, truncated: int) -> None:
    names = [f"t{i:04}" for i in range(count)]
    halves = [report(names[::2], len(names[::2])), report(names[1::2], len(names[1::2]))]
    text = as_text(Totals(halves, 2, 0, 0)).decode()
    assert f"\ntopics_topic_metrics_truncated {truncated}\n" in text
    assert re.findall(r'topics_topic_head_seq{topic="([^"]+)"}', text) == names[:1000]
