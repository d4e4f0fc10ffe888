"""Saved servers and their keys, and the `topics context` command that edits them.

They are in one file of the user's configuration directory. It contains keys, so only its owner may read it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from topics.cli.errors import USAGE, CommandError
from topics.cli.formatting import printable, table

BYTES_MAX = 1 << 20  # enough for thousands of servers


class Server(msgspec.Struct, omit_defaults=True):
    url: str
    token: str = ""


class Contexts(msgspec.Struct, omit_defaults=True):
    current: str = ""
    servers: dict[str, Server] = {}


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """TOPICS_CONFIG, or the path given by the XDG base directory specification."""
    if environ.get("TOPICS_CONFIG"):
        return Path(environ["TOPICS_CONFIG"])
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "topics" / "contexts.json"


def load(path: Path) -> Contexts:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    if mode & 0o077:
        raise CommandError(f"{path} contains keys and is accessible to other users. Run `chmod 600 {path}`")
    try:
        if len(text) > BYTES_MAX:
            raise ValueError(f"it is larger than {BYTES_MAX} bytes")
        return msgspec.json.decode(text, type=Contexts)
    except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
        raise CommandError(
            f"{path} is damaged: {error}. Repair it, or delete it and add your servers again"
        ) from error


def save(path: Path, contexts: Contexts) -> None:
    """Replace the file atomically. It is never readable by other users."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(contexts)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def context_name(url: str | None, context: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The saved context that `choose` uses, or "" if it uses none."""
    if url is not None or (context is None and environ.get("TOPICS_URL")):
        return ""
    return context or load(config_path(environ)).current


def choose(
    url: str | None, token: str | None, context: str | None, environ: Mapping[str, str] = os.environ
) -> Server:
    """The server to use and its key. An empty URL means the client's default.

    A saved key is only ever sent to the server it was saved with.
    """
    env_token = environ.get("TOPICS_TOKEN") or environ.get("TOPICS_API_KEY") or ""
    name = context_name(url, context, environ)
    if not name:
        return Server(url or environ.get("TOPICS_URL", ""), env_token if token is None else token)
    found = load(config_path(environ)).servers.get(name)
    if found is None:
        raise _no_such_context(name)
    if token is None:
        # The key of an explicit --context wins over the environment; the key of the context in use does not.
        token = (found.token or env_token) if context else (env_token or found.token)
    return Server(found.url, token)


def _no_such_context(name: str) -> CommandError:
    return CommandError(f"there is no context {name!r}. `topics context ls` lists them")


def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    try:
        saved = load(config_path())
    except CommandError:
        return []
    return sorted(name for name in saved.servers if name.startswith(incomplete))


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that select the server: the arguments of `choose`."""
    options = [
        click.option("--url", help="URL of the server. [TOPICS_URL]"),
        click.option(
            "--token",
            "--key",
            help="API key. Other users of this machine can see it here; they cannot see TOPICS_TOKEN.",
        ),
        click.option("--context", shell_complete=complete, help="A saved server: see `topics context`."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


# -- the command -------------------------------------------------------------------------------------------

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


def _write_json(row: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(row) + b"\n")


@click.group()
def context() -> None:
    """Save servers and their keys, and switch between them.

    They are saved in $TOPICS_CONFIG, or in topics/contexts.json in $XDG_CONFIG_HOME (~/.config). Only you can read the file.
    """


@context.command("ls")
@json_option
def ls(as_json: bool) -> None:
    """List the saved servers. Keys are not shown."""
    saved = load(config_path())
    rows = [
        {"context": name, "url": server.url, "has_token": bool(server.token), "in_use": name == saved.current}
        for name, server in sorted(saved.servers.items())
    ]
    if as_json:
        for row in rows:
            _write_json(row)
        return
    cells = [
        [
            printable(str(row["context"])),
            printable(str(row["url"])),
            *("yes" if row[key] else "" for key in ("has_token", "in_use")),
        ]
        for row in rows
    ]
    print("\n".join(table(["context", "url", "key", "in use"], cells, left=4)))


@context.command("add")
@click.argument("name")
@click.argument("url")
@click.option("--token", help="API key; - prompts for it, or reads it from stdin.")
@click.option("--use", "is_used", is_flag=True, help="Use it from now on; always done for the first context.")
def add(name: str, url: str, token: str | None, is_used: bool) -> None:
    """Save a server, or replace a saved one."""
    from topics.client.settings import Address

    try:
        address = Address.parse(url)
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    if token == "-":
        if sys.stdin.isatty():
            token = click.prompt("key", hide_input=True, err=True)
        else:
            token = sys.stdin.readline().strip()
    path = config_path()
    saved = load(path)
    saved.servers[name] = Server(address.url, token or "")
    if is_used or not saved.current:
        saved.current = name
    save(path, saved)
    print(f"{printable(name)}: {address.url} saved{', and in use' if saved.current == name else ''}")


@context.command("use")
@click.argument("name", shell_complete=complete)
def use(name: str) -> None:
    """Use a saved server by default. NAME -: use none of them."""
    path = config_path()
    saved = load(path)
    if name == "-":
        saved.current = ""
    elif name not in saved.servers:
        raise _no_such_context(name)
    else:
        saved.current = name
    save(path, saved)


@context.command("rm")
@click.argument("name", shell_complete=complete)
def remove(name: str) -> None:
    """Delete a saved server and its key."""
    path = config_path()
    saved = load(path)
    if saved.servers.pop(name, None) is None:
        raise _no_such_context(name)
    if saved.current == name:
        saved.current = ""
    save(path, saved)


@context.command("show")
@json_option
def show(as_json: bool) -> None:
    """Show which server commands use, and whether there is a key for it."""
    from topics.client.settings import DEFAULT_URL

    found = choose(None, None, None)
    row = {"url": found.url or DEFAULT_URL, "has_token": bool(found.token)}
    if as_json:
        _write_json(row)
    else:
        print(f"{printable(str(row['url']))}, {'with' if found.token else 'without'} a key")
