"""`topics top`: how a server is doing, again and again: rates, lag, pressure."""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from topics.cli.quantities import COUNT, duration
from topics.cli.session import Session, with_server
from topics.cli.tables import as_bytes, safe, table
from topics.client import Client
from topics.client.errors import Disconnected, NotFound, NotReady, ShuttingDown

_SAMPLE = re.compile(r'^topics_topic_(\w+)\{topic="((?:[^"\\]|\\.)*)"\} (\S+)$', re.MULTILINE)
_ESCAPE = re.compile(r"\\(.)")


@dataclass(slots=True)
class Look:
    """What the server says at one moment."""

    at: float
    server: dict[str, Any]
    topics: dict[str, dict[str, int]]  # figures by name, of the first 1000 topics


def look(client: Client) -> Look:
    server = client.metrics()
    return Look(time.monotonic(), server, topic_figures(client.metrics_text()))


def topic_figures(text: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for figure, label, value in _SAMPLE.findall(text):
        topic = _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], label)
        found[topic][figure] = int(float(value))
    return dict(found)


class Row(msgspec.Struct):
    topic: str
    writes_s: float
    records: int
    bytes: int
    ready: int | None = None  # of a queue
    in_flight: int | None = None
    lag: int | None = None  # of its consumer that is furthest behind


class Screen(msgspec.Struct):
    """One look, compared with the one before."""

    ready: bool
    pressure: float
    topics: int
    records: int
    bytes: int
    streams: int
    consumers: int
    copies_s: float
    flows_owing: int
    fsyncs_s: float
    log_bytes_s: float
    waiting: int
    refused_s: float
    rows: list[Row]


def compare(before: Look, now: Look, most: int) -> Screen:
    seconds = max(0.001, now.at - before.at)
    old, new = before.server, now.server

    def rate(*path: str) -> float:
        was: Any = old
        there_is: Any = new
        for name in path:
            was, there_is = was[name], there_is[name]
        # After a restart counters begin anew.
        return max(0.0, float(there_is - was) / seconds)

    rows = [_row(topic, figures, before.topics.get(topic), seconds) for topic, figures in now.topics.items()]
    rows.sort(key=lambda row: (-row.writes_s, -(row.ready or 0), -row.records, row.topic))
    return Screen(
        bool(new["ready"]),
        float(new["pressure"]),
        new["topics"],
        new["records_live"],
        new["bytes_live"],
        new["sse_connections"],
        new["consumers"],
        rate("copies"),
        new["flows_owing"],
        rate("wal", "fsyncs"),
        rate("wal", "bytes_written"),
        new["wal"]["queue_depth"],
        rate("pressure_refused"),
        rows[:most],
    )


def _row(topic: str, figures: dict[str, int], before: dict[str, int] | None, seconds: float) -> Row:
    head = figures.get("head_seq", 0)
    written = head - before.get("head_seq", 0) if before is not None else head
    return Row(
        topic,
        max(0, written) / seconds,
        figures.get("records_live", 0),
        figures.get("bytes_live", 0),
        figures.get("queue_ready"),
        figures.get("queue_in_flight"),
    )


def add_lags(client: Client, screen: Screen) -> None:
    """Metrics have no consumers; those of what is shown are asked for."""
    if not screen.consumers:
        return
    for row in screen.rows:
        try:
            row.lag = max((consumer.lag_records for consumer in client.consumers(row.topic)), default=None)
        except NotFound:  # deleted meanwhile
            pass


def lines(screen: Screen, url: str) -> list[str]:
    def shown(value: int | None) -> str:
        return "" if value is None else str(value)

    state = "ready" if screen.ready else "NOT READY"
    found = [
        f"{url}  {state}  pressure {screen.pressure:.2f}  refused {screen.refused_s:.0f}/s  waiting {screen.waiting}",
        f"{screen.topics} topics  {screen.records} records  {as_bytes(screen.bytes)}  "
        f"{screen.streams} streams  {screen.consumers} consumers",
        f"log {as_bytes(round(screen.log_bytes_s))}/s  {screen.fsyncs_s:.0f} syncs/s  "
        f"copies {screen.copies_s:.0f}/s, {screen.flows_owing} behind",
        "",
    ]
    heads = ["topic", "writes/s", "records", "bytes", "ready", "in flight", "lag"]
    rows = [
        [
            safe(row.topic),
            f"{row.writes_s:.0f}",
            str(row.records),
            as_bytes(row.bytes),
            shown(row.ready),
            shown(row.in_flight),
            shown(row.lag),
        ]
        for row in screen.rows
    ]
    return found + table(heads, rows, left=1)


@click.command()
@click.option(
    "--interval", "interval_ms", type=duration, default="2s", help="Time between two refreshes. [2s]"
)
@click.option("--count", "-n", type=COUNT, metavar="N", help="Stop after N refreshes.")
@click.option(
    "--rows",
    "most",
    type=click.IntRange(0, 1000),
    default=20,
    metavar="N",
    help="Maximum number of topics to show. [20]",
)
@with_server
def top(session: Session, interval_ms: int, count: int | None, most: int) -> None:
    """Show rates, lag and pressure until Ctrl-C. Topics with the most writes come first, of the first 1000 by name.

    Lag is that of the consumer of a topic that is furthest behind; ready and in flight are of queues.
    """
    client = session.client
    is_screen = sys.stdout.isatty() and not session.as_json
    before = look(client)
    while count is None or count > 0:
        time.sleep(interval_ms / 1000)
        try:
            now = look(client)
        except (Disconnected, NotReady, ShuttingDown) as error:
            if count is not None:
                raise
            session.say(f"{error} (trying again until it works)")
            continue
        screen = compare(before, now, most)
        add_lags(client, screen)
        if session.as_json:
            session.write(msgspec.json.encode(screen) + b"\n")
        else:
            text = "\n".join(lines(screen, client.url))
            print(f"\x1b[H\x1b[2J{text}" if is_screen else f"{text}\n", flush=True)
        before = now
        count = None if count is None else count - 1
