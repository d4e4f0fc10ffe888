"""Of all tests: signals, and the order. Folders of long tests come first, so that no process is left with one when all others are done.

Those of Spark lie at the very front: the process that gets the front of the list runs them all, and one JVM is enough.
"""

from __future__ import annotations

import gc
import secrets
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import length

HERE = Path(__file__).parent
SHORT = ("client", "integration", "fuzz", "unit")  # most of their tests take moments


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="the long form of tests that take a sample: every disk call, every planted bug, more examples and seeds",
    )
    parser.addoption(
        "--seed",
        type=int,
        help="of all samples and random examples; with --long a fresh one is drawn and printed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    length.long = config.getoption("--long")
    # Written back before the other processes are started, which are told all options: one seed for all of them, and for Hypothesis.
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(10**9) if length.long else length.SEED
    length.seed = config.option.seed
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(length.seed)
    # How long an example takes says more of the machine than of the code.
    settings.register_profile(
        "a run",
        max_examples=length.pick(short=20, long=400),
        deadline=None,
        database=None,  # what an earlier run met is not in the seed
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("a run")
    # A shell's background job ignores Ctrl-C, and whatever it starts inherits that: tests send it to what they start.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {length.seed} (--seed {length.seed}{' --long' * length.long} draws the same samples)"


def pytest_collection_finish() -> None:
    # The collected tests stay until the end. Without this each full collection of garbage would walk them all.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(HERE).parts[0]
    if folder == "spark":
        return -1
    return SHORT.index(folder) + 1 if folder in SHORT else 0
