"""Atomic batches of producers, with both kinds of client: written once and completely, despite retries, lost answers and cut connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.cutting_proxy import CuttingProxy
from topics.client import NewRecord, errors, transaction_calls

Connect = Callable[..., Any]


def data(client: Any, topic: str) -> list[Any]:
    return [record.data for record in client.records(topic)]


def test_a_batch_is_written_once(client: Any, topic: str) -> None:
    first = client.write_batch(topic, "job", 1, [1, NewRecord(2, tag="two"), 3], node="me")
    assert (first.state, first.first_seq, first.last_seq, first.count) == ("committed", 1, 3, 3)

    def never() -> Iterator[int]:
        raise AssertionError("a batch that exists must not be produced again")
        yield

    again = client.write_batch(topic, "job", 1, never())
    assert (again.state, again.first_seq, again.count) == ("committed", 1, 3)
    assert client.write_batch(topic, "job", 2, []).count == 0
    records = list(client.records(topic))
    assert [(record.data, record.tag, record.node) for record in records] == [
        (1, None, "me"), (2, "two", "me"), (3, None, "me"),
    ]  # fmt: skip


def test_a_batch_of_many_chunks(client: Any, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_calls, "CHUNK_BYTES", 1000)
    values = [*range(300), b"bytes", *("x" * 1500 for _ in range(3)), b"more", b"bytes", 7]
    written = client.write_batch(topic, "job", 1, iter(values))
    assert (written.count, data(client, topic)) == (len(values), values)


def test_lost_answers_write_nothing_twice(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_calls, "CHUNK_BYTES", 100)
    other = connect(proxy.url)

    def records() -> Iterator[int]:
        for i in range(200):
            if i in (0, 50, 150):
                proxy.lose_answers(1)
            if i == 100:
                proxy.cut()
            yield i
        proxy.lose_answers(2)

    assert other.write_batch(topic, "job", 1, records()).count == 200
    assert data(client, topic) == list(range(200))


def test_steps(client: Any, topic: str) -> None:
    begun = client.begin_transaction(topic, "job", 7, ttl_ms=60_000)
    assert begun.state == "open"
    assert client.begin_transaction(topic, "job", 7).txn == begun.txn
    assert client.stage(topic, begun.txn, "a", 0, [1, 2]).records == 2
    assert client.stage(topic, begun.txn, "a", 0, [1, 2]).repeated
    with pytest.raises(errors.TransactionIncomplete) as caught:
        client.commit_transaction(topic, begun.txn, [("a", 2, 3)])
    assert caught.value.detail["parts"]
    assert data(client, topic) == []
    assert client.abort_transaction(topic, begun.txn).state == "aborted"
    with pytest.raises(errors.TransactionNotFound):
        client.stage(topic, begun.txn, "a", 0, [1])
    begun = client.begin_transaction(topic, "job", 7)
    client.stage(topic, begun.txn, "b", 0, [3])
    client.stage(topic, begun.txn, "a", 0, [1, 2])
    assert client.commit_transaction(topic, begun.txn, [("a", 1, 2), ("b", 1, 1)]).count == 3
    assert data(client, topic) == [1, 2, 3]
    with pytest.raises(errors.TransactionCommitted):
        client.abort_transaction(topic, begun.txn)


def test_a_topic_that_is_not_there(client: Any, topic: str) -> None:
    with pytest.raises(errors.TopicNotFound):
        client.write_batch(topic, "job", 1, [1], create=False)
