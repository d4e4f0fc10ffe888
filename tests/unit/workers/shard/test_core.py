"""Goal: a shard answers every request once, to its sender, and survives any input.

Method: a ShardCore over a real engine on a simulated disk and clock; requests and replies are bytes of the wire.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.support.engine_harness import SMALL
from tests.support.faults import fault
from tests.support.shard_answers import ShardAnswer, as_answer
from tests.support.shard_rig import FRONT, Rig, error_of
from topics.api.limits import MIB
from topics.engine.core.quotas import QuotaGrant
from topics.link import wire
from topics.link.reports import Readiness, ShardReport
from topics.protocols.json import replies
from workers.peers.links import PARK_US
from workers.shard import caps as caps_module
from workers.shard.flow_control import READS_PER_TURN, TURN_READ_BYTES, WINDOW_BYTES

CHANGING = {wire.WRITE: {"records": [{"data": 1}]}, wire.DELETE: {"before_seq": 1}, wire.PUT_TOPIC: {}}
ROOMY = msgspec.structs.replace(SMALL, wal_file_bytes=4 * MIB)
CAPPED = msgspec.structs.replace(ROOMY, max_topics=2)


def write(*data: Any) -> dict[str, Any]:
    return {"records": [{"data": value} for value in data]}


def body_of(reply: ShardAnswer | None) -> Any:
    assert reply is not None
    return json.loads(bytes(reply.body))


# ---- while it recovers


@fault(
    "worker",
    "a request arrives while the shard still replays its log",
    "503 with the progress; it is never executed later",
)
@pytest.mark.parametrize("op", [wire.WRITE, wire.DIFF, wire.DELETE, wire.PUT_TOPIC, wire.LIST_TOPICS])
def test_until_it_has_recovered_a_shard_says_how_far_it_is(op: int) -> None:
    rig = Rig(recovered=False)
    rig.core.progress = 0.25
    error = error_of(rig.ask(op, body=CHANGING.get(op, b"")))
    assert error["code"] == "not_ready"
    assert error["detail"] == {"replay_progress": 0.25}


def test_requests_refused_during_recovery_are_not_executed_later() -> None:
    rig = Rig(recovered=False)
    rig.ask(wire.WRITE, body=write(1))
    rig.recover()
    assert error_of(rig.ask(wire.GET_TOPIC))["code"] == "topic_not_found"


def test_questions_about_the_shard_are_answered_while_it_recovers() -> None:
    rig = Rig(recovered=False)
    rig.core.progress = 0.5
    ready, metrics = rig.ask(wire.READY), rig.ask(wire.METRICS)
    assert ready is not None and metrics is not None
    assert msgspec.msgpack.decode(ready.body, type=Readiness).progress == 0.5
    report = msgspec.msgpack.decode(metrics.body, type=ShardReport)
    assert (report.progress, report.topic_count) == (0.5, 0)


# ---- requests that are not executed


@fault(
    "worker",
    "a request waited too long before the worker came to it",
    "refused, and never carried out: its client was answered long ago",
)
def test_a_request_that_waited_too_long_is_refused_and_not_executed() -> None:
    rig = Rig()
    rig.clock.advance(60_000)
    late = error_of(rig.ask(wire.WRITE, body=write(1), received_us=rig.now_us() - 30_000_001))
    assert late["code"] == "not_ready"
    assert "outcome" not in late.get("detail", {})
    assert error_of(rig.ask(wire.GET_TOPIC))["code"] == "topic_not_found"
    in_time = rig.ask(wire.WRITE, body=write(1), received_us=rig.now_us() - 30_000_000)
    assert in_time is not None and in_time.status == 201


@fault("link", "a message for the worker before this one", "it is not read")
def test_a_message_for_another_incarnation_is_not_read() -> None:
    rig = Rig(incarnation=5)
    for other in (4, 6):
        assert rig.ask(wire.WRITE, body=write(1), incarnation=other) is None
    assert error_of(rig.ask(wire.GET_TOPIC))["code"] == "topic_not_found"


HOSTILE = {
    "not JSON": b"{",
    "not UTF-8": b'{"records":[{"data":"\xff"}]}',
    "deep": b'{"records":[{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    "empty": b"",
    "another type": b'{"records":7}',
    "huge number": b'{"records":[{"data":1,"ttl_ms":' + b"9" * 400 + b"}]}",
}


@fault("request", "any body with any command", "an answer; the worker goes on")
@pytest.mark.parametrize(
    "op, encoding",
    [
        (wire.WRITE, wire.JSON),
        (wire.WRITE, wire.LINES),
        (wire.WRITE, wire.RAW),
        (wire.DIFF, wire.JSON),
        (wire.DELETE, wire.JSON),
        (wire.PUT_TOPIC, wire.JSON),
    ],
)
def test_no_body_takes_the_shard_down(op: int, encoding: int) -> None:
    rig = Rig(ROOMY)
    for name, body in HOSTILE.items():
        reply = rig.ask(op, name.replace(" ", "-"), body, encoding=encoding)
        assert reply is not None and reply.status in (200, 201, 400, 404), name
        served = rig.ask(wire.WRITE, f"other-{name}".replace(" ", "-"), write(1))
        assert served is not None and served.status == 201, name


@fault(
    "link",
    "arguments of a request cannot be read",
    "that request fails; the others of its message are answered",
)
@pytest.mark.parametrize("op, args", [(0, b""), (wire.WRITE, b"\xc1"), (wire.LIST_TOPICS, b"\x93")])
def test_an_unreadable_request_fails_alone(op: int, args: bytes) -> None:
    rig = Rig()
    before = rig.receive(wire.WRITE, "a", write(1))
    bad = rig.receive(op, "b", write(1), args=args)
    after = rig.receive(wire.WRITE, "c", write(1))
    rig.rest()
    assert [rig.replies[key].status for key in (before, bad, after)] == [201, 500, 201]


@fault("worker", "an answer cannot be made", "that request fails; the others are answered")
def test_an_answer_that_cannot_be_made_is_a_fault_of_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("an odd record")

    rig = Rig()
    rig.ask(wire.WRITE, body=write(1))
    monkeypatch.setattr(replies, "page", fails)
    read = rig.receive(wire.DIFF)
    state = rig.receive(wire.GET_TOPIC)
    rig.rest()
    assert [rig.replies[key].status for key in (read, state)] == [500, 200]


# ---- the addressee of each reply


def test_replies_go_to_whoever_asked_even_with_the_same_ids() -> None:
    rig = Rig()
    head = wire.message_head(1)
    for peer in (b"front-a", b"front-b"):
        text = json.dumps(write(1)).encode()
        topic = peer.removeprefix(b"front-")
        request = wire.request_head(7, 0, 30_000, wire.WRITE, 0, topic, b"", len(text))
        rig.core.receive(peer, head + request + text)
    rig.rest()
    assert body_of(rig.replies[b"front-a", 7])["topic"] == "a"
    assert body_of(rig.replies[b"front-b", 7])["topic"] == "b"


def test_small_replies_of_a_turn_are_one_message_to_each_peer() -> None:
    rig = Rig()
    for peer in (b"one", b"two"):
        for _ in range(3):
            rig.receive(wire.GET_TOPIC, peer=peer)
    sends = rig.core.tend().sends + rig.core.turn().sends
    assert sorted((peer, len(parts)) for peer, parts in sends) == [(b"one", 1), (b"two", 1)]


def test_plain_requests_give_the_services_nothing_to_do() -> None:
    rig = Rig()
    rig.ask(wire.WRITE, body=write(1, 2))
    rig.turn()
    for op, body in (
        (wire.WRITE, write(3)),
        (wire.DIFF, {}),
        (wire.DIFF, {"from_seq": 3}),
        (wire.GET_TOPIC, b""),
    ):
        key = rig.receive(op, body=body)
        assert rig.core.turn().sends, key
        assert not rig.core.needs_tending


def test_a_refusal_before_any_turn_is_sent() -> None:
    rig = Rig()
    rig.rest()
    key = rig.receive(wire.WRITE, body=b"{")
    assert not rig.core.needs_turn and rig.core.needs_tending
    rig.rest()
    assert key in rig.replies


def test_a_reply_leaves_before_other_work_of_its_turn() -> None:
    """What the turn leads to, here the announcement of a claim's front, follows when the services are tended."""
    rig = Rig()
    rig.ask(wire.PUT_TOPIC, "jobs", {"type": "queue"})
    rig.receive(wire.CLAIM, "jobs", {"node": "n", "max": 1, "lease_ms": 1000})
    ((_, parts),) = rig.core.turn().sends
    assert len(parts[0]) > len(wire.message_head(1))
    assert rig.core.needs_tending
    assert rig.core.tend().sends == [(FRONT, [wire.message_head(1)])], "a probe"


