"""Goal: a shard pushes jobs to each stream up to its limit, and releases at once what a lost stream held.

Method: one shard on a simulated disk and clock; the test sends the messages of fronts.
"""

from __future__ import annotations

import re

import pytest

from tests.support.faults import fault
from tests.support.job_rig import JobRig
from tests.support.shard_rig import FRONT, Rig, error_of
from topics.link import wire
from topics.link.job_streams import PUSH_BYTES, JobStreamOptions, encode
from workers.shard.core import PROBE_EVERY_US
from workers.shard.flow_control import READS_PER_TURN
from workers.watch import job_streams

OTHER = b"other front"


@pytest.fixture
def rig() -> JobRig:
    return JobRig()


# ---- opening


def test_unknown_queues_are_refused_before_a_stream_opens(rig: JobRig) -> None:
    rig.put("log")
    refused = {
        (404, "topic_not_found"): [rig.work("absent"), rig.work("absent", "c")],
        (409, "not_a_queue"): [rig.work("log")],
        (404, "consumer_not_found"): [rig.work("q", "c"), rig.work("log", "c")],
    }
    for (status, code), keys in refused.items():
        for key in keys:
            (answer,) = rig.heard[key]
            assert (answer.status, answer.kind, error_of(answer)["code"]) == (status, wire.JSON, code)
    assert len(rig.core.jobs) == 0


def test_a_check_gets_only_the_answer(rig: JobRig) -> None:
    rig.write(1, "q")
    key = rig.work(check_only=True)
    (answer,) = rig.heard[key]
    assert (answer.status, len(rig.core.jobs)) == (200, 0)
    assert rig.claim() == {1: 1}


def test_a_shard_that_recovers_says_so() -> None:
    rig = Rig(recovered=False)
    assert error_of(rig.ask(wire.OPEN_JOBS, "q", encode(JobStreamOptions("", "n"))))["code"] == "not_ready"


@fault(
    "client", "more streams of jobs are opened than a worker keeps", "429 throttled, detail.limit job_streams"
)
def test_there_are_no_more_streams_than_a_shard_keeps(rig: JobRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_streams, "STREAMS_MAX", 2)
    first, second = rig.work(), rig.work()
    error = error_of(rig.answer(rig.work()))
    assert (error["code"], error["detail"]) == ("throttled", {"limit": "job_streams", "max": 2})
    rig.unwork(first)
    assert rig.answer(rig.work()).status == 200
    assert rig.answer(second).status == 200


def test_a_message_that_is_none_is_refused_and_unknown_numbers_are_ignored(rig: JobRig) -> None:
    assert error_of(rig.ask(wire.OPEN_JOBS, "q", b"\xc1"))["code"] == "invalid_request"
    for op in (wire.JOBS_ACK, wire.CLOSE_JOBS):
        rig.tell(op, (FRONT, 999))
    rig.rest()


# ---- jobs


def test_existing_and_new_jobs_are_pushed(rig: JobRig) -> None:
    rig.write(2, "q")
    key = rig.work(max=10, lease_ms=5000)
    rig.write(1, "q")
    assert [len(push) for push in rig.pushed(key)] == [2, 1]
    event = rig.events(key)[0]
    now_ms = rig.core.engine.clock.now_ms
    assert (event.event, event.id) == ("job", "1")
    assert event.data == {
        "topic": "q",
        "$seq": 1,
        "lease_id": event.data["lease_id"],
        "deadline": now_ms + 5000,
        "$ts": now_ms,
        "deliveries": 1,
        "data": 0,
    }
    rig.ack(1, 2, 3)


def test_a_connection_holds_no_more_than_its_max(rig: JobRig) -> None:
    rig.write(6, "q")
    key = rig.work(max=2)
    rig.worked(key)
    assert rig.seqs(key) == [1, 2]
    rig.ack(1)
    assert rig.seqs(key) == [1, 2, 3]
    rig.worked(key)
    rig.ack(2, 3)
    assert rig.seqs(key) == [1, 2, 3, 4, 5]
    assert rig.claim(max=10) == {6: 1}


def test_leases_of_the_node_elsewhere_do_not_count(rig: JobRig) -> None:
    rig.write(3, "q")
    assert rig.claim(node="n") == {1: 1}
    first, second = rig.work(), rig.work()
    assert (rig.seqs(first), rig.seqs(second)) == ([2], [3])


