"""Goal: the port is open at once, and shards that are ready are served while others still recover.

Method: one shard is held back, by stopping its worker process as soon as it exists or by a long log to replay, and
the other one is used meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.crash.load import topics_on
from tests.crash.processes import new_worker_pid, stopped
from tests.support.faults import fault
from tests.support.server import PROGRAM, Server, until

pytestmark = pytest.mark.crash

JSON = {"Content-Type": "application/json"}
ZERO, ONE = topics_on(0, 2, 1)[0], topics_on(1, 2, 1)[0]


def check_one_shard_ready(server: Server) -> None:
    """Shard 0 is ready, shard 1 is not."""
    assert server.get("/v0/health").status == 200
    assert server.get("/v0/metrics").status == 200
    assert server.get("/v0/metrics", Accept="application/json").json["ready"] is False
    ready = server.get("/readyz")
    assert ready.status == 503
    assert ready.error["code"] == "not_ready"
    assert 0 <= ready.error["detail"]["replay_progress"] <= 1
    assert server.write(ZERO, "meanwhile").status == 200
    assert server.diff(ZERO).status == 200
    for reply in (server.write(ONE, 1), server.diff(ONE), server.get(f"/v0/topics/{ONE}")):
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.error["code"] == "not_ready"
        assert 0 <= reply.error["detail"]["replay_progress"] < 1
    assert server.get("/v0/topics").status == 503, "a list without one shard's topics would be wrong"


@fault("worker", "one does not start", "503 for its topics; the others are served")
def test_one_shard_serves_while_the_other_one_has_not_started(start_server: Callable[..., Server]) -> None:
    server = start_server(command=PROGRAM)
    for topic in (ZERO, ONE):
        assert server.write(topic, "first").status == 201
    server.kill()
    server.start(wait_ready=False)
    with stopped(new_worker_pid(server, 1)):
        until(lambda: server.diff(ZERO).status == 200)
        check_one_shard_ready(server)
    server.wait_ready()
    assert [row["data"] for row in server.diff(ONE).json["records"]] == ["first"]


@fault("worker", "a long log to replay", "503 with the progress until it is done")
def test_a_replay_reports_its_progress(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_WAL_FILE_BYTES": str(64 << 20)})
    batch = json.dumps({"records": [{"data": i} for i in range(10_000)]}).encode()
    for _ in range(40):
        path = f"/v0/topics/{ONE}?return_seqs=false"
        assert server.request("POST", path, batch, JSON).status in (200, 201)
    seen: list[float] = []

    def recovered() -> bool:
        reply = server.diff(ONE, limit=1)
        if reply.status == 503:
            seen.append(reply.error["detail"]["replay_progress"])
        return reply.status == 200

    for _ in range(5):  # on a busy machine a replay may be over before its progress is read
        seen.clear()
        server.kill()
        server.start(wait_ready=False)
        until(recovered, 60, every_s=0.001)
        assert seen == sorted(seen), "the progress went back"
        if any(0 < progress < 1 for progress in seen):
            break
    assert any(0 < progress < 1 for progress in seen), seen
    assert server.diff(ONE, from_seq=399_999).json["head_seq"] == 400_000
