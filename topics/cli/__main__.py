"""The `topics` command: starts the server, looks at its data and checks it, or follows topics. `python -m topics.cli` is the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import topics

USAGE = """\
usage: topics <command> [arguments]

commands:
  serve       run the server; it is configured by TOPICS_* variables, `topics serve --help` lists them
  verify      check a data directory that no server uses, and with --repair make it whole again
  du          tell what takes the space of a data directory, while a server uses it or not
  inspect     tell what a file of a data directory says, and whether it is what was written
  health      tell whether a server serves, by the exit code; `topics health --help`
  tail        follow topics in the terminal: topics tail 'orders.>'; `topics tail --help`

options:
  --version   print the version
  --help      print this text
"""


def main(argv: Sequence[str] | None = None) -> int:
    match list(sys.argv[1:] if argv is None else argv):
        case ["serve", *rest]:
            become("workers", rest)
        case ["verify", *rest]:
            become("workers.verify", rest)
        case ["tail", *rest]:
            # Late: whoever starts the server does not need an HTTP client first.
            from topics.cli import tail

            return tail.main(rest)
        case ["health", *rest]:
            from topics.cli import health

            return health.main(rest)
        case ["du", *rest]:
            from topics.cli import du

            return du.main(rest)
        case ["inspect", *rest]:
            from topics.cli import inspecting

            return inspecting.main(rest)
        case ["--version"]:
            print(f"topics {topics.__version__}")
        case ["--help" | "-h" | "help"]:
            print(USAGE, end="")
        case []:
            print(USAGE, end="", file=sys.stderr)
            return 2
        case [unknown, *_]:
            print(f"topics: unknown command {unknown!r}\n\n{USAGE}", end="", file=sys.stderr)
            return 2
    return 0


def become(module: str, arguments: Sequence[str]) -> None:
    """Become the server or one of its tools. A new program rather than an import: they sit above this package."""
    # Without -P a folder named `workers` where the user happens to be would be run instead.
    here = os.getcwd()
    safe = [] if "" in sys.path or here in sys.path else ["-P"]
    os.execv(sys.executable, [sys.executable, *safe, "-m", module, *arguments])


if __name__ == "__main__":
    sys.exit(main())
