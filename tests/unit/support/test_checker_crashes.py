"""Goal: the checker knows what each durability class may lose, what a drop ends, and what must be announced.

Method: as in test_checker: histories told by hand, legal ones and such with a single lie in them. A crash is an event, and
what it took is taken from the small server by hand.
"""

from __future__ import annotations

import pytest

from tests.support.checker import assert_ok
from tests.support.checker_tale import Cases, Held, Story, Tale

cases = Cases()
FSYNC = {"durability": "fsync"}
MEMORY = {"durability": "memory"}
EPHEMERAL = {"durability": "ephemeral"}


def lose_tail(tale: Tale, after: int, ceiling: int, *, reason: str = "crash") -> Held:
    """What a power cut does to a `disk` topic."""
    held = tale.held["t"]
    held.live = {seq: row for seq, row in held.live.items() if seq <= after}
    held.head = ceiling
    held.gaps.append((after + 1, ceiling, reason))
    return held


# -- fsync ---------------------------------------------------------------------------------------------------


@cases.is_legal
def fsync_survives_anything(tale: Tale) -> None:
    tale.write(3, config=FSYNC)
    for kind in ("kill", "power", "stop", "front", "full", "freed", "clock", "error", "kill"):
        tale.event(kind)
        tale.read()
        tale.write()
    tale.read()


@cases.is_legal
def an_unseen_write_of_unknown_outcome_goes_with_the_power(tale: Tale) -> None:
    tale.write(1, config=FSYNC)
    op = tale.send_write(2)
    tale.event("power")
    tale.refuse(op, 503, "not_ready", outcome="unknown")
    tale.read()
    tale.write()
    tale.read()


@cases.breaks("lost")
def fsync_loses_an_acknowledged_record_silently(tale: Tale) -> None:
    tale.write(3, config=FSYNC)
    tale.event("power")
    del tale.held["t"].live[3]
    tale.read()


@cases.breaks("head")
def fsync_falls_back(tale: Tale) -> None:
    tale.write(2, config=FSYNC)
    tale.write(1)
    tale.event("power")
    tale.held["t"].head = 2
    del tale.held["t"].live[3]
    tale.read()


@cases.breaks("lost")
def fsync_says_that_a_crash_took_a_record(tale: Tale) -> None:
    """The topic is `disk` at first, so a crash may take something; but this record was written under `fsync`."""
    tale.write(1)
    tale.ask("put", **FSYNC)
    tale.write(1)
    tale.event("power")
    lose_tail(tale, 1, 10)
    tale.read(1)


@cases.breaks("lost")
def a_record_of_an_fsync_topic_that_a_reader_saw_goes(tale: Tale) -> None:
    tale.write(1, config=FSYNC)
    tale.lose(tale.send_write(), executed=True)
    tale.read()
    tale.event("power")
    tale.held["t"].live.pop(2)
    tale.write()
    tale.read()


@cases.breaks("undeleted")
def a_delete_under_fsync_is_undone_by_a_power_cut(tale: Tale) -> None:
    tale.write(2, config=FSYNC)
    row = tale.held["t"].live[1]
    tale.ask("delete", seqs=[1])
    tale.event("power")
    tale.held["t"].live[1] = row
    tale.read()


# -- disk ----------------------------------------------------------------------------------------------------


@cases.is_legal
def disk_loses_its_tail_and_says_so(tale: Tale) -> None:
    tale.write(3)
    tale.write(2)
    tale.read()
    tale.event("power")
    lose_tail(tale, 3, 1024)
    tale.read()
    tale.read(3)
    tale.write(2)
    tale.read(3)
    tale.ask("state")


@cases.is_legal
def a_delete_goes_with_the_unsynced_tail(tale: Tale) -> None:
    tale.write(3)
    row = tale.held["t"].live[2]
    tale.ask("delete", seqs=[2])
    tale.read()
    tale.event("power")
    tale.held["t"].live[2] = row
    lose_tail(tale, 3, 1024)
    tale.read()
    tale.read(3)


@cases.is_legal
def a_failed_disk_call_makes_the_next_restart_a_power_cut(tale: Tale) -> None:
    tale.write(3)
    tale.event("error")
    tale.read()
    tale.event("kill")
    lose_tail(tale, 0, 1024)
    tale.read()


@cases.breaks("lost")
def disk_loses_its_tail_silently(tale: Tale) -> None:
    tale.write(3)
    tale.write(2)
    tale.event("power")
    tale.held["t"].live = {1: tale.held["t"].live[1]}
    tale.read()


