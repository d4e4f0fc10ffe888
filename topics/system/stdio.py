"""Standard streams of a process: broken pipes, and descriptors that were inherited closed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Stop printing without an error when the reader has closed the pipe: `topics … | head -1`. The exit code stays."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Redirect stdout to /dev/null; otherwise Python reports the broken pipe again when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed: the next file opened would take its number, and every child inherit it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
