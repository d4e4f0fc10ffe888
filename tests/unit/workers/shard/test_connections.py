"""Connections that a worker serves: the answers are those of a front, all else goes back with its unread bytes, and no
descriptor is left behind.

Method: real sockets and a real shard on a simulated disk, in this process. `Worker.run` is the event loop: it goes on until
nothing is left to do. Both ends of each client are in the hands of the test, so nothing sleeps.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import length
from tests.support.shard_rig import Rig
from topics.engine.core.placement import shard_of
from topics.link.handover import BACK, BYTES_MAX, DRAIN, GIVE, REFUSED, Channel, Handover, connect
from topics.protocols.http1.pace import EOF_WAIT_US, LINGER_US
from topics.system.settings import Settings
from workers.shard.connections import INCOMPLETE_US, SWEEP_EVERY_US, ClientConnections
from workers.shard.core import Actions

SHARDS = 2
OWN = next(f"own{n}" for n in range(100) if shard_of(f"own{n}", SHARDS) == 0)
OTHER = next(f"other{n}" for n in range(100) if shard_of(f"other{n}", SHARDS) == 1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Worker(Rig):
    """A shard with the connections of its clients, and one front."""

    def __init__(self, path: str, settings: Settings | None = None, connections_max: int = 100) -> None:
        self.clients: ClientConnections | None = None
        self.later_us = 1_000_000
        super().__init__()  # the other shard is not needed
        self.epoll = select.epoll()
        self.clients = ClientConnections(
            self.core,
            self.epoll,
            settings or Settings(),
            path=path,
            shard=0,
            shards=SHARDS,
            connections_max=connections_max,
            now_us=lambda: self.now_us() + self.later_us,
            wake=lambda: None,
        )
        front = connect(path)
        assert front is not None
        self.front: Channel = front
        self.run()

    def send(self, actions: Actions) -> None:
        super().send(actions)
        if self.clients is not None:
            self.clients.receive_replies(actions.local_replies)

    def run(self) -> None:
        assert self.clients is not None
        for _ in range(1000):
            ready = self.epoll.poll(0, 64)
            self.clients.received_us = self.clients.now_us()
            for fd, events in ready:
                self.clients.ready(fd, events)
            self.clients.run_due(self.clients.received_us)
            self.rest()
            if not ready and not self.clients.has_work:
                return
        raise AssertionError("there is always more to do")

    def wait(self, micros: int) -> None:
        """Let time pass for the connections, and sweep."""
        self.later_us += micros
        assert self.clients is not None
        self.clients.run_due(self.clients.now_us())
        self.run()

    def give(self, data: bytes = b"", returns: int = 0) -> socket.socket:
        """The client's end of a connection that the front has handed over."""
        client, server = socket.socketpair()
        client.setblocking(False)
        with server:
            assert self.front.send(Handover(GIVE, returns, data), server)
        self.run()
        return client

    def returned(self) -> tuple[Handover, socket.socket] | None:
        received = self.front.receive()
        if received is None:
            return None
        assert received[1] is not None
        return received[0], received[1]

    def close(self) -> None:
        assert self.clients is not None
        self.clients.close()
        self.front.close()
        self.epoll.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "shard.conn")


@pytest.fixture
def worker(path: str) -> Iterator[Worker]:
    before = open_files()
    worker = Worker(path)
    yield worker
    clients = worker.clients
    assert clients is not None
    assert clients.open == 0 and clients.unsent_bytes == 0
    worker.core.engine.check_invariants()
    worker.close()
    assert clients.count == 0
    assert open_files() == before


def post(path: str, body: Any = None, headers: str = "", length: int | None = None) -> bytes:
    text = json.dumps(body if body is not None else {}).encode()
    size = len(text) if length is None else length
    return (
        f"POST /v0/topics/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{headers}Content-Length: {size}\r\n\r\n"
    ).encode() + text


def write(n: int = 1, topic: str = OWN) -> bytes:
    return post(topic, {"records": [{"data": n}]})


def answers(client: socket.socket) -> list[tuple[int, bytes, Any]]:
    """All answers that have arrived."""
    out, found = b"", []
    try:
        while part := client.recv(1 << 16):
            out += part
    except BlockingIOError:
        pass
    while out:
        head, _, out = out.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append((int(head[9:12]), head, json.loads(out[:size])))
        out = out[size:]
    return found


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_requests_are_answered_in_order(worker: Worker) -> None:
    with worker.give(write(1)) as client:
        assert [(status, body["seqs"]) for status, _, body in answers(client)] == [(201, [1])]
        client.send(b"".join(write(n) for n in range(2, 5)))
        worker.run()
        assert [body["seqs"] for _, _, body in answers(client)] == [[2], [3], [4]]
        client.send(post(f"{OWN}/diff", {"limit": 2}))
        worker.run()
        ((status, _, page),) = answers(client)
        assert (status, [row["data"] for row in page["records"]]) == (200, [1, 2])


