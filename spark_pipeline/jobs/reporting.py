"""Collecting the data of a report: tasks count records, the server provides the rest. Nothing is changed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from spark_pipeline.jobs.engines import Engine
from spark_pipeline.jobs.exporting import end_of
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.jobs.snapshots import Pinned, pinned_or_http
from spark_pipeline.lake.formats import freshness_of
from spark_pipeline.lake.table import ExportFailed
from spark_pipeline.report.model import Export, Report, TopicReport
from spark_pipeline.tasks.http_reading import HttpSlice
from spark_pipeline.tasks.manifest import NoManifest
from spark_pipeline.tasks.names import ALL_TOPICS
from spark_pipeline.tasks.reading import Range, slices_of
from spark_pipeline.tasks.server import Refused, Server, wanted_topics
from spark_pipeline.tasks.statistics import CountTask, TopicStatistics, count, split_http, tasks_of

POLL_S = 0.2
CONSUMERS_MAX = 1000  # maximum per topic
# The server's metrics that are included in a report.
SERVER_METRICS = (
    "topics_records_live",
    "topics_bytes_live",
    "topics_queue_leases_in_flight",
    "topics_consumers",
    "topics_retired_segments",
    "topics_retired_bytes",
    "topics_merges_total",
    "topics_cold_failures_total",
    "topics_relocations_total",
)


def collect(
    server: Server,
    wanted: str,
    engine: Engine,
    progress: Progress,
    *,
    cold_dir: str = "",
    lakes: Sequence[str] = (),
) -> Report:
    with pinned_or_http(server, wanted_topics(server, wanted), cold_dir) as topics:
        if not topics and wanted != ALL_TOPICS:
            raise NoManifest(f"{server.url} has no topic {wanted!r}, or the key has no access to it")
        tasks = [task for one in topics for task in _tasks(server, one, engine.workers)]
        progress.step(
            "count",
            f"{len(topics)} topics in {len(tasks)} tasks",
            topics=len(topics),
            tasks=len(tasks),
        )
        by_topic: dict[str, TopicStatistics] = {one.topic: TopicStatistics(one.topic) for one in topics}
        for part in _results(engine, tasks, progress):
            by_topic[part.topic].append(part)
        reports = [
            report
            for one in topics
            if (report := _topic_report(server, one, by_topic[one.topic], lakes)) is not None
        ]
    return Report(
        run_id=uuid.uuid4().hex,
        made_at_ms=time.time_ns() // 1_000_000,
        url=server.url,
        wanted=wanted,
        topics=reports,
        server=_server_metrics(server),
    )


def _tasks(server: Server, one: Pinned, workers: int) -> list[CountTask]:
    slices = slices_of(one.cold, Range()) if one.cold is not None else []
    rest = HttpSlice(server.url, server.token_env, one.topic, one.first_seq, one.stop_seq)
    return tasks_of(one.topic, slices, split_http(rest, workers), workers)


def _results(engine: Engine, tasks: Sequence[CountTask], progress: Progress) -> list[TopicStatistics]:
    running = engine.start(count, tasks)
    try:
        while not running.wait(POLL_S):
            progress.bar("counting", running.done(), len(tasks))
    except BaseException:
        running.cancel()
        raise
    return running.results()


def _topic_report(
    server: Server, one: Pinned, statistics: TopicStatistics, lakes: Sequence[str]
) -> TopicReport | None:
    """None: it has been deleted."""
    try:
        state = server.get(server.topic(one.topic, "?touch=false"))
        consumers = _consumers(server, one.topic)
    except Refused as error:
        if error.code == "topic_not_found":
            return None
        raise
    manifest = one.cold.manifest if one.cold is not None else None
    losses = {(gap.first_seq, gap.last_seq, gap.reason) for gap in statistics.lost}
    if manifest is not None:
        losses |= {(first, last, reason) for first, last, reason in manifest.losses}
    return TopicReport(
        topic=one.topic,
        statistics=statistics,
        earliest_seq=manifest.earliest_seq if manifest is not None else one.first_seq,
        head_seq=one.stop_seq - 1,
        cold_next_seq=manifest.cold_next_seq if manifest is not None else 0,
        segments=manifest.segments if manifest is not None else [],
        retired=len(manifest.retired) if manifest is not None else 0,
        losses=sorted(losses),
        queue=state.get("queue"),
        dead_letter=state["config"].get("dead_letter"),
        consumers=consumers,
        exports=[export for lake in lakes for export in _exports(lake, one, statistics)],
    )


def _exports(lake: str, one: Pinned, statistics: TopicStatistics) -> list[Export]:
    try:
        found = freshness_of(lake, one.topic)
    except ExportFailed as error:
        statistics.failed.append((f"the export to {lake}", str(error)))
        return []
    cold_end = end_of(one.cold) if one.cold is not None else 1
    return [
        Export(
            lake,
            fresh,
            behind_cold=max(cold_end - fresh.next_seq, 0),
            behind=max(one.stop_seq - fresh.next_seq, 0),
        )
        for fresh in found
    ]


def _consumers(server: Server, topic: str) -> list[dict[str, Any]]:
    page = server.get(server.topic(topic, f"/consumers?page_size={CONSUMERS_MAX}"))
    return list(page["consumers"])


def _server_metrics(server: Server) -> dict[str, float]:
    """Metrics without labels, from the Prometheus text."""
    try:
        text = server.request("GET", "/v0/metrics").body.decode()
    except Refused:  # the key may lack access to metrics
        return {}
    metrics = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in SERVER_METRICS:
            metrics[name] = float(value)
    return metrics
