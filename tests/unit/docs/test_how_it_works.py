"""The files that the pages name exist, and so do the functions that docs/how-it-works.md names."""

from __future__ import annotations

import ast
import functools
import re

from tests.support.pages import pages
from tests.support.server import ROOT

FOLDERS = "topics|workers|router|spark_pipeline|tests|scripts|deploy|docs"
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./-]+\.(?:py|md|patch|toml|ya?ml|svg|service|example))`")


def test_every_file_that_a_page_names_is_there() -> None:
    missing = [
        f"{page}: {path}"
        for page in pages()
        for path in NAMED.findall((ROOT / page).read_text())
        if not (ROOT / path).exists()
    ]
    assert missing == []


@functools.cache
def names_in(path: str) -> set[str]:
    """Functions, classes, and methods as `Class.method`, including those inherited from classes of the same file."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{one.name}" for one in members}
    return found


def test_every_function_of_the_tour_is_where_it_says() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    steps = re.findall(r"^\| `(\S+\.py)` \| (`[^|]+`) \|", page, flags=re.MULTILINE)
    steps += [(path, f"`{name}`") for name, path in re.findall(r"`([\w.]+)` (?:in|of) `(\S+\.py)`", page)]
    assert len(steps) > 50
    missing = [
        f"{path}: {name}"
        for path, names in steps
        for name in re.findall(r"`([\w.]+)`", names)
        if name not in names_in(path)
    ]
    assert missing == []
