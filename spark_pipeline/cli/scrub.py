"""`topics-spark scrub`: checks every cold record against its checksum."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from spark_pipeline.cli.arguments import (
    DAMAGED,
    OK,
    add_engine,
    add_offline,
    add_output,
    add_place,
    add_topics,
    default_place,
    engine_of,
    execute,
    parser_of,
    server_of,
)
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.jobs.scrubbing import Scrubbed, scrub
from spark_pipeline.jobs.snapshots import pinned
from spark_pipeline.report import scrub_results
from spark_pipeline.tasks.manifest import find_topics
from topics.cli.formatting import format_size


def main(argv: Sequence[str]) -> int:
    parser = parser_of("scrub", "Check every cold record against its checksum. Nothing is changed.")
    add_topics(parser)
    parser.add_argument(
        "--out",
        metavar="dir",
        default="",
        help="directory of a report, to include the results there [none]",
    )
    add_place(parser)
    add_offline(parser)
    add_engine(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    default_place(arguments)
    return execute("scrub", arguments, _run)


def _run(arguments: argparse.Namespace) -> int:
    progress = Progress(sys.stderr, as_json=True if arguments.json else None)
    wanted = ",".join(arguments.topics)
    if arguments.url:
        with (
            pinned(server_of(arguments), wanted, arguments.cold_dir) as topics,
            engine_of(arguments) as engine,
        ):
            result = scrub(topics, engine, progress)
    else:
        topics = find_topics(arguments.cold_dir, wanted)
        with engine_of(arguments) as engine:
            result = scrub(topics, engine, progress)
    if arguments.out:
        scrub_results.add(Path(arguments.out), result.by_topic)
    print(msgspec.json.encode(result).decode() if arguments.json else _summary(result))
    return DAMAGED if result.damage else OK


def _summary(result: Scrubbed) -> str:
    size = format_size(result.bytes)
    text = f"{result.records} records in {result.segments} segments of {result.topics} topics, {size}"
    if not result.damage:
        return f"{text}: no damage"
    damage = f"{len(result.damage)} damaged ranges"
    return f"{text}: {damage}. Restore the files from a backup, or run `topics verify --repair` to mark the records as lost"
