"""Goal: caps over all shards are exact, and a write gets a 429 only when no shard has room.

Method: several real shards on simulated disks, with messages to the catalog carried by the test. First the cases in
which messages and deaths cross each other, then seeded random runs that compare with a count.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support import length
from tests.support.faults import fault
from tests.support.shard_rig import WORKER, Cluster, Rig, error_of
from topics.api.limits import MIB
from topics.link import wire


def write(size: int = 1) -> dict[str, Any]:
    """One record whose accounted size is `size`."""
    return {"records": [{"data": "x" * (size - 2) if size > 1 else 1}]}


def cluster(shards: int = 3, **limits: int) -> Cluster:
    made = Cluster(shards, wal_file_bytes=4 * MIB, **limits)
    made.rest()
    return made


def create(made: Cluster, shard: int, topic: str, body: Any = None) -> int:
    """The status of a creating write; 0 while it waits."""
    reply = made.ask(shard, wire.WRITE, topic, body or write())
    return reply.status if reply is not None else 0


def fill(made: Cluster, count: int, *, start: int = 0) -> None:
    for i in range(start, start + count):
        assert create(made, i % len(made.rigs), f"t{i}") == 201


# ---- topics


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_all_topics_of_the_cap_may_lie_on_one_shard(shards: int) -> None:
    made = cluster(shards, max_topics=10)
    for i in range(10):
        assert create(made, shards - 1, f"t{i}") == 201
    for shard in range(shards):
        reply = made.ask(shard, wire.WRITE, "more", write())
        assert error_of(reply)["detail"] == {"limit": "max_topics", "max": 10}


def test_a_topic_deleted_on_one_shard_makes_room_on_another() -> None:
    made = cluster(max_topics=10)
    fill(made, 10)
    assert create(made, 1, "more") == 429
    reply = made.ask(2, wire.DROP_TOPIC, "t2")
    assert reply is not None and reply.status == 200
    assert create(made, 1, "more") == 201
    assert create(made, 2, "t2") == 429


def test_existing_topics_are_never_capped() -> None:
    made = cluster(max_topics=10)
    fill(made, 10)
    for i in range(10):
        assert create(made, i % 3, f"t{i}") == 200
        reply = made.ask(i % 3, wire.PUT_TOPIC, f"t{i}", {"ttl_ms": 5000})
        assert reply is not None and reply.status == 200


# ---- bytes


def test_exactly_at_the_cap_is_allowed() -> None:
    made = cluster(max_total_bytes=1000)
    assert create(made, 0, "a", write(400)) == 201
    assert create(made, 1, "b", write(300)) == 201
    assert create(made, 2, "c", write(300)) == 201
    assert made.used()[1] == 1000
    error = error_of(made.ask(0, wire.WRITE, "a", write(1)))
    assert error["detail"] == {"limit": "max_total_bytes", "max": 1000}
    reply = made.ask(1, wire.DELETE, "b", {"before_seq": 2})
    assert reply is not None and reply.status == 200
    assert create(made, 0, "a", write(301)) == 429
    assert create(made, 0, "a", write(300)) == 200


def test_a_write_larger_than_what_is_left_of_the_grant_gets_all_it_takes() -> None:
    """It asks for its whole size: the missing part alone, on top of what is used, would be too little."""
    made = cluster(2, max_total_bytes=1000)
    assert create(made, 1, "b", write(100)) == 201  # with a chunk of 125 granted for it
    for size in (60, 500, 340):
        assert create(made, 1, "b", write(size)) == 200
    assert made.used()[1] == 1000


# ---- deaths


@fault("worker", "the catalog's worker is down", "granted shares can be used; the cap is never exceeded")
def test_while_the_catalog_is_down_a_grant_can_be_spent_but_nothing_more() -> None:
    made = cluster(2, max_topics=100)
    assert create(made, 1, "a") == 201  # a chunk of 12
    made.kill(0)
    for i in range(11):
        assert create(made, 1, f"t{i}") == 201
    rig = made.rig(1)
    key = rig.receive(wire.WRITE, "over", write())
    made.rest()
    assert key not in rig.replies
    assert create(made, 1, "a") == 200  # an existing topic does not wait
    made.clock.advance(5001)
    made.rest()
    assert error_of(rig.replies[key])["code"] == "not_ready"


@fault("worker", "the catalog's worker dies while writes wait for it", "its successor answers them")
def test_parked_requests_survive_the_death_of_the_catalog() -> None:
    made = cluster(2, max_topics=10)
    fill(made, 9)
    made.kill(0)
    rig = made.rig(1)
    keys = [rig.receive(wire.WRITE, name, write()) for name in ("one", "two")]
    made.rest()
    made.start(0)
    made.rest()
    assert [rig.replies[key].status for key in keys] == [201, 429]
    assert made.used()[0] == 10


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_restart_changes_nothing_about_the_cap(shard: int) -> None:
    made = cluster(max_topics=10)
    fill(made, 9)
    made.kill(shard)
    made.start(shard)
    made.rest()
    assert create(made, 1, "last") == 201
    assert [create(made, s, "more") for s in range(3)] == [429, 429, 429]


@fault(
    "disk",
    "the sync of a topic's creation fails, and the restart finds the topic in the log",
    "it had kept its place under the cap: no other topic has taken it",
)
def test_topics_that_may_return_keep_their_share() -> None:
    made = cluster(2, max_topics=3)
    fill(made, 2)
    rig = made.rig(1)
    key = rig.receive(wire.PUT_TOPIC, "perhaps", {"durability": "fsync"})
    for _ in range(4):  # until the shard has its grant and the creation is written
        while made.carry():
            pass
        rig.turn()
    [sync] = [job for job in rig.jobs if job.kind == "sync"]
    rig.jobs.remove(sync)
    rig._take(rig.core.finish(sync, OSError(5, "broken"), 0.0))
    made.rest()
    assert error_of(rig.replies[key])["detail"]["outcome"] == "unknown"
    assert create(made, 0, "another") == 429
    made.kill(1)
    made.start(1)
    made.rest()
    assert "perhaps" in made.rig(1).core.engine.shard.state.published
    assert made.used()[0] == 3


@fault("link", "news of a worker's death come after its successor reported", "the successor is not shut out")
def test_news_of_a_death_that_come_after_the_successor_s_report_do_not_shut_it_out() -> None:
    made = cluster(2, max_topics=10)
    gone = made.lose(1)
    made.start(1, heard=False)
    made.rest()  # the catalog learns of the new incarnation
    made.rig(0).caps.shard_down(1, gone.incarnation)
    made.rest()
    for i in range(10):
        assert create(made, 1, f"t{i}") == 201
    assert create(made, 1, "more") == 429


@fault("link", "last words of a dead worker come after its successor reported", "they are ignored")
def test_the_last_words_of_a_dead_worker_do_not_take_its_successor_s_place() -> None:
    made = cluster(2, max_topics=100)
    old = made.rig(1)
    old.receive(wire.WRITE, "t", write())
    old.rest()
    ((_, (words,)),) = old.asks  # a request for a grant, still in flight
    made.lose(1)
    made.start(1, heard=False)
    assert create(made, 1, "t") == 201  # and a grant that it does not use
    made.rig(0).core.receive(WORKER + b"1-0", bytes(words))
    for i in range(99):
        assert create(made, 0, f"t{i}") == 201, "the successor did not hear the recall"


def test_a_recall_on_the_heels_of_a_grant_does_not_take_it_away_unused() -> None:
    made = cluster(2, max_topics=1)
    rigs: list[Rig] = [made.rig(0), made.rig(1)]
    keys = [rig.receive(wire.WRITE, "t", write()) for rig in rigs]
    rigs[1].rest()
    rigs[0].turn()  # shard 0 has its grant and has not used it when the request of shard 1 comes
    while made.carry():
        pass
    made.rest()
    statuses = [rig.replies[key].status for rig, key in zip(rigs, keys)]
    assert statuses == [201, 429]


# ---- any order


def walk(seed: int, *, with_deaths: bool) -> None:
    """Creations, writes, deletes and deaths on three shards. No cap is exceeded, and everything that fits is
    accepted.
    """
    rng = random.Random(seed)
    caps = {"max_topics": rng.randint(3, 12), "max_total_bytes": rng.randint(50, 2000)}
    made = cluster(3, **caps)
    names = [f"t{i}" for i in range(15)]
    for step in range(60):
        shard = rng.randrange(3)
        kind = rng.random()
        if with_deaths and kind < 0.08:
            made.kill(shard)
            made.start(shard)
            made.rest()
        elif kind < 0.3:
            made.ask(shard, wire.DROP_TOPIC, rng.choice(names))
        elif kind < 0.4:
            made.ask(shard, wire.DELETE, rng.choice(names), {"before_seq": 1 << 40})
        else:
            _write_and_judge(made, caps, shard, rng.choice(names), rng.randint(3, 400), step)
        topics, size = made.used()
        assert topics <= caps["max_topics"] and size <= caps["max_total_bytes"], (seed, step)


def _write_and_judge(
    made: Cluster, caps: dict[str, int], shard: int, topic: str, size: int, step: int
) -> None:
    topics, used = made.used()
    is_new = topic not in made.rig(shard).core.engine.shard.state.staged
    fits = topics + is_new <= caps["max_topics"] and used + size <= caps["max_total_bytes"]
    status = create(made, shard, topic, write(size))
    assert (status in (200, 201)) == fits, (step, status, topics, used, size, caps)
    assert status in (200, 201, 429), "with all shards up, only success or 429 is allowed"


@pytest.mark.sim
@pytest.mark.parametrize("seed", length.seeds(short=2, long=30))
def test_one_at_a_time_every_answer_is_the_right_one(seed: int) -> None:
    walk(seed, with_deaths=seed % 2 == 1)


@pytest.mark.sim
@pytest.mark.parametrize("seed", length.seeds(short=3, long=12))
def test_many_at_once_fill_the_cap_and_not_more(seed: int) -> None:
    """Messages are carried between single turns, so requests, grants and recalls cross each other."""
    rng = random.Random(seed)
    cap = rng.randint(1, 20)
    made = cluster(3, max_topics=cap)
    keys = []
    for i in range(30):
        shard = rng.randrange(3)
        keys.append((shard, made.rig(shard).receive(wire.WRITE, f"t{i}", write())))
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.5:
                made.carry()
            else:
                made.rig(rng.randrange(3)).turn()
            assert made.used()[0] <= cap
    made.rest()
    statuses = sorted(made.rig(shard).replies[key].status for shard, key in keys)
    assert statuses == [201] * cap + [429] * (30 - cap)
