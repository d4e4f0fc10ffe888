"""The `topics` command: the server, its files, and everything that a client can do. `python -m topics.cli` is the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130  # as shells say it of SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    open_what_is_closed()
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # also while modules are loaded
        return INTERRUPTED


def run(arguments: list[str]) -> int:
    # Nothing is loaded first: two become another program, and the third is asked by container engines all the time.
    match arguments:
        case ["serve", *rest]:
            become("workers", rest)
        case ["verify", *rest]:
            become("workers.verify", rest)
        case ["health", *rest]:
            from topics.cli import health

            return health.main(rest)
    from topics.cli import commands

    return commands.run(arguments)


def open_what_is_closed() -> None:
    """A shell may close them (`>&-`). Their numbers must not become those of a socket, nor Python's streams be None."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
        stream = os.fdopen(descriptor, "w" if descriptor else "r")
        setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream)
    os.close(descriptor)


def become(module: str, arguments: Sequence[str]) -> None:
    """Become the server or one of its tools. A new program rather than an import: they sit above this package."""
    # Without -P a folder named `workers` where the user happens to be would be run instead.
    here = os.getcwd()
    safe = [] if "" in sys.path or here in sys.path else ["-P"]
    os.execv(sys.executable, [sys.executable, *safe, "-m", module, *arguments])


if __name__ == "__main__":
    sys.exit(main())
