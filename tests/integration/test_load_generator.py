"""Goal: the load generator counts what it was answered, no more and no less, and a wrong answer ends it without figures.

Method: the compiled program against small servers in a thread of the test, whose answers are written by hand.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from peers import load, protocols, queue_protocols
from peers.load import Load
from peers.null_server import null_server
from peers.protocols import Exchange, http_post, payload, redis_command

pytestmark = pytest.mark.skipif(load.compiler() is None, reason="there is no C compiler")

RECORD = payload(100)
REQUEST = b"request 1\n"
HTTP = b"HTTP/1.1 200 OK\r\nX-Long: %b\r\nContent-Length: %d\r\n\r\n%b"
XADD = b"$15\r\n1794803448625-0\r\n"
ENTRY = b"*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nd\r\n$100\r\n%b\r\n" % RECORD
ACK = b'MSG _INBOX.00000 1 28\r\n{"stream":"bench", "seq":12}\r\n'
MESSAGE = b"HMSG _INBOX.00000 1 12 112\r\nNATS/1.0\r\n\r\n%b\r\n" % RECORD
PAGE_END = b"HMSG _INBOX.00000 1 20 20\r\nNATS/1.0 204 EOB\r\n\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def http(body: bytes, head: bytes = b"x") -> bytes:
    return HTTP % (head, len(body), body)


ANSWERED = {
    "http": (Exchange("http", REQUEST), http(b"{...}")),
    "http with an empty body": (Exchange("http", REQUEST), http(b"")),
    "http with records": (Exchange("http", REQUEST, 3, marks=3), http(RECORD * 3, b"y" * 500)),
    "redis": (Exchange("resp", REQUEST), XADD),
    "redis pipeline": (Exchange("resp", REQUEST, 3, replies=3), XADD * 3),
    "redis page": (Exchange("resp", REQUEST, 2, marks=2), b"*2\r\n" + ENTRY * 2),
    "redis empty page": (Exchange("resp", REQUEST, marks=0), b"*0\r\n"),
    "redis nothing": (Exchange("resp", REQUEST, marks=0), b"*-1\r\n"),
    "nats acks": (Exchange("nats", REQUEST, 3, replies=3), ACK + b"PING\r\n" + ACK * 2),
    "nats page": (Exchange("nats", REQUEST, 2, replies=3, marks=2), MESSAGE * 2 + PAGE_END),
}
REFUSED = {
    "http": (Exchange("http", REQUEST), b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\nno"),
    "http without length": (Exchange("http", REQUEST), b"HTTP/1.1 200 OK\r\n\r\n"),
    "http, a record less": (Exchange("http", REQUEST, marks=3), http(RECORD * 2)),
    "http, a record instead of none": (Exchange("http", REQUEST, marks=0), http(RECORD)),
    "http, two answers": (Exchange("http", REQUEST), http(b"") * 2),
    "redis": (Exchange("resp", REQUEST), b"-ERR unknown command\r\n"),
    "redis, amid a pipeline": (Exchange("resp", REQUEST, 3, replies=3), XADD + b"-OOM\r\n" + XADD),
    "redis, a record more": (Exchange("resp", REQUEST, marks=1), b"*2\r\n" + ENTRY * 2),
    "nats": (Exchange("nats", REQUEST), b'MSG _INBOX.00000 1 20\r\n{"error":{"code":4}}\r\n'),
    "nats, nobody there": (
        Exchange("nats", REQUEST),
        b"HMSG _INBOX.00000 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    ),
    "closed": (Exchange("http", REQUEST), b""),
}


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """A server in a thread; yields its address."""
    loop = asyncio.new_event_loop()

    async def start() -> str:
        server = await asyncio.start_server(handler, "127.0.0.1", 0, limit=1 << 20)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def finish() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    address = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(finish())
        loop.close()


def answering(answer: bytes, seen: list[bytes], *, step: int = 1 << 20, ends: bytes = b"\n") -> Handler:
    """Answers every request, which ends with these bytes, in pieces of `step` bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(ends)
                if request.startswith((b"CONNECT", b"SUB")):
                    continue
                if request == b"PING\r\n":
                    writer.write(b"INFO {}\r\nPONG\r\n")
                    continue
                seen.append(request)
                if not answer:
                    return
                for at in range(0, len(answer), step):
                    writer.write(answer[at : at + step])
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return handle


