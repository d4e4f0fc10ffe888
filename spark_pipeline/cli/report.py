"""`topics-spark report`: statistics and charts of topics."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from spark_pipeline.cli.arguments import (
    DAMAGED,
    DEFAULT_URL,
    OK,
    add_engine,
    add_offline,
    add_output,
    add_server,
    add_topics,
    engine_of,
    execute,
    parser_of,
    server_of,
)
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.jobs.reporting import collect
from spark_pipeline.report import scrub_results
from spark_pipeline.report.model import Report
from spark_pipeline.report.outputs import write
from spark_pipeline.report.trend import read_previous
from spark_pipeline.schedule.state import StateFile, as_rows
from topics.cli.formatting import format_size, printable


def main(argv: Sequence[str]) -> int:
    parser = parser_of(
        "report", "Write statistics and charts of topics: report.html, metrics.parquet, report.json."
    )
    add_topics(parser)
    parser.add_argument("--out", metavar="dir", required=True, help="output directory")
    parser.add_argument(
        "--top", metavar="n", type=int, default=20, help="number of most frequent tags to list [20]"
    )
    parser.add_argument(
        "--state", metavar="file", default="", help="state of a schedule, to show its runs [none]"
    )
    parser.add_argument(
        "--lake",
        metavar="dir",
        action="append",
        default=[],
        help="directory of an export, to show its freshness; repeatable [none]",
    )
    parser.add_argument(
        "--scrubs", metavar="file", default="", help="results of scrubs [scrub.json in --out]"
    )
    parser.add_argument(
        "--cold-dir",
        metavar="path",
        default="",
        help="where the cold tier is mounted here [as on the server]",
    )
    add_server(parser, default=DEFAULT_URL)
    add_offline(parser)
    add_engine(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    return execute("report", arguments, _run)


def _run(arguments: argparse.Namespace) -> int:
    progress = Progress(sys.stderr, as_json=True if arguments.json else None)
    history = as_rows(StateFile(arguments.state).load()) if arguments.state else []
    folder = Path(arguments.out)
    scrubbed = scrub_results.read(Path(arguments.scrubs) if arguments.scrubs else folder / scrub_results.NAME)
    wanted = ",".join(arguments.topics)
    with engine_of(arguments) as engine:
        report = collect(
            server_of(arguments),
            wanted,
            engine,
            progress,
            cold_dir=arguments.cold_dir,
            lakes=arguments.lake,
        )
    report.history, report.top = history, arguments.top
    report.scrubs = {
        topic.topic: scrub for topic in report.topics if (scrub := scrubbed.topics.get(topic.topic))
    }
    report.previous = read_previous(folder / "report.json", wanted)
    write(report, folder)
    result = _result(report)
    if arguments.json:
        print(msgspec.json.encode({**result, "out": str(folder)}).decode())
    else:
        print(
            f"{result['records']} records of {result['topics']} topics, {format_size(result['bytes'])}: {printable(str(folder / 'report.html'))}"
        )
    for topic, segment, reason in report.failed():
        print(
            f"topics-spark report: {printable(topic)}: {segment} is not counted: {printable(reason)}",
            file=sys.stderr,
        )
    return DAMAGED if report.failed() else OK


def _result(report: Report) -> dict[str, Any]:
    total = report.total()
    return {
        "topics": len(report.topics),
        "records": total.live,
        "bytes": total.payload_bytes,
        "failed": len(report.failed()),
        "damaged": sum(scrub.damaged for scrub in report.scrubs.values()),
        "behind": sum(one.behind_cold for topic in report.topics for one in topic.exports),
    }
