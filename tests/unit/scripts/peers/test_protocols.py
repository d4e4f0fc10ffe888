"""Single requests to a server are complete with the last byte of their answer, and errors are reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "scripts"))

from peers.protocols import MARK, BadAnswer, Exchange, http_post, payload, redis_command

HTTP = b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\nX: y\r\n\r\n{...}"
XADD = b"$15\r\n1794803448625-0\r\n"
ACK = b'MSG _INBOX.00000 1 28\r\n{"stream":"bench", "seq":12}\r\n'
PAGE = b"HMSG _INBOX.00000 1 12 15\r\nNATS/1.0\r\n\r\n-x-\r\n"
PAGE_END = b"HMSG _INBOX.00000 1 20 20\r\nNATS/1.0 204 EOB\r\n\r\n\r\n"
NESTED = b"*2\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nd\r\n$2\r\n\r\n\r\n*0\r\n"

KINDS = {
    "http": (Exchange("http", b""), HTTP),
    "one xadd": (Exchange("resp", b""), XADD),
    "pipelined xadds": (Exchange("resp", b"", replies=3), XADD * 3),
    "arrays in arrays": (Exchange("resp", b"", replies=2), NESTED + b":1\r\n"),
    "acks": (Exchange("nats", b"", replies=3), ACK + b"PING\r\n" + ACK * 2),
    "page": (Exchange("nats", b"", replies=3), PAGE * 2 + PAGE_END),
}
REFUSALS = {
    "http": (Exchange("http", b""), b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"),
    "redis": (Exchange("resp", b""), b"-ERR unknown command\r\n"),
    "redis, amid a pipeline": (Exchange("resp", b"", replies=3), XADD + b"-OOM no memory\r\n" + XADD),
    "nats": (Exchange("nats", b""), b'MSG _INBOX.00000 1 20\r\n{"error":{"code":4}}\r\n'),
    "nats, nobody there": (Exchange("nats", b""), b"HMSG _INBOX.00000 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_each_answer_is_complete_with_its_last_byte(kind: str, data: st.DataObject) -> None:
    exchange, answer = KINDS[kind]
    cut = data.draw(st.integers(0, len(answer) - 1))
    assert not exchange.is_complete(answer[:cut])
    assert exchange.is_complete(answer)


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_no_answer(kind: str) -> None:
    exchange, refusal = REFUSALS[kind]
    with pytest.raises(BadAnswer):
        exchange.is_complete(refusal)


def test_records_have_the_size_they_say_and_one_mark() -> None:
    assert [len(payload(size)) for size in (100, 1024)] == [100, 1024]
    assert payload(100).count(MARK) == 1


def test_lengths_count_numbers_and_not_their_names() -> None:
    post = Exchange("http", http_post("/", b'{"from":{cursor},"c":"{client}"}')).numbered(7, 12)
    head, _, body = post.partition(b"\r\n\r\n")
    assert body == b'{"from":%20d,"c":"00007"}' % 12
    assert b"Content-Length: %d" % len(body) in head
    add = Exchange("resp", redis_command(b"XADD", b"bench", b"{next:0}-1")).numbered(7, 12)
    assert add.endswith(b"$22\r\n%020d-1\r\n" % 12)
