"""Goal: a pattern follows every topic that it matches and its key may see, also those created later; a group shares the records.

Method: a server with two fronts and three shards, to reveal state that only one of them has. Which
front has a stream is read from its descriptors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.contract import Json, fresh, ok, refused
from tests.support.frame_checker import FrameChecker
from tests.support.fronts import connect_to, front_of
from tests.support.server import Server, running, until
from tests.support.sse_client import EventStream, Frame, Protocol, follow, open_stream, pump, watch
from tests.support.ws_client import WebSocket

FRONTS = ("front 0", "front 1")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "TOPICS_FRONTS": "2",
        "TOPICS_API_KEYS": "s3cret-all,s3cret-team::team.",
        "TOPICS_VERIFY": "1",
    }
    with running(tmp_path_factory.mktemp("patterns"), environment=environment, shards=3) as server:
        yield server


@pytest.fixture
def server(keyed: Server) -> Server:
    return keyed.with_key("s3cret-all")


@pytest.fixture
def base() -> str:
    """The first token of the names of one test."""
    return fresh("base")


def on_front(server: Server, session: Json, front: str) -> EventStream:
    return open_stream(server, session, connection=connect_to(server, front))


def until_seen(streams: list[EventStream], frame_checker: FrameChecker, count: int) -> None:
    """Until this many records have arrived, over all of the streams."""
    pump(streams, lambda: frame_checker.count >= count, lambda _, frame: frame_checker.take(frame))
    assert frame_checker.count == count


# -- which topics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("{}.*", {"a", "b"}),
        ("{}.>", {"a", "b", "a.x", "a.y", "a.x.z"}),
        ("{}.*.*", {"a.x", "a.y"}),
        ("{}.*.x", {"a.x"}),
        ("{}.a.*", {"a.x", "a.y"}),
        ("{}.a.>", {"a.x", "a.y", "a.x.z"}),
        ("{}.*.>", {"a.x", "a.y", "a.x.z"}),
        ("*.a.x.z", {"a.x.z"}),
        ("{}.c.>", set()),
    ],
)
def test_which_topics_a_pattern_covers(server: Server, base: str, pattern: str, covered: set[str]) -> None:
    for name in ("a", "b", "a.x", "a.y", "a.x.z"):
        ok(server.write(f"{base}.{name}", name), 201)
    ok(server.write(base, 0), 201)
    filled = pattern.format(base)
    found = watch(server, {filled: {}})["topics"]
    of_this_test = {name.removeprefix(f"{base}.") for name in found if name.startswith(base)}
    assert of_this_test == covered
    assert all(row == {"from_seq": 0, "head_seq": 1, "earliest_seq": 1} for row in found.values())


@pytest.mark.parametrize("pattern", ["a.>.b", ">.a", "a..*", ".*", "*.", "a.*.", ".>", "a.>.>"])
def test_invalid_patterns(server: Server, pattern: str) -> None:
    for query in ("", "?lenient=true"):
        reply = server.post(f"/v0/watch{query}", {"topics": {pattern: {}}})
        refused(reply, 400, "invalid_request")


@pytest.mark.parametrize("name", ["a*", "*b", "a>", "**", ">>"])
def test_a_wildcard_is_a_whole_token(server: Server, base: str, name: str) -> None:
    """Otherwise it is neither a valid pattern nor a valid name."""
    ok(server.write(f"{base}.ab", 1), 201)
    assert server.post("/v0/watch", {"topics": {f"{base}.{name}": {}}}).status in (400, 404)


def test_a_pattern_without_topics_stays_open(server: Server, base: str) -> None:
    session = watch(server, {f"{base}.>": {}})
    assert session["topics"] == {}
    stream = open_stream(server, session)
    frame_checker = FrameChecker()
    ok(server.write(f"{base}.first", 1, 2), 201)
    until_seen([stream], frame_checker, 2)
    assert frame_checker.seqs == {f"{base}.first": [1, 2]}
    stream.close()


@pytest.mark.parametrize("protocol", ["http1", "h2c"])
def test_existing_and_later_topics(server: Server, base: str, protocol: Protocol) -> None:
    ok(server.write(f"{base}.old", *range(5)), 201)
    stream = follow(server, {f"{base}.*": {"from_seq": 2}}, protocol, limit=4)
    frame_checker = FrameChecker({f"{base}.old": 2})
    until_seen([stream], frame_checker, 3)
    names = [f"{base}.new{i}" for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        for reply in pool.map(lambda name: server.write(name, *range(6)), names):
            ok(reply, 201)
    ok(server.write(f"{base}.not.covered", 1), 201)
    until_seen([stream], frame_checker, 3 + 12 * 6)
    assert frame_checker.seqs == {f"{base}.old": [3, 4, 5], **{name: [1, 2, 3, 4, 5, 6] for name in names}}
    stream.close()


def test_later_topics_join_from_their_first_record_whatever_the_start(server: Server, base: str) -> None:
    ok(server.write(f"{base}.old", 1), 201)
    stream = follow(server, {f"{base}.>": {"tail": True}})
    stream.take("caught-up")
    ok(server.write(f"{base}.new", 1, 2, 3), 201)
    frame_checker = FrameChecker({f"{base}.new": 0})
    until_seen([stream], frame_checker, 3)
    stream.close()


def test_a_topic_under_two_patterns_comes_once(server: Server, base: str) -> None:
    ok(server.write(f"{base}.a", 1), 201)
    stream = follow(server, {f"{base}.*": {}, f"{base}.>": {}, f"{base}.a": {"from_seq": 0}})
    frame_checker = FrameChecker({f"{base}.a": 0})
    until_seen([stream], frame_checker, 1)
    ok(server.write(f"{base}.b", 1), 201)
    ok(server.write(f"{base}.a", 2))
    until_seen([stream], frame_checker, 3)
    assert frame_checker.seqs == {f"{base}.a": [1, 2], f"{base}.b": [1]}
    stream.close()


def test_topics_that_a_pattern_found_are_resumed(server: Server, base: str) -> None:
    ok(server.write(f"{base}.a", 1), 201)
    session = watch(server, {f"{base}.>": {}})
    frame_checker = FrameChecker()
    stream = on_front(server, session, "front 0")
    until_seen([stream], frame_checker, 1)
    ok(server.write(f"{base}.b", 1), 201)
    until_seen([stream], frame_checker, 2)
    stream.close()
    ok(server.write(f"{base}.b", 2))
    ok(server.write(f"{base}.c", 1, 2), 201)  # created while no stream was open
    stream = open_stream(
        server, session, connection=connect_to(server, "front 1"), last_event_id=frame_checker.last_id
    )
    until_seen([stream], frame_checker, 5)
    assert frame_checker.seqs == {f"{base}.a": [1], f"{base}.b": [1, 2], f"{base}.c": [1, 2]}
    stream.close()


def test_a_websocket_takes_patterns(server: Server, base: str) -> None:
    ok(server.write(f"{base}.a", 1), 201)
    ws = WebSocket(server)
    reply = ws.ask("subscribe", topics={f"{base}.*": {}})
    assert list(reply["topics"]) == [f"{base}.a"]
    ws.take("record", "caught_up")
    ok(server.write(f"{base}.b", 1), 201)
    [record, _] = ws.take("record", "caught_up")
    assert record["topic"] == f"{base}.b"
    assert ws.ask("subscribe", topic="a.>.b", request_id=1)["code"] == "invalid_request"
    ws.close()


def test_websockets_are_members_of_a_group(server: Server, base: str) -> None:
    ok(server.write(base, *range(3)), 201)
    members = [WebSocket(server) for _ in range(2)]
    for member in members:
        member.ask("subscribe", topic=base, from_seq=3, group="g", consistency="strong")
        member.take("caught_up")
    ok(server.write(base, *range(4)))
    pages = [member.take("record", "caught_up")[0] for member in members]
    seen = [[record["$seq"] for record in page["records"]] for page in pages]
    assert sorted(seen[0] + seen[1]) == [4, 5, 6, 7]
    for member in members:
        assert member.ask("subscribe", topic=base, group="", request_id=1)["code"] == "invalid_request"
        assert (
            member.ask("subscribe", topic=base, group="g", node="n", request_id=1)["code"]
            == "invalid_request"
        )
        member.close()


# -- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [">", "*.{}.>", "team.{}.>"])
def test_a_pattern_matches_only_topics_that_its_key_may_read(
    keyed: Server, server: Server, base: str, pattern: str
) -> None:
    inside, outside = f"team.{base}.a", f"tea.{base}.a"
    for name in (inside, outside):
        ok(server.write(name, 1), 201)
    team = keyed.with_key("s3cret-team")
    session = watch(team, {pattern.format(base): {}})
    assert inside in session["topics"]
    assert all(name.startswith("team.") for name in session["topics"])
    stream = open_stream(team, session)
    frame_checker = FrameChecker()
    pump([stream], lambda: bool(frame_checker.seqs[inside]), lambda _, frame: frame_checker.take(frame))
    # Also of topics created later. The one outside of the prefix is written first, so that it would be seen first.
    for name in (f"tea.{base}.later", f"x.{base}.later", f"team.{base}.later"):
        ok(server.write(name, 1), 201)
    pump(
        [stream],
        lambda: bool(frame_checker.seqs[f"team.{base}.later"]),
        lambda _, frame: frame_checker.take(frame),
    )
    assert all(name.startswith("team.") for name in frame_checker.cursors)
    stream.close()


def test_a_prefix_inside_of_a_token(keyed: Server, server: Server, base: str) -> None:
    """A key's prefix is compared by bytes, a pattern by tokens: topics that both allow are seen."""
    ok(server.write(f"team.{base}", 1), 201)
    team = keyed.with_key("s3cret-team")
    assert f"team.{base}" in watch(team, {"*.*": {}})["topics"]
    assert watch(team, {f"nobody.{base}.>": {}}, query="?lenient=1")["topics"] == {}


