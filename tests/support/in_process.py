"""Runs the commands of the product inside the test process: calls their `main`, and returns output and exit code.

Other tests start the programs and show that they call this `main`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def call(main: Callable[[Sequence[str]], int], *arguments: str | Path) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # how argparse ends a program
            code = ended.code if isinstance(ended.code, int) else 1
    return Done(code, out.getvalue(), err.getvalue())
