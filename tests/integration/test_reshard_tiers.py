"""Changing the number of shards of a real server with a cold directory, while that directory is mounted and not.

Goal: every record is read as before, the metrics of the tiers add up to the same, nothing in the cold directory
changes, and `topics verify` passes both tiers; merges and transactions in progress continue with the new owners. Method: segments of
10 records, all but the open ones cold; 2, 5 and 1 shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.contract import ok, refused
from tests.support.faults import fault
from tests.support.in_process import call
from tests.support.length import pick
from tests.support.merger import Merger
from tests.support.server import Reply, Server, until
from topics.engine.storage.manifest import is_manifest_file
from workers import verify
from workers.shard.local_store import LocalSegmentStore

TOPICS = [f"t{i}" for i in range(6)]
COUNT = 45


def cold_files(server: Server) -> dict[str, bytes]:
    """Files of segments; manifests are left out, because they are updated some time after a relocation."""
    root = server.folder / "cold" / "topics"
    files = [path for path in root.rglob("*") if path.is_file() and not is_manifest_file(path.name)]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def metric(server: Server, name: str) -> int:
    text = server.get("/v0/metrics").body.decode()
    return sum(int(float(value)) for value in re.findall(rf"^{re.escape(name)} (\S+)$", text, re.M))


def read(server: Server, topic: str) -> list[Any]:
    found: list[Any] = []
    cursor = 0
    while True:
        page = ok(server.diff(topic, from_seq=cursor, limit=1000))
        assert page["tombstone"] is None
        found += [record["data"] for record in page["records"]]
        if page["caught_up"]:
            return found
        cursor = page["next_from_seq"]


def restart(server: Server, shards: int) -> None:
    assert server.stop() == 0
    server.shards = shards
    server.start()


def verified(server: Server) -> Any:
    return json.loads(
        call(verify.main, server.data_dir, "--json", "--cold-dir", server.folder / "cold").stdout
    )


@fault(
    "disk",
    "the cold tier is not mounted while the number of shards is changed",
    "the number is changed; records of that tier get 503 until it is back, and are then read as before",
)
# The long form: without the directory happens all that happens with it, and more.
@pytest.mark.parametrize("is_there", [False, True][: pick(short=1, long=2)], ids=str)
def test_two_five_one(tmp_path: Path, is_there: bool) -> None:
    environment = {
        "TOPICS_COLD_DIR": str(tmp_path / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "0",
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_VERIFY": "1",
    }
    server = Server(tmp_path, environment=environment, shards=2).start()
    try:
        for topic in TOPICS:
            ok(server.put(f"/v0/topics/{topic}", {"durability": "fsync"}), 201)
            ok(server.write(topic, *range(COUNT)), 200)
        restart(server, 2)
        until(lambda: metric(server, "topics_relocations_total") == 4 * len(TOPICS))
        restart(server, 2)
        assert all(read(server, topic) == list(range(COUNT)) for topic in TOPICS)
        before = cold_files(server)
        live = metric(server, 'topics_segment_bytes_live{tier="cold"}')
        assert live
        for shards in (5, 1):
            assert server.stop() == 0
            if not is_there:
                (tmp_path / "cold").rename(tmp_path / "away")
            server.shards = shards
            server.start()
            if not is_there:
                assert server.diff(TOPICS[0]).status == 503
                (tmp_path / "cold").rmdir()
                (tmp_path / "away").rename(tmp_path / "cold")
            assert all(read(server, topic) == list(range(COUNT)) for topic in TOPICS)
            assert metric(server, 'topics_segment_bytes_live{tier="cold"}') == live
            assert cold_files(server) == before
        assert server.stop() == 0
        assert verified(server)["sound"]
    finally:
        server.close()


def test_jobs_and_producers_continue(tmp_path: Path) -> None:
    environment = {
        "TOPICS_COLD_DIR": str(tmp_path / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "0",
        "TOPICS_SEGMENT_MAX_EVENTS": "1000",
    }
    server = Server(tmp_path, environment=environment, shards=2).start()
    try:
        ok(server.put("/v0/topics/t", {"durability": "fsync"}), 201)
        ok(server.write("t", *range(4500)), 200)
        restart(server, 2)
        until(lambda: metric(server, "topics_relocations_total") == 4)
        restart(server, 2)  # its last snapshot says that they are cold, whenever the kill comes
        pin = ok(server.post("/v0/topics/t/snapshots"))
        plan = ok(server.post("/v0/topics/t/consolidation"))
        Merger(LocalSegmentStore(plan["cold_dir"], 99), plan).run()
        small, large = begin(server, "small"), begin(server, "large")
        ok(stage(server, "small", small, 0, [1, 2]))
        for chunk in range(3):
            ok(stage(server, "large", large, chunk, range(chunk * 4000, chunk * 4000 + 4000)))
        body = {"parts": [{"part": "p", "chunks": 3, "records": 12_000}], "wait_ms": 0}
        commit = server.post(f"/v0/topics/large/transactions/{large}/commit", body)
        assert commit.status in (200, 202)
        server.kill()

        server.shards = 5
        server.start()
        ok(server.post(f"/v0/topics/large/transactions/{large}/commit", body | {"wait_ms": 30_000}))
        assert read(server, "large") == list(range(12_000))
        assert begun(server, "small") == "open"
        assert ok(stage(server, "small", small, 0, [1, 2]))["repeated"]
        path = f"/v0/topics/t/consolidation/{plan['plan_id']}"
        refused(server.post(f"{path}/commit", {"lease": plan["lease"]}), 410, "lease_lost")
        again = ok(server.post("/v0/topics/t/consolidation"))
        assert (again["plan_id"], again["groups"]) == (plan["plan_id"], plan["groups"])
        done = ok(server.post(f"{path}/commit", {"lease": again["lease"]}))
        assert len(done["groups"]) == 1
        ok(server.post(f"/v0/topics/t/snapshots/{pin['snapshot_id']}/renew"))

        restart(server, 1)
        assert ok(server.post(f"{path}/commit", {"lease": "whoever"}))["groups"] == done["groups"]
        state = ok(server.get("/v0/topics/t/consolidation"))
        assert (state["snapshots"], state["retired_segments"]) == (1, 4)
        assert read(server, "t") == list(range(4500))
        small_body = {"parts": [{"part": "p", "chunks": 1, "records": 2}]}
        assert ok(server.post(f"/v0/topics/small/transactions/{small}/commit", small_body))["count"] == 2
        assert read(server, "small") == [1, 2]
        assert begun(server, "large") == "committed"
        ok(server.delete(f"/v0/topics/t/snapshots/{pin['snapshot_id']}"))
        assert server.stop() == 0
        assert verified(server)["sound"]
    finally:
        server.close()


def begun(server: Server, topic: str) -> Any:
    return ok(server.post(f"/v0/topics/{topic}/transactions", {"producer": "p", "batch": 1}))["state"]


def begin(server: Server, topic: str) -> str:
    txn = ok(server.post(f"/v0/topics/{topic}/transactions", {"producer": "p", "batch": 1}))["txn"]
    assert isinstance(txn, str)
    return txn


def stage(server: Server, topic: str, txn: str, chunk: int, data: Iterable[int]) -> Reply:
    body = {"part": "p", "chunk": chunk, "records": [{"data": one} for one in data]}
    return server.post(f"/v0/topics/{topic}/transactions/{txn}/stage", body)
