"""What every command that talks to a server has: the client, where its output goes, and how it fails."""

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
from topics.cli.advice import failed
from topics.cli.failures import INTERRUPTED, USAGE, Failed
from topics.cli.quantities import filled
from topics.cli.tables import as_time, safe, table
from topics.client import Client, ClientError, Retries, Timeouts
from topics.client.errors import UnknownSetting


class Session:
    """`with` it: errors of the client leave it as text and exit code."""

    def __init__(
        self, client: Client, *, name: str, as_json: bool, is_patient: bool, context: str = ""
    ) -> None:
        self.client, self.name, self.as_json = client, name, as_json
        self.context = context  # the saved server that it is, if it is one
        self.is_patient = is_patient  # --retry was said

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if isinstance(error, KeyboardInterrupt):
            raise click.exceptions.Exit(INTERRUPTED) from error
        if isinstance(error, ClientError):
            raise failed(error, self.context) from error
        if isinstance(error, UnknownSetting):
            raise Failed(str(error), USAGE) from error

    def say(self, text: str) -> None:
        """Print to stderr, beside the output."""
        print(f"{self.name}: {safe(text)}", file=sys.stderr, flush=True)

    def write(self, text: bytes) -> None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()

    def rows(
        self,
        found: Iterable[Any],
        heads: Sequence[str],
        cells: Callable[[Any], Sequence[str]],
        *,
        left: int = 1,
    ) -> None:
        """A table, or a line of JSON for each."""
        if self.as_json:
            for row in found:
                self.write(as_line(row))
            return
        rows = [[safe(cell) for cell in cells(row)] for row in found]
        print("\n".join(table(heads, rows, left=left)))

    def one(self, found: Any, told: str) -> None:
        """What a call did: its answer as JSON, or said in words."""
        if self.as_json:
            self.write(as_line(found))
        else:
            print(safe(told))

    def fields(self, found: Any) -> None:
        """All of one thing."""
        if self.as_json:
            self.write(as_line(found))
            return
        pairs = list(flat(as_plain(found)))
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            print(f"{name:<{width}}  {safe(as_text(name, value))}")


def as_plain(found: Any) -> Any:
    plain = msgspec.to_builtins(found)
    if isinstance(plain, dict):
        plain.pop("performance", None)
    return plain


def as_text(name: str, value: Any) -> str:
    """A field for people: moments as such, and what is not there as nothing."""
    if value is None:
        return "-"
    if name.endswith("_ts") and isinstance(value, int):
        return as_time(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def as_line(found: Any) -> bytes:
    return msgspec.json.encode(as_plain(found)) + b"\n"


def flat(plain: dict[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in plain.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield before + name, value


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
        raise Failed(str(error), USAGE) from error


def with_server(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that talks to a server; it gets a Session first."""

    @contexts.server_options
    @click.option("--retry", "retry_s", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Keep trying for this long while the server is unreachable or busy. [0]")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
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
        logging.basicConfig(format=f"{name}: %(message)s", level=logging.WARNING)  # what the client logs
        with Session(
            client,
            name=name,
            as_json=as_json,
            is_patient=retry_s > 0,
            context=contexts.meant(url, context),
        ) as session:
            return command(session, **options)

    return wrapped


def confirm(what: str, *, is_sure: bool) -> None:
    """Before something is gone for good."""
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{what} cannot be undone. Add --yes to do it.")
    if not click.confirm(f"{what} cannot be undone. Go on?", err=True):
        raise Failed("nothing was done")


Complete: TypeAlias = Callable[[click.Context, click.Parameter, str], list[str]]
COMPLETED_MAX = 100


def completing(names: Callable[[Client, click.Context, str], Iterable[str]]) -> Complete:
    """Names on the server that begin like this. It gives up soon, so that typing never waits for a server."""

    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        given = ctx.params
        quick = Timeouts(connect_s=0.5, answer_s=1.0)
        try:
            client = connect(given.get("url"), given.get("token"), given.get("context"), timeouts=quick)
            with client:
                found = (name for name in names(client, ctx, incomplete) if name.startswith(incomplete))
                return list(islice(found, COMPLETED_MAX))
        except (ClientError, Failed, ValueError):
            return []

    return complete


complete_topic = completing(
    lambda client, _, begun: (row.topic for row in client.topics(begun, page_size=COMPLETED_MAX))
)
complete_router = completing(
    lambda client, _, begun: (row.router for row in client.routers(begun, page_size=COMPLETED_MAX))
)
complete_consumer = completing(
    lambda client, ctx, _: (row.consumer for row in client.consumers(ctx.params.get("topic") or ""))
)
topic_argument = click.argument("topic", type=filled, shell_complete=complete_topic)
consumer_argument = click.argument("name", type=filled, shell_complete=complete_consumer)
router_argument = click.argument("name", type=filled, shell_complete=complete_router)
yes_option = click.option("--yes", "is_sure", is_flag=True, help="Do not ask for confirmation.")
