"""topics.testing: the server and the fixtures for users' own tests."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ROOT
from topics.testing import TestServer, running_server

CONFTEST = "from topics.testing.fixtures import topics_client, topics_server\n"
TESTS = """
def test_one(topics_client):
    assert topics_client.write("t", 1).first_seq == 1

def test_two(topics_client, topics_server):
    assert topics_client.write("t", 2).first_seq == 2
    assert topics_server.url == topics_client.url
"""


def test_users_have_fixtures(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TESTS)
    (tmp_path / "workers").mkdir()  # must not hide the installed package
    (tmp_path / "workers" / "__main__.py").write_text("raise SystemExit(9)")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--noconftest",
            "-p",
            "conftest",
            "test_mine.py",
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="unknown scope"),
        running_server(tmp_path, environment={"TOPICS_API_KEYS": "secret:nonsense"}),
    ):
        raise AssertionError("the server has started")


def test_closing_a_client_wakes_its_readers(server: TestServer, connect: Any, topic: str) -> None:
    client = connect(server.url)
    client.create_topic(topic)
    ended: list[BaseException] = []
    tail = client.tail(topic).__enter__()

    def read() -> None:
        try:
            next(tail)
        except RuntimeError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    client.close()
    reader.join(60)
    assert "closed" in str(ended[0])


def test_closing_a_tail_ends_the_iteration_elsewhere(client: Any, topic: str) -> None:
    client.create_topic(topic)
    tail = client.tail(topic).__enter__()
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(list(tail)))
    reader.start()
    tail.close()
    reader.join(60)
    assert found == [[]]
