"""Shared parts of commands that talk to a server: client, output, errors, options, completion."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeAlias

import click
import msgspec

from topics.cli import contexts
from topics.cli.client_errors import command_error
from topics.cli.errors import INTERRUPTED, USAGE, CommandError
from topics.cli.formatting import format_time, printable, table
from topics.cli.options import non_empty
from topics.client import Client, ClientError, Retries, Timeouts
from topics.client.errors import UnknownSetting


class Session:
    """One run of a command. As a context manager it turns client errors into messages and exit codes."""

    def __init__(
        self, client: Client, *, name: str, as_json: bool, has_retry: bool, context: str = ""
    ) -> None:
        self.client, self.name, self.as_json = client, name, as_json
        self.context = context  # the saved context in use, if any
        self.has_retry = has_retry  # --retry was given

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if isinstance(error, KeyboardInterrupt):
            raise click.exceptions.Exit(INTERRUPTED) from error
        if isinstance(error, ClientError):
            raise command_error(error, self.context) from error
        if isinstance(error, UnknownSetting):
            raise CommandError(str(error), USAGE) from error

    def note(self, text: str) -> None:
        """Print to stderr."""
        print(f"{self.name}: {printable(text)}", file=sys.stderr, flush=True)

    def write(self, text: bytes) -> None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()

    def print_rows(
        self,
        items: Iterable[Any],
        heads: Sequence[str],
        cells: Callable[[Any], Sequence[str]],
        *,
        left: int = 1,
    ) -> None:
        """Print a table, or one line of JSON per item."""
        if self.as_json:
            for item in items:
                self.write(as_line(item))
            return
        rows = [[printable(cell) for cell in cells(item)] for item in items]
        print("\n".join(table(heads, rows, left=left)))

    def print_result(self, result: Any, text: str) -> None:
        """Print the result of a call, as JSON or as the given text."""
        if self.as_json:
            self.write(as_line(result))
        else:
            print(printable(text))

    def print_fields(self, result: Any) -> None:
        """Print all fields of one object."""
        if self.as_json:
            self.write(as_line(result))
            return
        pairs = list(flatten(as_plain(result)))
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            print(f"{name:<{width}}  {printable(as_text(name, value))}")


def as_plain(result: Any) -> Any:
    """Every field by its name in JSON, also those with their defaults, which responses leave out."""
    if isinstance(result, list):
        return [as_plain(one) for one in result]
    if not isinstance(result, msgspec.Struct):
        return msgspec.to_builtins(result)
    fields = msgspec.structs.fields(result)
    return {f.encode_name: as_plain(getattr(result, f.name)) for f in fields if f.name != "performance"}


def as_text(name: str, value: Any) -> str:
    """The value of a field as text: times formatted, None as a dash."""
    if value is None:
        return "-"
    if name.endswith("_ts") and isinstance(value, int):
        return format_time(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def as_line(result: Any) -> bytes:
    return msgspec.json.encode(as_plain(result)) + b"\n"


def flatten(plain: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def connect(
    url: str | None,
    token: str | None,
    context: str | None,
    retry_s: float = 0.0,
    timeouts: Timeouts | None = None,
) -> Client:
    server = contexts.choose(url, token, context)
    try:
        return Client(
            server.url or None,
            token=server.token,
            retries=Retries(for_s=retry_s),
            timeouts=timeouts,
            raw=True,
        )
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error


def with_server(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command that talks to a server, and pass it a Session as first argument."""

    @contexts.server_options
    @click.option("--retry", "retry_s", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Retry for this long while the server is unreachable or busy. [0]")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
    @functools.wraps(command)
    def wrapped(
        url: str | None,
        token: str | None,
        context: str | None,
        retry_s: float,
        as_json: bool,
        **options: Any,
    ) -> Any:
        client = connect(url, token, context, retry_s)
        name = click.get_current_context().command_path
        logging.basicConfig(format=f"{name}: %(message)s", level=logging.WARNING)  # for the client's log
        with Session(
            client,
            name=name,
            as_json=as_json,
            has_retry=retry_s > 0,
            context=contexts.context_name(url, context),
        ) as session:
            return command(session, **options)

    return wrapped


def confirm(action: str, *, is_sure: bool) -> None:
    """Ask before a destructive action."""
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{action} cannot be undone. Add --yes to confirm.")
    if not click.confirm(f"{action} cannot be undone. Continue?", err=True):
        raise CommandError("cancelled; nothing was changed")


Complete: TypeAlias = Callable[[click.Context, click.Parameter, str], list[str]]
COMPLETIONS_MAX = 100


def completer(names: Callable[[Client, click.Context, str], Iterable[str]]) -> Complete:
    """Shell completion with names from the server. Short timeouts keep the shell responsive."""

    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        given = ctx.params
        short = Timeouts(connect_s=0.5, answer_s=1.0)
        try:
            client = connect(given.get("url"), given.get("token"), given.get("context"), timeouts=short)
            with client:
                matching = (name for name in names(client, ctx, incomplete) if name.startswith(incomplete))
                return list(islice(matching, COMPLETIONS_MAX))
        except (ClientError, CommandError, ValueError):
            return []

    return complete


complete_topic = completer(
    lambda client, _, prefix: (row.topic for row in client.topics(prefix, page_size=COMPLETIONS_MAX))
)
complete_router = completer(
    lambda client, _, prefix: (row.router for row in client.routers(prefix, page_size=COMPLETIONS_MAX))
)
complete_consumer = completer(
    lambda client, ctx, _: (row.consumer for row in client.consumers(ctx.params.get("topic") or ""))
)
topic_argument = click.argument("topic", type=non_empty, shell_complete=complete_topic)
consumer_argument = click.argument("name", type=non_empty, shell_complete=complete_consumer)
router_argument = click.argument("name", type=non_empty, shell_complete=complete_router)
yes_option = click.option("--yes", "is_sure", is_flag=True, help="Do not ask for confirmation.")
