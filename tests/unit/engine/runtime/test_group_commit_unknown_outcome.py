"""Which writes may be there after the log failed, and which may not.

Goal: a write is refused plainly only if it will certainly never be visible; one that may be in the log is answered
with outcome "unknown", and no other one is. Method: single turns on a SimDisk that fails at a chosen call; then kills
and power cuts, and a check of what is there.
"""

from __future__ import annotations

import errno

import pytest

from tests.support.engine_harness import DISK, FSYNC, Harness, append, numbered
from tests.support.faults import fault
from topics.api.errors import EraseDeferred, ShardReadOnly, Throttled, TopicsError
from topics.engine.commands import topics as c

UNKNOWN = "the outcome is called unknown; the shard is read-only"
REFUSED = "refused, and never carried out; the shard is read-only"

CHANGES = [
    pytest.param(append("t", b"9"), id="append"),
    pytest.param(c.Skip("t", 1), id="skip"),
    pytest.param(c.Delete("t", seqs=[1]), id="delete"),
    pytest.param(c.Delete("t", seqs=[1], erase=True), id="erase"),
    pytest.param(c.PutTopic("t", DISK), id="config"),
    pytest.param(c.PutTopic("new", DISK), id="create"),
    pytest.param(c.DropTopic("t"), id="drop"),
]


def started(seed: int = 1) -> Harness:
    h = Harness(seed=seed)
    h.put("t", FSYNC)
    h.append("t", b"1", b"2")
    h.rest()
    return h


def fail_sync(h: Harness) -> None:
    h.disk.fail_at(1, errno.EIO, of="sync")
    h.run_job("sync")


def assert_unknown(reply: object) -> None:
    assert isinstance(reply, ShardReadOnly)
    assert reply.code == "internal"
    assert reply.detail["outcome"] == "unknown"
    assert reply.detail["read_only"] is True
    assert "the change may or may not have been carried out" in str(reply)


def assert_refused(reply: object) -> None:
    assert isinstance(reply, ShardReadOnly)
    assert reply.detail["read_only"] is True
    assert "outcome" not in reply.detail
    assert "may or may not" not in str(reply)


@fault("disk", "the sync that a write waits for fails", UNKNOWN)
@pytest.mark.parametrize("command", CHANGES)
def test_a_change_whose_sync_fails(command: c.Command) -> None:
    h = started()
    (token,) = h.ask(command)
    fail_sync(h)
    assert_unknown(h.replies[token])


@fault("disk", "the log write of a request fails", UNKNOWN)
@pytest.mark.parametrize("command", CHANGES)
def test_a_change_whose_log_write_fails(command: c.Command) -> None:
    h = started()
    h.disk.fail_at(1, errno.EIO, of="write")
    (token,) = h.ask(command)
    assert_unknown(h.replies[token])


@fault("disk", "a write comes after the log has failed", REFUSED)
@pytest.mark.parametrize("command", CHANGES)
def test_a_change_after_the_failure(command: c.Command) -> None:
    h = started()
    h.ask(append("t", b"3"))
    fail_sync(h)
    (token,) = h.ask(command)
    assert_refused(h.replies[token])


def test_the_same_key_while_the_first_write_waits() -> None:
    """The retry writes nothing, but the first write may be in the log."""
    h = started()
    first, retry = h.ask(append("t", b"3", key=b"k"), append("t", b"3", key=b"k"))
    fail_sync(h)
    assert_unknown(h.replies[first])
    assert_unknown(h.replies[retry])


def test_the_same_config_while_the_first_put_waits() -> None:
    h = started()
    first, again = h.ask(c.PutTopic("new", DISK), c.PutTopic("new", DISK))
    fail_sync(h)
    assert_unknown(h.replies[first])
    assert_unknown(h.replies[again])


def test_a_second_drop_is_answered_when_the_first_is_safe() -> None:
    """The second drop was answered at once with "no such topic", but after a power cut the topic was there."""
    h = started()
    first, second = h.ask(c.DropTopic("t"), c.DropTopic("t"))
    assert second not in h.replies
    h.run_job("sync")
    assert (h.replies[first].deleted, h.replies[second].deleted) == (True, False)


def test_a_second_drop_is_as_unknown_as_the_first() -> None:
    h = started()
    first, second = h.ask(c.DropTopic("t"), c.DropTopic("t"))
    fail_sync(h)
    assert_unknown(h.replies[first])
    assert_unknown(h.replies[second])


