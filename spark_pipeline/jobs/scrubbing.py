"""Scrubbing of cold segments: checks every record against its checksum. Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from spark_pipeline.jobs.engines import Engine
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.report.scrub_results import RANGES_MAX, Range, TopicScrub
from spark_pipeline.tasks.manifest import ColdTopic
from spark_pipeline.tasks.scrub import ScrubResult, ScrubTask, scrub_segment
from spark_pipeline.tasks.segments import Damage

POLL_S = 0.2


@dataclass(slots=True)
class Scrubbed:
    topics: int = 0
    segments: int = 0
    records: int = 0
    bytes: int = 0
    damage: list[tuple[str, str, Damage]] = field(default_factory=list)  # topic, segment, what
    by_topic: dict[str, TopicScrub] = field(default_factory=dict)


def scrub(topics: Sequence[ColdTopic], engine: Engine, progress: Progress) -> Scrubbed:
    tasks = [
        ScrubTask(topic.name, topic.manifest.topic_id, topic.folder, segment)
        for topic in topics
        for segment in topic.manifest.segments
    ]
    running = engine.start(scrub_segment, tasks)
    try:
        while not running.wait(POLL_S):
            progress.bar("scrubbing", running.done(), len(tasks))
    except BaseException:
        running.cancel()
        raise
    now_ms = time.time_ns() // 1_000_000
    found = Scrubbed(topics=len(topics), by_topic={topic.name: TopicScrub(now_ms) for topic in topics})
    for result in running.results():
        _add(found, result, progress)
    return found


def _add(found: Scrubbed, result: ScrubResult, progress: Progress) -> None:
    found.segments += 1
    found.records += result.records
    found.bytes += result.bytes
    topic = found.by_topic[result.topic]
    topic.segments += 1
    topic.records += result.records
    topic.bytes += result.bytes
    topic.damaged += len(result.damage)
    for one in result.damage:
        if len(topic.ranges) < RANGES_MAX:
            topic.ranges.append(
                Range(result.segment, one.first_seq, one.last_seq, one.path, one.offset, one.what)
            )
        found.damage.append((result.topic, result.segment, one))
        seqs = f"records {one.first_seq} to {one.last_seq}: " if one.last_seq else ""
        progress.step(
            "damage",
            f"{result.topic}: {seqs}{one.path} at byte {one.offset}: {one.what}",
            topic=result.topic,
            segment=result.segment,
            path=one.path,
            offset=one.offset,
            first_seq=one.first_seq,
            last_seq=one.last_seq,
            what=one.what,
        )
