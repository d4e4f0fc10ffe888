"""Every call of the client on a real server, sync and async: requests are correct, answers are typed."""

from __future__ import annotations

import datetime
import inspect
from typing import Any

import msgspec
import pytest

from topics import AsyncClient, Client
from topics.client import NewRecord, RecordsLost, Retries, errors
from topics.testing import TestServer


class Order(msgspec.Struct):
    item: str
    count: int = 1


def data(records: Any) -> list[Any]:
    return [record.data for record in records]


def test_a_topic_is_made_changed_and_deleted(client: Any, topic: str) -> None:
    made = client.create_topic(topic, durability="fsync", cap_records=10)
    assert (made.created, made.config.durability, made.config.cap_records) == (True, "fsync", 10)
    changed = client.update_topic(topic, cap_records=20)
    assert (changed.created, changed.config.durability, changed.config.cap_records) == (False, "fsync", 20)
    assert client.update_topic(topic, durable=False).config.durability == "disk"
    state = client.get_topic(topic)
    assert (state.topic, state.type, state.head_seq, state.count) == (topic, "log", 0, 0)
    client.write(topic, 1)
    with pytest.raises(errors.TopicNotEmpty):
        client.delete_topic(topic, if_empty=True)
    assert client.delete_topic(topic).deleted
    assert not client.delete_topic(topic).deleted
    with pytest.raises(errors.TopicNotFound) as caught:
        client.get_topic(topic)
    assert (caught.value.status, caught.value.code, caught.value.detail) == (
        404,
        "topic_not_found",
        {"topic": topic},
    )


def test_an_unknown_setting_is_refused_before_anything_is_sent(client: Any, topic: str) -> None:
    with pytest.raises(TypeError, match=r"no such setting: 'durabilty'; valid ones are .*durability"):
        client.create_topic(topic, durabilty="fsync")
    with pytest.raises(errors.TopicNotFound):
        client.get_topic(topic)
    client.create_topic(topic)
    with pytest.raises(TypeError, match="'cap'"):
        client.update_topic(topic, cap=1)
    with pytest.raises(TypeError, match="'ack_wait'"):
        client.create_consumer(topic, "c", ack_wait=1)


def test_lists_come_by_prefix_and_by_pattern_over_pages(client: Any, topic: str) -> None:
    names = [f"{topic}.{i}" for i in "abc"] + [f"{topic}.a.x"]
    for name in names:
        client.create_topic(name)
    assert [row.topic for row in client.topics(f"{topic}.", page_size=2)] == sorted(names)
    assert [row.topic for row in client.topics(pattern=f"{topic}.*", page_size=1)] == names[:3]
    assert [row.topic for row in client.topics(pattern=f"{topic}.a.>")] == [f"{topic}.a.x"]
    assert list(client.topics(f"{topic}.zzz")) == []


def test_all_that_a_record_can_have_comes_back(client: Any, topic: str) -> None:
    written = client.write(topic, {"item": "tea"}, tag="eu.tea", node="desk", meta={"v": 1}, ttl_ms=60_000)
    assert (written.first_seq, written.created, written.deduped) == (1, True, False)
    (record,) = client.read(topic).records
    assert (record.topic, record.seq, record.data, record.tag) == (topic, 1, {"item": "tea"}, "eu.tea")
    assert (record.node, record.meta) == ("desk", {"v": 1})
    assert record.to(Order) == Order("tea", 1)
    assert abs(record.time - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=5)


@pytest.mark.parametrize("value", [None, 0, "", [], {"a": [1, "ä", None]}, 2**63, 1.5, True])
def test_values_come_back(client: Any, topic: str, value: Any) -> None:
    client.write(topic, value)
    assert data(client.records(topic)) == [value]


def test_types_that_msgspec_knows_are_written_as_json(client: Any, topic: str) -> None:
    client.write_many(topic, [Order("tea"), NewRecord(Order("jam", 2), tag="x")])
    assert [record.to(Order) for record in client.records(topic)] == [Order("tea"), Order("jam", 2)]
    with pytest.raises(TypeError):
        client.write(topic, object())


def test_bytes_come_back_as_bytes(client: Any, topic: str) -> None:
    client.write(topic, b"\x00\xff", tag="raw")
    client.write_many(topic, [b"", bytearray(b"b")])
    assert data(client.records(topic)) == [b"\x00\xff", b"", b"b"]
    assert client.last(topic, tag="raw").data == b"\x00\xff"
    with pytest.raises(TypeError):
        client.write(topic, b"x", meta={"a": 1})


def test_a_key_writes_once_and_the_client_makes_one_for_each_write(client: Any, topic: str) -> None:
    assert not client.write(topic, 1, idempotency_key="ä key").deduped
    again = client.write(topic, 2, idempotency_key="ä key")
    assert (again.deduped, again.first_seq) == (True, 1)
    assert not client.write(topic, 3, idempotency_key="plain").deduped
    assert client.write(topic, 3, idempotency_key="plain").deduped
    assert not client.write(topic, 4).deduped
    assert not client.write(topic, 4, idempotent=False).deduped
    assert data(client.records(topic)) == [1, 3, 4, 4]


