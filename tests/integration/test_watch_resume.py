"""Goal: a client that resumes from the id of any frame gets everything once, wherever its stream was cut.

Method: the same session is cut after its first, second, … frame, and a ledger is kept over both streams. It refuses a
frame that does not begin where the one before ended, so losses and duplicates are found.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from tests.support.contract import fresh, ok
from tests.support.frame_checker import FrameChecker
from tests.support.length import pick
from tests.support.server import Server
from tests.support.sse_client import EventStream, Protocol, make_id, open_stream, read_id, watch


@pytest.fixture(params=["http1", "h2c"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    kind: Protocol = request.param
    return kind


def read_on(frame_checker: FrameChecker, stream: EventStream, heads: dict[str, int]) -> None:
    """Read until the ledger has reached these heads."""
    while any(frame_checker.cursors.get(name) != head for name, head in heads.items()):
        frame_checker.take(stream.next())


# -- resuming at every frame -------------------------------------------------------------------------------


@pytest.fixture
def varied(shared_server: Server) -> tuple[dict[str, Any], dict[str, int], dict[str, list[int]]]:
    """Topics with gaps, deletes and starts of all kinds: options, heads, and the seqs that must be seen."""
    plain, capped, holed, empty = fresh("plain"), fresh("capped"), fresh("holed"), fresh("empty")
    shared_server.write(plain, *range(7))
    shared_server.put(f"/v0/topics/{capped}", {"cap_records": 4})
    shared_server.write(capped, *range(9))
    shared_server.write(holed, *range(8))
    shared_server.post(f"/v0/topics/{holed}/delete", {"seqs": [1, 3, 4, 8]})
    shared_server.put(f"/v0/topics/{empty}")
    starts = {plain: {"from_seq": 1}, capped: {}, holed: {}, empty: {}}
    heads = {plain: 7, capped: 9, holed: 8, empty: 0}
    return starts, heads, {plain: [2, 3, 4, 5, 6, 7], capped: [6, 7, 8, 9], holed: [2, 5, 6, 7], empty: []}


def test_at_every_frame(
    shared_server: Server,
    varied: tuple[dict[str, Any], dict[str, int], dict[str, list[int]]],
    protocol: Protocol,
) -> None:
    starts, heads, expected = varied
    begin = {name: int(start.get("from_seq", 0)) for name, start in starts.items()}
    capped = next(name for name in heads if name.startswith("capped"))
    whole = open_stream(shared_server, watch(shared_server, starts, limit=2), protocol=protocol)
    count = len(whole.until_caught_up(len(starts)))
    whole.close()
    assert count >= 12
    for cut in range(count + 1):
        session = watch(shared_server, starts, limit=2)
        stream = open_stream(shared_server, session, protocol=protocol)
        frame_checker = FrameChecker(begin, skips=True)  # the last record of one topic is deleted
        for _ in range(cut):
            frame_checker.take(stream.next())
        stream.close()
        # A client without an id yet resumes from where it began.
        again = frame_checker.last_id or make_id(begin)
        stream = open_stream(shared_server, session, protocol=protocol, last_event_id=again)
        read_on(frame_checker, stream, heads)
        stream.close()
        assert {name: frame_checker.seqs[name] for name in heads} == expected, cut
        assert frame_checker.gaps == {capped: [("from_seq_too_old", 1, 5)]}


def test_at_every_frame_of_a_recreated_topic(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, 1, 2, 3, 4)
    for cut in range(1, 4):
        session = watch(shared_server, {topic: {"from_seq": 99}}, limit=2)
        stream = open_stream(shared_server, session, protocol=protocol)
        frame_checker = FrameChecker({topic: 99})
        for _ in range(cut):
            frame_checker.take(stream.next())
        stream.close()
        stream = open_stream(shared_server, session, protocol=protocol, last_event_id=frame_checker.last_id)
        read_on(frame_checker, stream, {topic: 4})
        stream.close()
        assert frame_checker.seqs[topic] == [1, 2, 3, 4]
        assert [reason for reason, _, _ in frame_checker.gaps[topic]] == ["recreated"]


def test_while_others_write(shared_server: Server, protocol: Protocol) -> None:
    names = [fresh("busy"), fresh("busy")]
    for name in names:
        shared_server.write(name, 0)
    session = watch(shared_server, {name: {} for name in names}, limit=5)
    each = pick(short=50, long=300)

    def write() -> None:
        for i in range(each):
            for name in names:
                shared_server.write(name, i)

    writer = threading.Thread(target=write)
    writer.start()
    rng = random.Random(5)
    frame_checker = FrameChecker(dict.fromkeys(names, 0))
    stream = open_stream(shared_server, session, protocol=protocol)
    while any(frame_checker.cursors[name] < each + 1 for name in names):
        for _ in range(rng.randint(1, 12)):
            frame_checker.take(stream.next())
            if all(frame_checker.cursors[name] == each + 1 for name in names):
                break
        if rng.random() < 0.7:
            stream.close()  # otherwise the next one takes over
        stream = open_stream(shared_server, session, protocol=protocol, last_event_id=frame_checker.last_id)
    writer.join()
    stream.close()
    assert all(frame_checker.seqs[name] == list(range(1, each + 2)) for name in names)


def test_more_topics_than_an_id_names(shared_server: Server) -> None:
    prefix = fresh("wide")
    names = [f"{prefix}.{i}" for i in range(100)]
    for name in names:
        shared_server.write(name, *range(3))
    session = watch(shared_server, {name: {} for name in names}, limit=2)
    stream = open_stream(shared_server, session)
    frame_checker = FrameChecker(dict.fromkeys(names, 0))
    for cut in (1, 2, 63, 64, 65, 100, 30):
        for _ in range(cut):
            if all(cursor == 3 for cursor in frame_checker.cursors.values()):
                break
            frame_checker.take(stream.next())
        stream.close()
        stream = open_stream(shared_server, session, last_event_id=frame_checker.last_id)
    read_on(frame_checker, stream, dict.fromkeys(names, 3))
    stream.close()
    assert all(frame_checker.seqs[name] == [1, 2, 3] for name in names)


# -- contents of ids ---------------------------------------------------------------------------------------


def test_without_an_id_the_server_continues_at_its_cursor(
    shared_server: Server, topic: str, protocol: Protocol
) -> None:
    shared_server.write(topic, 1, 2, 3)
    session = watch(shared_server, topic)
    frame_checker = FrameChecker({topic: 0})
    for i in range(3):
        stream = open_stream(shared_server, session, protocol=protocol)
        frame_checker.take_all(stream.until_caught_up())
        stream.close()
        shared_server.write(topic, i)
    assert frame_checker.seqs[topic] == [1, 2, 3, 4, 5]


def first_record(server: Server, session: Any, protocol: Protocol, last_event_id: str | None) -> list[int]:
    """The seqs of all record frames until the stream has caught up."""
    stream = open_stream(server, session, protocol=protocol, last_event_id=last_event_id)
    frames = stream.until_caught_up()
    stream.close()
    return [seq for frame in frames if frame.event == "record" for seq in frame.seqs]


def test_an_id_leads_back_as_often_as_asked(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, *range(6))
    session = watch(shared_server, {topic: {"from_seq": 2}})
    assert first_record(shared_server, session, protocol, None) == [3, 4, 5, 6]
    for cursor in (3, 0, 5, 6, 1):
        again = first_record(shared_server, session, protocol, make_id({topic: cursor}))
        assert again == list(range(cursor + 1, 7))
    assert first_record(shared_server, session, protocol, None) == []


def test_an_id_does_not_lead_forward(shared_server: Server, topic: str, protocol: Protocol) -> None:
    shared_server.write(topic, *range(6))
    for cursor in (3, 6, 7, 2**63, 2**64 - 1):
        session = watch(shared_server, {topic: {"from_seq": 2}})
        assert first_record(shared_server, session, protocol, make_id({topic: cursor})) == [3, 4, 5, 6]


def test_each_topic_is_led_by_its_own(shared_server: Server, protocol: Protocol) -> None:
    back, forward, unnamed = fresh(), fresh(), fresh()
    names = (back, forward, unnamed)
    for name in names:
        shared_server.write(name, *range(4))
    session = watch(shared_server, {name: {"from_seq": 2} for name in names})
    cursors = {back: 1, forward: 4, fresh("absent"): 0, "no topic, that": 7}
    stream = open_stream(shared_server, session, protocol=protocol, last_event_id=make_id(cursors))
    frame_checker = FrameChecker({back: 1, forward: 2, unnamed: 2}).take_all(stream.until_caught_up(3))
    assert frame_checker.cursors == dict.fromkeys(names, 4)
    assert frame_checker.last_id is not None
    assert set(read_id(frame_checker.last_id)) == set(names)
    stream.close()


@pytest.mark.parametrize("cursor", ["1", -1, 1.5, None, {}, [1], True])
def test_an_invalid_cursor_is_ignored(shared_server: Server, topic: str, cursor: Any) -> None:
    shared_server.write(topic, *range(4))
    session = watch(shared_server, {topic: {"from_seq": 2}})
    assert first_record(shared_server, session, "http1", make_id({topic: cursor})) == [3, 4]


@pytest.mark.parametrize(
    "text", ["", "!!!", "a", "=", "e30==x", "W10", "NQ", "bnVsbA", "x" * 5000, "1", "_w"]
)
def test_an_invalid_id_is_ignored(shared_server: Server, topic: str, text: str) -> None:
    shared_server.write(topic, *range(4))
    session = watch(shared_server, {topic: {"from_seq": 2}})
    assert first_record(shared_server, session, "http1", text) == [3, 4]


def test_back_to_evicted_records(shared_server: Server, topic: str, protocol: Protocol) -> None:
    ok(shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2}), 201)
    shared_server.write(topic, 1)
    session = watch(shared_server, topic)
    assert first_record(shared_server, session, protocol, None) == [1]
    shared_server.write(topic, *range(4))
    stream = open_stream(shared_server, session, protocol=protocol, last_event_id=make_id({topic: 0}))
    [tombstone, record, _] = stream.take("tombstone", "record", "caught-up")
    assert (tombstone.data["reason"], tombstone.data["gap_from"], tombstone.data["gap_to"]) == (
        "from_seq_too_old", 1, 3,
    )  # fmt: skip
    assert record.seqs == [4, 5]
    stream.close()
