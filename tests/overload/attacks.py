"""Attacks by which one cheap client could slow down all others. Each runs in its own process while a bystander, an ordinary
client, writes to another topic of the same shard.

        none         no attack: how long a bystander waits on this machine
    records      64 MiB of empty records, 65 KB as gzip
    stage        the same as a chunk of a transaction
        hidden       the same after 2 MiB of another field
        tokens       64 MiB of tiny JSON values in as many records as a write may have, as gzip: all of it is valid
    staged       the same as a chunk of a transaction
    giant        one record of 60 MiB of tiny JSON values, as gzip
    lines        64 MiB of tiny JSON values as NDJSON, as gzip
    utf8         64 MiB of text that is not ASCII, as gzip
    pages        the largest page of a topic, 64 requests at once on each connection
    publish      the largest messages over WebSockets
    bombs        gzip that unpacks to more than a body may have, 40 at once
        handshakes   WebSocket handshakes, one after the other, by 16 clients
    tags         reads and deletes by patterns that match none of 300 000 tags, by four clients
        watches      sessions of 256 long patterns, by one key that may only read, until it is refused; then it opens
                     and closes those that it has
"""

from __future__ import annotations

import base64
import gzip
import http.client
import itertools
import json
import multiprocessing
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.support.server import Server, let_in

BODY_MAX = 64 << 20
BYSTANDER = "bystander"
BYSTANDER_EVERY_S = 0.01
TAGGED = "tagged"
BATCH = 10_000
KEY, READ_KEY = "writes-and-reads", "only-reads"
PATTERN_BYTES = 255
PAGES = "pages"
MESSAGE_MAX = 2 << 20

Address = tuple[str, int]


@dataclass
class Report:
    """Times in ms."""

    answers: dict[str, int] = field(default_factory=dict)  # that the attackers got, by status
    writes: int = 0  # of the bystander
    refused: int = 0  # of these, answered with 429
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    peak_mib: dict[str, int] = field(default_factory=dict)  # by process


def start(folder: Path) -> Server:
    """A server with the keys that attackers and the bystander use."""
    environment = {"TOPICS_API_KEYS": f"{KEY},{READ_KEY}:read"}
    return Server(folder, environment, shards=1, credentials={"Authorization": f"Bearer {KEY}"}).start()


def _headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


def rows_of(row: bytes, count: int, separator: bytes = b",") -> bytes:
    return separator.join([row] * count)


