"""`topics router`: rules that copy what is written to a topic into another one."""

from __future__ import annotations

import click

from topics.cli.groups import Aliased
from topics.cli.session import Session, complete_topic, confirm, router_argument, with_server, yes_option
from topics.client.answers import RouterRow


@click.group(cls=Aliased)
def router() -> None:
    """List, create, show, delete rules that copy records from topic to topic."""


@router.command("ls")
@click.argument("prefix", required=False, default="")
@click.option("--source", help="Only routers with exactly this source.")
@click.option("--dest", help="Only routers with exactly this dest.")
@with_server
def ls(session: Session, prefix: str, source: str | None, dest: str | None) -> None:
    """List routers: all, or those whose names begin with PREFIX."""

    def cells(row: RouterRow) -> list[str]:
        return [row.router, row.source, row.dest, row.guarantee, str(row.forwarded_total)]

    found = session.client.routers(prefix, source=source, dest=dest)
    session.rows(found, ["router", "source", "dest", "guarantee", "copies"], cells, left=4)


@router.command("info")
@router_argument
@with_server
def info(session: Session, name: str) -> None:
    """Show a router, and how many copies it has made."""
    session.fields(session.client.get_router(name))


def _predicate(tag: str) -> str | list[str]:
    """In a list only patterns stand for themselves."""
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
    help="Only this tag, or a pattern ('eu.>'); several: any of them.",
)
@click.option(
    "--exactly-once", is_flag=True, help="Never copy a record twice, even after a crash. [at least once]"
)
@click.option("--allow-cycle", is_flag=True, help="Allow copies to come back to their source.")
@click.option("--no-create-dest", is_flag=True, help="Fail if DEST does not exist. [it is created]")
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
    """Create or change a router. It copies what is written to SOURCE, a topic or a pattern, from now on to DEST."""
    made = session.client.create_router(
        name,
        source,
        dest,
        filter=[_predicate(tag) for tag in filters] or None,
        guarantee="exactly_once" if exactly_once else "at_least_once",
        allow_cycle=allow_cycle,
        create_dest=not no_create_dest,
    )
    session.one(made, f"{name}: {'created' if made.created else 'changed'}: {source} -> {dest}")


@router.command("delete")
@router_argument
@yes_option
@with_server
def delete(session: Session, name: str, is_sure: bool) -> None:
    """Delete a router. The copies it made stay."""
    confirm(f"Deleting router {name}", is_sure=is_sure)
    done = session.client.delete_router(name)
    session.one(done, f"{name}: {'deleted' if done.deleted else 'did not exist'}")
