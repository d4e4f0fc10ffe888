"""Heads of hot requests: what is plain, and does the full parser read it in the same way?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.runner import deadline
from tests.support.connection_bench import fast
from topics.protocols.http1.framing import HEAD_BYTES_MAX, read_head
from topics.protocols.http1.plain_head import read_plain_head


@pytest.mark.parametrize(
    "change",
    [
        (b"POST ", b"post "),
        (b"POST ", b"PUT "),
        (b" HTTP/1.1", b" HTTP/1.0"),
        (b"/a ", b"/a/delete "),
        (b"/a ", b"/%61 "),
        (b"/a ", b"/-a "),
        (b"/a ", b"/" + b"a" * 256 + b" "),
        (b"/a ", b"/a#b "),
        (b"/a ", b"/a?x=%41 "),
        (b"/v0", b"http://x/v0"),
        (b"Host: x\r\n", b""),
        (b"Host: x\r\n", b"Host: x\r\nHost: x\r\n"),
        (b"Host: x\r\n", b"Host: x y\r\n"),
        (b"Host: x\r\n", b"Host : x\r\n"),
        (b"Host: x\r\n", b"Host: x\n"),
        (b"Host: x\r\n", b"Host: x\r\n folded\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nExpect: 100-continue\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nTransfer-Encoding: chunked\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nContent-Encoding: gzip\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nConnection: upgrade\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nUser-Agent: a\0b\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nUser-Agent: a\rb\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nUser-Agent: " + b"a" * HEAD_BYTES_MAX + b"\r\n"),
        (b"Content-Length: 2", b"Content-Length: +2"),
        (b"Content-Length: 2", b"Content-Length: 2,2"),
        (b"Content-Length: 2", b"Content-Length: 0x2"),
        (b"Content-Length: 2", b"Content-Length:"),
        (b"Content-Length: 2", b"Content-Length: " + b"1" * 16),
        (b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 2"),
        (b"Content-Length: 2\r\n", b""),
    ],
)
def test_heads_that_are_not_plain(change: tuple[bytes, bytes]) -> None:
    request = fast()
    assert read_plain_head(request) is not None
    changed = request.replace(*change)
    assert changed != request
    assert read_plain_head(changed) is None


def test_a_plain_head_in_parts_is_none() -> None:
    request = fast()
    head_len = len(request) - 2
    for i in range(head_len):
        assert read_plain_head(request[:i]) is None
    plain = read_plain_head(request[:head_len])
    assert plain is not None and (plain.head_len, plain.body_len) == (head_len, 2)


def test_white_space_within_a_value_takes_no_longer_than_other_bytes() -> None:
    """The whole front waits while a head is parsed."""
    value = b"x" + b" " * (HEAD_BYTES_MAX - 200) + b"y"
    request = fast(headers=b"Accept:\t " + value + b" \t\r\n")
    with deadline():
        for _ in range(20):
            plain, head = read_plain_head(request), read_head(request, 0)
            assert plain is not None and head is not None
            assert plain.request(b"", 0).accept == head.request.accept == value


@given(st.binary(max_size=200))
def test_two_readers_agree_on_the_end(noise: bytes) -> None:
    """What is plain has the same end for `read_head`."""
    request = fast(headers=b"User-Agent: " + noise + b"\r\n")
    plain = read_plain_head(request)
    if plain is not None:
        head = read_head(request, 0)
        assert head is not None
        assert (head.head_len, head.body_len) == (plain.head_len, plain.body_len)
