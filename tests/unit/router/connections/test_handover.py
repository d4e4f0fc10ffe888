"""Hand-over at the front: what is given away, when, and what comes back. Sockets are real; the worker is a listener of the test."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from router.connections.handover import MOVES_PER_S, REFUSED_US, REQUESTS_MAX, Handovers
from tests.support.connection_bench import fast, slow
from topics.engine.core.placement import shard_of
from topics.link.control_channel import Peer
from topics.link.handover import (
    BACK,
    BYTES_MAX,
    DRAIN,
    GIVE,
    REFUSED,
    Channel,
    Handover,
    accept,
    listen,
    socket_path,
)

SHARDS = 2
OWN = next(f"own{n}" for n in range(100) if shard_of(f"own{n}", SHARDS) == 1).encode()
WRITE = fast(b"/v0/topics/" + OWN)


class Connection:
    """What `give` asks of a connection."""

    def __init__(self, data: bytes, returns: int = 0) -> None:
        self.client, self.server = socket.socketpair()
        self.session = self
        self.buffer = data
        self.returns = returns
        self.transport = self
        self.unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self.server

    def close(self) -> None:
        self.client.close()
        self.server.close()


class Front:
    def __init__(self, folder: Path, at_request: int = 1) -> None:
        self.now_us = 1_000_000
        self.back: list[tuple[socket.socket, bytes, int]] = []
        self.peer = Peer(1, 17, str(folder / "shard-01-17.sock"))
        self.listener = listen(socket_path(self.peer.path))
        self.handovers = Handovers(
            SHARDS,
            asyncio.get_running_loop(),
            lambda: self.now_us,
            lambda *back: self.back.append(back),
            at_request,
        )
        self.handovers.set_peers([self.peer])

    def give(
        self, data: bytes = WRITE, shard: int | None = None, *, returns: int = 0, unsent: int = 0
    ) -> bool:
        connection = Connection(data, returns)
        connection.unsent = unsent
        given = self.handovers.give(cast(Any, connection), shard)
        connection.close()
        return given

    def worker(self) -> Channel:
        channel = accept(self.listener)
        assert channel is not None
        return channel

    def close(self) -> None:
        self.handovers.close()
        self.listener.close()


def run(test: Any, folder: Path) -> None:
    async def wrapped() -> None:
        before = len(os.listdir("/proc/self/fd"))
        front = Front(folder)
        await test(front)
        front.close()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(wrapped())


def taken(channel: Channel) -> Handover:
    received = channel.receive()
    assert received is not None
    if received[1] is not None:
        received[1].close()
    return received[0]


def test_the_worker_gets_the_connection_and_its_bytes(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        data = WRITE + slow()
        assert front.give(data, 1, returns=2)
        channel = front.worker()
        assert taken(channel) == Handover(GIVE, 2, data)
        channel.close()

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("data", "shard", "unsent"),
    [
        (slow(), None, 0),
        (WRITE[:-1], None, 1),
        (WRITE, 0, 0),
        (WRITE, None, 1),
        (fast(b"/v0/topics/" + OWN, body=bytes(BYTES_MAX)), None, 0),
        (WRITE + bytes(BYTES_MAX), None, 0),
        (fast(b"/v0/topics/" + OWN, headers=b"Expect: 100-continue\r\n"), None, 0),
    ],
)
def test_other_connections_stay(tmp_path: Path, data: bytes, shard: int | None, unsent: int) -> None:
    async def test(front: Front) -> None:
        assert not front.give(data, shard, unsent=unsent)

    run(test, tmp_path)


def test_without_a_worker_nothing_is_given(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.handovers.set_peers([])
        assert not front.give()
        front.handovers.set_peers([front.peer])
        assert front.give()
        front.worker().close()
        assert not front.give()  # it has died, and the front was not told yet

    run(test, tmp_path)


def test_what_comes_back_is_served_again(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        assert front.give()
        channel = front.worker()
        taken(channel)
        client, server = socket.socketpair()
        assert channel.send(Handover(BACK, 3, b"GET "), server)
        server.close()
        while not front.back:
            await asyncio.sleep(0)
        ((sock, early, returns),) = front.back
        assert (early, returns) == (b"GET ", 3)
        sock.send(b"served")
        assert client.recv(10) == b"served"
        sock.close()
        client.close()
        channel.close()

    run(test, tmp_path)


def test_a_worker_that_refuses_gets_nothing_for_a_while(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        assert front.give()
        channel = front.worker()
        client, server = socket.socketpair()
        assert channel.send(Handover(REFUSED, 0, WRITE), server)
        while not front.back:
            await asyncio.sleep(0)
        assert not front.give()
        front.now_us += REFUSED_US
        assert front.give()
        for one in (client, server, front.back[0][0]):
            one.close()
        channel.close()

    run(test, tmp_path)


def test_moves_are_limited(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        assert front.give()
        channel = front.worker()
        given = 0
        while front.give():
            given += 1
            taken(channel)
        assert given == MOVES_PER_S - 1
        front.now_us += 1_000_000 // MOVES_PER_S
        assert front.give() and not front.give()
        channel.close()

    run(test, tmp_path)


def test_each_return_doubles_the_requests_before_the_next_move() -> None:
    def before(at_request: int) -> list[int]:
        handovers = Handovers(1, cast(Any, None), lambda: 0, cast(Any, None), at_request)
        return [handovers.requests_before(returns) for returns in (0, 1, 2, 3, 255)]

    assert before(1) == [0, 2, 4, 8, REQUESTS_MAX]
    assert before(2) == [1, 2, 4, 8, REQUESTS_MAX]


def test_workers_are_told_of_a_stop(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.handovers.drain()
        channel = front.worker()
        assert taken(channel) == Handover(DRAIN)
        assert not front.give()
        channel.close()

    run(test, tmp_path)
