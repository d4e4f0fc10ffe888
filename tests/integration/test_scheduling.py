"""Goal: when a server owes more copies than it can send, one topic of high priority gets eight turns for each turn of thousands of low ones.

Method: sources are on one shard, all their dests on another one, which is stopped (SIGSTOP) until all copies are
owed. By then the maximum number of batches is in flight, of low topics, and all others wait. When the shard
continues, copies arrive in the order in which they were sent, which is read from the copies' times.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.length import pick
from tests.support.server import Server, until
from topics.engine.core.placement import shard_of
from workers.forward.forwarder import BATCHES_MAX

LOW_TOPICS = pick(short=1500, long=5000)
HIGH_FLOWS = 200
SHARE = 8
WRITERS = 4
LOW = {"priority": -1000}
ANSWERED = b"HTTP/1.1 20"
GROWN_OLD_S = 9.0  # after 10 s of waiting the lowest topic is in the top band, too


def names_on(shard: int, stem: str) -> Iterator[str]:
    return (name for name in (f"{stem}{i}" for i in itertools.count()) if shard_of(name, 2) == shard)


def copies_waiting(server: Server) -> int:
    return int(server.get("/v0/metrics", Accept="application/json").json["flows_owing"])


def times(server: Server, topic: str) -> list[int]:
    found: list[int] = []
    while True:
        page = server.diff(topic, from_seq=len(found), limit=1000).json
        found += [record["$ts"] for record in page["records"]]
        if page["caught_up"]:
            return found


def write_each(server: Server, topics: list[str]) -> None:
    """Write one record each, pipelined on one connection."""
    body = json.dumps({"records": [{"data": 1}], "config": LOW})
    head = f"HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    requests = "".join(f"POST /v0/topics/{topic} {head}{body}" for topic in topics).encode()
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        sending = threading.Thread(target=connection.sendall, args=(requests,))
        sending.start()
        answered, rest = 0, b""
        while answered < len(topics):
            rest += connection.recv(1 << 20)
            answered += rest.count(ANSWERED)
            rest = rest[-len(ANSWERED) + 1 :]
        sending.join()


def write_all(server: Server, lows: list[str], high: str) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write_each, [server] * WRITERS, [lows[i::WRITERS] for i in range(WRITERS)]))
    assert server.write(high, 1).status == 200


def test_one_high_topic_and_thousands_of_low_ones_share_eight_to_one(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(environment={"TOPICS_PING_TIMEOUT_MS": "600000"})
    lows = list(itertools.islice(names_on(0, "low."), LOW_TOPICS))
    all_lows, high = next(names_on(1, "all-lows")), next(names_on(0, "high"))
    dests = list(itertools.islice(names_on(1, "dest"), HIGH_FLOWS))
    assert server.put(f"/v0/topics/{high}", {"priority": 1000}).status == 201
    for dest in dests:
        assert server.put(f"/v0/routers/{dest}", {"source": high, "dest": dest}).status == 201
    rule = {"source": "low.>", "dest": all_lows}
    assert server.put("/v0/routers/lows", rule).status == 201
    write_all(server, lows, high)
    until(
        lambda: copies_waiting(server) == 0
    )  # each flow knows how far its dest is, and does not have to ask first
    stalled = server.pid("shard 1")
    os.kill(stalled, signal.SIGSTOP)
    began = time.monotonic()
    try:
        write_all(server, lows, high)
    finally:
        os.kill(stalled, signal.SIGCONT)
    if time.monotonic() - began > GROWN_OLD_S:
        pytest.skip("this machine is so slow that the low topics were promoted meanwhile")
    until(lambda: copies_waiting(server) == 0)
    low_times = times(server, all_lows)
    assert len(low_times) == 2 * LOW_TOPICS
    last_high = max(times(server, dest)[1] for dest in dests)
    before = sum(at < last_high for at in low_times[LOW_TOPICS:]) - BATCHES_MAX
    assert HIGH_FLOWS / (3 * SHARE) <= before <= 3 * HIGH_FLOWS / SHARE, (
        f"{before} low topics had their turn beside {HIGH_FLOWS} batches of the high one"
    )
