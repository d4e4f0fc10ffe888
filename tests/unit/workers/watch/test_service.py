"""Goal: a shard announces new topics to the fronts that watch for them, and keeps sessions through take-overs, deaths
and disk errors.

Method: one shard on a simulated disk and clock; the test sends the messages of fronts.
"""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest

from tests.support.faults import fault
from tests.support.shard_rig import FRONT, error_of
from tests.support.watch_rig import PLAIN, FeedRig
from topics.link import wire
from topics.link.watch import (
    SESSION_TTL_MS,
    CreateSession,
    Find,
    FoundTopic,
    NameWatch,
    OpenedSession,
    OpenSession,
    SaveSession,
    SessionSpec,
    encode,
)
from workers.watch import service as watch_service
from workers.watch.service import JOB_KIND, SAVE_MS, TAKE_OVER_MS

Key = tuple[bytes, int]
OTHER = b"other front"
SPEC = SessionSpec(PLAIN, 15_000, ["t"])


# ---- topics


def look_out(rig: FeedRig, pattern: str, prefixes: list[str] | None = None, peer: bytes = FRONT) -> Key:
    key = rig.receive(wire.WATCH_NAMES, "", encode(NameWatch(pattern, prefixes)), peer=peer)
    rig.rest()
    return key


def found(rig: FeedRig, key: Key) -> tuple[list[str], list[str]]:
    """Names that existed, and those that were added."""
    first, *later = rig.heard[key]
    assert all(reply.kind == wire.NEW_TOPIC for reply in later)
    return msgspec.msgpack.decode(first.body), [bytes(reply.body).decode() for reply in later]


def test_a_look_out_hears_of_what_is_there_and_of_what_comes() -> None:
    rig = FeedRig()
    rig.put("a.1")
    rig.put("b.1")
    key = look_out(rig, "a.>")
    rig.write(1, "a.2")
    rig.put("a.3")
    rig.put("b.2")
    rig.write(1, "a.2")
    assert found(rig, key) == (["a.1"], ["a.2", "a.3"])


def test_a_look_out_that_comes_with_the_topic_s_creation_hears_of_it_once() -> None:
    for first in (wire.WRITE, wire.WATCH_NAMES):
        rig = FeedRig()
        if first == wire.WRITE:
            rig.receive(wire.WRITE, "a.1", {"records": [{"data": 1}]})
        key = rig.receive(wire.WATCH_NAMES, "", encode(NameWatch("a.>")))
        if first == wire.WATCH_NAMES:
            rig.receive(wire.WRITE, "a.1", {"records": [{"data": 1}]})
        rig.rest()
        there, came = found(rig, key)
        assert there + came == ["a.1"]


def test_a_topic_is_told_of_when_it_lasts() -> None:
    rig = FeedRig()
    key = look_out(rig, ">")
    rig.is_syncing = False
    asked = rig.receive(wire.PUT_TOPIC, "a", {"durability": "fsync"})
    rig.rest()
    assert (asked in rig.replies, found(rig, key)[1]) == (False, [])
    rig.is_syncing = True
    rig.rest()
    assert (asked in rig.replies, found(rig, key)[1]) == (True, ["a"])


def test_a_topic_that_is_made_again_is_told_of_again() -> None:
    rig = FeedRig()
    key = look_out(rig, "a.*")
    for _ in range(3):
        rig.put("a.1")
        rig.drop("a.1")
    assert found(rig, key) == ([], ["a.1"] * 3)


def test_prefixes_of_a_key_hold_now_and_later() -> None:
    rig = FeedRig()
    rig.put("a.1")
    rig.put("b.1")
    key, none = look_out(rig, ">", ["b.", "c."]), look_out(rig, ">", [])
    for name in ("a.2", "b.2", "c.2"):
        rig.put(name)
    assert found(rig, key) == (["b.1"], ["b.2", "c.2"])
    assert found(rig, none) == ([], [])


def test_a_look_out_ends_with_unfollow_and_with_its_front() -> None:
    rig = FeedRig()
    ends, dies, stays = look_out(rig, "*"), look_out(rig, "*", peer=OTHER), look_out(rig, "*")
    rig.unfollow(ends)
    rig.core.forget_peer(OTHER)
    rig.put("a")
    assert [found(rig, key)[1] for key in (ends, dies, stays)] == [[], [], ["a"]]


