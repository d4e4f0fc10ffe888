"""Hand-over of connections: what is sent arrives whole or not at all, and no descriptor is left behind, whatever arrives."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import length
from topics.link.handover import (
    BACK,
    BYTES_MAX,
    DRAIN,
    GIVE,
    REFUSED,
    VERSION,
    BadHandover,
    Channel,
    Handover,
    accept,
    connect,
    decode,
    encode,
    listen,
    socket_path,
)

KINDS = (GIVE, BACK, REFUSED)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    before = open_files()
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (one, other):
        sock.setblocking(False)
    ends = Channel(one), Channel(other)
    yield ends
    for end in ends:
        end.close()
    assert open_files() == before


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


# -- messages ----------------------------------------------------------------------------------------------


@given(st.sampled_from(KINDS), st.integers(0, 255), st.binary(max_size=300))
def test_a_message_is_read_as_it_was_written(kind: int, returns: int, data: bytes) -> None:
    message = Handover(kind, returns, data)
    assert decode(encode(message), 1) == message


def test_the_returns_are_counted_up_to_a_maximum() -> None:
    assert decode(encode(Handover(BACK, 256)), 1).returns == 255


@pytest.mark.parametrize(
    ("message", "descriptors"),
    [
        (b"", 1),
        (encode(Handover(GIVE))[:-1], 1),
        (encode(Handover(GIVE)), 0),
        (encode(Handover(GIVE)), 2),
        (encode(Handover(DRAIN)), 1),
        (struct.pack("<HBB", VERSION + 1, GIVE, 0), 1),
        (struct.pack("<HBB", VERSION, 9, 0), 1),
        (encode(Handover(GIVE)) + bytes(BYTES_MAX + 1), 1),
    ],
)
def test_other_messages_are_refused(message: bytes, descriptors: int) -> None:
    with pytest.raises(BadHandover):
        decode(message, descriptors)


@given(st.binary(max_size=40), st.integers(0, 3))
def test_any_bytes_are_a_message_or_refused(message: bytes, descriptors: int) -> None:
    try:
        read = decode(message, descriptors)
    except BadHandover:
        return
    assert encode(read) == message


# -- channels ----------------------------------------------------------------------------------------------


def test_a_connection_goes_to_the_other_end_with_its_bytes(ends: tuple[Channel, Channel]) -> None:
    client, server = pair()
    message = Handover(GIVE, 2, bytes(BYTES_MAX))
    assert ends[0].send(message, server)
    server.close()
    received = ends[1].receive()
    assert received is not None and received[0] == message and received[1] is not None
    assert not received[1].getblocking() and not received[1].get_inheritable()
    received[1].send(b"answer")
    received[1].close()
    assert client.recv(10) == b"answer" and client.recv(1) == b""
    client.close()
    assert ends[1].receive() is None and not ends[1].is_closed


def test_a_message_without_a_connection(ends: tuple[Channel, Channel]) -> None:
    assert ends[0].send(Handover(DRAIN))
    assert ends[1].receive() == (Handover(DRAIN), None)


def test_a_busy_receiver_leaves_the_connection_with_the_sender(ends: tuple[Channel, Channel]) -> None:
    client, server = pair()
    message = Handover(GIVE, 0, bytes(BYTES_MAX))
    sent = 0
    while ends[0].send(message, server):
        sent += 1
        assert sent < 100
    assert sent and not ends[0].is_closed
    server.send(b"mine")
    assert client.recv(10) == b"mine"
    while (received := ends[1].receive()) is not None:
        assert received[1] is not None
        received[1].close()
    assert ends[0].send(message, server)
    server.close()
    ends[1].close()  # the kernel closes what is on the way
    assert client.recv(1) == b""
    client.close()


def test_a_channel_ends_with_its_other_end(ends: tuple[Channel, Channel]) -> None:
    closed: list[int] = []
    ends[0].on_close = ends[1].on_close = lambda channel: closed.append(channel.fd)
    ends[0].close()
    assert ends[1].receive() is None
    assert ends[1].is_closed and len(closed) == 2
    client, server = pair()
    assert not ends[1].send(Handover(BACK), server)
    client.close()
    server.close()


def test_what_is_no_connection_is_refused_and_closed(ends: tuple[Channel, Channel], tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for fd in (file.fileno(), datagrams.fileno()):
            before = open_files()
            assert ends[0].send(Handover(GIVE), fd)
            with pytest.raises(BadHandover):
                ends[1].receive()
            assert open_files() == before
    assert ends[1].receive() is None and not ends[1].is_closed


@pytest.mark.parametrize("count", [0, 2, 5])
def test_any_other_number_of_descriptors_is_refused(count: int) -> None:
    before = open_files()
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver.setblocking(False)
    channel, (client, server) = Channel(receiver), pair()
    fds = struct.pack(f"{count}i", *[server.fileno()] * count)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if count else []
    sender.sendmsg([encode(Handover(GIVE))], rights)
    with pytest.raises(BadHandover):
        channel.receive()
    for one in (sender, client, server):
        one.close()
    channel.close()
    assert open_files() == before


def test_descriptors_do_not_leak(ends: tuple[Channel, Channel]) -> None:
    client, server = pair()
    before = open_files()
    for i in range(length.pick(short=3_000, long=100_000)):
        assert ends[i % 2].send(Handover(GIVE, 0, b"x"), server)
        server.close()
        received = ends[1 - i % 2].receive()
        assert received is not None and received[1] is not None
        server = received[1]
    assert open_files() == before
    server.send(b"still")
    assert client.recv(10) == b"still"
    client.close()
    server.close()


# -- listeners ---------------------------------------------------------------------------------------------


def test_a_front_connects_to_the_worker_that_listens(tmp_path: Path) -> None:
    before = open_files()
    path = socket_path(str(tmp_path / "shard-00-17.sock"))
    assert len(path) == len(str(tmp_path / "shard-00-17.sock"))
    assert connect(path) is None
    listener = listen(path)
    assert accept(listener) is None
    front = connect(path)
    worker = accept(listener)
    assert front is not None and worker is not None
    assert front.send(Handover(DRAIN)) and worker.receive() == (Handover(DRAIN), None)
    listener.close()
    assert connect(path) is None
    front.close()
    worker.close()
    assert open_files() == before
