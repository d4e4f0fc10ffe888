"""A real server with a cold directory: segments are relocated there and read from there, whatever process dies meanwhile.

Goal: readers see no change, `cold_segments_read` counts reads of the cold tier, an erased payload is in no file of
either directory, `topics verify` checks both, and a cold disk that takes 2 s per call delays only its own readers.
Method: segments of 10 records, restarts that make checkpoints, kill -9 during relocation, and failpoints
that make the cold directory slow or fail.
"""

from __future__ import annotations

import json
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.contract import ok
from tests.support.faults import fault
from tests.support.in_process import call
from tests.support.server import Server, until
from workers import verify

COUNT = 100
SLOW_MS = 10_000
PAD = "." * 600
SECRET = "the secret that nobody may find again: 4711-0815"


def tiered(folder: Path) -> Server:
    points = folder / "cold-points"
    points.mkdir()
    environment = {
        "TOPICS_COLD_DIR": str(folder / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_COLD_FAILPOINTS": str(points),
        "TOPICS_COLD_CACHE_BYTES": "0",  # every read goes to the cold tier
    }
    return Server(folder, environment=environment, shards=1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = tiered(tmp_path).start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def relocated_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stopped server that has relocated all it could: to be copied."""
    server = tiered(tmp_path_factory.mktemp("relocated")).start()
    try:
        fill(server)
        relocate_all(server)
        assert server.stop() == 0
    finally:
        server.close()
    return server.folder


@pytest.fixture
def relocated(relocated_folder: Path, tmp_path: Path) -> Iterator[Server]:
    """A server on a copy of it."""
    for name in ("data", "cold"):
        shutil.copytree(relocated_folder / name, tmp_path / name)
    server = tiered(tmp_path).start()
    yield server
    server.close()


def test_files_are_readable_by_their_owner_only(relocated_folder: Path) -> None:
    made = [path for name in ("data", "cold") for path in (relocated_folder / name).rglob("*")]
    assert any(path.suffix == ".data" for path in (relocated_folder / "cold").rglob("*"))
    modes = {str(path.relative_to(relocated_folder)): stat.S_IMODE(path.stat().st_mode) for path in made}
    assert {name: oct(mode) for name, mode in modes.items() if mode not in (0o600, 0o700)} == {}
    assert stat.S_IMODE((relocated_folder / "cold").stat().st_mode) == 0o700


def fill(server: Server) -> None:
    ok(server.put("/v0/topics/t", {"durability": "fsync"}), 201)
    for first in range(1, COUNT + 1, 20):
        data = [{"n": n, "pad": SECRET if n == 7 else PAD} for n in range(first, first + 20)]
        ok(server.write("t", *data), 200)


def cold_data(server: Server) -> list[str]:
    return sorted(path.name for path in (server.folder / "cold").rglob("*.data"))


def hot_data(server: Server) -> list[str]:
    return sorted(path.name for path in (server.data_dir / "topics").rglob("*.data"))


def restart(server: Server) -> None:
    """With the checkpoint that a stop makes."""
    assert server.stop() == 0
    server.start()


def relocate_all(server: Server) -> None:
    """Wait until the hot tier has removed relocated segments: two snapshots must say that they are cold."""
    restart(server)
    until(lambda: len(cold_data(server)) == 9)
    until(lambda: server_moves(server) == 9)
    for _ in range(3):
        restart(server)
        read(server)  # the first use of the topic finds remaining files
    assert len(hot_data(server)) == 1


def server_moves(server: Server) -> int:
    text = server.get("/v0/metrics").body.decode()
    return int(
        next(line for line in text.splitlines() if line.startswith("topics_relocations_total")).split()[1]
    )


def diff(server: Server, **body: Any) -> Any:
    reply = server.post("/v0/topics/t/diff", {"limit": 1000, "max_bytes": 8 << 20, **body})
    assert reply.status == 200, reply.body
    return reply.json


def read(server: Server) -> list[int]:
    """Read everything in pages: one page reads at most eight cold segments."""
    found: list[int] = []
    cursor = 0
    while True:
        page = diff(server, from_seq=cursor)
        assert page["tombstone"] is None
        found += [record["data"]["n"] for record in page["records"]]
        if page["caught_up"]:
            return found
        cursor = page["next_from_seq"]


def holders(server: Server) -> list[str]:
    roots = (server.data_dir, server.folder / "cold")
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return [str(path) for path in files if SECRET.encode() in content(path)]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # a manifest that was just replaced
        return b""


def test_segments_move_are_read_and_are_erased(relocated: Server) -> None:
    server = relocated
    assert read(server) == list(range(1, COUNT + 1))
    assert diff(server)["performance"]["cold_segments_read"] == 8
    assert "cold_segments_read" not in diff(server, from_seq=92)["performance"]
    metrics = server.get("/v0/metrics").body.decode()
    assert 'topics_segment_bytes_live{tier="cold"}' in metrics
    assert int(metrics.split('topics_segment_bytes_live{tier="cold"} ')[1].split()[0]) > 50_000

    assert holders(server)
    assert ok(server.post("/v0/topics/t/delete", {"seqs": [7], "erase": True}), 200)["deleted"] == 1
    assert holders(server) == []
    assert read(server) == [n for n in range(1, COUNT + 1) if n != 7]
    server.kill()
    server.start()
    assert read(server) == [n for n in range(1, COUNT + 1) if n != 7]
    assert holders(server) == []

    assert server.stop() == 0
    found = call(verify.main, server.data_dir, "--json", "--cold-dir", server.folder / "cold")
    report = json.loads(found.stdout)
    assert (found.returncode, report["sound"], report["shards"][0]["records"]) == (0, True, COUNT - 1)
    assert call(verify.main, server.data_dir, "--json").returncode == 3


@fault(
    "worker",
    "a worker is killed while segments are relocated to the cold tier",
    "every record can be read afterwards, and the relocation completes",
)
def test_kill_while_segments_move(server: Server) -> None:
    fill(server)
    places = ["other.sync.after", "segment.rename.before", "index.rename.after", "segment.open.before"]
    lines = [f"{place} kill nth={i + 1}" for i, place in enumerate(places)]
    (server.folder / "cold-points" / "points").write_text("\n".join(lines) + "\n")
    restart(server)  # the stop seals the segments, the start relocates them
    until(lambda: all(place in fired(server) for place in places))
    server.wait_ready()
    assert read(server) == list(range(1, COUNT + 1))
    until(lambda: len(cold_data(server)) == 9)
    server.kill()
    server.start()
    assert read(server) == list(range(1, COUNT + 1))


def fired(server: Server) -> str:
    path = server.folder / "cold-points" / "fired"
    return path.read_text() if path.exists() else ""


@fault(
    "disk",
    "the cold tier takes 10 s per call",
    "reads of old records take that long; writes, reads of new records and long polls are not slower",
)
def test_a_slow_cold_tier_slows_history_and_nothing_else(relocated: Server) -> None:
    """Several rounds of writes and reads end while one cold segment is opened."""
    server = relocated
    points = server.folder / "cold-points" / "points"
    points.write_text(f"segment.open.before slow ms={SLOW_MS}\n")
    done: list[float] = []
    history = threading.Thread(target=lambda: (diff(server, limit=1), done.append(time.monotonic())))
    began = time.monotonic()
    history.start()
    for _ in range(5):
        seq = ok(server.write("t", {"n": 0}), 200)["head_seq"]
        page = diff(server, from_seq=seq - 1, wait_ms=1000)
        assert [record["$seq"] for record in page["records"]] == [seq]
        assert not done, "writes or reads of new records waited for the cold tier"
    history.join()
    assert done[0] - began >= SLOW_MS / 1000, "the failpoint was not reached"
    points.unlink()
    assert read(server) == [*range(1, COUNT + 1), *[0] * 5]
    assert server.stop() == 0


def test_a_missing_cold_directory_is_reported_until_it_is_back(relocated: Server) -> None:
    server = relocated
    away = server.folder / "unmounted"
    (server.folder / "cold").rename(away)
    reply = server.post("/v0/topics/t/diff", {"from_seq": 0})
    assert (reply.status, reply.error["code"], reply.error["detail"]["tier"]) == (503, "not_ready", "cold")
    assert [r["data"]["n"] for r in diff(server, from_seq=92)["records"]] == list(range(93, COUNT + 1))
    ok(server.write("t", {"n": 0}), 200)
    restart(server)
    assert server.post("/v0/topics/t/diff", {"from_seq": 0}).status == 503
    for path in sorted((server.folder / "cold").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (server.folder / "cold").rmdir()
    away.rename(server.folder / "cold")
    assert read(server)[:COUNT] == list(range(1, COUNT + 1))


def test_appends_end_while_there_is_still_space(tmp_path: Path) -> None:
    points = tmp_path / "points"
    points.mkdir()
    server = Server(tmp_path, environment={"TOPICS_FAILPOINTS": str(points)}, shards=1).start()
    try:
        ok(server.write("t", 1), 201)
        (points / "free_bytes").write_text("1000")
        until(lambda: server.write("t", 2).status == 429)
        error = server.write("t", 2).error
        assert error["detail"]["limit"] == "disk_full"
        until(lambda: b"topics_disk_full 1" in server.get("/v0/metrics").body)
        ok(server.post("/v0/topics/t/delete", {"seqs": [1]}), 200)
        (points / "free_bytes").unlink()
        until(lambda: server.write("t", 3).status == 200)
    finally:
        server.close()
