"""Goal: queues and consumers behind the wire: every claim is answered once, and large answers wait for fronts that do
not read.

Method: a ShardCore over a real engine on a simulated disk and clock; requests and replies are bytes of the wire.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.support.engine_harness import SMALL
from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import FRONT, Rig, error_of
from topics.api.limits import MIB
from topics.engine.shard.consumers.admin import Consumers
from topics.link import wire
from topics.link.reports import ShardReport
from workers.shard.flow_control import READS_PER_TURN

ROOMY = msgspec.structs.replace(SMALL, wal_file_bytes=4 * MIB)
QUEUE = {"type": "queue"}


def queue(*data: Any, config: Any = None) -> Rig:
    rig = Rig(ROOMY)
    rig.ask(wire.PUT_TOPIC, body=QUEUE | (config or {}))
    if data:
        rig.ask(wire.WRITE, body={"records": [{"data": value} for value in data]})
    return rig


def body_of(reply: ShardAnswer | None) -> Any:
    assert reply is not None
    assert reply.status in (200, 201), bytes(reply.body)
    return json.loads(bytes(reply.body))


def claim(rig: Rig, **fields: Any) -> Any:
    return body_of(rig.ask(wire.CLAIM, body={"node": "w", **fields}))


def for_consumer(name: str = "c") -> bytes:
    return wire.encode_args(wire.Args(consumer=name))


def seqs(claimed: Any) -> list[int]:
    return [job["$seq"] for job in claimed["claimed"]]


def test_a_job_from_claim_to_ack() -> None:
    rig = queue("a", "b", "c")
    first = claim(rig, max=2)
    assert (seqs(first), first["count"], first["ready"]) == ([1, 2], 2, 1)
    fence = [job["lease_id"] for job in first["claimed"]]
    acked = body_of(rig.ask(wire.ACK, body={"node": "w", "seqs": [1, 2], "lease_ids": ["lease_0", fence[1]]}))
    assert (acked["acked"], acked["skipped"], acked["ready"], acked["in_flight"]) == (1, [1], 1, 1)
    assert body_of(rig.ask(wire.GET_TOPIC))["queue"] == {"ready": 1, "in_flight": 1, "dead_lettered": 0}


def test_stored_consumers_that_overlap_are_logged_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(ROOMY)
    rig.ask(wire.PUT_TOPIC, body={"retention": "work_queue"})
    with monkeypatch.context() as before:
        before.setattr(Consumers, "_check_overlap", lambda *_: iter(()))  # as in files of an earlier version
        for name in ("a", "b"):
            assert rig.ask(wire.PUT_CONSUMER, body={}, args=for_consumer(name)).status == 201
    assert error_of(rig.ask(wire.PUT_CONSUMER, body={}, args=for_consumer()))["code"] == "consumer_overlap"
    Rig(ROOMY, disk=rig.disk, clock=rig.clock)
    (record,) = caplog.records
    assert record.message == "consumers of a work queue have overlapping filters"
    assert vars(record)["fields"] == {"topic": "t", "consumers": ["a", "b"]}


def test_the_order_of_checks_of_a_claim() -> None:
    rig = queue()
    rig.ask(wire.PUT_TOPIC, "log")
    assert error_of(rig.ask(wire.CLAIM, "none", b"{"))["code"] == "invalid_request"
    assert error_of(rig.ask(wire.CLAIM, "none", {"node": ""}))["code"] == "topic_not_found"
    assert error_of(rig.ask(wire.CLAIM, "log", {"node": ""}))["code"] == "not_a_queue"
    for node in ("", "n" * 129):
        assert error_of(rig.ask(wire.CLAIM, "t", {"node": node}))["code"] == "invalid_request"


def test_a_settle_is_checked_before_its_topic() -> None:
    rig = Rig()
    for op in (wire.ACK, wire.NACK, wire.EXTEND):
        body = {"node": "", "seqs": [1], "lease_ms": 500}
        assert error_of(rig.ask(op, "none", body))["code"] == "invalid_request"
        assert error_of(rig.ask(op, "none", body | {"node": "w"}))["code"] == "topic_not_found"


def test_a_claim_that_waits_is_answered_once_by_what_comes() -> None:
    rig = queue()
    key = rig.receive(wire.CLAIM, body={"node": "w", "wait_ms": 5000})
    rig.rest()
    assert key not in rig.replies
    rig.ask(wire.WRITE, body={"records": [{"data": 1}]})
    assert seqs(body_of(rig.replies[key])) == [1]


def test_a_claim_that_waits_in_vain_is_empty() -> None:
    rig = queue()
    key = rig.receive(wire.CLAIM, body={"node": "w", "wait_ms": 5000})
    rig.rest()
    rig.clock.advance(5001)
    rig.turn()
    assert seqs(body_of(rig.replies[key])) == []


def test_a_claim_that_waits_gets_nothing_while_its_front_does_not_take() -> None:
    """Otherwise its answers would pile up in a socket, with jobs leased to no one."""
    rig = queue()
    key = rig.receive(wire.CLAIM, body={"node": "w", "wait_ms": 20_000})
    rig.rest()
    fill_window(rig)
    rig.ask(wire.WRITE, body={"records": [{"data": 1}]}, peer=b"other")
    assert key not in rig.replies
    assert body_of(rig.ask(wire.GET_TOPIC, peer=b"other"))["queue"]["in_flight"] == 0
    rig.core.receive(FRONT, wire.message_head(rig.incarnation) + wire.window_update(64 * MIB))
    rig.rest()
    assert seqs(body_of(rig.replies[key])) == [1]


def fill_window(rig: Rig) -> None:
    """Read so much that the front is far behind."""
    rig.takes = False
    big = "x" * (900 * 1024)
    for _ in range(2):
        rig.ask(wire.WRITE, "big", {"records": [{"data": big}]}, peer=b"other")
    for _ in range(12):
        rig.ask(wire.DIFF, "big", {"max_batch_bytes": 2 * MIB})


def test_claims_wait_for_a_front_that_does_not_take() -> None:
    rig = queue("a")
    fill_window(rig)
    key = rig.receive(wire.CLAIM, body={"node": "w"})
    rig.rest()
    assert key not in rig.replies
    assert seqs(body_of(rig.ask(wire.CLAIM, body={"node": "v"}, peer=b"other"))) == [1]
    rig.core.receive(FRONT, wire.message_head(rig.incarnation) + wire.window_update(64 * MIB))
    rig.rest()
    assert seqs(body_of(rig.replies[key])) == []


def test_a_turn_begins_only_so_many_claims() -> None:
    rig = queue(*range(READS_PER_TURN + 5))
    keys = [rig.receive(wire.CLAIM, body={"node": "w"}) for _ in range(READS_PER_TURN + 5)]
    rig.turn()
    assert sum(key in rig.replies for key in keys) == READS_PER_TURN
    rig.rest()
    assert sorted(seqs(body_of(rig.replies[key]))[0] for key in keys) == list(range(1, READS_PER_TURN + 6))


def test_an_ack_tells_of_the_sync_it_waited_for() -> None:
    rig = queue("a", "b", config={"durability": "fsync"})
    claim(rig, max=2)
    key = rig.receive(wire.ACK, body={"node": "w", "seqs": [1]})
    rig.turn()
    (job,) = (job for job in rig.jobs if job.kind == "sync")
    rig.jobs.remove(job)
    job.run()
    rig._take(rig.core.finish(job, None, 2.5))
    assert body_of(rig.replies[key])["performance"]["fsync_ms"] == 2.5
    skipped = body_of(rig.ask(wire.ACK, body={"node": "w", "seqs": [1]}))
    assert "fsync_ms" not in skipped["performance"]


def test_a_consumer_from_put_to_delete() -> None:
    rig = Rig(ROOMY)
    rig.ask(wire.WRITE, body={"records": [{"data": 1, "tag": "eu"}, {"data": 2, "tag": "us"}]})
    args = for_consumer()
    made = rig.ask(wire.PUT_CONSUMER, body={"filter": "us", "headers_only": True}, args=args)
    assert made is not None
    assert (made.status, body_of(made)["created"]) == (201, True)
    again = rig.ask(wire.PUT_CONSUMER, body={"filter": "us"}, args=args)
    assert again is not None
    assert (again.status, body_of(again)["created"]) == (200, False)
    got = body_of(rig.ask(wire.CLAIM, body={"node": "w", "max": 5}, args=args))
    assert (got["consumer"], got["tombstone"], seqs(got)) == ("c", None, [2])
    assert got["claimed"][0]["data"] == 2
    acked = body_of(rig.ask(wire.ACK, body={"node": "w", "seqs": [2]}, args=args))
    assert (acked["consumer"], acked["acked"]) == ("c", 1)
    state = body_of(rig.ask(wire.GET_CONSUMER, args=args))
    assert (state["ack_floor"], state["lag_records"], state["acked"]) == (2, 0, 1)
    listed = body_of(rig.ask(wire.LIST_CONSUMERS, args=wire.encode_args(wire.Args(page_size=10))))
    assert [row["consumer"] for row in listed["consumers"]] == ["c"]
    assert body_of(rig.ask(wire.DROP_CONSUMER, args=args))["deleted"] is True
    assert error_of(rig.ask(wire.GET_CONSUMER, args=args))["code"] == "consumer_not_found"


def test_headers_only() -> None:
    rig = queue("abc")
    rig.ask(wire.PUT_CONSUMER, body={"headers_only": True, "ack": "none"}, args=for_consumer())
    (record,) = body_of(rig.ask(wire.CLAIM, body={"node": "w"}, args=for_consumer()))["claimed"]
    assert {*record} == {"$seq", "$ts", "deliveries", "bytes"}
    assert record["bytes"] == 5


def test_the_figures() -> None:
    rig = queue("a", "b", "c")
    rig.ask(wire.PUT_CONSUMER, args=for_consumer())
    claim(rig, max=2)
    reply = rig.ask(wire.METRICS)
    assert reply is not None
    report = msgspec.msgpack.decode(reply.body, type=ShardReport)
    assert (report.queue_topics, report.leases_in_flight, report.consumers) == (1, 2, 1)
    (row,) = report.topics
    assert (row.is_queue, row.ready, row.in_flight) == (True, 1, 2)
