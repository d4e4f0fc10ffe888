"""`topics tail`: prints new records of topics; resumes after server restarts and broken connections."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import click

from topics.cli import record_format
from topics.cli.errors import FAILED, OK, CommandError
from topics.cli.options import COUNT, SEQ, when
from topics.cli.session import Session, complete_topic, with_server
from topics.client import Items
from topics.client.answers import Interrupted, Notice, Records, Resumed, Tombstone, TopicEnded

FRAME_RECORDS_MAX = 1000

EPILOG = """\b
A pattern matches the dot-separated tokens of a name: * matches one, a final > one or more. Quote patterns.
Lines are `topic seq time tag=TAG data`, without tag= if there is no tag. Lost records and deleted topics
are reported on stderr.
\b
Exit codes: 0 after --count, or when the reader of a pipe has closed it; 1 refused, or all topics were deleted;
2 wrong arguments; 3 the server is unreachable at the start (later it is retried forever); 130 Ctrl-C.
"""


@click.command(epilog=EPILOG)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topic)
@click.option("--from", "from_seq", type=SEQ, metavar="SEQ", help="Start after this seq, in every topic.")
@click.option("--all", "is_all", is_flag=True, help="Start at the oldest record.")
@click.option("--since", type=when, help="Start at this time: 10m or 1h30m ago, or a timestamp.")
@click.option("--count", "-n", type=COUNT, metavar="N", help="Stop after N records.")
@click.option("--group", metavar="NAME", help="Share the records with all clients of this group: each record goes to one of them, at most once. The first client sets the start.")  # fmt: skip
@click.option("--tag", help="Show only records with this tag or tag prefix: eu.tea, 'eu.*'. Filtered here, not by the server.")  # fmt: skip
@record_format.options
@with_server
def tail(
    session: Session,
    topics: tuple[str, ...],
    from_seq: int | None,
    is_all: bool,
    since: Any,
    count: int | None,
    group: str | None,
    tag: str | None,
    **shown: Any,
) -> int:
    """Follow topics until Ctrl-C: print records as they are written, by default only new ones.

    TOPIC is the name of an existing topic, or a pattern ('orders.>'), which includes topics created later.
    """
    if (from_seq is not None) + is_all + (since is not None) > 1:
        raise click.UsageError("give only one of --from, --all and --since")
    if tag is not None and group is not None:
        raise click.UsageError(
            "--tag cannot be combined with --group: records not shown would be lost to the group"
        )
    show = record_format.choose(is_json=session.as_json, **shown)
    start: Literal["now"] | int = 0 if is_all else "now"
    if from_seq is not None:
        start = from_seq
    events = session.client.watch(
        *topics,
        start=start,
        since=since,
        group=group,
        # For a group, records of a page that are not shown are lost.
        limit=min(count or 0, FRAME_RECORDS_MAX),
    )
    exit_with_reader()
    return follow(events, show, session.write, session.note, count, tag)


def follow(
    events: Items[Any],
    show: record_format.Format,
    write: Callable[[bytes], object],
    note: Callable[[str], object],
    count: int | None = None,
    tag: str | None = None,
) -> int:
    with events:
        if sys.stderr.isatty():
            note(greeting(len(events.cursors)))
        for event in events:
            match event:
                case Records():
                    records = [record for record in event.records if tag is None or matches(tag, record.tag)]
                    records = records[:count]
                    write(b"".join(map(show, records)))
                    if count is not None:
                        count -= len(records)
                        if not count:
                            return OK
                case Tombstone():
                    note(event.text)
                case TopicEnded():
                    note(f"{event.topic} was deleted")
                case Interrupted():
                    note(f"{event.reason} (retrying)")
                case Resumed():
                    note("reconnected")
                case Notice():
                    note(event.message)
                case _:  # of a newer server
                    pass
    raise CommandError("all topics were deleted", FAILED)


def matches(wanted: str, tag: str | None) -> bool:
    """As the server does for reads: the exact tag, or a prefix followed by `*`."""
    if wanted.endswith("*"):
        return tag is not None and tag.startswith(wanted[:-1])
    return tag == wanted


def greeting(topics: int) -> str:
    if not topics:
        return "no matching topic yet; waiting. Ctrl-C to stop"
    return f"following {topics} topic{'' if topics == 1 else 's'}. Ctrl-C to stop"


def exit_with_reader() -> None:
    """Exit when the reader of a pipe closes it, even if there is nothing to write: `topics tail … | head -n 1`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)

    def wait() -> None:
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll()):
            os._exit(OK)  # every line was flushed

    threading.Thread(target=wait, name="reader", daemon=True).start()