def short(address: str, exchange: Exchange, *, most: int, clients: int = 2, **more: Any) -> Load:
    return Load(address, exchange, clients, seconds=20, warm_up=0, most=most, **more)


@pytest.mark.parametrize("step", [1, 1 << 20])
@pytest.mark.parametrize("kind", ANSWERED)
def test_every_answer_is_counted_once_however_it_is_cut(kind: str, step: int) -> None:
    exchange, answer = ANSWERED[kind]
    seen: list[bytes] = []
    with serving(answering(answer, seen, step=step)) as address:
        result = load.drive(short(address, exchange, most=20))
    assert seen == [REQUEST] * 20
    assert result["count"] == 20
    assert result["records_per_s"] == pytest.approx(20 * exchange.records / result["seconds"], rel=0.01)
    assert 0 < result["p50_ms"] <= result["p90_ms"] <= result["p99_ms"] <= result["max_ms"]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_answer_ends_it_without_figures(kind: str) -> None:
    exchange, answer = REFUSED[kind]
    with serving(answering(answer, [])) as address, pytest.raises(RuntimeError, match="load: "):
        load.drive(short(address, exchange, most=20, clients=1))


def test_numbers_in_requests_have_one_width_and_follow_the_answers() -> None:
    body = b'{"t":"{topic}","c":"{client}","from":{cursor},"id":"{cursor:0}","n":"{next:0}"}'
    exchange = Exchange("http", http_post("/", body), marks=2)
    seen: list[bytes] = []
    with serving(answering(http(RECORD * 2), seen, ends=b"}")) as address:
        load.drive(short(address, exchange, most=4, clients=1, topics=2, cursor=(10, 14)))
    lengths = {len(request) for request in seen}
    bodies = [request.partition(b"\r\n\r\n")[2] for request in seen]
    assert len(lengths) == 1
    assert f"Content-Length: {len(bodies[0])}\r\n".encode() in seen[0]
    found = [json.loads(text) for text in bodies]
    assert [(one["t"], one["c"], one["from"], int(one["id"]), int(one["n"])) for one in found] == [
        ("00000", "00000", 10, 10, 1),
        ("00001", "00000", 12, 12, 2),
        ("00000", "00000", 10, 10, 3),
        ("00001", "00000", 12, 12, 4),
    ]
    assert all(text.count(b"%020d" % one["from"]) == 1 for text, one in zip(bodies, found))


def test_clients_begin_at_different_topics_and_places() -> None:
    exchange = Exchange("resp", b"{topic} {cursor:0} {client}\n", marks=2)
    seen: list[bytes] = []
    with serving(answering(b"*2\r\n" + ENTRY * 2, seen)) as address:
        load.drive(short(address, exchange, most=3, clients=3, topics=300, cursor=(0, 4)))
    assert sorted(tuple(map(int, one.split())) for one in seen) == [(0, 0, 0), (100, 2, 1), (200, 0, 2)]


def test_a_client_goes_through_its_steps_and_times_some() -> None:
    write = Exchange("resp", b"write {next:0}\n", records=0, timed=False)
    read = Exchange("resp", b"read {cursor:0}\n", marks=1)
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            seen.append(line)
            writer.write(XADD if line.startswith(b"write") else b"*1\r\n" + ENTRY)

    with serving(handle) as address:
        result = load.drive(short(address, write, most=4, clients=1, then=(read,)))
    assert [line.split()[0] for line in seen] == [b"write", b"read"] * 2
    assert [int(line.split()[1]) for line in seen] == [1, 0, 2, 1]
    assert result["records_per_s"] == pytest.approx(2 / result["seconds"], rel=0.01)


def test_at_a_pace_no_client_sends_more_than_its_share() -> None:
    seen: list[bytes] = []
    with serving(answering(XADD, seen)) as address:
        paced = Load(address, Exchange("resp", REQUEST), 2, seconds=0.2, warm_up=0, every_s=0.02)
        result = load.drive(paced)
        load.drive(replace(paced, every_s=0, rate=100))
    assert 0 < result["count"] <= 22
    assert len(seen) <= 2 * 22 + 2


