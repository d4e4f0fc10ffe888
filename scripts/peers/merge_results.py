"""Merging of newly measured parts into the results of an earlier run: `--add`.

Both sides of a ratio are always from one run, since a part is replaced as a whole. The page says which parts are newer.
"""

from __future__ import annotations

from typing import Any

from peers import compare, fanout_aims, forward_aims, latency_aims, queue_aims
from peers.aims import AimResult

# Sections of the results that a part of the run fills, if not just the one of its name.
SECTIONS = {"fanout": ("fanout", "idle"), "queue": ("queue", "waiting"), "forward": ("forward", "lag")}


def merge(earlier: dict[str, Any], results: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """The merged results; the arguments are not changed."""
    merged = dict(earlier)
    works = [part for part in parts if part in (*compare.WORKS, *compare.PACED)]
    if works:
        kept = [point for point in earlier["points"] if point["work"] not in works]
        merged["points"] = kept + results["points"]
    for part in parts:
        if part not in works:
            merged |= {name: results[name] for name in SECTIONS.get(part, (part,))}
    own = results["meta"]
    about = {name: own[name] for name in ("date", "seconds_per_point", "rounds", "command")}
    known = earlier["meta"].get("added", {})
    merged["meta"] = {**earlier["meta"], "added": {**known, **dict.fromkeys(parts, about)}}
    merged["failed"] = [*earlier.get("failed", []), *results["failed"]]
    merged["aims"] = aims(merged)
    return merged


def aims(results: dict[str, Any]) -> list[dict[str, Any]]:
    judged = compare.judge(results.get("points", []))
    return [*(one.as_json() for one in judged), *(one.as_json() for one in section_aims(results))]


def section_aims(results: dict[str, Any]) -> list[AimResult]:
    """Results of the aims that are not ratios of single writes, batches or reads."""
    return [
        *latency_aims.judge(results.get("points", []), results.get("tail", [])),
        *fanout_aims.judge(results.get("fanout", []), results.get("idle", [])),
        *queue_aims.judge(results.get("queue", []), results.get("waiting", [])),
        *forward_aims.judge(results.get("forward", []), results.get("lag", [])),
    ]
