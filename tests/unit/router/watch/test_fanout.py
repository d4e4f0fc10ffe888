"""Goal: whatever comes first, a page or a read, a watcher gets each record once and in order, and a slow one costs
only itself.

Method: shipped fronts and shards; the test controls the messages between them and the clock; every short order of
events is tried.
"""

from __future__ import annotations

import itertools

import pytest

from router.watch import fanout as fanout_module
from router.watch.fanout import READS_PER_WATCHER
from tests.support import length
from tests.support.faults import fault
from tests.support.watch_rig import Client, Town
from topics.link import wire
from topics.link.watch import FeedOptions
from topics.protocols.http.event_stream import EventStream
from topics.protocols.watchers import RETRY_US, Subscription

SMALL_PAGES = FeedOptions(limit=2)


def stream_of(client: Client) -> EventStream:
    assert isinstance(client.stream, EventStream)
    return client.stream


def sub_of(client: Client, topic: str = "t") -> Subscription:
    return stream_of(client).subs[topic]


def asked(town: Town, op: int) -> list[wire.Request]:
    """Requests that the front has sent and no shard has received yet."""
    town.collect()
    requests = [
        request for _, _, parts in town.up for request in wire.read_requests(bytes(parts[0]), *parts[1:])
    ]
    return [request for request in requests if request.op == op]


def check_whole(client: Client, count: int, topic: str = "t", first: int = 1) -> None:
    assert client.seqs(topic) == list(range(first, count + 1))
    told = [frame for frame in client.frames if frame.event == "caught-up" and frame.data["topic"] == topic]
    assert told and told[-1].data["head_seq"] == count
    last = [f.event for f in client.frames if f.event in ("record", "caught-up") and f.data["topic"] == topic]
    assert last[-1] == "caught-up", "what is complete is said to be"


# ---- register, read, switch


def steps(town: Town, topic: str) -> dict[str, object]:
    return {
        "write": lambda: town.write(1, topic),
        "up": town.carry_up,
        "down": town.carry_down,
    }


@pytest.mark.parametrize("start", [0, 2, 3], ids=["from the beginning", "from the middle", "from the head"])
def test_no_order_of_pages_and_reads_loses_or_repeats_anything(start: int) -> None:
    town = Town()
    some = length.pick(short=8, long=1)  # and not 3: all orders would end alike
    orders = itertools.islice(
        itertools.product(("write", "up", "down"), repeat=5), length.turn(some), None, some
    )
    for number, order in enumerate(orders):
        topic = f"t{number}"
        town.write(3, topic)
        client = town.front.stream({topic: start}, options=SMALL_PAGES)
        for name in order:
            step = steps(town, topic)[name]
            assert callable(step)
            step()
        town.rest()
        check_whole(client, 3 + order.count("write"), topic, start + 1)
        client.leave()
        town.rest()


def test_no_order_loses_anything_for_one_who_is_full_now_and_then() -> None:
    town = Town()
    for number, order in enumerate(
        itertools.product(("write", "round", "fill", "drain"), repeat=length.pick(short=3, long=4))
    ):
        topic = f"t{number}"
        town.write(1, topic)
        slow, quick = (town.front.stream({topic: 0}, options=SMALL_PAGES) for _ in range(2))
        for name in order:
            if name == "write":
                town.write(1, topic)
            elif name == "fill":
                slow.is_full = True
            elif name == "drain":
                slow.drain()
            else:
                town.carry_up()
                town.carry_down()
        town.rest()
        check_whole(quick, 1 + order.count("write"), topic)
        slow.drain()
        town.rest()
        check_whole(slow, 1 + order.count("write"), topic)
        for client in (slow, quick):
            client.leave()


@fault(
    "worker", "a worker dies at any moment of a watch", "streams go on from where they are when it is back"
)
def test_no_moment_of_a_restart_loses_or_repeats_anything() -> None:
    for order in itertools.product(("write", "up", "down", "restart"), repeat=3):
        if "restart" not in order:
            continue
        town = Town()
        town.write(3)
        client = town.front.stream(options=SMALL_PAGES)
        for name in order:
            if name == "restart":
                town.disks[0].sync_all()
                town.kill()
                town.start()
            else:
                step = steps(town, "t")[name]
                assert callable(step)
                step()
        town.advance(2_000_000)
        check_whole(client, 3 + order.count("write"))


def test_a_late_watcher_reads_alone_and_then_shares_the_feed() -> None:
    town = Town()
    town.write(3)
    first = town.front.stream()
    town.rest()
    second = town.front.stream()
    assert [len(asked(town, op)) for op in (wire.FOLLOW, wire.WATCH_READ)] == [0, 1]
    town.rest()
    town.write()
    town.rest()
    check_whole(first, 4)
    check_whole(second, 4)
    assert len(town.rig.core.watch.feeds) == 1


