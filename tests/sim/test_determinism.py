"""Goal: a seed determines the whole run, so that every failure can be repeated.

Method: the same run in two processes whose string hashes differ; one digest over every disk call with its arguments
and every reply must be the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import length

pytestmark = pytest.mark.sim

ROOT = Path(__file__).resolve().parents[2]


def run(seed: int, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.sim.walk", str(seed), "--trace"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("seed", range(3, length.pick(short=4, long=12)))
def test_hash_seed_changes_nothing(seed: int) -> None:
    assert run(seed, "1") == run(seed, "2")
