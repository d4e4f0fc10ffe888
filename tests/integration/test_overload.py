"""Goal: whatever clients do, memory stays bounded and a normal client is served meanwhile.

Method: each test puts one kind of load on one real server and uses it normally at the same time, then reads the peak
memory of all its processes (VmHWM, reset before).
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import PATIENCE_S, PROGRAM, Reply, Server, until

MIB = 1 << 20
IDLE_CONNECTIONS = 10_000
FILES_NEEDED = 20_000

# Answers in a front, from docs/limits.md: unsent bytes, one page beyond the limit, and what one shard may have
# sent ahead. Plus the connections' own memory and the allocator's.
FRONT_ANSWERS_MIB = 256 + 8 + 88 + 48


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    raise_file_limit()  # the server's processes inherit it
    made = Server(tmp_path_factory.mktemp("overload"), {"TOPICS_MAX_BODY_BYTES": str(8 * MIB)})
    try:
        yield made.start()
    finally:
        made.close()


def raise_file_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def kib(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


@contextlib.contextmanager
def bounded(server: Server, most_mib: int) -> Iterator[None]:
    """No process of the server may grow by more than this, and none may die."""
    pids = server.children()
    before = {}
    for name, pid in pids.items():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the high-water mark
        before[name] = kib(pid, "VmRSS")
    yield
    assert server.children() == pids, "a process died"
    grown = {name: (kib(pid, "VmHWM") - before[name]) // 1024 for name, pid in pids.items()}
    assert all(growth <= most_mib for growth in grown.values()), f"MiB grown: {grown}"


def use_normally(server: Server, topic: str, times: int = 60) -> None:
    """The requests of a normal client; all of them succeed."""
    first = server.write(topic, "first")
    assert first.status in (200, 201), first
    for i in range(times):
        wrote = server.write(topic, i)
        assert wrote.status == 200, wrote
    read = server.diff(topic, from_seq=first.json["head_seq"], limit=1000)
    assert [row["data"] for row in read.json["records"]] == list(range(times))
    assert server.get("/readyz").status == 200


@contextlib.contextmanager
def sockets(server: Server, count: int, receive_buffer: int = 0) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connected(server, receive_buffer)) for _ in range(count)]


def connected(server: Server, receive_buffer: int) -> socket.socket:
    """With a receive buffer of this size, so that the kernel buffers little for a client that does not read."""
    if not receive_buffer:
        return server.connect()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE_S)
    client.connect((server.host, server.port))
    return client


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


def status_of(connection: socket.socket) -> int:
    """The status of the first answer."""
    data = b""
    while b"\r\n" not in data:
        received = connection.recv(4096)
        assert received, "closed without an answer"
        data += received
    return int(data.split(b" ")[1])


# ---- slow and idle clients


@fault("client", "clients send one byte at a time", "others are served, and memory stays bounded")
def test_senders_of_a_byte_at_a_time(server: Server, topic: str) -> None:
    body = b'{"records":[{"data":"slow"}]}'
    request = head(f"/v0/topics/{topic}-slow", f"Content-Length: {len(body)}") + body
    stop = threading.Event()

    def trickle(connections: list[socket.socket]) -> None:
        for i in range(len(request) - 1):  # all but the last byte
            for connection in connections:
                connection.sendall(request[i : i + 1])
            if stop.is_set():
                return

    with bounded(server, 40), sockets(server, 100) as connections:
        sender = threading.Thread(target=trickle, args=(connections,), daemon=True)
        sender.start()
        use_normally(server, topic)
        stop.set()
        sender.join(120)
    assert server.get(f"/v0/topics/{topic}-slow").status == 404


@fault(
    "client",
    "hundreds of clients connect, send half a request or nothing, and then nothing more",
    "others are served, and memory stays bounded",
)
@pytest.mark.parametrize(
    "part", [b"", b"POST /v0/to", head("/v0/topics/half", "Content-Length: 1000000") + b"{"]
)
def test_half_open_connections(server: Server, topic: str, part: bytes) -> None:
    with bounded(server, 60), sockets(server, 500) as connections:
        for connection in connections:
            connection.sendall(part)
        use_normally(server, topic)


@fault("client", "ten thousand idle connections", "others are served, and memory stays bounded")
def test_ten_thousand_idle_connections(server: Server, topic: str) -> None:
    if raise_file_limit() < FILES_NEEDED:
        pytest.skip(f"not tested: {IDLE_CONNECTIONS} connections need {FILES_NEEDED} open files")
    with bounded(server, 250), sockets(server, IDLE_CONNECTIONS) as connections:
        for connection in connections[::100]:  # a sample of all of them, old and new
            connection.sendall(head("/v0/health", method="GET"))
            assert status_of(connection) == 200
        use_normally(server, topic)
        pid = server.pid("front 0")
        held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        assert held >= IDLE_CONNECTIONS
    until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) < 200)


def test_the_server_raises_its_limit_of_open_files(start_server: Callable[..., Server]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        made = start_server(command=PROGRAM)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for pid in made.children().values():
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)


# ---- large bodies


@fault("request", "a declared body larger than the limit", "413 without reading it")
def test_a_declared_body_that_is_too_large_is_not_read(server: Server, topic: str) -> None:
    with bounded(server, 30), sockets(server, 50) as connections:
        for connection in connections:
            connection.sendall(head(f"/v0/topics/{topic}", f"Content-Length: {8 * MIB + 1}"))
        assert {status_of(connection) for connection in connections} == {413}
        use_normally(server, topic)


@fault("request", "a chunked body grows larger than the limit", "413 as soon as it does")
def test_an_undeclared_body_is_refused_when_it_gets_too_large(server: Server, topic: str) -> None:
    chunk = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"

    def send(_: int) -> int:
        with server.connect() as connection:
            connection.sendall(head(f"/v0/topics/{topic}-chunked", "Transfer-Encoding: chunked"))
            with contextlib.suppress(OSError):  # the server closes the connection meanwhile
                for _ in range(100):
                    connection.sendall(chunk)
                    if select.select([connection], [], [], 0)[0]:
                        break
            return status_of(connection)

    with bounded(server, 200), ThreadPoolExecutor(4) as pool:
        statuses = pool.map(send, range(8))
        use_normally(server, topic)
        assert set(statuses) == {413}


def push(connection: socket.socket, request: bytes) -> None:
    """Send until all is sent, or the server refuses and closes the connection."""
    connection.settimeout(20)
    with contextlib.suppress(OSError):
        connection.sendall(request)


def hold_half(server: Server, topic: str, count: int, declared: int, sent: int, most_mib: int) -> None:
    request = head(f"/v0/topics/{topic}-half", f"Content-Length: {declared}") + b" " * sent
    with bounded(server, most_mib), sockets(server, count) as connections, ThreadPoolExecutor(16) as pool:
        done = [pool.submit(push, connection, request) for connection in connections]
        use_normally(server, topic)
        for future in done:
            future.result()
        use_normally(server, topic)


@fault(
    "client",
    "hundreds of large bodies stop halfway",
    "further ones are refused, others are served, and memory stays bounded",
)
def test_large_bodies_that_stop_half_way(server: Server, topic: str) -> None:
    hold_half(server, topic, 200, 8 * MIB, 4 * MIB, 450)


@fault(
    "client",
    "hundreds of large bodies stop halfway",
    "further ones are refused, others are served, and memory stays bounded",
)
def test_middling_bodies_that_stop_half_way(server: Server, topic: str) -> None:
    """Small enough for the fast path, which buffers the whole body."""
    hold_half(server, topic, 800, MIB, MIB - 1, 450)


# ---- clients that do not read


@pytest.fixture(scope="module")
def large_topic(server: Server) -> str:
    """A topic whose pages have 8 MiB, compressed or not."""
    noise = random.Random(1)
    for _ in range(9):
        assert server.write("heavy", noise.randbytes(450_000).hex()).status in (200, 201)
    return "heavy"


def wait_answered(connections: list[socket.socket]) -> None:
    """Wait until each of them has something to read."""
    waiting = {connection.fileno() for connection in connections}
    poller = select.poll()
    for fd in waiting:
        poller.register(fd, select.POLLIN)

    def all_have() -> bool:
        for fd, _ in poller.poll(10):
            poller.unregister(fd)
            waiting.discard(fd)
        return not waiting

    until(all_have)


def is_buffered_full(reply: Reply) -> bool:
    return reply.status == 429 and reply.error["detail"] == {"limit": "buffered"}


def never_read(
    server: Server,
    large_topic: str,
    topic: str,
    *headers: str,
    clients: int,
    questions: int,
    page_bytes: int,
    most_mib: int,
    refused: bool = False,
) -> None:
    """Writes are served meanwhile, and reads again once these clients are gone."""
    body = json.dumps({"limit": 1000, "max_batch_bytes": page_bytes}).encode()
    request = head(f"/v0/topics/{large_topic}/diff", f"Content-Length: {len(body)}", *headers) + body
    with bounded(server, most_mib), sockets(server, clients, 4096) as connections:
        for connection in connections:
            connection.sendall(request * questions)
        wait_answered(connections)
        if refused:
            until(lambda: is_buffered_full(server.diff(large_topic, limit=1)))
        for i in range(100):
            # On a stalled machine they may be refused once.
            until(lambda i=i: server.write(topic, i).status in (200, 201))
    until(lambda: server.diff(topic, limit=1).status == 200)


@fault(
    "client",
    "slow consumers: hundreds request large pages and never read them",
    "further reads are refused with 429 and limit buffered, writes are served, and memory stays bounded",
)
@pytest.mark.parametrize("headers", [(), ("X-Not-Plain: 1",)], ids=["plain", "full parser"])
def test_clients_that_ask_for_much_and_never_read(
    server: Server, large_topic: str, topic: str, headers: tuple[str, ...]
) -> None:
    """Each requests more than its socket's buffers hold, so that the front's limit is reached in the end."""
    never_read(
        server,
        large_topic,
        topic,
        *headers,
        clients=400,
        questions=20,
        page_bytes=pick(short=1, long=8) * MIB,
        most_mib=FRONT_ANSWERS_MIB,
        refused=True,
    )


@fault(
    "client",
    "a client sends request after request and never reads",
    "its requests are not processed any more, and memory stays bounded",
)
def test_a_client_that_asks_again_and_again_and_never_reads(
    server: Server, large_topic: str, topic: str
) -> None:
    never_read(server, large_topic, topic, clients=1, questions=100, page_bytes=8 * MIB, most_mib=300)