def test_all_who_watch_one_topic_get_the_same_bytes() -> None:
    town = Town()
    town.write()
    clients = [town.front.stream() for _ in range(4)]
    many = town.front.stream({"t": 0, "u": 0})
    town.write(1, "u")
    town.rest()
    town.write(2)
    town.rest()
    texts = [client.writes[-1] for client in clients]
    assert all(text is texts[0] for text in texts)
    assert texts[0] is not many.writes[-1]
    assert [frame.event for frame in clients[0].frames[-2:]] == ["record", "caught-up"]


def test_ids_name_all_topics_from_the_first_frame_on() -> None:
    town = Town()
    for topic in ("a", "b", "c"):
        town.write(2, topic)
    town.front.stream({"a": 2, "b": 2, "c": 2})
    town.rest()
    client = town.front.stream({"a": 2, "b": 2, "c": 1})  # whose feeds are there already
    town.rest()
    assert [set(frame.cursors) for frame in client.frames[1:]] == [{"a", "b", "c"}] * (len(client.frames) - 1)
    assert client.last.cursors == {"a": 2, "b": 2, "c": 2}


def test_one_who_filters_everything_out_is_caught_up_all_the_same() -> None:
    town = Town()
    options = FeedOptions(limit=2, nodes=("me",))
    town.write()
    client = town.front.stream(options=options)
    town.rest()
    client.writes.clear()
    for node in ("you", "you", "me"):
        town.rig.receive(wire.WRITE, "t", {"records": [{"data": 1}], "node": node})
    town.rest()
    assert [frame.event for frame in client.frames] == ["record", "caught-up"]
    assert client.last.data["head_seq"] == 4


@pytest.mark.parametrize("start", [0, 2, 5])
def test_strong_watchers_get_all_of_what_was_not_synced_when_they_came(start: int) -> None:
    town = Town()
    town.rig.put()
    town.rig.is_syncing = False
    town.write(5)
    strong = FeedOptions(limit=2, strong=True)
    clients = [town.front.stream({"t": start}, options=strong) for _ in range(2)]
    town.rest()
    assert [client.seqs() for client in clients] == [[], []]
    town.rig.is_syncing = True
    town.advance(2_000_000)
    town.write(3)
    town.advance(2_000_000)
    for client in clients:
        check_whole(client, 8, first=start + 1)
    assert len(town.rig.core.watch.feeds) == 1


# ---- slow watchers


def test_a_full_watcher_takes_nothing_and_then_all_at_once() -> None:
    town = Town()
    town.write()
    slow, quick = town.front.stream(), town.front.stream()
    town.rest()
    slow.is_full = True
    for _ in range(10):
        town.write()
        town.rest()
    assert (slow.seqs(), len(quick.named("record"))) == ([1], 11)
    assert asked(town, wire.WATCH_READ) == []
    slow.drain()
    town.rest()
    check_whole(slow, 11)
    assert len(slow.named("record")) == 2


def test_a_read_that_comes_to_a_full_watcher_is_written_and_no_other_follows() -> None:
    town = Town()
    town.write(8)
    client = town.front.stream(options=SMALL_PAGES)
    town.carry_up()
    town.carry_down()
    client.is_full = True
    town.rest()
    assert client.seqs() == [1, 2]
    client.drain()
    town.rest()
    check_whole(client, 8)


def test_a_watcher_has_few_reads_under_way() -> None:
    town = Town()
    names = [f"t{i}" for i in range(3 * READS_PER_WATCHER)]
    for name in names:
        town.write(2, name)
    client = town.front.stream(dict.fromkeys(names, 0))
    town.carry_up()
    town.carry_down()
    assert len(asked(town, wire.WATCH_READ)) == READS_PER_WATCHER
    town.rest()
    for name in names:
        check_whole(client, 2, name)
    assert stream_of(client).reads == 0


def test_reads_of_topics_that_nobody_wants_any_more_make_room_for_others() -> None:
    town = Town()
    names = [f"t{i}" for i in range(3 * READS_PER_WATCHER)]
    for name in names:
        town.write(2, name)
    client = town.front.stream(dict.fromkeys(names, 0))
    town.carry_up()
    town.carry_down()
    fanout = town.front.streams.fanout
    for name in names[:READS_PER_WATCHER]:
        assert sub_of(client, name).state == "reading"
        fanout.unsubscribe(stream_of(client), name)
    town.rest()
    for name in names[READS_PER_WATCHER:]:
        check_whole(client, 2, name)


