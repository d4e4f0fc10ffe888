"""Goal: a client of a stream of jobs gets what its shard pushes, is disconnected when it does not read, and is told
why it ends.

Method: shipped fronts and shards; the test controls the messages between them and the clock.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.watch.service import STALLED_US, SWEEP_EVERY_US
from tests.support.faults import fault
from tests.support.watch_rig import Client, Town
from topics.api.api_keys import parse_keys
from topics.api.errors import InvalidRequest
from topics.link import wire
from topics.link.job_streams import PUSHES_AHEAD
from topics.protocols.http.endpoints.watch import OPEN_WAIT_US
from topics.protocols.http.job_stream import HEARTBEAT_US

S = 1_000_000


@pytest.fixture
def town() -> Town:
    return queue_town()


def queue_town(**settings: Any) -> Town:
    made = Town(**settings)
    made.rig.put("q", type="queue")
    return made


def opened(town: Town, query: str = "node=n", **options: Any) -> Client:
    answers = town.front.work(query=query, **options)
    town.rest()
    client = answers.begin()
    town.rest()
    return client


def jobs(client: Client) -> list[int]:
    return [frame.data["$seq"] for frame in client.frames if frame.event in ("job", "record")]


def claimed(town: Town, count: int = 10) -> dict[int, int]:
    reply = town.rig.ask(wire.CLAIM, "q", {"node": "other", "max": count}, peer=b"tester")
    assert reply is not None
    return {job["$seq"]: job["deliveries"] for job in json.loads(bytes(reply.body))["claimed"]}


def acked(town: Town, *seqs: int) -> None:
    reply = town.rig.ask(wire.ACK, "q", {"node": "n", "seqs": list(seqs)}, peer=b"tester")
    assert reply is not None and json.loads(bytes(reply.body))["acked"] == len(seqs)
    town.rest()


def code(response: Any) -> tuple[int, str]:
    return response.status, json.loads(bytes(response.body))["error"]["code"]


# ---- opening


@pytest.mark.parametrize("query", ["", "node=", "node=" + "x" * 129, "max=1", "node=%C3%A4" + "x" * 127])
def test_a_stream_says_whose_it_is(town: Town, query: str) -> None:
    with pytest.raises(InvalidRequest, match="node"):
        town.front.work("absent", query)
    assert town.front.streams.count == 0


def test_unknown_queues_are_refused(town: Town) -> None:
    town.rig.put("log")
    cases = [("absent", "", 404, "topic_not_found"), ("log", "", 409, "not_a_queue")]
    cases += [("q", "c", 404, "consumer_not_found"), ("absent", "c", 404, "topic_not_found")]
    for topic, consumer, status, name in cases:
        answers = town.front.work(topic, consumer=consumer)
        town.rest()
        assert code(answers[0]) == (status, name)
    assert town.front.streams.count == 0


def test_requested_values_are_clamped(town: Town) -> None:
    town.write(3, "q")
    for query, count, lease_ms in [
        ("node=n", 1, 30_000),
        ("node=n&max=0&lease_ms=0", 1, 100),
        ("node=n&max=2&lease_ms=5000", 2, 5000),
        ("node=n&max=99999999999&lease_ms=99999999999", 3, 86_400_000),
        ("node=n&max=x&lease_ms=-1", 1, 30_000),
    ]:
        client = opened(town, query)
        now_ms = town.rig.core.engine.clock.now_ms
        assert len(jobs(client)) == count, query
        assert {frame.data["deadline"] - now_ms for frame in client.named("job")} == {lease_ms}
        client.leave()
        town.rest()


def test_accept(town: Town) -> None:
    for accept, status in [(b"application/json", 406), (b"text/html, */*", 200), (b"text/event-stream", 200)]:
        answers = town.front.work("q", accept=accept)
        town.rest()
        assert answers[0].status == status
    (answer,) = town.front.work("absent", "", accept=b"text/html")
    assert code(answer) == (406, "not_acceptable")  # before anything else is checked


def test_caps_come_last_and_places_are_given_back(town: Town) -> None:
    town = queue_town(max_sse_connections=1, max_sse_connections_per_key=1)
    client = opened(town)
    answers = [town.front.work(topic) for topic in ("absent", "q")]
    town.rest()
    assert [code(answer[0]) for answer in answers] == [(404, "topic_not_found"), (429, "throttled")]
    assert len(town.rig.core.jobs) == 1
    client.leave()
    town.rest()
    assert (town.front.streams.count, len(town.rig.core.jobs)) == (0, 0)
    (key,) = parse_keys("secret")
    opened(town, key=key)
    assert town.front.streams._per_key == {key.digest: 1}


def test_a_client_that_leaves_before_its_answer_holds_nothing(town: Town) -> None:
    town.write(1, "q")
    answers = town.front.work()
    town.carry_up()
    answers.request.release()
    town.rest()
    assert answers == []
    assert (town.front.streams.count, len(town.rig.core.jobs)) == (0, 0)
    assert claimed(town) == {1: 2}


def test_a_client_that_leaves_before_the_head_is_written_holds_nothing(town: Town) -> None:
    town.write(1, "q")
    answers = town.front.work()
    town.rest()
    (response,) = answers
    assert response.stream is not None
    response.stream.closed()
    town.rest()
    assert (town.front.streams.count, len(town.rig.core.jobs)) == (0, 0)
    assert claimed(town) == {1: 2}


def test_jobs_that_come_before_the_head_is_written_are_kept(town: Town) -> None:
    town.write(1, "q")
    answers = town.front.work()
    town.rest()
    client = answers.begin()
    assert [frame.event for frame in client.frames] == ["retry", "job"]


@fault(
    "worker",
    "a stream of jobs is asked for while its topic's worker restarts",
    "the request waits: a browser gives up on any answer but a stream",
)
def test_a_stream_waits_for_its_shard(town: Town) -> None:
    town.write(1, "q")
    town.kill()
    answers = town.front.work()
    town.advance(2 * S)
    assert answers == []
    town.start()
    town.advance(S)
    assert jobs(answers.begin()) == [1]


def test_a_stream_that_waits_too_long_is_told_to_come_back(town: Town) -> None:
    town.kill()
    answers = town.front.work()
    town.advance(OPEN_WAIT_US + S)
    client = answers.begin()
    assert [frame.event for frame in client.frames] == ["retry", "error"]
    assert client.last.data["code"] == "not_ready"
    town.rest()
    assert town.front.streams.count == 0


# ---- jobs


def test_jobs_arrive_and_an_ack_makes_room(town: Town) -> None:
    town.write(3, "q")
    client = opened(town, "node=n&max=2")
    assert [frame.event for frame in client.frames] == ["retry", "job", "job"]
    acked(town, 1)
    assert jobs(client) == [1, 2, 3]
    town.write(1, "q")
    town.rest()
    assert jobs(client) == [1, 2, 3]
    acked(town, 2, 3)
    assert jobs(client) == [1, 2, 3, 4]


def test_a_consumer_s_stream_holds_as_much_as_its_consumer_allows(town: Town) -> None:
    town.rig.put("t")
    args = wire.encode_args(wire.Args(consumer="c"))
    town.rig.ask(wire.PUT_CONSUMER, "t", {"max_ack_pending": 7}, args=args, peer=b"tester")
    town.write(10)
    client = opened(town, topic="t", consumer="c")
    assert jobs(client) == [1, 2, 3, 4, 5, 6, 7]
    assert {frame.event for frame in client.frames} == {"retry", "record"}


def test_an_idle_stream_is_heard_of_every_15_seconds(town: Town) -> None:
    client = opened(town)
    town.advance(HEARTBEAT_US - S)
    assert client.named("hb") == []
    town.advance(2 * S)
    assert len(client.named("hb")) == 1
    town.advance(3 * HEARTBEAT_US)
    assert len(client.named("hb")) == 4
    town.write(1, "q")
    town.advance(HEARTBEAT_US - S)
    assert len(client.named("hb")) == 4
    client.leave()
    town.advance(2 * HEARTBEAT_US)
    assert town.front.streams._heartbeats == []


# ---- slow clients


def test_a_full_client_is_pushed_to_no_further(town: Town) -> None:
    client = opened(town, "node=n&max=100")
    client.is_full = True
    for _ in range(5):
        town.write(1, "q")
        town.rest()
    assert jobs(client) == []
    assert len(claimed(town)) == 5 - PUSHES_AHEAD
    client.drain()
    town.rest()
    assert jobs(client) == [1, 2]


def test_jobs_that_fill_a_client_are_confirmed_when_it_reads_them(town: Town) -> None:
    client = opened(town, "node=n&max=100")
    write = client.write

    def filling(data: bytes) -> None:
        write(data)
        client.is_full = True

    client.write = filling  # type: ignore[method-assign]
    for _ in range(5):
        town.write(1, "q")
        town.rest()
    assert jobs(client) == [1]
    client.drain()
    town.rest()
    assert jobs(client) == [1, 2]
    client.drain()
    town.rest()
    assert jobs(client) == [1, 2, 3, 4, 5]


@fault(
    "client",
    "a client of a stream of jobs takes nothing for 30 s",
    "an error frame slow_consumer, the stream ends, its jobs are handed out again",
)
def test_a_client_that_takes_nothing_is_let_go(town: Town) -> None:
    town.write(2, "q")
    client = opened(town, "node=n&max=1&lease_ms=86400000")
    client.is_full = True
    acked(town, 1)
    town.advance(STALLED_US - SWEEP_EVERY_US)
    assert not client.is_closed
    town.advance(3 * SWEEP_EVERY_US)
    assert client.is_closed
    assert client.last.data["code"] == "slow_consumer"
    assert claimed(town) == {2: 2}
    assert town.front.streams.count == 0


def test_a_client_that_takes_something_in_time_stays(town: Town) -> None:
    client = opened(town, "node=n&max=100&lease_ms=86400000")
    for _ in range(4):
        client.is_full = True
        town.write(1, "q")
        town.advance(STALLED_US - 2 * SWEEP_EVERY_US)
        client.drain()
        town.rest()
    assert not client.is_closed
    assert jobs(client) == [1, 2, 3, 4]


# ---- ends


@fault(
    "worker",
    "the worker of a queue is killed under streams of jobs",
    "an error frame not_ready, then the stream ends; streams of other shards continue",
)
def test_the_worker_dies(town: Town) -> None:
    town.write(1, "q")
    client = opened(town)
    town.kill()
    town.rest()
    assert client.is_closed
    assert client.last.data["code"] == "not_ready"
    assert town.front.streams.count == 0
    town.start()
    assert jobs(opened(town)) == [1]


def test_the_worker_dies_before_the_head_is_written(town: Town) -> None:
    answers = town.front.work()
    town.rest()
    town.kill()
    client = answers.begin()
    town.rest()
    assert [frame.event for frame in client.frames] == ["retry", "error"]
    assert client.is_closed


def test_other_shards_streams_go_on() -> None:
    town = Town(2)
    names = {town.front.streams.fanout.shard_of(name): name for name in ("a", "b", "c", "d", "e", "f")}
    clients = {}
    for shard, name in names.items():
        town.shard_for(name).put(name, type="queue")
        clients[shard] = opened(town, topic=name)
    town.kill(1)
    town.rest()
    assert (clients[0].is_closed, clients[1].is_closed) == (False, True)


@pytest.mark.parametrize("consumer", ["", "c"])
def test_the_topic_is_deleted(town: Town, consumer: str) -> None:
    args = wire.encode_args(wire.Args(consumer="c"))
    town.rig.ask(wire.PUT_CONSUMER, "q", {}, args=args, peer=b"tester")
    client = opened(town, consumer=consumer)
    town.rig.ask(wire.DROP_TOPIC, "q", peer=b"tester")
    town.rest()
    assert client.is_closed
    assert client.last.event == "error"
    assert (client.last.data["code"], client.last.data["topic"]) == (404, "q")


def test_the_server_stops(town: Town) -> None:
    client = opened(town)
    town.front.streams.drain()
    town.rest()
    assert client.last.data["code"] == "server_shutting_down"
    assert (town.front.streams.count, len(town.rig.core.jobs)) == (0, 0)


def test_a_push_that_nobody_waits_for_is_given_back(town: Town) -> None:
    town.write(1, "q")
    answers = town.front.work()
    town.collect()
    town.front.core.expire(10**12)  # the front has given up on the answer, and asks again
    town.rest()
    assert answers == []
    assert len(town.rig.core.jobs) == 0
    town.advance(S)
    assert jobs(answers.begin()) == [1]
