"""Saved servers: one file in the user's configuration, readable by its owner only because it has keys in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from topics.cli.failures import Failed

BYTES_MAX = 1 << 20  # thousands of servers


class Server(msgspec.Struct, omit_defaults=True):
    url: str
    token: str = ""


class Contexts(msgspec.Struct, omit_defaults=True):
    current: str = ""
    servers: dict[str, Server] = {}


def path_of(environ: Mapping[str, str] = os.environ) -> Path:
    """TOPICS_CONFIG, or where the desktop standard has it."""
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
        raise Failed(f"cannot read {path}: {error.strerror}") from error
    if mode & 0o077:
        raise Failed(f"{path} has keys in it, and others may read it. Run `chmod 600 {path}`")
    try:
        if len(text) > BYTES_MAX:
            raise ValueError(f"it has more than {BYTES_MAX} bytes")
        return msgspec.json.decode(text, type=Contexts)
    except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
        raise Failed(
            f"{path} is damaged: {error}. Repair it, or remove it and add your servers again"
        ) from error


def save(path: Path, contexts: Contexts) -> None:
    """The old file or the new one is there, whatever happens; never for others to read."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(contexts)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise Failed(f"cannot write {path}: {error.strerror}") from error


def meant(url: str | None, context: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The name of the saved server that `choose` takes, or "" if it takes none of them."""
    if url is not None or (context is None and environ.get("TOPICS_URL")):
        return ""
    return context or load(path_of(environ)).current


def choose(
    url: str | None, token: str | None, context: str | None, environ: Mapping[str, str] = os.environ
) -> Server:
    """The server that is meant, and its key. "": the client's default. A saved key goes to its own server only."""
    said = environ.get("TOPICS_TOKEN") or environ.get("TOPICS_API_KEY") or ""
    name = meant(url, context, environ)
    if not name:
        return Server(url or environ.get("TOPICS_URL", ""), said if token is None else token)
    found = load(path_of(environ)).servers.get(name)
    if found is None:
        raise Failed(f"no server is saved as {name!r}. `topics context ls` shows which are")
    if token is None:
        # Who names a context means its key; one that is just in use gives way to the environment.
        token = (found.token or said) if context else (said or found.token)
    return Server(found.url, token)


def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    try:
        saved = load(path_of())
    except Failed:
        return []
    return sorted(name for name in saved.servers if name.startswith(incomplete))


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which server: the arguments of `choose`."""
    options = [
        click.option("--url", help="URL of the server. [TOPICS_URL]"),
        click.option(
            "--token",
            "--key",
            help="API key. Other users of the machine may see it here, not in TOPICS_TOKEN.",
        ),
        click.option("--context", shell_complete=complete, help="A saved server: see `topics context`."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
