"""Goal: a stream follows the topics that match its patterns, now and later, through drops, creations and restarts;
groups share them.

Method: shipped fronts and shards; the test controls the messages between them and the clock.
"""

from __future__ import annotations

import pytest

from router.watch import fanout as fanout_module
from tests.support.faults import fault
from tests.support.watch_rig import Client, Town
from topics.link import wire
from topics.link.watch import FeedOptions
from topics.protocols.http.event_stream import EventStream
from workers.watch.feeds import REJOIN_MS

ANY = ["a.>"]


def events(client: Client, topic: str) -> list[str]:
    return [
        f.event for f in client.frames if f.event not in ("retry", "error", "hb") and f.data["topic"] == topic
    ]


def drop(town: Town, topic: str) -> None:
    town.shard_for(topic).drop(topic)


# ---- topics that come and go


def test_topics_that_come_later_join_from_their_first_record() -> None:
    town = Town(shards=3)
    client = town.front.stream(patterns=ANY)
    town.rest()
    for i in range(9):
        town.write(2, f"a.{i}")
        town.write(2, f"b.{i}")
    town.rest()
    assert [client.seqs(f"a.{i}") for i in range(9)] == [[1, 2]] * 9
    assert not any(client.seqs(f"b.{i}") for i in range(9))
    assert set(client.last.cursors) == {f"a.{i}" for i in range(9)}


def test_a_late_watcher_gets_topics_that_others_have_found() -> None:
    town = Town()
    first = town.front.stream(patterns=ANY)
    town.write(1, "a.1")
    town.rest()
    second = town.front.stream(patterns=ANY)
    town.write(1, "a.2")
    town.rest()
    for client in (first, second):
        assert [client.seqs(name) for name in ("a.1", "a.2")] == [[1], [1]]
    assert len(town.rig.core.watch._name_watches) == 1
    first.leave()
    town.rest()
    second.leave()
    town.rest()
    assert len(town.rig.core.watch._name_watches) == 0


def test_a_topic_that_was_gone_before_anybody_saw_it_is_not_mentioned() -> None:
    town = Town()
    client = town.front.stream(patterns=ANY)
    town.rest()
    town.write(1, "a.1")
    town.carry_down()  # it is found
    drop(town, "a.1")
    town.rest()
    assert [frame.event for frame in client.frames] == ["retry"]
    town.write(1, "a.1")
    town.rest()
    assert client.seqs("a.1") == [1]


def test_a_topic_that_is_made_again_is_all_new() -> None:
    town = Town()
    client = town.front.stream(patterns=ANY)
    town.write(3, "a.1")
    town.rest()
    drop(town, "a.1")
    town.rest()
    town.write(2, "a.1")
    town.rest()
    assert events(client, "a.1") == ["record", "caught-up", "topic-deleted", "record", "caught-up"]
    assert client.named("record")[-1].seqs == [1, 2]


@pytest.mark.parametrize("full", [False, True], ids=["live", "behind"])
def test_a_topic_that_is_dropped_and_made_again_at_once_is_followed_on(full: bool) -> None:
    town = Town()
    clients = [town.front.stream(patterns=ANY) for _ in range(2)]
    town.write(3, "a.1")
    town.rest()
    clients[1].is_full = full
    town.rig.receive(wire.DROP_TOPIC, "a.1")
    town.rig.receive(wire.WRITE, "a.1", {"records": [{"data": 1}]})
    town.rest()
    if full:
        clients[1].drain()
    town.write(1, "a.1")
    town.rest()
    for client in clients:
        assert events(client, "a.1")[2] == "topic-deleted"
        assert [seq for frame in client.named("record")[1:] for seq in frame.seqs] == [1, 2]


@pytest.mark.parametrize("state", ["waiting", "reading", "behind", "live"])
def test_a_topic_that_is_deleted_in_any_state_is_said_to_be_and_the_stream_ends(state: str) -> None:
    town = Town()
    town.write(4)
    client = town.front.stream(options=FeedOptions(limit=2))
    if state != "waiting":
        town.carry_up()
        town.carry_down()
    if state == "behind":
        client.is_full = True
        town.carry_up()
        town.carry_down()
    if state == "live":
        town.rest()
    assert isinstance(client.stream, EventStream)
    assert client.stream.subs["t"].state == state
    drop(town, "t")
    town.rest()
    assert client.is_closed
    assert (client.last.event, client.last.cursors) == ("topic-deleted", {"t": 0})
    assert len(client.named("topic-deleted")) == 1
    assert len(town.rig.core.watch.feeds) == 0


def test_one_topic_s_end_is_not_the_stream_s() -> None:
    town = Town()
    town.write(1, "a")
    town.write(1, "b")
    client = town.front.stream({"a": 0, "b": 0})
    town.rest()
    drop(town, "a")
    town.rest()
    town.write(1, "b")
    town.rest()
    assert (client.seqs("b"), client.is_closed) == ([1, 2], False)