@cases.breaks("tombstone")
def disk_loses_its_tail_with_a_mere_kill(tale: Tale) -> None:
    tale.write(3)
    tale.event("kill")
    lose_tail(tale, 1, 1024)
    tale.read(1)


@cases.breaks("head")
def disk_falls_back(tale: Tale) -> None:
    tale.write(2)
    tale.write(1)
    tale.event("power")
    tale.held["t"].head = 2
    del tale.held["t"].live[3]
    tale.ask("state")


@cases.breaks("seq-shared")
def disk_gives_a_seq_away_twice(tale: Tale) -> None:
    tale.write(2)
    tale.write(1)
    tale.event("power")
    tale.held["t"].head = 2
    del tale.held["t"].live[3]
    tale.write()
    tale.read()


@cases.breaks("lost")
def a_crash_takes_what_was_written_after_it(tale: Tale) -> None:
    tale.write(2)
    tale.event("power")
    lose_tail(tale, 2, 9)
    tale.write(1)
    held = tale.held["t"]
    del held.live[10]
    held.head, held.gaps = 10, [(3, 10, "crash")]
    tale.read(2)


@cases.breaks("batch")
def a_crash_takes_half_a_batch(tale: Tale) -> None:
    tale.write(1)
    tale.write(4)
    tale.event("power")
    held = tale.held["t"]
    del held.live[2], held.live[3]
    held.gaps.append((2, 3, "crash"))
    tale.read(1)


@cases.breaks("came-back")
def what_a_crash_took_comes_back(tale: Tale) -> None:
    tale.write(1)
    tale.write(1)
    tale.event("power")
    row = tale.held["t"].live[2]
    held = lose_tail(tale, 1, 9)
    tale.read(1)
    held.gaps, held.live[2] = [(3, 9, "crash")], row
    tale.read(1)


# -- memory and ephemeral ------------------------------------------------------------------------------------


@cases.is_legal
def memory_falls_back_and_uses_seqs_again(tale: Tale) -> None:
    tale.write(3, config=MEMORY)
    tale.write(2)
    tale.read()
    tale.event("kill")
    held = tale.held["t"]
    held.live, held.head = {seq: held.live[seq] for seq in (1, 2, 3)}, 3
    tale.read()
    tale.read(5)
    tale.write(4)
    tale.read()
    tale.ask("state")


@cases.is_legal
def memory_keeps_everything(tale: Tale) -> None:
    tale.write(3, config=MEMORY)
    tale.event("power")
    tale.read()
    tale.write(1)
    tale.event("stop")
    tale.read()


@cases.is_legal
def ephemeral_is_empty_after_a_restart(tale: Tale) -> None:
    tale.write(3, config=EPHEMERAL)
    tale.read()
    tale.event("stop")
    held = lose_tail(tale, 0, 2)
    tale.read()
    tale.write(3)
    tale.read(2)
    held.live.clear()
    held.head, held.gaps = 0, []
    tale.event("power")
    tale.read(5)
    tale.write(1)
    tale.read()


@cases.breaks("lost")
def memory_loses_something_without_any_crash(tale: Tale) -> None:
    tale.write(3, config=MEMORY)
    tale.event("stop")
    del tale.held["t"].live[2]
    tale.read()


@cases.breaks("lost")
def memory_loses_what_was_written_after_the_crash(tale: Tale) -> None:
    tale.write(3, config=MEMORY)
    tale.event("kill")
    tale.held["t"] = Held(dict(MEMORY))
    tale.write(2)
    del tale.held["t"].live[1]
    tale.read()


@cases.breaks("head")
def memory_falls_back_without_a_crash(tale: Tale) -> None:
    tale.write(2, config=MEMORY)
    tale.write(1)
    tale.held["t"].head = 2
    tale.ask("state")


@cases.breaks("moved")
def memory_moves_a_record(tale: Tale) -> None:
    tale.write(2, config=MEMORY)
    tale.event("power")
    held = tale.held["t"]
    held.live, held.head = {1: held.live[2] | {"$seq": 1}}, 1
    tale.read()


@cases.breaks("ephemeral-survived")
def ephemeral_records_survive(tale: Tale) -> None:
    tale.write(3, config=EPHEMERAL)
    tale.event("power")
    tale.read()


