"""Goal: readers of every kind hear of a topic that was deleted and created again, though it has outgrown their cursors.

Method: an outside client of a real server; the topic is created again while the reader is away.
"""

from __future__ import annotations

from typing import Any

from tests.support.contract import Json, ok, refused, state_of
from tests.support.server import Server

FRAMES = "application/vnd.topics.frames"


def create_again(server: Server, topic: str, *data: Any) -> str:
    """Delete a topic and write it anew; returns its epoch."""
    ok(server.delete(f"/v0/topics/{topic}"))
    return str(ok(server.write(topic, *data, include_epoch=True), 201)["epoch"])


def diff(server: Server, topic: str, **body: Any) -> Json:
    return ok(server.post(f"/v0/topics/{topic}/diff", body))


def data_of(page: Json) -> list[Any]:
    return [record["data"] for record in page["records"]]


def test_reads_writes_and_states_name_the_epoch(shared_server: Server, topic: str) -> None:
    old = ok(shared_server.write(topic, 1, 2, 3, include_epoch=True), 201)["epoch"]
    assert 0 < len(old) <= 64
    assert state_of(shared_server, topic)["epoch"] == old
    assert "epoch" not in ok(shared_server.write(topic, 4))
    lines = shared_server.post(
        f"/v0/topics/{topic}?include_epoch=true", b'{"data":5}\n', **{"Content-Type": "application/x-ndjson"}
    )
    assert ok(lines)["epoch"] == old
    assert (
        ok(shared_server.post(f"/v0/topics/{topic}?include_epoch=true", {"records": [{"data": 6}]}))["epoch"]
        == old
    )
    assert "epoch" not in diff(shared_server, topic)
    assert "epoch" not in diff(shared_server, topic, epoch=None)
    assert diff(shared_server, topic, include_epoch=True)["epoch"] == old
    page = diff(shared_server, topic, from_seq=3, epoch=old)
    assert (page["epoch"], page["tombstone"], data_of(page)) == (old, None, [4, 5, 6])
    assert diff(shared_server, topic, from_seq=6, epoch=old, wait_ms=1)["caught_up"]

    new = create_again(shared_server, topic, "a", "b", "c", "d")
    page = diff(shared_server, topic, from_seq=3, epoch=old)
    assert page["epoch"] == new != old
    assert data_of(page) == ["a", "b", "c", "d"]
    assert page["tombstone"] == {
        "gap_from": 1,
        "gap_to": 4,
        "reason": "recreated",
        "missed_estimate": 4,
        "earliest_seq": 1,
        "head_seq": 4,
    }
    assert diff(shared_server, topic, from_seq=4, epoch=old, wait_ms=20_000)["tombstone"] is not None
    assert data_of(diff(shared_server, topic, from_seq=3)) == ["d"]
    frames = shared_server.post(f"/v0/topics/{topic}/diff", {"from_seq": 3, "epoch": old}, Accept=FRAMES)
    assert frames.headers["topics-epoch"] == new
    assert '"recreated"' in frames.headers["topics-tombstone"]
    for wrong in ("x" * 65, 5, {}):
        refused(shared_server.post(f"/v0/topics/{topic}/diff", {"epoch": wrong}), 400, "invalid_request")


def test_a_consumer_is_reset_only_to_a_seq_of_this_topic(shared_server: Server, topic: str) -> None:
    old = ok(shared_server.write(topic, 1, 2, 3, include_epoch=True), 201)["epoch"]
    new = create_again(shared_server, topic, 1, 2, 3)
    ok(shared_server.put(f"/v0/topics/{topic}/consumers/c", {}), 201)
    reset = f"/v0/topics/{topic}/consumers/c/reset"
    detail = {"topic": topic, "expected": old, "actual": new}
    refused(shared_server.post(reset, {"to": {"seq": 2}, "epoch": old}), 409, "wrong_epoch", detail)
    assert ok(shared_server.post(reset, {"to": {"seq": 2}, "epoch": new}))["to_seq"] == 2
    refused(shared_server.post(reset, {"to": "start", "epoch": new}), 400, "invalid_request")