@pytest.mark.parametrize("how", ["nack", "delete", "expiry"])
def test_whatever_ends_a_lease_makes_room(rig: JobRig, how: str) -> None:
    """Nothing else happens at the shard, so nothing else can have woken the stream."""
    rig.write(1, "q")
    key = rig.work(lease_ms=1000)
    rig.worked(key)
    rig.write(1, "q")
    assert rig.seqs(key) == [1]
    if how == "nack":
        rig.call(wire.NACK, node="n", seqs=[1], delay_ms=60_000)
        assert rig.seqs(key) == [1, 2]
    elif how == "delete":
        rig.call(wire.DELETE, "q", before_seq=2)
        assert rig.seqs(key) == [1, 2]
    else:
        rig.advance(1000)
        assert rig.seqs(key) == [1]
        assert rig.wake_at_ms is not None and rig.wake_at_ms <= rig.clock.monotonic_ms() + 10
        rig.advance(10)
        assert [(event.data["$seq"], event.data["deliveries"]) for event in rig.events(key)] == [
            (1, 1),
            (1, 2),
        ]


def test_a_claim_that_stands_takes_what_room_there_is_by_then(rig: JobRig) -> None:
    rig.write(2, "q")
    key = rig.work(max=3)
    rig.worked(key)
    rig.ack(1, 2)
    rig.write(3, "q")
    assert [len(push) for push in rig.pushed(key)] == [2, 3]


def test_streams_share_evenly_where_claims_are_gathered() -> None:
    rig = JobRig(claim_jitter_ms=50)
    keys = [rig.work(max=10, node=f"n{i}") for i in range(5)]
    rig.advance(100)
    rig.write(20, "q")
    rig.advance(51)
    assert [len(rig.seqs(key)) for key in keys] == [4] * 5


# ---- flow


def test_a_stream_has_two_pushes_ahead_and_no_more(rig: JobRig) -> None:
    key = rig.work(max=100)
    for _ in range(5):
        rig.write(1, "q")
    assert [len(push) for push in rig.pushed(key)] == [1, 1]
    assert rig.claim() == {3: 1}  # what it has no room for is for others
    rig.worked(key)
    assert [len(push) for push in rig.pushed(key)] == [1, 1, 2]
    rig.worked(key, key, key)
    rig.write(1, "q")
    rig.write(1, "q")
    assert len(rig.pushed(key)) == 5


def test_a_push_is_no_larger_than_its_bound_unless_it_is_one_record(rig: JobRig) -> None:
    for size in (100_000, 100_000, 100_000, 400_000, 10):
        rig.ask(wire.WRITE, "q", {"records": [{"data": "x" * size}]})
    key = rig.work(max=100)
    for _ in range(4):
        rig.worked(key)
    assert [[event.data["$seq"] for event in push] for push in rig.pushed(key)] == [[1, 2], [3], [4], [5]]
    assert all(len(reply.body) < PUSH_BYTES or reply is rig.heard[key][3] for reply in rig.heard[key])


def test_a_front_whose_clients_take_little_gets_small_pushes(
    rig: JobRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_streams, "UNACKED_BYTES_MAX", 50_000)
    for _ in range(20):
        rig.ask(wire.WRITE, "q", {"records": [{"data": "x" * 6000}]})
    first = rig.work(max=10)
    second = rig.work(max=10)
    assert [len(push) for push in rig.pushed(first)] == [10]
    assert [len(push) for push in rig.pushed(second)] == [2, 2]
    rig.worked(first)
    rig.worked(second, second)
    assert [len(push) for push in rig.pushed(second)] == [2, 2, 6]


# ---- ends


def test_jobs_held_by_a_lost_client_are_ready_at_once(rig: JobRig) -> None:
    rig.write(4, "q")
    assert rig.claim(node="n") == {1: 1}
    gone, stays = rig.work(max=2), rig.work()
    rig.unwork(gone)
    assert (rig.seqs(gone), rig.seqs(stays)) == ([2, 3], [4])
    assert rig.claim(max=10) == {2: 2, 3: 2}
    assert len(rig.core.jobs) == 1


def test_another_stream_gets_it(rig: JobRig) -> None:
    rig.write(1, "q")
    first, second = rig.work(), rig.work()
    rig.unwork(first)
    assert [event.data["deliveries"] for event in rig.events(second)] == [2]


@fault("front", "a front with streams of jobs is killed", "jobs of its clients are delivered again at once")
def test_jobs_held_by_clients_of_a_dead_front_are_ready_at_once(rig: JobRig) -> None:
    rig.write(5, "q")
    keys = [rig.work(peer=OTHER), rig.work(max=2, peer=OTHER)]
    stays = rig.work()
    assert [rig.seqs(key) for key in (*keys, stays)] == [[1], [2, 3], [4]]
    rig.core.forget_peer(OTHER)
    rig.rest()
    assert rig.core.jobs.fronts() == [FRONT]
    assert rig.claim(max=10) == {1: 2, 2: 2, 3: 2, 5: 1}