def test_a_stream_follows_only_so_many_topics_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout_module, "STREAM_TOPICS_MAX", 3)
    town = Town()
    client = town.front.stream(patterns=ANY)
    for i in range(6):
        town.write(1, f"a.{i}")
        town.rest()
    (error,) = client.named("error")
    assert (error.data["code"], error.data["topics"], error.id) == (429, ["a.3"], None)
    assert not client.is_closed
    assert [client.seqs(f"a.{i}") for i in range(4)] == [[1], [1], [1], []]


# ---- restarts


@fault("worker", "a worker dies with topics that were made meanwhile", "patterns find them when it is back")
def test_patterns_go_on_after_a_restart() -> None:
    town = Town(shards=2)
    client = town.front.stream(patterns=ANY)
    town.write(1, "a.1")
    town.rest()
    for shard in range(2):
        town.disks[shard].sync_all()
        town.kill(shard)
        town.start(shard)
    for i in range(2, 6):
        town.write(1, f"a.{i}")
    town.rest()
    assert [client.seqs(f"a.{i}") for i in range(1, 6)] == [[1]] * 5


def test_topics_dropped_during_an_outage_are_gone_after_the_restart() -> None:
    town = Town()
    client = town.front.stream(patterns=ANY)
    town.write(1, "a.1")
    town.rest()
    drop(town, "a.1")
    town.rig.core.close()
    town.kill()
    town.start()
    town.rest()
    assert events(client, "a.1") == ["record", "caught-up", "topic-deleted"]


def test_a_topic_that_a_client_has_let_go_does_not_come_back_with_the_shard() -> None:
    town = Town()
    client = town.front.stream(patterns=ANY)
    for name in ("a.1", "a.2"):
        town.write(1, name)
    town.rest()
    assert isinstance(client.stream, EventStream)
    town.front.streams.fanout.unsubscribe(client.stream, "a.1")
    town.disks[0].sync_all()
    town.kill()
    town.start()
    for name in ("a.1", "a.2"):
        town.write(1, name)
    town.rest()
    assert (client.seqs("a.1"), client.seqs("a.2")) == ([1], [1, 2])


# ---- groups


def dealt(*clients: Client) -> list[int]:
    return sorted(seq for client in clients for seq in client.seqs(is_shared=True))


def test_members_of_a_group_share_a_topic_through_any_front() -> None:
    town = Town(fronts=2)
    town.write(4)
    clients = [front.stream(group="g", wid=f"w{i}") for i, front in enumerate(town.fronts * 2)]
    town.rest()
    for _ in range(20):
        town.write(3)
        town.rest()
    assert dealt(*clients) == list(range(1, 65))
    assert all(client.seqs(is_shared=True) for client in clients)


def test_a_member_that_is_full_gets_no_more_and_the_others_do() -> None:
    town = Town()
    town.write()
    clients = [town.front.stream(group="g") for _ in range(2)]
    town.rest()
    clients[0].is_full = True
    before = clients[0].seqs(is_shared=True)
    for _ in range(20):
        town.write()
        town.rest()
    assert clients[0].seqs(is_shared=True) == before
    assert len(dealt(*clients)) >= 19  # except for two pages that wait here for room
    clients[0].drain()
    for _ in range(4):
        town.write()
        town.rest()
    assert dealt(*clients) == list(range(1, 26))


def test_unwritten_records_of_a_full_member_go_to_the_others() -> None:
    town = Town()
    town.write()
    slow = town.front.stream(group="g")
    town.rest()
    slow.is_full = True
    for _ in range(2):
        town.write()
        town.rest()
    slow.leave()
    other = town.front.stream(group="g")
    town.write()
    town.rest()
    assert (slow.seqs(), other.seqs()) == ([1], [2, 3, 4])


def test_unwritten_records_of_a_member_that_left_go_to_the_others() -> None:
    town = Town()
    town.write()
    leaves = town.front.stream(group="g")
    town.rest()
    town.write()  # in flight
    leaves.leave()
    other = town.front.stream(group="g", wid="other")
    town.rest()
    assert (leaves.seqs(), other.seqs()) == ([1], [2])


@fault("worker", "a worker dies that deals to a group", "the group goes on where its members know it to be")
def test_a_group_goes_on_after_a_restart() -> None:
    town = Town()
    town.write()
    clients = [town.front.stream(group="g", wid=f"w{i}") for i in range(2)]
    town.advance(2_000_000)
    for _ in range(6):
        town.write()
        town.rest()
    town.disks[0].sync_all()
    town.kill()
    town.start()
    town.write()
    town.advance((REJOIN_MS + 1) * 1000)
    assert dealt(*clients) == list(range(1, 9))


def test_a_member_that_begins_at_the_end_does_not_move_a_group_that_is_behind() -> None:
    """Its requested start is not the group's position."""
    town = Town()
    town.write(2)
    first = town.front.stream(group="g")
    town.rest()
    first.leave()
    town.write(5)
    town.advance(2_000_000)
    town.disks[0].sync_all()
    town.kill()
    town.start()
    late = town.front.stream({"t": 7}, group="g", wid="late")
    town.advance((REJOIN_MS + 1) * 1000)
    assert late.seqs() == [3, 4, 5, 6, 7]