def _tokens(size: int) -> bytes:
    """A record of tiny values."""
    return b'{"data":[%b1]}' % (b"[[]]," * (size // 5))


def write_of(rows: bytes, before: bytes = b"") -> bytes:
    return b'{"part":"a","chunk":0,%b"records":[%b]}' % (before, rows)


ROWS = 9990
ROW_BYTES = BODY_MAX // ROWS - 32
FLOOD = (BODY_MAX - (2 << 20)) // 3 - 64
BODIES: dict[str, Callable[[], bytes]] = {
    "records": lambda: write_of(rows_of(b"{}", FLOOD)),
    "stage": lambda: write_of(rows_of(b"{}", FLOOD)),
    "hidden": lambda: write_of(rows_of(b"{}", FLOOD), b'"x":"%b",' % (b"x" * (2 << 20))),
    "tokens": lambda: write_of(rows_of(_tokens(ROW_BYTES), ROWS)),
    "staged": lambda: write_of(rows_of(_tokens(ROW_BYTES), ROWS)),
    "giant": lambda: write_of(_tokens(60 << 20)),
    "lines": lambda: rows_of(_tokens(ROW_BYTES), ROWS, b"\n"),
    "utf8": lambda: write_of(rows_of(b'{"data":"%s"}' % ("\N{SNOWMAN}".encode() * (ROW_BYTES // 3)), ROWS)),
    "bombs": lambda: bytes(4 * BODY_MAX),
}


def flood(name: str = "records") -> bytes:
    """The body of an attack, as gzip."""
    return gzip.compress(BODIES[name](), 6)


def _post(address: Address, path: str, packed: bytes, until: float, kind: str = "json") -> Counter[str]:
    answers: Counter[str] = Counter()
    headers = {**_headers(KEY), "Content-Type": f"application/{kind}", "Content-Encoding": "gzip"}
    connection = http.client.HTTPConnection(*address, timeout=120)
    while time.monotonic() < until:
        connection.request("POST", path, packed, headers)
        response = connection.getresponse()
        response.read()
        answers[str(response.status)] += 1
    connection.close()
    return answers


def _read_pages(address: Address, until: float) -> Counter[str]:
    """The largest pages, many requests at once."""
    answers: Counter[str] = Counter()
    body = b'{"limit":1000,"max_batch_bytes":8388608}'
    request = b"POST /v0/topics/%b/diff HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    request %= (PAGES.encode(), KEY.encode(), len(body), body)
    while time.monotonic() < until:
        with socket.create_connection(address, timeout=120) as connection:
            connection.sendall(request * 64)
            answers[connection.recv(4096)[9:12].decode()] += 1
            while time.monotonic() < until and connection.recv(1 << 20):
                pass
    return answers


def _publish(address: Address, until: float) -> Counter[str]:
    """The largest messages."""
    answers: Counter[str] = Counter()
    payload = b'{"op":"publish","topic":"attacked","records":[%b]}' % rows_of(
        _tokens(1000), MESSAGE_MAX // 1024
    )
    mask = bytes(4)  # does not change the payload
    while time.monotonic() < until:
        with socket.create_connection(address, timeout=120) as connection:
            connection.sendall(_HANDSHAKE)
            connection.recv(4096)
            while time.monotonic() < until:
                connection.sendall(b"\x81\xff" + len(payload).to_bytes(8, "big") + mask + payload)
                answer = connection.recv(1 << 16)
                answers["ack" if b'"op":"ack"' in answer else "other"] += 1
                if not answer:
                    break
    return answers


_HANDSHAKE = (
    f"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\nAuthorization: Bearer {KEY}\r\n\r\n"
).encode()


def _shake_hands(address: Address, until: float) -> Counter[str]:
    answers: Counter[str] = Counter()
    while time.monotonic() < until:
        # Many at once, without waiting for answers.
        opened = [socket.create_connection(address, timeout=120) for _ in range(100)]
        for each in opened:
            each.sendall(_HANDSHAKE)
        for each in opened:
            answers[each.recv(4096)[9:12].decode()] += 1
            each.close()
    return answers


def load_tags(server: Server, topic: str, count: int) -> None:
    """Write `count` records, each with its own tag; half of the tags begin with `a`, half with `b`."""
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        records = [{"data": 0, "tag": f"{'ab'[i % 2]}.{i % 97}.{i}"} for i in numbers]
        reply = let_in(lambda records=records: server.post(f"/v0/topics/{topic}", {"records": records}))  # type: ignore[misc]
        assert reply.status in (200, 201), reply.body


def _ask(
    address: Address, method: str, path: str, body: dict[str, object] | None, until: float
) -> Counter[str]:
    answers: Counter[str] = Counter()
    connection = http.client.HTTPConnection(*address, timeout=120)
    while time.monotonic() < until:
        connection.request(method, path, json.dumps(body) if body is not None else None, _headers(KEY))
        response = connection.getresponse()
        response.read()
        answers[str(response.status)] += 1
    connection.close()
    return answers


def _watch(address: Address, number: int, until: float) -> Counter[str]:
    answers: Counter[str] = Counter()
    urls: list[str] = []
    connection = http.client.HTTPConnection(*address, timeout=120)
    for n in itertools.count():
        if time.monotonic() >= until:
            return answers
        patterns = {f"{number}.{n}.{i}.".ljust(PATTERN_BYTES - 2, "p") + ".>": {} for i in range(256)}
        connection.request("POST", "/v0/watch", json.dumps({"topics": patterns}), _headers(READ_KEY))
        response = connection.getresponse()
        body = response.read()
        answers[str(response.status)] += 1
        if response.status == 200:
            urls.append(json.loads(body)["stream_url"])
        elif urls:
            stream = http.client.HTTPConnection(*address, timeout=120)
            stream.request("GET", urls[n % len(urls)], headers=_headers(READ_KEY))
            answers[f"stream {stream.getresponse().status}"] += 1
            stream.close()
    raise AssertionError


def _attackers(name: str, address: Address) -> list[Callable[[float], Counter[str]]]:
    if name == "handshakes":
        return [lambda until: _shake_hands(address, until)] * 16
    if name == "tags":
        read = f"/v0/topics/{TAGGED}/last?each=true&subject=" + "*." * 20 + ">"
        delete = f"/v0/topics/{TAGGED}/delete", {"match": "*", "keep": 1}
        reader = partial(_ask, address, "GET", read, None)
        return [reader, reader, *[partial(_ask, address, "POST", *delete)] * 2]
    if name == "watches":
        return [partial(_watch, address, number) for number in range(4)]
    if name == "none":
        return [lambda until: Counter(time.sleep(until - time.monotonic()) or ())]
    if name == "pages":
        return [lambda until: _read_pages(address, until)] * 4
    if name == "publish":
        return [lambda until: _publish(address, until)] * 4
    packed, path, kind = flood(name), "/v0/topics/attacked", "x-ndjson" if name == "lines" else "json"
    if name.startswith("stage"):
        begun = _call(address, path + "/transactions", b'{"producer":"p","batch":1}')
        path += f"/transactions/{begun['txn']}/stage"
    return [lambda until: _post(address, path, packed, until, kind)] * (40 if name == "bombs" else 4)


def _call(address: Address, path: str, body: bytes) -> dict[str, str]:
    connection = http.client.HTTPConnection(*address, timeout=120)
    connection.request("POST", path, body, _headers(KEY))
    with connection.getresponse() as response:
        answer: dict[str, str] = json.loads(response.read())
    connection.close()
    return answer


NAMES = ("none", *BODIES, "handshakes", "pages", "publish", "tags", "watches")


def _child(pipe: multiprocessing.connection.Connection, name: str, address: Address, seconds: float) -> None:
    attackers = _attackers(name, address)
    answers: Counter[str] = Counter()
    pipe.send(None)  # ready
    until = time.monotonic() + seconds

    def run(attacker: Callable[[float], Counter[str]]) -> None:
        answers.update(attacker(until))

    threads = [threading.Thread(target=run, args=(attacker,)) for attacker in attackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(dict(answers))


def attack(server: Server, name: str, seconds: float, *, tags: int = 300_000) -> Report:
    """Run one attack and its bystander against a running server."""
    report = Report()
    if name == "tags":
        load_tags(server, TAGGED, tags)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, name, (server.host, server.port), seconds))
    if name == "pages":
        for _ in range(16):
            server.write(PAGES, "x" * ((1 << 20) - 64))
    process.start()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
    took_ms: list[float] = []
    ours.recv()
    while not ours.poll(BYSTANDER_EVERY_S):
        began = time.monotonic()
        connection.request("POST", f"/v0/topics/{BYSTANDER}", b'{"records":[{"data":1}]}', _headers(KEY))
        response = connection.getresponse()
        response.read()
        report.refused += response.status == 429
        assert response.status in (200, 201, 429), f"the bystander got {response.status}"
        took_ms.append((time.monotonic() - began) * 1000)
    report.answers = ours.recv()
    process.join()
    took_ms.sort()
    report.writes = len(took_ms)
    report.p50_ms, report.p99_ms = took_ms[len(took_ms) // 2], took_ms[int(len(took_ms) * 0.99)]
    report.max_ms = took_ms[-1]
    report.peak_mib = peak_mib(server.children())
    return report


def peak_mib(pids: dict[str, int]) -> dict[str, int]:
    return {name: _status_mib(pid, "VmHWM") for name, pid in pids.items()}


def _status_mib(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(f"{what}:"))
