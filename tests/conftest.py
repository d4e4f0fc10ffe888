"""Of all tests: signals, and the order. Folders of long tests come first, so that no process is left with one when all others are done.

Those of Spark lie at the very front: the process that gets the front of the list runs them all, and one JVM is enough.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHORT = ("integration", "fuzz", "unit")  # most of their tests take moments


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-call",
        action="store_true",
        help="stop long work at every disk call, not only at each fourth",
    )


@pytest.fixture
def some(request: pytest.FixtureRequest) -> int:
    """Of how many disk calls one is looked at: each, when asked for."""
    return 1 if request.config.getoption("--every-call") else 4


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and whatever it starts inherits that: tests send it to what they start."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(HERE).parts[0]
    if folder == "spark":
        return -1
    return SHORT.index(folder) + 1 if folder in SHORT else 0
