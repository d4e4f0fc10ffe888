"""Goal: messages arrive complete and in order however the bytes are cut; neither end blocks, and each notices when
the other dies.

Method: both ends of a real socket pair in one process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import fault
from topics.link.control_channel import (
    LINE_BYTES_MAX,
    Channel,
    CopiesPending,
    Drain,
    Failed,
    FlushCopies,
    LineBuffer,
    Listening,
    Locked,
    LoopChannel,
    Message,
    Outage,
    Peer,
    Peers,
    Ping,
    Pong,
    Ready,
    Serving,
    encode,
)

PEERS = Peers(
    [Peer(0, 1 << 60, "/run/a.sock"), Peer(1, 7, "/run/b\n.sock")],
    [Outage("shard 2", 2, 3, "no\nspace"), Outage("front 0", None, 2, "")],
)
MESSAGES: list[Message] = [
    Ping(),
    FlushCopies(),
    Drain(),
    PEERS,
    Pong(),
    Locked(),
    Listening(),
    Failed("no\nspace"),
    Ready(),
    Serving(),
    CopiesPending(True),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def test_the_text_on_the_wire() -> None:
    assert encode(Ping()) == b'{"op":"ping"}\n'
    assert (
        encode(Peers([Peer(2, 3, "p")]))
        == b'{"op":"peers","workers":[{"shard":2,"incarnation":3,"path":"p"}]}\n'
    )


@given(st.lists(st.sampled_from(MESSAGES)), st.lists(st.integers(1, 60)))
def test_any_cut_of_the_bytes_gives_the_same_messages(messages: list[Message], cuts: list[int]) -> None:
    data = b"".join(encode(message) for message in messages)
    buffer = LineBuffer()
    found: list[Message] = []
    for cut in cuts:
        found += buffer.feed(data[:cut])
        data = data[cut:]
    assert found + buffer.feed(data) == messages


@pytest.mark.parametrize("data", [b"\n", b"{}\n", b'{"op":"nonsense"}\n', b"x" * (LINE_BYTES_MAX + 1)])
def test_bytes_that_are_no_message_are_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        LineBuffer().feed(data)


def test_a_poll_loop_sends_and_receives(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = Channel(pair[0]), Channel(pair[1])
    assert other.receive() == []
    for message in MESSAGES:
        one.send(message)
    assert other.receive() == MESSAGES
    assert not other.closed


@fault(
    "link",
    "a child does not read what the supervisor tells it",
    "the rest is kept for later; the supervisor does not block",
)
def test_a_full_socket_keeps_the_rest(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = Channel(pair[0]), Channel(pair[1])
    big = Peers([Peer(shard, shard, "x" * 90) for shard in range(1000)])
    count = 0
    while not one.wants_write:
        one.send(big)
        count += 1
    found: list[Message] = []
    while one.wants_write:
        found += other.receive()
        one.flush()
    found += other.receive()
    assert found == [big] * count


def test_the_end_of_the_other_side_is_seen_after_its_last_words(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = Channel(pair[0]), Channel(pair[1])
    one.send(Ready())
    one.close()
    one.send(Ready())
    other.send(Ping())
    assert other.receive() == [Ready()]
    assert other.closed
    other.close()
    assert other.receive() == []


@fault("link", "noise between supervisor and child", "the channel is closed")
def test_a_line_that_is_no_message_closes_the_channel(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = Channel(pair[0])
    pair[1].send(b"nonsense\n")
    assert channel.receive() == []
    assert channel.closed


def test_the_socket_belongs_to_the_channel() -> None:
    a, b = socket.socketpair()
    with a:
        channel = Channel(b)
        channel.send(Pong())
        assert a.recv(100) == encode(Pong())
        channel.close()
        assert a.recv(100) == b""


def test_on_a_loop_messages_flow_both_ways_and_the_end_is_told_once() -> None:
    async def talk() -> None:
        a, b = socket.socketpair()
        heard: asyncio.Queue[Message] = asyncio.Queue()
        ends: asyncio.Queue[str] = asyncio.Queue()
        one = LoopChannel(a, lambda message: None, lambda: ends.put_nowait("one"))
        other = LoopChannel(b, heard.put_nowait, lambda: ends.put_nowait("other"))
        big = Peers([Peer(shard, shard, "x" * 90) for shard in range(5000)])
        for _ in range(20):
            one.send(big)
        one.send(Drain())
        assert [await heard.get() for _ in range(21)] == [big] * 20 + [Drain()]
        other.close()
        assert await ends.get() == "one"
        assert one.closed
        one.close()
        one.read()
        one.send(Ping())
        assert ends.empty()

    asyncio.run(asyncio.wait_for(talk(), 30))