def test_a_front_with_streams_is_asked_whether_it_lives(rig: JobRig) -> None:
    key = rig.work(peer=OTHER)
    rig.advance(PROBE_EVERY_US // 1000 + 1)
    rig.clock.advance(PROBE_EVERY_US // 1000 + 1)
    assert OTHER in [peer for peer, _ in rig.core.turn().sends + rig.core.tend().sends]
    rig.unwork(key)
    rig.clock.advance(PROBE_EVERY_US // 1000 + 1)
    assert rig.core.turn().sends + rig.core.tend().sends == []


def test_a_client_that_leaves_while_its_claim_is_on_its_way_holds_nothing(rig: JobRig) -> None:
    rig.write(3, "q")
    for turns in range(3):
        key = rig.receive(wire.OPEN_JOBS, "q", encode(JobStreamOptions("", "n", 3)), encoding=wire.EVENTS)
        for _ in range(turns):
            rig.turn()
        rig.tell(wire.CLOSE_JOBS, key)
        rig.rest()
        assert len(rig.core.jobs) == 0
    claimed = rig.claim(max=10)
    assert sorted(claimed) == [1, 2, 3]
    rig.ack(1, 2, 3, node="other")


def test_a_claim_ends_with_its_stream_also_when_reads_are_held_back(rig: JobRig) -> None:
    rig.write(1, "q")
    key = rig.receive(wire.OPEN_JOBS, "q", encode(JobStreamOptions("", "n")), encoding=wire.EVENTS)
    rig.turn()
    for _ in range(READS_PER_TURN + 1):
        rig.receive(wire.DIFF, "q", {}, peer=OTHER)
    rig.tell(wire.CLOSE_JOBS, key)
    rig.turn()
    assert rig.claim() == {1: 1}, "no job was delivered to a client that had left"


def test_nothing_is_claimed_for_a_front_that_takes_nothing(rig: JobRig) -> None:
    rig.core._window.sent(FRONT, 1 << 40)
    rig.write(2, "q")
    key = rig.work()
    assert rig.pushed(key) == []
    assert rig.claim() == {1: 1}
    rig.core.receive(FRONT, wire.message_head(rig.incarnation) + wire.window_update(1 << 40))
    rig.rest()
    assert rig.seqs(key) == [2]


def test_many_streams_are_served_over_several_turns(rig: JobRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_streams, "CLAIMS_PER_TURN", 2)
    rig.write(10, "q")
    options = encode(JobStreamOptions("", "n"))
    keys = [rig.receive(wire.OPEN_JOBS, "q", options, encoding=wire.EVENTS) for _ in range(10)]
    rig.rest()
    assert [rig.seqs(key) for key in keys] == [[seq] for seq in range(1, 11)]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_deleted_queue_ends_its_streams(rig: JobRig, is_full: bool) -> None:
    if is_full:
        rig.write(1, "q")
    key = rig.work()
    assert rig.seqs(key) == [1] * is_full
    rig.drop("q")
    assert rig.end(key) == (404, "topic_not_found")
    rig.put("q", type="queue")
    rig.write(1, "q")
    assert rig.seqs(key) == [1] * is_full
    assert rig.claim() == {1: 1}
    assert len(rig.core.jobs) == 0


@pytest.mark.parametrize("is_full", [False, True])
def test_a_deleted_consumer_ends_its_streams_alone(rig: JobRig, is_full: bool) -> None:
    rig.put("t")
    rig.put_consumer(name="c")
    rig.put_consumer(name="d")
    if is_full:
        rig.write(1, "t")
    gone, stays = rig.work("t", "c", max=1), rig.work("t", "d", max=1)
    rig.call(wire.DROP_CONSUMER, "t", "c")
    assert (rig.end(gone), rig.end(stays)) == ((404, "consumer_not_found"), None)
    rig.put_consumer(name="c")
    rig.write(1, "t")
    assert rig.seqs(gone) == [1] * is_full


@fault(
    "disk", "the log cannot be written under streams of jobs", "they end with an error frame, code internal"
)
def test_a_shard_that_turns_read_only_ends_streams_that_want_more(rig: JobRig) -> None:
    rig.write(1, "q")
    key = rig.work()
    rig.worked(key)
    rig.core.engine.shard.state.read_only = "test"
    rig.advance(60_000)
    assert rig.end(key) in (None, (500, "internal"))
    late = rig.work()
    assert rig.end(late) == (500, "internal")


# ---- consumers


def test_records_of_a_consumer_are_pushed_with_its_name(rig: JobRig) -> None:
    rig.put("t")
    rig.put_consumer(name="c", max_ack_pending=2)
    rig.write(3, "t")
    key = rig.work("t", "c", max=100)
    rig.worked(key)
    (first, second) = rig.events(key)
    assert (first.event, first.id, first.data["consumer"], first.data["topic"]) == ("record", "1", "c", "t")
    assert "lease_id" in second.data
    rig.ack(1, 2, topic="t", consumer="c")
    assert rig.seqs(key) == [1, 2, 3]


def test_several_connections_share_a_consumer(rig: JobRig) -> None:
    rig.put("t")
    rig.put_consumer()
    keys = [rig.work("t", "c", node=f"n{i}", max=2) for i in range(2)]
    rig.write(4, "t")
    assert sorted(seq for key in keys for seq in rig.seqs(key)) == [1, 2, 3, 4]
    assert [len(rig.seqs(key)) for key in keys] == [2, 2]
    rig.unwork(keys[0])
    again = rig.work("t", "c", max=5)
    assert [event.data["deliveries"] for event in rig.events(again)] == [2, 2]


def test_without_acks_bytes_alone_hold_it_back(rig: JobRig) -> None:
    rig.put("t")
    rig.put_consumer(ack="none")
    key = rig.work("t", "c", max=1)
    for _ in range(5):
        rig.write(1, "t")
    assert rig.seqs(key) == [1, 2]
    for _ in range(5):
        rig.worked(key)
    assert rig.seqs(key) == [1, 2, 3, 4, 5]
    assert "lease_id" not in rig.events(key)[0].data


def test_a_consumer_hears_what_it_has_lost(rig: JobRig) -> None:
    rig.put("t", cap_records=2)
    rig.put_consumer()
    rig.write(5, "t")
    key = rig.work("t", "c", max=10)
    first, *rest = rig.events(key)
    assert (first.event, first.id) == ("tombstone", "3")
    assert first.data == {
        "topic": "t",
        "consumer": "c",
        "reason": "cap",
        "gap_from": 1,
        "gap_to": 3,
        "earliest_seq": 4,
        "head_seq": 5,
    }
    assert [event.data["$seq"] for event in rest] == [4, 5]


@pytest.mark.parametrize("topic, consumer, count", [("q", "", 5), ("t", "c", 3)])
def test_a_stream_in_json_gets_the_data_of_the_events_one_per_line(
    topic: str, consumer: str, count: int
) -> None:
    pushes = []
    for encoding in (wire.EVENTS, wire.JSON):
        rig = JobRig()
        rig.put("t", cap_records=2)
        rig.put_consumer()
        rig.write(5, topic)
        key = rig.receive(
            wire.OPEN_JOBS, topic, encode(JobStreamOptions(consumer, "n", 9)), encoding=encoding
        )
        rig.rest()
        pushes.append(bytes(rig.heard[key][1].body))
    events, lines = pushes
    assert re.findall(rb"^data: (.+)$", events, re.M) == lines.split(b"\n")
    assert len(lines.split(b"\n")) == count


def test_a_queue_does_not_speak_of_what_a_cap_took() -> None:
    rig = JobRig(cap_records=2)
    rig.write(5, "q")
    key = rig.work(max=10)
    assert [event.event for event in rig.events(key)] == ["job", "job"]


def test_headers_alone(rig: JobRig) -> None:
    rig.put("t")
    rig.put_consumer(headers_only=True)
    rig.ask(wire.WRITE, "t", {"records": [{"data": "x" * 100, "tag": "a"}]})
    (event,) = rig.events(rig.work("t", "c"))
    assert "data" not in event.data
    assert (event.data["bytes"], event.data["$tag"]) == (102, "a")


def test_a_consumer_with_too_many_waiting_is_refused_before_a_stream_opens(rig: JobRig) -> None:
    rig.put("t")
    rig.put_consumer(max_waiting=1)
    assert rig.answer(rig.work("t", "c")).status == 200
    error = error_of(rig.answer(rig.work("t", "c")))
    assert (error["code"], error["detail"]) == ("throttled", {"limit": "max_waiting", "max": 1})


def test_a_paused_consumer_s_stream_waits(rig: JobRig) -> None:
    rig.put("t")
    rig.put_consumer()
    key = rig.work("t", "c", max=5)
    rig.call(wire.PAUSE_CONSUMER, "t", "c", until_ts=rig.core.engine.clock.now_ms + 1000)
    rig.write(1, "t")
    assert rig.seqs(key) == []
    rig.advance(1002)
    assert rig.seqs(key) == [1]


def test_a_reset_makes_room_and_begins_again(rig: JobRig) -> None:
    rig.put("t")
    rig.put_consumer()
    rig.write(2, "t")
    key = rig.work("t", "c", max=2)
    rig.worked(key)
    rig.call(wire.RESET_CONSUMER, "t", "c", to="start")
    assert rig.seqs(key) == [1, 2, 1, 2]
