"""Goal: scripts/serve of this checkout starts a server, as for a new user.

Method: the script itself in its own environment, whose packages come from the package index on the first run.
"""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

from tests.support.server import ROOT, Server, is_alive, until

VENV = ROOT / ".venv"


def is_current(stamp: Path) -> bool:
    wanted = [hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(), str(ROOT)]
    return stamp.exists() and all(text in stamp.read_text() for text in wanted)


# Otherwise the script would update the environment while other tests use it.
pytestmark = pytest.mark.skipif(
    not any(is_current(VENV / name) for name in (".topics-stamp", ".topics-server-stamp")),
    reason="there is no up-to-date .venv; scripts/test creates it",
)


def test_serve_serves_and_stops(tmp_path: Path) -> None:
    server = Server(tmp_path, command=["./scripts/serve", "--shards", "1"])
    try:
        server.start()
        assert server.write("orders", {"item": "tea"}).status == 201
        children = list(server.children().values())
        assert len(children) == 2
        assert server.stop(number=signal.SIGINT) == 0, server.log  # Ctrl-C
        until(lambda: not any(is_alive(pid) for pid in children))

        server.start()
        [record] = server.diff("orders").json["records"]
        assert record["data"] == {"item": "tea"}
        assert server.stop() == 0, server.log
        assert "setting up" not in server.log
    finally:
        server.close()
