"""Configuration of all tests: options, signals and order. Folders with long tests run first, so that no pytest
process is left with a long test after the others have finished.

Spark tests come first of all: the process that gets the first tests runs all of them, so one JVM is enough.
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
SHORT = ("client", "integration", "fuzz", "unit")  # most of these tests are short


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
    # Set here, before the worker processes start: they receive all options, so all of them and Hypothesis use the
    # same seed.
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(10**9) if length.long else length.SEED
    length.seed = config.option.seed
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(length.seed)
    # The duration of an example depends more on the machine than on the code.
    settings.register_profile(
        "a run",
        max_examples=length.pick(short=20, long=400),
        deadline=None,
        database=None,  # the seed does not contain examples that an earlier run found
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("a run")
    # A shell starts background jobs with SIGINT ignored, and child processes inherit that. Tests send SIGINT to
    # processes that they start.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {length.seed} (--seed {length.seed}{' --long' * length.long} draws the same samples)"


def pytest_collection_finish() -> None:
    # Keep the collected tests out of garbage collection: each full collection would walk all of them.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(HERE).parts[0]
    if folder == "spark":
        return -1
    return SHORT.index(folder) + 1 if folder in SHORT else 0
