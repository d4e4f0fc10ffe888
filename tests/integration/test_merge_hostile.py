"""Attacks by a client with a job's keys, or by a process that can write to the staging directory, on merges of a real server.

Goal: each attack gets the documented error and changes nothing: readers see the same, no file of a topic is touched, the server continues,
and a correct merge completes. Method: one server whose topic has cold segments of 10 records; each attack manipulates the output of
a correct job, and the worker must be the same process at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_consolidation import (
    SECRET,
    cold,
    everything,
    fill,
    holders,
    merge,
    read,
    status,
    topic_dir,
)
from tests.support.contract import ok, refused
from tests.support.server import Reply, Server, until

PLAN = "/v0/topics/t/consolidation"


@contextmanager
def filled(folder: Path) -> Iterator[Server]:
    environment = {
        "TOPICS_COLD_DIR": str(folder / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_API_KEYS": "root,reader:r,writer:w",
    }
    server = Server(folder, environment=environment, shards=1).start().with_key("root")
    try:
        fill(server)
        ok(server.post("/v0/topics/t/delete", {"seqs": [3, 44]}), 200)
        ok(server.put("/v0/topics/u", {}), 201)
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with filled(tmp_path_factory.mktemp("hostile")) as found:
        yield found


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A separate server for tests that change it for good."""
    with filled(tmp_path) as found:
        yield found


def plan_of(server: Server) -> Any:
    """The topic's plan, with our lease on it, whoever had it before."""
    plan = status(server)["plan"]
    if plan is None or plan["leased_until_ms"] is None:
        return ok(server.post(PLAN, {"lease_ms": 3_600_000}))
    raise AssertionError("an earlier test still holds its lease")


def abandon(server: Server, plan: Any) -> Reply:
    return server.post(f"{PLAN}/{plan['plan_id']}/abandon", {"lease": plan["lease"]})


def commit(server: Server, plan: Any, **fields: Any) -> Reply:
    return server.post(f"{PLAN}/{plan['plan_id']}/commit", {"lease": plan["lease"], **fields})


