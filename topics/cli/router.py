"""`topics router`: routers, which copy new records of one topic to another."""

from __future__ import annotations

import click

from topics.cli.commands import AliasedGroup
from topics.cli.session import Session, complete_topic, confirm, router_argument, with_server, yes_option
from topics.client.answers import RouterRow


@click.group(cls=AliasedGroup)
def router() -> None:
    """List, create, show and delete routers, which copy records between topics."""


@router.command("ls")
@click.argument("prefix", required=False, default="")
@click.option("--source", help="Only routers with this source.")
@click.option("--dest", help="Only routers with this destination.")
@with_server
def ls(session: Session, prefix: str, source: str | None, dest: str | None) -> None:
    """List routers, or only those whose names start with PREFIX."""

    def cells(row: RouterRow) -> list[str]:
        return [row.router, row.source, row.dest, row.guarantee, str(row.forwarded_total)]

    found = session.client.routers(prefix, source=source, dest=dest)
    session.print_rows(found, ["router", "source", "dest", "guarantee", "copies"], cells, left=4)


@router.command("info")
@router_argument
@with_server
def info(session: Session, name: str) -> None:
    """Show a router, and how many copies it has made."""
    session.print_fields(session.client.get_router(name))


def _predicate(tag: str) -> str | list[str]:
    """The API takes plain strings in a list as patterns."""
    return tag if "*" in tag or ">" in tag else ["tag", "Eq", tag]


@router.command("create")
@router_argument
@click.argument("source", shell_complete=complete_topic)
@click.argument("dest", shell_complete=complete_topic)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="TAG",
    help="Only records with this tag or matching this pattern ('eu.>'). Repeatable: any may match.",
)
@click.option(
    "--exactly-once", is_flag=True, help="Copy every record exactly once, even after a crash. [at least once]"
)
@click.option("--allow-cycle", is_flag=True, help="Allow copies to loop back to their source.")
@click.option("--no-create-dest", is_flag=True, help="Fail if DEST does not exist, instead of creating it.")
@with_server
def create(
    session: Session,
    name: str,
    source: str,
    dest: str,
    filters: tuple[str, ...],
    exactly_once: bool,
    allow_cycle: bool,
    no_create_dest: bool,
) -> None:
    """Create or change a router. It copies new records of SOURCE, a topic or a pattern, to DEST."""
    result = session.client.create_router(
        name,
        source,
        dest,
        filter=[_predicate(tag) for tag in filters] or None,
        guarantee="exactly_once" if exactly_once else "at_least_once",
        allow_cycle=allow_cycle,
        create_dest=not no_create_dest,
    )
    session.print_result(result, f"{name}: {'created' if result.created else 'changed'}: {source} -> {dest}")


@router.command("delete")
@router_argument
@yes_option
@with_server
def delete(session: Session, name: str, is_sure: bool) -> None:
    """Delete a router. Records it has copied stay."""
    confirm(f"Deleting router {name}", is_sure=is_sure)
    result = session.client.delete_router(name)
    session.print_result(result, f"{name}: {'deleted' if result.deleted else 'did not exist'}")