def test_a_write_many_is_one_write(client: Any, topic: str) -> None:
    written = client.write_many(topic, [1, NewRecord(2, tag="t"), 3], node="n", return_seqs=True)
    assert (written.count, written.seqs) == (3, [1, 2, 3])
    assert [record.node for record in client.records(topic)] == ["n"] * 3
    with pytest.raises(errors.InvalidRequest):
        client.write_many(topic, [])


def test_conditions(client: Any, topic: str) -> None:
    client.write(topic, 1, if_last_seq=0, tag="a")
    with pytest.raises(errors.WrongLastSeq) as caught:
        client.write(topic, 2, if_last_seq=0)
    assert caught.value.detail["actual"] == 1
    assert "read" in caught.value.advice
    client.write(topic, 2, if_tag_last_seq=("a", 1))


def test_a_write_creates_only_if_it_may(client: Any, topic: str) -> None:
    with pytest.raises(errors.TopicNotFound):
        client.write(topic, 1, create=False)
    client.write(topic, 1, config={"cap_records": 5})
    assert client.get_topic(topic).config.cap_records == 5


def test_reading_by_pages_and_by_filters(client: Any, topic: str) -> None:
    client.write_many(topic, [NewRecord(i, tag="even" if i % 2 == 0 else "odd") for i in range(10)])
    page = client.read(topic, limit=3)
    assert (data(page.records), page.next_from_seq, page.caught_up) == ([0, 1, 2], 3, False)
    assert data(client.read(topic, page.next_from_seq, limit=2).records) == [3, 4]
    assert data(client.records(topic, page_size=3)) == list(range(10))
    assert data(client.records(topic, 7)) == [7, 8, 9]
    assert data(client.records(topic, tag="even", page_size=2)) == [0, 2, 4, 6, 8]
    assert data(client.records(topic, include_data=False)) == [None] * 10
    items = client.records(topic, page_size=3)
    assert [next(items).data for _ in range(4)] == [0, 1, 2, 3]
    assert items.cursors == {topic: 4}


def test_reading_since_a_time(client: Any, topic: str) -> None:
    client.write(topic, "old")
    after = client.last(topic).ts + 1
    while client.write(topic, "new") and client.last(topic).ts < after:
        pass
    assert set(data(client.records(topic, since=after))) == {"new"}
    moment = datetime.datetime.fromtimestamp(after / 1000, datetime.UTC)
    assert set(data(client.records(topic, since=moment))) == {"new"}
    assert "old" in data(client.records(topic, since=datetime.timedelta(hours=1)))


def test_own_records_can_be_left_out(client: Any, topic: str) -> None:
    client.write(topic, 1, node="me")
    client.write(topic, 2, node="you")
    assert data(client.records(topic, not_from="me")) == [2]
    assert data(client.records(topic, not_from=["me", "you"])) == []


def test_a_wait_ends_with_a_write(client: Any, topic: str, server: TestServer) -> None:
    client.create_topic(topic)
    assert client.read(topic, wait_ms=1).records == []
    with server.client() as other:
        other.write(topic, 1)
    assert data(client.read(topic, wait_ms=30_000).records) == [1]


def test_losses_are_raised_or_reported_and_reading_continues(client: Any, topic: str) -> None:
    client.create_topic(topic, cap_records=2)
    client.write_many(topic, [1, 2, 3, 4])
    # Reading from the earliest record, nothing is missing.
    assert data(client.records(topic)) == [3, 4]
    items = client.records(topic, 0)
    with pytest.raises(RecordsLost) as caught:
        next(items)
    lost = caught.value.tombstone
    assert (lost.topic, lost.gap_from, lost.gap_to, lost.reason) == (topic, 1, 2, "cap")
    assert items.cursors == {topic: 2}
    assert data(items) == [3, 4]
    told: list[Any] = []
    assert data(client.records(topic, 0, on_lost=told.append)) == [3, 4]
    assert told == [lost]
    assert client.read(topic).tombstone.gap_to == 2


def test_the_newest(client: Any, topic: str) -> None:
    client.create_topic(topic)
    assert client.last(topic) is None
    client.write_many(
        topic, [NewRecord(1, tag="eu.tea"), NewRecord(2, tag="eu.jam"), NewRecord(3, tag="us.tea"), 4, 5]
    )
    client.delete(topic, seqs=[5])
    assert client.last(topic).data == 4
    assert client.last(topic, tag="eu.*").data == 2
    assert client.last(topic, subject="*.tea").data == 3
    assert client.last(topic, tag="none") is None
    assert sorted(data(client.last_by_tag(topic, page_size=1))) == [1, 2, 3]
    assert data(client.last_by_tag(topic, subject="eu.>")) == [1, 2]
    assert [(row.tag, row.count) for row in client.tags(topic, page_size=2)] == [
        ("eu.jam", 1),
        ("eu.tea", 1),
        ("us.tea", 1),
    ]
    assert [row.tag for row in client.tags(topic, "us.")] == ["us.tea"]