def test_processor_time_is_of_the_given_processes_by_role() -> None:
    exchange, answer = Exchange("http", b"x" * 100), http(b"{}")
    with null_server(exchange, answer) as (address, pid):
        result = load.drive(Load(address, exchange, 4, 0.2, 0.0, pids={"server": [pid], "shard": [pid]}))
    used, each = result["cpu_s"], result["cpu_us_each"]
    assert used["server"] == pytest.approx(used["shard"], rel=0.2)
    assert 0 < used["load"] <= result["seconds"] * 1.1
    assert each["server"] == pytest.approx(used["server"] * 1e6 / result["count"], rel=0.01)


def test_a_process_that_is_not_there_is_no_idle_process() -> None:
    exchange = Exchange("http", b"x" * 100)
    with null_server(exchange, http(b"{}")) as (address, _), pytest.raises(RuntimeError, match="no process"):
        load.drive(Load(address, exchange, 1, 0.1, 0.0, pids={"server": [2**22 + 1]}))


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "BUILT", tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(SystemExit, match="needs a C compiler: install gcc"):
        load.program()


# -- queues ------------------------------------------------------------------------------------------------------


class Queue:
    """A queue that speaks as much RESP or HTTP as the generator does."""

    def __init__(self, *, twice: bool = False, forgets_an_ack: bool = False) -> None:
        self.waiting: list[int] = []
        self.added = 0
        self.acked: list[int] = []
        self._twice = twice
        self._forgets = forgets_an_ack

    def add(self, count: int) -> None:
        self.waiting += range(self.added + 1, self.added + count + 1)
        self.added += count

    def claim(self) -> list[int]:
        jobs, self.waiting = self.waiting[:8], self.waiting[8:]
        if self._twice and jobs:
            self.waiting.insert(0, jobs[-1])
            self._twice = False
        return jobs

    def ack(self, jobs: list[int]) -> int:
        self.acked += jobs
        return len(jobs) - self._forgets

    async def handle_resp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            writer.write(self._resp(words))

    def _resp(self, words: list[bytes]) -> bytes:
        match words[0]:
            case b"XADD":
                self.add(1)
                return XADD
            case b"XREADGROUP":
                jobs = self.claim()
                entry = b"*2\r\n$%d\r\n%b\r\n*2\r\n$1\r\nd\r\n$100\r\n%b\r\n"
                entries = [entry % (len(b"1-%d" % job), b"1-%d" % job, RECORD) for job in jobs]
                head = b"*1\r\n*2\r\n$4\r\njobs\r\n*%d\r\n" % len(jobs)
                return head + b"".join(entries) if jobs else b"*-1\r\n"
            case b"XACK":
                assert words[1:3] == [b"jobs", b"workers"]
                return b":%d\r\n" % self.ack([int(word[2:]) for word in words[3:]])
            case _:
                assert words[:2] == [b"XDEL", b"jobs"]
                return b":%d\r\n" % len(words[2:])

    async def handle_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                body = json.loads(await reader.readexactly(int(length[1])))
                writer.write(http(self._http(head.split(b" ")[1], body)))
        except asyncio.IncompleteReadError:
            writer.close()

    def _http(self, path: bytes, body: Any) -> bytes:
        if path.endswith(b"/claim"):
            jobs = [b'{"$seq":%d,"lease_id":"x","data":%b}' % (job, RECORD) for job in self.claim()]
            return b'{"claimed":[%b]}' % b",".join(jobs)
        if path.endswith(b"/ack"):
            return b'{"acked":%d,"skipped":[]}' % self.ack(body["seqs"])
        self.add(len(body["records"]))
        return b"{}"


def queue_plan(address: str, protocol: str, **more: object) -> bytes:
    if protocol == "http":
        body = b'{"records":[' + b",".join([b'{"data":%b}' % RECORD] * 10) + b"]}"
        batch = Exchange("http", http_post("/v0/topics/jobs", body), 10)
    else:
        batch = Exchange("resp", redis_command(b"XADD", b"jobs", b"*", b"d", RECORD) * 10, 10, replies=10)
    settings = {
        "mode": "queue",
        "clients": 3,
        "producers": 2,
        "waiting_max": 40,
        "queue": "jobs",
        "group": "workers",
        "seconds": 0.1,
        "warm_up": 0.02,
        **more,
    }
    requests = [("request", batch), ("request", queue_protocols.claim(protocol))]
    return load.plan(address, protocol, settings, requests)


