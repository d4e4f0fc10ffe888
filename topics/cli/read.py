"""`topics read`: prints the records of a topic up to its current end."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import click

from topics.cli import record_format
from topics.cli.options import COUNT, SEQ, when
from topics.cli.session import Session, topic_argument, with_server
from topics.client import Client

PAGE = 1000
SPAN_MAX = 100_000  # seqs per step when searching backwards


class _Read(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # --last without a number is --last 1. Click's optional values would take the topic for the value.
        following = [*args[1:], ""]
        args = [
            "--last=1" if arg == "--last" and not next_.isdigit() else arg
            for arg, next_ in zip(args, following)
        ]
        return super().parse_args(ctx, args)


@click.command(cls=_Read)
@topic_argument
@click.option(
    "--from", "from_seq", type=SEQ, metavar="SEQ", help="Start after this seq. [at the oldest record]"
)
@click.option("--since", type=when, help="Start at this time: 10m or 1h30m ago, or a timestamp.")
@click.option("--tag", help="Only records with this tag or tag prefix: eu.tea, 'eu.*'")
@click.option("--limit", "-n", type=COUNT, metavar="N", help="Maximum number of records.")
@click.option("--last", type=COUNT, metavar="[N]", help="Only the last N records [1], or the last N with --tag.")  # fmt: skip
@record_format.options
@with_server
def read(
    session: Session,
    topic: str,
    from_seq: int | None,
    since: Any,
    tag: str | None,
    limit: int | None,
    last: int | None,
    **shown: Any,
) -> None:
    """Print the records of a topic, oldest first, up to its current end. Lost records are reported on stderr."""
    if last is not None and (from_seq is not None or since is not None or limit is not None):
        raise click.UsageError("--last can be combined with --tag, not with --from, --since or --limit")
    show = record_format.choose(is_json=session.as_json, **shown)
    if last is not None:
        limit, from_seq = last, before_last(session.client, topic, last, tag)
    records = session.client.records(
        topic,
        from_seq,
        since=since,
        tag=tag,
        page_size=min(limit or PAGE, PAGE),
        on_lost=lambda lost: session.note(lost.text),
    )
    wanted = records if limit is None else islice(records, limit)
    while page := list(islice(wanted, PAGE)):
        session.write(b"".join(map(show, page)))


def before_last(client: Client, topic: str, count: int, tag: str | None) -> int:
    """The seq after which the last `count` records begin.

    Deletes leave gaps in the seqs, so it searches backwards in growing steps.
    """
    state = client.get_topic(topic)
    end = state.head_seq
    if tag is not None:
        newest = client.last(topic, tag=tag)
        if newest is None:
            return end
        end = newest.seq
    span = count
    while end >= state.earliest_seq:
        begin = at = max(state.earliest_seq - 1, end - span)
        found: deque[int] = deque(maxlen=count)  # seqs after `begin`, up to `end`
        while at < end:
            page = client.read(
                topic,
                at,
                limit=min(PAGE, end - at),
                tag=tag,
                include_data=False,
                include_tags=False,
                include_meta=False,
            )
            found.extend(record.seq for record in page.records if record.seq <= end)
            if page.caught_up:
                break
            at = page.next_from_seq
        if len(found) == count:
            return found[0] - 1
        count -= len(found)
        end, span = begin, min(span * 4, SPAN_MAX)
    return end
