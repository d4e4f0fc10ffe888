"""Goal: messages between workers arrive, and no answer is missed in a ZeroMQ socket whose descriptor is edge-triggered.

Method: real ZeroMQ sockets between one PeerSockets and fake workers with a bare ROUTER each, and a poll like that of a worker's loop.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from topics.link import wire
from topics.link.control_channel import Peer
from workers.peers.sockets import PeerSockets

WAIT_MS = 10_000


class Workers:
    """The other workers, and the poll in which this one waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.context = zmq.Context(1)
        self.poller = select.poll()
        self.sockets = PeerSockets(self.context, self.poller)
        self.routers: dict[int, zmq.Socket[bytes]] = {}
        self.living: dict[int, Peer] = {}
        self.received: list[tuple[int, bytes, bytes | None]] = []
        self.unreadable = b""

    def start(self, shard: int, incarnation: int) -> None:
        path = f"{self._folder}/{shard}-{incarnation}"
        if shard in self.routers:
            self.routers[shard].close(0)
        router = self.routers[shard] = self.context.socket(zmq.ROUTER)
        router.rcvtimeo = WAIT_MS
        router.bind(f"ipc://{path}")
        self.living[shard] = Peer(shard, incarnation, path)
        self.sockets.set_peers(dict(self.living))

    def stop(self, shard: int) -> None:
        self.routers.pop(shard).close(0)
        del self.living[shard]
        self.sockets.set_peers(dict(self.living))

    def answer(self, shard: int, *parts: bytes) -> list[bytes]:
        """Answer the next request; returns the request."""
        peer, *request = self.routers[shard].recv_multipart()
        self.routers[shard].send_multipart([peer, *parts])
        return request

    def receive(self, shard: int, message: bytes, apart: wire.Buffer | None) -> None:
        self.received.append((shard, message, bytes(apart) if apart is not None else None))
        if message == self.unreadable:
            raise wire.BadMessage("for this test")

    def wait_for(self, count: int) -> None:
        """Wait as the worker's loop does: poll only if no socket is marked as unread."""
        while len(self.received) < count:
            if not self.sockets.has_messages:
                rung = self.poller.poll(WAIT_MS)
                assert rung, "a message is there, but no descriptor is readable"
                for fd, _ in rung:
                    self.sockets.readable(fd)
            self.sockets.drain(self.receive)

    def close(self) -> None:
        self.sockets.close()
        for router in self.routers.values():
            router.close(0)
        self.context.term()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


def test_a_socket_is_made_for_the_first_message(workers: Workers) -> None:
    workers.start(1, 7)
    workers.start(2, 8)
    assert workers.poller.poll(0) == [] and not workers.sockets.has_messages
    workers.sockets.send(2, [b"first", b"apart"])
    assert workers.answer(2, b"yes", b"apart, too") == [b"first", b"apart"]
    workers.wait_for(1)
    assert workers.received == [(2, b"yes", b"apart, too")]


def test_an_answer_that_comes_while_more_is_sent_is_seen(workers: Workers) -> None:
    """A send consumes the descriptor's edge."""
    workers.start(1, 7)
    for i in range(200):
        workers.sockets.send(1, [b"%d" % i])
        workers.answer(1, b"to %d" % i)
        if i % 3 == 0:
            workers.wait_for(i)
    workers.wait_for(200)
    assert [message for _, message, _ in workers.received] == [b"to %d" % i for i in range(200)]
    workers.poller.poll(0)  # clear the edge of the message that was read
    assert not workers.sockets.has_messages


def test_a_message_that_cannot_be_read_does_not_keep_back_the_next(workers: Workers) -> None:
    workers.start(1, 7)
    for _ in range(2):
        workers.sockets.send(1, [b"ask"])
    workers.answer(1, b"bad")
    workers.answer(1, b"good")

    workers.unreadable = b"bad"
    workers.wait_for(2)
    assert [message for _, message, _ in workers.received] == [b"bad", b"good"]


def test_each_incarnation_has_a_socket_of_its_own(workers: Workers) -> None:
    workers.start(1, 7)
    workers.sockets.send(1, [b"to 7"])
    assert workers.answer(1, b"7") == [b"to 7"]
    workers.wait_for(1)
    workers.sockets.send(1, [b"to 7 again"])
    workers.start(1, 9)
    assert not workers.sockets.has_messages
    workers.sockets.send(1, [b"to 9"])
    assert workers.answer(1, b"9") == [b"to 9"], "messages to the previous incarnation went with its socket"
    workers.wait_for(2)
    workers.stop(1)
    assert workers.poller.poll(0) == []
    assert [message for _, message, _ in workers.received] == [b"7", b"9"]
