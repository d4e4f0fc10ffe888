"""Unit tests start no processes: a test that tries to start one fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest

HERE = Path(__file__).parent


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a unit test starts a process: move it to tests/integration")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """pytest calls this for the tests of all folders."""
    if HERE not in item.path.parents:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        patch.setattr(os, "posix_spawn", refuse)
        patch.setattr(subprocess, "_fork_exec", refuse, raising=False)
        return (yield)