def test_a_front_has_no_more_look_outs_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_service, "NAME_WATCHES_PER_FRONT_MAX", 2)
    rig = FeedRig()
    keys = [look_out(rig, "a.>") for _ in range(3)]
    assert [rig.replies[key].status for key in keys] == [200, 200, 400]
    rig.unfollow(keys[0])
    assert rig.replies[look_out(rig, "a.>")].status == 200


@pytest.mark.parametrize("pattern", ["a.>.b", "", "..", "a..*"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    rig = FeedRig()
    assert rig.replies[look_out(rig, pattern)].status == 400
    rig.put("a")
    assert len(rig.core.watch._name_watches) == 0


def find(rig: FeedRig, **wish: Any) -> list[FoundTopic]:
    reply = rig.ask(wire.FIND, "", encode(Find(**wish)))
    assert reply is not None and reply.status == 200
    return sorted(msgspec.msgpack.decode(reply.body, type=list[FoundTopic]), key=lambda row: row.name)


def test_find_tells_of_names_and_of_what_patterns_match() -> None:
    rig = FeedRig()
    rig.put("a.1")
    rig.write(3, "a.2")
    rig.write(1, "b")
    assert find(rig) == []
    assert find(rig, names=["none"]) == []
    a1, a2, b = (rig.core.engine.shard.state.published[name].epoch for name in ("a.1", "a.2", "b"))
    assert find(rig, names=["b", "a.1", "none"]) == [
        FoundTopic("a.1", 0, 1, [], a1),
        FoundTopic("b", 1, 1, [], b),
    ]
    rows = find(rig, names=["a.2"], patterns=["b", "a.*", ">"])
    assert rows == [
        FoundTopic("a.1", 0, 1, [1, 2], a1), FoundTopic("a.2", 3, 1, [], a2), FoundTopic("b", 1, 1, [0, 2], b)
    ]  # fmt: skip
    assert [row.name for row in find(rig, patterns=[">"], prefixes=["a."])] == ["a.1", "a.2"]


def test_find_stops_where_no_stream_could_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_service, "STREAM_TOPICS_MAX", 3)
    monkeypatch.setattr("workers.watch.name_search.NAMES_PER_STEP", 2)
    rig = FeedRig()
    for i in range(9):
        rig.put(f"a.{i}")
    assert len(find(rig, patterns=["a.*"])) == 4


# ---- sessions


def create(rig: FeedRig, wid: str = "w", **cursors: int) -> Key:
    return rig.session(CreateSession(wid, b"", SPEC, cursors or {"t": 0}))


def made(rig: FeedRig, wid: str = "w", **cursors: int) -> None:
    key = create(rig, wid, **cursors)
    rig.rest()
    assert rig.replies[key].status == 200


def opened(rig: FeedRig, stream: int, *, peer: bytes = FRONT, last_id: str = "", wid: str = "w") -> Key:
    key = rig.session(OpenSession(wid, b"", stream, last_id), peer)
    rig.rest()
    return key


def session_of(rig: FeedRig, key: Key) -> OpenedSession:
    reply = rig.replies[key]
    assert reply.status == 200, bytes(reply.body)
    return msgspec.msgpack.decode(reply.body, type=OpenedSession)


def save(
    rig: FeedRig, stream: int, number: int, peer: bytes = FRONT, *, closes: bool = False, **cursors: int
) -> bool:
    key = rig.session(SaveSession("w", stream, number, cursors, closes), peer)
    rig.rest()
    taken: bool = msgspec.msgpack.decode(rig.replies[key].body)
    return taken


def ended(rig: FeedRig) -> list[Key]:
    """Streams that fronts were told to end."""
    return [(peer, reply.id) for peer, reply in rig.told if reply.kind == wire.END_STREAM]


def restart(rig: FeedRig) -> FeedRig:
    rig.disk.kill()
    return FeedRig(rig.config, incarnation=rig.incarnation + 1, clock=rig.clock, disk=rig.disk)


def test_a_session_is_answered_when_it_lasts() -> None:
    rig = FeedRig()
    key = create(rig, t=7)
    rig._take(rig.core.tend())
    (job,) = [job for job in rig.jobs if job.kind == JOB_KIND]
    assert key not in rig.replies
    rig.jobs.remove(job)
    late = create(rig, "late")  # while the save runs: it is for the next one
    rig._take(rig.core.tend())
    job.run()
    rig._take(rig.core.finish(job, None, 0.0))
    assert (key in rig.replies, late in rig.replies) == (True, False)
    rig.rest()
    assert late in rig.replies
    rig = restart(rig)
    assert session_of(rig, opened(rig, 1)).cursors == {"t": 7}
    assert session_of(rig, opened(rig, 2, wid="late")).cursors == {"t": 0}


def test_saves_of_streams_are_written_within_a_second_and_not_each_for_itself() -> None:
    rig = FeedRig()
    made(rig)
    rig.advance(SAVE_MS)
    writes = rig.core.watch._saved_ms
    save_number = session_of(rig, opened(rig, 5)).save
    for i in range(1, 10):
        assert save(rig, 5, save_number + i, t=i)
        rig.advance(10)
    assert rig.core.watch._saved_ms <= writes + 10 + SAVE_MS
    rig.advance(SAVE_MS)
    rig = restart(rig)
    assert session_of(rig, opened(rig, 6)).cursors == {"t": 9}


def test_a_second_stream_waits_until_the_first_has_let_go() -> None:
    rig = FeedRig()
    made(rig)
    first = session_of(rig, opened(rig, 1))
    key = opened(rig, 2, peer=OTHER)
    assert (ended(rig), key in rig.replies) == ([(FRONT, 1)], False)
    assert save(rig, 1, first.save + 1, closes=True, t=5)
    assert session_of(rig, key).cursors == {"t": 5}
    assert not save(rig, 1, first.save + 2, t=1)
    assert save(rig, 2, first.save + 2, OTHER, t=6)


def test_a_stream_that_does_not_let_go_is_taken_over_by_force() -> None:
    rig = FeedRig()
    made(rig)
    first = session_of(rig, opened(rig, 1))
    key = opened(rig, 2, peer=OTHER)
    rig.advance(TAKE_OVER_MS - 1)
    assert key not in rig.replies
    rig.advance(1)
    second = session_of(rig, key)
    assert (second.cursors, second.save > first.save) == ({"t": 0}, True)
    assert not save(rig, 1, first.save + 1, closes=True, t=9)
    assert save(rig, 2, second.save + 1, OTHER, t=3)


def test_of_several_that_wait_the_last_one_has_it() -> None:
    rig = FeedRig()
    made(rig)
    first = session_of(rig, opened(rig, 1))
    keys = [opened(rig, number) for number in (2, 3)]
    assert save(rig, 1, first.save + 1, closes=True)
    assert [key in rig.replies for key in keys] == [True, False]
    assert ended(rig)[-1] == (FRONT, 2)
    assert save(rig, 2, session_of(rig, keys[0]).save + 1, closes=True)
    assert session_of(rig, keys[1])


@fault("front", "a front dies that had a stream, or waited for one", "whoever comes next has it at once")
def test_a_dead_front_keeps_nobody_waiting() -> None:
    rig = FeedRig()
    made(rig)
    session_of(rig, opened(rig, 1, peer=b"dies"))
    key = opened(rig, 2)
    rig.core.forget_peer(b"dies")
    rig.rest()
    assert session_of(rig, key)


def test_streams_that_waited_for_a_dead_front_come_in_their_order() -> None:
    """Their order was that of a set of names, which differs from process to process."""
    rig = FeedRig()
    wids = [f"w{i}" for i in range(12)]
    for number, wid in enumerate(wids, 1):
        made(rig, wid)
        session_of(rig, opened(rig, number, peer=b"dies", wid=wid))
    keys = [opened(rig, number, wid=wid) for number, wid in enumerate(wids, 101)]
    rig.core.forget_peer(b"dies")
    rig.rest()
    assert [key for key in rig.replies if key in keys] == keys


def test_a_stream_is_not_opened_for_a_front_that_died_waiting() -> None:
    rig = FeedRig()
    made(rig)
    first = session_of(rig, opened(rig, 1))
    opened(rig, 2, peer=b"dies")
    rig.core.forget_peer(b"dies")
    assert save(rig, 1, first.save + 1, closes=True)
    rig.advance(2 * TAKE_OVER_MS)
    rig.advance(SESSION_TTL_MS)
    made(rig, "sweeps")
    assert error_of(rig.replies[opened(rig, 3)])["code"] == "not_found"


def test_a_session_s_time_begins_when_its_stream_ends_however_idle_the_shard_was() -> None:
    rig = FeedRig()
    made(rig)
    rig.advance(SAVE_MS)
    number = session_of(rig, opened(rig, 1)).save
    rig.advance(2 * SESSION_TTL_MS)  # nothing is due, so there is no turn
    assert save(rig, 1, number + 1, closes=True, t=3)
    rig.write()
    rig.advance(1000)
    assert session_of(rig, opened(rig, 2)).cursors == {"t": 3}


def test_only_to_look_takes_nothing_over() -> None:
    rig = FeedRig()
    made(rig)
    session_of(rig, opened(rig, 1))
    assert session_of(rig, opened(rig, 0, peer=OTHER)).cursors == {"t": 0}
    assert ended(rig) == []


def test_a_session_that_is_not_there_is_said_so_at_once() -> None:
    rig = FeedRig()
    assert error_of(rig.replies[opened(rig, 1)])["code"] == "not_found"


@fault("disk", "watch sessions cannot be written", "watching goes on; the next save has them")
@pytest.mark.parametrize(
    ("call", "is_first"), [("write", 1), ("sync", 1), ("rename", 1), ("write", 0), ("sync", 0)]
)
def test_a_save_that_fails_is_made_up_for(call: str, is_first: int) -> None:
    rig = FeedRig()
    if not is_first:  # so that it appends
        made(rig, "before")
    rig.disk.fail_at(1, errno.EIO, of=call)
    key = create(rig, t=4)
    rig._take(rig.core.tend())
    job = next(job for job in rig.jobs if job.kind == JOB_KIND)
    rig.jobs.remove(job)
    with pytest.raises(OSError) as failed:
        job.run()
    rig._take(rig.core.finish(job, failed.value, 0.0))
    assert rig.replies[key].status == 200
    assert session_of(rig, opened(rig, 1)).cursors == {"t": 4}
    rig.advance(SAVE_MS)
    rig = restart(rig)
    assert session_of(rig, opened(rig, 1)).cursors == {"t": 4}


def test_a_save_takes_a_slice_and_the_next_one_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_service, "SAVE_ROWS_MAX", 3)
    rig = FeedRig()
    wids = [f"w{n}" for n in range(10)]
    for wid in wids:
        made(rig, wid)
    rig.advance(2 * SAVE_MS)
    for stream, wid in enumerate(wids, 1):
        session_of(rig, opened(rig, stream, wid=wid))
    rig.advance(SAVE_MS)
    assert not rig.core.watch.sessions.is_dirty
    rig = restart(rig)
    assert [session.orphan for session in rig.core.watch.sessions._sessions.values()] == list(range(1, 11))


