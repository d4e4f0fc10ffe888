"""The `topics` command: the server, its files, and everything that a client can do. `python -m topics.cli` is the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130  # as shells say it of SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    open_what_is_closed()
    try:
        from topics.cli import commands

        return commands.run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # also while modules are loaded
        return INTERRUPTED


def open_what_is_closed() -> None:
    """A shell may close them (`>&-`). Their numbers must not become those of a socket, nor Python's streams be None."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
        stream = os.fdopen(descriptor, "w" if descriptor else "r")
        setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
