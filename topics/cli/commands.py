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
from topics.system.stdio import discard_stdout

# name: module:attribute, and what `topics --help` says.
COMMANDS = {
    "serve": ("topics.cli.serve:serve", "Run the server."),
    "pub": ("topics.cli.pub:pub", "Write records: arguments, or lines of stdin."),
    "read": ("topics.cli.reading:read", "Print the records of a topic."),
    "tail": ("topics.cli.tail:tail", "Follow topics: topics tail 'orders.>'"),
    "topic": ("topics.cli.topic:topic", "List, create, show, change, delete, empty topics."),
    "queue": ("topics.cli.jobs:queue", "Claim and settle jobs, or run a command for each."),
    "consumer": (
        "topics.cli.consumer:consumer",
        "List, create, show, pause, move, delete consumers of a topic.",
    ),
    "router": ("topics.cli.routers:router", "List, create, show, delete rules that copy records."),
    "top": ("topics.cli.top:top", "Show rates, lag and pressure."),
    "bench": ("topics.cli.bench:bench", "Measure writes and reads against a server."),
    "health": ("topics.cli.health:health", "Check whether a server serves, by the exit code."),
    "du": ("topics.cli.du:du", "Show what takes the space of a data directory."),
    "inspect": ("topics.cli.inspecting:show", "Show what a file of a data directory contains."),
    "verify": ("workers.verify:command", "Check a data directory that no server uses; --repair repairs it."),
    "context": ("topics.cli.context:context", "Save servers with their keys, and choose among them."),
    "completion": ("topics.cli.completion:completion", "Print the completion script for a shell."),
}
SHORT_FORMS = {
    "sub": ("topics.cli.tail:tail", "tail"),
    "ls": ("topics.cli.topic:ls", "topic ls"),
    "help": ("topics.cli.commands:show_help", "COMMAND --help"),
    "version": ("topics.cli.commands:version", "--version"),
}
ALL = COMMANDS | SHORT_FORMS

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
        return list(ALL)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in ALL:
            return None
        module, _, name = ALL[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # A new user's first words are often nearly right.
        near = get_close_matches(args[0], ALL, 3, 0.5) if args and args[0] not in ALL else []
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table: no command's module is loaded.
        for title, commands in (("Commands", COMMANDS), ("Short forms", SHORT_FORMS)):
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])


@click.group(
    cls=Lazy,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(topics.__version__, message="topics %(version)s")
def cli() -> None:
    """A durable event log, job queue and pub/sub server, and its client."""


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"topics {topics.__version__}")


def _complete_command(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    command, below = _find(ctx, ctx.params["names"] or ())
    names = command.list_commands(below) if isinstance(command, click.Group) else []
    return [name for name in names if name.startswith(incomplete)]


@click.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND]...", shell_complete=_complete_command)
@click.pass_context
def show_help(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of a command: topics help topic create"""
    command, below = _find(ctx, names)
    click.echo(command.get_help(below))


def _find(ctx: click.Context, names: Sequence[str]) -> tuple[click.Command, click.Context]:
    """The command of this name, and its context as if it had been called."""
    command: click.Command = cli
    found = ctx.find_root()
    for name in names:
        if not isinstance(command, click.Group):
            raise click.UsageError(f"{found.command_path!r} has no commands below it", ctx)
        _, below, _ = command.resolve_command(found, [name])
        assert below is not None
        command, found = below, click.Context(below, info_name=name, parent=found)
    return command, found


def run(arguments: Sequence[str]) -> int:
    try:
        code: Any = cli.main(list(arguments), prog_name="topics", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else failures.OK
    except click.ClickException as error:
        error.show()
        return getattr(error, "code", error.exit_code)
    except BrokenPipeError:
        discard_stdout()
        return failures.OK
    except UnicodeEncodeError as error:
        click.echo(f"topics: {error.object!r} is not valid UTF-8", err=True)
        return failures.USAGE
    except OSError as error:
        discard_stdout()
        click.echo(f"topics: {error.filename or 'output'}: {error.strerror or error}", err=True)
        return failures.FAILED
    except (KeyboardInterrupt, click.Abort):
        return failures.INTERRUPTED


@contextlib.contextmanager
def _until_reader_goes() -> Iterator[None]:
    """A reader of the pipe that has gone has seen enough, which is a success. Click would call it a failure."""
    try:
        yield
    except BrokenPipeError:
        discard_stdout()
        raise click.exceptions.Exit(failures.OK) from None
