"""Tails and watches, with both kinds of client: every record once and in order, over broken connections and restarts.

Method: a proxy cuts connections; servers are stopped and killed. No test depends on timing.
"""

from __future__ import annotations

import datetime
import gc
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from tests.support.cutting_proxy import CuttingProxy
from topics.client import RecordsLost, answers, errors
from topics.testing import TestServer

Connect = Callable[..., Any]


def take(items: Any, count: int) -> list[Any]:
    return [(record.topic, record.seq, record.data) for record in islice(items, count)]


def rows(topic: str, first: int, *data: Any) -> list[Any]:
    return [(topic, first + i, value) for i, value in enumerate(data)]


def until(items: Any, kind: type) -> list[Any]:
    """Events up to and including the first of this kind."""
    found = []
    for event in items:
        found.append(event)
        if isinstance(event, kind):
            return found
    raise AssertionError(f"no {kind} in {found}")


def test_from_now_on_from_the_beginning_and_after_a_seq(client: Any, topic: str) -> None:
    client.write_many(topic, [1, 2, 3])
    with client.tail(topic, start="earliest") as everything, client.tail(topic, start=2) as some:
        assert take(everything, 3) == rows(topic, 1, 1, 2, 3)
        assert take(some, 1) == rows(topic, 3, 3)
        watch = client.watch(topic)
        assert [type(event) for event in until(watch, answers.CaughtUp)] == [answers.CaughtUp]
        client.write(topic, b"4", tag="t", meta=None)
        (record,) = next(watch).records
        assert (record.topic, record.seq, record.data, record.tag) == (topic, 4, b"4", "t")
        assert take(everything, 1) == rows(topic, 4, b"4")
        watch.close()


def test_since_a_time_also_with_patterns(client: Any, topic: str) -> None:
    client.write(f"{topic}.a", "old")
    after = client.last(f"{topic}.a").ts + 1
    while client.last(f"{topic}.a").ts < after:
        client.write(f"{topic}.a", "new")
    first = next(record.seq for record in client.records(f"{topic}.a") if record.ts >= after)
    with client.tail(f"{topic}.*", since=after) as tail:
        assert take(tail, 1) == rows(f"{topic}.a", first, "new")
        client.write(f"{topic}.b", "later")
        while (record := next(tail)).topic != f"{topic}.b":
            assert (record.data, record.seq > first) == ("new", True)
        assert record.seq == 1
    moment = datetime.datetime.fromtimestamp(after / 1000, datetime.UTC)
    with client.tail(f"{topic}.a", since=moment) as tail:
        assert take(tail, 1) == rows(f"{topic}.a", first, "new")
    with client.tail(f"{topic}.a", since=datetime.timedelta(hours=1)) as tail:
        assert take(tail, 1) == rows(f"{topic}.a", 1, "old")


def test_patterns_include_topics_that_are_made_later(client: Any, topic: str) -> None:
    client.write(f"{topic}.a", 1)
    with client.tail(f"{topic}.>", start="earliest") as tail:
        assert take(tail, 1) == rows(f"{topic}.a", 1, 1)
        client.write(f"{topic}.b.c", 2)
        assert take(tail, 1) == rows(f"{topic}.b.c", 1, 2)


def test_cursors_tell_where_to_go_on(client: Any, topic: str) -> None:
    client.write_many(f"{topic}.a", [1, 2, 3])
    with client.tail(f"{topic}.>", start="earliest") as tail:
        assert take(tail, 2) == rows(f"{topic}.a", 1, 1, 2)
        cursors = tail.cursors
    assert cursors == {f"{topic}.a": 2}
    client.write(f"{topic}.b", "while away")
    with client.tail(f"{topic}.>", cursors=cursors) as tail:
        found = sorted(take(tail, 2))
    assert found == rows(f"{topic}.a", 3, 3) + rows(f"{topic}.b", 1, "while away")


def test_a_topic_that_does_not_exist_and_nothing_to_follow(client: Any, topic: str) -> None:
    with pytest.raises(errors.TopicNotFound):
        next(client.tail(topic))
    with pytest.raises(errors.TopicNotFound):
        next(client.tail(topic, cursors={topic: 3}))
    with pytest.raises(ValueError, match="give a topic"):
        client.tail()


