"""The README's tour works when pasted: it is taken from the page, run against a real server, and prints what it shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import ROOT, Server

TOUR = (ROOT / "README.md").read_text().split("\n## Tour\n", 1)[1].split("\n## ", 1)[0]


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", TOUR, flags=re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return found[0]


def without_times(text: str) -> str:
    text = re.sub(r'"performance":\{[^}]*\}', '"performance":…', text)
    text = re.sub(r'"effective_priority":\d+', '"effective_priority":…', text)
    return re.sub(r'"\$ts":\d{13}\b', '"$ts":…', text)


def run_tour(address: str) -> str:
    script = block("bash").replace("127.0.0.1:4000", address)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="the tour needs curl")
def test_the_tour_prints_what_it_shows(start_server) -> None:  # type: ignore[no-untyped-def]
    server = start_server()
    assert without_times(run_tour(f"{server.host}:{server.port}")) == without_times(block("text"))


def write_page(folder: Path) -> None:
    """Put what the tour prints now into the page: `python -m tests.integration.test_readme_tour`."""
    server = Server(folder).start()
    try:
        printed = run_tour(f"{server.host}:{server.port}")
    finally:
        server.close()
    page = ROOT / "README.md"
    page.write_text(page.read_text().replace(block("text"), printed))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_page(Path(folder))
    sys.exit(0)
