"""`topics consumer`: consumers of a topic, whose positions the server keeps."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import click

from topics.cli.commands import AliasedGroup
from topics.cli.formatting import format_time
from topics.cli.options import SEQ, duration, durations, moment, setting, when
from topics.cli.session import (
    Session,
    complete_topic,
    confirm,
    consumer_argument,
    topic_argument,
    with_server,
    yes_option,
)
from topics.client.answers import Consumer

START_POSITIONS = ("all", "new", "last", "last_per_tag")


@click.group(cls=AliasedGroup)
def consumer() -> None:
    """List, create, show, pause, reset and delete consumers of a topic."""


@consumer.command("ls")
@topic_argument
@with_server
def ls(session: Session, topic: str) -> None:
    """List the consumers of a topic, and how far behind they are."""
    heads = ["consumer", "state", "next", "lag", "in flight", "acked", "redelivered", "dead"]
    session.print_rows(session.client.consumers(topic), heads, _cells, left=2)


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
    """Show the state and configuration of a consumer."""
    session.print_fields(session.client.get_consumer(topic, name))


def start_position(text: str) -> str | dict[str, int]:
    if text in START_POSITIONS:
        return text
    if text.isascii() and text.isdigit():
        return {"from_seq": int(text)}
    raise click.BadParameter(f"{text!r} is not a seq or one of {', '.join(START_POSITIONS)}")


@consumer.command("create")
@topic_argument
@consumer_argument
@click.option(
    "--ack",
    type=click.Choice(["none", "all", "explicit"]),
    help="none: no acks; all: an ack covers all records before it; explicit: one ack per record. [explicit]",
)
@click.option(
    "--ack-wait",
    "ack_wait_ms",
    type=duration,
    help="Time for an ack before a record is delivered again. [30s]",
)
@click.option("--backoff", "backoff_ms", type=durations, help="Delay before each redelivery: 1s,10s,1m")
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
    help="Only records with this tag or matching this pattern ('eu.>'). Repeatable: any may match.",
)
@click.option(
    "--deliver",
    type=start_position,
    metavar="START",
    help="Where to start: all, new, last, last_per_tag, or after a seq. [all]",
)
@click.option(
    "--max-ack-pending", type=click.IntRange(1), metavar="N", help="Maximum number of records in flight."
)
@click.option(
    "--dead-letter",
    metavar="TOPIC",
    shell_complete=complete_topic,
    help="Topic to write dead letters to.",
)
@click.option(
    "--set",
    "settings",
    type=setting,
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other setting; see docs/consumers.md.",
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
    """Create a consumer, or replace the configuration of an existing one, which keeps its position."""
    config = {option: value for option, value in options.items() if value is not None} | dict(settings)
    if filters:
        config["filter"] = list(filters)
    result = session.client.create_consumer(topic, name, **config)
    done = "created" if result.created else "existed, configuration replaced"
    records = f"{result.lag_records} record{'' if result.lag_records == 1 else 's'}"
    session.print_result(result, f"{topic}/{name}: {done}; next seq {result.next_seq}, {records} behind")


@consumer.command("reset")
@topic_argument
@consumer_argument
@click.option("--to", type=click.Choice(["start", "end"]), help="To the oldest record, or after the newest.")
@click.option("--seq", type=SEQ, metavar="SEQ", help="To this seq.")
@click.option("--since", type=when, help="To the first record at or after this time: 10m or 1h30m ago, or a timestamp.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only show what would happen.")
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
    """Move a consumer to another position in the topic."""
    if (to is not None) + (seq is not None) + (since is not None) != 1:
        raise click.UsageError("give exactly one of --to, --seq and --since")
    result = session.client.reset_consumer(topic, name, to, seq=seq, since=since, dry_run=dry_run)
    moved = "would move" if dry_run else "moved"
    session.print_result(
        result,
        f"{topic}/{name}: {moved} from seq {result.from_seq} to {result.to_seq}: "
        f"{result.redelivers} records redelivered, {result.skips} skipped",
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
    """Pause a consumer: it gets no records. Records in flight can still be acked."""
    if for_ms is not None and until is not None:
        raise click.UsageError("give only one of --for and --until")
    end = until if for_ms is None else -datetime.timedelta(milliseconds=for_ms)
    _print_paused(session, topic, session.client.pause_consumer(topic, name, until=end))


@consumer.command("resume")
@topic_argument
@consumer_argument
@with_server
def resume(session: Session, topic: str, name: str) -> None:
    """Resume a paused consumer."""
    _print_paused(session, topic, session.client.resume_consumer(topic, name))


def _print_paused(session: Session, topic: str, result: Consumer) -> None:
    state = "paused" if result.paused else "not paused"
    end = "" if result.paused_until_ts is None else f" until {format_time(result.paused_until_ts)}"
    session.print_result(result, f"{topic}/{result.consumer}: {state}{end}")


@consumer.command("delete")
@topic_argument
@consumer_argument
@yes_option
@with_server
def delete(session: Session, topic: str, name: str, is_sure: bool) -> None:
    """Delete a consumer and its position. The records stay."""
    confirm(f"Deleting consumer {name} of {topic}", is_sure=is_sure)
    result = session.client.delete_consumer(topic, name)
    session.print_result(result, f"{topic}/{name}: {'deleted' if result.deleted else 'did not exist'}")
