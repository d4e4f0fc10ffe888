"""`topics du` and `topics inspect` on the data of a real server with a cold directory, while it runs and after it has stopped.

Goal: both work while records are written, deleted and relocated, without tracebacks and without disturbing the server; on a stopped
server they agree with the file system and with `topics verify`. Method: a server with segments of 10 records
that relocates sealed segments, a writer in the background, and both commands, once as a separate program.
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

from tests.support.contract import ok
from tests.support.in_process import call
from tests.support.merger import Merger
from tests.support.server import ROOT, Server, until
from topics.cli import commands
from topics.cli.disk_usage import disk_usage
from topics.cli.inspect_file import look
from workers import verify
from workers.shard.local_store import LocalSegmentStore


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
    done = call(commands.run, *arguments)
    assert "Traceback" not in done.stderr
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def run_program(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "topics.cli", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
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
        text = run_program("du", server.data_dir, "--cold-dir", cold(server))
        assert "cold data" in text and " free" in text
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


def test_with_jobs_and_producers_at_work(server: Server) -> None:
    """A merged generation beside the old ones, a pin, a plan with outputs, a transaction with chunks, dead rows in both tiers."""
    fill(server, "a", 100)
    move(server)
    ok(server.post("/v0/topics/a/delete", {"seqs": [3, 44]}))
    ok(server.post("/v0/topics/a/snapshots"))
    for _ in range(2):
        plan = ok(server.post("/v0/topics/a/consolidation", {"min_garbage": 0.001}))
        Merger(LocalSegmentStore(str(cold(server)), 99), plan).run()
        path = f"/v0/topics/a/consolidation/{plan['plan_id']}"
        if status_of(server)["retired_segments"] == 0:
            ok(server.post(f"{path}/commit", {"lease": plan["lease"], "wait_ms": 30_000}))
            ok(server.post("/v0/topics/a/delete", {"seqs": [*range(5, 12), 99]}))
    path = "/v0/topics/sunk/transactions"
    txn = ok(server.post(path, {"producer": "p", "batch": 1}))["txn"]
    for chunk in range(3):
        body = {"part": "a", "chunk": chunk, "records": [{"data": chunk}] * 5}
        ok(server.post(f"{path}/{txn}/stage", body))
    for state in ("live", "stopped"):
        until(lambda: all_sound(server))
        told: Any = json.loads(run("du", server.data_dir, "--cold-dir", cold(server), "--json"))
        sizes = {kind["kind"]: kind["bytes"] for kind in told["kinds"]}
        assert all(sizes[kind] for kind in ("staging", "transactions", "manifests", "cold data")), sizes
        assert told["problems"] == []
        if state == "live":
            assert "is in use" in refused_by(server)
            assert server.stop() == 0
    kinds = {look(str(path), 3, None, str(cold(server))).kind for path in files(cold(server))}
    assert {"manifest", "dead-rows", "current", "pin", "plan", "sidecar", "output", "marks"} <= kinds
    verified = json.loads(run("verify", server.data_dir, "--cold-dir", cold(server), "--json"))
    assert verified["sound"] and sum(shard["records"] for shard in verified["shards"]) == 90


def status_of(server: Server) -> Any:
    return ok(server.get("/v0/topics/a/consolidation"))


def all_sound(server: Server) -> bool:
    for path in [*files(server.data_dir), *files(cold(server))]:
        try:
            found = look(str(path), 3, None, str(cold(server)))
        except FileNotFoundError:
            continue  # a checkpoint has removed it since it was listed
        assert found.sound or not path.exists(), (path, found.problems)
    return True


def refused_by(server: Server) -> str:
    done = call(verify.main, server.data_dir)
    assert done.returncode == 3
    return done.stderr


def test_damage_of_a_stopped_server_is_reported_with_its_place(server: Server) -> None:
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