# -- fronts ------------------------------------------------------------------------------------------------


def test_a_watch_on_one_front_sees_writes_through_another(server: Server, base: str) -> None:
    names = [f"{base}.{i}" for i in range(6)]  # over all shards
    for name in names:
        ok(server.write(name, 0), 201)
    streams = [on_front(server, watch(server, {name: {} for name in names}), front) for front in FRONTS]
    frame_checkers = {stream: FrameChecker(dict.fromkeys(names, 0)) for stream in streams}
    for i in range(60):  # on separate connections, so that both fronts get some
        ok(server.write(names[i % 6], i))
    pump(
        streams,
        lambda: all(frame_checker.count == 66 for frame_checker in frame_checkers.values()),
        lambda stream, frame: frame_checkers[stream].take(frame),
    )
    assert [front_of(server, stream.socket) for stream in streams] == list(FRONTS)
    for stream, frame_checker in frame_checkers.items():
        assert all(frame_checker.seqs[name] == list(range(1, 12)) for name in names)
        stream.close()


def test_a_stream_is_taken_over_from_another_front(server: Server, base: str) -> None:
    ok(server.write(base, 1, 2), 201)
    session = watch(server, base)
    older = on_front(server, session, "front 0")
    older.take("record", "caught-up")
    newer = on_front(server, session, "front 1")
    [error] = older.rest()
    assert error.data["code"] == "taken_over"
    newer.take("caught-up")
    ok(server.write(base, 3))
    [record, _] = newer.take("record", "caught-up")
    assert record.seqs == [3]
    newer.close()


