"""Groups of commands, some of which have a second name."""

from __future__ import annotations

from typing import ClassVar

import click


class Aliased(click.Group):
    """A group in which `rm` is `delete` and `show` is `info`. Help lists both names in one row."""

    aliases: ClassVar = {"rm": "delete", "show": "info"}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.aliases]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.commands.get(self.aliases.get(cmd_name, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name, command in self.commands.items():
            names = [name, *(alias for alias, meant in self.aliases.items() if meant == name)]
            rows.append((", ".join(names), command.get_short_help_str(limit=formatter.width)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
