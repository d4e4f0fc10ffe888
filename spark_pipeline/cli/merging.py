"""`topics-spark plan`, `compact` and `purge`: merges of cold segments, planned by the server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from spark_pipeline.cli.arguments import (
    DAMAGED,
    DEFAULT_URL,
    LATER,
    OK,
    add_engine,
    add_offline,
    add_output,
    add_server,
    add_topics,
    count,
    engine_of,
    execute,
    parser_of,
    server_of,
    share,
    size,
)
from spark_pipeline.jobs.consolidate import Consolidation, Outcome, Parameters, Plan, preview_plan
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.tasks.server import Refused, wanted_topics
from topics.cli.formatting import format_size, printable, table

DESCRIPTIONS = {
    "plan": "Show what `compact` would merge. Nothing is changed.",
    "compact": "Merge small and partly dead cold segments into large ones. Readers are not affected.",
    "purge": "Rewrite cold segments without their dead records, one by one.",
}
NEVER = 2**31  # for min_segments: a purge merges no neighbours


def main(command: str, argv: Sequence[str]) -> int:
    arguments = _parser(command).parse_args(argv)
    return execute(command, arguments, _plan if command == "plan" else partial(_merge, command))


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(command, DESCRIPTIONS[command])
    add_topics(parser)
    add_server(parser, default=DEFAULT_URL)
    add_offline(parser)
    if command != "purge":
        parser.add_argument(
            "--target-bytes", metavar="size", type=size, help="target size of merged segments [1GiB]"
        )
        parser.add_argument(
            "--min-segments", metavar="n", type=count, help="minimum number of neighbours to merge [2]"
        )
    parser.add_argument(
        "--min-garbage",
        metavar="share",
        type=share,
        help="minimum fraction of dead bytes to rewrite a segment [0.1]",
    )
    parser.add_argument(
        "--max-groups", metavar="n", type=count, help="maximum number of merged segments per plan [64]"
    )
    parser.add_argument(
        "--cold-dir",
        metavar="path",
        default="",
        help="where the cold tier is mounted here [as on the server]",
    )
    if command != "plan":
        parser.add_argument(
            "--lease-ms", metavar="ms", type=int, default=60_000, help="lease of a plan [60000]"
        )
        add_engine(parser)
    add_output(parser)
    return parser


def _parameters(arguments: argparse.Namespace, command: str) -> Parameters:
    if command == "purge":
        # With this target size no two segments are merged.
        return Parameters(1, arguments.min_garbage, NEVER, arguments.max_groups)
    return Parameters(
        arguments.target_bytes, arguments.min_garbage, arguments.min_segments, arguments.max_groups
    )


# ── Plan ──────────────────────────────────────────────────────────────────────────────


def _plan(arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    parameters = _parameters(arguments, "plan")
    plans: dict[str, Plan] = {}
    leased = False
    for name in wanted_topics(server, ",".join(arguments.topics)):
        try:
            plans[name] = preview_plan(server, name, parameters)
        except Refused as error:
            if error.code != "plan_leased":
                raise
            leased = True
            print(f"topics-spark plan: {printable(name)}: {printable(str(error))}", file=sys.stderr)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(plans)).decode())
    elif plans:
        print("\n".join(_plan_lines(plans)))
    return LATER if leased else OK


def _plan_lines(plans: dict[str, Plan]) -> list[str]:
    rows = []
    for name, plan in plans.items():
        for group in plan.groups:
            dead = sum(one.dead_bytes for one in group.inputs)
            rows.append(
                [
                    printable(name),
                    f"{group.first_seq}–{group.next_seq - 1}",
                    str(len(group.inputs)),
                    format_size(group.data_bytes),
                    format_size(dead),
                ]
            )
    if not rows:
        return ["nothing to do"]
    return table(["topic", "records", "segments", "bytes", "dead"], rows, left=2)


# ── Merge ─────────────────────────────────────────────────────────────────────────────


def _merge(command: str, arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    progress = Progress(sys.stderr, as_json=True if arguments.json else None)
    names = wanted_topics(server, ",".join(arguments.topics))
    outcomes = []
    with engine_of(arguments) as engine:
        for name in names:
            job = Consolidation(
                server,
                name,
                engine,
                progress,
                _parameters(arguments, command),
                cold_dir=arguments.cold_dir,
                lease_ms=arguments.lease_ms,
            )
            try:
                outcomes.append(job.run())
            except Refused as error:
                if error.code != "topic_not_found" or len(names) == 1:
                    raise
                # Deleted since it was listed; continue with the others.
                outcomes.append(Outcome(name, "gone", message=str(error)))
                progress.step("gone", f"{name}: {error}", topic=name)
    if arguments.json:
        print(msgspec.json.encode(outcomes).decode())
    else:
        print("\n".join(_outcome_lines(outcomes)))
    return exit_code(outcomes)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    states = {outcome.state for outcome in outcomes}
    if "failed" in states:
        return DAMAGED
    return LATER if states & {"leased", "lost", "changed"} else OK


def _outcome_lines(outcomes: Sequence[Outcome]) -> list[str]:
    rows: list[list[Any]] = [
        [
            printable(one.topic),
            one.state.replace("_", " "),
            str(one.groups),
            format_size(one.bytes_in),
            format_size(one.bytes_out),
            str(len(one.failed)),
        ]
        for one in outcomes
    ]
    return table(["topic", "outcome", "segments", "bytes before", "after", "failed"], rows, left=2)
