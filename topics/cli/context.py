"""`topics context`: saved servers and keys."""

from __future__ import annotations

import sys

import click

from topics.cli import contexts
from topics.cli.failures import USAGE, Failed
from topics.cli.session import as_line
from topics.cli.tables import safe, table

json_option = click.option("--json", "as_json", is_flag=True, help="JSON, a line for each.")


@click.group()
def context() -> None:
    """Save servers with their keys, and choose among them.

    They are in $TOPICS_CONFIG, or topics/contexts.json below $XDG_CONFIG_HOME (~/.config): a file that only you may read.
    """


@context.command("ls")
@json_option
def ls(as_json: bool) -> None:
    """List the saved servers. Keys are not shown."""
    saved = contexts.load(contexts.path_of())
    rows = [
        {"context": name, "url": server.url, "has_token": bool(server.token), "in_use": name == saved.current}
        for name, server in sorted(saved.servers.items())
    ]
    if as_json:
        for row in rows:
            sys.stdout.buffer.write(as_line(row))
        return
    cells = [
        [
            safe(str(row["context"])),
            safe(str(row["url"])),
            *("yes" if row[key] else "" for key in ("has_token", "in_use")),
        ]
        for row in rows
    ]
    print("\n".join(table(["context", "url", "key", "in use"], cells, left=4)))


@context.command("add")
@click.argument("name")
@click.argument("url")
@click.option("--token", help="API key; - asks for it, or reads it from stdin.")
@click.option(
    "--use", "is_used", is_flag=True, help="Use it from now on; the first one saved is used anyway."
)
def add(name: str, url: str, token: str | None, is_used: bool) -> None:
    """Save a server, or replace one."""
    from topics.client.settings import Address

    try:
        address = Address.parse(url)
    except ValueError as error:
        raise Failed(str(error), USAGE) from error
    if token == "-":
        if sys.stdin.isatty():
            token = click.prompt("key", hide_input=True, err=True)
        else:
            token = sys.stdin.readline().strip()
    path = contexts.path_of()
    saved = contexts.load(path)
    saved.servers[name] = contexts.Server(address.url, token or "")
    if is_used or not saved.current:
        saved.current = name
    contexts.save(path, saved)
    print(f"{safe(name)}: {address.url} saved{', and in use' if saved.current == name else ''}")


@context.command("use")
@click.argument("name", shell_complete=contexts.complete)
def use(name: str) -> None:
    """Use a saved server by default. NAME -: use none of them."""
    path = contexts.path_of()
    saved = contexts.load(path)
    if name == "-":
        saved.current = ""
    elif name not in saved.servers:
        raise Failed(f"no server is saved as {name!r}. `topics context ls` shows which are")
    else:
        saved.current = name
    contexts.save(path, saved)


@context.command("rm")
@click.argument("name", shell_complete=contexts.complete)
def remove(name: str) -> None:
    """Forget a server and its key."""
    path = contexts.path_of()
    saved = contexts.load(path)
    if saved.servers.pop(name, None) is None:
        raise Failed(f"no server is saved as {name!r}. `topics context ls` shows which are")
    if saved.current == name:
        saved.current = ""
    contexts.save(path, saved)


@context.command("show")
@json_option
def show(as_json: bool) -> None:
    """Show which server commands use now, and whether they have a key for it."""
    from topics.client.settings import DEFAULT_URL

    found = contexts.choose(None, None, None)
    row = {"url": found.url or DEFAULT_URL, "has_token": bool(found.token)}
    if as_json:
        sys.stdout.buffer.write(as_line(row))
    else:
        print(f"{safe(str(row['url']))}, {'with' if found.token else 'without'} a key")
