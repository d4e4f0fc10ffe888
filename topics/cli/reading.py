"""`topics read`: the records of a topic, up to its end."""

from __future__ import annotations

from itertools import islice
from typing import Any

import click

from topics.cli import lines
from topics.cli.quantities import COUNT, SEQ, when
from topics.cli.session import Session, topic_argument, with_server

PAGE = 1000


@click.command()
@topic_argument
@click.option(
    "--from", "from_seq", type=SEQ, metavar="SEQ", help="After this seq. [the oldest that is there]"
)
@click.option("--since", type=when, help="Written since so long ago (10m, 1h30m), or since a time.")
@click.option("--tag", help="Only this tag, or tags that match: eu.tea, 'eu.*'")
@click.option("--limit", "-n", type=COUNT, metavar="N", help="At most N records.")
@click.option("--last", "is_last", is_flag=True, help="Only the newest one; with --tag, of those that match.")
@click.option("--raw", "is_raw", is_flag=True, help="Data only, as JSON; bytes as base64 text.")
@with_server
def read(
    session: Session,
    topic: str,
    from_seq: int | None,
    since: Any,
    tag: str | None,
    limit: int | None,
    is_last: bool,
    is_raw: bool,
) -> None:
    """Print the records of a topic, oldest first, up to its end as it is now. What was lost is told on stderr."""
    if session.as_json and is_raw:
        raise click.UsageError("say one of --json and --raw")
    if is_last and (from_seq is not None or since is not None or limit is not None):
        raise click.UsageError("--last goes with --tag only")
    show = lines.chosen(is_json=session.as_json, is_raw=is_raw)
    if is_last:
        newest = session.client.last(topic, tag=tag)
        if newest is not None:
            session.write(show(newest))
        return
    records = session.client.records(
        topic,
        from_seq,
        since=since,
        tag=tag,
        page_size=min(limit or PAGE, PAGE),
        on_lost=lambda lost: session.say(lost.text),
    )
    wanted = records if limit is None else islice(records, limit)
    while page := list(islice(wanted, PAGE)):
        session.write(b"".join(map(show, page)))
