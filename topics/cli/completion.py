"""`topics completion`: what a shell needs to complete these commands, and names of topics."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash:  eval "$(topics completion bash)"          in ~/.bashrc
    zsh:   eval "$(topics completion zsh)"           in ~/.zshrc
    fish:  topics completion fish > ~/.config/fish/completions/topics.fish
    """
    from topics.cli.commands import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "topics", "_TOPICS_COMPLETE").source())
