"""`topics tail`: follows topics in the terminal, over restarts and broken connections, until it is told to stop."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import click

from topics.cli import lines
from topics.cli.failures import FAILED, OK, Failed
from topics.cli.quantities import COUNT, SEQ, when
from topics.cli.session import Session, complete_topic, with_server
from topics.client import Items
from topics.client.answers import Interrupted, Notice, Records, Resumed, Tombstone, TopicEnded

FRAME_RECORDS_MAX = 1000

EPILOG = """\b
A pattern names topics by their tokens between dots: * stands for one, a final > for one or more. Quote it.
Lines are `topic seq time tag=TAG data`, without tag= where there is none. Lost records and deleted topics
are reported on stderr.
\b
Exit codes: 0 after --count, or when the reader of a pipe has gone; 1 refused, or nothing is left to follow;
2 wrong arguments; 3 the server cannot be reached at the start (later it is tried again for as long as it takes);
130 Ctrl-C.
"""


@click.command(epilog=EPILOG)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topic)
@click.option("--from", "from_seq", type=SEQ, metavar="SEQ", help="Begin after this seq, in every topic.")
@click.option("--all", "is_all", is_flag=True, help="Begin with the oldest record.")
@click.option(
    "--since", type=when, help="Begin with what was written this long ago (10m, 1h30m), or at this time."
)
@click.option("--count", "-n", type=COUNT, metavar="N", help="Stop after N records.")
@click.option("--group", metavar="NAME", help="Share the records with all that name this group: each goes to one of them, at most once. The first one says where it begins.")  # fmt: skip
@click.option("--tag", help="Show only this tag, or tags that match: eu.tea, 'eu.*'. All records are sent, and filtered here.")  # fmt: skip
@lines.options
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
    """Follow topics until Ctrl-C: print records as they are written, by default from now on.

    TOPIC is the name of an existing topic, or a pattern, which includes topics created later: 'orders.>'
    """
    if (from_seq is not None) + is_all + (since is not None) > 1:
        raise click.UsageError("give only one of --from, --all and --since")
    if tag is not None and group is not None:
        raise click.UsageError("--tag and --group do not go together: the group would lose what is not shown")
    show = lines.chosen(is_json=session.as_json, **shown)
    start: Literal["now"] | int = 0 if is_all else "now"
    if from_seq is not None:
        start = from_seq
    events = session.client.watch(
        *topics,
        start=start,
        since=since,
        group=group,
        # A page that is not shown to its end is lost for a group.
        limit=min(count or 0, FRAME_RECORDS_MAX),
    )
    end_with_reader()
    return follow(events, show, session.write, session.say, count, tag)


def follow(
    events: Items[Any],
    show: lines.Format,
    write: Callable[[bytes], object],
    say: Callable[[str], object],
    count: int | None = None,
    tag: str | None = None,
) -> int:
    with events:
        if sys.stderr.isatty():
            say(greeting(len(events.cursors)))
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
                    say(event.text)
                case TopicEnded():
                    say(f"{event.topic} was deleted")
                case Interrupted():
                    say(f"{event.reason} (trying again until it works)")
                case Resumed():
                    say("following again")
                case Notice():
                    say(event.message)
                case _:  # of a later version
                    pass
    raise Failed("nothing is left to follow", FAILED)


def matches(wanted: str, tag: str | None) -> bool:
    """As the server does it for reads: the tag itself, or a prefix and a final `*`."""
    if wanted.endswith("*"):
        return tag is not None and tag.startswith(wanted[:-1])
    return tag == wanted


def greeting(topics: int) -> str:
    what = f"{topics} topic{'' if topics == 1 else 's'}" if topics else "no topic yet; waiting for one"
    return f"following {what}. Ctrl-C ends it"


def end_with_reader() -> None:
    """Exit when the reader of a pipe goes, also while there are no lines: `topics tail … | head -n 1`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)

    def wait() -> None:
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll()):
            os._exit(OK)  # every line was flushed

    threading.Thread(target=wait, name="reader", daemon=True).start()
