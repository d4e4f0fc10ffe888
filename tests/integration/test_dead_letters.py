"""Goal: a job that a call moves to a dead letter topic can be read there once the call is answered, unless that took a second.

Method: a server with two shards, and a queue whose dead letters go to either of them. Then the target's worker is stopped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.consumer_client import path_of
from tests.support.contract import data_of, fresh, ok
from tests.support.queue_client import make_queue
from tests.support.server import Server, until
from topics.engine.core.placement import shard_of
from workers.forward.outbox import WAIT_US

ROUNDS = 15


def name_on(shard: int, stem: str) -> str:
    return next(name for name in (fresh(stem) for _ in range(1000)) if shard_of(name, 2) == shard)


def by_claim(server: Server, queue: str) -> None:
    """The only delivery is nacked; the next claim moves the job."""
    ok(server.post(f"/v0/topics/{queue}/nack", {"node": "n", "seqs": [taken(server, queue, "claim")]}))
    assert ok(server.post(f"/v0/topics/{queue}/claim", {"node": "n"}))["count"] == 0


def by_nack(server: Server, queue: str) -> None:
    body = {"node": "n", "seqs": [taken(server, queue, "claim")], "kind": "dead"}
    assert ok(server.post(f"/v0/topics/{queue}/nack", body))["nacked"] == 1


def by_fetch(server: Server, topic: str) -> None:
    body = {"node": "n", "seqs": [taken(server, topic, "consumers/c/fetch")]}
    ok(server.post(path_of(topic, "nack"), body))
    assert ok(server.post(path_of(topic, "fetch"), {"node": "n"}))["count"] == 0


def by_term(server: Server, topic: str) -> None:
    body = {"node": "n", "seqs": [taken(server, topic, "consumers/c/fetch")]}
    assert ok(server.post(path_of(topic, "term"), body))["termed"] == 1


def taken(server: Server, topic: str, call: str) -> int:
    (job,) = ok(server.post(f"/v0/topics/{topic}/{call}", {"node": "n"}))["claimed"]
    return int(job["$seq"])


@pytest.mark.parametrize("target_shard", [0, 1], ids=["far", "near"])
@pytest.mark.parametrize("move", [by_claim, by_nack, by_fetch, by_term])
def test_a_dead_letter_is_there_when_the_call_is_answered(
    shared_server: Server, target_shard: int, move: Callable[[Server, str], None]
) -> None:
    topic, target = name_on(1, "work"), name_on(target_shard, "dead")
    if move in (by_claim, by_nack):
        make_queue(shared_server, topic, dead_letter=target, max_deliveries=1)
    else:
        ok(shared_server.put(f"/v0/topics/{topic}", {}), 201)
        ok(shared_server.put(path_of(topic), {"dead_letter": target, "max_deliver": 1}), 201)
    for i in range(ROUNDS):
        ok(shared_server.write(topic, i))
        began = time.monotonic()
        move(shared_server, topic)
        # An answer does not wait longer than this for the dead letter, for example when the machine pauses.
        if time.monotonic() - began > WAIT_US / 1e6:
            until(lambda count=i: len(data_of(shared_server, target)) > count)
        assert data_of(shared_server, target) == list(range(i + 1))


def test_an_answer_waits_a_second_for_a_target_that_stands_still(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_PING_TIMEOUT_MS": "600000"})
    queue, target = name_on(1, "work"), name_on(0, "dead")
    ok(server.put(f"/v0/topics/{target}"), 201)
    make_queue(server, queue, *range(1, 9), dead_letter=target, max_deliveries=1)
    ok(server.post(f"/v0/topics/{queue}/nack", {"node": "n", "seqs": [taken(server, queue, "claim")]}))
    stalled = server.pid("shard 0")
    os.kill(stalled, signal.SIGSTOP)
    try:
        began = time.monotonic()
        claimed = ok(server.post(f"/v0/topics/{queue}/claim", {"node": "n"}))
        took_s = time.monotonic() - began
        assert [job["$seq"] for job in claimed["claimed"]] == [2]
        assert took_s >= WAIT_US / 1e6
        # These calls move no job, and do not wait. One of them may be delayed by something else.
        others_s = []
        for seq in range(3, 9):
            began = time.monotonic()
            assert taken(server, queue, "claim") == seq
            others_s.append(time.monotonic() - began)
        assert min(others_s) < took_s
    finally:
        os.kill(stalled, signal.SIGCONT)
    until(lambda: data_of(server, target) == [1])
