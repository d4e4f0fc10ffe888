"""Goal: a server that is started with another number of shards serves everything that the one before did, also if it was killed meanwhile.

Method: one server is filled over HTTP with records, leased jobs, consumers, routers, watch sessions and idempotency keys, and is
then started with 5, 1 and 3 shards; clients continue with their leases and cursors. The resharding process is killed at named
points, alone and together with the supervisor, and the next start must find everything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import consumer_client, queue_client, router_client
from tests.support.contract import Json, data_of, ok, state_of
from tests.support.faults import fault
from tests.support.in_process import call
from tests.support.length import pick
from tests.support.server import ROOT, Server, until
from tests.support.sse_client import open_stream, read_id, watch
from workers import verify

TOPICS = [f"t{i}" for i in range(12)]
LEASE_MS = 600_000


def fill(server: Server) -> dict[str, Any]:
    """Use all features; returns what clients hold: leases, cursors, ids."""
    for i, topic in enumerate(TOPICS):
        durability = ("fsync", "disk", "memory")[i % 3]
        ok(
            server.put(f"/v0/topics/{topic}", {"durability": durability, "idempotency_window_ms": LEASE_MS}),
            201,
        )
        ok(server.write(topic, *range(30), idempotency_key="first"))
    ok(server.put("/v0/topics/capped", {"cap_records": 4, "durability": "fsync"}), 201)
    ok(server.write("capped", *range(9)))
    ok(server.post("/v0/topics/t0/delete", {"seqs": [3, 5]}))
    queue_client.make_queue(
        server, "jobs", *range(6), durability="fsync", leases_durable=True, lease_ms=LEASE_MS,
        max_deliveries=1, dead_letter="dead",
    )  # fmt: skip
    jobs = queue_client.claim(server, "jobs", 3)
    consumer_client.make(server, "t0", ack_wait_ms=LEASE_MS)
    fetched = consumer_client.fetch(server, "t0", 4)
    router_client.make(server, "one", "t0", "copies")
    router_client.make(server, "all", "p.>", "everything")
    for i in range(4):
        ok(server.write(f"p.{i}", "a", "b"), 201)
    ok(server.write("t0", "copied"))
    assert len(data_of(server, "everything")) == 8  # a read waits for the routers
    session = watch(server, {"t1": {"from_seq": 0}}, limit=10)
    stream = open_stream(server, session)
    seen = stream.until_caught_up(1)
    stream.close()
    assert seen[-1].data["head_seq"] == 30
    return {"jobs": jobs, "fetched": fetched, "session": session, "seen": read_id(seen[-1].id or "")}


def picture(server: Server) -> Json:
    """What readers see, except times of the last read, which a restart may change."""
    rows = ok(server.get("/v0/topics?limit=1000"))["topics"]
    found: Json = {
        "topics": [(row["topic"], row["count"], row["head_seq"], row["earliest_seq"]) for row in rows]
    }
    for row in rows:
        page = ok(server.diff(row["topic"], from_seq=0, limit=1000, include_tags=True))
        found[row["topic"]] = (page["records"], page.get("tombstone"))
    found["consumer"] = {
        name: value
        for name, value in consumer_client.look(server, "t0").items()
        if name not in ("lag_ms", "last_activity_ts", "waiting")
    }
    found["queue"] = state_of(server, "jobs")["queue"]
    found["routers"] = router_client.listed(server)
    return found


def restart(server: Server, shards: int) -> None:
    assert server.stop() == 0
    server.shards = shards
    server.start()


def test_two_five_one_three(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_VERIFY": "1"})
    held = fill(server)
    before = picture(server)
    for generation, shards in enumerate((5, 1, 3), 2):
        restart(server, shards)
        layout = json.loads((server.data_dir / "layout.json").read_text())
        assert layout == {"format": 2, "generation": generation, "shards": shards}
        assert sorted(path.name for path in server.data_dir.glob("layout-*")) == [f"layout-{generation}"]
        assert len([name for name in server.children() if name.startswith("shard")]) == shards
        assert picture(server) == before
        again = ok(server.write("t0", *range(30), idempotency_key="first"))
        assert again["deduped"] is True
    go_on(server, held)
    assert server.stop() == 0
    assert verified(server) == 0


def go_on(server: Server, held: dict[str, Any]) -> None:
    """Clients continue with their leases, cursors and keys."""
    mine = held["jobs"]
    assert not set(queue_client.seqs_of(queue_client.claim(server, "jobs", 10))) & set(
        queue_client.seqs_of(mine)
    )
    done = queue_client.settle(server, "jobs", "ack", [mine[0]["$seq"]], lease_ids=[mine[0]["lease_id"]])
    assert done["acked"] == 1
    ok(queue_client.call(server, "jobs", "nack", seqs=[mine[1]["$seq"]], kind="dead"))
    until(lambda: server.get("/v0/topics/dead").status == 200 and len(data_of(server, "dead")) == 1)
    acked = consumer_client.settle(server, "t0", "ack", [held["fetched"][0]["$seq"]])
    assert acked["acked"] == 1
    ok(server.write("p.1", "c"))
    ok(server.write("p.new", "d"), 201)
    assert sorted(data_of(server, "everything")) == ["a"] * 4 + ["b"] * 4 + ["c", "d"]
    assert data_of(server, "copies") == ["copied"]
    ok(server.write("t1", "later"))
    stream = open_stream(server, held["session"])
    frames = stream.until_caught_up(1)
    stream.close()
    records = [record for frame in frames if frame.event == "record" for record in frame.data["records"]]
    assert [record["$seq"] for record in records] == [31], "the session continued at its cursor"


def verified(server: Server) -> int:
    done = call(verify.main, server.data_dir)
    assert "damage" not in done.stdout, done.stdout
    return done.returncode


# -- kills -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped_copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Json]:
    """A data directory of a stopped server, to be copied, and its picture."""
    folder = tmp_path_factory.mktemp("filled")
    server = Server(folder).start()
    try:
        fill(server)
        before = picture(server)
        assert server.stop() == 0
    finally:
        server.close()
    return folder, before


def copy_of(filled: Path, folder: Path) -> Server:
    subprocess.run(["cp", "-a", str(filled / "data"), str(folder / "data")], check=True)
    (folder / "points").mkdir()
    return Server(folder, environment={"TOPICS_FAILPOINTS": str(folder / "points")})


def start_to_fail(server: Server, shards: int) -> int:
    """Start a server that fails; its exit code."""
    server.shards = shards
    with pytest.raises(AssertionError, match="the server ended with"):
        server.start()
    assert server.process is not None
    return int(server.process.returncode)


PLACES = [
    "wal.sync.after kill shard=1000 nth=1",
    "snapshot.write.before torn shard=1000 nth=4",
    "snapshot.rename.after kill shard=1000 nth=6",
    "layout.rename.before kill shard=1000",
    "layout.rename.after kill shard=1000",
    "wal.remove.after kill shard=1000 nth=1",
    "snapshot.remove.before kill shard=1000 nth=2",
]


@fault(
    "layout",
    "the process that changes the number of shards is killed at any point",
    "the server ends with exit code 1; the next start continues, with this number or the old one",
)
@pytest.mark.parametrize("place", range(0, len(PLACES), pick(short=3, long=1)))
def test_the_change_is_killed(stopped_copy: tuple[Path, Json], tmp_path: Path, place: int) -> None:
    filled, before = stopped_copy
    server = copy_of(filled, tmp_path)
    (tmp_path / "points" / "points").write_text(PLACES[place] + "\n")
    try:
        assert start_to_fail(server, 4) == 1
        assert "was killed" in server.log
        assert verified(server) == 0
        server.shards = 4 if place % 2 else 2
        server.start()
        assert picture(server) == before
        assert len(list(server.data_dir.glob("layout-*"))) == 1
        assert server.stop() == 0
    finally:
        server.close()


def start_paused(server: Server, folder: Path, place: str, shards: int) -> int:
    """Start the server and pause the resharding process at this point; its pid."""
    (folder / "points" / "points").write_text(f"{place} pause shard=1000\n")
    server.shards = shards
    environment = {**os.environ, **dict(server.environment)}
    environment |= {
        "TOPICS_PORT": "0", "TOPICS_DATA_DIR": str(server.data_dir), "TOPICS_WAL_SHARDS": str(shards),
        "TOPICS_PORT_FILE": str(folder / "port"), "TOPICS_LOG_FORMAT": "json",
    }  # fmt: skip
    with server.log_path.open("ab") as log:
        server.process = subprocess.Popen(
            [sys.executable, "-m", "workers"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    pid = server.pid("reshard")
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return pid


@fault(
    "supervisor",
    "killed while the number of shards is changed",
    "the process that changes it ends too, and the next start continues",
)
@pytest.mark.parametrize(
    "place",
    ["layout.rename.before", "layout.rename.after", "snapshot.rename.before"][: pick(short=1, long=3)],
)
def test_the_supervisor_is_killed(stopped_copy: tuple[Path, Json], tmp_path: Path, place: str) -> None:
    filled, before = stopped_copy
    server = copy_of(filled, tmp_path)
    pid = start_paused(server, tmp_path, place, 3)
    try:
        assert not (tmp_path / "port").exists(), "the port file is written only after resharding"
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        until(lambda: not Path(f"/proc/{pid}").exists())
        (tmp_path / "points" / "points").unlink()
        server.start()
        assert picture(server) == before
        assert server.stop() == 0
    finally:
        server.close()


@fault(
    "supervisor",
    "SIGTERM while the number of shards is changed",
    "it stops with exit code 0; the next start continues, with this number or the old one",
)
def test_a_stop_meanwhile(stopped_copy: tuple[Path, Json], tmp_path: Path) -> None:
    filled, before = stopped_copy
    server = copy_of(filled, tmp_path)
    start_paused(server, tmp_path, "snapshot.rename.before", 3)
    try:
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        assert "the next start changes the number of shards" in server.log
        (tmp_path / "points" / "points").unlink()
        server.shards = 2
        server.start()
        assert picture(server) == before
        assert server.stop() == 0
    finally:
        server.close()


# -- refusals --------------------------------------------------------------------------------------------------


@fault(
    "layout",
    "the disk is full while the number of shards is changed",
    "refused with exit code 2 and the number of shards with which it starts without a change",
)
def test_a_full_disk_is_refused(stopped_copy: tuple[Path, Json], tmp_path: Path) -> None:
    filled, before = stopped_copy
    server = copy_of(filled, tmp_path)
    (tmp_path / "points" / "points").write_text("snapshot.write.before ENOSPC shard=1000 nth=5 times=99\n")
    try:
        assert start_to_fail(server, 5) == 2
        assert "the disk is full; TOPICS_WAL_SHARDS=2 starts without a change" in server.log
        assert not (server.data_dir / "layout-2").exists()
        server.shards = 2
        server.start()
        assert picture(server) == before
    finally:
        server.close()


def test_a_damaged_shard_is_refused_by_name(stopped_copy: tuple[Path, Json], tmp_path: Path) -> None:
    filled, _ = stopped_copy
    server = copy_of(filled, tmp_path)
    for file in (server.data_dir / "layout-1" / "shard-01" / "wal").glob("wal-*"):
        file.unlink()
    assert start_to_fail(server, 5) == 2
    assert "shard 1 is damaged" in server.log
    assert "topics verify --repair" in server.log
    assert not (server.data_dir / "layout-2").exists()


def test_repair_after_a_change(stopped_copy: tuple[Path, Json], tmp_path: Path) -> None:
    """Topics that came from another shard are found by a repair without any snapshot."""
    filled, before = stopped_copy
    server = copy_of(filled, tmp_path)
    server.shards = 3
    server.start()
    assert server.stop() == 0
    meta = server.data_dir / "layout-2" / "shard-01" / "meta"
    for snapshot in meta.glob("snap-*"):
        data = bytearray(snapshot.read_bytes())
        data[-20] ^= 1  # in the last row; the others can still be read
        snapshot.write_bytes(data)
    done = call(verify.main, "--repair", server.data_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    server.start()
    try:
        counts = {topic: len(data_of(server, topic, from_seq=0, limit=1000)) for topic in TOPICS[1:]}
        assert set(counts.values()) == {30}, counts
    finally:
        server.close()
    assert before
