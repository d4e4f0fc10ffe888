"""Producers of both kinds: batching, order, exactly-once, and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cutting_proxy import CuttingProxy
from topics.client import NewRecord, errors
from topics.testing import TestServer

Connect = Callable[..., Any]


def data(client: Any, topic: str) -> list[Any]:
    return [record.data for record in client.records(topic)]


def test_records_are_written_in_order_and_receipts_have_the_seqs(client: Any, topic: str) -> None:
    with client.producer(topic, linger_ms=1) as producer:
        receipts = [producer.send(i, tag=f"t{i % 3}", meta={"i": i}) for i in range(500)]
        producer.flush()
        assert all(receipt.done() for receipt in receipts)
        assert [receipt.result() for receipt in receipts] == list(range(1, 501))
        last = producer.send("last")
    assert last.result() == 501
    assert data(client, topic) == [*range(500), "last"]
    assert client.last(topic, tag="t2").meta == {"i": 497}
    with pytest.raises(RuntimeError, match="closed"):
        producer.send("late")


def test_a_batch_goes_when_it_is_full_or_old_enough(client: Any, topic: str) -> None:
    with client.producer(topic, linger_ms=3_600_000, max_batch_bytes=200) as producer:
        receipts = [producer.send("x" * 50) for _ in range(4)]
        assert receipts[0].result(60) == 1  # the batch is full, so it is sent without flush()
        assert not receipts[-1].done()
        producer.flush()
    with client.producer(topic, linger_ms=1) as producer:
        assert producer.send("y").result(60) == 5


def test_bytes_and_values_may_be_mixed(client: Any, topic: str) -> None:
    values = [1, b"two", b"three", "four", b"five"]
    with client.producer(topic) as producer:
        receipts = [producer.send(value) for value in values]
    assert [receipt.result() for receipt in receipts] == [1, 2, 3, 4, 5]
    assert data(client, topic) == values


def test_a_record_is_not_accepted_as_data(client: Any, topic: str) -> None:
    with client.producer(topic) as producer, pytest.raises(TypeError, match="pass its fields"):
        producer.send(NewRecord(1, tag="a"))
    with pytest.raises(TypeError, match="pass its fields"):
        client.write(topic, NewRecord(1, tag="a"))
    client.write_many(topic, [NewRecord(1, tag="a")])
    assert data(client, topic) == [1]


def test_a_bad_record_fails_alone(client: Any, topic: str) -> None:
    client.create_topic(topic, max_record_bytes=100)
    producer = client.producer(topic, linger_ms=3_600_000)
    receipts = [producer.send("x" * (200 if i == 5 else 1)) for i in range(16)]
    with pytest.raises(errors.ProducerFailed) as caught:
        producer.flush()
    assert (caught.value.records, caught.value.outcome) == (1, "none")
    with pytest.raises(errors.RecordTooLarge):
        receipts[5].result()
    assert [receipts[i].result() for i in (4, 6, 15)] == [5, 6, 15]
    producer.flush()  # the error has been reported
    with pytest.raises(TypeError):
        producer.send(object())
    producer.close()


def test_all_fail_when_the_topic_does_not_take_them(client: Any, topic: str) -> None:
    client.create_topic(topic, cap_records=1, discard="reject")
    client.write(topic, 0)
    producer = client.producer(topic)
    receipts = [producer.send(i) for i in range(3)]
    with pytest.raises(errors.ProducerFailed) as caught:
        producer.close()
    assert caught.value.records == 3
    for receipt in receipts:
        with pytest.raises(errors.TopicFull):
            receipt.result()


def test_an_exception_of_the_block_is_raised(client: Any, topic: str) -> None:
    with pytest.raises(KeyError), client.producer(topic) as producer:
        producer.send(1)
        raise KeyError
    assert data(client, topic) == [1]


def test_lost_answers_duplicate_nothing(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str
) -> None:
    with connect(proxy.url).producer(topic, linger_ms=0, max_batch_bytes=300) as producer:
        for i in range(200):
            if i in (20, 90):
                proxy.lose_answers(1)
            if i in (50, 150):
                proxy.cut()
            producer.send(i)
    assert data(client, topic) == list(range(200))


def test_a_full_buffer_makes_senders_wait_or_fail(connect: Connect, topic: str) -> None:
    client = connect("http://127.0.0.1:1")  # where no server listens
    options = {"max_batch_bytes": 100, "max_buffer_bytes": 100, "linger_ms": 0, "deliver_for_s": 0.3}
    producer = client.producer(topic, **(options | {"deliver_for_s": 2.0}), send_timeout_s=0.05)
    first = producer.send("x" * 80)
    with pytest.raises(errors.BufferFull):
        producer.send("y" * 80)
    with pytest.raises(errors.Disconnected):
        first.result(60)
    with pytest.raises(errors.ProducerFailed):
        producer.close()
    patient = client.producer(topic, **options)
    for _ in range(3):  # each waits until the one before has failed
        patient.send("x" * 80)
    with pytest.raises(errors.ProducerFailed) as caught:
        patient.flush()
    assert caught.value.records == 3
    patient.close()
    slow = client.producer(topic, **options)
    slow.send(1)
    with pytest.raises(TimeoutError):
        slow.flush(0.01)
    with pytest.raises(errors.ProducerFailed):
        slow.close()


def test_threads_share_a_producer(server: TestServer, topic: str) -> None:
    with server.client() as client:
        with client.producer(topic, max_batch_bytes=500, max_buffer_bytes=2000) as producer:
            threads = [
                threading.Thread(target=lambda i=i: [producer.send([i, j]) for j in range(100)])
                for i in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        found = data(client, topic)
    assert len(found) == 400
    for i in range(4):
        assert [j for k, j in found if k == i] == list(range(100))


def test_invalid_options(client: Any) -> None:
    with pytest.raises(ValueError, match="max_batch_bytes"):
        client.producer("t", max_batch_bytes=10, max_buffer_bytes=5)
