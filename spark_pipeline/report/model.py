"""Data model of a report, and its metrics as table rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from spark_pipeline.lake.table import Freshness
from spark_pipeline.report.scrub_results import TopicScrub
from spark_pipeline.report.trend import Previous, changes, points
from spark_pipeline.tasks.names import ALL_TOPICS
from spark_pipeline.tasks.statistics import HOUR_MS, Statistics, TopicStatistics, size_of_class
from topics.engine.storage.manifest import Segment

PERCENTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Export:
    """State of a topic's export."""

    lake: str
    fresh: Freshness
    behind_cold: int  # seqs that could be exported now
    behind: int  # including those that are not cold yet

    @property
    def name(self) -> str:
        return self.lake if self.fresh.format == "parquet" else f"{self.lake} ({self.fresh.format})"


@dataclass(slots=True)
class TopicReport:
    topic: str
    statistics: TopicStatistics
    earliest_seq: int
    head_seq: int
    cold_next_seq: int  # 0: everything was read over HTTP
    segments: list[Segment] = field(default_factory=list)
    retired: int = 0
    losses: list[tuple[int, int, str]] = field(default_factory=list)  # both ends included
    queue: dict[str, int] | None = None
    dead_letter: str | None = None
    consumers: list[dict[str, Any]] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    total: Statistics = field(init=False)

    def __post_init__(self) -> None:
        self.total = Statistics()
        self.total.append(self.statistics.cold)
        self.total.append(self.statistics.hot)

    @property
    def gone(self) -> int:
        """Seqs since the earliest whose records are deleted and take no space."""
        return max(self.total.rows - self.total.live - self.total.dead, 0)

    @property
    def gaps(self) -> int:
        """Number of runs of seqs without records, from the earliest to the newest."""
        if not self.total.first_seq:
            return int(self.earliest_seq <= self.head_seq)
        before, after = self.total.first_seq > self.earliest_seq, self.total.last_seq < self.head_seq
        return self.total.gaps + before + after

    @property
    def lag(self) -> int:
        return max((int(one["lag_records"]) for one in self.consumers), default=0)


@dataclass(slots=True)
class Report:
    run_id: str
    made_at_ms: int
    url: str
    topics: list[TopicReport]
    wanted: str = ALL_TOPICS
    history: list[dict[str, Any]] = field(default_factory=list)  # runs of scheduled jobs, oldest first
    server: dict[str, float] = field(default_factory=dict)  # metrics of the whole server
    scrubs: dict[str, TopicScrub] = field(default_factory=dict)  # by topic
    previous: Previous | None = None
    top: int = 20

    def total(self) -> Statistics:
        found = Statistics()
        for topic in self.topics:
            found.add(topic.total)
        return found

    def failed(self) -> list[tuple[str, str, str]]:
        """(topic, segment, reason) of everything that could not be counted."""
        return [
            (one.topic, segment, reason) for one in self.topics for segment, reason in one.statistics.failed
        ]


def hour_name(hour: int) -> str:
    return datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC).strftime("%Y-%m-%dT%H:00Z")


Row = tuple[str, str, str, float]  # topic, metric, dimension, value


def rows_of(report: Report) -> Iterator[Row]:
    """One value per row. The topic is empty for values about the whole server."""
    for topic in report.topics:
        for metric, dimension, value in _topic_rows(topic, report.top):
            yield topic.topic, metric, dimension, float(value)
        for metric, dimension, value in _job_rows(report, topic):
            yield topic.topic, metric, dimension, float(value)
    for name, value in sorted(report.server.items()):
        yield "", "server", name, value
    for run in report.history:
        yield "", "job_duration_s", f"{run['job']}/{run['result']}", run["ended_s"] - run["began_s"]


