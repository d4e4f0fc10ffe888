"""`topics topic`: lists, creates, configures, empties and deletes topics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import click

from topics.cli.commands import AliasedGroup
from topics.cli.formatting import format_size
from topics.cli.options import COUNT, duration, setting, size
from topics.cli.session import Session, complete_topic, confirm, topic_argument, with_server, yes_option
from topics.client.patterns import is_pattern


@click.group(cls=AliasedGroup)
def topic() -> None:
    """List, create, show, change, delete and empty topics."""


@topic.command("ls")
@click.argument(
    "which", required=False, default="", metavar="[PREFIX|PATTERN]", shell_complete=complete_topic
)
@click.option("--limit", "-n", type=COUNT, metavar="N", help="Maximum number of topics to show.")
@with_server
def ls(session: Session, which: str, limit: int | None) -> None:
    """List topics, or only those that start with PREFIX or match PATTERN ('orders.>')."""
    client = session.client
    found = client.topics(pattern=which) if is_pattern(which) else client.topics(which)
    session.print_rows(
        found if limit is None else islice(found, limit),
        ["topic", "type", "durability", "records", "bytes", "first", "last", "ready"],
        lambda row: [
            row.topic,
            row.type,
            row.durability,
            str(row.count),
            format_size(row.bytes),
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
    """Show the state and configuration of a topic. This does not count as a read of it."""
    session.print_fields(session.client.get_topic(topic, touch=False))


# Settings for queues only. The server accepts them for logs, too, where they have no effect.
QUEUE_SETTINGS = ("lease_ms", "claim_jitter_ms", "max_deliveries", "dead_letter", "leases_durable")


def _configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for topic settings."""
    options = [
        click.option("--durability", type=click.Choice(["ephemeral", "memory", "disk", "fsync"]), help="What an acknowledged write survives. [disk]"),
        click.option("--ttl", "ttl_ms", type=duration, help="Delete records older than this; 0: no limit."),
        click.option("--cap-records", type=click.IntRange(0), metavar="N", help="Maximum number of records to keep; 0: no limit."),
        click.option("--cap-bytes", type=size, help="Maximum total size of records to keep; 0: no limit."),
        click.option("--discard", type=click.Choice(["old", "reject"]), help="When a cap is reached: delete the oldest records, or reject writes. [old]"),
        click.option("--lease", "lease_ms", type=duration, help="Queues: time to finish a job before it is delivered again. [30s]"),
        click.option("--max-deliveries", type=click.IntRange(0), metavar="N", help="Queues: maximum number of deliveries before a job becomes a dead letter; 0: no limit."),
        click.option("--dead-letter", metavar="TOPIC", shell_complete=complete_topic, help="Queues: topic to write dead letters to."),
        click.option("--set", "settings", type=setting, multiple=True, metavar="NAME=VALUE", help="Any other setting; see PUT in docs/http/topics.md."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _given(settings: tuple[tuple[str, Any], ...], options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None} | dict(settings)


def _refuse_for_log(given: dict[str, Any], hint: str) -> None:
    names = ", ".join(name for name in QUEUE_SETTINGS if name in given)
    raise click.UsageError(f"only queues have {names}. {hint}")


@topic.command("create")
@topic_argument
@click.option(
    "--type", type=click.Choice(["log", "queue"]), help="Type of the topic; it cannot be changed later. [log]"
)
@_configured
@with_server
def create(session: Session, topic: str, settings: tuple[tuple[str, Any], ...], **options: Any) -> None:
    """Create a topic, or replace the configuration of an existing one. Its records stay."""
    given = _given(settings, options)
    if given.get("type") != "queue" and not given.keys().isdisjoint(QUEUE_SETTINGS):
        _refuse_for_log(given, "Add --type queue, or omit them")
    result = session.client.create_topic(topic, **given)
    done = "created" if result.created else "existed, configuration replaced"
    session.print_result(result, f"{topic}: {done} ({result.config.type}, {result.config.durability})")


@topic.command("set")
@topic_argument
@_configured
@with_server
def change(session: Session, topic: str, settings: tuple[tuple[str, Any], ...], **options: Any) -> None:
    """Change some settings of a topic. 0 removes a limit."""
    given = _given(settings, options)
    if not given:
        raise click.UsageError("give at least one setting to change")
    if (
        not given.keys().isdisjoint(QUEUE_SETTINGS)
        and session.client.get_topic(topic, touch=False).type == "log"
    ):
        _refuse_for_log(
            given, f"{topic} is a log; `topics consumer create` has similar options for its consumers"
        )
    result = session.client.update_topic(topic, **given)
    session.print_result(result, f"{topic}: changed {', '.join(given)}")


@topic.command("delete")
@topic_argument
@click.option("--if-empty", is_flag=True, help="Only if it has no records.")
@yes_option
@with_server
def delete(session: Session, topic: str, if_empty: bool, is_sure: bool) -> None:
    """Delete a topic and all its records."""
    confirm(f"Deleting {topic}", is_sure=is_sure or if_empty)
    result = session.client.delete_topic(topic, if_empty=if_empty)
    removed = f"; routers removed: {', '.join(result.routers_removed)}" if result.routers_removed else ""
    session.print_result(result, f"{topic}: {'deleted' if result.deleted else 'did not exist'}{removed}")


@topic.command("purge")
@topic_argument
@click.option(
    "--keep",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Keep the newest N of the matching records.",
)
@click.option("--before", "before_seq", type=COUNT, metavar="SEQ", help="Only records before this seq.")
@click.option("--tag", help="Only records with this tag or tag prefix: eu.tea, 'eu.*'")
@click.option(
    "--subject", metavar="PATTERN", help="Only records whose tags match this pattern: 'eu.>', '*.tea'"
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
    """Delete records of a topic: all, or those that match every option. The topic stays, and its seqs continue."""
    confirm(f"Deleting records of {topic}", is_sure=is_sure)
    # `keep` counts matching records. It is sent if it was given, or as 0 if nothing else was given.
    is_all = before_seq is None and tag is None and subject is None
    keep_sent = keep if keep or is_all else None
    result = session.client.delete(
        topic, before_seq=before_seq, match=tag, subject=subject, keep=keep_sent, erase=erase
    )
    session.print_result(result, f"{topic}: {result.deleted} records deleted, {result.count} left")
