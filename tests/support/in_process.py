"""Commands as users run them, without a process of their own for each: what their `main` prints, and its exit code.

That the program itself leads to this `main` is shown by tests that start it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from topics import logs
from topics.api_keys import secrets_of
from topics.settings import Settings
from workers import supervisor

BEGUN = "it was not refused"  # what such a start says


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
        except SystemExit as ended:  # how argparse refuses
            code = ended.code if isinstance(ended.code, int) else 1
    return Done(code, out.getvalue(), err.getvalue())


def start(environment: Mapping[str, str]) -> Done:
    """A start of the server up to where its first process would be made: 1 is the code of one that gets there."""
    settings = Settings.from_env(dict(environment))
    err = io.StringIO()
    with _untouched(), contextlib.redirect_stderr(err), mock.patch.object(supervisor, "Supervisor", _begun):
        logs.configure("supervisor", settings.log_format, secrets_of(settings.api_keys))
        code = supervisor.serve(settings, _begun, _begun)
    return Done(code, "", err.getvalue())


def _begun(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError(BEGUN)


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """What a start changes in its process is as it was."""
    root, limit = logging.getLogger(), resource.getrlimit(resource.RLIMIT_NOFILE)
    handlers, level = list(root.handlers), root.level
    ends = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, ends)
        root.handlers[:] = handlers
        root.setLevel(level)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