@fault("log file", "the next log file cannot be made while a batch is staged", REFUSED)
@pytest.mark.parametrize("how", ["kill_and_open", "power_cut"])
def test_staged_changes_are_refused_and_never_seen(how: str) -> None:
    """The third write needs a log file of its own: creating it fails before anything of the turn was written."""
    h = started()
    h.ask(append("t", b"parked"))
    h.disk.fail_at(1, errno.EIO, of="allocate")
    tokens = h.ask(append("t", b"3"), c.Delete("t", seqs=[1], erase=True), append("t", b"x" * 9000))
    for token in tokens:
        assert_refused(h.replies[token])
    if how == "power_cut":
        h.power_cut()
        h.open()
    else:
        h.kill_and_open()
    assert h.rows("t") in (
        [(1, b"1"), (2, b"2")],
        [(1, b"1"), (2, b"2"), (3, b"parked")],
    )


def test_changes_that_wait_for_a_sync_are_unknown_if_a_log_file_cannot_be_created() -> None:
    h = started()
    (parked,) = h.ask(append("t", b"parked"))
    h.disk.fail_at(1, errno.EIO, of="allocate")
    (large,) = h.ask(append("t", b"x" * 9000))
    assert_unknown(h.replies[parked])
    assert_refused(h.replies[large])
    h.kill_and_open()
    assert h.rows("t") == [(1, b"1"), (2, b"2"), (3, b"parked")]


@fault("log file", "the first entry of the next log file cannot be written", REFUSED)
@pytest.mark.parametrize("seed", range(4))
def test_a_failed_move_to_the_next_log_file(seed: int) -> None:
    """The batch after it was never written."""
    h = started(seed)
    room = h.engine.wal.active.remaining
    h.disk.fail_at(1, errno.EIO, of="write")
    (token,) = h.ask(append("t", b"x" * (room - 100)))
    assert_refused(h.replies[token])
    h.power_cut()
    h.open()
    assert h.rows("t") == [(1, b"1"), (2, b"2")]


@fault("log file", "the next log file cannot be made at the start of a turn", REFUSED)
def test_a_log_file_that_is_needed_for_the_time_alone() -> None:
    h = started()
    h.engine.wal.active.capacity = h.engine.wal.active.position
    assert h.engine.wal.spare is not None
    h.engine.checkpointer.remove_log_file(h.engine.wal.spare)
    h.engine.wal.spare = None
    h.clock.advance(60_000)
    h.disk.fail_at(1, errno.EIO, of="allocate")
    write, read = h.ask(append("t", b"3"), c.Diff("t"))
    assert_refused(h.replies[write])
    assert h.replies[read].seqs == [1, 2]


@fault("disk", "a write finds the disk full", "refused as throttled, and never carried out")
@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_a_refusal_by_a_full_disk_is_certain(how: str) -> None:
    h = started()
    h.disk.full = True
    seen: list[tuple[int, bytes]] = h.rows("t")
    refused = 0
    for payload in numbered(10, 40):
        reply = h.send(append("t", payload * 100))
        if isinstance(reply, TopicsError):
            assert isinstance(reply, Throttled)
            assert reply.detail == {"limit": "disk_full"}
            refused += 1
        else:
            seen.append((reply.first_seq, payload * 100))
    assert refused
    getattr(h, how)()
    h.disk.full = False
    h.open()
    assert h.rows("t") == seen


@fault("disk", "an erase meets a failing disk after its delete is visible", UNKNOWN)
def test_an_erase_is_never_refused_once_readers_see_the_delete() -> None:
    number = 0
    answers = set()
    while True:
        number += 1
        h = started()
        before = h.disk.calls
        h.disk.fail_at(number, errno.EIO)
        reply = h.send(c.Delete("t", seqs=[1], erase=True))
        if h.disk.calls - before < number:
            break
        deleted = h.rows("t") == [(2, b"2")]
        if isinstance(reply, EraseDeferred) or not isinstance(reply, TopicsError):
            assert deleted, number
        elif "outcome" not in reply.detail:
            assert_refused(reply)
            assert not deleted, f"call {number}: refused, but visible to readers"
        else:
            assert_unknown(reply)
        answers.add((type(reply), deleted))
    assert (ShardReadOnly, True) in answers
    assert (ShardReadOnly, False) in answers