def test_the_newest_after_many_deletes(client: Any, topic: str) -> None:
    client.write_many(topic, range(300))
    client.delete(topic, seqs=list(range(2, 301)))
    assert client.last(topic).data == 0
    client.purge(topic)
    assert client.last(topic) is None


def test_deleting(client: Any, topic: str) -> None:
    client.write_many(topic, [NewRecord(i, tag="even" if i % 2 == 0 else "odd") for i in range(10)])
    assert client.delete(topic, seqs=[1, 2]).deleted == 2
    assert client.delete(topic, before_seq=5).deleted == 2
    assert client.delete(topic, match="even", keep=1).deleted == 2
    assert data(client.records(topic)) == [5, 7, 8, 9]
    assert client.delete(topic, seqs=[6], erase=True).count == 3
    gone = client.deleted_ranges(topic, page_size=1)
    assert [(row.first_seq, row.last_seq) for row in gone] == [(1, 7)]
    client.write_many(topic, [NewRecord(i, tag=tag) for i, tag in enumerate(("eu.tea", "eu.jam", "us.tea"))])
    assert client.delete(topic, subject="eu.>", keep=1).deleted == 0
    assert client.delete(topic, subject="*.tea", match="eu*").deleted == 1
    assert [(row.first_seq, row.last_seq) for row in client.deleted_ranges(topic, 4)] == [(5, 7), (11, 11)]
    with pytest.raises(errors.InvalidRequest):
        client.delete(topic, subject="eu..tea")
    with pytest.raises(errors.InvalidRequest):
        client.delete(topic, subject=5)
    for wrong in ({"subject": b"eu.>"}, {"match": b"eu.tea"}):
        with pytest.raises(TypeError, match="must be a str"):
            client.delete(topic, **wrong)
    assert client.delete(topic, before_seq=14, subject="*.*").deleted == 2
    assert client.purge(topic, keep=1).count == 1
    assert client.purge(topic, erase=True).count == 0
    assert client.get_topic(topic).head_seq == 13
    with pytest.raises(errors.InvalidRequest):
        client.delete(topic)


def test_routers(client: Any, topic: str) -> None:
    made = client.create_router(f"{topic}->copy", topic, f"{topic}.copy", filter="x*")
    assert (made.created, made.source, made.guarantee) == (True, topic, "at_least_once")
    client.write_many(topic, [NewRecord(1, tag="x1"), NewRecord(2, tag="y")])
    assert data(client.records(f"{topic}.copy")) == [1]
    assert client.get_router(made.router).forwarded_total == 1
    assert [row.router for row in client.routers(topic, page_size=1)] == [made.router]
    assert [row.router for row in client.routers(source=topic)] == [made.router]
    with pytest.raises(errors.RouterCycle):
        client.create_router(f"{topic}-back", f"{topic}.copy", topic)
    assert client.delete_router(made.router).deleted
    with pytest.raises(errors.RouterNotFound):
        client.get_router(made.router)


def test_the_server_tells_how_it_is(client: Any) -> None:
    assert client.health().status == "ok"
    assert client.ready().status == "ready"
    assert client.wait_ready().wal_replay_complete
    assert client.metrics()["ready"] is True
    assert "topics_ready 1" in client.metrics_text()


def test_names_are_escaped(client: Any) -> None:
    for name in ("no such/name", "..", "a?b", "ä", "a%2Fb"):
        with pytest.raises(errors.TopicNotFound):
            client.get_topic(name)
    with pytest.raises(errors.InvalidRequest):
        client.create_topic("no such/name")


def test_address_and_key_come_from_the_environment(
    connect: Any, server: TestServer, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    monkeypatch.setenv("TOPICS_URL", server.url.removeprefix("http://"))
    monkeypatch.delenv("TOPICS_TOKEN", raising=False)
    with pytest.raises(errors.Unauthorized) as caught:
        connect(None, token=None).write(topic, 1)
    assert "TOPICS_TOKEN" in caught.value.advice
    monkeypatch.setenv("TOPICS_TOKEN", "root")
    assert connect(None, token=None).write(topic, 1).first_seq == 1
    with pytest.raises(errors.Forbidden):
        connect(None, token="reader").write(topic, 1)


def test_an_invalid_address_is_refused_at_once(connect: Any) -> None:
    for url in ("ftp://host", "http://", "http://host/?q=1"):
        with pytest.raises(ValueError, match="is not the URL"):
            connect(url)
    with pytest.raises(ValueError, match="token"):
        connect("http://host", token="a\nb")


def test_an_unreachable_server_is_reported_with_advice(connect: Any) -> None:
    client = connect("http://127.0.0.1:1", retries=Retries(for_s=0))
    with pytest.raises(errors.Disconnected) as caught:
        client.write("t", 1)
    assert caught.value.outcome == "none"
    assert "topics serve" in caught.value.advice


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in vars(kind).items()
            if callable(method) and not name.startswith("_")
        }

    assert calls(Client) == calls(AsyncClient)
    for name in calls(Client):
        assert getattr(Client, name).__doc__ == getattr(AsyncClient, name).__doc__, name
        assert getattr(Client, name).__doc__, name
