"""Client helpers for queues and consumers: they check whole answers and the fields of a job."""

from __future__ import annotations

import re
from typing import Any

from tests.support.contract import Json, ok, state_of
from tests.support.server import Reply, Server

NODE = "worker-1"
SETTLES: dict[str, Json] = {"ack": {}, "nack": {}, "extend": {"lease_ms": 1000}}  # further fields of each
COUNT_OF = {"ack": "acked", "nack": "nacked", "extend": "extended"}
LEASE_ID = re.compile(r"lease_[1-9a-f][0-9a-f]{0,15}")


def make_queue(server: Server, topic: str, *jobs: Any, **config: Any) -> None:
    ok(server.put(f"/v0/topics/{topic}", {"type": "queue", **config}), 201)
    if jobs:
        ok(server.write(topic, *jobs))


def call(server: Server, topic: str, verb: str, **body: Any) -> Reply:
    return server.post(f"/v0/topics/{topic}/{verb}", {"node": NODE, **body})


def claim(server: Server, topic: str, max: int = 1, **body: Any) -> list[Json]:
    """The jobs of a claim; the whole answer is checked."""
    answer = ok(call(server, topic, "claim", max=max, **body))
    assert set(answer) == {"topic", "claimed", "count", "ready"}
    jobs: list[Json] = answer["claimed"]
    assert (answer["topic"], answer["count"]) == (topic, len(jobs))
    assert isinstance(answer["ready"], int)
    for job in jobs:
        check_job(job)
    seqs = [job["$seq"] for job in jobs]
    assert seqs == sorted(set(seqs))
    return jobs


def settle(server: Server, topic: str, verb: str, seqs: list[int], **body: Any) -> Json:
    return ok(call(server, topic, verb, seqs=seqs, **{**SETTLES[verb], **body}))


def check_job(job: Json, *also: str) -> None:
    assert {"$seq", "lease_id", "deadline", "$ts", "deliveries", "data", *also} <= set(job)
    assert set(job) <= {"$seq", "lease_id", "deadline", "$ts", "$tag", "deliveries", "data", "meta", *also}
    assert LEASE_ID.fullmatch(job["lease_id"])
    for name in ("$seq", "deadline", "$ts", "deliveries"):
        assert isinstance(job[name], int) and not isinstance(job[name], bool)


def seqs_of(jobs: list[Json]) -> list[int]:
    return [job["$seq"] for job in jobs]


def counts(server: Server, topic: str) -> Json:
    found: Json = state_of(server, topic)["queue"]
    return found
