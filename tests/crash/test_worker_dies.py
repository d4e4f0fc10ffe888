"""Goal: when a worker dies, its topics are unavailable until it is back, no record is lost, and other shards do not notice.

Method: writers on topics of both shards, in both durable classes, record what was acked while the worker of shard 1 is killed
several times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tests.crash.load import Writer, acks, check_all, load, read_all, topics_on
from tests.crash.processes import kill, new_worker_pid, stopped
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import Reply, Server, until

pytestmark = pytest.mark.crash

HANG_MS = "3000"  # longer than a start on a busy machine: a child that is still importing cannot answer
ZERO, ONE = topics_on(0, 2, 4), topics_on(1, 2, 4)
KILLS = pick(short=2, long=5)
ACKS_BETWEEN = 100  # so that all writers are active again


def kill_and_watch(server: Server, shard: int, topics: int) -> tuple[float, float]:
    """Kill the worker and poll until it is back. Returns the begin and end of the outage."""
    began = time.monotonic()
    kill(server.pid(f"shard {shard}"))
    seen_down = False
    while True:
        listing = server.get("/v0/topics")
        ready = server.get("/readyz")
        assert (listing.status, ready.status) in {(200, 200), (200, 503), (503, 503), (503, 200)}
        if listing.status == 200:
            assert len(listing.json["topics"]) == topics, "the list is incomplete"
        if ready.status == 200:
            assert ready.json["topics"] == topics
            if seen_down:
                return began, time.monotonic()
        else:
            seen_down = True
            assert listing.error["code"] == "not_ready" if listing.status == 503 else True


def kill_often(server: Server, writers: dict[str, Writer], mine: list[str]) -> list[tuple[float, float]]:
    outages = []
    for _ in range(KILLS):
        target = acks({topic: writers[topic] for topic in mine}) + ACKS_BETWEEN
        until(lambda target=target: acks({topic: writers[topic] for topic in mine}) >= target)
        outages.append(kill_and_watch(server, 1, len(writers)))
    return outages


@fault(
    "worker",
    "killed (-9) several times while clients write",
    "503 for its topics until it is back; no acked write is lost; other shards do not notice",
)
def test_nothing_acked_is_lost_and_others_do_not_notice(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with load(server, ZERO + ONE) as writers:
        outages = kill_often(server, writers, ONE)
        after = acks(writers)
        until(lambda: acks(writers) > after + ACKS_BETWEEN)
    check_all(server, writers)
    others = [writers[topic].record for topic in ZERO]
    for record in others:
        assert not record.unknown and not record.refused, "a writer of the other shard got an error"
    # The shortest of several: a pause of the whole machine is not a pause that one shard's death caused in another.
    pauses = [
        record.longest_gap_s(began, ended) / (ended - began) for record in others for began, ended in outages
    ]
    assert min(pauses) < 1 / 2, pauses
    assert any(writers[topic].record.refused for topic in ONE)
    assert any(writers[topic].record.unknown for topic in ONE), "no kill hit a write in flight"


@fault(
    "worker",
    "killed (-9) while it has writes with idempotency keys",
    "a retry with the key writes the record exactly once",
)
def test_with_keys_unknown_outcomes_become_exactly_once(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with load(server, ONE, retries=True) as writers:
        kill_often(server, writers, ONE)
        after = acks(writers)
        until(lambda: acks(writers) > after + ACKS_BETWEEN)
    for topic, writer in writers.items():
        assert not writer.record.surprises
        numbers = [number for _, number in read_all(server, topic)]
        assert len(numbers) - len(writer.record.acked) in (0, 1)  # the last write may be unanswered
        assert numbers == list(range(len(numbers)))


@fault("worker", "a write arrives while there is none", "503 not_ready; the write is certainly not executed")
def test_a_write_while_the_worker_is_away_is_refused_and_never_executed(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    topic, other = ONE[0], ZERO[0]
    assert server.write(topic, "before").status == 201
    before = server.pid("shard 1")
    kill(before)
    successor = new_worker_pid(server, 1, not_pid=before)
    with stopped(successor):  # it does not finish its start
        for i in range(20):
            reply = server.write(topic, i)
            assert reply.status == 503
            assert reply.headers["retry-after"] == "1"
            assert reply.error["code"] == "not_ready"
            assert "outcome" not in reply.error["detail"], "no worker got the write, so its outcome is known"
        assert server.write(other, 1).status == 201
        assert server.get("/v0/topics").status == 503
    server.wait_ready()
    assert server.write(topic, "after").status == 200
    assert [data for _, data in read_all(server, topic)] == ["before", "after"]


def in_background(server: Server, topic: str, count: int) -> tuple[list[threading.Thread], list[Reply]]:
    """Writes that wait for their answers, each on its own thread."""
    replies: list[Reply] = []
    threads = [
        threading.Thread(target=lambda i=i: replies.append(server.write(topic, i)), daemon=True)
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads, replies


@fault(
    "worker",
    "it hangs",
    "503 with outcome unknown; it is restarted, and the old process cannot write any more",
)
def test_a_worker_that_hangs_is_replaced_and_cannot_write_any_more(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(environment={"TOPICS_PING_TIMEOUT_MS": HANG_MS})
    topic = ONE[0]
    assert server.write(topic, "before").status == 201
    hung = server.pid("shard 1")
    with stopped(hung):
        threads, replies = in_background(server, topic, 10)
        for thread in threads:
            thread.join(120)
        assert len(replies) == 10
        for reply in replies:
            assert reply.status == 503
            assert reply.error["detail"]["outcome"] == "unknown"
        until(lambda: server.children().get("shard 1") not in (None, hung))
    server.wait_ready()
    assert hung not in server.children().values()
    assert server.write(topic, "after").status == 200
    assert [data for _, data in read_all(server, topic)] == ["before", "after"]


@fault("worker", "it hangs for a moment", "its clients wait; it is not restarted")
def test_a_worker_that_hangs_for_a_moment_is_not_restarted(start_server: Callable[..., Server]) -> None:
    server = start_server()
    topic = ONE[0]
    assert server.write(topic, "before").status == 201
    pid = server.pid("shard 1")
    with stopped(pid):
        threads, replies = in_background(server, topic, 5)
        until(lambda: server.get("/v0/health").status == 200)
    for thread in threads:
        thread.join(120)
    assert sorted(reply.status for reply in replies) == [200] * 5
    assert server.pid("shard 1") == pid


@fault("worker", "killed (-9) while clients wait in long polls", "the polls end with 503")
def test_a_long_poll_ends_with_its_worker(start_server: Callable[..., Server]) -> None:
    server = start_server()
    topic = ONE[0]
    server.write(topic, 1)
    replies: list[Reply] = []
    poll = threading.Thread(
        target=lambda: replies.append(server.diff(topic, from_seq=1, wait_ms=30_000)), daemon=True
    )
    poll.start()
    pid = server.pid("shard 1")
    until(lambda: server.get("/readyz").status == 200)
    kill(pid)
    poll.join(120)
    assert [reply.status for reply in replies] == [503]
    assert "outcome" not in replies[0].error.get("detail", {})
