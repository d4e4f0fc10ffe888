"""Network failures, with both kinds of client: lost answers, closed connections, silent servers, invalid answers.

Method: a proxy that drops answers after the server has executed the request, and fake servers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.accepting import Accepting
from tests.support.cutting_proxy import CuttingProxy
from topics import Client
from topics.client import Retries, Timeouts, errors
from topics.client.flows import Close, Flow, Open, Read, Request
from topics.testing import TestServer

Connect = Callable[..., Any]
ONCE = Retries(for_s=0)


def test_a_write_whose_answer_is_lost_is_written_once(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str
) -> None:
    proxy.lose_answers(2)
    written = connect(proxy.url).write(topic, "once")
    assert (written.deduped, written.first_seq) == (True, 1)
    assert [record.data for record in client.records(topic)] == ["once"]


def test_without_a_key_it_is_not_repeated(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str
) -> None:
    proxy.lose_answers(1)
    with pytest.raises(errors.Disconnected) as caught:
        connect(proxy.url).write(topic, "once", idempotent=False)
    assert caught.value.outcome == "unknown"
    assert [record.data for record in client.records(topic)] == ["once"]


def test_other_calls_are_repeated(proxy: CuttingProxy, connect: Connect, topic: str) -> None:
    other = connect(proxy.url)
    proxy.lose_answers(1)
    other.create_topic(topic, type="queue")
    other.write_many(topic, [1, 2])
    proxy.lose_answers(1)
    assert len(other.read(topic).records) == 2
    proxy.lose_answers(1)
    # The lease from the lost answer holds, so the repeated claim gets the other job.
    (job,) = other.claim(topic).jobs
    assert job.seq == 2
    proxy.lose_answers(1)
    assert other.ack(job).skipped == [2]  # done by the first attempt
    assert other.get_topic(topic).count == 1


def test_connections_that_were_closed_meanwhile_do_no_harm(
    proxy: CuttingProxy, connect: Connect, topic: str
) -> None:
    other = connect(proxy.url)
    for i in range(3):
        assert other.write(topic, i).first_seq == i + 1
        proxy.cut()


def test_threads_do_not_even_use_them(proxy: CuttingProxy, topic: str) -> None:
    with Client(proxy.url, token="root", retries=ONCE) as client:
        for i in range(3):
            assert client.write(topic, i, idempotent=False).first_seq == i + 1
            proxy.cut()


def test_a_connection_is_kept(proxy: CuttingProxy, connect: Connect, topic: str) -> None:
    other = connect(proxy.url)
    for i in range(5):
        other.write(topic, i)
    with pytest.raises(errors.WrongLastSeq):
        other.write(topic, 0, if_last_seq=1)
    assert len(list(other.records(topic, page_size=2))) == 5
    assert proxy.connections == 1


def test_a_closed_client_says_so(server: TestServer, connect: Connect) -> None:
    client = connect(server.url)
    client.health()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.health()


@contextlib.contextmanager
def server_sending(answer: bytes | None, *, closes: bool = True) -> Iterator[str]:
    """A fake server that sends this to every request and closes the connection; None: it never answers."""
    held: list[socket.socket] = []

    def accepted(connection: socket.socket) -> None:
        held.append(connection)
        if answer is not None:
            with contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(answer)
                if closes:
                    connection.shutdown(socket.SHUT_WR)

    accepting = Accepting(accepted)
    try:
        yield accepting.url
    finally:
        accepting.close()
        for connection in held:
            connection.close()


def test_a_silent_server_times_out(connect: Connect) -> None:
    with server_sending(None) as url:
        client = connect(url, timeouts=Timeouts(answer_s=0.05), retries=ONCE)
        with pytest.raises(errors.TimedOut) as caught:
            client.write("t", 1)
        assert caught.value.outcome == "unknown"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def test_a_silent_stream_is_closed(connect: Connect) -> None:
    def flow() -> Flow[list[bytes]]:
        stream = yield Open(Request("GET", "/v0/watch/x"), 0.05)
        found = [(yield Read(stream))]
        try:
            yield Read(stream)
        except errors.TimedOut:
            found.append(b"silent")
        yield Close(stream)
        return found

    with server_sending(HEAD + b"retry: 2000\n\n", closes=False) as url:
        assert connect(url).run(flow()) == [b"retry: 2000\n\n", b"silent"]


@pytest.mark.parametrize(
    ("answer", "kind", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", errors.BadAnswer, "unknown"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello", errors.BadAnswer, "none"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", errors.BadAnswer, "unknown"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", errors.Disconnected, "unknown"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", errors.Disconnected, "unknown"),
        (b"", errors.Disconnected, "unknown"),
        (
            b'HTTP/1.1 500 Oops\r\nContent-Length: 48\r\n\r\n{"error":{"code":"brand_new","message":"so so"}}',
            errors.ApiError,
            "none",
        ),
    ],
    ids=["text", "404", "502", "cut off", "ssh", "nothing", "unknown code"],
)
def test_invalid_answers(connect: Connect, answer: bytes, kind: type, outcome: str) -> None:
    with server_sending(answer) as url:
        with pytest.raises(kind) as caught:
            connect(url, retries=ONCE).write("t", 1)
        assert caught.value.outcome == outcome


def test_a_forked_child_has_connections_of_its_own(proxy: CuttingProxy, topic: str) -> None:
    with Client(proxy.url, token="root") as client:
        client.write(topic, "parent")
        child = os.fork()
        if child == 0:
            try:
                client.write(topic, "child")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        client.write(topic, "parent again")
        assert {record.data for record in client.records(topic)} == {"parent", "child", "parent again"}
    assert proxy.connections == 2


def test_many_threads_share_a_client(server: TestServer, topic: str) -> None:
    with server.client(pool_size=2) as client:
        threads = [
            threading.Thread(target=lambda i=i: [client.write(topic, [i, j]) for j in range(20)])
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        found = [record.data for record in client.records(topic)]
    assert sorted(found) == [[i, j] for i in range(8) for j in range(20)]
    for i in range(8):
        assert [j for k, j in found if k == i] == list(range(20))
