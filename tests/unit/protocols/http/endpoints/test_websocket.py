"""Goal: on one socket answers come in the order of the commands, before their effects, and every queue is bounded.

Method: the server's end of a WebSocket with shipped fronts and shards; the test carries the messages between them.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from router.watch import fanout as fanout_module
from tests.support.faults import fault
from tests.support.watch_rig import Client, Front, Town
from topics.api.api_keys import ApiKey, parse_keys
from topics.protocols.http.endpoints import websocket as websocket_module
from topics.protocols.http.endpoints.websocket import (
    COMMANDS_BYTES_MAX,
    COMMANDS_WAITING_MAX,
    WebSocketWatcher,
)


class Peer(Client):
    """The client of a WebSocket: its frames are messages."""

    stream: WebSocketWatcher

    def say(self, op: str, **fields: Any) -> None:
        self.stream.received(json.dumps({"op": op, **fields}))

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        data = b"".join(self.writes)
        while data:
            assert data[0] == 0x81
            size, at = data[1], 2
            if size == 126:
                size, at = int.from_bytes(data[2:4]), 4
            elif size == 127:
                size, at = int.from_bytes(data[2:10]), 10
            found.append(json.loads(data[at : at + size]))
            data = data[at + size :]
        return found

    def ops(self, topic: str | None = None) -> list[str]:
        return [m["op"] for m in self.messages if topic is None or m.get("topic") == topic]

    def records(self, topic: str = "t") -> list[int]:
        pages = [m for m in self.messages if m["op"] == "record" and m["topic"] == topic]
        for before, after in itertools.pairwise(pages):
            assert before["to_seq"] == after["from_seq"]
        return [record["$seq"] for page in pages for record in page["records"]]


def connect(town: Town, front: Front | None = None, key: ApiKey | None = None) -> Peer:
    front = front or town.front
    peer = Peer(town.soon)
    leave = front.streams.reserve(key)
    assert leave is not None
    peer.stream = WebSocketWatcher(front.call(key=key), leave)
    peer.stream.opened(peer)
    return peer


def subscribed(town: Town, **fields: Any) -> Peer:
    peer = connect(town)
    peer.say("subscribe", **(fields or {"topic": "t"}))
    town.rest()
    return peer


# ---- order


def test_commands_are_answered_in_their_order_however_long_each_takes() -> None:
    town = Town()
    town.write()
    peer = connect(town)
    peer.say("publish", topic="t", records=[{"data": 1}], request_id=1)
    peer.say("ping", request_id=2)
    peer.say("subscribe", topic="t", request_id=3)
    peer.say("unsubscribe", topic="t", request_id=4)
    peer.say("nonsense", request_id=5)
    peer.say("ping", request_id=6)
    town.rest()
    answers = [(m["op"], m["request_id"]) for m in peer.messages if "request_id" in m]
    assert answers == [
        ("ack", 1),
        ("pong", 2),
        ("subscribed", 3),
        ("unsubscribed", 4),
        ("error", None),
        ("pong", 6),
    ]


def test_an_answer_is_in_front_of_what_it_causes() -> None:
    town = Town()
    town.write(2)
    other = subscribed(town)
    peer = connect(town)
    peer.say("subscribe", topic="t", from_seq=1)
    peer.say("publish", topic="t", records=[{"data": 1}])
    town.rest()
    assert peer.ops() == [
        "subscribed",
        "record",
        "caught_up",
        "ack",
        "record",
        "caught_up",
    ] or peer.ops() == [
        "subscribed",
        "record",
        "caught_up",
        "record",
        "caught_up",
        "ack",
    ]
    assert (peer.records(), other.records()) == ([2, 3], [1, 2, 3])


def test_nothing_of_a_topic_comes_after_unsubscribed() -> None:
    for delay in range(5):
        town = Town()
        town.write(3)
        peer = subscribed(town)
        town.write()
        for _ in range(delay):
            town.carry_down()
            town.carry_up()
        peer.say("unsubscribe", topic="t")
        town.write()
        town.rest()
        assert peer.ops()[-1] == "unsubscribed"
        assert len(town.rig.core.watch.feeds) == 0


def test_a_second_subscribe_replaces_the_first() -> None:
    town = Town()
    town.write(4)
    peer = subscribed(town)
    peer.writes.clear()
    peer.say("subscribe", topic="t", from_seq=2, include_data=False)
    town.rest()
    assert peer.ops() == ["subscribed", "record", "caught_up"]
    assert peer.records() == [3, 4]
    assert "data" not in peer.messages[1]["records"][0]
    town.write()
    town.rest()
    assert peer.records() == [3, 4, 5]
    assert len(town.rig.core.watch.feeds) == 1


def test_all_sockets_get_the_same_bytes() -> None:
    town = Town()
    town.write()
    peers = [subscribed(town) for _ in range(3)]
    town.write()
    town.rest()
    assert all(peer.writes[-1] is peers[0].writes[-1] for peer in peers)


# ---- bounds


def test_while_the_client_takes_nothing_no_command_is_begun() -> None:
    town = Town()
    town.write()
    peer = connect(town)
    peer.is_full = True
    for i in range(3):
        peer.say("ping", request_id=i)
    peer.say("subscribe", topic="t")
    town.rest()
    assert peer.writes == []
    peer.drain()
    town.rest()
    assert peer.ops() == ["pong", "pong", "pong", "subscribed", "record", "caught_up"]


def test_a_socket_with_much_to_answer_is_busy() -> None:
    town = Town()
    peer = connect(town)
    peer.is_full = True
    for i in range(COMMANDS_WAITING_MAX):
        assert not peer.stream.is_busy
        peer.say("ping", request_id=i)
    assert peer.stream.is_busy
    peer.drain()
    assert not peer.stream.is_busy
    assert [m["request_id"] for m in peer.messages] == list(range(COMMANDS_WAITING_MAX))


def test_large_commands_make_a_socket_busy_sooner() -> None:
    town = Town()
    peer = connect(town)
    peer.is_full = True
    peer.say("ping", request_id="x" * COMMANDS_BYTES_MAX)
    assert peer.stream.is_busy
    peer.drain()
    assert not peer.stream.is_busy and peer.stream._waiting_bytes == 0


def test_a_socket_follows_only_so_many_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_module, "STREAM_TOPICS_MAX", 2)
    monkeypatch.setattr(fanout_module, "STREAM_TOPICS_MAX", 2)
    town = Town()
    for name in ("a", "b", "c"):
        town.write(1, name)
    peer = subscribed(town, topics={"a": {}, "b": {}})
    peer.say("subscribe", topic="c", request_id=7)
    town.rest()
    assert peer.messages[-1]["code"] == "invalid_request"
    peer.say("subscribe", topic="b", request_id=8)
    town.rest()
    assert "subscribed" in peer.ops()[-3:]
    assert set(peer.stream.subs) == {"a", "b"}


# ---- errors


@pytest.mark.parametrize(
    "message, code, request_id",
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_json", None),
        ('{"op":"dance","request_id":1}', "invalid_json", None),
        ('{"op":"subscribe","request_id":1}', "invalid_request", 1),
        ('{"op":"subscribe","topic":7,"request_id":1}', "invalid_json", None),
        ('{"op":"subscribe","topic":"none","request_id":1}', "topic_not_found", 1),
        ('{"op":"subscribe","topic":"a.>.b","request_id":1}', "invalid_request", 1),
        ('{"op":"subscribe","topics":["t"],"request_id":1}', "invalid_json", None),
        ('{"op":"publish","topic":"t","request_id":1}', "invalid_json", None),
        ('{"op":"publish","records":[{"data":1}],"request_id":1}', "invalid_json", None),
        ('{"op":"publish","topic":"a b","records":[{"data":1}],"request_id":1}', "invalid_request", 1),
        ('{"op":"publish","topic":"%s","records":[{"data":1}],"request_id":1}' % ("x" * 70_000),
         "invalid_request", 1),
        ('{"op":"unsubscribe","topics":{},"request_id":1}', "invalid_json", None),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_command_that_fails_costs_only_itself(message: str, code: str, request_id: object) -> None:
    town = Town()
    town.write()
    peer = connect(town)
    peer.stream.received(message)
    town.rest()
    (error,) = peer.messages
    assert (error["op"], error["code"], error["request_id"]) == ("error", code, request_id)
    assert error["message"]
    peer.say("ping", request_id=2)
    assert peer.ops() == ["error", "pong"]
    assert town.front.core.in_flight == 0


COMMANDS: list[dict[str, Any]] = [
    {"op": "ping", "topic": "t"},
    {"op": "subscribe", "topics": {"t": {"tial": True}}},
    {"op": "unsubscribe", "topic": "t", "limit": 5},
    {"op": "publish", "topic": "t", "records": [{"data": {"a": 1}, "delay_ms": 1}], "return_seq": False},
    {"op": "publish", "topic": "t", "records": [{"data": "x" * 700_000, "delay_ms": 1}] * 2},
]


def test_fields_that_a_command_does_not_know_are_named_in_its_answer() -> None:
    town = Town()
    town.write()
    peer = connect(town)
    for command in COMMANDS:
        peer.say(**command)
        town.rest()
    answers = {m["op"] + str(i): m.get("ignored") for i, m in enumerate(peer.messages) if m["op"] != "record"}
    assert list(answers.values()) == [
        ["topic"], ["topics.t.tial"], None, ["limit"], ["return_seq", "records[].delay_ms"], ["records[].delay_ms"],
    ], answers  # fmt: skip


def test_a_strict_socket_refuses_them() -> None:
    town = Town()
    town.write()
    peer = Peer(town.soon)
    leave = town.front.streams.reserve(None)
    assert leave is not None
    peer.stream = WebSocketWatcher(town.front.call(strict=b"1"), leave)
    peer.stream.opened(peer)
    for number, command in enumerate(COMMANDS):
        peer.say(**command, request_id=number)
        town.rest()
    assert [(m["code"], m["request_id"]) for m in peer.messages] == [
        ("invalid_request", number) for number in range(len(COMMANDS))
    ]
    assert peer.messages[1]["message"] == 'unknown field "topics.*.tial"; did you mean "tail"?'
    peer.say("publish", topic="t", records=[{"data": 1, "tag": "a"}], request_id={"a": 1}, return_seqs=False)
    town.rest()
    assert peer.messages[-1]["op"] == "ack"


def test_bytes_are_not_understood_and_do_no_harm() -> None:
    town = Town()
    peer = connect(town)
    peer.stream.received_bytes()
    peer.say("ping")
    assert [m.get("code") for m in peer.messages] == ["unsupported_message", None]


def test_each_message_is_checked_for_its_own_scope() -> None:
    town = Town()
    town.write(1, "a.1")
    read, write = parse_keys("one:read:a.,two:write:a.")
    for key, may in ((read, "subscribe"), (write, "publish")):
        peer = connect(town, key=key)
        for name in ("a.1", "b.1"):
            peer.say("subscribe", topic=name, request_id="subscribe" + name)
            peer.say("publish", topic=name, records=[{"data": 1}], request_id="publish" + name)
        town.rest()
        fine = [m["request_id"] for m in peer.messages if m["op"] in ("subscribed", "ack")]
        codes = {m["code"] for m in peer.messages if m["op"] == "error"}
        assert (fine, codes) == ([may + "a.1"], {"forbidden"})


# ---- ends


@fault("client", "a WebSocket is gone before its subscription is answered", "nothing is followed for it")
def test_a_client_that_is_gone_is_not_subscribed() -> None:
    town = Town()
    town.write()
    peer = connect(town)
    peer.say("subscribe", topics={"t": {}, "a.>": {}})
    peer.leave()
    town.rest()
    assert len(town.rig.core.watch.feeds) == 0
    assert len(town.rig.core.watch._name_watches) == 0
    assert peer.stream.subs == {} and town.front.streams.count == 0


def test_whatever_is_answered_after_the_end_is_not_written() -> None:
    town = Town()
    peer = connect(town)
    peer.say("subscribe", topic="none")
    peer.say("ping")
    peer.stream.end_with("server_shutting_down", "bye")
    town.rest()
    assert [m["code"] for m in peer.messages] == ["server_shutting_down"]
    assert peer.is_closed and town.front.streams.count == 0


def test_a_client_that_takes_nothing_is_let_go() -> None:
    town = Town()
    town.write()
    peer = subscribed(town)
    peer.is_full = True
    town.write()
    town.advance(32_000_000)
    assert (peer.messages[-1]["code"], peer.is_closed) == ("slow_consumer", True)
    assert len(town.rig.core.watch.feeds) == 0


def test_a_deleted_topic_is_let_go_and_may_be_subscribed_again() -> None:
    town = Town()
    town.write(2)
    peer = subscribed(town)
    town.rig.drop()
    town.rest()
    assert (peer.ops()[-1], peer.stream.subs) == ("topic_deleted", {})
    town.write()
    town.rest()
    assert peer.ops()[-1] == "topic_deleted"
    peer.say("subscribe", topic="t")
    town.rest()
    assert peer.messages[-2]["records"][0]["$seq"] == 1


def test_patterns_of_a_socket_find_topics_until_they_are_taken_back() -> None:
    town = Town()
    town.write(2, "a.1")
    peer = subscribed(town, topics={"a.*": {"tail": True}})
    town.write(1, "a.2")
    town.write(1, "a.1")
    town.rest()
    assert (peer.records("a.1"), peer.records("a.2")) == ([3], [1])
    peer.say("unsubscribe", topic="a.*")
    for name in ("a.1", "a.2", "a.3"):
        town.write(1, name)
    town.rest()
    assert (peer.records("a.1"), peer.records("a.2"), peer.records("a.3")) == ([3], [1], [])
    assert len(town.rig.core.watch._name_watches) == len(town.rig.core.watch.feeds) == 0


@fault(
    "worker",
    "a worker dies that a WebSocket writes to and reads from",
    "the command is refused, the news go on",
)
def test_a_socket_outlives_a_shard() -> None:
    town = Town()
    town.write()
    peer = subscribed(town)
    town.disks[0].sync_all()
    peer.say("publish", topic="t", records=[{"data": 1}], request_id=1)
    town.collect()
    town.kill()
    assert (peer.messages[-1]["code"], peer.messages[-1]["request_id"]) == ("not_ready", 1)
    peer.say("subscribe", topic="u", request_id=2)
    assert peer.messages[-1]["code"] == "not_ready"
    town.start()
    town.write()
    town.advance(1_000_000)
    assert peer.records() == [1, 2]
