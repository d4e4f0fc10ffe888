"""Output for whoever reads it, as long as they do: `topics … | head -1`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def while_it_is_read() -> Iterator[None]:
    """Around what prints. Whoever has gone has seen enough; the command's verdict stays what it is."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        forget_output()


def forget_output() -> None:
    """What is left of it goes nowhere, or Python would complain of it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