@cases.breaks("dedupe")
def the_key_of_an_ephemeral_record_outlives_it(tale: Tale) -> None:
    op = tale.write(3, config=EPHEMERAL, idempotency_key="k")
    tale.event("power")
    lose_tail(tale, 0, 3)
    tale.finish(tale.again(op))


@cases.is_legal
def a_key_goes_with_its_ephemeral_record(tale: Tale) -> None:
    op = tale.write(3, config=EPHEMERAL, idempotency_key="k")
    tale.finish(tale.again(op))
    tale.event("power")
    lose_tail(tale, 0, 3).keys.clear()
    tale.finish(tale.again(op))
    tale.finish(tale.again(op))
    tale.read()


@cases.is_legal
def a_key_stays_when_the_class_may_have_kept_its_record(tale: Tale) -> None:
    op = tale.write(3, config=EPHEMERAL, idempotency_key="k")
    tale.ask("put", **FSYNC)
    tale.event("power")
    tale.finish(tale.again(op))
    tale.read()


@cases.breaks("lost")
def a_class_that_was_made_stronger(tale: Tale) -> None:
    """Written under `fsync`, in a topic that was `memory` before."""
    tale.write(1, config=MEMORY)
    tale.ask("put", **FSYNC)
    tale.write(1)
    tale.event("power")
    del tale.held["t"].live[2]
    tale.read()


@cases.breaks("seq-shared")
def a_class_that_was_made_stronger_and_its_seqs(tale: Tale) -> None:
    tale.write(1, config=MEMORY)
    tale.ask("put", **FSYNC)
    tale.write(1)
    tale.event("power")
    tale.held["t"].head = 1
    tale.write(1)


# -- caps, expiry, damage ------------------------------------------------------------------------------------


@cases.is_legal
def caps_and_expiry_are_announced(tale: Tale) -> None:
    tale.ask("put", cap_records=2, ttl_ms=1000)
    tale.write(5)
    held = tale.held["t"]
    for seq in (1, 2, 3):
        del held.live[seq]
    held.gaps.append((1, 3, "cap"))
    tale.read()
    tale.read(1)
    tale.read(3)
    held.live.clear()
    held.gaps = [(1, 5, "mixed")]
    tale.read()
    tale.ask("state")
    tale.write()
    tale.read(2)


@cases.is_legal
def damage_is_announced(tale: Tale) -> None:
    tale.write(3, config=FSYNC)
    tale.event("rot", "t")
    del tale.held["t"].live[2]
    tale.held["t"].gaps.append((2, 2, "corrupt"))
    tale.read()
    tale.read(1)


@cases.is_legal
def what_rot_took_is_not_among_those_that_a_delete_keeps(tale: Tale) -> None:
    tale.write(3, config=FSYNC)
    tale.event("rot", "t")
    del tale.held["t"].live[2]
    tale.held["t"].gaps.append((2, 2, "corrupt"))
    tale.ask("delete", keep=2)
    tale.read()


@cases.breaks("lost")
def damage_is_silent(tale: Tale) -> None:
    tale.write(3, config=FSYNC)
    tale.event("rot", "t")
    del tale.held["t"].live[2]
    tale.read()


@cases.breaks("lost")
def an_eviction_is_silent(tale: Tale) -> None:
    tale.ask("put", cap_records=2)
    tale.write(5)
    for seq in (1, 2, 3):
        del tale.held["t"].live[seq]
    tale.read()


def announced(tale: Tale, reason: str, **config: object) -> None:
    tale.ask("put", **config)
    tale.write(5)
    held = tale.held["t"]
    for seq in (1, 2, 3):
        del held.live[seq]
    held.gaps.append((1, 3, reason))
    tale.read()


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("cap", {}),
        ("cap", {"cap_records": 2, "discard": "reject"}),
        ("cap", {"cap_records": 4}),
        ("ttl", {"cap_records": 2}),
        ("mixed", {"ttl_ms": 5}),
        ("crash", {}),
        ("corrupt", {}),
        ("source_trim", {}),
        ("boredom", {}),
    ],
)
def test_a_reason_that_cannot_be(reason: str, config: dict[str, object]) -> None:
    tale = Tale()
    announced(tale, reason, **config)
    assert "tombstone" in tale.rules()


@cases.breaks("tombstone")
def a_gap_that_begins_elsewhere(tale: Tale) -> None:
    announced(tale, "cap", cap_records=2)
    tale.history.ops[-1].answer["tombstone"]["gap_from"] = 2


@cases.breaks("tombstone")
def a_floor_within_the_gap(tale: Tale) -> None:
    announced(tale, "cap", cap_records=2)
    tale.history.ops[-1].answer["earliest_seq"] = 3