def files_of_topics(server: Server) -> dict[str, bytes]:
    root = cold(server) / "topics"
    found = [path for path in root.rglob("seg-*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


@pytest.fixture
def plan(server: Server) -> Iterator[Any]:
    """A plan whose merge has been done. Afterwards: nothing has changed, the worker is the same, and staging can be emptied."""
    before, files, worker = everything(server), files_of_topics(server), server.pid("shard 0")
    made = plan_of(server)
    merge(server, made)
    yield made
    assert everything(server) == before
    assert server.pid("shard 0") == worker, "the worker died"
    ok(abandon(server, made))
    assert not (cold(server) / made["staging"]).exists()
    until(lambda: files_of_topics(server) == files)
    assert files_of_topics(server) == files


# -- staging -----------------------------------------------------------------------------------------------


def _json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _deep(path: Path) -> None:
    path.write_bytes(b'{"group": 0, "attempt": ' + b"[" * 60_000)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _hard_link(path: Path) -> None:
    """To an input file: the server must not write through it."""
    name = json.loads((path.parent / "plan.json").read_text())["groups"][0]["inputs"][0]["name"]
    topic = json.loads((path.parent / "plan.json").read_text())["topic_id"]
    path.unlink()
    os.link(path.parents[3] / "topics" / topic / f"{name}.data", path)


ATTACKS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "sidecar: a link": ("group-0.json", lambda path: _link(path, "/etc/passwd")),
    "sidecar: a directory": ("group-0.json", _directory),
    "sidecar: a pipe": ("group-0.json", _pipe),
    "sidecar: nested": ("group-0.json", _deep),
    "sidecar: long": ("group-0.json", lambda path: path.write_bytes(b" " * 100_000 + b"{}")),
    "sidecar: empty": ("group-0.json", lambda path: path.write_bytes(b"")),
    "sidecar: a number": ("group-0.json", lambda path: path.write_bytes(b"7")),
    "sidecar: a path": ("group-0.json", lambda path: _json(path, attempt="../../../topics/x")),
    "sidecar: huge": ("group-0.json", lambda path: _json(path, data_bytes=10**30, dict_bytes=1 << 62)),
    "sidecar: huge names": ("group-0.json", lambda path: _json(path, dict_bytes=1 << 62)),
    "sidecar: negative": ("group-0.json", lambda path: _json(path, data_bytes=-1, idx_bytes=-5)),
    "sidecar: words": ("group-0.json", lambda path: _json(path, rows="many", live=None)),
    "data: a link": ("group-0.1.data", lambda path: _link(path, "/dev/zero")),
    "data: a directory": ("group-0.1.data", _directory),
    "data: a pipe": ("group-0.1.data", _pipe),
    "data: an input": ("group-0.1.data", _hard_link),
    "data: cut": ("group-0.1.data", _truncate),
    "idx: cut": ("group-0.1.idx", _truncate),
    "dict: cut": ("group-0.1.dict", _truncate),
    "sum: cut": ("group-0.1.sum", _truncate),
    "sum: a link to itself": ("group-0.1.sum", lambda path: _link(path, path.name)),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_invalid_outputs_are_refused(server: Server, plan: Any, what: str) -> None:
    name, spoil = ATTACKS[what]
    spoil(cold(server) / plan["staging"] / name)
    detail = refused(commit(server, plan), 422, "output_invalid")
    assert detail["group"] == 0 and detail["reason"]


def test_links_and_directories_in_staging_lead_nowhere(server: Server, plan: Any) -> None:
    """Emptying staging removes the links, not their targets: a topic's files, or staging itself."""
    staging = cold(server) / plan["staging"]
    (staging / "loop").symlink_to(".")
    (staging / "topic").symlink_to(topic_dir(server))
    (staging / "_temporary" / "0").mkdir(parents=True)
    (staging / "_temporary" / "0" / "part").write_bytes(b"x")


def test_staging_that_is_a_link(server: Server, plan: Any) -> None:
    staging = cold(server) / plan["staging"]
    shutil.rmtree(staging)
    staging.symlink_to(topic_dir(server))
    refused(commit(server, plan), 422, "output_invalid")


def test_bytes_that_change_while_they_are_compared(server: Server, plan: Any) -> None:
    path = cold(server) / plan["staging"] / "group-0.1.data"
    good = path.read_bytes()
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            path.write_bytes(good[:200] + b"?" + good[201:])

    thread = threading.Thread(target=change)
    path.write_bytes(good[:200] + b"?" + good[201:])
    thread.start()
    try:
        refused(commit(server, plan), 422, "output_invalid")
    finally:
        stop.set()
        thread.join()


# -- calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("", {"target_bytes": "much"}),
        ("", {"target_bytes": -1}),
        ("", {"min_garbage": 2}),
        ("", {"lease": 7}),
        ("", [1]),
        ("/{id}/commit", {"lease": None}),
        ("/{id}/commit", {"lease": "x", "wait_ms": "long"}),
        ("/{id}/commit", {"lease": "x", "wait_ms": 1 << 70}),
        ("/{id}/renew", {"lease": ["x"]}),
        ("/{id}/abandon", {"lease": {}}),
    ],
)
def test_invalid_bodies(server: Server, plan: Any, action: str, body: Any) -> None:
    reply = server.post(PLAN + action.format(id=plan["plan_id"]), body)
    if body == {"target_bytes": -1}:
        assert reply.status in (400, 409), "clamped, or refused; another client has the lease"
        return
    refused(reply, 400, "invalid_request")


def test_plans_and_leases_of_others(server: Server, plan: Any) -> None:
    for lease in ("", "x", "0" * 16, "\u0000", "../..", "x" * 10_000):
        for action in ("renew", "commit", "abandon"):
            reply = server.post(f"{PLAN}/{plan['plan_id']}/{action}", {"lease": lease})
            assert (reply.status, reply.error["code"]) in ((410, "lease_lost"), (400, "invalid_request")), (
                lease
            )
    mine = {"lease": plan["lease"]}
    for action in ("renew", "commit", "abandon"):
        refused(
            server.post(f"/v0/topics/u/consolidation/{plan['plan_id']}/{action}", mine), 404, "plan_not_found"
        )
        for other in ("0" * 16, "x", "..%2f..%2ftopics", plan["plan_id"].upper() + "0"):
            assert server.post(f"{PLAN}/{other}/{action}", mine).status in (400, 404), other
    refused(server.post("/v0/topics/nobody/consolidation"), 404, "topic_not_found")
    for key in ("reader", "writer"):
        other_key = server.with_key(key)
        try:
            refused(other_key.post(f"{PLAN}/{plan['plan_id']}/abandon", mine), 403, "forbidden")
            refused(other_key.post("/v0/topics/t/snapshots"), 403, "forbidden")
        finally:
            server.with_key("root")


