"""Metrics: the reports of all shards, combined as Prometheus text or JSON."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from topics.engine.core.scheduler import WEIGHTS
from topics.link.reports import (
    CONSUMER_ROWS_MAX,
    FSYNC_BUCKETS_US,
    LATENCY_BUCKETS_US,
    TOPIC_ROWS_MAX,
    ConsumerRow,
    ShardReport,
    Timed,
    TopicRow,
)

TIERS = ("hot", "cold")
CLASSES = ("ephemeral", "memory", "disk", "fsync")


@dataclass(slots=True)
class Totals:
    """Reports of the shards that are up. Those that are down are missing in the totals."""

    reports: list[ShardReport]
    shards: int
    uptime_ms: int
    refused_full: int
    streams: int = 0  # open at all fronts
    covers: Callable[[str], bool] = lambda name: True  # whether the caller's key may see a topic
    front_pressure: float = 0.0  # of the front that serves the request
    failing: int = 0  # processes that keep failing

    @property
    def ready(self) -> bool:
        return len(self.reports) == self.shards and all(report.progress >= 1.0 for report in self.reports)

    @property
    def progress(self) -> float:
        return sum(report.progress for report in self.reports) / self.shards

    @property
    def pressure(self) -> float:
        """The maximum over this front and all shards."""
        return max([self.front_pressure, *(report.pressure for report in self.reports)])

    @property
    def by_band(self) -> list[int]:
        columns = zip(*(report.band_bytes for report in self.reports))
        return [sum(column) for column in columns] or [0] * len(WEIGHTS)

    def total(self, field: str) -> int:
        return sum(getattr(report, field) for report in self.reports)

    def of_class(self, name: str) -> int:
        return sum(report.topics_by_class.get(name, 0) for report in self.reports)

    @property
    def buckets(self) -> list[int]:
        columns = zip(*(report.fsync_buckets for report in self.reports))
        return [sum(column) for column in columns] or [0] * (len(FSYNC_BUCKETS_US) + 1)

    @property
    def operations(self) -> dict[str, list[Timed]]:
        names = dict.fromkeys(name for report in self.reports for name in report.requests)
        return {
            name: [r.requests[name] for r in self.reports if name in r.requests] for name in sorted(names)
        }

    def counts(self, field: str) -> dict[str, int]:
        """Sums of a counter that is kept by name."""
        sums: dict[str, int] = {}
        for report in self.reports:
            for name, count in getattr(report, field).items():
                sums[name] = sums.get(name, 0) + count
        return dict(sorted(sums.items()))

    @property
    def consumer_rows(self) -> list[ConsumerRow]:
        rows = heapq.merge(
            *(report.consumer_rows for report in self.reports), key=lambda row: (row.topic, row.consumer)
        )
        return [row for row in rows if self.covers(row.topic)]

    @property
    def disk_free(self) -> int | None:
        """The minimum over all shards, which usually share a disk."""
        return min((report.disk_free for report in self.reports if report.disk_free >= 0), default=None)

    @property
    def topic_rows(self) -> list[TopicRow]:
        rows = heapq.merge(*(report.topics for report in self.reports), key=lambda row: row.topic)
        return list(islice((row for row in rows if self.covers(row.topic)), TOPIC_ROWS_MAX))


def as_json(totals: Totals) -> dict[str, object]:
    topics = totals.total("topic_count")
    return {
        "topics": topics,
        **{f"topics_{name}": totals.of_class(name) for name in CLASSES},
        "routers": totals.total("forwards"),
        "records_live": totals.total("records_live"),
        "bytes_live": totals.total("bytes_live"),
        "queue_topics": totals.total("queue_topics"),
        "queue_leases_in_flight": totals.total("leases_in_flight"),
        "consumers": totals.total("consumers"),
        "copies": totals.total("copies"),
        "flows_owing": totals.total("flows_owing"),
        "catch_ups": totals.total("catch_ups"),
        "catch_ups_timed_out": totals.total("catch_ups_late"),
        "pressure": round(totals.pressure, 3),
        "pressure_refused": totals.total("pressure_refused"),
        "topics_waiting": totals.total("topics_waiting"),
        "topics_paused": totals.total("topics_paused"),
        "sse_connections": totals.streams,
        "watch_sessions": totals.total("watch_sessions"),
        "ready": totals.ready,
        "replay_progress": round(totals.progress, 4),
        "processes_failing": totals.failing,
        "uptime_ms": totals.uptime_ms,
        "wal": {
            "fsyncs": totals.total("fsyncs"),
            "frames": totals.total("frames"),
            "batches": totals.total("batches"),
            "bytes_written": totals.total("bytes_written"),
            "rotations": totals.total("rotations"),
            "queue_depth": totals.total("queue_depth"),
            "queue_depth_peak": totals.total("queue_depth_peak"),
            "submit_full_total": totals.refused_full,
            "read_only": any(report.read_only for report in totals.reports),
            "fsync_count": sum(totals.buckets),
            "fsync_micros_total": totals.total("fsync_micros_total"),
        },
    }


def as_text(totals: Totals) -> bytes:
    lines: list[str] = []
    for name, kind, text, value in _unlabelled(totals):
        lines += _metric(name, kind, text, [("", value)])
    by_class = [(f'class="{name}"', totals.of_class(name)) for name in CLASSES]
    lines += _metric("topics_topics_by_class", "gauge", "Topics by durability class", by_class)
    by_band = [(f'band="B{band}"', cost) for band, cost in enumerate(totals.by_band)]
    lines += _metric(
        "topics_delivered_cost_total", "counter", "Cost of deliveries by scheduler band", by_band
    )
    by_shard = [(f'shard="{report.shard}"', round(report.pressure, 3)) for report in totals.reports]
    lines += _metric("topics_shard_pressure", "gauge", "Pressure of a shard, 0 to 1", by_shard)
    to_replay = [(f'shard="{report.shard}"', report.log_bytes) for report in totals.reports]
    lines += _metric("topics_log_bytes_to_replay", "gauge", "Log bytes since the last checkpoint", to_replay)
    lines += _client_lines(totals)
    free = [("", totals.disk_free)] if totals.disk_free is not None else []
    lines += _metric("topics_disk_free_bytes", "gauge", "Free space on the disk of the data directory", free)
    lines += _tier_lines(totals)
    lines += _topic_lines(totals)
    lines += _consumer_lines(totals)
    lines += _labelled_counters(totals)
    lines += _fsync_lines(totals)
    lines += _timed_lines(totals)
    return ("\n".join(lines) + "\n").encode()


def _unlabelled(totals: Totals) -> Iterable[tuple[str, str, str, object]]:
    wal = totals.total
    truncated = int(totals.total("topic_count") > TOPIC_ROWS_MAX)
    read_only = sum(report.read_only for report in totals.reports)
    yield "topics_topics", "gauge", "Topics", totals.total("topic_count")
    yield "topics_routers", "gauge", "Forwarding rules", totals.total("forwards")
    yield "topics_records_live", "gauge", "Live records", wal("records_live")
    yield "topics_bytes_live", "gauge", "Bytes of live records", wal("bytes_live")
    yield (
        "topics_topic_metrics_truncated",
        "gauge",
        "1 if only some topics have their own series",
        truncated,
    )
    yield "topics_queue_topics", "gauge", "Topics of type queue", wal("queue_topics")
    yield "topics_queue_leases_in_flight", "gauge", "Leased jobs", wal("leases_in_flight")
    yield "topics_consumers", "gauge", "Named consumers", wal("consumers")
    yield (
        "topics_consumer_metrics_truncated",
        "gauge",
        "1 if only some consumers have their own series",
        int(any(len(report.consumer_rows) >= CONSUMER_ROWS_MAX for report in totals.reports)),
    )
    yield "topics_dead_lettered", "gauge", "Records moved to dead letters", wal("dead_lettered")
    yield "topics_sse_connections", "gauge", "Open streams and WebSockets", totals.streams
    yield "topics_watch_sessions", "gauge", "Stored watch sessions", totals.total("watch_sessions")
    yield "topics_ready", "gauge", "1 if every shard is ready", int(totals.ready)
    yield "topics_recovery_progress", "gauge", "Progress of recovery, 0 to 1", round(totals.progress, 4)
    yield "topics_shards", "gauge", "Shards", totals.shards
    yield "topics_shards_up", "gauge", "Shards that respond", len(totals.reports)
    yield "topics_processes_failing", "gauge", "Shards and fronts that keep failing", totals.failing
    yield "topics_wal_queue_depth", "gauge", "Requests waiting for a turn or a sync", wal("queue_depth")
    yield (
        "topics_wal_queue_depth_peak",
        "gauge",
        "Peak of waiting requests, summed over shards",
        wal("queue_depth_peak"),
    )
    yield "topics_wal_read_only", "gauge", "Shards that are read-only until a restart", read_only
    yield "topics_disk_full", "gauge", "Shards that refuse appends because the disk is full", wal("disk_full")
    yield (
        "topics_flows_owing",
        "gauge",
        "Pairs of rule and source topic with pending copies",
        wal("flows_owing"),
    )
    yield "topics_copies_total", "counter", "Copies stored in destinations", wal("copies")
    yield "topics_copy_batches_total", "counter", "Batches of copies sent", wal("copy_batches")
    yield "topics_catch_ups_total", "counter", "Catch-ups of destinations before reads", wal("catch_ups")
    yield (
        "topics_catch_ups_timed_out_total",
        "counter",
        "Reads answered before the catch-up was complete",
        wal("catch_ups_late"),
    )
    yield (
        "topics_pressure",
        "gauge",
        "Maximum pressure of the shards and this front, 0 to 1",
        round(totals.pressure, 3),
    )
    yield "topics_front_pressure", "gauge", "Pressure of this front, 0 to 1", round(totals.front_pressure, 3)
    yield "topics_pressure_refused_total", "counter", "Writes refused under pressure", wal("pressure_refused")
    yield "topics_topics_waiting", "gauge", "Topics waiting for delivery", wal("topics_waiting")
    yield "topics_topics_paused", "gauge", "Topics whose delivery is paused by pressure", wal("topics_paused")
    yield "topics_relocations_total", "counter", "Segments moved to the cold tier", wal("relocations")
    yield "topics_cold_fetches_total", "counter", "Reads from the cold tier", wal("cold_fetches")
    yield "topics_cold_failures_total", "counter", "Failed calls to the cold tier", wal("cold_failures")
    yield "topics_cold_readers", "gauge", "Reads waiting for the cold tier", wal("cold_readers")
    yield "topics_merges_total", "counter", "Merged segments published", wal("merges")
    yield (
        "topics_retired_segments",
        "gauge",
        "Replaced segments that still have files",
        wal("retired_segments"),
    )
    yield "topics_retired_bytes", "gauge", "Bytes of replaced segments", wal("retired_bytes")
    yield "topics_transactions_open", "gauge", "Open transactions", wal("txn_open")
    yield "topics_transaction_bytes_staged", "gauge", "Bytes staged in open transactions", wal("txn_bytes")
    yield "topics_transactions_committed_total", "counter", "Transactions committed", wal("txn_committed")
    yield "topics_transactions_expired_total", "counter", "Transactions expired", wal("txn_expired")
    yield (
        "topics_transaction_files_left_total",
        "counter",
        "Transaction files that could not be removed until the next start",
        wal("txn_left"),
    )
    yield "topics_corrupt_records_total", "counter", "Corrupt records found", wal("corrupt")
    yield "topics_checkpoints_total", "counter", "Checkpoints written", wal("checkpoints")
    yield "topics_uptime_ms", "counter", "Milliseconds since the start of the server", totals.uptime_ms
    yield "topics_wal_frames_total", "counter", "Frames written to the log", wal("frames")
    yield "topics_wal_batches_total", "counter", "Writes to the log", wal("batches")
    yield "topics_wal_fsyncs_total", "counter", "Syncs of the log", wal("fsyncs")
    yield "topics_wal_bytes_written_total", "counter", "Bytes written to the log", wal("bytes_written")
    yield "topics_wal_rotations_total", "counter", "Rotations of the log", wal("rotations")
    yield (
        "topics_wal_submit_full_total",
        "counter",
        "Requests refused because too many were waiting",
        totals.refused_full,
    )


def _metric(name: str, kind: str, text: str, rows: Iterable[tuple[str, object]]) -> list[str]:
    """HELP and TYPE lines, then one line per label set."""
    return [*_head(name, kind, text), *(f"{name}{_braced(label)} {value}" for label, value in rows)]


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _braced(label: str) -> str:
    return f"{{{label}}}" if label else ""


def _client_lines(totals: Totals) -> list[str]:
    """Connections that fronts have handed over to workers."""

    def rows(field: str) -> list[tuple[str, object]]:
        return [(f'shard="{report.shard}"', getattr(report, field)) for report in totals.reports]

    return [
        *_metric(
            "topics_shard_connections", "gauge", "Connections that a shard serves itself", rows("clients")
        ),
        *_metric("topics_handovers_total", "counter", "Connections taken from fronts", rows("clients_taken")),
        *_metric(
            "topics_handovers_returned_total",
            "counter",
            "Connections returned to fronts because of a request that the shard does not serve",
            rows("clients_returned"),
        ),
        *_metric(
            "topics_handovers_refused_total",
            "counter",
            "Connections not taken because the shard had too many",
            rows("clients_refused"),
        ),
    ]


def _tier_lines(totals: Totals) -> list[str]:
    lines: list[str] = []
    columns = (
        ("live", "Live bytes in segments, as of the last checkpoint"),
        ("dead", "Dead bytes in segments"),
        ("reclaimable", "Dead bytes that compaction or, in the cold tier, a merge can free"),
    )
    for i, (name, text) in enumerate(columns):
        by_tier = [
            (f'tier="{tier}"', sum(report.tiers.get(tier, (0, 0, 0))[i] for report in totals.reports))
            for tier in TIERS
        ]
        lines += _metric(f"topics_segment_bytes_{name}", "gauge", text, by_tier)
    return lines


def _topic_lines(totals: Totals) -> list[str]:
    rows = [(f'topic="{_label(row.topic)}"', row) for row in totals.topic_rows]
    lines: list[str] = []
    columns = (
        ("head_seq", "head_seq", "Highest seq"),
        ("earliest_seq", "earliest_seq", "First seq that still exists"),
        ("records_live", "count", "Live records"),
        ("bytes_live", "bytes", "Bytes of live records"),
    )
    for name, field, text in columns:
        values = [(label, getattr(row, field)) for label, row in rows]
        lines += _metric(f"topics_topic_{name}", "gauge", text, values)
    queues = [(label, row) for label, row in rows if row.is_queue]
    if queues:
        ready = [(label, row.ready) for label, row in queues]
        lines += _metric("topics_topic_queue_ready", "gauge", "Jobs ready to be claimed", ready)
        in_flight = [(label, row.in_flight) for label, row in queues]
        lines += _metric("topics_topic_queue_in_flight", "gauge", "Leased jobs", in_flight)
        oldest = [(label, row.oldest_ms / 1000) for label, row in queues]
        lines += _metric("topics_topic_queue_oldest_seconds", "gauge", "Age of the oldest job", oldest)
    return lines


def _consumer_lines(totals: Totals) -> list[str]:
    rows = [
        (f'topic="{_label(row.topic)}",consumer="{_label(row.consumer)}"', row)
        for row in totals.consumer_rows
    ]
    lag = [(label, row.lag) for label, row in rows]
    lag_s = [(label, row.lag_ms / 1000) for label, row in rows if row.lag_ms >= 0]
    pending = [(label, row.ack_pending) for label, row in rows]
    return [
        *_metric("topics_consumer_lag_records", "gauge", "Records not yet delivered", lag),
        *_metric("topics_consumer_lag_seconds", "gauge", "Age of the oldest undelivered record", lag_s),
        *_metric("topics_consumer_ack_pending", "gauge", "Records delivered and not settled", pending),
    ]


def _labelled_counters(totals: Totals) -> list[str]:
    """Counters with a label from a small, fixed set."""
    lines: list[str] = []
    for name, label, text, field in (
        ("topics_tombstones_total", "reason", "Tombstones sent to readers", "tombstones"),
        ("topics_refusals_total", "code", "Requests refused by shards", "refusals"),
    ):
        rows = [(f'{label}="{key}"', count) for key, count in totals.counts(field).items()]
        lines += _metric(name, "counter", text, rows)
    return lines


def _fsync_lines(totals: Totals) -> list[str]:
    name = "topics_wal_fsync_latency_us"
    lines = _head(name, "histogram", "Duration of a sync of the log, in microseconds")
    bounds = [str(bound) for bound in FSYNC_BUCKETS_US]
    return lines + _histogram(name, "", bounds, totals.buckets, str(totals.total("fsync_micros_total")))


def _timed_lines(totals: Totals) -> list[str]:
    reports = totals.reports
    name = "topics_request_duration_seconds"
    lines = _head(name, "histogram", "Time from the arrival of a request to the reply of its shard")
    for operation, timed in totals.operations.items():
        lines += _seconds(name, f'operation="{operation}"', timed)
    for name, text, timed in (
        (
            "topics_delivery_delay_seconds",
            "Age of the first record in pages pushed to live streams",
            [report.deliveries for report in reports if report.deliveries is not None],
        ),
        (
            "topics_turn_duration_seconds",
            "Duration of a turn of a shard's loop",
            [report.turns for report in reports if report.turns is not None],
        ),
    ):
        lines += _head(name, "histogram", text)
        lines += _seconds(name, "", timed)
    return lines


_SECONDS = [f"{bound / 1e6:g}" for bound in LATENCY_BUCKETS_US]


def _seconds(name: str, label: str, timed: list[Timed]) -> list[str]:
    counts = [sum(column) for column in zip(*(one.buckets for one in timed))] or [0] * (len(_SECONDS) + 1)
    return _histogram(name, label, _SECONDS, counts, f"{sum(one.micros for one in timed) / 1e6:.6f}")


def _histogram(name: str, label: str, bounds: list[str], counts: list[int], total: str) -> list[str]:
    lines: list[str] = []
    running, comma, braces = 0, f"{label}," if label else "", _braced(label)
    for bound, count in zip((*bounds, "+Inf"), counts):
        running += count
        lines.append(f'{name}_bucket{{{comma}le="{bound}"}} {running}')
    return [*lines, f"{name}_sum{braces} {total}", f"{name}_count{braces} {running}"]


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
