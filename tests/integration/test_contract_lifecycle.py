"""Goal: a stop loses no acknowledged write and answers every request; the next start serves everything that was there.

Method: real servers are stopped, killed and started again on the same directory, with requests in flight. A worker is
kept from recovering by holding its shard's lock, so that it stays "not ready" while a test looks at it.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.contract import Json, data_of, ok, poll, refused, send_text, state_of
from tests.support.faults import fault
from tests.support.server import PROGRAM, ROOT, Reply, Server, until
from topics.engine.core.placement import shard_of

Start = Callable[..., Server]


def pages(server: Server, names: list[str]) -> dict[str, Any]:
    found = {name: ok(server.diff(name, include_tags=True)) for name in names}
    return {name: (page, data_text(server, name)) for name, page in found.items()}


def data_text(server: Server, name: str) -> bytes:
    """The text of the records, without figures that differ between answers."""
    return server.diff(name).body.partition(b',"performance"')[0]


def fill(server: Server) -> list[str]:
    """Topics of every durable class, using all features."""
    text = '{"b":1,"a":12345678901234567890,"a":1.0e5, "t":"\\u00e9"}'
    for name in ("memory", "disk", "fsync"):
        config = {"durability": name, "cap_records": 6, "cap_per_tag": 3, "ttl_ms": 3_600_000}
        ok(server.put(f"/v0/topics/{name}", config), 201)
        body = '{"records":[{"data":' + text + ',"tag":"t","node":"n","meta":{"k":1}}]}'
        for i in range(5):
            ok(send_text(server, "POST", f"/v0/topics/{name}", body))
            ok(server.write(name, i, idempotency_key=f"k{i}"))
        ok(server.post(f"/v0/topics/{name}/delete", {"seqs": [9]}))
        ok(server.post(f"/v0/topics/{name}", {"records": [{"data_base64": "AP8="}]}))
    ok(server.write("gone", 1), 201)
    ok(server.delete("/v0/topics/gone"))
    return ["memory", "disk", "fsync"]


def states(server: Server, names: list[str]) -> dict[str, Json]:
    found = {name: state_of(server, name) for name in names}
    for state in found.values():
        del state["last_read_ts"], state["effective_priority"]  # the time of the last read is not stored
    return found


@fault(
    "worker", "kill -9 of the whole server", "after the next start everything that was acknowledged is served"
)
def test_everything_is_there_after_a_stop_and_after_a_crash(start_server: Start) -> None:
    server = start_server(command=PROGRAM)
    names = fill(server)
    ok(server.put("/v0/topics/ephemeral", {"durability": "ephemeral"}), 201)
    ok(server.write("ephemeral", 1, 2, 3))
    before = (
        pages(server, names),
        states(server, names),
        ok(server.get("/v0/topics?prefix=f"))["topics"][0]["bytes"],
    )
    for end in (server.stop, server.kill):
        end()
        server.start()
        after = (
            pages(server, names),
            states(server, names),
            ok(server.get("/v0/topics?prefix=f"))["topics"][0]["bytes"],
        )
        assert after == before
        refused(server.get("/v0/topics/gone"), 404, "topic_not_found")
        for name in names:
            for i in range(5):
                again = ok(server.write(name, "another payload", idempotency_key=f"k{i}"))
                assert (again["deduped"], again["seqs"]) == (True, [2 * i + 2])
        # Of class ephemeral only the seqs are kept.
        assert data_of(server, "ephemeral") == []
        assert ok(server.write("ephemeral", 4))["first_seq"] > 3
    assert server.stop() == 0


class Writers:
    """Clients that write until they are refused; each write has its own key."""

    def __init__(self, server: Server, count: int) -> None:
        self.server = server
        self.acked: dict[str, int] = {}
        self.refusals: list[Reply | None] = []  # None: no answer, or no connection
        self.sent: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        for i in range(100_000):
            key = f"{number}-{i}"
            self.sent.append(key)
            try:
                reply = self.server.write(f"w{number % 3}", key, idempotency_key=key)
            except (OSError, http.client.HTTPException):
                self.refusals.append(None)
                return
            if reply.status >= 400:
                self.refusals.append(reply)
                return
            self.acked[key] = reply.json["first_seq"]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


def ready_status(connection: http.client.HTTPConnection) -> int | None:
    """Readiness as seen over a connection from before the stop; None: it was closed."""
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@fault("supervisor", "a stop under load", "every acknowledged write is there after the next start")
def test_a_stop_under_load(start_server: Start) -> None:
    server = start_server()
    for i, durability in enumerate(("fsync", "disk", "memory")):
        ok(server.put(f"/v0/topics/w{i}", {"durability": durability}), 201)
        ok(server.put(f"/v0/topics/polled{i}"), 201)
    polls = [poll(server, f"polled{i}") for i in range(3)]
    idle = http.client.HTTPConnection(server.host, server.port, timeout=120)
    idle.request("GET", "/healthz")
    idle.getresponse().read()
    writers = Writers(server, 6)
    until(lambda: len(writers.acked) > 30)
    server.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    for waiting in polls:
        refused(waiting.reply(), 503, "shutting_down")
    assert ready_status(http.client.HTTPConnection(server.host, server.port, timeout=120)) in (None, 503)
    assert server.process.wait(120) == 0  # type: ignore[union-attr]
    writers.join()
    for reply in writers.refusals:
        if reply is not None:
            refused(reply, 503, "shutting_down")
    with pytest.raises(OSError):
        server.connect()
    assert ready_status(idle) is None
    assert list(server.data_dir.glob("layout-1/shard-0*/meta/*")), "each shard wrote a last snapshot"
    server.start()
    for key in writers.sent:  # answered ones are there; the others are written now or were already
        again = ok(server.write(f"w{int(key[0]) % 3}", key, idempotency_key=key))
        if key in writers.acked:
            assert (again["deduped"], again["first_seq"]) == (True, writers.acked[key])
    for i in range(3):
        expected = sorted(key for key in writers.sent if int(key[0]) % 3 == i)
        assert sorted(read_all(server, f"w{i}")) == expected


def read_all(server: Server, topic: str) -> list[str]:
    found: list[str] = []
    from_seq = 0
    while True:
        page = ok(server.diff(topic, from_seq=from_seq, limit=1000))
        assert page["tombstone"] is None
        found += [record["data"] for record in page["records"]]
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return found


@fault(
    "worker",
    "a request arrives while the shard still replays its log",
    "503 with the progress; it is never executed later",
)
def test_until_a_shard_has_recovered_its_topics_are_not_ready(start_server: Start) -> None:
    server = start_server()
    late, early = (next(f"t{i}" for i in range(99) if shard_of(f"t{i}", 2) == shard) for shard in (0, 1))
    for name in (late, early):
        ok(server.write(name, name), 201)
    server.stop()
    with (server.data_dir / "layout-1" / "shard-00" / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server.start(wait_ready=False)
        assert server.get("/healthz").status == 200
        # The other shard is served as soon as it is ready.
        until(lambda: server.get(f"/v0/topics/{early}").status == 200)
        assert data_of(server, early) == [early]
        for method, path, body in (
            ("GET", f"/v0/topics/{late}", None),
            ("PUT", f"/v0/topics/{late}", None),
            ("DELETE", f"/v0/topics/{late}", None),
            ("POST", f"/v0/topics/{late}", {"records": [{"data": 1}]}),
            ("POST", f"/v0/topics/{late}/diff", None),
            ("POST", f"/v0/topics/{late}/delete", {"before_seq": 1}),
            ("GET", "/v0/topics", None),
        ):
            refused(server.request(method, path, body), 503, "not_ready")
        for path in ("/readyz", "/v0/ready"):
            detail = refused(server.get(path), 503, "not_ready")
            assert 0.0 <= detail["replay_progress"] < 1.0
            assert detail["shards"] == detail["locked"] == [0]
        assert "waits for its lock" in server.get(f"/v0/topics/{late}").error["message"]
        for path in ("/healthz", "/v0/health"):
            assert server.get(path).status == 200
        text = server.get("/v0/metrics").body.decode()
        assert "\ntopics_ready 0\n" in text
        figures = ok(server.get("/v0/metrics", Accept="application/json"))
        assert figures["ready"] is False
        assert figures["replay_progress"] < 1.0
    server.wait_ready()
    assert data_of(server, late) == [late]
    ok(server.write(late, 1))


@fault(
    "supervisor",
    "a shard's process exits at every start",
    "readiness, requests, metrics and the log report that it keeps failing, how often and why; it serves once the cause is removed",
)
def test_a_shard_that_cannot_start_is_called_failing(start_server: Start) -> None:
    server = start_server()
    late, early = (next(f"t{i}" for i in range(99) if shard_of(f"t{i}", 2) == shard) for shard in (1, 0))
    for name in (late, early):
        ok(server.write(name, name), 201)
    assert server.stop() == 0
    assert alarms(server) == [], "a clean stop logs no warning"
    lock = server.data_dir / "layout-1" / "shard-01" / "LOCK"
    lock.unlink()
    lock.mkdir()
    server.start(wait_ready=False)

    def failing() -> Json | None:
        reply = server.get("/readyz")
        detail = reply.error.get("detail", {}) if reply.status == 503 else {}
        # The other shard may still be starting.
        return reply.error if "failing" in detail and detail["shards"] == [1] else None

    error = until(failing)
    (told,) = error["detail"]["failing"]
    assert error["code"] == "not_ready"
    assert error["detail"]["shards"] == [told["shard"]] == [1]
    assert told["failures"] >= 2
    assert "Is a directory" in told["reason"]
    assert error["message"].startswith("shard 1 keeps failing (")
    refusal = server.get(f"/v0/topics/{late}")
    assert "shard 1 keeps failing" in refusal.error["message"]
    assert refused(refusal, 503, "not_ready")["failures"] >= 2
    assert data_of(server, early) == [early]
    assert b"\ntopics_processes_failing 1\n" in server.get("/v0/metrics").body
    assert ok(server.get("/v0/metrics", Accept="application/json"))["processes_failing"] == 1
    assert '"shard 1 keeps failing"' in server.log
    assert server.stop() == 5
    assert '"a shard is down"' not in server.log.rpartition('"message":"draining"')[2]

    server.start(wait_ready=False)
    until(failing)
    lock.rmdir()
    server.wait_ready()
    assert data_of(server, late) == [late]
    until(lambda: b"\ntopics_processes_failing 0\n" in server.get("/v0/metrics").body)
    assert server.stop() == 0


def alarms(server: Server) -> list[str]:
    """Log lines of level warning and above."""
    lines = [json.loads(line) for line in server.log.splitlines()]
    return [line["message"] for line in lines if line["level"] != "info"]


@fault(
    "data directory",
    "two servers on one data directory",
    "the second one is refused with exit code 3 and the pid of the first",
)
def test_one_server_per_directory(shared_server: Server, topic: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    second = subprocess.run(
        [sys.executable, "-m", "workers"],
        cwd=ROOT,
        env={**clean, "TOPICS_PORT": "0", "TOPICS_DATA_DIR": str(shared_server.data_dir)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 3
    assert str(shared_server.data_dir) in second.stdout + second.stderr
    ok(shared_server.write(topic, 1), 201)