def test_snapshots_of_others_and_unknown_ones(server: Server, plan: Any) -> None:
    pin = ok(server.post("/v0/topics/t/snapshots", {"ttl_ms": 1}))
    for other in ("..%2fCURRENT", "..%2f..%2f..%2fdata", "x" * 300, "0" * 16, "%00"):
        reply = server.delete(f"/v0/topics/t/snapshots/{other}")
        assert reply.status in (400, 404), other
    refused(server.delete(f"/v0/topics/u/snapshots/{pin['snapshot_id']}"), 404, "snapshot_not_found")
    for body in ({"ttl_ms": "long"}, {"ttl_ms": 1 << 80}, {"ttl_ms": [1]}):
        refused(server.post("/v0/topics/t/snapshots", body), 400, "invalid_request")
    reply = server.delete(f"/v0/topics/t/snapshots/{pin['snapshot_id']}")
    assert reply.status in (200, 404), "it lasts at least a second, which may be over"


# -- races -------------------------------------------------------------------------------------------------


def at_once(*calls: Callable[[], Reply]) -> list[Reply]:
    found: dict[int, Reply] = {}
    barrier = threading.Barrier(len(calls))

    def run(i: int) -> None:
        barrier.wait()
        found[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(calls))]


def test_the_whole_way_with_races(own_server: Server) -> None:
    """Concurrent commits have one result; then an erase, a drop and a topic of the same name."""
    server = own_server
    before = everything(server)
    plan = plan_of(server)
    merge(server, plan)
    replies = at_once(*[lambda: commit(server, plan, wait_ms=30_000)] * 4)
    bodies = [ok(reply) for reply in replies]
    assert all(body["groups"] == bodies[0]["groups"] for body in bodies) and len(bodies[0]["groups"]) == 1
    refused(abandon(server, plan), 404, "plan_not_found")
    refused(server.post(f"{PLAN}/{plan['plan_id']}/renew", {"lease": plan["lease"]}), 404, "plan_not_found")
    assert everything(server) == before

    ok(server.post("/v0/topics/t/delete", {"seqs": [n for n in range(20, 60) if n != 44]}))
    rows = read(server)
    plan = ok(server.post(PLAN, {"min_garbage": 0.01}))
    merge(server, plan)
    assert holders(server)
    committed, erased = at_once(
        lambda: commit(server, plan, wait_ms=30_000),
        lambda: server.post("/v0/topics/t/delete", {"seqs": [7], "erase": True}),
    )
    ok(erased)
    assert holders(server) == []
    assert committed.status in (200, 404, 409), committed.body
    assert read(server) == [record for record in rows if record["$seq"] != 7]

    server.kill()
    server.start()
    assert holders(server) == []
    plan = ok(server.post(PLAN, {"min_garbage": 0.001, "min_segments": 2}))
    if plan["plan_id"] is None:
        ok(server.post("/v0/topics/t/delete", {"seqs": [1]}))
        plan = ok(server.post(PLAN, {"min_garbage": 0.001}))
    merge(server, plan)
    committed, dropped, made = at_once(
        lambda: commit(server, plan, wait_ms=30_000),
        lambda: server.delete("/v0/topics/t"),
        lambda: server.put("/v0/topics/t", {"durability": "fsync"}),
    )
    ok(dropped)
    assert made.status in (200, 201)
    assert committed.status in (200, 404, 409), committed.body
    server.put("/v0/topics/t", {"durability": "fsync"})  # unless the last PUT came after the drop
    ok(server.write("t", "new"))
    assert commit(server, plan).status == 404, "the plan belongs to the dropped topic"
    assert [record["data"] for record in read(server)] == ["new"]
    until(lambda: not list((cold(server) / "staging" / "plans").glob("*/*")))
    until(lambda: not list((cold(server) / "topics").rglob("seg-*")))


def test_an_erased_record_of_a_batch_is_in_no_file(own_server: Server) -> None:
    server = own_server
    ok(server.post("/v0/topics/t/delete", {"seqs": [7], "erase": True}))
    assert holders(server) == []
    ok(server.put("/v0/topics/sunk", {}), 201)
    path = "/v0/topics/sunk/transactions"
    txn = ok(server.post(path, {"producer": "p", "batch": 1}))["txn"]
    ok(
        server.post(
            f"{path}/{txn}/stage", {"part": "a", "chunk": 0, "records": [{"data": SECRET}, {"data": 1}]}
        )
    )
    body = {"parts": [{"part": "a", "chunks": 1, "records": 2}]}
    first = ok(server.post(f"{path}/{txn}/commit", body))["first_seq"]
    assert holders(server)
    ok(server.post("/v0/topics/sunk/delete", {"seqs": [first], "erase": True}))
    assert holders(server) == []
    assert server.stop() == 0
    assert holders(server) == []
    server.start()
    assert ok(server.post(f"{path}/{txn}/commit", body))["count"] == 2
