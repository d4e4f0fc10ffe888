"""Goal: server-wide caps hold exactly, over all shards, restarts and deaths of workers.

Method: real servers with three shards, many concurrent clients, and counts by a client.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import Reply, Server, until
from topics.engine.core.placement import shard_of

SHARDS = 3
TEN = {"TOPICS_MAX_TOPICS": "10"}


def on_shard(shard: int, count: int, prefix: str) -> list[str]:
    names = (f"{prefix}{i}" for i in range(1000))
    return [name for name in names if shard_of(name, SHARDS) == shard][:count]


def at_once(server: Server, topics: list[str], call: Callable[[str], Reply]) -> list[Reply]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(call, topics))


def check_refusal(reply: Reply, limit: str, most: int) -> None:
    assert reply.status == 429, reply
    assert reply.headers["retry-after"] == "1"
    assert reply.error["code"] == "throttled"
    assert reply.error["detail"] == {"limit": limit, "max": most}


def names_of(server: Server) -> list[str]:
    return [row["topic"] for row in server.get("/v0/topics?page_size=1000").json["topics"]]


def kill_worker(server: Server, shard: int) -> None:
    before = server.pid(f"shard {shard}")
    os.kill(before, signal.SIGKILL)
    until(lambda: server.children().get(f"shard {shard}") not in (None, before))
    server.wait_ready()


# ---- topics


@pytest.fixture
def full_server(start_server: Callable[..., Server]) -> Server:
    """A server with ten of ten topics, created by concurrent clients, half by writes and half by PUT."""
    server = start_server(environment=TEN, shards=SHARDS)

    def create(topic: str) -> Reply:
        if int(topic[1:]) % 2:
            return server.write(topic, 1)
        return server.put(f"/v0/topics/{topic}", {})

    replies = at_once(server, [f"t{i}" for i in range(60)], create)
    assert sorted({reply.status for reply in replies}) == [201, 429]
    assert sum(reply.status == 201 for reply in replies) == 10
    for reply in replies:
        if reply.status == 429:
            check_refusal(reply, "max_topics", 10)
    assert len(names_of(server)) == 10
    return server


def check_full(server: Server) -> None:
    """No shard accepts another topic, and all accept changes to existing ones."""
    for shard in range(SHARDS):
        check_refusal(server.write(on_shard(shard, 1, "more")[0], 1), "max_topics", 10)
    for topic in names_of(server):
        assert server.write(topic, 2).status == 200
        assert server.put(f"/v0/topics/{topic}", {"ttl_ms": 0}).status == 200


def check_exchange(server: Server) -> None:
    """Deleting a topic on one shard makes room for a topic on another."""
    gone = names_of(server)[0]
    other = (shard_of(gone, SHARDS) + 1) % SHARDS
    new = next(name for name in on_shard(other, 20, "new") if name not in names_of(server))
    assert server.delete(f"/v0/topics/{gone}").status == 200
    assert server.write(new, 1).status == 201
    check_full(server)


@fault("worker", "workers die and restart while a cap is full", "the cap holds exactly")
def test_topics_are_capped_exactly_also_after_restarts_and_deaths(full_server: Server) -> None:
    check_full(full_server)
    check_exchange(full_server)
    full_server.stop()
    full_server.start()
    check_full(full_server)
    check_exchange(full_server)
    for shard in (0, 1):
        kill_worker(full_server, shard)
        check_full(full_server)
        check_exchange(full_server)


@fault("worker", "a worker dies with unused shares of a cap", "other shards get them")
def test_a_dead_worker_s_free_slots_are_not_lost(start_server: Callable[..., Server]) -> None:
    server = start_server(environment=TEN, shards=SHARDS)
    for topic in on_shard(1, 4, "a"):
        assert server.write(topic, 1).status == 201
    kill_worker(server, 1)
    for topic in on_shard(2, 6, "b"):
        assert server.write(topic, 1).status == 201
    check_full(server)


# ---- without the catalog


@fault("worker", "the catalog's worker is down", "granted shares can be used; the cap is never exceeded")
def test_without_the_catalog_granted_shares_can_be_used(start_server: Callable[..., Server]) -> None:
    """A creation beyond the grant gets 503 and not 429: whether there is room is unknown."""
    server = start_server(environment={"TOPICS_MAX_TOPICS": "4"}, shards=2)
    one = [f"t{i}" for i in range(100) if shard_of(f"t{i}", 2) == 1]
    assert server.write(one[0], 1).status == 201
    catalog = server.pid("shard 0")
    os.kill(catalog, signal.SIGSTOP)
    try:
        assert server.write(one[0], 2).status == 200
        assert server.diff(one[0]).status == 200
        reply = server.write(one[1], 1)
        assert (reply.status, reply.error["code"]) == (503, "not_ready")
    finally:
        os.kill(catalog, signal.SIGCONT)
    server.wait_ready()
    # The refused one was not created, and four fit as before.
    assert names_of(server) == [one[0]]
    assert [server.write(topic, 1).status for topic in one[1:5]] == [201, 201, 201, 429]


# ---- bytes


def sized(size: int) -> str:
    """A JSON text of exactly this size."""
    return "x" * (size - 2)


def bytes_of(server: Server) -> int:
    return int(server.get("/v0/metrics", Accept="application/json").json["bytes_live"])


def test_bytes_are_capped_exactly(start_server: Callable[..., Server]) -> None:
    cap = 10_000
    server = start_server(environment={"TOPICS_MAX_TOTAL_BYTES": str(cap)}, shards=SHARDS)
    topics = [on_shard(shard, 1, "b")[0] for shard in range(SHARDS)]
    for topic, size in zip(topics, (5000, 3000, 2000)):
        assert server.write(topic, sized(size)).status == 201
    assert bytes_of(server) == cap
    for topic in topics:
        check_refusal(server.write(topic, 1), "max_total_bytes", cap)
    assert server.post(f"/v0/topics/{topics[1]}/delete", {"before_seq": 2}).json["deleted"] == 1
    check_refusal(server.write(topics[0], sized(3001)), "max_total_bytes", cap)
    assert server.write(topics[0], sized(3000)).status == 200
    assert server.delete(f"/v0/topics/{topics[2]}").status == 200
    assert server.write(topics[1], sized(2000)).status == 200
    assert bytes_of(server) == cap
    kill_worker(server, 0)
    check_refusal(server.write(topics[1], 1), "max_total_bytes", cap)


def answer_of(reply: Reply) -> Reply | None:
    return None if reply.status == 503 and reply.json["error"]["code"] == "not_ready" else reply


def test_writers_of_all_sizes_on_all_shards_fill_the_cap_and_not_more(
    start_server: Callable[..., Server],
) -> None:
    cap = 200_000
    server = start_server(environment={"TOPICS_MAX_TOTAL_BYTES": str(cap)}, shards=SHARDS)
    topics = [topic for shard in range(SHARDS) for topic in on_shard(shard, 3, "w")]
    refused: list[int] = []
    accepted: list[int] = []

    def write_many(topic: str) -> Any:
        rng = random.Random(topic)
        for _ in range(pick(short=30, long=60)):
            size = rng.choice([rng.randint(3, 200), rng.randint(200, 5000)])
            # On a busy machine the request to the catalog's shard may time out; then nothing was written.
            reply = until(lambda size=size: answer_of(server.write(topic, sized(size))))
            if reply.status == 429:
                check_refusal(reply, "max_total_bytes", cap)
                refused.append(size)
            else:
                assert reply.status in (200, 201)
                accepted.append(size)
            assert bytes_of(server) <= cap

    with ThreadPoolExecutor(len(topics)) as pool:
        list(pool.map(write_many, topics))
    used = bytes_of(server)
    assert used == sum(accepted) <= cap
    assert refused, "the writers did not reach the cap"
    # Nothing was deleted, so what was refused once is refused again.
    assert used + min(refused) > cap
    last = server.write(topics[0], sized(cap - used)) if cap - used >= 2 else None
    assert last is None or last.status == 200
