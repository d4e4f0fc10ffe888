"""`topics-spark export`: exports cold records as Parquet files or Delta tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec

from spark_pipeline.cli.arguments import (
    CANNOT,
    DAMAGED,
    LATER,
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
    size,
)
from spark_pipeline.jobs.exporting import Exported, Job, export
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.jobs.snapshots import pinned
from spark_pipeline.lake.formats import FORMATS
from spark_pipeline.lake.table import LakeUnavailable
from spark_pipeline.tasks.manifest import find_topics
from topics.cli.formatting import format_size, printable

ADVICE = ". Run `topics verify --repair`, restore the file from a backup, or skip it permanently with --skip-damaged"


def main(argv: Sequence[str]) -> int:
    parser = parser_of(
        "export", "Write cold records that are not exported yet as Parquet files, by topic and day."
    )
    add_topics(parser)
    parser.add_argument("--out", metavar="path", required=True, help="output directory")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="parquet",
        help="plain Parquet files, or one Delta table per topic [parquet]",
    )
    parser.add_argument(
        "--part-bytes",
        type=size,
        default=size("256MiB"),
        help="maximum size of the records of a file [256MiB]",
    )
    parser.add_argument(
        "--skip-damaged", action="store_true", help="skip damaged records permanently, and report them"
    )
    add_place(parser)
    add_offline(parser)
    add_engine(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    default_place(arguments)
    return execute("export", arguments, _run)


def _run(arguments: argparse.Namespace) -> int:
    progress = Progress(sys.stderr, as_json=True if arguments.json else None)
    wanted = ",".join(arguments.topics)
    job = Job(arguments.out, arguments.format, max(arguments.part_bytes, 1), arguments.skip_damaged)
    try:
        if arguments.url:
            with pinned(server_of(arguments), wanted, arguments.cold_dir) as topics:
                result = export(topics, job, lambda: engine_of(arguments), progress)
        else:
            topics = find_topics(arguments.cold_dir, wanted)
            result = export(topics, job, lambda: engine_of(arguments), progress)
    except LakeUnavailable as error:
        print(f"topics-spark export: {printable(str(error))}", file=sys.stderr)
        return CANNOT
    for one in result.left:
        advice = ADVICE if one.state == "damaged" else ""
        print(
            f"topics-spark export: {printable(one.topic)}: {printable(one.message)}{advice}", file=sys.stderr
        )
    print(msgspec.json.encode(result).decode() if arguments.json else _summary(result))
    return _exit_code(result)


def _exit_code(result: Exported) -> int:
    states = {one.state for one in result.left}
    if result.damaged or states & {"damaged", "failed"}:
        return DAMAGED
    return LATER if states else OK


def _summary(result: Exported) -> str:
    if result.files:
        size_text = format_size(result.bytes)
        text = f"{result.rows} records of {result.topics} topics in {result.files} files, {size_text}"
    else:
        text = f"nothing new in {result.topics} topics"
    if result.damaged:
        text += f"; skipped {result.damaged} damaged ranges"
    return f"{text}; {len(result.left)} topics could not be exported" if result.left else text
