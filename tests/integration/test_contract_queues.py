"""Goal: claim, ack, nack and extend behave as sections 10, 12 (limits) and 15 of the contract say.

Method: each test has its own queue and compares whole answers. Nothing sleeps: what becomes due is polled for until it
is there.
"""

from __future__ import annotations

import pytest

from tests.support.contract import (
    DEFAULT_CONFIG,
    U32_MAX,
    U64_MAX,
    Json,
    Pending,
    check_lease,
    data_of,
    fresh,
    is_number,
    ok,
    records_of,
    refused,
    send_text,
    state_of,
)
from tests.support.h2_client import Http2Client
from tests.support.queue_client import (
    COUNT_OF,
    NODE,
    SETTLES,
    call,
    check_job,
    claim,
    counts,
    make_queue,
    seqs_of,
    settle,
)
from tests.support.server import Server, until

DAY_MS = 86_400_000
every_settle = pytest.mark.parametrize("verb", list(SETTLES))


# -- claim -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_claim(shared_server: Server, topic: str, durability: str) -> None:
    make_queue(shared_server, topic, durability=durability)
    records = [
        {"data": {"n": 1}, "tag": "a", "node": "maker", "meta": {"k": "v"}},
        {"data": None},
        {"data": 3, "tag": "", "meta": 5},
    ]
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": records}))
    written = {row["$seq"]: row["$ts"] for row in records_of(shared_server, topic)}
    answer = ok(call(shared_server, topic, "claim", max=2))
    first, second = answer["claimed"]
    assert answer == {"topic": topic, "claimed": [first, second], "count": 2, "ready": 1}
    assert first == {
        "$seq": 1, "lease_id": first["lease_id"], "deadline": first["deadline"], "$ts": written[1], "$tag": "a",
        "deliveries": 1, "data": {"n": 1}, "meta": {"k": "v"},
    }  # fmt: skip
    assert second == {
        "$seq": 2, "lease_id": second["lease_id"], "deadline": first["deadline"], "$ts": written[2],
        "deliveries": 1, "data": None,
    }  # fmt: skip
    check_job(first)
    check_job(second)
    assert first["lease_id"] != second["lease_id"]
    (third,) = claim(shared_server, topic)
    assert (third["$tag"], third["meta"], third["data"]) == ("", 5, 3)
    assert counts(shared_server, topic) == {"ready": 0, "in_flight": 3, "dead_lettered": 0}
    check_lease(shared_server, topic, first["deadline"], 30_000)


def test_data_comes_back_as_it_was_sent(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic)
    text = '{"big":123456789012345678901234567890,"float":1.10,"dup":1,"dup":2,"text":"é\\u00e9"}'
    send_text(shared_server, "POST", f"/v0/topics/{topic}", '{"records":[{"data":' + text + "}]}")
    body = call(shared_server, topic, "claim").body.decode()
    assert f'"data":{text}' in body


def test_nothing_to_claim(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic)
    assert ok(call(shared_server, topic, "claim", max=5)) == {
        "topic": topic, "claimed": [], "count": 0, "ready": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("max", "got"), [(0, 1), (1, 1), (999, 999), (1000, 1000), (1001, 1000), (U32_MAX, 1000)]
)
def test_max_is_clamped(shared_server: Server, topic: str, max: int, got: int) -> None:
    make_queue(shared_server, topic, *range(1100))
    answer = ok(call(shared_server, topic, "claim", max=max))
    assert (answer["count"], len(answer["claimed"]), answer["ready"]) == (got, got, 1100 - got)


