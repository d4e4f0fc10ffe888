"""Goal: routers copy across shards: a read of the dest returns what was acked at the source before, bursts arrive completely
and in order, and a stop sends what is still owed.

Method: a server with two shards, and topics on both. No test waits for time to pass.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.length import pick
from tests.support.server import Server, until
from topics.engine.core.placement import shard_of
from topics.engine.runtime.engine import Engine
from topics.system.settings import Settings
from workers.shard.posix import PosixDisk, SystemClock
from workers.shard.program import engine_config

Start = Callable[..., Server]
_names = itertools.count()


def name_on(shard: int, stem: str, shards: int = 2) -> str:
    return next(
        name
        for name in (f"{stem}-{next(_names)}" for _ in itertools.count())
        if shard_of(name, shards) == shard
    )


def forward(server: Server, source: str, dest: str, **fields: Any) -> str:
    name = f"rule-{next(_names)}"
    reply = server.put(f"/v0/routers/{name}", {"source": source, "dest": dest, **fields})
    assert reply.status == 201, reply.body
    return name


def texts(server: Server, topic: str) -> list[Any]:
    found: list[Any] = []
    from_seq = 0
    while True:
        page = server.diff(topic, from_seq=from_seq, limit=1000).json
        found += [record["data"] for record in page["records"]]
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return found


def metrics(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v0/metrics", Accept="application/json").json
    return found


EACH_WAY = pytest.mark.parametrize(("here", "there"), [(0, 1), (1, 0), (0, 0), (1, 1)])


@EACH_WAY
def test_a_read_after_the_ack_shows_the_copy(shared_server: Server, here: int, there: int) -> None:
    source, dest = name_on(here, "source"), name_on(there, "dest")
    router = forward(shared_server, source, dest)
    for i in range(pick(short=15, long=50)):
        assert shared_server.write(source, i).status in (200, 201)
        page = shared_server.diff(dest, from_seq=i).json
        assert [record["data"] for record in page["records"]] == [i]
        if i % 10 == 0:
            assert shared_server.get(f"/v0/topics/{dest}").json["head_seq"] == i + 1
            assert shared_server.get(f"/v0/routers/{router}").json["forwarded_total"] == i + 1


@EACH_WAY
def test_bursts_arrive_whole_and_in_order(shared_server: Server, here: int, there: int) -> None:
    source, dest = name_on(here, "source"), name_on(there, "dest")
    forward(shared_server, source, dest)
    for burst in range(3):
        assert shared_server.write(source, *range(burst * 1000, burst * 1000 + 1000)).status in (200, 201)
    assert texts(shared_server, dest) == list(range(3000))


def test_large_records_and_raw_ones(shared_server: Server) -> None:
    source, dest = name_on(0, "source"), name_on(1, "dest")
    forward(shared_server, source, dest)
    large = ["x" * 700_000 + str(i) for i in range(5)]
    for text in large:
        assert shared_server.write(source, text).status in (200, 201)
    body = {"records": [{"data_base64": "AAEC", "tag": "raw"}]}
    assert shared_server.post(f"/v0/topics/{source}", body).status == 200
    copied = [
        record
        for i in range(6)
        for record in shared_server.diff(dest, from_seq=i, limit=1, include_tags=True).json["records"]
    ]
    assert [record["data"] for record in copied[:5]] == large
    (raw,) = shared_server.diff(source, from_seq=5, include_tags=True).json["records"]
    assert {**copied[5], "$ts": 0} == {**raw, "$ts": 0}


def test_one_source_many_dests(shared_server: Server) -> None:
    source = name_on(0, "source")
    dests = [name_on(i % 2, "dest") for i in range(pick(short=16, long=40))]
    for dest in dests:
        forward(shared_server, source, dest)
    shared_server.write(source, *range(100))
    for dest in dests:
        assert texts(shared_server, dest) == list(range(100))


def test_shards_that_feed_each_other_under_load(shared_server: Server) -> None:
    """Writers and readers in both directions: no deadlock, and every read returns its client's own writes."""
    pairs = [(name_on(0, "a"), name_on(1, "b")), (name_on(1, "c"), name_on(0, "d"))]
    for source, dest in pairs:
        forward(shared_server, source, dest)
    failures: list[str] = []

    def work(source: str, dest: str, worker: int) -> None:
        for i in range(pick(short=15, long=40)):
            shared_server.write(source, [worker, i])
            found = [tuple(text) for text in texts(shared_server, dest)]
            if (worker, i) not in found:
                failures.append(f"{dest} lacks {(worker, i)}")

    threads = [threading.Thread(target=work, args=(*pair, worker)) for worker, pair in enumerate(pairs * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_claim_and_a_last_record_catch_up(shared_server: Server) -> None:
    source, dest = name_on(0, "source"), name_on(1, "jobs")
    shared_server.put(f"/v0/topics/{dest}", {"type": "queue"})
    forward(shared_server, source, dest)
    for i in range(5):
        shared_server.post(f"/v0/topics/{source}", {"records": [{"data": i, "tag": "t"}]})
        last = shared_server.get(f"/v0/topics/{dest}/last?tag=t").json
        assert [record["data"] for record in last["records"]] == [i]
        claimed = shared_server.post(f"/v0/topics/{dest}/claim", {"node": "n"}).json
        assert [job["data"] for job in claimed["claimed"]] == [i]


def test_a_full_dest_holds_its_rule_and_no_other(shared_server: Server) -> None:
    source, full, roomy = name_on(0, "source"), name_on(1, "full"), name_on(1, "roomy")
    shared_server.put(f"/v0/topics/{full}", {"cap_records": 10, "discard": "reject"})
    forward(shared_server, source, full)
    forward(shared_server, source, roomy)
    shared_server.write(source, *range(30))
    assert texts(shared_server, full) == list(range(10))
    assert texts(shared_server, roomy) == list(range(30))
    shared_server.post(f"/v0/topics/{full}/delete", {"before_seq": 6})
    assert texts(shared_server, full) == list(range(5, 15))


def test_rules_are_deleted_with_their_topics(shared_server: Server) -> None:
    source, dest = name_on(0, "source"), name_on(1, "dest")
    names = sorted(forward(shared_server, source, dest) for _ in range(3))
    shared_server.write(source, 1)
    assert shared_server.delete(f"/v0/topics/{dest}").json["routers_removed"] == names
    assert [shared_server.get(f"/v0/routers/{name}").status for name in names] == [404] * 3
    assert shared_server.delete(f"/v0/topics/{source}").json["routers_removed"] == []


def test_a_stop_sends_owed_copies(start_server: Start) -> None:
    """Along a chain over both shards: a dest that gets copies in turn owes them to the next one."""
    server = start_server()
    chain = [name_on(i % 2, f"link{i}") for i in range(6)]
    for source, dest in itertools.pairwise(chain):
        forward(server, source, dest)
    for i in range(20):
        server.write(chain[0], *range(i * 500, i * 500 + 500))
    assert server.stop() == 0
    assert [stored(server, topic) for topic in chain] == [10_000] * 6


def stored(server: Server, topic: str) -> int:
    """The number of records of a topic in the files of a stopped server."""
    config = engine_config(Settings(), shard_of(topic, server.shards), 1)
    engine = Engine.open(PosixDisk(str(server.data_dir)), SystemClock(), config)
    count = engine.shard.state.published[topic].view.count
    engine.close()
    return count


def test_a_stop_does_not_wait_for_a_full_dest(start_server: Start) -> None:
    server = start_server()
    source, dest = name_on(0, "source"), name_on(1, "dest")
    server.put(f"/v0/topics/{dest}", {"cap_records": 1, "discard": "reject"})
    forward(server, source, dest)
    server.write(source, 1, 2, 3)
    assert texts(server, dest) == [1]
    assert server.stop() == 0
    assert "will be sent after the next start" not in server.log
    server = start_server(folder=server.folder)
    server.post(f"/v0/topics/{dest}/delete", {"before_seq": 2})
    until(lambda: texts(server, dest) == [2])


def test_metrics_tell_of_copies(shared_server: Server) -> None:
    source, dest = name_on(0, "source"), name_on(1, "dest")
    before = metrics(shared_server)["copies"]
    forward(shared_server, source, dest)
    shared_server.write(source, *range(10))
    assert texts(shared_server, dest) == list(range(10))
    assert metrics(shared_server)["copies"] >= before + 10
    text = shared_server.get("/v0/metrics").body.decode()
    for name in ("topics_copies_total", "topics_flows_owing", "topics_catch_ups_total"):
        assert f"\n{name} " in text
