"""Goal: readers of every kind are told that a topic was deleted and created again, even if it is now longer than their cursors.

Method: a client of a real server; the topic is created again while the reader is disconnected.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.test_cli_tail import rows, tailing
from tests.integration.test_watch_restarts import killed
from tests.support.contract import Json, ok, refused, state_of
from tests.support.server import Server
from tests.support.sse_client import open_stream, watch
from tests.support.ws_client import WebSocket
from topics.client import Client, errors
from topics.client.answers import Tombstone

FRAMES = "application/vnd.topics.frames"


def create_again(server: Server, topic: str, *data: Any) -> str:
    """Delete a topic and create it again; returns its epoch."""
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


def test_a_resumed_stream_is_told_that_a_topic_was_created_again(shared_server: Server, topic: str) -> None:
    ok(shared_server.write(topic, 1, 2, 3), 201)
    session = watch(shared_server, {topic: {}})
    assert set(session["topics"][topic]) == {"from_seq", "head_seq", "earliest_seq"}
    with_id, without_id = session, watch(shared_server, {topic: {}})
    ids: list[str | None] = []
    for one in (with_id, without_id):
        stream = open_stream(shared_server, one)
        frames = stream.until_caught_up()
        assert [set(frame.data) & {"epoch"} for frame in frames if frame.event == "record"] == [set()]
        ids.append(stream.last_id)
        stream.close()
    create_again(shared_server, topic, "a", "b", "c", "d")
    for one, last_id in ((without_id, None), (with_id, ids[0])):
        stream = open_stream(shared_server, one, last_event_id=last_id)
        tombstone, records = stream.take("tombstone", "record")
        assert tombstone.data == {
            "topic": topic,
            "reason": "recreated",
            "gap_from": 1,
            "gap_to": 4,
            "earliest_seq": 1,
            "head_seq": 4,
        }
        assert (tombstone.cursors, records.cursors) == ({topic: 0}, {topic: 4})
        assert (records.seqs, records.data["from_seq"]) == ([1, 2, 3, 4], 0)
        stream.close()
        # The tombstone may have been lost in transit; a client that got it does not get it again.
        if last_id is not None:
            again = open_stream(shared_server, one, last_event_id=last_id)
            assert again.next().data["reason"] == "recreated"
            again.until_caught_up()
            again.close()
            ok(shared_server.write(topic, "e"))
            again = open_stream(shared_server, one, last_event_id=again.last_id)
            assert [frame.seqs for frame in again.until_caught_up() if frame.event == "record"] == [[5]]
            again.close()
            ok(shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [5]}))


def test_a_stream_that_reported_a_new_topic_resumes_from_its_ids(shared_server: Server, topic: str) -> None:
    """The new cursor could be one of the old, longer topic. Another stream of the topic has its own ids."""
    other = f"{topic}.other"
    for name in (topic, other):
        ok(shared_server.write(name, 1, 2, 3, 4, 5), 201)
    sessions = [
        watch(shared_server, topics) for topics in ({topic: {}}, {topic: {}, other: {}}, {f"{topic}.>": {}})
    ]
    ids = []
    for session in sessions:
        stream = open_stream(shared_server, session)
        stream.until_caught_up(len(session["topics"]))
        ids.append(stream.last_id)
        stream.close()
    for name in (topic, other):
        create_again(shared_server, name, "a", "b", "c")
    for session, last_id in zip(sessions, ids):
        stream = open_stream(shared_server, session, last_event_id=last_id)
        assert "recreated" in [
            frame.data.get("reason") for frame in stream.until_caught_up(len(session["topics"]))
        ]
        last_id = stream.last_id
        stream.close()
        for again in (last_id, None, last_id):
            stream = open_stream(shared_server, session, last_event_id=again)
            assert {frame.event for frame in stream.until_caught_up(len(session["topics"]))} == {"caught-up"}
            stream.close()
    shared_server.write(topic, "d", "e", "f")
    stream = open_stream(shared_server, sessions[0], last_event_id=last_id)
    stream.until_caught_up(1)
    named = json.loads(urlsafe_b64decode(stream.last_id + "=" * (-len(stream.last_id) % 4)))
    assert named == {topic: 6}  # beyond every cursor of the old topic: ids are plain cursors again
    stream.close()


def test_a_new_watch_takes_epochs_and_names_them(shared_server: Server, topic: str) -> None:
    old = ok(shared_server.write(topic, 1, 2, include_epoch=True), 201)["epoch"]
    session = watch(shared_server, {topic: {"from_seq": 2}}, include_epoch=True)
    assert session["topics"][topic]["epoch"] == old
    new = create_again(shared_server, topic, "a", "b", "c")
    session = watch(shared_server, {topic: {"from_seq": 2, "epoch": old}})
    assert session["topics"][topic] == {"from_seq": 2, "head_seq": 3, "earliest_seq": 1, "epoch": new}
    stream = open_stream(shared_server, session)
    tombstone, records = stream.take("tombstone", "record")
    assert (tombstone.data["reason"], tombstone.data["epoch"]) == ("recreated", new)
    assert (records.seqs, records.data["epoch"]) == ([1, 2, 3], new)
    stream.close()
    tail = watch(shared_server, {topic: {"tail": True, "epoch": old}})
    stream = open_stream(shared_server, tail)
    assert [frame.event for frame in stream.until_caught_up()] == ["caught-up"]
    stream.close()
    for wrong in ({topic: {"epoch": "x" * 65}}, {"a.>": {"epoch": old}}):
        refused(shared_server.post("/v0/watch", {"topics": wrong}), 400, "invalid_request")


def test_a_socket_takes_epochs_and_names_them(shared_server: Server, topic: str) -> None:
    old = ok(shared_server.write(topic, 1, 2, include_epoch=True), 201)["epoch"]
    new = create_again(shared_server, topic, "a", "b", "c")
    socket = WebSocket(shared_server)
    answer = socket.ask("subscribe", topics={topic: {"from_seq": 2, "epoch": old}})
    assert answer["topics"][topic] == {"from_seq": 2, "head_seq": 3, "earliest_seq": 1, "epoch": new}
    tombstone, record = socket.take("tombstone", "record")
    assert (tombstone["reason"], tombstone["epoch"]) == ("recreated", new)
    assert ([row["$seq"] for row in record["records"]], record["epoch"]) == ([1, 2, 3], new)
    socket.close()
    socket = WebSocket(shared_server)
    socket.ask("subscribe", topic=topic, from_seq=2, epoch=new)
    record, _ = socket.take("record", "caught_up")
    assert ([row["$seq"] for row in record["records"]], record["epoch"]) == ([3], new)
    assert socket.ask("publish", topic=topic, records=[{"data": 1}], include_epoch=True)["epoch"] == new
    socket.close()


# -- the client --------------------------------------------------------------------------------------------


def test_an_iteration_is_told_that_a_topic_was_created_again_between_two_pages(
    shared_server: Server, topic: str
) -> None:
    ok(shared_server.write(topic, 1, 2, 3, 4), 201)
    with Client(f"http://{shared_server.host}:{shared_server.port}") as client:
        records = client.records(topic, page_size=2)
        assert [next(records).data for _ in range(2)] == [1, 2]
        old = records.epochs
        create_again(shared_server, topic, "a", "b", "c")
        with pytest.raises(errors.RecordsLost, match="created again"):
            next(records)
        assert records.cursors == {topic: 0}
        assert records.epochs != old
        assert [record.data for record in records] == ["a", "b", "c"]
        # And with a closed iteration, which continues from its saved state.
        lost: list[Tombstone] = []
        later = client.records(topic, 2, epoch=old[topic], on_lost=lost.append)
        assert [record.data for record in later] == ["a", "b", "c"]
        assert [gap.reason for gap in lost] == ["recreated"]
        page = client.read(topic, 2, epoch=old[topic])
        assert page.tombstone is not None and page.epoch == records.epochs[topic]
        assert client.write(topic, 1, include_epoch=True).epoch == page.epoch == client.get_topic(topic).epoch


def test_a_tail_resumed_from_cursors_is_told_that_a_topic_was_created_again(
    shared_server: Server, topic: str
) -> None:
    ok(shared_server.write(topic, 1, 2, 3), 201)
    with Client(f"http://{shared_server.host}:{shared_server.port}") as client:
        with client.tail(topic, start="earliest") as records:
            assert [next(records).data for _ in range(3)] == [1, 2, 3]
            cursors, epochs = records.cursors, records.epochs
        assert cursors == {topic: 3}
        new = create_again(shared_server, topic, "a", "b", "c", "d")
        lost: list[Tombstone] = []
        with client.tail(topic, cursors=cursors, epochs=epochs, on_lost=lost.append) as records:
            assert [next(records).data for _ in range(4)] == ["a", "b", "c", "d"]
            assert (records.cursors, records.epochs) == ({topic: 4}, {topic: new})
        assert [(gap.reason, gap.epoch) for gap in lost] == [("recreated", new)]
        with client.tail(topic, cursors=cursors) as records:  # a cursor without epoch is used as it is
            assert next(records).data == "d"


def test_a_tail_whose_worker_dies_is_told_that_the_head_went_back(
    start_server: Callable[..., Server],
) -> None:
    """The command reports it on stderr."""
    server = start_server(shards=1)
    lost: list[Tombstone] = []
    with Client(f"http://{server.host}:{server.port}") as client:
        client.create_topic("e", durability="ephemeral")
        client.write_many("e", range(6))
        with (
            client.tail("e", start="earliest", on_lost=lost.append) as records,
            tailing(server, "e", "--all") as tail,
        ):
            assert [next(records).data for _ in range(6)] == list(range(6))
            assert tail.take(6) == rows("e", 1, *range(6))
            before = records.epochs
            killed(server, "shard 0")
            client.write_many("e", range(10, 18))
            assert [next(records).data for _ in range(8)] == list(range(10, 18))
            assert tail.take(8) == rows("e", 1, *range(10, 18))
            assert "lost (crash)" in tail.told()
            assert records.epochs != before
    assert [(gap.gap_from, gap.reason) for gap in lost] == [(1, "crash")]
