"""`topics tail` against a real server: its output, restarts of the server's processes, and refusals.

Method: the command runs as a process, and its lines are read as they arrive. No test depends on timing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.server import ROOT, Server, until

KEYS = "root,reader:read:open.,writer:write"


class Tail:
    """A running `topics tail --json`."""

    def __init__(
        self, server: Server, *arguments: str, key: str = "", out: IO[str] | int = subprocess.PIPE
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "topics.cli", "tail", "--json", *arguments],
            cwd=ROOT,
            env={**clean, "TOPICS_URL": f"http://{server.host}:{server.port}", "TOPICS_TOKEN": key},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        )

    def take(self, count: int) -> list[Any]:
        """The next records, as (topic, seq, data)."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(count)]
        assert all(lines), self.process.communicate()[1]
        rows = [json.loads(line) for line in lines]
        return [(row["topic"], row["$seq"], row["data"]) for row in rows]

    def told(self) -> str:
        """The next line on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().removeprefix("topics tail: ").rstrip("\n")

    def wait(self) -> int:
        return self.process.wait(60)


@contextmanager
def tailing(server: Server, *arguments: str, **options: Any) -> Iterator[Tail]:
    tail = Tail(server, *arguments, **options)
    try:
        yield tail
    finally:
        tail.process.kill()
        tail.process.communicate()


def rows(topic: str, first: int, *data: Any) -> list[Any]:
    return [(topic, first + i, value) for i, value in enumerate(data)]


def test_a_backlog_and_then_new_records(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1, {"b": 2})
    with tailing(shared_server, topic, "--all") as tail:
        assert tail.take(2) == rows(topic, 1, 1, {"b": 2})
        shared_server.write(topic, 3)
        assert tail.take(1) == rows(topic, 3, 3)
        tail.process.send_signal(signal.SIGINT)
        assert tail.wait() == 130


def test_from_a_seq_and_so_many(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *range(1, 10))
    with tailing(shared_server, topic, "--from", "3", "--count", "4") as tail:
        assert tail.take(4) == rows(topic, 4, 4, 5, 6, 7)
        assert tail.wait() == 0


def test_a_pattern_finds_topics_made_later(shared_server: Server, topic: str) -> None:
    shared_server.write(f"{topic}.a", 1)
    shared_server.write(f"{topic}x.a", "another")
    with tailing(shared_server, f"{topic}.>", "--all") as tail:
        assert tail.take(1) == rows(f"{topic}.a", 1, 1)
        shared_server.write(f"{topic}.b.c", 2)
        assert tail.take(1) == rows(f"{topic}.b.c", 1, 2)


def test_a_topic_that_is_created_again_is_followed_again(shared_server: Server, topic: str) -> None:
    name = f"{topic}.a"
    shared_server.write(name, "old")
    with tailing(shared_server, f"{topic}.*", "--all") as tail:
        assert tail.take(1) == rows(name, 1, "old")
        shared_server.delete(f"/v0/topics/{name}")
        assert tail.told() == f"{name} was deleted"
        shared_server.write(name, "new")
        assert tail.take(1) == rows(name, 1, "new")


def test_gaps_and_deleted_topics(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2})
    shared_server.write(topic, 1, 2, 3, 4)
    with tailing(shared_server, topic, "--all") as tail:
        assert tail.told() == f"{topic}: records 1 to 2 are lost (from_seq_too_old)"
        assert tail.take(2) == rows(topic, 3, 3, 4)
        shared_server.delete(f"/v0/topics/{topic}")
        assert tail.told() == f"{topic} was deleted"
        assert tail.told() == "all topics were deleted"
        assert tail.wait() == 1


def test_a_topic_that_is_not_there(shared_server: Server, topic: str) -> None:
    with tailing(shared_server, topic) as tail:
        assert "does not exist" in tail.told()
        assert tail.wait() == 1


def test_a_wrong_pattern(shared_server: Server) -> None:
    with tailing(shared_server, "a.>.b") as tail:
        assert "may only come last" in tail.told()
        assert tail.wait() == 1


def test_keys(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_API_KEYS": KEYS})
    root = {"Authorization": "Bearer root"}
    for name in ("open.a", "secret.a"):
        server.request("POST", f"/v0/topics/{name}", {"records": [{"data": name}]}, root)
    for key, name in (("", "open.a"), ("writer", "open.a"), ("reader", "secret.a")):
        with tailing(server, name, key=key) as tail:
            assert tail.wait() == 1
    with tailing(server, ">", "--all", "--count", "1", key="reader") as tail:
        assert tail.take(1) == rows("open.a", 1, "open.a")


def test_it_outlives_every_process(start_server: Callable[..., Server]) -> None:
    server = start_server()
    names = [f"t{i}" for i in range(4)]  # on both shards
    for name in names:
        server.write(name, "before")
    with tailing(server, "*", "--all") as tail:
        assert sorted(tail.take(4)) == [(name, 1, "before") for name in names]
        for seq, process in enumerate(("front 0", "shard 0", "shard 1"), start=2):
            pid = server.pid(process)
            os.kill(pid, signal.SIGKILL)
            until(lambda process=process, pid=pid: server.children().get(process, pid) != pid)
            server.wait_ready()
            for name in names:
                until(
                    lambda name=name, seq=seq: (
                        server.write(name, seq, idempotency_key=f"{name}-{seq}").status == 200
                    )
                )
            assert sorted(tail.take(4)) == [(name, seq, seq) for name in names]


def test_it_outlives_the_server(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.write("t", 1)
    with tailing(server, "t", "--all") as tail:
        assert tail.take(1) == rows("t", 1, 1)
        server.environment = {**server.environment, "TOPICS_PORT": str(server.port)}
        server.stop()
        assert "(retrying)" in tail.told()
        server.start()
        server.write("t", 2)
        assert tail.take(1) == rows("t", 2, 2)
        assert tail.told() == "reconnected"


def test_a_group_shares(shared_server: Server, topic: str, tmp_path: Path) -> None:
    """Both members print until all records were printed; none must be printed twice."""
    shared_server.write(topic, 0)
    shown = [tmp_path / "one", tmp_path / "other"]

    def rows_shown() -> list[Any]:
        return [json.loads(line)["data"] for path in shown for line in path.read_text().splitlines()]

    with contextlib.ExitStack() as both:
        for path in shown:
            out = both.enter_context(path.open("w"))
            both.enter_context(tailing(shared_server, topic, "--all", "--group", "g", out=out))
        until(lambda: rows_shown() == [0])
        for value in range(1, 20):
            shared_server.write(topic, value)
        until(lambda: len(rows_shown()) >= 20)
        assert sorted(rows_shown()) == list(range(20))
