"""Goal: a server that is forked from the fork server behaves like one that is started as a program.

Method: both are started, used, refused, stopped and killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.server import PROGRAM, Server, is_alive

TWO_WAYS = pytest.mark.parametrize("command", [(), PROGRAM], ids=["forked", "started"])


@TWO_WAYS
def test_it_is_a_server(start_server: Callable[..., Server], command: tuple[str, ...]) -> None:
    server = start_server(command=command)
    process = server.process
    assert process is not None and process.poll() is None
    assert sorted(server.children()) == ["front 0", "shard 0", "shard 1"]
    title = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0 ")
    assert title == b"topics: supervisor"
    log = os.readlink(f"/proc/{process.pid}/fd/2")
    assert log == os.readlink(f"/proc/{process.pid}/fd/1") == str(server.log_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert server.stop() == 0
    assert process.poll() == 0 == process.wait()
    process.send_signal(signal.SIGTERM)  # has no effect: the process has ended
    assert "stopped" in server.log


@TWO_WAYS
def test_its_exit_is_reported(start_server: Callable[..., Server], command: tuple[str, ...]) -> None:
    server = start_server(command=command)
    assert server.process is not None
    children = server.children().values()
    server.kill()
    assert server.process.returncode == -signal.SIGKILL
    assert not any(is_alive(pid) for pid in children)
    with pytest.raises(AssertionError, match="ended with 2"):
        start_server(command=command, environment={"TOPICS_HOST": "0.0.0.0"})


def test_servers_share_no_state(start_server: Callable[..., Server]) -> None:
    one = start_server(environment={"TOPICS_MAX_TOPICS": "7"}, shards=1)
    other = start_server(shards=1)
    for i in range(8):
        assert other.write(f"t{i}", 1).status == 201
        assert one.write(f"t{i}", 1).status == (201 if i < 7 else 429)
