"""`topics-spark export`: cold records as Parquet files, by topic and day, plain or as Delta tables."""

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
    engine_of,
    parser_of,
    place_of,
    server_of,
    size,
    told,
)
from spark_pipeline.jobs.exporting import Exported, Job, export
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.jobs.snapshots import pinned
from spark_pipeline.lake.forms import FORMS
from spark_pipeline.lake.table import LakeUnavailable
from spark_pipeline.tasks.manifest import find_topics
from topics.cli.formatting import format_size, printable

ADVICE = ". --skip-damaged leaves it out, for good; `topics verify --repair` or a backup of the file mends it"


def main(argv: Sequence[str]) -> int:
    parser = parser_of(
        "export", "Writes cold records that were not exported yet as Parquet files, by topic and day."
    )
    add_topics(parser)
    parser.add_argument("--out", metavar="path", required=True, help="the folder of the lake")
    parser.add_argument(
        "--format", choices=FORMS, default="parquet", help="plain Parquet, or a Delta table a topic [parquet]"
    )
    parser.add_argument(
        "--part-bytes", type=size, default=size("256MiB"), help="records of one file at most [256MiB]"
    )
    parser.add_argument(
        "--skip-damaged", action="store_true", help="leave out what is damaged, for good, and tell it"
    )
    add_place(parser)
    add_offline(parser)
    add_engine(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    place_of(arguments)
    return told("export", arguments, _run)


def _run(arguments: argparse.Namespace) -> int:
    progress = Progress(sys.stderr, as_json=True if arguments.json else None)
    wanted = ",".join(arguments.topics)
    job = Job(arguments.out, arguments.format, max(arguments.part_bytes, 1), arguments.skip_damaged)
    try:
        if arguments.url:
            with pinned(server_of(arguments), wanted, arguments.cold_dir) as topics:
                found = export(topics, job, lambda: engine_of(arguments), progress)
        else:
            topics = find_topics(arguments.cold_dir, wanted)
            found = export(topics, job, lambda: engine_of(arguments), progress)
    except LakeUnavailable as error:
        print(f"topics-spark export: {printable(str(error))}", file=sys.stderr)
        return CANNOT
    for one in found.left:
        advice = ADVICE if one.state == "damaged" else ""
        print(
            f"topics-spark export: {printable(one.topic)}: {printable(one.message)}{advice}", file=sys.stderr
        )
    print(msgspec.json.encode(found).decode() if arguments.json else _line(found))
    return _exit_code(found)


def _exit_code(found: Exported) -> int:
    states = {one.state for one in found.left}
    if found.damaged or states & {"damaged", "failed"}:
        return DAMAGED
    return LATER if states else OK


def _line(found: Exported) -> str:
    if found.files:
        what = f"{found.rows} records of {found.topics} topics in {found.files} files, {format_size(found.bytes)}"
    else:
        what = f"nothing new in {found.topics} topics"
    if found.damaged:
        what += f"; {found.damaged} damaged ranges were left out"
    return f"{what}; {len(found.left)} topics could not be exported" if found.left else what
