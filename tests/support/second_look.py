"""What failed among all the tests is run once more, by itself: `python -m tests.support.second_look`, after a whole run.

On a busy machine processes stand still for seconds, and then a server, a browser or Spark misses a time limit that no user would
have set. Such a test passes alone. It is told all the same, so that somebody mends it.

There is no second look where one failure proves a fault, whatever the machine did (JUDGES), nor when more failed than chance explains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

FAILED = Path(".pytest_cache/v/cache/lastfailed")  # of pytest's own: names of tests
JUDGES = ("tests/unit/", "tests/sim/", "tests/crash/", "tests/fuzz/", "tests/overload/")
MOST = 5


class Passed:
    """A plugin of pytest's that remembers who passed: who is skipped has not."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.names.add(report.nodeid)


def why_not(failed: Collection[str]) -> str | None:
    """What speaks against a second look."""
    if not failed:
        return "no test failed: it was pytest itself, or what it read"
    # A folder whose conftest.py cannot be read goes by its own name.
    if proofs := [name for name in failed if f"{name}/".startswith(JUDGES)]:
        return f"one failure of these is enough: {', '.join(sorted(proofs))}"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed, and so many are no accident"
    return None


def main() -> int:
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if (reason := why_not(failed)) is not None:
        print(f"===== no second look: {reason} =====", file=sys.stderr)
        return 1
    print(f"===== a second look, each by itself: {len(failed)} =====", *failed, sep="\n", file=sys.stderr)
    seen = Passed()
    code = int(pytest.main(["-n", "0", *failed], plugins=[seen]))
    if code != 0:
        return code
    if unproven := [name for name in failed if name not in seen.names]:
        print("===== not passed, though none failed =====", *unproven, sep="\n", file=sys.stderr)
        return 1
    print("===== FLAKY: failed among others, passed alone =====", *failed, sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
