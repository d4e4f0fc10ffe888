"""`topics du`: what takes the space of a data directory, on a running server or a stopped one."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from topics.cli.disk_usage import DiskUsage, NotOurs, Space, TopicUsage, disk_usage
from topics.cli.failures import Failed
from topics.cli.quantities import cold_dir_option, complete_directory, filled
from topics.cli.tables import as_bytes, safe, table
from topics.system.settings import Settings
from topics.system.stdio import ignore_broken_pipe

OK, INCOMPLETE, CANNOT = 0, 1, 3
TOP = 20
PROGRESS_S = 0.1
LINE_MAX = 78

EPILOG = """\b
Nothing is changed and no lock is taken: a server may run. Names, records and live bytes are those of each
shard's newest snapshot, at most a minute or so old.
\b
Exit codes: 0 everything was read; 1 something could not be read, the rest is shown; 2 wrong arguments;
3 the directory is absent, not readable, or not a data directory of topics.
"""


@click.command(epilog=EPILOG)
@click.argument(
    "data_dir",
    type=filled,
    envvar="TOPICS_DATA_DIR",
    default=Settings().data_dir,
    metavar="[DATA_DIR]",
    shell_complete=complete_directory,
)
@cold_dir_option
@click.option("--top", type=click.IntRange(0), metavar="N", help=f"Number of topics to show, largest first. [{TOP}; with --json all]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def du(data_dir: str, cold_dir: str | None, top: int | None, as_json: bool) -> int:
    """Show what takes the space of a data directory: by kind of file, and by topic.

    DATA_DIR is $TOPICS_DATA_DIR, or ./topics-data.
    """
    progress = _Progress()
    try:
        usage = disk_usage(data_dir, cold_dir, progress.tell)
    except NotOurs as error:
        raise Failed(str(error), CANNOT) from error
    finally:
        progress.end()
    usage.topics = usage.topics[: TOP if top is None and not as_json else top]
    with ignore_broken_pipe():
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(usage)).decode())
        else:
            print("\n".join(lines(usage)))
    for problem in usage.problems:
        print(f"topics du: {safe(problem)}", file=sys.stderr)
    return INCOMPLETE if usage.problems else OK


class _Progress:
    """One line on a terminal that is written over."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._next = 0.0

    def tell(self, what: str) -> None:
        if self._is_shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            print(f"\r\x1b[K{safe(what)[-LINE_MAX:]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def lines(usage: DiskUsage) -> list[str]:
    kinds = [[kind.kind, str(kind.files), as_bytes(kind.bytes)] for kind in usage.kinds if kind.files]
    total = [
        "total",
        str(sum(kind.files for kind in usage.kinds)),
        as_bytes(usage.hot_bytes + usage.cold_bytes),
    ]
    found = table(["kind", "files", "bytes"], [*kinds, total], left=1)
    if usage.topics:
        heads = ["topic", "id", "shard", "records", "live", "dead", "hot", "cold"]
        found += ["", *table(heads, [_topic(topic) for topic in usage.topics], left=2)]
    more = usage.topic_count - len(usage.topics)
    if more > 0:
        found.append(f"and {more} smaller ones; --top shows more of them")
    found += ["", _space("data", usage.data_dir, usage.hot_bytes, usage.data_disk)]
    if usage.cold_dir is not None:
        same = ", on the same disk" if usage.same_disk else ""
        found.append(_space("cold", usage.cold_dir, usage.cold_bytes, usage.cold_disk) + same)
    return found


def _topic(topic: TopicUsage) -> list[str]:
    return [
        safe(topic.name) if topic.name else "(in no snapshot)",
        f"{topic.id:016x}",
        "-" if topic.shard is None else str(topic.shard),
        "-" if topic.records is None else str(topic.records),
        *("-" if size is None else as_bytes(size) for size in (topic.live_bytes, topic.dead_bytes)),
        as_bytes(topic.hot_bytes),
        as_bytes(topic.cold_bytes),
    ]


def _space(what: str, path: str, used: int, disk: Space | None) -> str:
    told = f"{what}: {safe(path)}: {as_bytes(used)}"
    if disk is None:
        return told
    return f"{told}; {as_bytes(disk.free_bytes)} of {as_bytes(disk.total_bytes)} are free"
