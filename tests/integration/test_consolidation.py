"""Merges of cold segments on a real server: readers see no change, and erased bytes are in no file.

Method: segments of 10 records in a cold directory, a small merger that works on the files like a Spark job, restarts and kill -9 in
between, keys with and without the scope. `topics verify` must pass at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.contract import ok, refused
from tests.support.in_process import call
from tests.support.merger import Merger
from tests.support.server import Server, until
from topics.engine.storage.manifest import decode_current, decode_manifest, manifest_name
from workers import verify
from workers.shard.local_store import LocalSegmentStore

COUNT = 100
SECRET = "the secret that nobody may find again: 4711-0815"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    environment = {
        "TOPICS_COLD_DIR": str(tmp_path / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_API_KEYS": "root,reader:r,mine:a:t",
    }
    server = Server(tmp_path, environment=environment, shards=1).start().with_key("root")
    yield server
    server.close()


def fill(server: Server) -> None:
    ok(server.put("/v0/topics/t", {"durability": "fsync"}), 201)
    for first in range(1, COUNT + 1, 20):
        records = [
            {
                "data": {"n": n, "secret": SECRET if n == 7 else ""},
                "tag": f"tag{n % 3}",
                "node": f"node{n % 2}",
            }
            for n in range(first, first + 20)
        ]
        ok(server.post("/v0/topics/t", {"records": records}), 200)
    assert server.stop() == 0
    server.start()
    until(lambda: status(server)["manifest"] and len(manifest(server).segments) == 9)


def cold(server: Server) -> Path:
    return server.folder / "cold"


def topic_dir(server: Server) -> Path:
    return next((cold(server) / "topics").iterdir())


def manifest(server: Server) -> Any:
    folder = topic_dir(server)
    number = decode_current("CURRENT", (folder / "CURRENT").read_bytes())
    return decode_manifest("MANIFEST", (folder / manifest_name(number)).read_bytes())


def status(server: Server) -> Any:
    return ok(server.get("/v0/topics/t/consolidation"), 200)


def read(server: Server, **body: Any) -> list[Any]:
    found: list[Any] = []
    cursor = 0
    while True:
        page = server.post(
            "/v0/topics/t/diff", {"limit": 1000, "from_seq": cursor, "include_tags": True, **body}
        ).json
        assert page["tombstone"] is None
        found += page["records"]
        if page["caught_up"]:
            return found
        cursor = page["next_from_seq"]


def everything(server: Server) -> list[Any]:
    last = server.get("/v0/topics/t/last?tag=tag*&each=true").json["records"]
    tags = server.get("/v0/topics/t/tags").json["tags"]
    by_tag = read(server, tag="tag1")
    return [read(server), by_tag, last, tags, read(server, node="node1")]


def merge(server: Server, plan: dict[str, Any]) -> None:
    assert plan["cold_dir"] == str(cold(server))
    Merger(LocalSegmentStore(plan["cold_dir"], 99), plan).run()


def holders(server: Server) -> list[str]:
    roots = (server.data_dir, cold(server))
    files = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return [str(path) for path in files if SECRET.encode() in content(path)]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # a manifest that was just replaced
        return b""


def test_a_merge_from_plan_to_erase(server: Server) -> None:
    fill(server)
    ok(server.post("/v0/topics/t/delete", {"seqs": [3, 44]}), 200)
    before = everything(server)
    plan = ok(server.post("/v0/topics/t/consolidation", {"target_bytes": 1 << 20}), 200)
    assert [len(group["inputs"]) for group in plan["groups"]] == [9]
    assert (
        refused(server.post("/v0/topics/t/consolidation"), 409, "plan_leased")["plan_id"] == plan["plan_id"]
    )
    again = ok(
        server.post("/v0/topics/t/consolidation", {"target_bytes": 1 << 20, "lease": plan["lease"]}), 200
    )
    assert again["groups"] == plan["groups"]
    merge(server, plan)
    ok(server.post("/v0/topics/t/delete", {"seqs": [5]}), 200)
    before[0] = [record for record in before[0] if record["$seq"] != 5]
    before = everything(server)

    path = f"/v0/topics/t/consolidation/{plan['plan_id']}"
    assert ok(server.post(f"{path}/renew", {"lease": plan["lease"]}), 200)["lease_ms"] == 60_000
    done = ok(server.post(f"{path}/commit", {"lease": plan["lease"]}), 200)
    assert (done["state"], done["failed"], done["groups"][0]["live"]) == ("committed", [], 88)
    assert everything(server) == before
    again = ok(server.post(f"{path}/commit", {"lease": "whoever"}), 200)
    assert again["groups"] == done["groups"]
    assert [segment.name for segment in manifest(server).segments] == [done["groups"][0]["name"]]
    assert len(manifest(server).retired) == status(server)["retired_segments"] == 9

    server.kill()
    server.start()
    assert everything(server) == before
    assert ok(server.post(f"{path}/commit", {"lease": plan["lease"]}), 200)["groups"] == done["groups"]
    assert server.stop() == 0
    server.start()
    assert everything(server) == before
    until(lambda: not list((cold(server) / "staging").rglob("*.data")))

    snapshot = ok(server.post("/v0/topics/t/snapshots"), 200)
    assert (cold(server) / snapshot["path"]).exists()
    assert (snapshot["cold_next_seq"], snapshot["head_seq"]) == (91, 100)
    assert holders(server)
    assert ok(server.post("/v0/topics/t/delete", {"seqs": [7], "erase": True}), 200)["deleted"] == 1
    assert holders(server) == []
    assert status(server)["retired_segments"] == 8, "segments that cannot contain the record stay"
    assert [record["$seq"] for record in read(server)] == [n for n in range(1, 101) if n not in {3, 5, 7, 44}]
    ok(server.delete(f"/v0/topics/t/snapshots/{snapshot['snapshot_id']}"), 200)
    refused(server.delete(f"/v0/topics/t/snapshots/{snapshot['snapshot_id']}"), 404, "snapshot_not_found")

    assert server.stop() == 0
    found = call(verify.main, server.data_dir, "--json", "--cold-dir", cold(server))
    report = json.loads(found.stdout)
    assert (found.returncode, report["sound"]) == (0, True), found.stdout
    assert sum(shard["records"] for shard in report["shards"]) == 96


def test_scopes_and_refusals(tmp_path: Path) -> None:
    """Without a cold tier: that is checked last."""
    environment = {"TOPICS_API_KEYS": "root,rest:r+w+d,mine:a:mine"}
    server = Server(tmp_path, environment=environment, shards=1).start()
    try:
        root = server.with_key("root")
        ok(root.put("/v0/topics/t"), 201)
        plan = "/v0/topics/t/consolidation"
        calls = [
            ("POST", plan), ("GET", plan), ("POST", f"{plan}/0123456789abcdef/commit"), ("POST", "/v0/topics/t/snapshots"),
            ("POST", f"{plan}/0123456789abcdef/renew"), ("POST", f"{plan}/0123456789abcdef/abandon"),
            ("POST", "/v0/topics/t/snapshots/0123456789abcdef/renew"), ("DELETE", "/v0/topics/t/snapshots/0123456789abcdef"),
        ]  # fmt: skip
        for method, path in calls:
            body = {"lease": "x"} if method == "POST" else None
            refused(server.request(method, path, body), 401, "unauthorized")
            for key in ("rest", "mine"):
                refused(server.with_key(key).request(method, path, body), 403, "forbidden")
            refused(root.request(method, path, body), 409, "no_cold_tier")
        refused(root.post(f"{plan}/x/commit", {}), 400, "invalid_request")
        refused(root.post(f"{plan}/x/commit", b"{"), 415, "unsupported_media_type")
        refused(root.post(plan, {"min_garbage": 7}), 400, "invalid_request")
        refused(root.request("PUT", plan, {}), 405, "method_not_allowed")
        for path in (f"{plan}/x", f"{plan}/x/other", f"{plan}/", "/v0/topics/t/snapshots/x/commit"):
            refused(root.post(path, {}), 404, "not_found")
        refused(server.with_key("mine").post("/v0/topics/mine.x/snapshots"), 409, "no_cold_tier")
    finally:
        server.close()