def test_a_large_reply_goes_as_a_part_of_its_own() -> None:
    rig = Rig(ROOMY)
    rig.ask(wire.WRITE, body=write("x" * wire.SEPARATE_BODY_BYTES))
    key = rig.receive(wire.DIFF)
    actions = rig.core.turn()
    ((peer, parts),) = actions.sends
    assert (peer, len(parts)) == (FRONT, 2)
    (reply,) = map(as_answer, wire.read_replies(bytes(parts[0]), parts[1]))
    assert reply.id == key[1]
    assert body_of(reply)["records"][0]["data"] == "x" * wire.SEPARATE_BODY_BYTES


def test_a_large_body_may_come_as_a_part_of_its_own() -> None:
    rig = Rig(ROOMY)
    text = json.dumps(write("x" * wire.SEPARATE_BODY_BYTES)).encode()
    head = wire.request_head(1, 0, 30_000, wire.WRITE, 0, b"t", b"", wire.SEPARATE)
    rig.core.receive(FRONT, wire.message_head(1) + head, memoryview(text))
    rig.rest()
    assert rig.replies[FRONT, 1].status == 201


def test_an_fsync_write_is_answered_only_after_its_sync() -> None:
    rig = Rig()
    rig.ask(wire.PUT_TOPIC, body={"durability": "fsync"})
    key = rig.receive(wire.WRITE, body=write(1))
    rig.turn()
    assert key not in rig.replies
    assert [job.kind for job in rig.jobs] == ["sync"]
    rig.rest()
    assert rig.replies[key].status == 200


