"""Chunked bodies: is their end found wherever the bytes are cut, and is everything ambiguous refused?

What `read_head` refuses is tested in `tests/integration/test_smuggling.py`, what it accepts in `tests/fuzz/test_http1_parsers.py`.
"""

from __future__ import annotations

import pytest

from topics.protocols.http1.framing import CHUNK_EXTRA_BYTES_MAX, ChunkedBody, FramingError


def follow(parts: list[bytes]) -> tuple[bytes, bytes, bool]:
    chunks, passed, after = ChunkedBody(), b"", b""
    for part in parts:
        if chunks.done:
            after += part
            continue
        out, rest_ = chunks.feed(part)
        passed, after = passed + out, after + rest_
    return passed, after, chunks.done


def test_a_chunked_body_may_be_cut_anywhere() -> None:
    body = b'5 ;ext="a"\r\nhello\r\n0A\r\n0123456789\r\n0\r\nX-A: 1\r\nX-B: 2\r\n\r\nGET / HTTP/1.1\r\n'
    expected = (b"hello0123456789", b"GET / HTTP/1.1\r\n", True)
    for i in range(len(body) + 1):
        assert follow([body[:i], body[i:]]) == expected
    assert follow([body[i : i + 1] for i in range(len(body))]) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"\r\nhello",
        b"ffffffffffffffff5\r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\rhello\r\n",
        b"5\r\nhelloo\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloXY0\r\n\r\n",
        b"5\r\nhelloX\n0\r\n\r\n",
        b"5\r\nhello\rY0\r\n\r\n",
        b"5\r\nhello\r0\r\n\r\n",
        b"5;a\0b\r\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"5;" + b"a" * 300 + b"\r\nhello\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n X-A: 1\r\n\r\n",
        b"0\r\n" + b"X-A: 1234567890\r\n" * (CHUNK_EXTRA_BYTES_MAX // 10),
        b"1;" + b"a" * 200 + b"\r\nx\r\n" + (b"1;" + b"a" * 200 + b"\r\nx\r\n") * 100,
    ],
)
def test_chunks_that_are_none(body: bytes) -> None:
    with pytest.raises(FramingError):
        follow([body])
    with pytest.raises(FramingError):
        follow([body[i : i + 1] for i in range(len(body))])
