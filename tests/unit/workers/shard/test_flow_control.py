"""Goal: reads of many clients share a shard fairly and within its bounds, even when some do not read their answers.

Method: a shard core with long polls and reads of several fronts, turn by turn.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.engine_harness import SMALL
from tests.support.faults import fault
from tests.support.shard_rig import Rig
from topics.api import limits
from topics.api.limits import DIFF_BYTES_MAX, MIB, POLLS_ENDED_MAX, WAKE_BYTES_MAX
from topics.engine.commands.topics import Diff
from topics.engine.shard.reads import WAKE_COST
from topics.engine.topic.log import TopicLog
from topics.link import wire
from workers.shard.flow_control import READS_PER_TURN, TURN_READ_BYTES, WINDOW_BYTES

ROOMY = msgspec.structs.replace(SMALL, wal_file_bytes=4 * MIB)


def write(*values: object) -> dict[str, Any]:
    return {"records": [{"data": value} for value in values]}


def settle(rig: Rig) -> None:
    while rig.jobs:
        job = rig.jobs.pop(0)
        job.run()
        rig._take(rig.core.finish(job, None, 0.0))


@fault(
    "client",
    "more long polls on one topic than a turn wakes, and a change that has nothing for them",
    "each is answered when its time is up; the shard does not spin",
)
def test_polls_that_find_nothing_do_not_keep_others_from_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn began with the same ones, again and again."""
    count = 400
    monkeypatch.setattr(limits, "WAKE_BYTES_MAX", 3 * count // 4 * WAKE_COST)
    rig = Rig(ROOMY)
    rig.ask(wire.WRITE, body=write(1, 2, 3))
    polls = []
    for i in range(count):
        polls.append(rig.receive(wire.DIFF, body={"from_seq": 3, "wait_ms": 1000}))
        if i % READS_PER_TURN == 0:
            rig.turn()
    rig.turn()
    settle(rig)
    rig.receive(wire.DELETE, body={"before_seq": 3})
    rig.turn()
    settle(rig)
    rig.clock.advance(20_000)
    for _ in range(count // POLLS_ENDED_MAX + 5):
        rig.turn()
    assert all(poll in rig.replies for poll in polls)


@fault(
    "front", "it asks for more reads than a turn begins, without end", "reads of other fronts have their turn"
)
def test_a_front_does_not_starve_another() -> None:
    rig = Rig(ROOMY)
    rig.ask(wire.WRITE, body=write(1))
    for _ in range(100):
        rig.receive(wire.DIFF, peer=b"a")
    other = rig.receive(wire.DIFF, peer=b"b")
    for _ in range(5):
        for _ in range(READS_PER_TURN):
            rig.receive(wire.DIFF, peer=b"a")
        rig.turn()
    assert other in rig.replies


def test_the_last_records_by_tag_share_the_room_of_a_turn() -> None:
    rig = Rig(ROOMY)
    for i in range(30):
        rig.ask(wire.WRITE, body={"records": [{"data": "x" * 100_000, "tag": f"k{i}"}]})
    args = wire.encode_args(wire.Args(subject=">", each=True))
    rig.takes = False
    for _ in range(READS_PER_TURN):
        rig.receive(wire.LAST_BY_TAG, args=args)
    rig.turn()
    untaken = sum(rig.core._window._in_flight.values())
    assert untaken <= WINDOW_BYTES + TURN_READ_BYTES + WAKE_BYTES_MAX + DIFF_BYTES_MAX


def test_a_poll_that_cannot_be_woken_does_not_make_others_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn read the pages of all polls of the topic, whatever had changed."""
    rig = Rig(ROOMY)
    rig.ask(wire.WRITE, body=write(1))
    rig.receive(wire.DIFF, body={"from_seq": 1, "wait_ms": 30_000}, peer=b"closed")
    rig.turn()
    rig.core._window.sent(b"closed", WINDOW_BYTES + 1)
    rig.ask(wire.WRITE, body=write(2))
    for i in range(100):
        rig.receive(wire.DIFF, body={"from_seq": 2, "wait_ms": 30_000}, peer=b"open")
        if i % READS_PER_TURN == 0:
            rig.turn()
    rig.turn()
    shard, looks = rig.core.engine.shard, 0
    read_page = shard.reads.read_page

    def counted(log: TopicLog, command: Diff) -> Any:
        nonlocal looks
        looks += 1
        return read_page(log, command)

    monkeypatch.setattr(shard.reads, "read_page", counted)
    for i in range(10):
        rig.receive(wire.WRITE, "another", write(i))
        rig.turn()
    assert looks == 0
