"""`topics top`: a periodically refreshed view of rates, lag and pressure."""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from topics.cli.formatting import format_size, printable, table
from topics.cli.options import COUNT, duration
from topics.cli.session import Session, with_server
from topics.client import Client
from topics.client.errors import Disconnected, NotFound, NotReady, ShuttingDown

_SAMPLE = re.compile(r'^topics_topic_(\w+)\{topic="((?:[^"\\]|\\.)*)"\} (\S+)$', re.MULTILINE)
_ESCAPE = re.compile(r"\\(.)")


@dataclass(slots=True)
class Sample:
    """Metrics at one moment."""

    at: float
    server: dict[str, Any]
    topics: dict[str, dict[str, int]]  # metrics by name, of the first 1000 topics


def sample(client: Client) -> Sample:
    server = client.metrics()
    return Sample(time.monotonic(), server, topic_metrics(client.metrics_text()))


def topic_metrics(text: str) -> dict[str, dict[str, int]]:
    metrics: dict[str, dict[str, int]] = defaultdict(dict)
    for metric, label, value in _SAMPLE.findall(text):
        topic = _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], label)
        metrics[topic][metric] = int(float(value))
    return dict(metrics)


class Row(msgspec.Struct):
    topic: str
    writes_s: float
    records: int
    bytes: int
    ready: int | None = None  # queues only
    in_flight: int | None = None
    lag: int | None = None  # of the slowest consumer


class Screen(msgspec.Struct):
    """Differences between two samples."""

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


def compare(before: Sample, now: Sample, max_rows: int) -> Screen:
    seconds = max(0.001, now.at - before.at)
    old, new = before.server, now.server

    def rate(*path: str) -> float:
        first: Any = old
        second: Any = new
        for name in path:
            first, second = first[name], second[name]
        # Counters restart at 0 with the server.
        return max(0.0, float(second - first) / seconds)

    rows = [_row(topic, metrics, before.topics.get(topic), seconds) for topic, metrics in now.topics.items()]
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
        rows[:max_rows],
    )


def _row(topic: str, metrics: dict[str, int], before: dict[str, int] | None, seconds: float) -> Row:
    head = metrics.get("head_seq", 0)
    written = head - before.get("head_seq", 0) if before is not None else head
    return Row(
        topic,
        max(0, written) / seconds,
        metrics.get("records_live", 0),
        metrics.get("bytes_live", 0),
        metrics.get("queue_ready"),
        metrics.get("queue_in_flight"),
    )


def add_lags(client: Client, screen: Screen) -> None:
    """Fill in the lag of the rows shown. Metrics do not include consumers, so this takes a request per topic."""
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
    header = [
        f"{url}  {state}  pressure {screen.pressure:.2f}  refused {screen.refused_s:.0f}/s  waiting {screen.waiting}",
        f"{screen.topics} topics  {screen.records} records  {format_size(screen.bytes)}  "
        f"{screen.streams} streams  {screen.consumers} consumers",
        f"log {format_size(round(screen.log_bytes_s))}/s  {screen.fsyncs_s:.0f} syncs/s  "
        f"copies {screen.copies_s:.0f}/s, {screen.flows_owing} behind",
        "",
    ]
    heads = ["topic", "writes/s", "records", "bytes", "ready", "in flight", "lag"]
    rows = [
        [
            printable(row.topic),
            f"{row.writes_s:.0f}",
            str(row.records),
            format_size(row.bytes),
            shown(row.ready),
            shown(row.in_flight),
            shown(row.lag),
        ]
        for row in screen.rows
    ]
    return header + table(heads, rows, left=1)


@click.command()
@click.option("--interval", "interval_ms", type=duration, default="2s", help="Time between refreshes. [2s]")
@click.option("--count", "-n", type=COUNT, metavar="N", help="Stop after N refreshes.")
@click.option(
    "--rows",
    "max_rows",
    type=click.IntRange(0, 1000),
    default=20,
    metavar="N",
    help="Maximum number of topics to show. [20]",
)
@with_server
def top(session: Session, interval_ms: int, count: int | None, max_rows: int) -> None:
    """Show rates, lag and pressure until Ctrl-C, for the busiest of the first 1000 topics by name.

    `lag` is the lag of the topic's slowest consumer; `ready` and `in flight` apply to queues.
    """
    client = session.client
    is_screen = sys.stdout.isatty() and not session.as_json
    before = sample(client)
    while count is None or count > 0:
        time.sleep(interval_ms / 1000)
        try:
            now = sample(client)
        except (Disconnected, NotReady, ShuttingDown) as error:
            if count is not None:
                raise
            session.note(f"{error} (retrying)")
            continue
        screen = compare(before, now, max_rows)
        add_lags(client, screen)
        if session.as_json:
            session.write(msgspec.json.encode(screen) + b"\n")
        else:
            text = "\n".join(lines(screen, client.url))
            print(f"\x1b[H\x1b[2J{text}" if is_screen else f"{text}\n", flush=True)
        before = now
        count = None if count is None else count - 1