def _topic_rows(topic: TopicReport, top: int) -> Iterator[tuple[str, str, float]]:
    total = topic.total
    yield "records", "live", total.live
    yield "records", "dead", total.dead
    yield "records", "gone", topic.gone
    yield "records", "untagged", total.untagged
    yield "records", "out_of_order", total.out_of_order
    for tier, found in (("cold", topic.statistics.cold), ("hot", topic.statistics.hot)):
        yield "records_by_tier", tier, found.live
        yield "bytes_by_tier", tier, found.live_bytes
    yield "bytes", "payload", total.payload_bytes
    yield "bytes", "live", total.live_bytes
    yield "bytes", "dead", total.dead_bytes
    yield "seq", "earliest", topic.earliest_seq
    yield "seq", "head", topic.head_seq
    yield "seq", "cold_next", topic.cold_next_seq
    yield "segments", "cold", len(topic.segments)
    yield "segments", "retired", topic.retired
    yield "segments", "failed", len(topic.statistics.failed)
    yield "gaps", "", topic.gaps
    for reason in sorted({reason for _, _, reason in topic.losses}):
        yield (
            "lost_records",
            reason,
            sum(last - first + 1 for first, last, loss in topic.losses if loss == reason),
        )
    for hour, (records, size) in sorted(total.hours.items()):
        yield "records_by_hour", hour_name(hour), records
        yield "bytes_by_hour", hour_name(hour), size
    for kind, records in sorted(total.sizes.items()):
        yield "records_by_size", str(size_of_class(kind)), records
    for share in PERCENTILES:
        yield "size_percentile", f"{share * 100:g}", total.size_percentile(share)
    yield "tags", "", total.tag_count()
    for tag, records in total.tags.most_common(top):
        yield "records_by_tag", tag, records
    for name, value in (topic.queue or {}).items():
        yield "queue", name, value
    for one in topic.consumers:
        for name in ("lag_records", "lag_ms", "ack_pending", "redelivered", "dead_lettered"):
            yield f"consumer_{name}", one["consumer"], one[name]


def _job_rows(report: Report, topic: TopicReport) -> Iterator[tuple[str, str, float]]:
    """Exports, scrubs, and changes since the previous report."""
    for one in topic.exports:
        yield "export_next_seq", one.name, one.fresh.next_seq
        yield "export_rows", one.name, one.fresh.rows
        yield "export_bytes", one.name, one.fresh.bytes
        yield "export_behind_cold_seqs", one.name, one.behind_cold
        yield "export_behind_seqs", one.name, one.behind
        if one.fresh.at_ms:
            yield "export_age_ms", one.name, max(report.made_at_ms - one.fresh.at_ms, 0)
    scrub = report.scrubs.get(topic.topic)
    if scrub is not None:
        yield "scrub_records", "", scrub.records
        yield "scrub_damaged_ranges", "", scrub.damaged
        yield "scrub_age_ms", "", max(report.made_at_ms - scrub.at_ms, 0)
    for name, value in changes(topic, report.previous).items():
        yield "change", name, value


def as_json(report: Report) -> dict[str, Any]:
    """The contents of report.json: values by topic and metric, and problems."""
    topics: dict[str, dict[str, dict[str, float]]] = {topic.topic: {} for topic in report.topics}
    for topic, metric, dimension, value in rows_of(report):
        if topic:
            topics[topic].setdefault(metric, {})[dimension] = value
    return {
        "run_id": report.run_id,
        "made_at_ms": report.made_at_ms,
        "url": report.url,
        "wanted": report.wanted,
        "previous_made_at_ms": report.previous.made_at_ms if report.previous else None,
        "topics": topics,
        "server": report.server,
        "failed": [
            {"topic": topic, "segment": segment, "reason": reason}
            for topic, segment, reason in report.failed()
        ],
        "losses": [
            {"topic": one.topic, "first_seq": first, "last_seq": last, "reason": reason}
            for one in report.topics
            for first, last, reason in one.losses
        ],
        "damage": [
            {"topic": topic, **msgspec.structs.asdict(one)}
            for topic, scrub in report.scrubs.items()
            for one in scrub.ranges
        ],
        "history": report.history,
        "trend": points(report),
    }