@cases.breaks("page")
def recreated_below_the_head(tale: Tale) -> None:
    announced(tale, "recreated", cap_records=2)


# -- drops and existence -------------------------------------------------------------------------------------


@cases.is_legal
def a_topic_is_made_anew(tale: Tale) -> None:
    tale.write(3, idempotency_key="k")
    tale.read()
    tale.ask("drop")
    tale.read()
    tale.ask("drop")
    tale.ask("list")
    tale.write(2, idempotency_key="k")
    tale.read(3)
    tale.read()
    tale.ask("state")
    tale.ask("list")


@cases.is_legal
def writes_and_reads_while_a_drop_is_on_its_way(tale: Tale) -> None:
    tale.write(3)
    drop = tale.send("drop")
    write, page = tale.send_write(2), tale.send("diff", client="r", from_seq=0)
    tale.finish(page)
    before = tale.write(1, client="b")
    done = tale.do(drop)
    after = tale.write(1, client="c")
    tale.finish(write)
    tale.tell(drop, done)
    tale.read()
    assert (before.answer["first_seq"], after.answer["first_seq"]) == (4, 1)


@cases.is_legal
def a_drop_of_unknown_outcome_that_did_not_happen(tale: Tale) -> None:
    tale.write(3)
    tale.lose(tale.send("drop"))
    tale.write(1)
    tale.read()
    tale.ask("state")


@cases.is_legal
def a_drop_of_unknown_outcome_that_happened(tale: Tale) -> None:
    tale.write(3)
    tale.lose(tale.send("drop"), executed=True)
    tale.read()
    tale.write(2)
    tale.read()


@cases.is_legal
def a_drop_of_unknown_outcome_and_nothing_that_tells(tale: Tale) -> None:
    tale.write(3)
    tale.ask("delete", before_seq=9)
    tale.lose(tale.send("drop"))
    tale.write(2)
    tale.read()
    tale.ask("state")


@cases.is_legal
def a_topic_made_by_a_write_of_unknown_outcome(tale: Tale) -> None:
    tale.lose(tale.send_write(2, config=FSYNC), executed=True)
    tale.event("power")
    tale.read()
    tale.ask("state")


@cases.breaks("dropped-visible")
def a_record_outlives_its_topic(tale: Tale) -> None:
    tale.write(3)
    row = tale.held["t"].live[2]
    tale.ask("drop")
    tale.write(1)
    tale.held["t"].head, tale.held["t"].live[2] = 2, row
    tale.read()


@cases.breaks("dropped-visible")
def seqs_go_on_after_a_drop(tale: Tale) -> None:
    tale.write(3)
    held = tale.held["t"]
    tale.ask("drop")
    tale.held["t"] = held
    tale.write(1)
    tale.read()


@cases.breaks("existence")
def a_topic_vanishes(tale: Tale) -> None:
    tale.ask("put", **EPHEMERAL)
    tale.event("power")
    del tale.held["t"]
    tale.read()


@cases.breaks("existence")
def a_topic_is_not_listed(tale: Tale) -> None:
    tale.write(topic="s")
    tale.write()
    tale.ask("list").answer["topics"].pop()


@cases.breaks("existence")
def a_dropped_topic_is_listed(tale: Tale) -> None:
    tale.write()
    held = tale.held["t"]
    tale.ask("drop")
    tale.held["t"] = held
    tale.ask("list")


@cases.breaks("existence")
def a_dropped_topic_comes_back(tale: Tale) -> None:
    tale.ask("put")
    tale.ask("drop")
    tale.event("kill")
    tale.held["t"] = Held()
    tale.ask("state")


@cases.breaks("existence")
def a_topic_is_created_twice(tale: Tale) -> None:
    tale.ask("put")
    del tale.held["t"]
    tale.ask("put")


@cases.breaks("existence")
def a_topic_that_nobody_made(tale: Tale) -> None:
    tale.held["t"] = Held()
    tale.read()


# -- all of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("story", cases.legal, ids=lambda story: story.__name__)
def test_legal(story: Story) -> None:
    tale = Tale()
    story(tale)
    assert_ok(tale.history)


@pytest.mark.parametrize(("rule", "story"), cases.broken, ids=lambda value: getattr(value, "__name__", None))
def test_broken(rule: str, story: Story) -> None:
    tale = Tale()
    story(tale)
    assert rule in tale.rules()
