"""Regression tests of streams: clients that pause, workers that die under many watched topics, streams
and topics that are opened or created twice at the same moment.

Method: a server of one shard, and clients that do this at the worst moment; while its worker is stopped (SIGSTOP),
requests collect so that it handles them in one turn.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.contract import ok
from tests.support.server import Server, running, until
from tests.support.sse_client import EventStream, follow, open_stream, watch

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Path(tmp_path_factory.mktemp("hostile")), shards=1) as started:
        yield started


def test_a_client_that_pauses_is_not_cut(server: Server) -> None:
    """Several pages arrive while its buffer is already full; the sweep of stalled connections runs meanwhile."""
    topics = [f"pause-{i}" for i in range(3)]
    for topic in topics:
        server.write(topic, *["x" * 1_000_000] * 7)
    stream = open_stream(
        server, watch(server, {topic: {} for topic in topics}, max_batch_bytes=8 * MIB), receive_buffer=4096
    )
    sweep_twice = time.monotonic() + 2.5
    until(lambda: time.monotonic() > sweep_twice)
    stream.until_records(21)
    stream.close()


def test_a_worker_restarts_under_many_watched_topics(server: Server) -> None:
    """So many topics are followed again at once that messages are sent before the tick ends."""
    topics = [f"many-{i}" for i in range(40)]
    for topic in topics:
        server.write(topic, 1)
    stream = follow(server, {topic: {} for topic in topics})
    stream.until_caught_up(len(topics))
    os.kill(server.pid("shard 0"), signal.SIGKILL)
    until(lambda: server.write(topics[0], 2).status == 200)
    for topic in topics[1:]:
        ok(server.write(topic, 2))
    frames = stream.until_records(len(topics))
    assert {frame.data["topic"] for frame in frames if frame.event == "record"} == set(topics)
    stream.close()


def test_of_two_streams_opened_at_once_one_is_ended(server: Server) -> None:
    server.write("twice", 1)
    for _ in range(8):
        session = watch(server, "twice")
        clients = [server.connect(), server.connect()]
        for client in clients:
            client.sendall(f"GET {session['stream_url']} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        until(partial(_one_is_told, clients, [b"", b""]))
        for client in clients:
            client.close()


def _one_is_told(clients: list[socket.socket], received: list[bytes]) -> bool:
    for i, client in enumerate(clients):
        client.settimeout(0.01)
        try:
            received[i] += client.recv(MIB)
        except TimeoutError:
            pass
    return any(b"taken_over" in text for text in received)


def test_a_topic_recreated_in_one_turn_is_found_by_patterns(server: Server) -> None:
    stream = follow(server, {"again.>": {}})
    for i in range(8):
        topic = f"again.t{i}"
        server.write(topic, "old")
        stream.until_records(1)
        _drop_and_write(server, topic)
        assert server.write(topic, "second").status in (200, 201)
        _read_until(stream_topic=topic, head=ok(server.get(f"/v0/topics/{topic}"))["head_seq"], stream=stream)
    stream.close()


def _drop_and_write(server: Server, topic: str) -> None:
    """Both in one turn; the drop is sent first, but the server may execute them in either order."""
    worker = server.pid("shard 0")
    body = b'{"records":[{"data":"first"}]}'
    drop, write = server.connect(), server.connect()
    os.kill(worker, signal.SIGSTOP)
    try:
        drop.sendall(f"DELETE /v0/topics/{topic} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        write.sendall(
            f"POST /v0/topics/{topic} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
    finally:
        os.kill(worker, signal.SIGCONT)
    for client in (drop, write):
        assert client.recv(4096).startswith(b"HTTP/1.1 20")
        client.close()


def _read_until(*, stream_topic: str, head: int, stream: EventStream) -> None:
    """Up to the last record of the topic, whether it is from before or after the drop."""
    seqs: list[int] = []
    while not seqs or seqs[-1] != head:
        frame = stream.next()
        if frame.event == "topic-deleted":
            seqs = []
        elif frame.event == "record" and frame.data["topic"] == stream_topic:
            seqs += frame.seqs
