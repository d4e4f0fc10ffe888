"""docs/cli.md is run as it stands, in one shell with a server of its own, and prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.server import ROOT, Server


def without_times(text: str) -> list[str]:
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", text)
    text = re.sub(r"http://127.0.0.1:\d{4,5}\b", "http://SERVER", text)
    return re.sub(r'"\$ts":\d{13}\b', '"$ts":0', text).splitlines()


def test_the_page_prints_what_it_shows(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(shards=1)
    page = (ROOT / "docs" / "cli.md").read_text()
    blocks = re.findall(r"^```(bash|text)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    scripts = [text for kind, text in blocks if kind == "bash"]
    shown = "".join(text for kind, text in blocks if kind == "text")
    assert [kind for kind, _ in blocks] == ["bash", "text"] * len(scripts)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    ours = {
        "TOPICS_URL": f"http://{server.host}:{server.port}",
        "TOPICS_CONFIG": str(tmp_path / "contexts.json"),
        "PYTHONPATH": str(ROOT),
    }
    command = f'topics() {{ "{sys.executable}" -m topics.cli "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command + "\n".join(scripts)],
        cwd=tmp_path,
        env={**clean, **ours},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert without_times(done.stdout) == without_times(shown)