@pytest.mark.parametrize("protocol", ["http", "resp"])
def test_a_queue_is_worked_off_to_the_last_job(protocol: str) -> None:
    queue = Queue()
    with serving(getattr(queue, f"handle_{protocol}")) as address:
        result = load.result_of(load.start(queue_plan(address, protocol)))
    assert sorted(queue.acked) == list(range(1, queue.added + 1))
    assert 0 < result["count"] <= queue.added
    assert 1 <= result["jobs_per_claim"] <= 8
    assert 0 < result["p50_ms"] <= result["p99_ms"] and 0 < result["ack_p50_ms"] <= result["ack_p99_ms"]


def test_a_queue_that_is_to_stay_as_long_as_it_is_is_not_drained() -> None:
    queue = Queue()
    queue.add(40)
    with serving(queue.handle_http) as address:
        load.result_of(load.start(queue_plan(address, "http", held=40)))
    assert len(queue.acked) < queue.added <= len(queue.acked) + 40


@pytest.mark.parametrize("protocol", ["http", "resp"])
@pytest.mark.parametrize("fault", ["twice", "forgets_an_ack"])
def test_a_faulty_queue_gets_no_figures(protocol: str, fault: str) -> None:
    queue = Queue(**{fault: True})
    with (
        serving(getattr(queue, f"handle_{protocol}")) as address,
        pytest.raises(RuntimeError, match="load: "),
    ):
        load.result_of(load.start(queue_plan(address, protocol)))


# -- watchers ----------------------------------------------------------------------------------------------------


class Hub:
    """Pushes each written record to all watchers."""

    def __init__(self, *, deliveries: int = 1) -> None:
        self._watchers: list[asyncio.StreamWriter] = []
        self._deliveries = deliveries

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line == b"watch\n":
                self._watchers.append(writer)
                writer.write(b"ready\n")
                continue
            for one in self._watchers:
                one.write(protocols.MARK * line.count(protocols.MARK) * self._deliveries)
            writer.write(XADD)


def watch_plan(address: str, shape: str) -> bytes:
    settings: dict[str, object] = {
        "mode": "watch",
        "shape": shape,
        "clients": 3,
        "seconds": 0.1,
        "warm_up": 0.02,
    }
    writes = [("request", Exchange("resp", b"~" * count + b"\n", count)) for count in (1, 100)]
    watchers = [("opened", Exchange("", b"ready\n")), *([("watcher", Exchange("resp", b"watch\n"))] * 3)]
    return load.plan(address, "resp", settings, writes + watchers)


@pytest.mark.parametrize("shape", ["lock-step", "burst"])
def test_each_watcher_sees_each_record_once(shape: str) -> None:
    with serving(Hub().handle) as address:
        result = load.result_of(load.start(watch_plan(address, shape)))
    assert result["count"] > 0
    assert ("p50_ms" in result) == (shape == "lock-step")
    if shape == "lock-step":
        assert result["count"] % 3 == 0


@pytest.mark.parametrize("shape", ["lock-step", "burst"])
def test_watchers_that_see_a_record_twice_get_no_figures(shape: str) -> None:
    hub = Hub(deliveries=2)
    with serving(hub.handle) as address, pytest.raises(RuntimeError, match="has seen"):
        load.result_of(load.start(watch_plan(address, shape)))


def test_watchers_that_ask_again_follow_what_they_have_seen() -> None:
    """One record at a time to a reader that polls; its cursor is the number of records it has."""
    asked: list[int] = []
    waiting: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.startswith(b"read"):
                asked.append(int(line.split()[1]))
                waiting.append(writer)
                continue
            waiting.pop().write(b"*1\r\n" + ENTRY)
            writer.write(XADD)

    settings: dict[str, object] = {
        "mode": "watch", "shape": "lock-step", "clients": 1, "seconds": 0.1, "warm_up": 0, "polls": 1, "pause_us": 2000,
    }  # fmt: skip
    write = Exchange("resp", b"write\n")
    requests = [("request", one) for one in (write, write, Exchange("resp", b"read {cursor:0}\n"))]
    with serving(handle) as address:
        result = load.result_of(load.start(load.plan(address, "resp", settings, requests)))
    assert asked[: result["count"]] == list(range(result["count"]))