def test_pages_that_were_asked_for_are_bounded_and_everybody_has_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    town = Town()
    town.write(20)
    options = FeedOptions(limit=2, max_bytes=1000)
    monkeypatch.setattr(fanout_module, "READING_BYTES_MAX", 2500)
    clients = [town.front.stream(options=options) for _ in range(8)]
    town.carry_up()
    town.carry_down()
    assert len(asked(town, wire.WATCH_READ)) == 3
    gone = clients.pop()
    gone.leave()
    for _ in range(200):
        assert town.front.streams.fanout._reading_bytes <= 3000
        if not town.carry_down() and not town.carry_up():
            break
    town.rest()
    for client in clients:
        check_whole(client, 20)
    assert town.front.streams.fanout._reading_bytes == 0


@fault("client", "a client takes nothing for 30 s", "its stream ends with `slow_consumer`; its session stays")
def test_a_client_that_takes_nothing_for_long_is_let_go() -> None:
    town = Town()
    town.write()
    stuck, slow = town.front.stream(), town.front.stream(wid="other")
    town.rest()
    for client in (stuck, slow):
        client.is_full = True
    town.write()
    town.advance(20_000_000)
    slow.drain()
    slow.is_full = True
    town.write()
    town.advance(10_500_000)
    assert (stuck.is_closed, slow.is_closed) == (True, False)
    assert (stuck.last.event, stuck.last.data["code"]) == ("error", "slow_consumer")
    slow.drain()
    town.advance(60_000_000)
    assert not slow.is_closed
    check_whole(slow, 3)


def test_a_full_client_of_a_silent_topic_is_not_blamed() -> None:
    town = Town()
    town.write()
    client = town.front.stream()
    town.rest()
    client.is_full = True
    town.advance(120_000_000)
    assert not client.is_closed


# ---- shards come and go


def test_a_stream_waits_for_a_shard_that_is_starting() -> None:
    town = Town()
    town.write(2)
    begin = town.front.prepare()
    town.kill()
    client = begin()
    town.advance(5_000_000)
    assert [frame.event for frame in client.frames] == ["retry"]
    town.start()
    town.rest()
    check_whole(client, 2)


def test_a_shard_that_cannot_answer_is_asked_again_less_and_less_often() -> None:
    town = Town()
    town.write(2)
    town.rig.core.progress = 0.5
    client = town.front.stream()
    town.advance(3_000_000)
    numbers = town.front.core._next_id
    assert 5 <= numbers <= 9
    town.rig.core.progress = 1.0
    town.advance(1_000_000)
    check_whole(client, 2)


@fault("worker", "a worker dies again while it is being followed again", "it is followed once")
def test_a_shard_that_dies_while_it_is_followed_again_is_followed_once() -> None:
    for pause_us in (0, 10_000, 60_000):
        town = Town()
        town.write(2)
        town.disks[0].sync_all()
        client = town.front.stream()
        town.kill()  # with the FOLLOW in flight
        town.start()
        town.carry_up()  # followed, and the answer is in flight
        town.down.rotate()
        held, town.down = town.down, type(town.down)()
        town.now += RETRY_US
        for _, _, action in sorted(town._timers):
            action()  # as if the answer took longer than the pause before the next attempt
        town._timers.clear()
        town.write()
        town.down = held + town.down
        town.rest()
        town.advance(pause_us)
        check_whole(client, 3)
        assert len(town.rig.core.watch.feeds) == 1


@fault("worker", "a worker dies while a stream of many topics reads", "the stream goes on when it is back")
def test_many_topics_that_are_behind_when_their_shard_dies() -> None:
    town = Town()
    names = [f"t{i}" for i in range(600)]
    for name in names:
        town.rig.receive(wire.WRITE, name, {"records": [{"data": 1}]})
    town.rig.rest()
    town.disks[0].sync_all()
    client = town.front.stream(dict.fromkeys(names, 0))
    town.carry_up()
    town.carry_down()
    assert len(stream_of(client).behind) > 500
    town.kill()
    assert stream_of(client).reads == 0
    town.start()
    town.advance(2_000_000)
    told = [(frame.event, frame.data["topic"]) for frame in client.frames[1:]]
    assert sorted(told) == sorted((event, name) for name in names for event in ("caught-up", "record"))


def test_a_shard_that_has_too_much_to_do_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town()
    town.write(4)
    first = town.front.stream(options=SMALL_PAGES)
    town.carry_up()
    town.carry_down()  # its read is in flight
    monkeypatch.setattr("router.pending.PENDING_MAX", 1)
    others = [town.front.stream(wid=f"w{i}") for i in range(3)]
    monkeypatch.undo()
    town.advance(1_000_000)
    for client in [first, *others]:
        check_whole(client, 4)