def test_a_tail_ends_when_all_its_topics_are_deleted(client: Any, topic: str) -> None:
    client.write(topic, 1)
    watch = client.watch(topic, start="earliest")
    assert isinstance(until(watch, answers.CaughtUp)[0], answers.Records)
    client.delete_topic(topic)
    assert isinstance(until(watch, answers.TopicEnded)[-1], answers.TopicEnded)
    assert list(watch) == []


def test_a_stream_that_is_forgotten_is_closed(client: Any, topic: str) -> None:
    client.write(topic, 1)

    def streams() -> int:
        return int(client.metrics()["sse_connections"])

    before = streams()
    for record in client.tail(topic, start="earliest"):
        assert (record.data, streams()) == (1, before + 1)
        break
    gc.collect()
    give_up = time.monotonic() + 60
    while streams() != before:
        assert time.monotonic() < give_up


def test_losses_are_raised_or_reported_and_following_continues(client: Any, topic: str) -> None:
    client.create_topic(topic, cap_records=2)
    client.write_many(topic, [1, 2, 3, 4])
    with client.tail(
        topic, start="earliest"
    ) as tail:  # from the earliest record there is: nothing is missing
        assert take(tail, 2) == rows(topic, 3, 3, 4)
    with client.tail(topic, start=0) as tail:
        with pytest.raises(RecordsLost) as caught:
            next(tail)
        assert (caught.value.tombstone.gap_from, caught.value.tombstone.gap_to) == (1, 2)
        assert tail.cursors == {topic: 2}
        assert take(tail, 2) == rows(topic, 3, 3, 4)
    told: list[Any] = []
    with client.tail(topic, start=0, on_lost=told.append) as tail:
        assert take(tail, 2) == rows(topic, 3, 3, 4)
    assert [gap.gap_to for gap in told] == [2]
    with client.watch(topic, start=0) as watch:
        assert isinstance(next(watch), answers.Tombstone)


def test_a_cut_connection_is_not_noticed_by_the_reader(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str
) -> None:
    client.create_topic(topic)
    with connect(proxy.url).tail(topic) as tail:
        found: list[Any] = []

        def read() -> None:
            while len(found) < 30:
                found.extend(take(tail, 1))

        watcher = threading.Thread(target=read, daemon=True)
        watcher.start()
        opened = proxy.connections
        for i in range(10):
            client.write_many(topic, [3 * i, 3 * i + 1, 3 * i + 2])
            if i % 3 == 1:
                proxy.cut()
        watcher.join(60)
        assert found == rows(topic, 1, *range(30)), (tail.cursors, proxy.connections)
        assert proxy.connections > opened


def test_interruptions_are_events_of_a_watch(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str
) -> None:
    client.write(topic, 1)
    with connect(proxy.url).watch(topic, start="earliest") as watch:
        until(watch, answers.CaughtUp)
        proxy.cut()
        assert "connection" in until(watch, answers.Interrupted)[-1].reason
        until(watch, answers.Resumed)
        client.write(topic, 2)
        assert until(watch, answers.Records)[-1].records[0].data == 2


def test_an_answer_that_was_lost_on_the_way_to_a_stream(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str
) -> None:
    client.write_many(topic, [1, 2, 3])
    proxy.lose_answers(2)  # of the POST, and of the first GET of the stream
    with connect(proxy.url).tail(topic, start="earliest") as tail:
        assert take(tail, 3) == rows(topic, 1, 1, 2, 3)


def test_the_first_events_of_a_stream_are_lost_on_the_way(
    proxy: CuttingProxy, connect: Connect, client: Any, topic: str
) -> None:
    client.create_topic(topic)
    proxy.swallow(b"retry:", b'"on its way"')
    with connect(proxy.url).tail(topic) as tail:
        client.write(topic, "on its way")  # the server has sent it, but the client has no id yet
        assert take(tail, 1) == rows(topic, 1, "on its way")


def test_two_members_of_a_group_share(client: Any, connect: Connect, server: TestServer, topic: str) -> None:
    client.create_topic(topic)
    found: list[Any] = []
    members = [connect(server.url).tail(topic, group="g", start="earliest", limit=1) for _ in range(2)]
    client.write_many(topic, range(20))

    def read(member: Any) -> None:
        for record in member:
            found.append(record.data)
            if len(found) == 20:
                break

    threads = [threading.Thread(target=read, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    while len(found) < 20:
        pass
    for member in members:
        member.close()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == list(range(20))
