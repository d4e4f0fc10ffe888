"""Changes since the previous report, which is read before it is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spark_pipeline.schedule.state import BYTES_MAX
from topics.system.read_only_disk import read_small

if TYPE_CHECKING:
    from spark_pipeline.report.model import Report, TopicReport

POINTS_MAX = 90  # reports whose totals are kept: three months of nightly ones
# Metric and dimension of each in report.json.
COMPARED: Mapping[str, tuple[str, str]] = {
    "records": ("records", "live"),
    "payload_bytes": ("bytes", "payload"),
    "dead_bytes": ("bytes", "dead"),
    "segments": ("segments", "cold"),
    "gaps": ("gaps", ""),
}


@dataclass(frozen=True, slots=True)
class Previous:
    """The previous report on the same topics."""

    made_at_ms: int
    topics: Mapping[str, Mapping[str, float]]  # values of COMPARED by topic
    points: list[dict[str, float]] = field(default_factory=list)  # totals of earlier ones, oldest first

    def total(self, name: str) -> float:
        return sum(values.get(name, 0) for values in self.topics.values())


def read_previous(path: Path, wanted: str) -> Previous | None:
    """None: it does not exist, covers other topics, or has another format."""
    try:
        found: Any = msgspec.json.decode(read_small(path, BYTES_MAX))
        if found["wanted"] != wanted:
            return None
        topics = {
            topic: {name: float(metrics[metric][dimension]) for name, (metric, dimension) in COMPARED.items()}
            for topic, metrics in found["topics"].items()
        }
        return Previous(int(found["made_at_ms"]), topics, list(found["trend"]))
    except (OSError, msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def current(topic: TopicReport) -> dict[str, float]:
    return {
        "records": topic.total.live,
        "payload_bytes": topic.total.payload_bytes,
        "dead_bytes": topic.total.dead_bytes,
        "segments": len(topic.segments),
        "gaps": topic.gaps,
    }


def changes(topic: TopicReport, previous: Previous | None) -> dict[str, float]:
    """Changes since the previous report; empty for a topic that was not in it."""
    before = previous.topics.get(topic.topic) if previous is not None else None
    if before is None:
        return {}
    return {name: value - before[name] for name, value in current(topic).items()}


def points(report: Report) -> list[dict[str, float]]:
    """Totals of the reports up to this one, oldest first."""
    now: dict[str, float] = {"made_at_ms": report.made_at_ms} | dict.fromkeys(COMPARED, 0.0)
    for topic in report.topics:
        for name, value in current(topic).items():
            now[name] += value
    earlier = report.previous.points if report.previous is not None else []
    return [*earlier, now][-POINTS_MAX:]
