"""Queues, consumers and their streams, with both kinds of client."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from tests.support.cutting_proxy import CuttingProxy
from topics.client import NewRecord, RecordsLost, errors, leased

Connect = Callable[..., Any]


def seqs(jobs: Any) -> list[int]:
    return [job.seq for job in jobs]


@pytest.fixture
def jobs(client: Any, topic: str) -> str:
    """A queue of three jobs."""
    client.create_topic(topic, type="queue", lease_ms=60_000, dead_letter=f"{topic}.dead")
    client.write_many(topic, [NewRecord("a", tag="t", meta={"m": 1}), NewRecord("b"), NewRecord("c")])
    return topic


def test_claim_ack_nack_extend(client: Any, jobs: str) -> None:
    claimed = client.claim(jobs, 2)
    assert (seqs(claimed), len(claimed), claimed.ready) == ([1, 2], 2, 1)
    first, second = claimed
    assert (first.topic, first.data, first.tag, first.meta, first.deliveries) == (jobs, "a", "t", {"m": 1}, 1)
    assert (first.holder, first.consumer, first.lease_id[:6]) == (client.node, None, "lease_")
    settled = client.ack(first)
    assert (settled.done, settled.skipped, settled.in_flight) == (1, [], 1)
    assert client.ack([first]).skipped == [1]
    extended = client.extend([second], 120_000)
    assert extended.done == 1
    assert extended.deadlines[2] > second.deadline
    assert client.nack(second, kind="release").done == 1
    (again,) = client.claim(jobs).jobs
    assert (again.seq, again.deliveries) == (2, 1)
    assert client.ack(second).skipped == [2]  # that lease has ended
    assert client.nack(again, kind="dead", reason="no use").done == 1
    with client.tail(f"{jobs}.*", start="earliest") as dead_letters:  # it arrives a moment later
        assert next(dead_letters).meta["$dead_letter_reason"] == "no use"
    client.nack(client.claim(jobs), delay_ms=3_600_000)
    assert client.claim(jobs, wait_ms=1).jobs == []


def test_jobs_can_be_settled_by_seq_alone(client: Any, jobs: str) -> None:
    client.claim(jobs, 3, node="somebody")
    assert client.ack(leased(jobs, 1, 2, node="somebody")).done == 2
    assert client.ack(leased(jobs, 3, node="somebody else")).skipped == [3]


def test_more_jobs_than_a_request_takes(client: Any, topic: str) -> None:
    client.create_topic(topic, type="queue")
    client.write_many(topic, range(1500))
    jobs = [*client.claim(topic, 1000), *client.claim(topic, 1000)]
    assert client.ack(jobs).done == 1500
    assert client.ack([]).done == 0


def test_a_log_is_not_a_queue(client: Any, topic: str) -> None:
    client.create_topic(topic)
    with pytest.raises(errors.NotAQueue) as caught:
        client.claim(topic)
    assert "queue" in caught.value.advice


def test_jobs_come_over_a_stream_as_they_are_acked(client: Any, jobs: str) -> None:
    with client.work(jobs) as work:
        found = []
        for job in work:
            found.append((job.seq, job.data))
            assert client.ack(job).done == 1
            if len(found) == 3:
                client.write(jobs, "d")
            if len(found) == 4:
                break
        assert found == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


def test_a_stream_of_jobs_reconnects_and_the_queue_s_end_is_raised(
    proxy: CuttingProxy, connect: Connect, client: Any, jobs: str
) -> None:
    with connect(proxy.url).work(jobs) as work:
        assert next(work).seq == 1
        proxy.cut()
        job = next(work)  # delivered again, because the stream had it
        assert (job.seq, job.deliveries) == (1, 2)
        client.delete_topic(jobs)
        with pytest.raises(errors.TopicNotFound):
            while True:
                next(work)
    with pytest.raises(errors.TopicNotFound):
        next(client.work(jobs))


def test_consumers(client: Any, topic: str) -> None:
    client.write_many(topic, [NewRecord(i, tag="eu.x" if i % 2 else "us.x") for i in range(6)])
    made = client.create_consumer(topic, "billing", filter=["eu.>"], ack_wait_ms=60_000, max_deliver=5)
    assert (made.created, made.config.ack_wait_ms, made.lag_records) == (True, 60_000, 3)
    assert not client.create_consumer(topic, "billing", filter=["eu.>"], ack_wait_ms=50_000).created
    fetched = client.fetch(topic, "billing", 2)
    assert [job.data for job in fetched] == [1, 3]
    assert fetched.jobs[0].consumer == "billing"
    assert client.ack(fetched.jobs[0]).done == 1
    assert client.term(fetched.jobs[1], reason="no").done == 1
    (last,) = client.fetch(topic, "billing", wait_ms=1000)
    assert client.extend(last, 90_000).done == 1
    assert client.nack(last).done == 1
    state = client.get_consumer(topic, "billing")
    assert (state.acked, state.ack_pending, state.config.filter) == (1, 1, [["tag", "Subject", "eu.>"]])
    client.create_consumer(topic, "audit")
    assert [row.consumer for row in client.consumers(topic, page_size=1)] == ["audit", "billing"]
    assert client.delete_consumer(topic, "audit").deleted
    with pytest.raises(errors.ConsumerNotFound):
        client.get_consumer(topic, "audit")


def test_consumers_of_a_work_queue_that_overlap(client: Any, topic: str) -> None:
    client.create_topic(topic, retention="work_queue")
    client.create_consumer(topic, "eu", filter=["eu.>"])
    with pytest.raises(errors.ConsumerOverlap) as caught:
        client.create_consumer(topic, "tea", filter=["*.tea"])
    assert caught.value.detail["consumer"] == "eu"


def test_a_consumer_is_paused_and_reset(client: Any, topic: str) -> None:
    client.write_many(topic, [1, 2, 3])
    client.create_consumer(topic, "c", ack="none")
    assert client.pause_consumer(topic, "c").paused
    assert client.fetch(topic, "c", 9).jobs == []
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    assert client.pause_consumer(topic, "c", until=until).paused_until_ts == round(until.timestamp() * 1000)
    assert not client.resume_consumer(topic, "c").paused
    assert seqs(client.fetch(topic, "c", 9)) == [1, 2, 3]
    dry = client.reset_consumer(topic, "c", "start", dry_run=True)
    assert (dry.dry_run, dry.from_seq, dry.to_seq, dry.redelivers) == (True, 4, 1, 3)
    client.reset_consumer(topic, "c", seq=3)
    assert seqs(client.fetch(topic, "c", 9)) == [3]
    client.reset_consumer(topic, "c", since=datetime.timedelta(hours=1))
    assert seqs(client.fetch(topic, "c", 9)) == [1, 2, 3]
    with pytest.raises(ValueError, match="one of"):
        client.reset_consumer(topic, "c")


def test_a_stream_of_a_consumer_and_its_losses(client: Any, topic: str) -> None:
    client.create_topic(topic, cap_records=2)
    client.create_consumer(topic, "c", deliver={"from_seq": 1})
    client.write_many(topic, [1, 2, 3, 4])
    with client.consume(topic, "c") as stream:
        with pytest.raises(RecordsLost) as caught:
            next(stream)
        assert (caught.value.tombstone.topic, caught.value.tombstone.gap_to) == (topic, 2)
        jobs = list(islice(stream, 2))
        assert seqs(jobs) == [3, 4]
        assert client.ack(jobs).done == 2


def test_a_fetch_reports_losses(client: Any, topic: str) -> None:
    client.create_topic(topic, cap_records=1)
    client.create_consumer(topic, "c")
    client.write_many(topic, [1, 2])
    fetched = client.fetch(topic, "c")
    assert (fetched.tombstone.topic, fetched.tombstone.consumer, fetched.tombstone.gap_to) == (topic, "c", 1)
    assert seqs(fetched) == [2]
