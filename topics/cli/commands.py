"""All commands by name. A command's module is loaded when it runs, and for no other."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import click

import topics
from topics.cli import failures
from topics.printing import forget_output

# name: module:attribute, and what `topics --help` says. Those with `main` read their arguments themselves.
COMMANDS = {
    "serve": ("workers:", "Run the server. TOPICS_* variables configure it; --help lists them."),
    "pub": ("topics.cli.pub:pub", "Write records: arguments, or lines of stdin."),
    "read": ("topics.cli.reading:read", "Print the records of a topic."),
    "tail": ("topics.cli.tail:tail", "Follow topics: topics tail 'orders.>'"),
    "topic": ("topics.cli.topic:topic", "List, create, show, change, delete, empty topics."),
    "queue": ("topics.cli.jobs:queue", "Take jobs, settle them, run a command for each."),
    "consumer": ("topics.cli.consumer:consumer", "List, create, show, move, delete consumers of a topic."),
    "router": ("topics.cli.routers:router", "List, create, show, delete rules that copy."),
    "top": ("topics.cli.top:top", "Watch rates, lag and pressure."),
    "bench": ("topics.cli.bench:bench", "Measure writes and reads against a server."),
    "health": ("topics.cli.health:main", "Tell whether a server serves, by the exit code."),
    "du": ("topics.cli.du:main", "Tell what takes the space of a data directory."),
    "inspect": ("topics.cli.inspecting:main", "Tell what a file of a data directory says."),
    "verify": ("workers.verify:", "Check a data directory that no server uses; --repair makes it whole."),
    "context": ("topics.cli.context:context", "Save servers with their keys, and choose among them."),
    "completion": ("topics.cli.completion:completion", "Print what completes these commands in a shell."),
}

EPILOG = """\b
Which server: --url, --context, TOPICS_URL, the context in use, http://127.0.0.1:4000.
Which key: --token, TOPICS_TOKEN, the one saved with that context.
Exit codes: 0 done; 1 refused or failed; 2 wrong arguments; 3 the server cannot be reached;
4 no answer, so it may have been done or not; 130 Ctrl-C.
"""


class Lazy(click.Group):
    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _until_reader_goes():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _until_reader_goes():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        if name in ("", "main"):
            return _foreign(cmd_name, module)
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # A new user's first words are often nearly right.
        known = COMMANDS.keys()
        near = get_close_matches(args[0], known, 3, 0.5) if args and args[0] not in known else []
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table: the modules stay where they are.
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _foreign(name: str, module: str) -> click.Command:
    """A command with arguments of its own, and help for them."""

    def run(arguments: tuple[str, ...]) -> int:
        code: int = importlib.import_module(module).main(list(arguments))
        return code

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
        short_help=COMMANDS[name][1],
    )


@click.group(
    cls=Lazy,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(topics.__version__, message="topics %(version)s")
def cli() -> None:
    """A durable event log, job queue and pub/sub server, and its client."""


def run(arguments: Sequence[str]) -> int:
    try:
        code: Any = cli.main(list(arguments), prog_name="topics", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else failures.OK
    except click.ClickException as error:
        error.show()
        return getattr(error, "code", error.exit_code)
    except BrokenPipeError:
        forget_output()
        return failures.OK
    except UnicodeEncodeError as error:
        click.echo(f"topics: {error.object!r} is no text in UTF-8", err=True)
        return failures.USAGE
    except OSError as error:
        forget_output()
        click.echo(f"topics: {error.filename or 'output'}: {error.strerror or error}", err=True)
        return failures.FAILED
    except (KeyboardInterrupt, click.Abort):
        return failures.INTERRUPTED


@contextlib.contextmanager
def _until_reader_goes() -> Iterator[None]:
    """Whoever read a pipe and has gone has seen enough: all is well. Click would call it a failure."""
    try:
        yield
    except BrokenPipeError:
        forget_output()
        raise click.exceptions.Exit(failures.OK) from None