# -- groups ------------------------------------------------------------------------------------------------


class Members:
    """Streams of one group, and the records that each of them got."""

    def __init__(self) -> None:
        self.streams: list[EventStream] = []
        self.given: dict[EventStream, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))

    def join(self, stream: EventStream) -> EventStream:
        self.streams.append(stream)
        return stream

    def take(self, stream: EventStream, frame: Frame) -> None:
        if frame.event == "record":
            mine = self.given[stream][frame.data["topic"]]
            mine += frame.seqs
            assert mine == sorted(set(mine)), "each member's records are in order"
        assert frame.event in ("record", "caught-up"), frame

    def seqs(self, topic: str) -> list[int]:
        return sorted(seq for given in self.given.values() for seq in given[topic])

    def until(self, topic: str, seqs: list[int]) -> None:
        """Until all of these have arrived, each at one member."""
        pump(
            [s for s in self.streams if s.fileno() >= 0],
            lambda: len(self.seqs(topic)) >= len(seqs),
            self.take,
        )
        assert self.seqs(topic) == seqs

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def test_each_record_goes_to_one_member(server: Server, base: str, members: Members) -> None:
    ok(server.write(base, *range(40)), 201)
    for front in (*FRONTS, *FRONTS):  # two on each
        members.join(on_front(server, watch(server, base, group="g", limit=3), front))
    members.until(base, list(range(1, 41)))
    for i in range(120):
        ok(server.write(base, i))
    members.until(base, list(range(1, 161)))
    assert all(members.given[stream][base] for stream in members.streams), "every member gets records"


