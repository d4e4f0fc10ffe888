"""The load generator counts answers without parsing them: right however the bytes are cut, and no error passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "scripts"))

from peers.protocols import BadAnswer, Exchange, payload

HTTP = b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\nX: y\r\n\r\n{...}"
XADD = b"$15\r\n1794803448625-0\r\n"
ACK = b'MSG _INBOX.00000 1 28\r\n{"stream":"bench", "seq":12}\r\n'
PAGE = b"HMSG _INBOX.00000 1 12 15\r\nNATS/1.0\r\n\r\n-x-\r\n"
PAGE_END = b"HMSG _INBOX.00000 1 20 20\r\nNATS/1.0 204 EOB\r\n\r\n\r\n"

KINDS = {
    "http": (Exchange("http", b""), HTTP),
    "one xadd": (Exchange("resp", b"", lines=2), XADD),
    "pipelined xadds": (Exchange("resp", b"", 3, lines=6), XADD * 3),
    "acks": (Exchange("nats", b"", 3, lines=6), ACK + b"PING\r\n" + ACK * 2),
    "page by its end": (Exchange("nats", b"", 2, end=b"\r\n\r\n\r\n"), PAGE * 2 + PAGE_END),
    "page by its size": (Exchange("nats", b"", 2, size=len(PAGE * 2 + PAGE_END)), PAGE * 2 + PAGE_END),
}
REFUSALS = {
    "http": (Exchange("http", b""), b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"),
    "redis": (Exchange("resp", b"", lines=2), b"-ERR unknown command\r\n"),
    "redis, amid a pipeline": (Exchange("resp", b"", 3, lines=6), XADD + b"-OOM no memory\r\n" + XADD),
    "nats": (Exchange("nats", b"", lines=2), b'MSG _INBOX.00000 1 20\r\n{"error":{"code":400}}\r\n'),
    "nats, nobody there": (
        Exchange("nats", b"", lines=2),
        b"HMSG _INBOX.00000 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    ),
    "page": (Exchange("nats", b"", 2, size=500), b"HMSG _INBOX.0 1 28 28\r\nNATS/1.0 404 No\r\n\r\n\r\n"),
    "page of redis": (Exchange("resp", b"", 2, size=500), b"-WRONGTYPE of key\r\n"),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_each_answer_is_complete_with_its_last_byte(kind: str, data: st.DataObject) -> None:
    exchange, answer = KINDS[kind]
    answers = exchange.answers()
    for number in (1, 2, 3):
        cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=8)))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)])]
        assert [answers.feed(piece) for piece in pieces] == [False] * len(cuts) + [True]
        assert answers.records == number * exchange.records


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_not_counted(kind: str) -> None:
    exchange, refusal = REFUSALS[kind]
    with pytest.raises(BadAnswer):
        exchange.answers().feed(refusal)


def test_records_have_the_size_they_say() -> None:
    assert [len(payload(size)) for size in (100, 1024)] == [100, 1024]
