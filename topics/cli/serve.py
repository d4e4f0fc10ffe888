"""`topics serve`: replaces this process with the server. Options set the most common environment variables."""

from __future__ import annotations

import importlib
import os
import sys

import click

from topics.cli.options import complete_directory, non_empty
from topics.system.settings import describe, split_host


class _Serve(click.Command):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(
            "Environment variables (durations and sizes take units: 30s, 64MiB; see docs/configuration.md)"
        ):
            formatter.write_dl(
                [
                    (name, f"{meaning} [{default}]" if default else meaning)
                    for name, default, meaning in describe()
                ]
            )
        meanings: dict[int, str] = importlib.import_module("workers.process.exit_codes").MEANINGS
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in meanings.items()])


@click.command(cls=_Serve)
@click.option("--host", type=non_empty, metavar="ADDRESS", help="Address to listen on, or ADDRESS:PORT. [TOPICS_HOST, 127.0.0.1]")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 picks a free one. [TOPICS_PORT, 4000]")  # fmt: skip
@click.option("--data", "data_dir", type=non_empty, metavar="PATH", shell_complete=complete_directory, help="Data directory, created if needed. [TOPICS_DATA_DIR, ./topics-data]")  # fmt: skip
@click.option("--shards", type=click.IntRange(1, 256), help="Number of worker processes. [TOPICS_WAL_SHARDS; unchanged; for a new directory one per CPU, at most 8]")  # fmt: skip
def serve(host: str | None, port: int | None, data_dir: str | None, shards: int | None) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    All settings have environment variables; an option overrides its variable.
    """
    if port is not None:
        if host is not None and split_host(host)[1] is not None:
            raise click.UsageError("--host already contains a port: omit --port, or the port in --host")
        # A port in TOPICS_HOST would override TOPICS_PORT.
        host = host or split_host(os.environ.get("TOPICS_HOST", ""))[0] or None
    given = {"HOST": host, "PORT": port, "DATA_DIR": data_dir, "WAL_SHARDS": shards}
    os.environ.update({f"TOPICS_{name}": str(value) for name, value in given.items() if value is not None})
    # exec rather than an import: the server is in a layer above this package, and it should not keep this one's memory.
    # Without -P, a directory named `workers` in the current directory would be run instead.
    flags = [] if "" in sys.path or os.getcwd() in sys.path else ["-P"]
    os.execv(sys.executable, [sys.executable, *flags, "-m", "workers"])
