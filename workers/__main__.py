"""`python -m workers` is the server: the supervisor, which starts all other processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import topics
from router import front
from topics import logs, process, settings
from topics.api_keys import secrets_of
from topics.printing import while_it_is_read
from topics.settings import Settings
from workers import exit_codes, shard, supervisor


def main(argv: Sequence[str] | None = None) -> int:
    match list(sys.argv[1:] if argv is None else argv):
        case []:
            return serve()
        case ["--help" | "-h"]:
            with while_it_is_read():
                print(help_text(), end="")
            return 0
        case ["--version"]:
            print(f"topics {topics.__version__}")
            return 0
        case arguments:
            print(
                f"topics: unknown arguments {' '.join(arguments)}\n\n{help_text()}", end="", file=sys.stderr
            )
            return exit_codes.BAD_CONFIGURATION


def serve() -> int:
    process.open_standard_streams()
    configured = Settings.from_env(os.environ)
    logs.configure("supervisor", configured.log_format, secrets_of(configured.api_keys))
    process.become("supervisor")
    return supervisor.serve(configured, shard.main, front.main)


def help_text() -> str:
    lines = [
        "Runs the topics server until SIGTERM or SIGINT. It takes no arguments; the environment configures it.",
        "Durations and sizes accept units: 30s, 5m, 64MiB, 1GB.",
        "",
    ]
    rows = settings.describe()
    width = max(len(name) for name, _, _ in rows)
    for name, default, meaning in rows:
        lines.append(f"  {name:{width}}  {meaning}" + (f" [{default}]" if default else ""))
    lines += ["", "exit codes:"]
    lines += [f"  {code}  {meaning}" for code, meaning in exit_codes.MEANINGS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