def test_a_later_member_begins_at_the_group_s_cursor(server: Server, base: str, members: Members) -> None:
    ok(server.write(base, *range(10)), 201)
    members.join(follow(server, {base: {"from_seq": 4}}, group="g"))
    members.until(base, [5, 6, 7, 8, 9, 10])
    members.join(follow(server, base, group="g"))  # as the first member it would begin at 0
    ok(server.write(base, 11, 12))
    members.until(base, list(range(5, 13)))


def test_groups_and_others_do_not_notice_each_other(server: Server, base: str) -> None:
    ok(server.write(base, 1), 201)
    groups = {"g": Members(), "h": Members()}
    for name, group in groups.items():
        for front in FRONTS:
            group.join(on_front(server, watch(server, base, group=name), front))
    plain = follow(server, base)
    for i in range(30):
        ok(server.write(base, i))
    for group in groups.values():
        group.until(base, list(range(1, 32)))
        group.close()
    frame_checker = FrameChecker({base: 0})
    until_seen([plain], frame_checker, 31)
    plain.close()


@pytest.mark.parametrize("fronts", [("front 0", "front 0"), FRONTS], ids=["one front", "two fronts"])
def test_a_member_that_leaves_hands_over(
    server: Server, base: str, members: Members, fronts: tuple[str, str]
) -> None:
    ok(server.write(base, 0), 201)
    leaver, stayer = (
        members.join(on_front(server, watch(server, base, group="g"), front)) for front in fronts
    )
    members.until(base, [1])
    before = sse_connections(server)
    leaver.close()
    until(lambda: sse_connections(server) < before)
    for i in range(50):
        ok(server.write(base, i))
    members.until(base, list(range(1, 52)))
    stayer.close()
    until(lambda: sse_connections(server) < before - 1)
    # Without members records wait for the next one, which begins at the group's cursor.
    ok(server.write(base, *range(5)))
    members.join(follow(server, base, group="g"))
    members.until(base, list(range(1, 57)))


def sse_connections(server: Server) -> int:
    """The sum of both fronts: it falls when a stream ends, whether a front counts its own or all."""
    total = 0
    for front in FRONTS:
        with connect_to(server, front) as connection:
            asked = {**server.credentials, "Accept": "application/json"}
            lines = [
                "GET /v0/metrics HTTP/1.1",
                "Host: x",
                *(f"{name}: {value}" for name, value in asked.items()),
            ]
            connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
            answer = connection.makefile("rb").read().partition(b"\r\n\r\n")[2]
            total += int(json.loads(answer)["sse_connections"])
    return total


def test_a_group_on_a_pattern(server: Server, base: str, members: Members) -> None:
    ok(server.write(f"{base}.a", *range(10)), 201)
    for front in FRONTS:
        members.join(on_front(server, watch(server, {f"{base}.>": {}}, group="g"), front))
    members.until(f"{base}.a", list(range(1, 11)))
    for i in range(5):
        ok(server.write(f"{base}.later{i}", *range(8)), 201)
    for i in range(5):
        members.until(f"{base}.later{i}", list(range(1, 9)))
