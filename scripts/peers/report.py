"""Generates docs/benchmarks.md and docs/benchmarks/*.svg from results.json.

The output depends only on the results, so it can be regenerated:

    python scripts/peers/report.py docs/benchmarks/results.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from peers import (
    compare,
    fanout_aims,
    fanout_page,
    forward_aims,
    forward_page,
    merge_results,
    queue_aims,
    queue_page,
    topics_page,
    wording,
    works_page,
)
from peers.aims import aim_rows
from peers.compare import NAMES, PEERS, SYSTEMS, WORKS, Aim, Comparison, Judged, Point
from peers.markdown import Plots, figure, rate, table, times, why_missing

FULL_SECONDS = 10  # a point of a full run takes at least this long
USUAL_PAYLOAD_BYTES = 100
SHOWN_BEHIND = 12  # the rest of the list is folded


def write(results: dict[str, Any], docs: Path) -> None:
    page, plots = render(results)
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in plots:  # from an earlier run with more parts
            old.unlink()
    for name, svg in plots.items():
        (folder / name).write_text(svg, encoding="utf-8")
    (docs / "benchmarks.md").write_text(page, encoding="utf-8")


def render(results: dict[str, Any]) -> tuple[str, Plots]:
    plots: Plots = {}
    blocks = [
        "# Benchmarks",
        *_key_figures(_comparisons(results)),
        *_opening(results["meta"]),
        *([] if "generator" in results["meta"] else [wording.EARLIER_GENERATOR]),
        *_failed(results.get("failed", [])),
        *_summary(results),
        *_behind(results),
        *works_page.paced(results),
        *(block for work in WORKS for block in works_page.work(results, work, plots)),
        *works_page.tail(results, plots),
        *fanout_page.section(results, plots),
        *queue_page.section(results, plots),
        *forward_page.section(results, plots),
        *works_page.processor(results),
        *topics_page.scaling(results, plots),
        *topics_page.backlog(results, plots),
        *topics_page.stages(results, plots),
        *topics_page.generator(results),
        *_reading(results["meta"]),
        *_machine(results["meta"]),
    ]
    return "\n\n".join(blocks) + "\n", plots


def _comparisons(results: dict[str, Any]) -> list[Comparison]:
    """All comparisons with peers; a ratio below 1 means that topics is slower."""
    return [
        *compare.comparisons(results.get("points", []), results.get("tail", [])),
        *fanout_aims.comparisons(results.get("fanout", [])),
        *queue_aims.comparisons(results.get("queue", [])),
        *forward_aims.comparisons(results.get("forward", [])),
    ]


def _key_figures(everything: list[Comparison]) -> list[str]:
    """The lowest and highest ratio to each peer, by kind of work."""
    rows = []
    for begins, work in wording.KEY_FIGURES.items():
        of_work = [one for one in everything if one.what.startswith(begins)]
        peers = [
            [one.ratio for one in of_work if NAMES[one.against].startswith(name)]
            for name in ("Redis", "NATS")
        ]
        if of_work:
            rows.append(
                [
                    work,
                    *(
                        f"{times(min(found))[:-2]} to {times(max(found))}" if found else "–"
                        for found in peers
                    ),
                ]
            )
    head = ("topics / the other", "Redis Streams", "NATS JetStream (watchers: NATS core)")
    return [wording.KEY_RATIOS, table(head, rows)] if rows else []


def _opening(meta: dict[str, Any]) -> list[str]:
    blocks = [wording.OPENING.format(dates=_dates(meta), machine=meta["machine"], cores=meta["cores"])]
    if meta["seconds_per_point"] < FULL_SECONDS:
        blocks.append(
            f"> **A short run.** Each point took {meta['seconds_per_point']:g} s; a full run takes at least "
            f"{FULL_SECONDS} s. These figures show that the bench works, and little more."
        )
    blocks += [
        f"> **A short run** of {part}, later than the rest: {one['seconds_per_point']:g} s a point."
        for part, one in meta.get("added", {}).items()
        if one["seconds_per_point"] < FULL_SECONDS
    ]
    blocks += [
        f"> **{NAMES[system]}** was {why_missing(meta, system)}."
        for system in PEERS
        if why_missing(meta, system)
    ]
    return blocks


def _dates(meta: dict[str, Any]) -> str:
    """Dates of the results: parts may have been measured later."""
    added = meta.get("added", {})
    if not added:
        return str(meta["date"])
    later = ", ".join(f"{part} {one['date']}" for part, one in added.items())
    runs = len({meta["command"], *(one["command"] for one in added.values())})
    return f"in {runs} runs ({meta['date']}; {later})"


def _failed(rows: list[dict[str, Any]]) -> list[str]:
    """A list of failed measurements."""
    blocks = []
    for row in rows:
        what = " ".join(str(value) for key, value in row.items() if key != "failed")
        blocks.append(f"> **Failed**: {what}: {row['failed']}")
    return blocks


def _summary(results: dict[str, Any]) -> list[str]:
    judged = compare.judge(results.get("points", []))
    section_results = merge_results.section_aims(results)
    rows = [_aim_row(one, results["meta"]) for one in judged]
    rows += aim_rows(section_results, results["meta"])
    head = ("work, records of 100 B unless stated", "against", "ours", "theirs", "ratio", "aim", "")
    known = [one.met for one in judged if one.ratio is not None]
    known += [one.met for one in section_results if one.value is not None]
    count = f"{sum(known)} of {compare.count_of(len(known), 'measured aim')} met."
    return ["## Summary", count if known else "No aim was measured.", table(head, rows), wording.RATIO]


def _aim_row(one: Judged, meta: dict[str, Any]) -> list[str]:
    aim = one.aim
    where = f"{compare.count_of(aim.clients, 'client')}{', ' + aim.durability if aim.durability else ''}"
    if aim.payload_bytes != USUAL_PAYLOAD_BYTES:
        where += f", {compare.payload(aim.payload_bytes)}"
    unit = "p50 in ms" if aim.at_most else "records/s"
    show = figure if aim.at_most else rate
    return [
        f"{wording.WORK_NAMES[aim.work]}, {where}: {unit}",
        f"{NAMES[aim.against]}{_setting(aim)}",
        show(one.ours),
        show(one.theirs),
        times(one.ratio),
        f"{'≤' if aim.at_most else '≥'} {aim.bound:g} ×",
        _verdict(one, meta),
    ]


def _setting(aim: Aim) -> str:
    return wording.PEER_SETTING[aim.against, aim.durability] if aim.durability else ""


def _verdict(one: Judged, meta: dict[str, Any]) -> str:
    if one.ratio is None:
        return why_missing(meta, one.aim.against) or "not part of this run"
    return wording.met_or_missed(one.met, one.missed_by)


def _behind(results: dict[str, Any]) -> list[str]:
    points, everything = results.get("points", []), _comparisons(results)
    behind = compare.behind(everything)
    title = "## Where topics is behind"
    if not everything:
        return [title, "Nothing was measured that could be compared."]
    if not behind:
        return [
            title,
            f"Nowhere in the {len(everything)} comparisons of this run. {_longer_p99(points)}".strip(),
        ]
    rows = [[one.what, NAMES[one.against], one.ours, one.theirs, times(one.ratio)] for one in behind]
    head = ("point", "against", "ours", "theirs", "ratio")
    blocks = [
        title,
        f"{_behind_words(everything, behind)}{_longer_p99(points)} {wording.BEHIND}",
        table(head, rows[:SHOWN_BEHIND]),
    ]
    if rest := rows[SHOWN_BEHIND:]:
        blocks += [f"<details><summary>{len(rest)} more</summary>", table(head, rest), "</details>"]
    return blocks


def _behind_words(everything: list[Comparison], behind: list[Comparison]) -> str:
    counts = []
    for peer in dict.fromkeys(one.against for one in everything):
        if of_peer := sum(one.against == peer for one in everything):
            counts.append(f"{sum(one.against == peer for one in behind)} of {of_peer} against {NAMES[peer]}")
    worst = behind[0]
    return (
        f"In {len(behind)} of {len(everything)} comparisons: {', '.join(counts)}. The worst is {worst.what}: "
        f"{times(worst.ratio)} {NAMES[worst.against]} ({worst.ours} against {worst.theirs}). "
    )


def _longer_p99(points: list[Point]) -> str:
    found = compare.ahead_but_longer_p99(points)
    if not found:
        return ""
    places = "; ".join(f"{compare.place(ours)} ({NAMES[theirs['system']]})" for ours, theirs in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    count = compare.count_of(len(found), "point")
    return f"At {count} topics has the higher rate and yet the longer p99: {places}{more}."


def _reading(meta: dict[str, Any]) -> list[str]:
    return [
        "## How to read it",
        wording.READING.format(rounds=meta["rounds"], seconds=meta["seconds_per_point"]),
    ]


def _machine(meta: dict[str, Any]) -> list[str]:
    versions = meta["versions"]
    rows = [
        ["machine", meta["machine"]],
        ["cores", str(meta["cores"])],
        ["kernel", meta["kernel"]],
        ["filesystem", meta["filesystem"]],
        ["bare fsync", f"p50 {figure(meta['fsync_us']['p50'])} µs, p99 {figure(meta['fsync_us']['p99'])} µs"],
        ["Python", meta["python"]],
        *([NAMES[s], versions.get(s) or why_missing(meta, s) or "unknown"] for s in SYSTEMS),
        ["seconds a point", f"{meta['seconds_per_point']:g}, in {compare.count_of(meta['rounds'], 'round')}"],
        ["whole run", f"{meta['took_s'] / 60:.0f} minutes, {meta['date']}"],
        *(
            [f"later: {part}", f"{one['date']}, {one['seconds_per_point']:g} s a point"]
            for part, one in meta.get("added", {}).items()
        ),
    ]
    commands = dict.fromkeys([meta["command"], *(one["command"] for one in meta.get("added", {}).values())])
    repeat = "\n".join(["<!-- not run: it takes an hour -->", "```sh", *commands, "```"])
    return ["## Machine and versions", table(("", ""), rows), "## How to repeat it", wording.REPEAT, repeat]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the benchmark page and its plots from a results file.")
    parser.add_argument("results", type=Path, help="the JSON that scripts/bench peers wrote")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where benchmarks.md goes (docs)")
    given = parser.parse_args()
    write(json.loads(given.results.read_text(encoding="utf-8")), given.docs)


if __name__ == "__main__":
    main()
