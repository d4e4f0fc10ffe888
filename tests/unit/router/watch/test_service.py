"""Goal: streams have timely heartbeats, their positions are saved, their caps are kept, and each ends with one
reason, which it sends.

Method: shipped fronts and shards; the test controls the messages between them and the clock.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.watch.service import HEARTBEAT_TICK_US, SAVE_EVERY_US
from tests.support.faults import fault
from tests.support.watch_rig import PLAIN, Client, Front, Town
from topics.api.api_keys import parse_keys
from topics.link import event_ids, wire
from topics.link.watch import ID_TOPICS_MAX, CreateSession, SessionSpec, encode
from topics.protocols.http.endpoints.watch import OPEN_WAIT_US
from topics.protocols.http.event_stream import MOVED_MAX, EventStream

S = 1_000_000


def stream_of(client: Client) -> EventStream:
    assert isinstance(client.stream, EventStream)
    return client.stream


def make(town: Town, wid: str = "w", patterns: list[str] | None = None, **cursors: int) -> None:
    cursors = cursors if cursors or patterns else {"t": 0}
    for name in cursors:
        if name not in town.rig.core.engine.shard.state.published:
            town.rig.put(name)
    spec = SessionSpec(PLAIN, 15_000, list(cursors), patterns or [])
    wish = CreateSession(wid, b"", spec, cursors)
    shard = town.front.streams.fanout.shard_of(wid)
    town.front.core.ask(shard, wire.SESSION, 0, b"", b"", encode(wish), 0, lambda reply: None)
    town.rest()


def stored(town: Town, wid: str = "w") -> dict[str, int]:
    return town.rig.core.watch.sessions._sessions[wid].cursors


def opened(town: Town, front: Front | None = None, wid: str = "w", last_id: bytes = b"") -> Client:
    answers = (front or town.front).open(wid, last_event_id=last_id)
    town.rest()
    client = answers.begin()
    town.rest()
    return client


# ---- heartbeats


def beats(town: Town, client: Client, until_us: int, step_us: int = 50_000) -> list[int]:
    """When heartbeats were written."""
    times: list[int] = []
    count = len(client.named("hb"))
    while town.now < until_us:
        town.advance(step_us)
        if len(client.named("hb")) > count:
            count = len(client.named("hb"))
            times.append(town.now)
    return times


def test_a_silent_stream_is_heard_of_in_its_own_time() -> None:
    town = Town()
    town.write()
    client = town.front.stream(heartbeat_ms=1000)
    town.rest()
    times = beats(town, client, 10 * S)
    assert times == [i * S for i in range(1, 11)]
    assert client.last.data == town.clock.wall_ms()


def test_long_heartbeats_share_their_ticks() -> None:
    town = Town()
    town.write()
    clients = []
    for _ in range(5):
        clients.append(town.front.stream(heartbeat_ms=5000, wid=f"w{len(clients)}"))
        town.advance(40_000)
    starts = len(town._timers)
    assert starts < 5 + 4
    for client in clients:
        client.writes.clear()
    times = {tuple(beats_of) for beats_of in [beats(town, clients[0], 12 * S)]}
    (at,) = times
    assert all(time % HEARTBEAT_TICK_US == 0 for time in at) and len(at) == 2
    assert [len(client.named("hb")) for client in clients] == [2] * 5


def test_no_heartbeat_follows_what_was_just_written() -> None:
    town = Town()
    town.write()
    client = town.front.stream(heartbeat_ms=1000)
    for _ in range(20):
        town.advance(900_000)
        town.write()
        town.rest()
    assert client.named("hb") == []
    assert beats(town, client, town.now + 3 * S) == [town.now - 2 * S, town.now - S, town.now]


def test_a_full_client_gets_no_heartbeats_and_a_closed_one_has_no_timer() -> None:
    town = Town()
    town.write()
    client = town.front.stream(heartbeat_ms=1000)
    town.rest()
    client.is_full = True
    town.advance(5 * S)
    assert client.named("hb") == []
    client.drain()
    town.advance(S)
    assert len(client.named("hb")) == 1
    client.leave()
    town.advance(2 * S)
    assert town.front.streams._heartbeats == []


def test_heartbeats_of_any_mixture_come_no_later_than_they_should() -> None:
    town = Town()
    town.write()
    lengths = [1000, 60_000, 2500, 5000, 15_000, 1000]
    clients = [town.front.stream(heartbeat_ms=ms, wid=f"w{i}") for i, ms in enumerate(lengths)]
    town.advance(60 * S + HEARTBEAT_TICK_US)
    assert [len(client.named("hb")) for client in clients] == [60, 1, 24, 12, 4, 60]


# ---- saving


def test_places_are_saved_every_second_and_not_more_often() -> None:
    town = Town()
    make(town)
    client = opened(town)
    begun = town.front.core._next_id
    for _ in range(50):
        town.write()
        town.advance(50_000)
    assert stored(town)["t"] >= 30
    assert town.front.core._next_id - begun <= 4  # saves, and nothing else is requested
    town.advance(SAVE_EVERY_US)
    assert stored(town) == {"t": 50}
    assert stream_of(client).moved == stream_of(client).saving == {}


def test_the_end_of_a_stream_saves_its_place() -> None:
    town = Town()
    make(town)
    client = opened(town)
    town.write(3)
    town.rest()
    client.leave()
    town.rest()
    assert stored(town) == {"t": 3}
    again = opened(town)
    town.write()
    town.rest()
    assert again.seqs() == [4]


def test_a_stream_that_ends_while_it_is_saved_loses_nothing() -> None:
    town = Town()
    make(town)
    client = opened(town)
    town.write(2)
    town.rest()
    town.front.streams._save_all()  # in flight
    town.shard_for("t").write(3)
    town.carry_down()
    client.leave()
    town.rest()
    assert stored(town) == {"t": 5}
    assert not town.rig.core.watch.sessions._sessions["w"].maybe_stale


@fault("worker", "the worker of the sessions dies", "open streams go on, and it hears at once where they are")
def test_places_are_saved_again_when_the_shard_is_back() -> None:
    town = Town()
    make(town)
    client = opened(town)
    town.advance(2 * S)
    town.write(4)
    town.rest()
    town.disks[0].sync_all()
    town.kill()
    town.start()
    town.rest()
    assert stored(town) == {"t": 4}
    session = town.rig.core.watch.sessions._sessions["w"]
    assert (session.peer, session.stream) == (town.front.name, stream_of(client).number)
    town.write()
    town.rest()
    assert client.seqs() == [1, 2, 3, 4, 5]


def test_a_save_that_fails_is_made_up_for() -> None:
    town = Town()
    make(town)
    client = opened(town)
    town.write(2)
    town.rest()
    town.rig.core.progress = 0.5
    town.advance(2 * SAVE_EVERY_US)
    assert stored(town) == {"t": 0}
    assert stream_of(client).moved == {"t": 2}
    town.rig.core.progress = 1.0
    town.advance(2 * SAVE_EVERY_US)
    assert stored(town) == {"t": 2}


# ---- ids of many topics


def many(town: Town) -> tuple[list[str], Client]:
    names = [f"t{i:03}" for i in range(ID_TOPICS_MAX + 20)]
    for name in names:
        town.rig.receive(wire.WRITE, name, {"records": [{"data": 1}]})
    town.rig.rest()
    make(town, **dict.fromkeys(names, 1))
    client = opened(town)
    town.advance(2 * SAVE_EVERY_US)
    return names, client


def where(town: Town, text: str | None) -> dict[str, int]:
    """Where a client continues that has seen this id."""
    decoded = event_ids.decode(text or "")
    assert decoded is not None
    save, changes = decoded
    assert save is not None
    return town.rig.core.watch.sessions._sessions["w"].cursors_at(save) | changes


def test_ids_of_many_topics_are_short_and_say_all_the_same() -> None:
    town = Town()
    names, client = many(town)
    expected = dict.fromkeys(names, 1)
    seen: list[tuple[str, dict[str, int]]] = []
    for i in range(40):
        town.write(1, names[i % 7])
        town.rest()
        expected[names[i % 7]] += 1
        assert client.last.id is not None
        seen.append((client.last.id, dict(expected)))
        town.advance(130_000)
    assert max(len(text) for text, _ in seen) < 500
    for text, cursors in seen:
        assert where(town, text) == cursors


def test_many_changes_are_saved_before_their_time() -> None:
    town = Town()
    names, client = many(town)
    expected = dict.fromkeys(names, 1)
    seen: list[tuple[str, dict[str, int]]] = []
    for name in names:
        town.write(1, name)
        town.rest()
        expected[name] += 1
        assert client.last.id is not None
        seen.append((client.last.id, dict(expected)))
    changes = [event_ids.decode(text) for text, _ in seen]
    assert max(len(decoded[1]) for decoded in changes if decoded) <= 2 * MOVED_MAX
    assert max(decoded[0] or 0 for decoded in changes if decoded) > min(d[0] or 0 for d in changes if d)
    for text, cursors in seen:
        assert where(town, text) == cursors


def test_a_client_with_a_short_id_goes_on_exactly_there() -> None:
    town = Town()
    names, client = many(town)
    for name in names[:3]:
        town.write(1, name)
        town.rest()
    text = client.last.id
    town.write(1, names[0])
    town.rest()
    client.leave()
    town.rest()
    assert text is not None
    again = opened(town, last_id=text.encode())
    assert {name: again.seqs(name) for name in names if again.seqs(name)} == {names[0]: [3]}


# ---- caps


def test_places_are_taken_and_given_back_once() -> None:
    town = Town(max_sse_connections=3, max_sse_connections_per_key=2)
    a, b = parse_keys("a,b")
    streams = town.front.streams
    held = [streams.reserve(a), streams.reserve(a)]
    assert streams.reserve(a) is None
    assert streams.reached_cap(a) == ("max_sse_connections_per_key", 2)
    held.append(streams.reserve(b))
    assert streams.reached_cap(None) == streams.reached_cap(b) == ("max_sse_connections", 3)
    for give_back in held:
        assert give_back is not None
        give_back()
        give_back()
    assert streams.count == 0 and streams.reached_cap(a) is None


def test_a_stream_beyond_the_cap_is_refused_after_its_session_was_found() -> None:
    town = Town(max_sse_connections=1)
    make(town)
    make(town, "w2")
    client = opened(town)
    refused, unknown = town.front.open("w2"), town.front.open("none")
    town.rest()
    assert [answers[0].status for answers in (refused, unknown)] == [429, 404]
    assert not client.is_closed
    client.leave()
    opened(town)
    assert town.front.streams.count == 1


def test_a_client_that_leaves_before_its_stream_gives_its_place_back() -> None:
    town = Town(max_sse_connections=1)
    make(town)
    answers = town.front.open("w")
    answers.request.release()
    town.rest()
    assert (town.front.streams.count, answers) == (0, [])
    session = town.rig.core.watch.sessions._sessions["w"]
    assert session.stream == 0
    answers = town.front.open("w")
    town.rest()
    (response,) = answers
    assert response.stream is not None
    response.stream.closed()  # its head could not be written
    town.rest()
    assert (town.front.streams.count, session.stream) == (0, 0)


def test_the_first_shard_hears_how_many_streams_are_open() -> None:
    town = Town(fronts=2)
    make(town)
    client = opened(town)
    town.advance(S)
    assert town.rig.core.watch.streams_elsewhere(b"?") == 1
    client.leave()
    town.advance(S)
    assert town.rig.core.watch.streams_elsewhere(b"?") == 0


# ---- one ends, another continues


@pytest.mark.parametrize("same", [True, False], ids=["through the same front", "through another one"])
def test_the_newer_stream_takes_over_and_the_older_says_so(same: bool) -> None:
    town = Town(fronts=2)
    make(town)
    older = opened(town)
    town.write(3)
    town.rest()
    newer = opened(town, town.fronts[0 if same else 1])
    town.write()
    town.rest()
    assert (older.last.event, older.last.data["code"], older.is_closed) == ("error", "taken_over", True)
    assert (older.seqs(), newer.seqs()) == ([1, 2, 3], [4])


def test_a_take_over_ends_that_stream_and_nothing_else() -> None:
    """Whatever numbers feeds and requests have."""
    town = Town()
    for name in ("t", "u", "v"):
        town.write(1, name)
    clients = [town.front.stream({"u": 0}), town.front.stream({"v": 0})]
    for i in range(12):
        make(town, f"w{i}")
        older = opened(town, wid=f"w{i}")
        begun = town.front.core._next_id
        newer = opened(town, wid=f"w{i}")
        assert older.last.event == "error" and older.is_closed
        assert (
            town.front.core._next_id - begun <= 5
        )  # to open, to save, and to read: no feed is followed again
        clients.append(newer)
    for name in ("t", "u", "v"):
        town.write(1, name)
    town.rest()
    assert [client.seqs("u") for client in clients[:1]] == [[1, 2]]
    assert all(client.seqs()[-1] == 2 for client in clients[2:])


def test_a_stream_that_is_taken_over_before_it_began_says_so_when_it_does() -> None:
    town = Town()
    make(town)
    first = town.front.open("w")
    town.rest()
    second = town.front.open("w")
    town.rest()
    newer = second.begin()
    older = first.begin()
    town.rest()
    assert [frame.event for frame in older.frames] == ["retry", "error"]
    assert older.last.data["code"] == "taken_over" and older.is_closed
    town.write()
    town.rest()
    assert newer.seqs() == [1]


def test_all_streams_end_when_the_server_stops() -> None:
    town = Town()
    town.write()
    make(town)
    client = opened(town)
    waiting = town.front.open("w2")
    make(town, "w2")
    waiting = town.front.open("w2")
    town.rest()
    town.front.services.draining = True
    town.front.streams.drain()
    late = waiting.begin()
    town.rest()
    for ended in (client, late):
        assert (ended.last.data["code"], ended.is_closed) == ("server_shutting_down", True)
    assert (town.front.streams.count, town.front.streams._streams) == (0, {})
    assert stored(town) == {"t": 1}


# ---- opening


@fault(
    "worker",
    "a stream is opened while the worker of its session restarts",
    "the request waits: a browser gives up after any answer but a stream",
)
def test_a_request_waits_for_its_session_s_shard() -> None:
    town = Town()
    make(town)
    town.advance(2 * S)
    town.kill()
    answers = town.front.open("w")
    town.advance(10 * S)
    assert answers == []
    town.start()
    town.write()
    town.advance(S)
    client = answers.begin()
    town.rest()
    assert client.seqs() == [1]


@pytest.mark.parametrize("stops", [False, True])
def test_a_request_that_waited_for_too_long_gets_a_stream_that_ends(stops: bool) -> None:
    town = Town()
    make(town)
    town.kill()
    answers = town.front.open("w")
    town.advance(S)
    if stops:
        town.front.services.draining = True
        town.advance(S)
    else:
        town.advance(OPEN_WAIT_US)
    client = answers.begin()
    assert client.is_closed
    assert client.last.data["code"] == ("server_shutting_down" if stops else "not_ready")
    assert town.front.streams.count == 0


def test_a_client_that_leaves_while_its_request_waits_is_not_waited_for() -> None:
    town = Town()
    make(town)
    town.kill()
    answers = town.front.open("w")
    leave: Callable[[], None] = answers.request.release
    leave()
    town.start()
    town.advance(OPEN_WAIT_US)
    assert (answers, town.front.streams.count) == ([], 0)
