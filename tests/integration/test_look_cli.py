"""`topics du` and `topics inspect` on the data of a real server with a cold directory, while it runs and after its stop.

Goal: both answer while records are written, deleted and moved, without a traceback and without getting in the way; on
what lies still they agree with the file system and with `topics verify`. Method: a server with segments of 10 records
that moves what is sealed, a writer in the background, and both commands as users run them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ROOT, Server, until
from topics.cli.inspecting import look
from topics.disk_usage import disk_usage


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    environment = {
        "TOPICS_COLD_DIR": str(tmp_path / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
    }
    server = Server(tmp_path, environment=environment, shards=2).start()
    yield server
    server.close()


def run(*arguments: str | Path, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "topics.cli", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def fill(server: Server, topic: str, count: int = 60) -> None:
    reply = server.write(topic, *[{"n": n, "pad": "." * 600} for n in range(count)])
    assert reply.status in (200, 201), reply.body


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def cold(server: Server) -> Path:
    return server.folder / "cold"


def move(server: Server) -> None:
    assert server.stop() == 0
    server.start()
    until(lambda: len(list(cold(server).rglob("*.data"))) >= 8)


def test_on_a_running_server_and_after_its_stop(server: Server) -> None:
    for topic in ("a", "b"):
        fill(server, topic)
    move(server)
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            fill(server, "ab"[n % 2], 20)
            if n % 5 == 4:
                server.post(f"/v0/topics/{'ab'[n % 2]}/delete", {"before_seq": n * 3})
            n += 1
            stop.wait(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        text = run("du", server.data_dir, "--cold-dir", cold(server))
        assert "cold data" in text and "are free" in text
        for _ in range(20):
            usage = disk_usage(str(server.data_dir), str(cold(server)))
            assert usage.problems == []
            assert {"a", "b"} <= {topic.name for topic in usage.topics}
        looked = 0
        for path in files(server.data_dir):
            try:
                found = look(str(path), 3, None, str(cold(server)))
            except FileNotFoundError:
                continue  # a checkpoint has removed it since it was listed
            assert found.sound or not path.exists(), found.problems
            looked += 1
        assert looked > 10
    finally:
        stop.set()
        writer.join()
    assert server.stop() == 0

    told: Any = json.loads(run("du", server.data_dir, "--cold-dir", cold(server), "--json"))
    assert told["hot_bytes"] == sum(path.stat().st_size for path in files(server.data_dir))
    assert told["cold_bytes"] == sum(path.stat().st_size for path in files(cold(server)))
    assert sum(kind["bytes"] for kind in told["kinds"]) == told["hot_bytes"] + told["cold_bytes"]
    verified = json.loads(run("verify", server.data_dir, "--cold-dir", cold(server), "--json"))
    assert sum(t["records"] for t in told["topics"]) == sum(s["records"] for s in verified["shards"])
    kinds = set()
    for path in [*files(server.data_dir), *files(cold(server))]:
        found = look(str(path), 3, None, str(cold(server)))
        assert found.sound, (path, found.problems)
        kinds.add(found.kind)
    assert {"segment", "log", "snapshot", "layout", "cold-id", "lock"} <= kinds


def test_damage_of_a_stopped_server_is_told_with_its_place(server: Server) -> None:
    fill(server, "a")
    assert server.stop() == 0
    path = next(path for path in files(server.data_dir / "topics") if path.suffix == ".data")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    told = json.loads(run("inspect", path.with_suffix(".idx"), "--json", expect=1))
    assert {problem["path"] for problem in told["problems"]} == {str(path)}
    assert not told["sound"]
    text = run("inspect", path, "--records", "1", expect=1)
    assert f"problem: {path} at byte " in text
    run("inspect", expect=2)
    run("inspect", server.data_dir / "absent", expect=3)