def test_a_request_may_be_cut_anywhere(worker: Worker) -> None:
    request = write()
    with worker.give() as client:
        for at in range(1, len(request), length.some()):
            client.send(request[:at])
            worker.run()
            client.send(request[at:])
            worker.run()
            ((status, _, _),) = answers(client)
            assert status in (200, 201)
    assert worker.returned() is None


NOT_SERVED = {
    "another shard": write(topic=OTHER),
    "another route": b"GET /v0/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "another route of the topic": post(f"{OWN}/nack"),
    "an encoded name": post("a%20b"),
    "close": post(OWN, headers="Connection: close\r\n"),
    "chunked": b"POST /v0/topics/%b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % OWN.encode(),
    "both lengths": post(OWN, headers="Transfer-Encoding: chunked\r\n"),
    "two lengths": post(OWN, headers="Content-Length: 3\r\n"),
    "expect": post(OWN, headers="Expect: 100-continue\r\n"),
    "upgrade": post(OWN, headers="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "gzip": post(OWN, headers="Content-Encoding: gzip\r\n"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a blank line": b"\r\n" + write(),
    "a large body": post(OWN, length=BYTES_MAX),
    "no HTTP": b"\0\1\2",
    "a long head": b"POST /v0/topics/" + b"a" * 70_000,
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_all_else_goes_back_with_its_unread_bytes(worker: Worker, name: str) -> None:
    rest = NOT_SERVED[name] + b"and more"
    with worker.give(write() + rest, returns=3) as client:
        received = worker.returned()
        assert received is not None
        message, server = received
        assert message == Handover(BACK, 4, rest)
        assert [status for status, _, _ in answers(client)] == [201]
        client.send(b"later")
        worker.run()
        with server:
            assert server.recv(10) == b"later"  # nobody else reads it


def test_nothing_goes_back_while_a_request_is_open(worker: Worker) -> None:
    with worker.give(write() + post(f"{OWN}/diff", {"from_seq": 1, "wait_ms": 30_000}) + b"GET ") as client:
        assert len(answers(client)) == 1 and worker.returned() is None
        with worker.give(write()) as other:
            assert len(answers(other)) == 1
        with worker.give(b"".join(write() for _ in range(4))) as other:
            assert len(answers(other)) == 4
        ((status, _, page),) = answers(client)
        assert status == 200 and page["records"]
        received = worker.returned()
        assert received is not None and received[0].data == b"GET "
        received[1].close()


def test_a_slow_request_goes_back(worker: Worker) -> None:
    half = write()[:-3]
    with worker.give() as client:
        client.send(half)
        worker.run()
        worker.wait(SWEEP_EVERY_US)
        worker.wait(INCOMPLETE_US + SWEEP_EVERY_US)
        received = worker.returned()
        assert received is not None and received[0].data == half
        received[1].close()


def test_idle_connections_are_closed(path: str) -> None:
    worker = Worker(path, Settings(keepalive_ms=3000))
    with worker.give(write()) as client:
        worker.wait(2_000_000)
        assert len(answers(client)) == 1 and not is_closed(client)
        worker.wait(2_000_000)
        assert is_closed(client)
    worker.close()


def test_a_client_that_does_not_read_is_disconnected(worker: Worker) -> None:
    clients = worker.clients
    assert clients is not None
    text = "x" * 60_000
    for n in range(20):
        with worker.give(post(OWN, {"records": [{"data": text}]})) as client:
            assert answers(client)[0][0] in (200, 201), n
    with worker.give(post(f"{OWN}/diff", {"limit": 100})) as client:
        assert clients.unsent_bytes > 0
        client.send(write())
        worker.run()
        worker.wait(59_000_000)
        assert clients.unsent_bytes > 0
        worker.wait(3_000_000)
        assert clients.unsent_bytes == 0 and clients.count == 0


def test_a_large_page_arrives_whole(worker: Worker) -> None:
    text = "x" * 60_000
    for _ in range(20):
        worker.give(post(OWN, {"records": [{"data": text}]})).close()
        worker.run()
    with worker.give(post(f"{OWN}/diff", {"limit": 100}) + write()) as client:
        out = b""
        while (part := _some(client)) is not None:
            out += part
            worker.run()
        assert out.count(text.encode()) == 17  # a page has about 1 MiB
        assert out.count(b"HTTP/1.1 200 ") == 2


def _some(client: socket.socket) -> bytes | None:
    try:
        return client.recv(1 << 16)
    except BlockingIOError:
        return None


def test_a_waiting_claim_is_withdrawn_when_its_client_disconnects(worker: Worker) -> None:
    queue = post(OWN, {"records": [{"data": 1}], "config": {"type": "queue"}})
    claim = post(f"{OWN}/claim", {"node": "n", "max": 1})
    with worker.give(queue + claim) as client:
        assert [status for status, _, _ in answers(client)] == [201, 200]
    waiting = worker.give(post(f"{OWN}/claim", {"node": "gone", "max": 1, "wait_ms": 30_000}))
    assert answers(waiting) == []
    waiting.close()
    worker.run()
    worker.wait(EOF_WAIT_US + SWEEP_EVERY_US)
    with worker.give(post(OWN, {"records": [{"data": 2}]}) + claim) as client:
        (_, _, body) = answers(client)[1]
        assert [job["data"] for job in body["claimed"]] == [2]


def test_a_client_that_has_closed_its_side_gets_its_answer(worker: Worker) -> None:
    with worker.give() as client:
        client.send(write())
        client.shutdown(socket.SHUT_WR)
        worker.run()
        assert [status for status, _, _ in answers(client)] == [201]
        assert is_closed(client)


def test_keys_are_checked_where_the_connection_is(path: str) -> None:
    secret = "k" * 32
    worker = Worker(path, Settings(api_keys=f"{secret}:read"))
    key = f"Authorization: Bearer {secret}\r\n"
    with worker.give(write() + post(OWN, headers=key) + post(f"{OWN}/diff", headers=key)) as client:
        assert [status for status, _, _ in answers(client)] == [401, 403, 404]
    worker.close()


def test_more_connections_than_the_worker_takes_are_refused(path: str) -> None:
    worker = Worker(path, connections_max=2)
    with worker.give(write()), worker.give(write()), worker.give(write(), returns=7) as third:
        received = worker.returned()
        assert received is not None and received[0] == Handover(REFUSED, 7, write())
        received[1].close()
        assert is_closed(third)
    worker.close()


def test_a_stop_answers_what_is_open_and_closes_the_rest(worker: Worker) -> None:
    clients = worker.clients
    assert clients is not None
    idle = worker.give(write())
    waiting = worker.give(post(f"{OWN}/diff", {"from_seq": 1, "wait_ms": 30_000}))
    assert len(answers(idle)) == 1
    worker.wait(1_000_000)
    assert worker.front.send(Handover(DRAIN))
    worker.run()
    assert is_closed(idle)
    ((status, head, body),) = answers(waiting)
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    assert b"connection: close" in head.lower()
    assert clients.is_drained
    late = worker.give(write())
    received = worker.returned()
    assert received is not None and received[0].kind == REFUSED
    for one in (idle, waiting, late, received[1]):
        one.close()
    worker.run()
    worker.wait(LINGER_US + SWEEP_EVERY_US)


def test_connections_survive_their_front(worker: Worker, path: str) -> None:
    with worker.give(write()) as client, worker.give() as other:
        assert len(answers(client)) == 1
        worker.front.close()
        worker.run()
        client.send(write())
        worker.run()
        assert len(answers(client)) == 1
        # What a worker does not serve goes to the next front; without one the connection is closed.
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        worker.run()
        assert is_closed(client)
        front = connect(path)
        assert front is not None
        worker.front = front
        worker.run()
        other.send(b"GET / HTTP/1.1\r\n\r\n")
        worker.run()
        received = worker.returned()
        assert received is not None and received[0].data.startswith(b"GET")
        received[1].close()


def test_descriptors_do_not_leak(worker: Worker) -> None:
    before = open_files()
    client, server = socket.socketpair()
    client.setblocking(False)
    rest = b"GET "
    for n in range(length.pick(short=1_000, long=100_000)):
        assert worker.front.send(Handover(GIVE, n % 9, write() + rest + b"/"), server)
        server.close()
        worker.run()
        received = worker.returned()
        assert received is not None and received[0].kind == BACK
        server = received[1]
        assert len(answers(client)) == 1
    server.close()
    client.close()
    assert open_files() == before
