"""Goal: a run ends well only when what failed in it passes alone, and where one failure is enough nothing is run again.

Method: real runs of pytest over small tests in a folder of their own, and the second look at each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.second_look import MOST, why_not

ROOT = Path(__file__).resolve().parents[2]
BY_CHANCE = """
from pathlib import Path

def test_first_time_never():
    before = Path("before")
    was_here = before.exists()
    before.touch()
    assert was_here

def test_fine():
    assert not Path("alone").exists(), "run again though it passed"
"""
ALWAYS = "def test_wrong():\n    assert 0\n"


def look(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m` with these, in that folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**clean, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def run(folder: Path, tests: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A run in which some fail, and the second look at it."""
    for name, text in tests.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    assert look(folder, "pytest", "-q", "--cache-clear").returncode == 1
    (folder / "alone").touch()
    return look(folder, "tests.support.second_look")


def test_what_passes_alone_is_told_and_does_no_harm(tmp_path: Path) -> None:
    looked = run(tmp_path, {"tests/integration/test_it.py": BY_CHANCE})
    assert looked.returncode == 0, looked.stdout
    assert "FLAKY" in looked.stderr
    assert looked.stderr.count("tests/integration/test_it.py::test_first_time_never") == 2
    assert "test_fine" not in looked.stderr


def test_what_fails_alone_fails(tmp_path: Path) -> None:
    looked = run(tmp_path, {"tests/integration/test_it.py": BY_CHANCE, "tests/client/test_wrong.py": ALWAYS})
    assert looked.returncode == 1
    assert "FLAKY" not in looked.stderr


def test_who_is_skipped_has_not_passed(tmp_path: Path) -> None:
    text = "from pathlib import Path\nimport pytest\ndef test_it():\n    if Path('alone').exists():\n        pytest.skip('no')\n    assert 0\n"
    looked = run(tmp_path, {"tests/integration/test_it.py": text})
    assert looked.returncode == 1
    assert "FLAKY" not in looked.stderr


def test_one_failure_of_a_judge_is_enough(tmp_path: Path) -> None:
    looked = run(tmp_path, {"tests/sim/test_it.py": BY_CHANCE})
    assert looked.returncode == 1
    assert "no second look: one failure of these is enough: tests/sim/test_it.py" in looked.stderr


@pytest.mark.parametrize("folder", ["unit", "sim", "crash", "fuzz", "overload"])
def test_judges(folder: str) -> None:
    assert why_not([f"tests/{folder}/test_it.py::test_a", "tests/integration/test_it.py::test_b"]) is not None


def test_many_are_no_accident() -> None:
    names = [f"tests/integration/test_it.py::test_a[{i}]" for i in range(MOST + 1)]
    assert why_not(names) is not None
    assert why_not(names[:MOST]) is None
    assert why_not([]) is not None
