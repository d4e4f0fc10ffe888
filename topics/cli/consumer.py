"""`topics consumer`: readers of a topic whose place the server keeps."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import click

from topics.cli.groups import Aliased
from topics.cli.quantities import SEQ, duration, durations, moment, setting, when
from topics.cli.session import (
    Session,
    complete_topic,
    confirm,
    consumer_argument,
    topic_argument,
    with_server,
    yes_option,
)
from topics.cli.tables import as_time
from topics.client.answers import Consumer

NAMED = ("all", "new", "last", "last_per_tag")


@click.group(cls=Aliased)
def consumer() -> None:
    """List, create, show, pause, move, delete consumers of a topic."""


@consumer.command("ls")
@topic_argument
@with_server
def ls(session: Session, topic: str) -> None:
    """List the consumers of a topic, and how far behind they are."""
    heads = ["consumer", "state", "next", "lag", "in flight", "acked", "redelivered", "dead"]
    session.rows(session.client.consumers(topic), heads, _cells, left=2)


def _cells(row: Consumer) -> list[str]:
    state = "paused" if row.paused else "stalled" if row.stalled else "ok"
    counts = (
        row.next_seq,
        row.lag_records,
        row.in_flight,
        row.acked,
        row.redelivered,
        row.dead_lettered + row.given_up,
    )
    return [row.consumer, state, *map(str, counts)]


@consumer.command("info")
@topic_argument
@consumer_argument
@with_server
def info(session: Session, topic: str, name: str) -> None:
    """Show state and configuration of a consumer."""
    session.fields(session.client.get_consumer(topic, name))


def where(text: str) -> str | dict[str, int]:
    if text in NAMED:
        return text
    if text.isascii() and text.isdigit():
        return {"from_seq": int(text)}
    raise click.BadParameter(f"{text!r} is not a seq, nor one of {', '.join(NAMED)}")


@consumer.command("create")
@topic_argument
@consumer_argument
@click.option(
    "--ack",
    type=click.Choice(["none", "all", "explicit"]),
    help="Whether records need no ack, an ack covers all before it, or each is acked. [explicit]",
)
@click.option(
    "--ack-wait",
    "ack_wait_ms",
    type=duration,
    help="How long a worker has before a record is delivered again. [30s]",
)
@click.option("--backoff", "backoff_ms", type=durations, help="Delay before each further delivery: 1s,10s,1m")
@click.option(
    "--max-deliver",
    type=click.IntRange(0),
    metavar="N",
    help="Maximum number of deliveries of a record; 0: no limit.",
)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="TAG",
    help="Only this tag, or a pattern ('eu.>'); several: any of them.",
)
@click.option(
    "--deliver",
    type=where,
    metavar="WHERE",
    help="Where to begin: all, new, last, last_per_tag, or after a seq. [all]",
)
@click.option(
    "--max-ack-pending", type=click.IntRange(1), metavar="N", help="Maximum number of records in flight."
)
@click.option(
    "--dead-letter",
    metavar="TOPIC",
    shell_complete=complete_topic,
    help="Topic that dead letters are written to.",
)
@click.option(
    "--set",
    "settings",
    type=setting,
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other setting: see docs/consumers.md.",
)
@with_server
def create(
    session: Session,
    topic: str,
    name: str,
    filters: tuple[str, ...],
    settings: tuple[tuple[str, Any], ...],
    **options: Any,
) -> None:
    """Create a consumer. One that exists gets this configuration instead of its own, and keeps its place."""
    config = {option: value for option, value in options.items() if value is not None} | dict(settings)
    if filters:
        config["filter"] = list(filters)
    made = session.client.create_consumer(topic, name, **config)
    what = "created" if made.created else "existed, configuration replaced"
    session.one(
        made,
        f"{topic}/{name}: {what}; next is seq {made.next_seq}, {made.lag_records} record{'' if made.lag_records == 1 else 's'} behind",
    )


@consumer.command("reset")
@topic_argument
@consumer_argument
@click.option("--to", type=click.Choice(["start", "end"]), help="To the oldest record, or behind the newest.")
@click.option("--seq", type=SEQ, metavar="SEQ", help="To this seq.")
@click.option("--since", type=when, help="To what was written this long ago (10m, 1h30m), or at this time.")
@click.option("--dry-run", is_flag=True, help="Only say what it would do.")
@with_server
def reset(
    session: Session,
    topic: str,
    name: str,
    to: Literal["start", "end"] | None,
    seq: int | None,
    since: Any,
    dry_run: bool,
) -> None:
    """Move a consumer: it continues from another place in the topic."""
    if (to is not None) + (seq is not None) + (since is not None) != 1:
        raise click.UsageError("give exactly one of --to, --seq and --since")
    moved = session.client.reset_consumer(topic, name, to, seq=seq, since=since, dry_run=dry_run)
    would = "would go" if dry_run else "goes"
    session.one(
        moved,
        f"{topic}/{name}: {would} from seq {moved.from_seq} to {moved.to_seq}: "
        f"{moved.redelivers} records again, {moved.skips} skipped",
    )


@consumer.command("pause")
@topic_argument
@consumer_argument
@click.option("--for", "for_ms", type=duration, help="How long to pause: 10m, 1h30m. [until `resume`]")
@click.option("--until", type=moment, metavar="TIME", help="When the pause ends: 2026-11-17T04:30:00Z")
@with_server
def pause(
    session: Session, topic: str, name: str, for_ms: int | None, until: datetime.datetime | None
) -> None:
    """Pause a consumer: nothing is handed out meanwhile. What is in flight may still be acked."""
    if for_ms is not None and until is not None:
        raise click.UsageError("give only one of --for and --until")
    end = until if for_ms is None else -datetime.timedelta(milliseconds=for_ms)
    session.one(*_told(topic, session.client.pause_consumer(topic, name, until=end)))


@consumer.command("resume")
@topic_argument
@consumer_argument
@with_server
def resume(session: Session, topic: str, name: str) -> None:
    """Resume a paused consumer."""
    session.one(*_told(topic, session.client.resume_consumer(topic, name)))


def _told(topic: str, found: Consumer) -> tuple[Consumer, str]:
    state = "paused" if found.paused else "not paused"
    end = "" if found.paused_until_ts is None else f" until {as_time(found.paused_until_ts)}"
    return found, f"{topic}/{found.consumer}: {state}{end}"


@consumer.command("delete")
@topic_argument
@consumer_argument
@yes_option
@with_server
def delete(session: Session, topic: str, name: str, is_sure: bool) -> None:
    """Delete a consumer and its position. The records stay."""
    confirm(f"Deleting consumer {name} of {topic}", is_sure=is_sure)
    done = session.client.delete_consumer(topic, name)
    session.one(done, f"{topic}/{name}: {'deleted' if done.deleted else 'did not exist'}")
