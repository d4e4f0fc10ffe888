"""Goal: fetch, ack, nack, extend, term, pause, resume and reset of named consumers behave as docs/consumers.md says.

Method: each test has its own topic and compares whole answers. Timeouts and crashes of consumers are tested with the engine;
this is the HTTP interface.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.consumer_client import (
    COUNT_OF,
    SETTLES,
    STATE,
    call,
    fetch,
    look,
    make,
    path_of,
    settle,
    waiting_fetch,
)
from tests.support.contract import (
    U32_MAX,
    U64_MAX,
    Json,
    check_lease,
    data_of,
    fresh,
    ok,
    records_of,
    refused,
    state_of,
)
from tests.support.queue_client import check_job, make_queue, seqs_of
from tests.support.server import Reply, Server, until

DAY_MS = 86_400_000
every_settle = pytest.mark.parametrize("verb", list(SETTLES))


# -- fetch -------------------------------------------------------------------------------------------------


def test_a_fetch(shared_server: Server, topic: str) -> None:
    records = [
        {"data": {"n": 1}, "tag": "a", "node": "maker", "meta": {"k": "v"}},
        {"data": None},
        {"data": 3},
    ]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    ok(shared_server.put(path_of(topic), {}), 201)
    answer = ok(call(shared_server, topic, "fetch", max=2))
    first, second = answer["claimed"]
    assert answer == {
        "topic": topic, "consumer": "c", "claimed": [first, second], "count": 2, "ready": 1, "tombstone": None,
    }  # fmt: skip
    check_job(first)
    check_job(second)
    assert (first["data"], first["$tag"], first["meta"], first["deliveries"]) == (
        {"n": 1},
        "a",
        {"k": "v"},
        1,
    )
    state = look(shared_server, topic)
    expected = {
        "next_seq": 3, "delivered": 2, "ack_pending": 2, "in_flight": 2, "ack_floor": 0, "lag_records": 1,
    }  # fmt: skip
    assert {name: state[name] for name in expected} == expected


@pytest.mark.parametrize(("max", "got"), [(0, 1), (1, 1), (1000, 1000), (1001, 1000), (U32_MAX, 1000)])
def test_max_is_clamped(shared_server: Server, topic: str, max: int, got: int) -> None:
    make(shared_server, topic, *range(1100), max_ack_pending=5000)
    assert len(fetch(shared_server, topic, max)) == got


@pytest.mark.parametrize(("max_bytes", "got"), [(1, 1), (20, 2), (29, 2), (30, 3), (0, 5), (U64_MAX, 5)])
def test_max_bytes(shared_server: Server, topic: str, max_bytes: int, got: int) -> None:
    make(shared_server, topic, *["x" * 8] * 5)
    assert len(fetch(shared_server, topic, max_bytes=max_bytes)) == got


@pytest.mark.parametrize(
    "wrong",
    [
        {"node": ""}, {"node": "x" * 129}, {"node": 5}, {"node": None}, {"max": -1}, {"max": "1"}, {"max_bytes": -1},
        {"max_bytes": U64_MAX + 1}, {"wait_ms": -1}, {"wait_ms": 1.5}, {"lease_ms": -1}, {"lease_ms": "1"},
    ],
)  # fmt: skip
def test_bad_fetches(shared_server: Server, topic: str, wrong: Json) -> None:
    make(shared_server, topic, 1)
    refused(call(shared_server, topic, "fetch", **wrong), 400, "invalid_request")
    assert look(shared_server, topic)["delivered"] == 0


def test_a_fetch_looks_at_existence_before_the_node(shared_server: Server, topic: str) -> None:
    refused(call(shared_server, "absent", "fetch", node=""), 404, "topic_not_found")
    shared_server.put(f"/v0/topics/{topic}")
    refused(call(shared_server, topic, "fetch", node=""), 404, "consumer_not_found")


@pytest.mark.parametrize(("given", "lease_ms"), [(0, 100), (5000, 5000), (U64_MAX, DAY_MS), (None, 7000)])
def test_leases_of_a_fetch(shared_server: Server, topic: str, given: int | None, lease_ms: int) -> None:
    make(shared_server, topic, 1, ack_wait_ms=7000)
    (record,) = fetch(shared_server, topic, lease_ms=given)
    check_lease(shared_server, topic, record["deadline"], lease_ms)


def test_a_fetch_may_wait(shared_server: Server, topic: str) -> None:
    make(shared_server, topic)
    pending = waiting_fetch(shared_server, topic, max=5)
    ok(shared_server.write(topic, "a", "b"))
    assert [record["data"] for record in ok(pending.reply())["claimed"]] == ["a", "b"]
    assert ok(call(shared_server, topic, "fetch", wait_ms=50))["count"] == 0


def test_a_fetch_has_a_megabyte_by_default(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, *["x" * 600_000] * 3)
    assert seqs_of(fetch(shared_server, topic, lease_ms=60_000)) == [1]
    assert seqs_of(fetch(shared_server, topic, max_bytes=8 << 20)) == [2, 3]


def test_the_number_of_waiting_fetches_is_bounded(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, max_waiting=1)
    pending = waiting_fetch(shared_server, topic)
    reply = call(shared_server, topic, "fetch", wait_ms=30_000)
    refused(reply, 429, "throttled", {"limit": "max_waiting", "max": 1})
    assert fetch(shared_server, topic) == [], "a fetch that does not wait is answered"
    ok(shared_server.write(topic, 1))
    assert ok(pending.reply())["count"] == 1


def test_headers_only(shared_server: Server, topic: str) -> None:
    records = [{"data": "x" * 98, "tag": "t", "meta": {"k": 1}}, {"data": 1}]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    ok(shared_server.put(path_of(topic), {"headers_only": True}), 201)
    first, second = fetch(shared_server, topic)
    assert "data" not in first and "data" not in second
    assert (first["bytes"], first["$tag"], first["meta"]) == (100 + len('{"k":1}'), "t", {"k": 1})
    assert second["bytes"] == 1


def test_without_acks_there_are_no_leases(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, 1, 2, ack="none")
    (record,) = fetch(shared_server, topic, 1)
    assert set(record) == {"$seq", "$ts", "deliveries", "data"}
    state = look(shared_server, topic)
    assert (state["ack_pending"], state["ack_floor"], state["acked"], state["delivered"]) == (0, 1, 1, 1)
    assert settle(shared_server, topic, "ack", [1])["skipped"] == [1]


def test_a_filter(shared_server: Server, topic: str) -> None:
    records = [{"data": i, "tag": tag} for i, tag in enumerate(["eu.tea", "us.jam", "eu.jam.old", None], 1)]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    for name, filter, got in (
        ("all", None, [1, 2, 3, 4]),
        ("predicate", "eu.*", [1, 3]),
        ("subject", ["eu.*"], [1]),
        ("subjects", ["eu.>", "us.jam"], [1, 2, 3]),
        ("exact", "us.jam", [2]),
    ):
        ok(shared_server.put(path_of(topic, name=name), {"filter": filter}), 201)
        assert look(shared_server, topic, name)["lag_records"] == len(got)
        assert seqs_of(fetch(shared_server, topic, name=name)) == got
        assert look(shared_server, topic, name)["lag_records"] == 0


@pytest.mark.parametrize(
    ("deliver", "got"),
    [
        ("all", [1, 2, 3, 4]),
        ("new", [4]),
        ("last", [3, 4]),
        ("last_per_tag", [2, 3, 4]),
        ({"from_seq": 2}, [2, 3, 4]),
        ({"from_ts": 0}, [1, 2, 3, 4]),
        ({"from_ts": U64_MAX}, None),
    ],
)
def test_where_it_begins(shared_server: Server, topic: str, deliver: Any, got: list[int] | None) -> None:
    records = [{"data": 1, "tag": "a"}, {"data": 2, "tag": "b"}, {"data": 3, "tag": "a"}]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    ok(shared_server.put(path_of(topic), {"deliver": deliver}), 201)
    shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": 4, "tag": "c"}]})
    if got is None:
        return
    found: list[int] = []
    while more := seqs_of(fetch(shared_server, topic)):
        found += more
    assert found == got


def test_evicted_records_are_reported(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2})
    ok(shared_server.put(path_of(topic), {}), 201)
    shared_server.write(topic, 1, 2, 3, 4, 5)
    stone = {
        "gap_from": 1, "gap_to": 3, "reason": "cap", "missed_estimate": 3, "earliest_seq": 4, "head_seq": 5,
    }  # fmt: skip
    assert look(shared_server, topic)["tombstone"] == stone
    answer = ok(call(shared_server, topic, "fetch", max=10))
    assert answer["tombstone"] == stone
    assert seqs_of(answer["claimed"]) == [4, 5]
    assert look(shared_server, topic)["tombstone"] is None


# -- ack, nack, extend, term -------------------------------------------------------------------------------


def test_answers_of_settles(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, *range(1, 6))
    fetch(shared_server, topic, 4)
    base = {"topic": topic, "consumer": "c", "skipped": []}
    assert settle(shared_server, topic, "ack", [1]) == {**base, "acked": 1, "ready": 1, "in_flight": 3}
    assert settle(shared_server, topic, "nack", [2]) == {**base, "nacked": 1, "ready": 2, "in_flight": 2}
    extended = settle(shared_server, topic, "extend", [3], lease_ms=60_000)
    assert extended == {**base, "extended": 1, "deadlines": extended["deadlines"]}
    assert list(extended["deadlines"]) == ["3"]
    assert settle(shared_server, topic, "term", [4]) == {**base, "termed": 1, "ready": 2, "in_flight": 1}
    state = look(shared_server, topic)
    assert (state["ack_floor"], state["acked"], state["ack_pending"], state["given_up"]) == (1, 1, 2, 1)
    assert data_of(shared_server, topic) == [1, 2, 3, 4, 5], "acks do not change a log"


@every_settle
@pytest.mark.parametrize(
    "wrong",
    [
        {"node": ""}, {"node": None}, {"seqs": None}, {"seqs": [-1]}, {"seqs": ["1"]}, {"lease_ids": [5]},
        {"lease_ids": ["x"]}, {"lease_ids": ["", ""]}, {"node": "x" * 129},
    ],
)  # fmt: skip
def test_bad_settles(shared_server: Server, topic: str, verb: str, wrong: Json) -> None:
    make(shared_server, topic, 1)
    fetch(shared_server, topic)
    for name in (topic, "absent"):
        reply = call(shared_server, name, verb, **{"seqs": [1], **SETTLES[verb], **wrong})
        refused(reply, 400, "invalid_request")
    assert look(shared_server, topic)["in_flight"] == 1


@every_settle
def test_too_many_seqs(shared_server: Server, topic: str, verb: str) -> None:
    make(shared_server, topic)
    many = list(range(1, 1002))
    assert settle(shared_server, topic, verb, many[:1000])["skipped"] == many[:1000]
    reply = call(shared_server, topic, verb, seqs=many, **SETTLES[verb])
    refused(reply, 400, "batch_too_large", {"seqs": 1001, "max": 1000})


@every_settle
def test_skips_duplicates_and_fences(shared_server: Server, topic: str, verb: str) -> None:
    make(shared_server, topic, *range(1, 6))
    first = fetch(shared_server, topic, 3)
    fetch(shared_server, topic, 1, node="other")
    wrong = [first[1]["lease_id"], first[0]["lease_id"]]
    answer = settle(shared_server, topic, verb, [1, 2], lease_ids=wrong)
    assert (answer[COUNT_OF[verb]], answer["skipped"]) == (0, [1, 2])
    answer = settle(
        shared_server, topic, verb, [4, 1, 5, 1, 9], lease_ids=["", first[0]["lease_id"], "", "", ""]
    )
    assert (answer[COUNT_OF[verb]], answer["skipped"]) == (1, [4, 5, 1, 9])


def test_ack_all(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, *range(1, 6), ack="all")
    fetch(shared_server, topic, 4)
    answer = settle(shared_server, topic, "ack", [2, 3])
    assert (answer["acked"], answer["in_flight"]) == (3, 1)
    state = look(shared_server, topic)
    assert (state["ack_floor"], state["acked"], state["ack_pending"]) == (3, 3, 1)


def test_redelivery_and_the_last_of_them(shared_server: Server, topic: str) -> None:
    target = fresh("dead")
    make(shared_server, topic, {"n": 1}, max_deliver=2, dead_letter=target)
    for delivery in (1, 2):
        (record,) = fetch(shared_server, topic)
        assert record["deliveries"] == delivery
        settle(shared_server, topic, "nack", [1])
    assert fetch(shared_server, topic) == []
    until(lambda: look(shared_server, topic)["dead_lettered"] == 1)
    state = look(shared_server, topic)
    assert (state["delivered"], state["redelivered"], state["ack_pending"], state["ack_floor"]) == (
        2,
        1,
        0,
        1,
    )
    (letter,) = records_of(shared_server, target)
    assert letter["data"] == {"n": 1}
    assert letter["meta"] == {
        "$dead_letter_from": topic, "$dead_letter_consumer": "c", "$dead_letter_deliveries": "2",
        "$dead_letter_src_seq": "1",
    }  # fmt: skip
    assert data_of(shared_server, topic) == [{"n": 1}]


def test_term_with_a_reason(shared_server: Server, topic: str) -> None:
    target = fresh("dead")
    make(shared_server, topic, 1, dead_letter=target)
    fetch(shared_server, topic)
    settle(shared_server, topic, "term", [1], reason="no such customer")
    (letter,) = until(lambda: shared_server.diff(target).json.get("records"))
    assert letter["meta"]["$dead_letter_reason"] == "no such customer"
    refused(call(shared_server, topic, "term", seqs=[1], reason="x" * 1025), 400, "invalid_request")


def test_a_full_consumer_is_stalled(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, 1, 2, 3, max_ack_pending=2)
    assert seqs_of(fetch(shared_server, topic)) == [1, 2]
    assert fetch(shared_server, topic) == []
    assert look(shared_server, topic)["stalled"] is True
    settle(shared_server, topic, "ack", [1])
    assert look(shared_server, topic)["stalled"] is False
    assert seqs_of(fetch(shared_server, topic)) == [3]


# -- pause, resume, reset ----------------------------------------------------------------------------------


def test_pause_and_resume(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, 1)
    paused = ok(shared_server.request("POST", path_of(topic, "pause")))
    assert set(paused) == STATE
    assert (paused["paused"], paused["paused_until_ts"]) == (True, None)
    assert fetch(shared_server, topic) == []
    pending = waiting_fetch(shared_server, topic)
    resumed = ok(shared_server.request("POST", path_of(topic, "resume")))
    assert set(resumed) == STATE
    assert resumed["paused"] is False
    assert ok(pending.reply())["count"] == 1


def test_a_pause_with_an_end(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, 1)
    until_ts = records_of(shared_server, topic)[0]["$ts"] + 1000
    paused = ok(shared_server.post(path_of(topic, "pause"), {"until_ts": until_ts}))
    assert (paused["paused"], paused["paused_until_ts"]) == (True, until_ts)
    assert ok(call(shared_server, topic, "fetch", wait_ms=30_000))["count"] == 1
    now = ok(shared_server.write(topic, "now"))["last_seq"]
    assert records_of(shared_server, topic, from_seq=now - 1)[0]["$ts"] >= until_ts
    state = look(shared_server, topic)
    assert (state["paused"], state["paused_until_ts"]) == (False, None)


@pytest.mark.parametrize("until_ts", [-1, 1.5, "soon", None, U64_MAX + 1])
def test_bad_pauses(shared_server: Server, topic: str, until_ts: Any) -> None:
    make(shared_server, topic)
    refused(shared_server.post(path_of(topic, "pause"), {"until_ts": until_ts}), 400, "invalid_request")


@pytest.mark.parametrize(
    ("to", "to_seq", "redelivers", "skips", "got"),
    [
        ("start", 1, 3, 0, [1, 2, 3, 4, 5]),
        ("end", 6, 0, 4, []),
        ({"seq": 2}, 2, 2, 0, [2, 3, 4, 5]),
        ({"seq": 5}, 5, 0, 3, [5]),
        ({"ts": 0}, 1, 3, 0, [1, 2, 3, 4, 5]),
    ],
)
def test_reset(
    shared_server: Server, topic: str, to: Any, to_seq: int, redelivers: int, skips: int, got: list[int]
) -> None:
    make(shared_server, topic, *range(1, 6))
    fetch(shared_server, topic, 3)
    settle(shared_server, topic, "ack", [1])
    before = look(shared_server, topic)
    expected = {
        "topic": topic, "consumer": "c", "dry_run": True, "from_seq": 4, "to_seq": to_seq, "redelivers": redelivers,
        "skips": skips,
    }  # fmt: skip
    path = path_of(topic, "reset")
    assert ok(shared_server.post(path, {"to": to, "dry_run": True})) == expected
    assert look(shared_server, topic) | {"lag_ms": 0} == before | {"lag_ms": 0}
    assert ok(shared_server.post(path, {"to": to})) == {**expected, "dry_run": False}
    assert settle(shared_server, topic, "ack", [2])["skipped"] == [2]
    assert seqs_of(fetch(shared_server, topic)) == got


@pytest.mark.parametrize(
    "body",
    [{}, {"to": None}, {"to": "middle"}, {"to": 5}, {"to": {}}, {"to": {"seq": 1, "ts": 1}}, {"to": {"seq": -1}},
     {"to": {"ts": "1"}}, {"to": "start", "dry_run": 1}, {"to": {"seq": U64_MAX + 1}}],
)  # fmt: skip
def test_bad_resets(shared_server: Server, topic: str, body: Json) -> None:
    make(shared_server, topic, 1)
    refused(shared_server.post(path_of(topic, "reset"), body), 400, "invalid_request")


# -- retention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("retention", "left"), [("limits", [1, 2, 3]), ("interest", [2, 3])])
def test_retention(shared_server: Server, topic: str, retention: str, left: list[int]) -> None:
    config = ok(shared_server.put(f"/v0/topics/{topic}", {"retention": retention}), 201)["config"]
    assert config.get("retention", "limits") == retention
    for name in ("c", "d"):
        ok(shared_server.put(path_of(topic, name=name), {}), 201)
    ok(shared_server.write(topic, 1, 2, 3))
    for name in ("c", "d"):
        fetch(shared_server, topic, name=name)
    ok(call(shared_server, topic, "ack", "c", seqs=[1, 2]))
    ok(call(shared_server, topic, "ack", "d", seqs=[1]))
    assert data_of(shared_server, topic) == left
    assert ok(shared_server.diff(topic))["tombstone"] is None


def test_a_record_of_a_work_queue_is_for_one_consumer(shared_server: Server, topic: str) -> None:
    def put(name: str, filter: object = None) -> Reply:
        return shared_server.put(path_of(topic, name=name), {"filter": filter})

    def overlaps(reply: Reply, name: str) -> None:
        refused(reply, 409, "consumer_overlap", {"topic": topic, "consumer": name})

    on = {"retention": "work_queue"}
    ok(shared_server.put(f"/v0/topics/{topic}", on), 201)
    ok(put("c", "a.*"), 201)
    ok(put("d", ["b.>", ["tag", "Eq", "c"]]), 201)
    for filter in (None, [], "*", "b.c", ["*.x.y"], ["q", "c"]):
        overlaps(put("e", filter), "c" if filter in (None, [], "*", ["*.x.y"]) else "d")
    overlaps(put("c", "c"), "d")
    ok(put("c", "a.*"))
    ok(put("c", "aa*"))
    records = [{"tag": tag, "data": i} for i, tag in enumerate(["aa", "b.c", "c"], start=1)]
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": records}))
    assert seqs_of(fetch(shared_server, topic)) == [1]
    assert seqs_of(fetch(shared_server, topic, name="d")) == [2, 3]
    ok(call(shared_server, topic, "ack", "d", seqs=[2]))
    assert data_of(shared_server, topic) == [1, 3]
    ok(shared_server.put(f"/v0/topics/{topic}", {}))
    ok(put("e", ["*"]), 201)
    overlaps(shared_server.put(f"/v0/topics/{topic}", on), "c")
    ok(shared_server.delete(path_of(topic, name="e")))
    ok(shared_server.put(f"/v0/topics/{topic}", on))


@pytest.mark.parametrize("retention", ["none", "", None, 5, "Limits"])
def test_bad_retention(shared_server: Server, topic: str, retention: Any) -> None:
    refused(shared_server.put(f"/v0/topics/{topic}", {"retention": retention}), 400, "invalid_request")


def test_a_queue_with_a_consumer_beside_its_own(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    ok(shared_server.put(path_of(topic), {}), 201)
    assert seqs_of(fetch(shared_server, topic)) == [1, 2]
    settle(shared_server, topic, "ack", [1])
    assert state_of(shared_server, topic)["queue"]["ready"] == 2


def test_a_deleted_topic_deletes_its_consumers(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, 1)
    ok(shared_server.delete(f"/v0/topics/{topic}"))
    shared_server.put(f"/v0/topics/{topic}")
    refused(shared_server.get(path_of(topic)), 404, "consumer_not_found")
