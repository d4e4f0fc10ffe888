"""`topics topic`: what there is, and how it is configured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import click

from topics.cli.groups import Aliased
from topics.cli.quantities import COUNT, duration, setting, size
from topics.cli.session import Session, complete_topic, confirm, topic_argument, with_server, yes_option
from topics.cli.tables import as_bytes
from topics.client.patterns import is_pattern


@click.group(cls=Aliased)
def topic() -> None:
    """List, create, show, change, delete, empty topics."""


@topic.command("ls")
@click.argument(
    "which", required=False, default="", metavar="[PREFIX|PATTERN]", shell_complete=complete_topic
)
@click.option("--limit", "-n", type=COUNT, metavar="N", help="Maximum number of topics to show.")
@with_server
def ls(session: Session, which: str, limit: int | None) -> None:
    """List topics: all, or those that begin with PREFIX or match PATTERN ('orders.>')."""
    client = session.client
    found = client.topics(pattern=which) if is_pattern(which) else client.topics(which)
    session.rows(
        found if limit is None else islice(found, limit),
        ["topic", "type", "durability", "records", "bytes", "first", "last", "ready"],
        lambda row: [
            row.topic,
            row.type,
            row.durability,
            str(row.count),
            as_bytes(row.bytes),
            str(row.earliest_seq),
            str(row.head_seq),
            "-" if row.ready is None else str(row.ready),
        ],
        left=3,
    )


@topic.command("info")
@topic_argument
@with_server
def info(session: Session, topic: str) -> None:
    """Show state and configuration of a topic. This does not count as a read of it."""
    session.fields(session.client.get_topic(topic, touch=False))


# What only queues have. A log takes these settings too, and they mean nothing there.
QUEUE_SETTINGS = ("lease_ms", "claim_jitter_ms", "max_deliveries", "dead_letter", "leases_durable")


def _configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for what topics can be. Each that is given is in `said`."""
    options = [
        click.option("--durability", type=click.Choice(["ephemeral", "memory", "disk", "fsync"]), help="What survives a crash once a write is acknowledged. [disk]"),
        click.option("--ttl", "ttl_ms", type=duration, help="Delete records that are older than this; 0: no limit."),
        click.option("--cap-records", type=click.IntRange(0), metavar="N", help="Maximum number of records to keep; 0: no limit."),
        click.option("--cap-bytes", type=size, help="Maximum size of all records to keep; 0: no limit."),
        click.option("--discard", type=click.Choice(["old", "reject"]), help="At a maximum, delete the oldest records or reject the write. [old]"),
        click.option("--lease", "lease_ms", type=duration, help="Queues: how long a worker has for a job before it is handed out again. [30s]"),
        click.option("--max-deliveries", type=click.IntRange(0), metavar="N", help="Queues: how often a job is handed out before it becomes a dead letter; 0: no limit."),
        click.option("--dead-letter", metavar="TOPIC", shell_complete=complete_topic, help="Queues: topic that dead letters are written to."),
        click.option("--set", "settings", type=setting, multiple=True, metavar="NAME=VALUE", help="Any other setting: see the table of PUT in docs/http/topics.md."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _said(settings: tuple[tuple[str, Any], ...], options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None} | dict(settings)


def _refuse_for_log(said: dict[str, Any], hint: str) -> None:
    wrong = ", ".join(name for name in QUEUE_SETTINGS if name in said)
    raise click.UsageError(f"only queues have {wrong}. {hint}")


@topic.command("create")
@topic_argument
@click.option(
    "--type", type=click.Choice(["log", "queue"]), help="What the topic is; it cannot be changed. [log]"
)
@_configured
@with_server
def create(session: Session, topic: str, settings: tuple[tuple[str, Any], ...], **options: Any) -> None:
    """Create a topic, or replace the configuration of an existing one. Its records stay."""
    said = _said(settings, options)
    if said.get("type") != "queue" and not said.keys().isdisjoint(QUEUE_SETTINGS):
        _refuse_for_log(said, "Add --type queue, or leave that out")
    put = session.client.create_topic(topic, **said)
    what = "created" if put.created else "existed, configuration replaced"
    session.one(put, f"{topic}: {what} ({put.config.type}, {put.config.durability})")


@topic.command("set")
@topic_argument
@_configured
@with_server
def change(session: Session, topic: str, settings: tuple[tuple[str, Any], ...], **options: Any) -> None:
    """Change some settings of a topic. 0 removes a limit."""
    said = _said(settings, options)
    if not said:
        raise click.UsageError("name a setting to change")
    if (
        not said.keys().isdisjoint(QUEUE_SETTINGS)
        and session.client.get_topic(topic, touch=False).type == "log"
    ):
        _refuse_for_log(
            said, f"{topic} is a log; `topics consumer create` has options like these for consumers"
        )
    put = session.client.update_topic(topic, **said)
    session.one(put, f"{topic}: changed {', '.join(said)}")


@topic.command("delete")
@topic_argument
@click.option("--if-empty", is_flag=True, help="Only if it has no records.")
@yes_option
@with_server
def delete(session: Session, topic: str, if_empty: bool, is_sure: bool) -> None:
    """Delete a topic and all its records."""
    confirm(f"Deleting {topic}", is_sure=is_sure or if_empty)
    done = session.client.delete_topic(topic, if_empty=if_empty)
    gone = f"; routers removed: {', '.join(done.routers_removed)}" if done.routers_removed else ""
    session.one(done, f"{topic}: {'deleted' if done.deleted else 'did not exist'}{gone}")


@topic.command("purge")
@topic_argument
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="Keep the newest N of them.")
@click.option("--before", "before_seq", type=COUNT, metavar="SEQ", help="Only records before this seq.")
@click.option("--tag", help="Only this tag, or tags that match: eu.tea, 'eu.*'")
@click.option(
    "--subject", metavar="PATTERN", help="Only tags that match this dotted pattern: 'eu.>', '*.tea'"
)
@click.option("--erase", is_flag=True, help="Also overwrite them on disk.")
@yes_option
@with_server
def purge(
    session: Session,
    topic: str,
    keep: int,
    before_seq: int | None,
    tag: str | None,
    subject: str | None,
    erase: bool,
    is_sure: bool,
) -> None:
    """Delete records of a topic: all, or those that match every option. The topic stays, and its seqs go on."""
    confirm(f"Deleting records of {topic}", is_sure=is_sure)
    # `keep` is of those that match, so it is sent when it was given, or when nothing else was.
    is_all = before_seq is None and tag is None and subject is None
    said_keep = keep if keep or is_all else None
    done = session.client.delete(
        topic, before_seq=before_seq, match=tag, subject=subject, keep=said_keep, erase=erase
    )
    session.one(done, f"{topic}: {done.deleted} records deleted, {done.count} left")
