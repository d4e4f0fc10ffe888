"""The table of watch sessions.

Goal: a session belongs to one stream and one key, continues where its client says, is removed when it is not used,
and takes bounded memory. Method: single cases; random ones are in test_sessions_random.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.faults import fault
from tests.support.sim_disk import SimDisk
from tests.unit.link.test_event_ids import made
from topics.api.errors import InvalidRequest, SessionNotFound, Throttled, TopicsError, Unauthorized
from topics.engine.storage.files import WATCH_MAGIC, write_digest_file
from topics.link import event_ids
from topics.link.watch import (
    SESSION_TTL_MS,
    STREAM_TOPICS_MAX,
    CreateSession,
    EpochChange,
    FeedOptions,
    OpenedSession,
    OpenSession,
    SaveSession,
    SessionSpec,
)
from topics.protocols.http.errors import STATUS
from workers.watch import session_file
from workers.watch.session_file import WatchFile
from workers.watch.sessions import (
    BYTES_MAX,
    ERA,
    ERA_MS,
    UNDO_CURSORS_MAX,
    UNDO_SAVES_MIN,
    SessionRow,
    Sessions,
    StreamOwner,
)

FRONT, OTHER = b"front-1", b"front-2"
PLAIN = SessionSpec(FeedOptions(), 15_000)
PATTERN = SessionSpec(FeedOptions(), 15_000, patterns=["t.>"])
T0 = 1_000_000
FIRST_ERA = T0 // ERA_MS * ERA


def make(
    cursors: dict[str, int],
    *,
    spec: SessionSpec = PLAIN,
    wid: str = "w",
    key: bytes = b"",
    max_sessions: int = 0,
) -> Sessions:
    sessions = Sessions(max_sessions)
    sessions.create(CreateSession(wid, key, spec, cursors), T0)
    return sessions


def opened(
    sessions: Sessions,
    stream: int = 1,
    last_event_id: str = "",
    *,
    peer: bytes = FRONT,
    now_ms: int = T0,
    force: bool = False,
) -> OpenedSession:
    answer = sessions.open(peer, OpenSession("w", b"", stream, last_event_id), now_ms, force=force)
    assert isinstance(answer, OpenedSession)
    return answer


def saved(
    sessions: Sessions,
    number: int,
    cursors: dict[str, int],
    *,
    stream: int = 1,
    peer: bytes = FRONT,
    closes: bool = False,
    now_ms: int = T0,
) -> bool:
    return sessions.save(peer, SaveSession("w", stream, number, cursors, closes), now_ms)


def stored(sessions: Sessions) -> list[SessionRow]:
    """As a file of this moment has them."""
    sessions.take(1 << 30)
    disk = SimDisk(1)
    disk.make_dir("d")
    WatchFile(disk, "d").write(sessions.rows(), sessions.changes(), [])
    found = session_file.read(disk, "d")
    assert found is not None
    return found.sessions


def restarted(sessions: Sessions, now_ms: int = T0) -> Sessions:
    """As after a restart of the worker with the file of this moment."""
    again = Sessions(0)
    again.load(stored(sessions), now_ms)
    return again


def status(error: TopicsError) -> int:
    return STATUS[error.code]


# ---- number of sessions


def long_patterns(n: int) -> SessionSpec:
    return SessionSpec(FeedOptions(), 15_000, patterns=[f"{n}.{i}.{'p' * 240}.>" for i in range(256)])


def filled(
    sessions: Sessions, key: bytes, spec: Callable[[int], SessionSpec]
) -> tuple[int, dict[str, object]]:
    """How many sessions a key can create, and the error of the next."""
    for n in itertools.count():
        try:
            sessions.create(CreateSession(f"{key.hex()}-{n}", key, spec(n), {}), T0)
        except Throttled as error:
            return n, error.detail
    raise AssertionError


def test_sessions_are_bounded_in_bytes_for_a_key_and_for_all() -> None:
    sessions = Sessions(0, 1000)
    counts = []
    for key in (b"a", b"b", b"c", b"d"):
        count, detail = filled(sessions, key, long_patterns)
        counts.append(count)
        assert detail["limit"] == "watch_session_bytes"
    assert len(set(counts)) == 1 and 200 < counts[0] < 300, "one key leaves room for the others"
    assert filled(sessions, b"", long_patterns)[1] == {"limit": "watch_session_bytes", "max": BYTES_MAX}
    assert sum(map(len, sessions.rows())) <= BYTES_MAX
    again = restarted(sessions)
    assert filled(again, b"", long_patterns)[1] == {"limit": "watch_session_bytes", "max": BYTES_MAX}
    again.sweep(T0 + SESSION_TTL_MS)
    assert filled(again, b"", long_patterns)[0] > 3 * counts[0], (
        "the bytes of removed sessions are free again"
    )


def test_sessions_of_a_key_are_bounded_in_number() -> None:
    sessions = Sessions(0, 3)
    for key in (b"a", b"b"):
        assert filled(sessions, key, lambda n: PLAIN) == (
            3,
            {"limit": "max_watch_sessions_per_key", "max": 3},
        )
    for n in range(10):  # without keys there is no key to count for
        sessions.create(CreateSession(f"{n}", b"", PLAIN, {}), T0)
    sessions.create(CreateSession("later", b"a", PLAIN, {}), T0 + SESSION_TTL_MS)


# ---- who may open


def test_a_session_is_opened_with_its_cursors_and_what_it_is_about() -> None:
    answer = opened(make({"a": 3, "b": 0}))
    assert answer == OpenedSession(PLAIN, {"a": 3, "b": 0}, 0)


def test_an_unknown_session_is_404_and_another_key_401() -> None:
    sessions = make({"a": 0}, key=b"made with")
    with pytest.raises(SessionNotFound) as unknown:
        sessions.open(FRONT, OpenSession("x", b"made with", 1), T0)
    assert status(unknown.value) == 404
    for key in (b"", b"another"):
        for stream in (0, 1):
            with pytest.raises(Unauthorized) as refused:
                sessions.open(FRONT, OpenSession("w", key, stream), T0)
            assert status(refused.value) == 401
    assert isinstance(sessions.open(FRONT, OpenSession("w", b"made with", 1), T0), OpenedSession)


def test_a_session_made_without_a_key_needs_none() -> None:
    answer = make({"a": 0}).open(FRONT, OpenSession("w", b"some key", 1), T0)
    assert isinstance(answer, OpenedSession)


def test_a_look_changes_nothing() -> None:
    sessions = make({"a": 9})
    sessions.take(10)
    assert opened(sessions, 0, made({"a": 1})).cursors == {"a": 9}
    assert not sessions.is_dirty
    opened(sessions, 5)
    assert opened(sessions, 0, peer=OTHER).cursors == {"a": 9}
    assert saved(sessions, 1, {"a": 10}, stream=5)


# ---- limits


def test_more_sessions_than_allowed_are_throttled_until_one_goes() -> None:
    sessions = make({"a": 0}, max_sessions=2)
    sessions.create(CreateSession("v", b"", PLAIN, {"a": 0}), T0 + 1)
    with pytest.raises(Throttled) as refused:
        sessions.create(CreateSession("u", b"", PLAIN, {}), T0 + SESSION_TTL_MS - 1)
    assert refused.value.detail == {"limit": "max_watch_sessions", "max": 2}
    assert status(refused.value) == 429
    sessions.create(CreateSession("u", b"", PLAIN, {}), T0 + SESSION_TTL_MS)
    assert sessions.count == 2


def test_too_many_topics_are_refused_at_first_and_ignored_later() -> None:
    many = {f"t.{i}": 0 for i in range(STREAM_TOPICS_MAX)}
    with pytest.raises(InvalidRequest):
        make({**many, "one more": 0})
    sessions = make(many, spec=PATTERN)
    opened(sessions)
    assert saved(sessions, 1, {"t.x": 4, "t.0": 4}, closes=True)
    answer = opened(sessions)
    assert len(answer.cursors) == STREAM_TOPICS_MAX
    assert "t.x" not in answer.cursors
    assert answer.cursors["t.0"] == 4


def test_undo_steps_are_bounded() -> None:
    sessions = make({f"t.{i}": 0 for i in range(100)}, spec=PATTERN)
    opened(sessions)
    for number in range(1, 500):
        saved(sessions, number, {f"t.{i}": number for i in range(100)})
    session = sessions._sessions["w"]
    assert session.undo_size == sum(undo.size for undo in session.undo) <= UNDO_CURSORS_MAX
    assert len(session.undo) == UNDO_CURSORS_MAX // 101
    kept = 499 - len(session.undo)
    assert session.cursors_at(kept + 1)["t.7"] == kept + 1
    assert session.cursors_at(1)["t.7"] == kept, "the oldest known position is used"
    (row,) = stored(sessions)
    assert len(row.undo) == 2
    assert len(msgspec.msgpack.encode(row)) < 12_000


def test_the_last_saves_of_a_very_large_session_can_be_undone() -> None:
    sessions = make({f"t.{i}": 0 for i in range(STREAM_TOPICS_MAX)})
    opened(sessions)
    for number in range(1, 10):
        saved(sessions, number, {f"t.{i}": number for i in range(STREAM_TOPICS_MAX)})
    session = sessions._sessions["w"]
    assert len(session.undo) == UNDO_SAVES_MIN
    assert session.cursors_at(6)["t.77"] == 6


def test_nothing_is_kept_for_undoing_where_ids_name_all_topics() -> None:
    sessions = make({"a": 0})
    opened(sessions)
    for number in range(1, 100):
        saved(sessions, number, {"a": number})
    assert not sessions._sessions["w"].undo
    (row,) = stored(sessions)
    assert (row.cursors, row.save, row.undo) == ({"a": 99}, 99, [])


# ---- time


def test_a_session_without_a_stream_goes_and_one_with_a_stream_stays() -> None:
    sessions = make({"a": 0})
    opened(sessions, now_ms=T0 + SESSION_TTL_MS - 1)
    later = T0 + 10 * SESSION_TTL_MS
    sessions.sweep(later)
    assert sessions.count == 1
    saved(sessions, 1, {}, closes=True, now_ms=later)
    sessions.sweep(later + SESSION_TTL_MS - 1)
    assert sessions.count == 1
    sessions.take(10)
    with pytest.raises(SessionNotFound):
        opened(sessions, now_ms=later + SESSION_TTL_MS)
    assert (sessions.count, sessions.is_dirty) == (0, True)


def test_idle_time_counts_from_the_restart() -> None:
    sessions = restarted(make({"a": 0}), T0 + 10**9)
    sessions.sweep(T0 + 10**9 + SESSION_TTL_MS - 1)
    assert sessions.count == 1
    sessions.sweep(T0 + 10**9 + SESSION_TTL_MS)
    assert sessions.count == 0


def test_the_longest_idle_goes_first_also_after_streams() -> None:
    sessions = make({"a": 0})
    sessions.create(CreateSession("v", b"", PLAIN, {}), T0 + 1)
    opened(sessions, now_ms=T0 + 2)
    saved(sessions, 1, {}, closes=True, now_ms=T0 + 3)
    sessions.sweep(T0 + SESSION_TTL_MS + 1)
    assert sessions.count == 1
    assert opened(sessions, 0, now_ms=T0 + SESSION_TTL_MS + 1).cursors == {"a": 0}


# ---- one stream at a time


def test_a_newer_stream_takes_over_when_the_older_has_saved() -> None:
    sessions = make({"a": 0})
    opened(sessions, 7)
    ask = OpenSession("w", b"", 8)
    assert sessions.open(OTHER, ask, T0) == StreamOwner(FRONT, 7)
    assert saved(sessions, 1, {"a": 5}, stream=7), "it continues until it is told to end"
    assert saved(sessions, 2, {"a": 6}, stream=7, closes=True)
    assert sessions.open(OTHER, ask, T0) == OpenedSession(PLAIN, {"a": 6}, 2)
    assert not saved(sessions, 3, {"a": 1}, stream=7)
    assert not saved(sessions, 3, {"a": 1}, stream=8), "another front's stream of that number"
    assert saved(sessions, 3, {"a": 7}, stream=8, peer=OTHER)


@fault(
    "front",
    "a front does not let go of a watch stream that is continued elsewhere",
    "the newer stream begins after a second, where the client's last event id says",
)
def test_a_stream_that_does_not_end_is_taken_over_by_force() -> None:
    sessions = make({"a": 3})
    opened(sessions, 7)
    answer = opened(sessions, 1, made({"a": 9}), peer=OTHER, force=True)
    assert answer.cursors == {"a": 9}
    assert not saved(sessions, 1, {"a": 4}, stream=7, closes=True)
    assert saved(sessions, answer.save + 1, {"a": 10}, peer=OTHER)


def test_force_means_nothing_when_no_stream_has_it() -> None:
    sessions = make({"a": 3})
    assert opened(sessions, 1, made({"a": 9}), force=True).cursors == {"a": 3}


def test_saves_of_sessions_that_are_gone_are_ignored() -> None:
    sessions = make({"a": 3})
    assert not saved(sessions, 1, {"a": 4}), "no stream has it"
    assert not saved(sessions, 1, {"a": 4}, stream=0)
    assert not sessions.save(FRONT, SaveSession("x", 1, 1, {}), T0)
    assert opened(sessions).cursors == {"a": 3}


# ---- event ids


def test_an_id_sets_back_and_does_not_move_forward() -> None:
    sessions = make({"a": 5, "b": 5, "c": 5})
    assert opened(sessions, 1, made({"a": 2, "b": 9, "unknown": 1})).cursors == {"a": 2, "b": 5, "c": 5}


@pytest.mark.parametrize("text", ["", "nonsense", made({}), "A" * 100])
def test_ids_that_say_nothing_are_ignored(text: str) -> None:
    assert opened(make({"a": 5}), 1, text).cursors == {"a": 5}


@fault(
    "front",
    "a front dies with open watch streams",
    "clients reconnect and go on after the last event that they got, also when it was not saved",
)
def test_when_its_front_died_an_id_may_also_move_a_session_forward() -> None:
    sessions = make({"a": 5, "b": 5})
    opened(sessions)
    sessions.front_gone(OTHER, T0)
    assert isinstance(sessions.open(OTHER, OpenSession("w", b"", 9), T0), StreamOwner)
    sessions.front_gone(FRONT, T0)
    assert opened(sessions, 2, made({"a": 8, "b": 1})).cursors == {"a": 8, "b": 1}
    assert saved(sessions, FIRST_ERA + 1, {}, stream=2, closes=True)
    assert opened(sessions, 3, made({"a": 99, "b": 0})).cursors == {"a": 8, "b": 0}, "they are usable again"


@fault(
    "worker",
    "a worker dies that keeps watch sessions with open streams",
    "streams go on; a client that reconnects goes on after the last event that it got",
)
def test_after_a_restart_an_id_may_move_a_session_forward() -> None:
    sessions = make({"a": 5})
    opened(sessions)
    assert opened(restarted(sessions), 1, made({"a": 8})).cursors == {"a": 8}
    assert opened(restarted(restarted(sessions)), 1, made({"a": 8})).cursors == {"a": 8}
    saved(sessions, 1, {"a": 6}, closes=True)
    # It may have been opened again after the file was written.
    assert opened(restarted(sessions), 1, made({"a": 8})).cursors == {"a": 8}


def test_a_stream_that_outlives_the_worker_keeps_its_session() -> None:
    sessions = make({"a": 5})
    opened(sessions, 4)
    sessions = restarted(sessions)
    assert not saved(sessions, 3, {"a": 1}, stream=5)
    assert saved(sessions, 3, {"a": 7}, stream=4, peer=OTHER), "fronts have other names in the new worker"
    assert sessions.open(FRONT, OpenSession("w", b"", 9), T0) == StreamOwner(OTHER, 4)
    sessions.sweep(T0 + 2 * SESSION_TTL_MS)
    assert sessions.count == 1
    assert saved(sessions, 4, {"a": 8}, stream=4, peer=OTHER, closes=True)
    assert opened(sessions, 5, made({"a": 9})).cursors == {"a": 9}, "saves 1 and 2 were lost"


def test_a_stream_loses_its_session_when_a_newer_one_comes_first() -> None:
    sessions = make({"a": 5})
    opened(sessions, 4)
    sessions = restarted(sessions)
    opened(sessions, 5)
    assert not saved(sessions, 1, {"a": 7}, stream=4)


# ---- ids that refer to saves


def large(n: int = 100) -> dict[str, int]:
    return {f"t.{i}": 10 for i in range(n)}


def test_an_id_that_builds_on_an_earlier_save_sets_back_to_it() -> None:
    sessions = make(large())
    opened(sessions)
    saved(sessions, 1, {"t.1": 11, "t.2": 11})
    saved(sessions, 2, {"t.2": 12, "t.3": 12})
    saved(sessions, 3, {"t.1": 13}, closes=True)
    answer = opened(sessions, 2, made({"t.4": 10, "t.2": 12}, 1))
    assert answer.cursors == {**large(), "t.1": 11, "t.2": 12}
    assert answer.save == FIRST_ERA, "ids of the new stream refer to where it began"
    assert opened(sessions, 2, made({}, answer.save)).cursors == answer.cursors
    assert opened(sessions, 2, made({}, 3)).cursors == answer.cursors, "an id only sets back"
    assert opened(sessions, 2, made({}, 0)).cursors == large()


def test_a_topic_that_a_pattern_found_later_begins_again() -> None:
    sessions = make({"t.a": 4}, spec=PATTERN)
    opened(sessions)
    saved(sessions, 1, {"t.a": 5})
    saved(sessions, 2, {"t.b": 7}, closes=True)
    assert opened(sessions, 2).cursors == {"t.a": 5, "t.b": 7}
    saved(sessions, 3, {}, stream=2, closes=True)
    assert opened(sessions, 3, made({"t.a": 5})).cursors == {"t.a": 5}, "its first records may be lost"
    assert saved(sessions, FIRST_ERA + 1, {"t.b": 3}, stream=3, closes=True)
    assert opened(sessions, 4, made({"t.b": 2})).cursors == {"t.a": 5, "t.b": 2}
    assert opened(restarted(sessions), 4, made({"t.a": 1}, FIRST_ERA)).cursors == {"t.a": 1}


def test_when_saves_are_missing_an_id_may_move_a_session_forward() -> None:
    sessions = make({"a": 5, "b": 5})
    opened(sessions)
    saved(sessions, 3, {"a": 7}, closes=True)
    assert opened(sessions, 2, made({"a": 7, "b": 6})).cursors == {"a": 7, "b": 6}


def test_a_number_out_of_order_is_applied_and_forgets_what_came_before() -> None:
    sessions = make(large())
    opened(sessions)
    saved(sessions, 1, {"t.1": 11})
    saved(sessions, 5, {"t.1": 15})
    saved(sessions, 2, {"t.1": 12}, closes=True)
    answer = opened(sessions, 2)
    assert answer.cursors == {**large(), "t.1": 12}
    assert not sessions._sessions["w"].maybe_stale


# ---- whether there is something to write


def test_it_is_dirty_after_every_change() -> None:
    sessions = make({"a": 0})

    def was_dirty() -> bool:
        dirty = sessions.is_dirty
        sessions.take(10)
        return dirty

    assert was_dirty()
    assert not was_dirty()
    opened(sessions)
    assert was_dirty()
    saved(sessions, 1, {"a": 1})
    assert was_dirty()
    saved(sessions, 1, {"a": 1}, stream=99)
    assert not was_dirty()
    sessions.front_gone(FRONT, T0)
    assert was_dirty()
    sessions.sweep(T0)
    assert not was_dirty()


def test_the_file_has_what_changed_and_what_did_not() -> None:
    sessions = Sessions(0)
    for wid in ("w", "v", "u"):
        sessions.create(CreateSession(wid, b"", PLAIN, {"a": 0}), T0)
    before = stored(sessions)
    opened(sessions, now_ms=T0 + 1)
    saved(sessions, 1, {"a": 1}, closes=True, now_ms=T0 + 1)
    after = {row.wid: row for row in stored(sessions)}
    assert after["w"].cursors == {"a": 1}
    assert [after[row.wid] for row in before[1:]] == before[1:]
    again = restarted(sessions)
    assert {row.wid: replace(row, maybe_stale=False) for row in stored(again)} == after
    sessions.sweep(T0 + SESSION_TTL_MS)
    assert [row.wid for row in stored(sessions)] == ["w"]


# ---- found by the simulation


def test_a_client_that_has_not_heard_of_a_new_topic_of_that_name_hears_of_it() -> None:
    """A stream had started again in it, and its client left before it knew: it continued in the middle of the new
    topic.
    """
    sessions = make({"a": 43})
    opened(sessions)
    saved(sessions, 1, {"a": 8}, closes=True)
    assert opened(sessions, 2, made({"a": 43})).cursors == {"a": 43}


def test_topics_that_a_pattern_has_found_are_known_by_an_id_when_their_save_was_lost() -> None:
    """They were read again from their beginning."""
    sessions = make({"t.a": 4}, spec=PATTERN)
    opened(sessions)
    sessions.front_gone(FRONT, T0)
    assert opened(sessions, 2, made({"t.a": 5, "t.b": 7, "u": 9})).cursors == {"t.a": 5, "t.b": 7}


def test_only_after_a_loss_does_an_id_bring_topics_in() -> None:
    sessions = make({"t.a": 4}, spec=PATTERN)
    opened(sessions)
    saved(sessions, 1, {"t.a": 5}, closes=True)
    assert opened(sessions, 2, made({"t.a": 5, "t.b": 7})).cursors == {"t.a": 5}


# ---- epochs


def changed(sessions: Sessions, number: int, cursor: int, change: EpochChange) -> None:
    assert sessions.save(FRONT, SaveSession("w", 1, number, {"a": cursor}, epochs={"a": change}), T0)


def test_a_session_remembers_under_which_epochs_it_was_read_over_restarts_too() -> None:
    sessions = Sessions(0)
    sessions.create(CreateSession("w", b"", PLAIN, {"a": 3, "b": 4}, {"a": "1.0"}), T0)
    assert opened(sessions).epochs == {"a": "1.0"}
    changed(sessions, 1, 5, EpochChange("1.1"))
    again = Sessions(0)
    again.load(stored(sessions), T0)
    assert opened(again, 2).epochs == {"a": "1.1"}


def test_a_file_without_epochs_says_that_they_are_not_known() -> None:
    sessions = make({"a": 3})
    (raw,) = sessions.rows()
    row = msgspec.msgpack.decode(raw)
    disk = SimDisk(1)
    disk.make_dir("d")
    write_digest_file(disk, "d/watch", WATCH_MAGIC, msgspec.msgpack.encode(([row[:9]], [])))
    old = session_file.read(disk, "d")
    assert old is not None
    again = Sessions(0)
    again.load(old.sessions, T0)
    found = opened(again)
    assert (found.cursors, found.epochs) == ({"a": 3}, {})


def test_a_client_that_has_not_heard_of_a_new_epoch_is_told_again() -> None:
    sessions = Sessions(0)
    sessions.create(CreateSession("w", b"", PLAIN, {"a": 10}, {"a": "1.0"}), T0)
    opened(sessions, 1, made({"a": 10}))
    changed(sessions, 1, 4, EpochChange("2.0", "1.0", 10, 10))
    for _ in range(2):  # whatever happened to the message
        found = opened(sessions, 1, made({"a": 10}))
        assert (found.cursors, found.epochs) == ({"a": 10}, {"a": "1.0"})
        changed(sessions, found.save + 1, 12, EpochChange("2.0", "1.0", 10, 10))
    found = opened(sessions, 1, made({"a": 11}))  # only the new one has led it there
    assert (found.cursors, found.epochs) == ({"a": 11}, {"a": "2.0"})
    found = opened(sessions, 1, made({"a": 10}))
    assert (found.cursors, found.epochs) == ({"a": 10}, {"a": "2.0"})


def test_a_client_whose_id_says_that_it_has_heard_is_not_told_again() -> None:
    sessions = Sessions(0)
    sessions.create(CreateSession("w", b"", PLAIN, {"a": 10}, {"a": "1.0"}), T0)
    opened(sessions, 1, made({"a": 10}))
    changed(sessions, 1, 10, EpochChange("2.0", "1.0", 1, 10))
    assert list(opened(sessions, 1).told) == ["a"]
    pieces = [event_ids.piece("a", 10), event_ids.epoch_piece("a", "1.5")]
    found = opened(sessions, 1, event_ids.join(pieces).decode())  # of an epoch in between
    assert (found.cursors, found.epochs, found.told) == ({"a": 10}, {"a": "1.0"}, {})
    changed(sessions, found.save + 1, 9, EpochChange("2.0", "1.0", 10, 10))
    pieces = [event_ids.piece("a", 10), event_ids.epoch_piece("a", "2.0")]
    found = opened(sessions, 1, event_ids.join(pieces).decode())
    assert (found.epochs, found.told) == ({"a": "2.0"}, {})


def test_of_two_epochs_that_a_client_has_not_heard_of_the_first_counts() -> None:
    sessions = Sessions(0)
    sessions.create(CreateSession("w", b"", PLAIN, {"a": 10}, {"a": "1.0"}), T0)
    opened(sessions, 1, made({"a": 10}))
    changed(sessions, 1, 8, EpochChange("1.1", "1.0", 10, 10))
    changed(sessions, 2, 7, EpochChange("1.2", "1.1", 7, 8))
    changed(sessions, 3, 12, EpochChange("1.3"))
    for cursor in (7, 9, 10):
        found = opened(sessions, 1, made({"a": cursor}))
        assert (found.cursors, found.epochs) == ({"a": cursor}, {"a": "1.0"})


def test_a_topic_that_leaves_a_session_takes_its_epoch_with_it() -> None:
    sessions = make({}, spec=PATTERN)
    opened(sessions)
    save = SaveSession("w", 1, 1, {"t.a": 2}, epochs={"t.a": EpochChange("1.0"), "t.b": EpochChange("2.0")})
    assert sessions.save(FRONT, save, T0)
    assert opened(sessions).epochs == {"t.a": "1.0"}
    assert opened(sessions, 1, made({})).epochs == {}  # an id from before it was found
