"""Goal: docs/appendix/faults.md lists exactly the faults that tests are marked with.

Method: the page is generated from the marks and compared with the one in the repository. A run of all tests has already collected the
marks; a partial run collects them in a separate process. The rules about marks are tested with invented marks.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.faults_catalogue import (
    PAGE,
    PLACES,
    ROOT,
    Mark,
    marked_files,
    marks_of,
    page,
    rows_by_place,
)

FEWEST_ROWS = 120


@pytest.fixture(scope="module")
def generated(request: pytest.FixtureRequest) -> str:
    options = request.config.option
    collected = {item.path for item in request.session.items}
    if not options.keyword and not options.markexpr and collected.issuperset(marked_files()):
        return page(rows_by_place(marks_of(request.session.items)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.faults_catalogue", "--print"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_is_generated_from_the_marks(generated: str) -> None:
    assert PAGE.read_text("utf-8") == generated, "run: python -m tests.support.faults_catalogue"


def test_there_are_enough_faults(generated: str) -> None:
    titles = {f"## {title}" for title in PLACES.values()}
    lines = generated.splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| What goes wrong |")]
    assert len(rows) >= FEWEST_ROWS
    assert f"**{len(rows)} faults" in generated
    assert {line for line in lines if line.startswith("## ")} <= titles


MARK = Mark("disk", "it burns", "the server says so", "tests/a.py::test_b")


def test_marks_of_one_fault_are_one_row() -> None:
    other = Mark(MARK.where, MARK.what, MARK.expected, "tests/a.py::test_a")
    rows = rows_by_place([MARK, other, MARK])
    assert [row.tests for row in rows["disk"]] == [("tests/a.py::test_a", "tests/a.py::test_b")]
    assert "| it burns | the server says so | `tests/a.py::test_a`, `test_b` |" in page(rows)


def test_rows_do_not_depend_on_the_order_of_the_marks() -> None:
    marks = [Mark("disk", f"fault {i}", "seen", f"tests/{i % 3}.py::test") for i in range(9)]
    marks.append(Mark("clock", "z", "seen", "tests/a.py::test"))
    assert page(rows_by_place(marks)) == page(rows_by_place(marks[::-1]))


@pytest.mark.parametrize(
    "wrong",
    [
        Mark("disk", "it burns", "nothing", "tests/c.py::test"),
        Mark("kitchen", "it burns", "the server says so", "tests/c.py::test"),
        Mark("disk", " ", "the server says so", "tests/c.py::test"),
        Mark("disk", "it drowns", "two\nlines", "tests/c.py::test"),
    ],
    ids=["disagrees", "unknown place", "empty", "several lines"],
)
def test_marks_that_make_no_page_are_refused(wrong: Mark) -> None:
    with pytest.raises(ValueError, match=r"tests/c\.py::test"):
        rows_by_place([MARK, wrong])
