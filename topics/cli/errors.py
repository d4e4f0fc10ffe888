"""Exit codes, and the exception that ends a command with one."""

from __future__ import annotations

import signal
from typing import IO, Any

import click

OK, FAILED, USAGE, UNREACHABLE, UNKNOWN, INTERRUPTED = 0, 1, 2, 3, 4, 128 + signal.SIGINT


class CommandError(click.ClickException):
    """Ends the command with this message and exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
        context = click.get_current_context(silent=True)
        self.name = context.command_path if context is not None else "topics"

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{self.name}: {self.format_message()}", file=file, err=file is None)
