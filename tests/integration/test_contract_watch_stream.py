"""Goal: a stream reports what happens in its topics, in the contract's frames and order, over both protocols.

Method: whole frames are compared; the client refuses every byte that the contract does not allow. Tests wait only for
frames.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.contract import Json, fresh, ok, one_record, send_text, state_of
from tests.support.frame_checker import FrameChecker
from tests.support.server import Server, until
from tests.support.sse_client import EventStream, Frame, Protocol, follow, open_stream, pump, watch


@pytest.fixture(params=["http1", "h2c"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    kind: Protocol = request.param
    return kind


def record_frame(topic: str, records: list[Json], from_seq: int, to_seq: int, head_seq: int) -> Json:
    return {"topic": topic, "records": records, "from_seq": from_seq, "to_seq": to_seq, "head_seq": head_seq}


def gap(topic: str, reason: str, first: int, last: int, head: int, earliest: int | None = None) -> Json:
    return {
        "topic": topic,
        "reason": reason,
        "gap_from": first,
        "gap_to": last,
        "earliest_seq": last + 1 if earliest is None else earliest,
        "head_seq": head,
    }


# -- records -----------------------------------------------------------------------------------------------


def test_backlog_then_live(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, "a", {"b": 1})
    page = ok(shared_server.diff(topic))
    stream = follow(shared_server, topic, protocol)
    [record, caught_up] = stream.take("record", "caught-up")
    assert record.data == record_frame(topic, page["records"], 0, 2, 2)
    assert caught_up.data == {"topic": topic, "head_seq": 2}
    assert record.cursors == caught_up.cursors == {topic: 2}
    for seq in (3, 4, 5):
        shared_server.write(topic, seq)
        [record, caught_up] = stream.take("record", "caught-up")
        [written] = ok(shared_server.diff(topic, from_seq=seq - 1))["records"]
        assert record.data == record_frame(topic, [written], seq - 1, seq, seq)
        assert caught_up.data == {"topic": topic, "head_seq": seq}
        assert record.cursors == caught_up.cursors == {topic: seq}
    stream.close()


def test_an_empty_topic_is_caught_up_at_once(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    stream = follow(shared_server, topic, protocol)
    [caught_up] = stream.take("caught-up")
    assert (caught_up.data, caught_up.cursors) == ({"topic": topic, "head_seq": 0}, {topic: 0})
    shared_server.write(topic, 1)
    stream.take("record", "caught-up")
    stream.close()


def test_a_tail_begins_at_the_head_of_the_post(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, 1, 2)
    session = watch(shared_server, {topic: {"tail": True}})
    shared_server.write(topic, 3)
    stream = open_stream(shared_server, session, protocol=protocol)
    [record, _] = stream.take("record", "caught-up")
    assert (record.data["from_seq"], record.seqs) == (2, [3])
    stream.close()


def test_all_that_is_there_comes_in_one_frame(shared_server: Server, topic: str, protocol: Protocol) -> None:
    for i in range(50):
        shared_server.write(topic, i)
    stream = follow(shared_server, topic, protocol)
    [record, _] = stream.take("record", "caught-up")
    assert record.seqs == list(range(1, 51))
    shared_server.write(topic, *range(30))
    [record, _] = stream.take("record", "caught-up")  # a write is never split
    assert record.seqs == list(range(51, 81))
    stream.close()


def test_a_burst_of_writes_comes_whole_and_in_order(shared_server: Server, protocol: Protocol) -> None:
    names = [fresh(), fresh(), fresh()]
    for name in names:
        shared_server.write(name, 0)
    stream = follow(shared_server, {name: {} for name in names}, protocol, limit=4)
    for i in range(120):
        shared_server.write(names[i % 3], i)
    frame_checker = FrameChecker(dict.fromkeys(names, 0))
    pump([stream], lambda: frame_checker.count == 123, lambda _, frame: frame_checker.take(frame))
    assert {name: frame_checker.seqs[name] for name in names} == {name: list(range(1, 42)) for name in names}
    stream.close()


def test_ids_name_all_topics(shared_server: Server, protocol: Protocol) -> None:
    one, two, three = fresh(), fresh(), fresh()
    shared_server.write(one, 1, 2)
    shared_server.write(two, 1)
    shared_server.put(f"/v0/topics/{three}")
    stream = follow(shared_server, {one: {}, two: {"tail": True}, three: {}}, protocol)
    for frame in stream.until_caught_up(3):
        assert set(frame.cursors) == {one, two, three}
    shared_server.write(three, 1)
    [record, _] = stream.take("record", "caught-up")
    assert record.cursors == {one: 2, two: 1, three: 1}
    stream.close()


@pytest.mark.parametrize("include_data", [None, False])
@pytest.mark.parametrize("include_meta", [None, False])
@pytest.mark.parametrize("include_tags", [None, True])
def test_optional_fields_are_included_on_request(
    shared_server: Server, topic: str, include_data: Any, include_meta: Any, include_tags: Any
) -> None:
    record = {"data": [1], "tag": "t", "meta": {"k": 1}, "node": "n"}
    shared_server.post(f"/v0/topics/{topic}", {"records": [record, {"data": None}]})
    named = {"include_data": include_data, "include_meta": include_meta, "include_tags": include_tags}
    fields = {name: value for name, value in named.items() if value is not None}
    stream = follow(shared_server, topic, **fields)
    expected = ok(shared_server.diff(topic, **fields))["records"]

    def check() -> None:
        [frame, _] = stream.take("record", "caught-up")
        assert frame.data["records"] == expected
        assert [list(found) for found in frame.data["records"]] == [list(found) for found in expected]

    check()
    shared_server.post(
        f"/v0/topics/{topic}", {"records": [record, {"data": None}]}
    )  # live frames are like the backlog
    expected = ok(shared_server.diff(topic, from_seq=2, **fields))["records"]
    check()
    stream.close()


@pytest.mark.parametrize(
    "text",
    [
        '{"a":\n1,\r\n\t"b"\r:[ ]}',
        '"\\n\\r\\u2028"',
        '"\u2028\u2029\u0085é"',
        "12345678901234567890123",
        "1.0e5",
    ],
)
def test_data_is_one_line_and_the_text_that_was_sent(shared_server: Server, topic: str, text: str) -> None:
    ok(send_text(shared_server, "POST", f"/v0/topics/{topic}", one_record(f'"data":{text}')), 201)
    stream = follow(shared_server, topic)
    [record, _] = stream.take("record", "caught-up")
    assert record.data["records"] == ok(shared_server.diff(topic))["records"]
    stream.close()


def test_deleted_records_are_not_delivered(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, *range(10))
    shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [1, 2, 5, 10]})
    stream = follow(shared_server, topic, protocol)
    [record, caught_up] = stream.take("record", "caught-up")
    assert (record.data["from_seq"], record.seqs, record.data["to_seq"]) == (0, [3, 4, 6, 7, 8, 9], 10)
    assert caught_up.data["head_seq"] == 10
    stream.close()


def test_only_deleted_records(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, 1, 2, 3)
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 99})
    stream = follow(shared_server, topic, protocol)
    [caught_up] = stream.take("caught-up")
    assert (caught_up.data["head_seq"], caught_up.cursors) == (3, {topic: 3})
    stream.close()


@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("consistency", ["eventual", "strong"])
def test_consistency(shared_server: Server, topic: str, durability: str, consistency: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"durability": durability})
    shared_server.write(topic, 1, 2)
    stream = follow(shared_server, topic, consistency=consistency)
    frame_checker = FrameChecker({topic: 0})
    pump([stream], lambda: frame_checker.count == 2, lambda _, frame: frame_checker.take(frame))
    for i in range(5):
        shared_server.write(topic, i)
    pump([stream], lambda: frame_checker.count == 7, lambda _, frame: frame_checker.take(frame))
    assert frame_checker.seqs[topic] == list(range(1, 8))
    stream.close()


# -- filters -----------------------------------------------------------------------------------------------


def nodes(server: Server, topic: str, *names: str | None) -> None:
    assert (
        server.post(f"/v0/topics/{topic}", {"records": [{"data": 0, "node": name} for name in names]}).status
        < 300
    )


@pytest.mark.parametrize(
    ("node", "seqs"), [("me", [2, 4]), (["me", "you"], [4]), (["a"], [1, 2, 3, 4]), ([], [1, 2, 3, 4])]
)
def test_own_records_are_left_out(shared_server: Server, topic: str, node: Any, seqs: list[int]) -> None:
    nodes(shared_server, topic, "me", "you", "me", None)
    stream = follow(shared_server, topic, node=node)
    for base in (0, 4):
        [record, _] = stream.take("record", "caught-up")
        assert (record.data["from_seq"], record.data["to_seq"]) == (base, base + 4)
        assert record.seqs == [base + seq for seq in seqs]
        nodes(shared_server, topic, "me", "you", "me", None)
    stream.close()


def test_a_filtered_frame_is_not_sent_but_moves_the_cursor(shared_server: Server, protocol: Protocol) -> None:
    quiet, other = fresh(), fresh()
    nodes(shared_server, quiet, "me", "me")
    nodes(shared_server, other, "you")
    stream = follow(shared_server, {quiet: {}, other: {}}, protocol, node="me")
    frame_checker = FrameChecker({quiet: 0, other: 0}, skips=True).take_all(stream.until_caught_up(2))
    nodes(shared_server, quiet, *["me"] * 500)
    last: list[Frame] = []

    def moved() -> bool:
        nodes(shared_server, other, "you")
        last[:] = stream.until_records(1)
        frame_checker.take_all(last)
        return last[-1].cursors[quiet] == 502

    until(moved)
    stream.close()
    assert frame_checker.seqs[quiet] == []
    # Another stream of the session begins after the filtered records.
    nodes(shared_server, quiet, "you")
    session = watch(shared_server, {quiet: {"from_seq": 0}}, node="me")
    again = open_stream(shared_server, session, protocol=protocol)
    [record, _] = again.take("record", "caught-up")
    assert (record.data["from_seq"] in (0, 502), record.seqs, record.data["to_seq"]) == (True, [503], 503)
    again.close()


def test_dedupe_node_switches_the_filter_off(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"dedupe_node": False})
    nodes(shared_server, topic, "me")
    stream = follow(shared_server, topic, node="me")
    [record, _] = stream.take("record", "caught-up")
    assert record.seqs == [1]
    stream.close()


# -- gaps --------------------------------------------------------------------------------------------------


def test_a_gap_on_the_first_read(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    shared_server.write(topic, *range(10))
    stream = follow(shared_server, topic, protocol)
    [tombstone, record, caught_up] = stream.take("tombstone", "record", "caught-up")
    assert tombstone.data == gap(topic, "from_seq_too_old", 1, 7, 10)
    assert tombstone.cursors == {topic: 7}
    assert (record.data["from_seq"], record.seqs, record.data["to_seq"]) == (7, [8, 9, 10], 10)
    assert caught_up.cursors == {topic: 10}
    stream.close()


def test_a_gap_of_expired_records(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"ttl_ms": 1})
    shared_server.write(topic, 1, 2, 3)
    until(lambda: state_of(shared_server, topic)["count"] == 0)
    stream = follow(shared_server, {topic: {"from_seq": 1}}, protocol)
    [tombstone, caught_up] = stream.take("tombstone", "caught-up")
    assert tombstone.data == gap(topic, "from_seq_too_old", 2, 3, 3)
    assert caught_up.data == {"topic": topic, "head_seq": 3}
    stream.close()


def test_a_later_gap_has_its_true_reason(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    shared_server.write(topic, 1)
    stream = follow(shared_server, topic, protocol)
    stream.take("record", "caught-up")
    shared_server.write(topic, *range(10))  # more than the topic keeps: seven of them are dropped at once
    [tombstone, record, _] = stream.take("tombstone", "record", "caught-up")
    assert tombstone.data == gap(topic, "cap", 2, 8, 11)
    assert tombstone.cursors == {topic: 8}
    assert (record.data["from_seq"], record.seqs) == (8, [9, 10, 11])
    stream.close()


def test_after_a_reconnect_a_gap_is_of_the_first_read_again(
    shared_server: Server, topic: str, protocol: Protocol
) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2})
    shared_server.write(topic, 1)
    session = watch(shared_server, topic)
    stream = open_stream(shared_server, session, protocol=protocol)
    stream.take("record", "caught-up")
    stream.close()
    shared_server.write(topic, *range(5))
    stream = open_stream(shared_server, session, protocol=protocol, last_event_id=stream.last_id)
    [tombstone, record, _] = stream.take("tombstone", "record", "caught-up")
    assert tombstone.data == gap(topic, "from_seq_too_old", 2, 4, 6)
    assert record.seqs == [5, 6]
    stream.close()


def test_a_cursor_from_another_topic_of_that_name(
    shared_server: Server, topic: str, protocol: Protocol
) -> None:
    shared_server.write(topic, 1, 2, 3)
    stream = follow(shared_server, {topic: {"from_seq": 9}}, protocol)
    [tombstone, record, caught_up] = stream.take("tombstone", "record", "caught-up")
    assert tombstone.data == gap(topic, "recreated", 1, 3, 3, earliest=1)
    assert (record.seqs, record.data["to_seq"]) == ([1, 2, 3], 3)
    assert caught_up.cursors == {topic: 3}
    shared_server.write(topic, 4)
    [record, _] = stream.take("record", "caught-up")
    assert (record.data["from_seq"], record.seqs) == (3, [4])
    stream.close()


def test_a_cursor_from_another_topic_on_an_empty_one(
    shared_server: Server, topic: str, protocol: Protocol
) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    stream = follow(shared_server, {topic: {"from_seq": 9}}, protocol)
    [tombstone, caught_up] = stream.take("tombstone", "caught-up")
    assert tombstone.data == gap(topic, "recreated", 1, 0, 0, earliest=1)
    assert (tombstone.cursors, caught_up.cursors) == ({topic: 0}, {topic: 0})
    shared_server.write(topic, 1)
    [record, _] = stream.take("record", "caught-up")
    assert (record.data["from_seq"], record.seqs) == (0, [1])
    stream.close()


# -- deleted topics ----------------------------------------------------------------------------------------


def deleted(frame: Frame, topic: str) -> None:
    assert frame.event == "topic-deleted"
    assert frame.data == {"topic": topic, "head_seq": 0, "reason": "deleted"}


def test_the_stream_ends_with_its_last_topic(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, 1)
    stream = follow(shared_server, topic, protocol)
    stream.take("record", "caught-up")
    shared_server.delete(f"/v0/topics/{topic}")
    [frame] = stream.rest()
    deleted(frame, topic)


def test_a_deleted_topic_does_not_end_the_others(shared_server: Server, protocol: Protocol) -> None:
    doomed, other = fresh(), fresh()
    shared_server.write(doomed, 1)
    shared_server.write(other, 1)
    stream = follow(shared_server, {doomed: {}, other: {}}, protocol)
    stream.until_caught_up(2)
    shared_server.delete(f"/v0/topics/{doomed}")
    deleted(stream.next(), doomed)
    # On this stream it stays ended when the name is created again.
    ok(shared_server.write(doomed, "again"), 201)
    for seq in (2, 3):
        shared_server.write(other, seq)
        [record, _] = stream.take("record", "caught-up")
        assert (record.data["topic"], record.seqs) == (other, [seq])
    shared_server.delete(f"/v0/topics/{other}")
    [frame] = stream.rest()
    deleted(frame, other)


def test_a_topic_that_is_gone_when_the_stream_opens(
    shared_server: Server, topic: str, protocol: Protocol
) -> None:
    shared_server.write(topic, 1)
    session = watch(shared_server, topic)
    shared_server.delete(f"/v0/topics/{topic}")
    [frame] = open_stream(shared_server, session, protocol=protocol).rest()
    deleted(frame, topic)


# -- two streams -------------------------------------------------------------------------------------------


def test_the_newer_stream_takes_over(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, 1, 2)
    session = watch(shared_server, topic)
    older = open_stream(shared_server, session, protocol=protocol)
    older.take("record", "caught-up")
    newer = open_stream(shared_server, session, protocol=protocol)
    [error] = older.rest()
    assert (error.event, error.data["code"]) == ("error", "taken_over")
    newer.take("caught-up")
    shared_server.write(topic, 3)
    [record, _] = newer.take("record", "caught-up")
    assert (record.data["from_seq"], record.seqs) == (2, [3])
    newer.close()


def test_watchers_do_not_notice_each_other(shared_server: Server, topic: str) -> None:
    """Different options, starts and protocols on one topic: each gets its own frames."""
    shared_server.write(topic, *range(5))
    kinds: list[tuple[Protocol, Json, Json]] = [
        (protocol, start, fields)
        for protocol in ("http1", "h2c")
        for start in ({}, {"from_seq": 3}, {"tail": True})
        for fields in ({}, {"limit": 2}, {"include_tags": True}, {"max_batch_bytes": 1})
    ]
    streams = [follow(shared_server, {topic: start}, protocol, **fields) for protocol, start, fields in kinds]
    for i in range(20):
        shared_server.write(topic, i)
    starts = [5 if start.get("tail") else int(start.get("from_seq", 0)) for _, start, _ in kinds]
    frame_checkers = [FrameChecker({topic: start}) for start in starts]
    by_stream: dict[EventStream, FrameChecker] = dict(zip(streams, frame_checkers))
    pump(
        streams,
        lambda: all(frame_checker.cursors[topic] == 25 for frame_checker in frame_checkers),
        lambda stream, frame: by_stream[stream].take(frame),
    )
    for frame_checker, start in zip(frame_checkers, starts):
        assert frame_checker.seqs[topic] == list(range(start + 1, 26))
    for stream in streams:
        stream.close()
