"""`topics-spark scrub`: every cold record against its digest."""

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
    engine_of,
    parser_of,
    place_of,
    server_of,
    told,
)
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.jobs.scrubbing import Scrubbed, scrub
from spark_pipeline.jobs.snapshots import pinned
from spark_pipeline.report import scrubs
from spark_pipeline.tasks.manifest import find_topics
from topics.cli.formatting import format_size


def main(argv: Sequence[str]) -> int:
    parser = parser_of("scrub", "Compares every record of the cold tier with its digest. Nothing is changed.")
    add_topics(parser)
    parser.add_argument(
        "--out",
        metavar="dir",
        default="",
        help="the folder of a report, which then tells of this scrub, too [none]",
    )
    add_place(parser)
    add_offline(parser)
    add_engine(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    place_of(arguments)
    return told("scrub", arguments, _run)


def _run(arguments: argparse.Namespace) -> int:
    progress = Progress(sys.stderr, as_json=True if arguments.json else None)
    wanted = ",".join(arguments.topics)
    if arguments.url:
        with (
            pinned(server_of(arguments), wanted, arguments.cold_dir) as topics,
            engine_of(arguments) as engine,
        ):
            found = scrub(topics, engine, progress)
    else:
        topics = find_topics(arguments.cold_dir, wanted)
        with engine_of(arguments) as engine:
            found = scrub(topics, engine, progress)
    if arguments.out:
        scrubs.add(Path(arguments.out), found.by_topic)
    print(msgspec.json.encode(found).decode() if arguments.json else _line(found))
    return DAMAGED if found.damage else OK


def _line(found: Scrubbed) -> str:
    what = f"{found.records} records in {found.segments} segments of {found.topics} topics, {format_size(found.bytes)}"
    if not found.damage:
        return f"{what}: all of it is what was written"
    return f"{what}: {len(found.damage)} damaged ranges. `topics verify --repair` tells readers of them; a backup of the files undoes them"
