"""A watch without a server: its requests and results when connections break, sessions are forgotten and records
repeated.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.event_server import event, records
from topics.client import answers, errors
from topics.client.flows import Close, Core, Flow, Open, Read, Response, Retries, Send, Sleep
from topics.client.sse import Event, EventParser
from topics.client.watch_streams import NAMES_MAX, tail, watch

URL = "http://server"


def made(wid: str = "1", **cursors: int) -> Response:
    topics = {
        name.replace("_", "."): {"from_seq": seq, "head_seq": seq, "earliest_seq": 1}
        for name, seq in cursors.items()
    }
    return Response(
        200,
        msgspec.json.encode(
            {
                "wid": wid,
                "stream_url": f"/v0/watch/{wid}",
                "session_ttl_ms": 300_000,
                "topics": topics,
                "performance": {"server_total_ms": 0.1},
            }
        ),
    )


GONE = Response(404, b'{"error":{"code":"not_found","message":"no such watch"}}')


class ScriptedServer:
    """A scripted server: each request gets the next answer; an answer that is a list is a stream of these chunks,
    which then ends.
    """

    def __init__(self, *script: Any) -> None:
        self.script = deque(script)
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.pauses: list[float] = []
        self.open: list[Any] = []
        self.core = Core(URL, "me", Retries(), lambda: 0.0, lambda: 0, random.Random(1))

    def run(self, flow: Flow[Any]) -> Any:
        try:
            effect = next(flow)
            while True:
                try:
                    result = self._do(effect)
                except errors.ClientError as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as stop:
            return stop.value

    def _do(self, effect: Any) -> Any:
        match effect:
            case Sleep(seconds):
                self.pauses.append(seconds)
                return None
            case Read(stream):
                chunk = stream.popleft() if stream else b""
                if isinstance(chunk, Exception):
                    raise chunk
                return chunk
            case Close(stream):
                self.open.remove(stream)
                return None
            case Send(request) | Open(request):
                body = None if request.body is None else msgspec.json.decode(request.body)
                self.asked.append((request.method, request.path, body, request.headers.get("Last-Event-ID")))
                if not self.script:
                    raise EOFError  # the test is over
                answer = self.script.popleft()
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, list):
                    answer = deque(answer)
                    self.open.append(answer)
                return answer
        raise AssertionError(effect)

    def read(self, source: Any, count: int = 1000) -> list[Any]:
        """This many items, or all until the end of the script."""
        found: list[Any] = []
        has_more = True
        while len(found) < count:
            item = source.take()
            if item is not None:
                found.append(item)
                continue
            if not has_more:
                break
            try:
                has_more = self.run(source.more())
            except EOFError:
                break
        return found

    @property
    def bodies(self) -> list[Any]:
        return [body["topics"] for method, _, body, _ in self.asked if method == "POST"]


def data(items: list[Any]) -> list[Any]:
    return [record.data for record in items]


def cut() -> errors.Disconnected:
    return errors.Disconnected(URL, "the connection broke", "none")


def test_a_stream_goes_on_from_the_last_id_and_repeats_nothing() -> None:
    world = ScriptedServer(
        made(a=0),
        [records("a", "id-1", 1, "x", "y"), cut()],
        cut(),
        [records("a", "id-2", 2, "y", "z")],  # a server that had not noticed our position
    )
    source = tail(world.core, "a", start=0)
    assert data(world.read(source)) == ["x", "y", "z"]
    assert [last_id for method, _, _, last_id in world.asked if method == "GET"] == [
        None,
        "id-1",
        "id-1",
        "id-2",
    ]
    assert len(world.pauses) == 3
    assert not world.open


def test_a_forgotten_session_is_made_again_from_where_it_was() -> None:
    world = ScriptedServer(
        made(o_a=5, o_b=0),
        [records("o.a", "id-1", 6, "x"), records("o.c", "id-2", 1, "new")],
        GONE,
        made("2", o_a=6, o_c=1, o_d=0),
        [records("o.d", "id-3", 1, "newer")],
    )
    source = watch(world.core, "o.>")
    found = [
        item for item in world.read(source) if not isinstance(item, answers.Interrupted | answers.Resumed)
    ]
    assert [type(item) for item in found] == [
        answers.Records,
        answers.Records,
        answers.TopicEnded,
        answers.Records,
    ]
    assert found[2].topic == "o.b"
    assert world.bodies == [
        {"o.>": {"tail": True}},
        {"o.>": {"from_seq": 0}, "o.a": {"from_seq": 6}, "o.b": {"from_seq": 0}, "o.c": {"from_seq": 1}},
    ]
    # The id of the old session is invalid in the new one.
    assert [(path, last_id) for method, path, _, last_id in world.asked if method == "GET"] == [
        ("/v0/watch/1", None),
        ("/v0/watch/1", "id-2"),
        ("/v0/watch/2", None),
        ("/v0/watch/2", "id-3"),
    ]
    assert source.cursors == {"o.a": 6, "o.c": 1, "o.d": 1}


def test_more_topics_than_a_request_can_name_lose_and_repeat_nothing() -> None:
    count = NAMES_MAX + 10
    world = ScriptedServer(made(**{f"o_{i}": 0 for i in range(count)}))
    world.script.append([records(f"o.{i}", f"id-{i}", 1, "first") for i in range(count)])
    world.script.append(GONE)
    world.script.append(made("2", **{f"o_{i}": 1 for i in range(count)}))
    # Unnamed topics start at their beginning.
    world.script.append(
        [records("o.0", "x", 1, "first", "second"), records(f"o.{count - 1}", "y", 2, "second")]
    )
    found = world.read(tail(world.core, "o.>", start=0))
    assert len(world.bodies[1]) == NAMES_MAX
    assert data(found) == ["first"] * count + ["second"] * 2


def test_an_event_that_was_cut_off_has_not_happened() -> None:
    whole = records("a", "id-1", 1, "x")
    world = ScriptedServer(
        made(a=0), [whole[:-1]], made("2", a=0), [whole], [b"\n\n" + records("a", "id-2", 2, "y")]
    )
    assert data(world.read(tail(world.core, "a", start=0))) == ["x", "y"]
    assert [last_id for method, _, _, last_id in world.asked if method == "GET"][:3] == [None, None, "id-1"]


@pytest.mark.parametrize(
    "first", [[b"retry: 10\n\n", cut()], [cut()], [], cut()], ids=["silent", "cut", "ended", "lost"]
)
def test_a_session_whose_first_events_were_lost_is_not_used_again(first: Any) -> None:
    """The server would continue after what it has sent, and we have no id to say that it did not arrive."""
    world = ScriptedServer(made(a=3), first, made("2", a=3), [records("a", "id-1", 4, "x")])
    assert data(world.read(tail(world.core, "a"), 1)) == ["x"]
    assert world.bodies == [{"a": {"tail": True}}, {"a": {"from_seq": 3}}]


def test_a_session_whose_stream_was_refused_is_used_again() -> None:
    busy = Response(429, b'{"error":{"code":"throttled","message":"later"}}', "1")
    world = ScriptedServer(made(a=3), busy, busy, [records("a", "id-1", 4, "x")])
    assert data(world.read(tail(world.core, "a"), 1)) == ["x"]
    assert len(world.bodies) == 1


def test_a_server_that_forgets_at_once_is_not_asked_without_a_pause() -> None:
    world = ScriptedServer(
        made(a=3), GONE, made("2", a=3), GONE, made("3", a=3), [records("a", "id-1", 4, "x")]
    )
    assert data(world.read(tail(world.core, "a"), 1)) == ["x"]
    assert len(world.pauses) == 2


def test_gaps_that_lie_behind_us_are_no_news() -> None:
    gap = {
        "topic": "a",
        "reason": "from_seq_too_old",
        "gap_from": 1,
        "gap_to": 3,
        "earliest_seq": 4,
        "head_seq": 6,
    }
    world = ScriptedServer(made(a=5), [event("tombstone", "i", **gap) + records("a", "j", 4, "4", "5", "6")])
    source = tail(world.core, "a", cursors={"a": 5})
    assert data(world.read(source)) == ["6"]


def test_a_stream_is_not_asked_for_sooner_than_the_server_says() -> None:
    busy = Response(429, b'{"error":{"code":"throttled","message":"later"}}', "1")
    world = ScriptedServer(made(a=0), busy, [records("a", "1", 1, "x")])
    assert data(world.read(tail(world.core, "a", start=0), 1)) == ["x"]
    assert world.pauses[0] >= 1.0


def test_cursors_stand_behind_what_was_handed_out() -> None:
    world = ScriptedServer(made(a=0, b=0), [records("a", "1", 1, 1, 2, 3) + records("b", "2", 1, 4)])
    source = tail(world.core, "a", "b", start=0)
    assert source.cursors == {}
    seen = []
    while len(seen) < 4:
        world.read(source, 1)
        seen.append(source.cursors)
    assert seen == [{"a": 1, "b": 0}, {"a": 2, "b": 0}, {"a": 3, "b": 0}, {"a": 3, "b": 1}]


def test_a_topic_that_was_made_again_comes_from_its_beginning() -> None:
    gap = {"topic": "a", "reason": "recreated", "gap_from": 1, "gap_to": 2, "earliest_seq": 1, "head_seq": 2}
    world = ScriptedServer(made(a=9), [event("tombstone", "i", **gap) + records("a", "j", 1, "x", "y")])
    source = tail(world.core, "a", start=9)
    with pytest.raises(errors.RecordsLost, match="created again"):
        world.read(source)
    assert source.cursors == {"a": 0}
    assert data(world.read(source)) == ["x", "y"]


def test_a_late_request_of_ours_that_took_the_session_over_is_left_alone() -> None:
    taken = event("error", code="taken_over", error="x", message="somebody else has it")
    world = ScriptedServer(
        made(a=0), [records("a", "1", 1, "x") + taken], made("2", a=1), [records("a", "2", 2, "y")]
    )
    assert data(world.read(tail(world.core, "a", start=0))) == ["x", "y"]
    assert world.bodies[1] == {"a": {"from_seq": 1}}
    assert [path for method, path, _, _ in world.asked if method == "GET"][:2] == [
        "/v0/watch/1",
        "/v0/watch/2",
    ]


def test_an_opening_that_is_not_answered_is_tried_with_another_session() -> None:
    silence = errors.TimedOut(URL, "it does not answer in time", "none")
    world = ScriptedServer(
        made(a=0), [records("a", "1", 1, "x")], silence, made("2", a=1), [records("a", "2", 2, "y")]
    )
    assert data(world.read(tail(world.core, "a", start=0))) == ["x", "y"]
    assert world.bodies[1] == {"a": {"from_seq": 1}}


def test_errors_that_end_a_stream_for_good() -> None:
    refused = Response(403, b'{"error":{"code":"forbidden","message":"no"}}')
    world = ScriptedServer(refused)
    with pytest.raises(errors.Forbidden):
        world.read(tail(world.core, "a"))
    world = ScriptedServer(made(a=0), [records("a", "1", 1, "x")], refused)
    source = tail(world.core, "a", start=0)
    assert data(world.read(source, 1)) == ["x"]
    with pytest.raises(errors.Forbidden):
        world.read(source)
    assert world.read(source) == []
    assert not world.open


def test_a_session_that_is_gone_and_advice() -> None:
    world = ScriptedServer(
        made(a=0),
        [event("error", code=410, error="gone", message="gone")],
        made("2", a=0),
        [event("error", code=429, error="too many", message="too many topics") + records("a", "1", 1, "x")],
    )
    found = world.read(watch(world.core, "a", start=0))
    assert [type(item).__name__ for item in found] == [
        "Interrupted",
        "Resumed",
        "Notice",
        "Records",
        "Interrupted",
    ]
    world = ScriptedServer(made(a=0), [event("error", code=429, error="x", message="too many topics")])
    with pytest.raises(errors.Throttled, match="too many topics"):
        world.read(tail(world.core, "a"))


def test_a_first_opening_is_not_tried_for_ever() -> None:
    world = ScriptedServer(made(a=0))
    world.script.extend([cut() for _ in range(1000)])
    clock = iter(range(10_000))
    world.core.now = lambda: float(next(clock))
    with pytest.raises(errors.Disconnected):
        world.read(tail(world.core, "a"))
    assert len(world.pauses) < 40


def test_a_later_one_is() -> None:
    world = ScriptedServer(made(a=0), [records("a", "1", 1, "x")])
    world.script.extend([cut() for _ in range(1000)])
    world.script.append([records("a", "2", 2, "y")])
    assert data(world.read(tail(world.core, "a", start=0), 2)) == ["x", "y"]
    assert max(world.pauses) <= 2.0


# -- server-sent events ------------------------------------------------------------------------------------

STREAM = (
    b"retry: 500\n\n: hb 1\n\nevent: record\nid: one\ndata: {}\n\n"
    b"event: other\r\nid: two\r\ndata: 1\r\ndata: 2\r\n\r\nid: three\n\ndata\n\nevent: cut\nid: four\ndata: x\n"
)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_how_they_arrive(cuts: list[int]) -> None:
    reader = EventParser()
    at, found = 0, []
    for end in [*sorted(cuts), len(STREAM)]:
        found += reader.feed(STREAM[at:end])
        at = end
    assert found == [Event("record", b"{}"), Event("other", b"1\n2"), Event("message", b"")]
    assert (reader.last_id, reader.retry_ms) == ("three", 500)
    reader.reset()
    assert reader.feed(b"\n") == []
    assert reader.last_id == "three"