def test_max_is_one_by_default(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    assert ok(call(shared_server, topic, "claim"))["count"] == 1


@pytest.mark.parametrize(
    ("given", "lease_ms"),
    [(0, 100), (99, 100), (100, 100), (5000, 5000), (DAY_MS, DAY_MS), (DAY_MS + 1, DAY_MS), (U64_MAX, DAY_MS),
     (None, 70_000)],
)  # fmt: skip
def test_leases_are_clamped(shared_server: Server, topic: str, given: int | None, lease_ms: int) -> None:
    make_queue(shared_server, topic, 1, 2, lease_ms=70_000)
    # The long lease first: one of 100 ms may expire before the next call, which would then get the same job.
    (other,) = claim(shared_server, topic)
    check_lease(shared_server, topic, other["deadline"], 70_000)
    (job,) = claim(shared_server, topic, lease_ms=given)
    check_lease(shared_server, topic, job["deadline"], lease_ms)
    if given is not None:
        check_lease(
            shared_server,
            topic,
            settle(shared_server, topic, "extend", [1], lease_ms=given)["deadlines"]["1"],
            lease_ms,
        )


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"lease_ms": 0}, {"lease_ms": 100}),
        ({"lease_ms": U64_MAX}, {"lease_ms": DAY_MS}),
        ({"claim_jitter_ms": 5001}, {"claim_jitter_ms": 5000}),
        ({"claim_jitter_ms": U64_MAX}, {"claim_jitter_ms": 5000}),
    ],
)
def test_queue_settings_are_stored_clamped(
    shared_server: Server, topic: str, given: Json, stored: Json
) -> None:
    config = ok(shared_server.put(f"/v0/topics/{topic}", {"type": "queue", **given}), 201)["config"]
    assert DEFAULT_CONFIG | {"type": "queue"} | stored == {name: config[name] for name in DEFAULT_CONFIG}


def test_a_leased_job_is_not_claimed_again(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2, 3)
    assert seqs_of(claim(shared_server, topic, 2, node="a")) == [1, 2]
    assert seqs_of(claim(shared_server, topic, 2, node="b")) == [3]
    assert claim(shared_server, topic, 2, node="a") == []


def test_jobs_stay_readable(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, "a", "b")
    claim(shared_server, topic)
    assert data_of(shared_server, topic) == ["a", "b"]
    assert counts(shared_server, topic) == {"ready": 1, "in_flight": 1, "dead_lettered": 0}


