"""Parts that were measured again, or for the first time, put into the results of an earlier run: `--add`.

What a ratio compares is always of one run, since a part is replaced as a whole. The page says which parts are younger.
"""

from __future__ import annotations

from typing import Any

from peers import compare, fanout_aims, forward_aims, queue_aims
from peers.held import Held

# What a part of the run fills beside the section of its own name.
FILLS = {"fanout": ("fanout", "idle"), "queue": ("queue", "waiting"), "forward": ("forward", "lag")}


def added(earlier: dict[str, Any], results: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """A new whole; neither of the two is changed."""
    whole = dict(earlier)
    works = [part for part in parts if part in compare.WORKS]
    if works:
        kept = [point for point in earlier["points"] if point["work"] not in works]
        whole["points"] = kept + results["points"]
    for part in parts:
        if part not in works:
            whole |= {name: results[name] for name in FILLS.get(part, (part,))}
    own = results["meta"]
    about = {name: own[name] for name in ("date", "seconds_per_point", "rounds", "command")}
    known = earlier["meta"].get("added", {})
    whole["meta"] = {**earlier["meta"], "added": {**known, **dict.fromkeys(parts, about)}}
    whole["failed"] = [*earlier.get("failed", []), *results["failed"]]
    whole["aims"] = aims(whole)
    return whole


def aims(results: dict[str, Any]) -> list[dict[str, Any]]:
    judged = compare.judge(results.get("points", []))
    return [*(one.as_json() for one in judged), *(one.as_json() for one in held(results))]


def held(results: dict[str, Any]) -> list[Held]:
    """The aims of the parts that have their own."""
    return [
        *fanout_aims.judge(results.get("fanout", []), results.get("idle", [])),
        *queue_aims.judge(results.get("queue", []), results.get("waiting", [])),
        *forward_aims.judge(results.get("forward", []), results.get("lag", [])),
    ]
