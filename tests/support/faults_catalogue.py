"""Generates docs/appendix/faults.md from the `fault` marks in tests/: `python -m tests.support.faults_catalogue`
writes it.

Only files that import the mark are collected, and no test is run, so it takes a few seconds.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "appendix" / "faults.md"
MARKER = "tests.support.faults import"

# In the order of the page; every mark must use one of them.
PLACES = {
    "log file": "The write-ahead log of a shard",
    "snapshot": "Snapshots of a shard's state",
    "segment": "Sealed and open segments of a topic",
    "index": "Indexes and dictionaries of segments",
    "layout": "The layout of the data directory",
    "data directory": "The data directory as a whole",
    "disk": "The disk: errors, full, slow, power cuts",
    "clock": "The wall clock",
    "worker": "Workers, one process a shard",
    "front": "Fronts, which speak HTTP",
    "supervisor": "The supervisor",
    "link": "Messages between processes",
    "client": "Clients and their connections",
    "request": "Requests",
    "verify": "`topics verify` and repairs",
}


@dataclass(frozen=True)
class Mark:
    """One `fault` of one test. `test` has no parameters: a row names the test, not its cases."""

    where: str
    what: str
    expected: str
    test: str


@dataclass(frozen=True)
class Row:
    what: str
    expected: str
    tests: tuple[str, ...]


class _Collector:
    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.marks += marks_of(items)


def marks_of(items: Iterable[pytest.Item]) -> list[Mark]:
    found: list[Mark] = []
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        name = getattr(item, "originalname", None) or item.name
        found += [Mark(**mark.kwargs, test=f"{path}::{name}") for mark in item.iter_markers("fault")]
    return found


def marked_files() -> list[Path]:
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKER in path.read_text("utf-8")]


def collect() -> list[Mark]:
    """All marks, from a pytest collection in this process, which should use pytest for nothing else."""
    collector, printed = _Collector(), io.StringIO()
    # No assertion rewriting: nothing runs, and rewriting takes most of the time.
    options = ["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with contextlib.redirect_stdout(printed):
        code = pytest.main([*options, f"--rootdir={ROOT}", *map(str, marked_files())], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected:\n{printed.getvalue()}")
    return collector.marks


def rows_by_place(marks: Iterable[Mark]) -> dict[str, list[Row]]:
    """Sorted rows of each place. Raises ValueError for marks that the page cannot show."""
    expected: dict[tuple[str, str], str] = {}
    tests: dict[tuple[str, str], set[str]] = {}
    for mark in marks:
        if mark.where not in PLACES:
            raise ValueError(f"{mark.test}: {mark.where!r} is none of {', '.join(PLACES)}")
        if not mark.what.strip() or not mark.expected.strip() or "\n" in mark.what + mark.expected:
            raise ValueError(
                f"{mark.test}: a fault needs one line of what goes wrong and one of what is expected"
            )
        key = mark.where, mark.what
        if expected.setdefault(key, mark.expected) != mark.expected:
            others = ", ".join(sorted(tests[key]))
            raise ValueError(f"{mark.test} and {others} expect different things when {mark.what!r}")
        tests.setdefault(key, set()).add(mark.test)
    found: dict[str, list[Row]] = {place: [] for place in PLACES}
    for (where, what), names in sorted(tests.items()):
        found[where].append(Row(what, expected[where, what], tuple(sorted(names))))
    return {place: rows for place, rows in found.items() if rows}


def page(rows: dict[str, list[Row]]) -> str:
    count = sum(len(found) for found in rows.values())
    tests = {name for found in rows.values() for row in found for name in row.tests}
    parts = [
        "# Fault catalogue",
        "",
        f"**{count} faults, shown by {len(tests)} tests.** Each row names one fault, what users see of it, and the tests that inject it. "
        "Two rules hold in every row: the server never serves a record that was changed or made up, and an acknowledged "
        "record is never lost silently, unless the row says so.",
        "",
        "*Announced*: readers get a tombstone with the exact range of seqs and the reason. *Read-only*: reads go on, writes are "
        "refused with the reason, and `/readyz` says so; while the end of the log is missing, no read reports that it has caught "
        "up. *Refused*: the shard or server does not start, names the file, and changes nothing.",
        "",
        "This page is generated from the `fault` marks of the tests, and a test compares the two. To generate it again:",
        "",
        "<!-- not run: it makes this page; tests/integration/test_faults_catalogue.py compares the two -->",
        "```bash",
        ".venv/bin/python -m tests.support.faults_catalogue",
        "```",
        "",
    ]
    parts += [
        f"- [{PLACES[place]}](#{_anchor(PLACES[place])}): {len(found)}" for place, found in rows.items()
    ]
    for place, found in rows.items():
        parts += [
            "",
            f"## {PLACES[place]}",
            "",
            "| What goes wrong | What users see | Shown by |",
            "|---|---|---|",
        ]
        parts += [f"| {_cell(row.what)} | {_cell(row.expected)} | {_shown(row.tests)} |" for row in found]
    return "\n".join(parts) + "\n"


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shown(tests: tuple[str, ...]) -> str:
    """`path::name`; the path is not repeated for further tests of the same file."""
    shown: list[str] = []
    last = ""
    for test in tests:
        path, _, name = test.partition("::")
        shown.append(f"`{name}`" if path == last else f"`{test}`")
        last = path
    return ", ".join(shown)


def main(arguments: list[str]) -> int:
    text = page(rows_by_place(collect()))
    if arguments == ["--print"]:
        sys.stdout.write(text)
    elif arguments:
        print("usage: python -m tests.support.faults_catalogue [--print]", file=sys.stderr)
        return 2
    else:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
