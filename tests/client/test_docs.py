"""The page about the client, and what the README says of it, are run as they stand, and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ROOT
from topics.testing import TestServer


def steps(page: Path) -> list[tuple[str, str]]:
    """Blocks of Python, and what the block of text after each says that it prints."""
    text = page.read_text()
    if page.name == "README.md":
        text = text.split("\n## Python\n", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    found: list[tuple[str, str]] = []
    for language, block in blocks:
        if language == "python":
            found.append((block, ""))
        else:
            found[-1] = (found[-1][0], block)
    return found


@pytest.mark.parametrize("page", ["docs/client.md", "README.md"])
def test_a_page_prints_what_it_shows(page: str, server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_URL", server.url)
    monkeypatch.setenv("TOPICS_TOKEN", server.token)
    names: dict[str, Any] = {"__name__": "page"}
    found = steps(ROOT / page)
    assert found
    for script, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(script, page, "exec", dont_inherit=True), names)
        lines = printed.getvalue().splitlines()
        if '.>"' in script and "tail(" in script:  # no order holds between topics
            lines[:4] = sorted(lines[:4])
        assert lines == shown.splitlines(), script
    if "client" in names:
        names["client"].close()