def test_an_unacked_job_is_delivered_again(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    (first,) = claim(shared_server, topic, lease_ms=100)
    again = until(lambda: [job for job in claim(shared_server, topic, lease_ms=60_000) if job["$seq"] == 1])
    assert again[0]["deliveries"] == 2
    assert again[0]["lease_id"] != first["lease_id"]
    late = settle(shared_server, topic, "ack", [1], lease_ids=[first["lease_id"]])
    assert (late["acked"], late["skipped"]) == (0, [1])


def test_a_claim_may_wait_for_work(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic)
    pending = Pending(
        shared_server, "POST", f"/v0/topics/{topic}/claim", {"node": NODE, "max": 5, "wait_ms": 30_000}
    )
    for _ in range(2):
        state_of(shared_server, topic)
    assert not pending.is_answered
    ok(shared_server.write(topic, 1, 2))
    answer = ok(pending.reply())
    assert [job["data"] for job in answer["claimed"]] == [1, 2]


def test_a_claim_that_waits_is_answered_when_its_time_is_over(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic)
    assert ok(call(shared_server, topic, "claim", wait_ms=50))["count"] == 0


def test_a_topic_deleted_under_a_waiting_claim(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic)
    pending = Pending(shared_server, "POST", f"/v0/topics/{topic}/claim", {"node": NODE, "wait_ms": 30_000})
    for _ in range(2):
        state_of(shared_server, topic)
    ok(shared_server.delete(f"/v0/topics/{topic}"))
    refused(pending.reply(), 404, "topic_not_found", {"topic": topic})


# -- ack, nack, extend -------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_an_ack(shared_server: Server, topic: str, durability: str) -> None:
    make_queue(shared_server, topic, 1, 2, 3, durability=durability)
    claim(shared_server, topic, 2)
    reply = call(shared_server, topic, "ack", seqs=[1])
    fsync_ms = reply.json["performance"].get("fsync_ms", 0)
    assert ("fsync_ms" in reply.json["performance"]) == (fsync_ms > 0)
    assert durability == "fsync" or fsync_ms == 0
    assert ok(reply) == {"topic": topic, "acked": 1, "skipped": [], "ready": 1, "in_flight": 1}
    assert data_of(shared_server, topic) == [2, 3]
    page = ok(shared_server.diff(topic))
    assert (page["tombstone"], page["earliest_seq"]) == (None, 2)
    state = state_of(shared_server, topic)
    assert (state["count"], state["bytes"], state["queue"]["in_flight"]) == (2, 2, 1)


def test_a_nack(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    claim(shared_server, topic)
    answer = settle(shared_server, topic, "nack", [1])
    assert answer == {"topic": topic, "nacked": 1, "skipped": [], "ready": 2, "in_flight": 0}
    (job,) = claim(shared_server, topic)
    assert (job["$seq"], job["deliveries"]) == (1, 2)


def test_a_nack_with_a_delay(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    claim(shared_server, topic)
    answer = settle(shared_server, topic, "nack", [1], delay_ms=DAY_MS)
    assert answer == {"topic": topic, "nacked": 1, "skipped": [], "ready": 1, "in_flight": 0}
    assert counts(shared_server, topic) == {"ready": 1, "in_flight": 0, "dead_lettered": 0}
    assert seqs_of(claim(shared_server, topic, 5)) == [2]
    settle(shared_server, topic, "nack", [2], delay_ms=50)
    (job,) = until(lambda: claim(shared_server, topic, 5))
    assert (job["$seq"], job["deliveries"]) == (2, 2)


@pytest.mark.parametrize("delay_ms", [DAY_MS + 1, U64_MAX])
def test_delays_are_clamped(shared_server: Server, topic: str, delay_ms: int) -> None:
    make_queue(shared_server, topic, 1)
    claim(shared_server, topic)
    assert settle(shared_server, topic, "nack", [1], delay_ms=delay_ms)["nacked"] == 1


def test_kinds_of_nacks(shared_server: Server, topic: str) -> None:
    target = fresh("dead")
    make_queue(shared_server, topic, 1, 2, 3, dead_letter=target)
    claim(shared_server, topic, 3)
    settle(shared_server, topic, "nack", [1], kind="retry")
    settle(shared_server, topic, "nack", [2], kind="release")
    answer = settle(shared_server, topic, "nack", [3], kind="dead", reason="cannot be read")
    assert answer == {"topic": topic, "nacked": 1, "skipped": [], "ready": 2, "in_flight": 0}
    assert {job["$seq"]: job["deliveries"] for job in claim(shared_server, topic, 5)} == {1: 2, 2: 1}
    until(lambda: counts(shared_server, topic)["dead_lettered"] == 1)
    (letter,) = until(lambda: shared_server.diff(target).json.get("records"))
    assert letter["data"] == 3
    assert letter["meta"]["$dead_letter_from"] == topic
    assert "cannot be read" in letter["meta"].values()


def test_an_extend(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2, 3)
    before = claim(shared_server, topic, 2)
    answer = settle(shared_server, topic, "extend", [1, 2, 3], lease_ms=60_000)
    deadlines = answer["deadlines"]
    assert answer == {"topic": topic, "extended": 2, "skipped": [3], "deadlines": deadlines}
    assert set(deadlines) == {"1", "2"}
    check_lease(shared_server, topic, deadlines["1"], 60_000)
    assert deadlines["1"] > before[0]["deadline"]
    tokens = [job["lease_id"] for job in before]
    assert settle(shared_server, topic, "ack", [1, 2], lease_ids=tokens)["acked"] == 2


@every_settle
def test_empty_seqs_do_nothing(shared_server: Server, topic: str, verb: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    claim(shared_server, topic)
    answer = settle(shared_server, topic, verb, [])
    rest = {"deadlines": {}} if verb == "extend" else {"ready": 1, "in_flight": 1}
    assert answer == {"topic": topic, COUNT_OF[verb]: 0, "skipped": [], **rest}
    assert settle(shared_server, topic, verb, [], lease_ids=[]) == answer


@every_settle
def test_jobs_of_other_nodes_are_skipped(shared_server: Server, topic: str, verb: str) -> None:
    make_queue(shared_server, topic, *range(1, 5))
    claim(shared_server, topic, 2)
    claim(shared_server, topic, node="other")
    answer = settle(shared_server, topic, verb, [9, 3, 1, 4, 0, U64_MAX])
    assert (answer[COUNT_OF[verb]], answer["skipped"]) == (1, [9, 3, 4, 0, U64_MAX])


@every_settle
def test_duplicates_count_once(shared_server: Server, topic: str, verb: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    claim(shared_server, topic, 2)
    answer = settle(shared_server, topic, verb, [1, 2, 1, 1])
    assert (answer[COUNT_OF[verb]], answer["skipped"]) == (2, [1, 1])


@every_settle
def test_fences(shared_server: Server, topic: str, verb: str) -> None:
    make_queue(shared_server, topic, 1, 2, 3)
    (old,) = claim(shared_server, topic)
    settle(shared_server, topic, "nack", [1])
    jobs = claim(shared_server, topic, 3)
    tokens = [job["lease_id"] for job in jobs]
    stale = settle(shared_server, topic, verb, [1, 2, 3], lease_ids=[old["lease_id"], tokens[2], tokens[1]])
    assert (stale[COUNT_OF[verb]], stale["skipped"]) == (0, [1, 2, 3])
    answer = settle(shared_server, topic, verb, [1, 2, 3], lease_ids=[tokens[0], "", tokens[2]])
    assert (answer[COUNT_OF[verb]], answer["skipped"]) == (3, [])


def test_null_and_unknown_fields(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1)
    answer = ok(call(shared_server, topic, "claim", lease_ms=None, unknown={"x": 1}))
    check_lease(shared_server, topic, answer["claimed"][0]["deadline"], 30_000)
    assert answer["ignored"] == ["unknown"]
    settled = ok(call(shared_server, topic, "ack", seqs=[1], unknown=1))
    assert (settled["acked"], settled["ignored"]) == (1, ["unknown"])


def test_performance_is_there(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1)
    for verb in ("claim", *SETTLES):
        performance = call(shared_server, topic, verb, seqs=[1], lease_ms=1000).json["performance"]
        assert is_number(performance["server_total_ms"])


# -- jobs that are deleted or evicted ----------------------------------------------------------------------


def test_deleted_and_evicted_jobs(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2, 3, cap_records=3)
    claim(shared_server, topic, 2)
    ok(shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 2}))
    assert counts(shared_server, topic) == {"ready": 1, "in_flight": 1, "dead_lettered": 0}
    ok(shared_server.write(topic, 4, 5))  # the cap drops 2
    assert counts(shared_server, topic) == {"ready": 3, "in_flight": 0, "dead_lettered": 0}
    answer = settle(shared_server, topic, "ack", [1, 2])
    assert (answer["acked"], answer["skipped"]) == (0, [1, 2])
    assert seqs_of(claim(shared_server, topic, 9)) == [3, 4, 5]


def test_an_ack_makes_room(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2, cap_records=2, discard="reject")
    refused(shared_server.write(topic, 3), 422, "topic_full")
    claim(shared_server, topic)
    refused(shared_server.write(topic, 3), 422, "topic_full")
    settle(shared_server, topic, "ack", [1])
    ok(shared_server.write(topic, 3))


def test_a_new_topic_of_the_same_name(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1)
    (job,) = claim(shared_server, topic)
    ok(shared_server.delete(f"/v0/topics/{topic}"))
    make_queue(shared_server, topic, "new")
    answer = settle(shared_server, topic, "ack", [1], lease_ids=[job["lease_id"]])
    assert (answer["acked"], answer["skipped"]) == (0, [1])
    (job,) = claim(shared_server, topic)
    assert (job["data"], job["deliveries"]) == ("new", 1)


# -- dead letters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_deliveries", [1, 3])
def test_the_last_delivery_is_followed_by_a_dead_letter(
    shared_server: Server, topic: str, max_deliveries: int
) -> None:
    target = fresh("dead")  # on either shard
    make_queue(shared_server, topic, max_deliveries=max_deliveries, dead_letter=target)
    record = {"data": {"n": 1}, "tag": "t", "node": "maker", "meta": {"unit": "C"}}
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": [record, {"data": 2}]}))
    for delivery in range(1, max_deliveries + 1):
        (job,) = claim(shared_server, topic)
        assert (job["$seq"], job["deliveries"]) == (1, delivery)
        settle(shared_server, topic, "nack", [1])
    assert seqs_of(claim(shared_server, topic, 5)) == [2]
    until(lambda: counts(shared_server, topic)["dead_lettered"] == 1)
    assert counts(shared_server, topic) == {"ready": 0, "in_flight": 1, "dead_lettered": 1}
    assert data_of(shared_server, topic) == [2]
    (letter,) = records_of(shared_server, target, include_tags=True)
    assert (letter["data"], letter["$tag"], letter["$node"]) == ({"n": 1}, "t", "maker")
    assert letter["meta"] == {
        "unit": "C",
        "$dead_letter_from": topic,
        "$dead_letter_deliveries": str(max_deliveries),
        "$dead_letter_src_seq": "1",
    }
    made = state_of(shared_server, target)["config"]
    assert {name: made[name] for name in DEFAULT_CONFIG} == DEFAULT_CONFIG


def test_redelivery_without_a_target_never_ends(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, max_deliveries=2)
    for delivery in range(1, 6):
        (job,) = claim(shared_server, topic)
        assert job["deliveries"] == delivery
        settle(shared_server, topic, "nack", [1])


@pytest.mark.parametrize(
    ("config", "status"),
    [
        ({"dead_letter": ".bad"}, 400),
        ({"dead_letter": ""}, 400),
        ({"dead_letter": 5}, 400),
        ({"dead_letter": "{topic}"}, 400),
        ({"dead_letter": "other"}, 201),
        ({"dead_letter": None}, 201),
        ({"type": "log", "dead_letter": "{topic}"}, 201),
        ({"type": "log", "dead_letter": ".bad"}, 400),
    ],
)
def test_dead_letter_names(shared_server: Server, topic: str, config: Json, status: int) -> None:
    given = config["dead_letter"]
    if isinstance(given, str):
        config = {**config, "dead_letter": given.replace("{topic}", topic)}
    reply = shared_server.put(f"/v0/topics/{topic}", {"type": "queue", **config})
    assert reply.status == status, reply.body


# -- coalesced claims --------------------------------------------------------------------------------------


def test_coalesced_claims_share_evenly(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, *range(50), claim_jitter_ms=1000)
    path = f"/v0/topics/{topic}/claim"
    claims = [Pending(shared_server, "POST", path, {"node": f"w{i}", "max": 10}) for i in range(10)]
    answers = [ok(one.reply()) for one in claims]
    assert [answer["count"] for answer in answers] == [5] * 10
    assert sorted(job["$seq"] for answer in answers for job in answer["claimed"]) == list(range(1, 51))


def test_coalesced_claims_of_different_sizes(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, *range(9), claim_jitter_ms=1000)
    path = f"/v0/topics/{topic}/claim"
    claims = [Pending(shared_server, "POST", path, {"node": f"w{max}", "max": max}) for max in (2, 100)]
    assert [ok(one.reply())["count"] for one in claims] == [2, 7]


# -- metrics, HTTP/2 --------------------------------------------------------------------------------


def test_metrics_of_queues(shared_server: Server, topic: str) -> None:
    before = shared_server.get("/v0/metrics", Accept="application/json").json
    make_queue(shared_server, topic, 1, 2, 3)
    claim(shared_server, topic, 2)

    def text() -> list[str]:
        return shared_server.get("/v0/metrics").body.decode().splitlines()

    until(lambda: f'topics_topic_queue_in_flight{{topic="{topic}"}} 2' in text())
    assert f'topics_topic_queue_ready{{topic="{topic}"}} 1' in text()
    after = shared_server.get("/v0/metrics", Accept="application/json").json
    assert after["queue_topics"] == before["queue_topics"] + 1
    assert after["queue_leases_in_flight"] >= 2


def test_over_http2(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2)
    client = Http2Client(shared_server)

    def post(verb: str, body: str) -> Json:
        reply = client.request(
            "POST", f"/v0/topics/{topic}/{verb}", [("content-type", "application/json")], body.encode()
        )
        assert reply.status == 200, reply.body
        answer: Json = reply.json
        return answer

    assert post("claim", '{"node":"w","max":2}')["count"] == 2
    assert post("extend", '{"node":"w","seqs":[1],"lease_ms":60000}')["extended"] == 1
    assert post("nack", '{"node":"w","seqs":[2]}')["nacked"] == 1
    assert post("ack", '{"node":"w","seqs":[1]}')["acked"] == 1
    client.close()
    assert data_of(shared_server, topic) == [2]
