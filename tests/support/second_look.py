"""What failed among all the tests is run once more, by itself: `python -m tests.support.second_look`, after a whole run.

On a busy machine processes stand still for seconds, and then a server, a browser or Spark misses a time limit that no user would
have set. Such a test passes alone. It is told all the same, so that somebody mends it.

There is no second look where one failure proves a fault, whatever the machine did (JUDGES), nor when more failed than chance explains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")  # of pytest's own: names of tests
JUDGES = ("tests/unit/", "tests/sim/", "tests/crash/", "tests/fuzz/", "tests/overload/")
MOST = 5


def why_not(failed: Collection[str]) -> str | None:
    """What speaks against a second look."""
    if not failed:
        return "no test failed: it was pytest itself, or what it read"
    if proofs := [name for name in failed if name.startswith(JUDGES)]:
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
    code = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *failed], check=False).returncode
    if code == 0:
        print(
            "===== FLAKY: these failed among others and passed alone =====",
            *failed,
            sep="\n",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