@pytest.mark.parametrize("call", ["rename", "write"])
def test_groups_are_in_the_save_that_makes_up_for_one_that_failed(call: str) -> None:
    rig = FeedRig()
    rig.write(3)
    if call == "write":
        made(rig)
    rig.advance(2 * SAVE_MS)
    rig.disk.fail_at(1, errno.EIO, of=call)
    rig.fed(rig.follow(group="g"))
    rig.advance(SAVE_MS)
    rig.advance(SAVE_MS)
    rig = restart(rig)
    assert [row[3] for row in rig.core.watch.feeds.group_rows()] == [3]


def test_the_last_save_is_on_the_way_out() -> None:
    rig = FeedRig()
    made(rig)
    number = session_of(rig, opened(rig, 1)).save
    assert save(rig, 1, number + 1, t=8)
    rig.send(rig.core.close())
    rig = restart(rig)
    assert session_of(rig, opened(rig, 2)).cursors == {"t": 8}


@fault("disk", "watch sessions cannot be written when the server stops", "it stops nevertheless")
def test_a_last_save_that_fails_keeps_nothing_from_closing() -> None:
    rig = FeedRig()
    made(rig)
    number = session_of(rig, opened(rig, 1)).save
    assert save(rig, 1, number + 1, t=8)
    rig.disk.fail_at(1, errno.ENOSPC, of="write")
    rig.send(rig.core.close())
    assert rig.core.engine.closed


def test_a_stream_that_outlives_the_worker_has_its_session_still() -> None:
    rig = FeedRig()
    made(rig)
    number = session_of(rig, opened(rig, 7)).save
    rig.advance(SAVE_MS)
    rig = restart(rig)
    assert save(rig, 7, number + 1, t=5)
    key = opened(rig, 8, peer=OTHER)
    assert ended(rig) == [(FRONT, 7)]
    assert save(rig, 7, number + 2, closes=True, t=6)
    assert session_of(rig, key).cursors == {"t": 6}


def test_open_streams_of_other_fronts_are_added_up() -> None:
    rig = FeedRig()
    for peer, count in ((b"a", 3), (b"b", 4), (b"a", 2)):
        rig.tell(wire.STREAM_COUNT, (peer, count))
    assert [rig.core.watch.streams_elsewhere(peer) for peer in (b"a", b"b", b"c")] == [4, 2, 6]
    rig.core.forget_peer(b"b")
    assert rig.core.watch.streams_elsewhere(b"c") == 2