def test_reads_that_come_together_share_what_a_turn_may_fetch() -> None:
    """Each alone would get a page of three records; together each gets one, and comes back for more."""
    rig = Rig(msgspec.structs.replace(SMALL, wal_file_bytes=16 * MIB))
    for _ in range(3):
        rig.ask(wire.WRITE, body=write("x" * (MIB // 2)))
    alone = rig.ask(wire.DIFF, body={"max_batch_bytes": 8 * MIB})
    assert len(body_of(alone)["records"]) == 3
    keys = [rig.receive(wire.DIFF, body={"max_batch_bytes": 8 * MIB}) for _ in range(6 * READS_PER_TURN)]
    rig.rest()
    pages = [body_of(rig.replies[key]) for key in keys]
    assert {len(page["records"]) for page in pages} == {1}
    assert not any(page["caught_up"] for page in pages)


# ---- fronts that do not read their answers


def stuffed_rig() -> Rig:
    """A topic with pages of 8 MiB, and a front that reads nothing of what it gets."""
    rig = Rig(msgspec.structs.replace(SMALL, wal_file_bytes=16 * MIB))
    for _ in range(9):
        rig.ask(wire.WRITE, body=write("x" * 900_000))
    rig.takes = False
    return rig


def take(rig: Rig, size: int, peer: bytes = FRONT) -> None:
    rig.core.receive(peer, wire.message_head(1) + wire.window_update(size))


def answered_bytes(rig: Rig, keys: list[tuple[bytes, int]]) -> int:
    return sum(len(rig.replies[key].body) for key in keys if key in rig.replies)


@fault(
    "worker",
    "a front takes none of the answers that it is sent",
    "its reads wait, and what it was sent is bounded; writes and other fronts are served",
)
def test_reads_wait_for_a_front_that_does_not_take_its_answers() -> None:
    rig = stuffed_rig()
    page = {"max_batch_bytes": 8 * MIB}
    keys = [rig.receive(wire.DIFF, body=page) for _ in range(10 * READS_PER_TURN)]
    rig.rest()
    sent = answered_bytes(rig, keys)
    assert WINDOW_BYTES < sent <= WINDOW_BYTES + TURN_READ_BYTES
    key = rig.receive(wire.DIFF, body=page)
    rig.rest()
    assert key not in rig.replies, "one that comes later waits, too"
    assert rig.ask(wire.WRITE, body=write(1)) is not None
    assert rig.ask(wire.DIFF, body=page, peer=b"another front") is not None
    rig.takes = True  # from now on
    take(rig, sent)
    rig.rest()
    assert {rig.replies[key].status for key in keys} == {200}


def test_a_read_that_waited_too_long_for_its_front_is_refused() -> None:
    rig = stuffed_rig()
    for _ in range(3):
        rig.ask(wire.DIFF, body={"max_batch_bytes": 8 * MIB})
    key = rig.receive(wire.DIFF)
    rig.rest()
    rig.clock.advance(30_001)
    take(rig, 64 * MIB)
    rig.rest()
    assert error_of(rig.replies[key])["code"] == "not_ready"


def test_long_polls_wait_for_a_front_that_does_not_take_its_answers() -> None:
    rig = stuffed_rig()
    at_head = {"from_seq": 9, "wait_ms": 1000}
    key, other = rig.receive(wire.DIFF, body=at_head), rig.receive(wire.DIFF, body=at_head, peer=b"another")
    rig.rest()
    for _ in range(3):
        rig.ask(wire.DIFF, body={"max_batch_bytes": 8 * MIB})
    rig.ask(wire.WRITE, body=write(1))
    assert key not in rig.replies and other in rig.replies
    rig.clock.advance(1001)
    rig.rest()
    assert key not in rig.replies, "nor when its time is up"
    take(rig, 64 * MIB)
    rig.rest()
    assert [row["data"] for row in body_of(rig.replies[key])["records"]] == [1]


@fault("worker", "a front dies with much that it has not taken", "it is found out, and nothing waits for it")
def test_a_front_that_is_gone_is_not_waited_for() -> None:
    rig = stuffed_rig()
    for _ in range(4):
        rig.receive(wire.DIFF, body={"max_batch_bytes": 8 * MIB})
        rig.turn()
    assert rig.wake_at_ms is not None, "it is handled"
    rig.clock.advance(1001)
    probes = rig.core.turn().sends + rig.core.tend().sends
    assert probes == [(FRONT, [wire.message_head(1)])]
    rig.core.forget_peer(FRONT)
    rig.rest()
    assert rig.ask(wire.DIFF) is not None


# ---- caps of one shard; those of several are in test_caps.py


def silent_catalog(rig: Rig) -> None:
    """Shard 1's catalog is on another shard, and does not answer."""
    rig.core.set_peers({0: 1})
    rig.rest()
    rig.asks.clear()


def lone_shard() -> Rig:
    rig = Rig(msgspec.structs.replace(CAPPED, shard=1), shards=2)
    silent_catalog(rig)
    return rig


def grant(rig: Rig, topics: int, *, final: bool = False) -> None:
    rig.caps.receive(msgspec.msgpack.encode(QuotaGrant(topics, 0, final, 1, 1)))


def test_a_write_over_the_grant_waits_for_more() -> None:
    rig = lone_shard()
    key = rig.receive(wire.WRITE, "a", write(1))
    rig.rest()
    assert key not in rig.replies
    assert len(rig.asks) == 1
    grant(rig, 1)
    rig.rest()
    assert rig.replies[key].status == 201


def test_the_last_word_of_the_catalog_is_a_429_for_all_that_take_no_less() -> None:
    rig = Rig(msgspec.structs.replace(ROOMY, shard=1, max_total_bytes=1000), shards=2)
    silent_catalog(rig)
    keys = [rig.receive(wire.WRITE, str(size), write("x" * size)) for size in (500, 600, 10)]
    rig.rest()
    rig.caps.receive(msgspec.msgpack.encode(QuotaGrant(3, 0, True, 1, 1)))
    rig.rest()
    for key in keys[:2]:
        assert error_of(rig.replies[key])["detail"] == {"limit": "max_total_bytes", "max": 1000}
    assert keys[2] not in rig.replies  # a smaller one may still fit: it is requested again
    assert len(rig.asks) == 2


def test_a_final_word_for_one_that_gave_up_refuses_nobody_else() -> None:
    rig = Rig(msgspec.structs.replace(ROOMY, shard=1, max_total_bytes=1000), shards=2)
    silent_catalog(rig)
    large = rig.receive(wire.WRITE, "large", write("x" * 900))
    rig.rest()
    rig.clock.advance(1000)
    small = rig.receive(wire.WRITE, "small", write(1))
    rig.rest()
    rig.clock.advance(PARK_US // 1000 - 999)
    rig.rest()
    assert error_of(rig.replies[large])["code"] == "not_ready"
    rig.caps.receive(msgspec.msgpack.encode(QuotaGrant(1, 0, True, 1, 1)))
    rig.rest()
    assert small not in rig.replies
    rig.caps.receive(msgspec.msgpack.encode(QuotaGrant(0, 1, False, 1, 1)))
    rig.rest()
    assert rig.replies[small].status == 201


@fault(
    "worker",
    "the catalog does not answer a worker that needs more of a cap",
    "the write is refused with 503 and may be sent again",
)
def test_a_parked_write_is_told_to_come_back_when_nobody_answers() -> None:
    rig = lone_shard()
    key = rig.receive(wire.WRITE, "a", write(1))
    rig.rest()
    assert rig.wake_at_ms == PARK_US // 1000
    rig.clock.advance(PARK_US // 1000 - 1)
    rig.rest()
    assert key not in rig.replies
    rig.clock.advance(2)
    rig.rest()
    error = error_of(rig.replies[key])
    assert error["code"] == "not_ready"
    assert error_of(rig.ask(wire.GET_TOPIC, "a"))["code"] == "topic_not_found"


def test_being_asked_again_does_not_make_a_write_wait_longer() -> None:
    rig = lone_shard()
    rig.receive(wire.WRITE, "a", write(1))
    key = rig.receive(wire.WRITE, "b", write(1))
    rig.rest()
    rig.clock.advance(PARK_US // 2000)
    grant(rig, 1)
    rig.rest()
    rig.clock.advance(PARK_US // 2000)
    rig.rest()
    assert error_of(rig.replies[key])["code"] == "not_ready"


@fault("worker", "many writes wait for the catalog", "beyond a bound they are refused with 503")
def test_only_so_many_writes_are_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps_module, "PARKED_MAX", 3)
    rig = lone_shard()
    keys = [rig.receive(wire.WRITE, f"t{i}", write(1)) for i in range(5)]
    rig.rest()
    assert [key in rig.replies for key in keys] == [False, False, False, True, True]
    assert error_of(rig.replies[keys[4]])["code"] == "not_ready"


def test_room_that_is_made_in_the_same_turn_is_found() -> None:
    """The write was over the grant when it was checked, and is not any more when it is parked."""
    rig = lone_shard()
    rig.receive(wire.WRITE, "a", write(1))
    rig.rest()
    grant(rig, 1)
    rig.rest()
    made = rig.receive(wire.WRITE, "b", write(1))
    dropped = rig.receive(wire.DROP_TOPIC, "a")
    rig.rest()
    assert [rig.replies[key].status for key in (made, dropped)] == [201, 200]


@fault(
    "link",
    "a request about routers in an encoding that does not exist",
    "an error at once; the catalog does not fail when it answers later",
)
@pytest.mark.parametrize("op", [wire.PUT_FORWARD, wire.GET_FORWARD, wire.LIST_FORWARDS, wire.DROP_FORWARD])
@pytest.mark.parametrize("encoding", [wire.MSGPACK, 77])
def test_a_request_about_routers_in_no_encoding_is_refused(op: int, encoding: int) -> None:
    rig = Rig()
    args = wire.encode_args(wire.Args(forward="r", page_size=10))
    assert error_of(rig.ask(op, "", b"{}", args=args, encoding=encoding))["code"] == "invalid_request"
    served = rig.ask(wire.WRITE, "t", write(1))
    assert served is not None and served.status == 201
