"""Entry point of the `topics` command; `python -m topics.cli` is the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130  # what shells report for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    open_closed_streams()
    try:
        from topics.cli import commands

        return commands.run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # including during imports
        return INTERRUPTED


def open_closed_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null where a shell has closed them (`>&-`).

    Otherwise a socket could get one of their descriptors, and Python's streams would be None.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
        stream = os.fdopen(descriptor, "w" if descriptor else "r")
        setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
