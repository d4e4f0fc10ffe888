"""Table of all commands and their entry point. A command's module is imported only when the command runs."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar

import click

import topics
from topics.cli import errors
from topics.system.stdio import discard_stdout

# Name: (module:attribute, text in `topics --help`).
COMMANDS = {
    "serve": ("topics.cli.serve:serve", "Run the server."),
    "pub": ("topics.cli.pub:pub", "Write records from arguments or stdin."),
    "read": ("topics.cli.read:read", "Print the records of a topic."),
    "tail": ("topics.cli.tail:tail", "Follow topics: topics tail 'orders.>'"),
    "topic": ("topics.cli.topic:topic", "List, create, show, change, delete and empty topics."),
    "queue": ("topics.cli.queue:queue", "Claim and settle jobs, or run a command for each job."),
    "consumer": (
        "topics.cli.consumer:consumer",
        "List, create, show, pause, reset and delete consumers of a topic.",
    ),
    "router": (
        "topics.cli.router:router",
        "List, create, show and delete routers, which copy records between topics.",
    ),
    "top": ("topics.cli.top:top", "Show rates, lag and pressure."),
    "bench": ("topics.cli.bench:bench", "Measure writes and reads against a server."),
    "health": ("topics.cli.health:health", "Check whether a server is ready; the exit code tells."),
    "du": ("topics.cli.disk_usage:du", "Show the disk usage of a data directory."),
    "inspect": ("topics.cli.inspect_file:show", "Show the contents of a file of a data directory."),
    "verify": (
        "workers.verify:command",
        "Check the data directory of a stopped server; --repair repairs it.",
    ),
    "context": ("topics.cli.contexts:context", "Save servers and their keys, and switch between them."),
    "completion": ("topics.cli.commands:completion", "Print the completion script for a shell."),
}
ALIASES = {
    "sub": ("topics.cli.tail:tail", "tail"),
    "ls": ("topics.cli.topic:ls", "topic ls"),
    "help": ("topics.cli.commands:show_help", "COMMAND --help"),
    "version": ("topics.cli.commands:version", "--version"),
}
ALL = COMMANDS | ALIASES

EPILOG = """\b
Server: the first of --url, --context, TOPICS_URL, the context in use, http://127.0.0.1:4000.
API key: the first of --token, TOPICS_TOKEN, the key saved with the context.
Exit codes: 0 success; 1 refused or failed; 2 wrong arguments; 3 server unreachable;
4 no response, the outcome is unknown; 130 Ctrl-C.
"""


class LazyGroup(click.Group):
    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _broken_pipe_is_success():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipe_is_success():
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
        near = get_close_matches(args[0], ALL, 3, 0.5) if args and args[0] not in ALL else []
        if near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table: Click would import every command's module.
        for title, commands in (("Commands", COMMANDS), ("Aliases", ALIASES)):
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])


class AliasedGroup(click.Group):
    """A group in which `rm` is `delete` and `show` is `info`. Help lists both names in one row."""

    aliases: ClassVar = {"rm": "delete", "show": "info"}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.aliases]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.commands.get(self.aliases.get(cmd_name, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name, command in self.commands.items():
            names = [name, *(alias for alias, target in self.aliases.items() if target == name)]
            rows.append((", ".join(names), command.get_short_help_str(limit=formatter.width)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
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


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash:  eval "$(topics completion bash)"          in ~/.bashrc
    zsh:   eval "$(topics completion zsh)"           in ~/.zshrc
    fish:  topics completion fish > ~/.config/fish/completions/topics.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "topics", "_TOPICS_COMPLETE").source())


def _complete_command(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    command, context = _find(ctx, ctx.params["names"] or ())
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    return [name for name in names if name.startswith(incomplete)]


@click.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND]...", shell_complete=_complete_command)
@click.pass_context
def show_help(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of a command: topics help topic create"""
    command, context = _find(ctx, names)
    click.echo(command.get_help(context))


def _find(ctx: click.Context, names: Sequence[str]) -> tuple[click.Command, click.Context]:
    """Return the command with this name and a context as if it had been called."""
    command: click.Command = cli
    found = ctx.find_root()
    for name in names:
        if not isinstance(command, click.Group):
            raise click.UsageError(f"{found.command_path!r} has no subcommands", ctx)
        _, subcommand, _ = command.resolve_command(found, [name])
        assert subcommand is not None
        command, found = subcommand, click.Context(subcommand, info_name=name, parent=found)
    return command, found


def run(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    try:
        code: Any = cli.main(list(arguments), prog_name="topics", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else errors.OK
    except click.ClickException as error:
        error.show()
        return getattr(error, "code", error.exit_code)
    except BrokenPipeError:
        discard_stdout()
        return errors.OK
    except UnicodeEncodeError as error:
        click.echo(f"topics: {error.object!r} is not valid UTF-8", err=True)
        return errors.USAGE
    except OSError as error:
        discard_stdout()
        click.echo(f"topics: {error.filename or 'output'}: {error.strerror or error}", err=True)
        return errors.FAILED
    except (KeyboardInterrupt, click.Abort):
        return errors.INTERRUPTED


@contextlib.contextmanager
def _broken_pipe_is_success() -> Iterator[None]:
    """The reader of a pipe may close it early (`| head -1`). Click would exit with 1."""
    try:
        yield
    except BrokenPipeError:
        discard_stdout()
        raise click.exceptions.Exit(errors.OK) from None
