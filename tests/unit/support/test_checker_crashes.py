"""Goal: the checker knows what each durability class may lose, what a drop ends, and what must be announced.

Method: as in test_checker: histories built by hand, legal ones and ones with a single error. A crash is an event, and
the test removes what it lost from the small server.
"""

from __future__ import annotations

import pytest

from tests.support.checker import assert_ok
from tests.support.scripted_server import Cases, Scenario, ScriptedServer, StoredTopic

cases = Cases()
FSYNC = {"durability": "fsync"}
MEMORY = {"durability": "memory"}
EPHEMERAL = {"durability": "ephemeral"}


def lose_tail(server: ScriptedServer, after: int, ceiling: int, *, reason: str = "crash") -> StoredTopic:
    """The effect of a power cut on a `disk` topic."""
    held = server.held["t"]
    held.live = {seq: row for seq, row in held.live.items() if seq <= after}
    held.head = ceiling
    held.gaps.append((after + 1, ceiling, reason))
    return held


# -- fsync ---------------------------------------------------------------------------------------------------


@cases.is_legal
def fsync_survives_anything(server: ScriptedServer) -> None:
    server.write(3, config=FSYNC)
    for kind in ("kill", "power", "stop", "front", "full", "freed", "clock", "error", "kill"):
        server.event(kind)
        server.read()
        server.write()
    server.read()


@cases.is_legal
def an_unseen_write_of_unknown_outcome_goes_with_the_power(server: ScriptedServer) -> None:
    server.write(1, config=FSYNC)
    op = server.send_write(2)
    server.event("power")
    server.refuse(op, 503, "not_ready", outcome="unknown")
    server.read()
    server.write()
    server.read()


@cases.breaks("lost")
def fsync_loses_an_acknowledged_record_silently(server: ScriptedServer) -> None:
    server.write(3, config=FSYNC)
    server.event("power")
    del server.held["t"].live[3]
    server.read()


@cases.breaks("head")
def fsync_falls_back(server: ScriptedServer) -> None:
    server.write(2, config=FSYNC)
    server.write(1)
    server.event("power")
    server.held["t"].head = 2
    del server.held["t"].live[3]
    server.read()


@cases.breaks("lost")
def fsync_says_that_a_crash_took_a_record(server: ScriptedServer) -> None:
    """The topic is `disk` at first, so a crash may lose records; but this record was written under `fsync`."""
    server.write(1)
    server.ask("put", **FSYNC)
    server.write(1)
    server.event("power")
    lose_tail(server, 1, 10)
    server.read(1)


@cases.breaks("lost")
def a_record_of_an_fsync_topic_that_a_reader_saw_goes(server: ScriptedServer) -> None:
    server.write(1, config=FSYNC)
    server.lose(server.send_write(), executed=True)
    server.read()
    server.event("power")
    server.held["t"].live.pop(2)
    server.write()
    server.read()


@cases.breaks("undeleted")
def a_delete_under_fsync_is_undone_by_a_power_cut(server: ScriptedServer) -> None:
    server.write(2, config=FSYNC)
    row = server.held["t"].live[1]
    server.ask("delete", seqs=[1])
    server.event("power")
    server.held["t"].live[1] = row
    server.read()


# -- disk ----------------------------------------------------------------------------------------------------


@cases.is_legal
def disk_loses_its_tail_and_says_so(server: ScriptedServer) -> None:
    server.write(3)
    server.write(2)
    server.read()
    server.event("power")
    lose_tail(server, 3, 1024)
    server.read()
    server.read(3)
    server.write(2)
    server.read(3)
    server.ask("state")


@cases.is_legal
def a_delete_goes_with_the_unsynced_tail(server: ScriptedServer) -> None:
    server.write(3)
    row = server.held["t"].live[2]
    server.ask("delete", seqs=[2])
    server.read()
    server.event("power")
    server.held["t"].live[2] = row
    lose_tail(server, 3, 1024)
    server.read()
    server.read(3)


@cases.is_legal
def a_failed_disk_call_makes_the_next_restart_a_power_cut(server: ScriptedServer) -> None:
    server.write(3)
    server.event("error")
    server.read()
    server.event("kill")
    lose_tail(server, 0, 1024)
    server.read()


@cases.breaks("lost")
def disk_loses_its_tail_silently(server: ScriptedServer) -> None:
    server.write(3)
    server.write(2)
    server.event("power")
    server.held["t"].live = {1: server.held["t"].live[1]}
    server.read()


@cases.breaks("tombstone")
def disk_loses_its_tail_with_a_mere_kill(server: ScriptedServer) -> None:
    server.write(3)
    server.event("kill")
    lose_tail(server, 1, 1024)
    server.read(1)


@cases.breaks("head")
def disk_falls_back(server: ScriptedServer) -> None:
    server.write(2)
    server.write(1)
    server.event("power")
    server.held["t"].head = 2
    del server.held["t"].live[3]
    server.ask("state")


@cases.breaks("seq-shared")
def disk_gives_a_seq_away_twice(server: ScriptedServer) -> None:
    server.write(2)
    server.write(1)
    server.event("power")
    server.held["t"].head = 2
    del server.held["t"].live[3]
    server.write()
    server.read()


@cases.breaks("lost")
def a_crash_takes_what_was_written_after_it(server: ScriptedServer) -> None:
    server.write(2)
    server.event("power")
    lose_tail(server, 2, 9)
    server.write(1)
    held = server.held["t"]
    del held.live[10]
    held.head, held.gaps = 10, [(3, 10, "crash")]
    server.read(2)


@cases.breaks("batch")
def a_crash_takes_half_a_batch(server: ScriptedServer) -> None:
    server.write(1)
    server.write(4)
    server.event("power")
    held = server.held["t"]
    del held.live[2], held.live[3]
    held.gaps.append((2, 3, "crash"))
    server.read(1)


@cases.breaks("came-back")
def what_a_crash_took_comes_back(server: ScriptedServer) -> None:
    server.write(1)
    server.write(1)
    server.event("power")
    row = server.held["t"].live[2]
    held = lose_tail(server, 1, 9)
    server.read(1)
    held.gaps, held.live[2] = [(3, 9, "crash")], row
    server.read(1)


# -- memory and ephemeral ------------------------------------------------------------------------------------


@cases.is_legal
def memory_falls_back_and_uses_seqs_again(server: ScriptedServer) -> None:
    server.write(3, config=MEMORY)
    server.write(2)
    server.read()
    server.event("kill")
    held = server.held["t"]
    held.live, held.head = {seq: held.live[seq] for seq in (1, 2, 3)}, 3
    server.read()
    server.read(5)
    server.write(4)
    server.read()
    server.ask("state")


@cases.is_legal
def memory_keeps_everything(server: ScriptedServer) -> None:
    server.write(3, config=MEMORY)
    server.event("power")
    server.read()
    server.write(1)
    server.event("stop")
    server.read()


@cases.is_legal
def ephemeral_is_empty_after_a_restart(server: ScriptedServer) -> None:
    server.write(3, config=EPHEMERAL)
    server.read()
    server.event("stop")
    held = lose_tail(server, 0, 2)
    server.read()
    server.write(3)
    server.read(2)
    held.live.clear()
    held.head, held.gaps = 0, []
    server.event("power")
    server.read(5)
    server.write(1)
    server.read()


@cases.breaks("lost")
def memory_loses_something_without_any_crash(server: ScriptedServer) -> None:
    server.write(3, config=MEMORY)
    server.event("stop")
    del server.held["t"].live[2]
    server.read()


@cases.breaks("lost")
def memory_loses_what_was_written_after_the_crash(server: ScriptedServer) -> None:
    server.write(3, config=MEMORY)
    server.event("kill")
    server.held["t"] = StoredTopic(dict(MEMORY))
    server.write(2)
    del server.held["t"].live[1]
    server.read()


@cases.breaks("head")
def memory_falls_back_without_a_crash(server: ScriptedServer) -> None:
    server.write(2, config=MEMORY)
    server.write(1)
    server.held["t"].head = 2
    server.ask("state")


@cases.breaks("moved")
def memory_moves_a_record(server: ScriptedServer) -> None:
    server.write(2, config=MEMORY)
    server.event("power")
    held = server.held["t"]
    held.live, held.head = {1: held.live[2] | {"$seq": 1}}, 1
    server.read()


@cases.breaks("ephemeral-survived")
def ephemeral_records_survive(server: ScriptedServer) -> None:
    server.write(3, config=EPHEMERAL)
    server.event("power")
    server.read()


@cases.breaks("dedupe")
def the_key_of_an_ephemeral_record_outlives_it(server: ScriptedServer) -> None:
    op = server.write(3, config=EPHEMERAL, idempotency_key="k")
    server.event("power")
    lose_tail(server, 0, 3)
    server.finish(server.again(op))


@cases.is_legal
def a_key_goes_with_its_ephemeral_record(server: ScriptedServer) -> None:
    op = server.write(3, config=EPHEMERAL, idempotency_key="k")
    server.finish(server.again(op))
    server.event("power")
    lose_tail(server, 0, 3).keys.clear()
    server.finish(server.again(op))
    server.finish(server.again(op))
    server.read()


@cases.is_legal
def a_key_stays_when_the_class_may_have_kept_its_record(server: ScriptedServer) -> None:
    op = server.write(3, config=EPHEMERAL, idempotency_key="k")
    server.ask("put", **FSYNC)
    server.event("power")
    server.finish(server.again(op))
    server.read()


@cases.breaks("lost")
def a_class_that_was_made_stronger(server: ScriptedServer) -> None:
    """Written under `fsync`, in a topic that was `memory` before."""
    server.write(1, config=MEMORY)
    server.ask("put", **FSYNC)
    server.write(1)
    server.event("power")
    del server.held["t"].live[2]
    server.read()


@cases.breaks("seq-shared")
def a_class_that_was_made_stronger_and_its_seqs(server: ScriptedServer) -> None:
    server.write(1, config=MEMORY)
    server.ask("put", **FSYNC)
    server.write(1)
    server.event("power")
    server.held["t"].head = 1
    server.write(1)


# -- caps, expiry, damage ------------------------------------------------------------------------------------


@cases.is_legal
def caps_and_expiry_are_announced(server: ScriptedServer) -> None:
    server.ask("put", cap_records=2, ttl_ms=1000)
    server.write(5)
    held = server.held["t"]
    for seq in (1, 2, 3):
        del held.live[seq]
    held.gaps.append((1, 3, "cap"))
    server.read()
    server.read(1)
    server.read(3)
    held.live.clear()
    held.gaps = [(1, 5, "mixed")]
    server.read()
    server.ask("state")
    server.write()
    server.read(2)


@cases.is_legal
def damage_is_announced(server: ScriptedServer) -> None:
    server.write(3, config=FSYNC)
    server.event("rot", "t")
    del server.held["t"].live[2]
    server.held["t"].gaps.append((2, 2, "corrupt"))
    server.read()
    server.read(1)


@cases.is_legal
def what_corruption_took_is_not_among_those_that_a_delete_keeps(server: ScriptedServer) -> None:
    server.write(3, config=FSYNC)
    server.event("rot", "t")
    del server.held["t"].live[2]
    server.held["t"].gaps.append((2, 2, "corrupt"))
    server.ask("delete", keep=2)
    server.read()


@cases.breaks("lost")
def damage_is_silent(server: ScriptedServer) -> None:
    server.write(3, config=FSYNC)
    server.event("rot", "t")
    del server.held["t"].live[2]
    server.read()


@cases.breaks("lost")
def an_eviction_is_silent(server: ScriptedServer) -> None:
    server.ask("put", cap_records=2)
    server.write(5)
    for seq in (1, 2, 3):
        del server.held["t"].live[seq]
    server.read()


def announced(server: ScriptedServer, reason: str, **config: object) -> None:
    server.ask("put", **config)
    server.write(5)
    held = server.held["t"]
    for seq in (1, 2, 3):
        del held.live[seq]
    held.gaps.append((1, 3, reason))
    server.read()


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
    server = ScriptedServer()
    announced(server, reason, **config)
    assert "tombstone" in server.rules()


@cases.breaks("tombstone")
def a_gap_that_begins_elsewhere(server: ScriptedServer) -> None:
    announced(server, "cap", cap_records=2)
    server.history.ops[-1].answer["tombstone"]["gap_from"] = 2


@cases.breaks("tombstone")
def a_floor_within_the_gap(server: ScriptedServer) -> None:
    announced(server, "cap", cap_records=2)
    server.history.ops[-1].answer["earliest_seq"] = 3


@cases.breaks("page")
def recreated_below_the_head(server: ScriptedServer) -> None:
    announced(server, "recreated", cap_records=2)


# -- drops and existence -------------------------------------------------------------------------------------


@cases.is_legal
def a_topic_is_made_anew(server: ScriptedServer) -> None:
    server.write(3, idempotency_key="k")
    server.read()
    server.ask("drop")
    server.read()
    server.ask("drop")
    server.ask("list")
    server.write(2, idempotency_key="k")
    server.read(3)
    server.read()
    server.ask("state")
    server.ask("list")


@cases.is_legal
def writes_and_reads_while_a_drop_is_on_its_way(server: ScriptedServer) -> None:
    server.write(3)
    drop = server.send("drop")
    write, page = server.send_write(2), server.send("diff", client="r", from_seq=0)
    server.finish(page)
    before = server.write(1, client="b")
    done = server.do(drop)
    after = server.write(1, client="c")
    server.finish(write)
    server.reply(drop, done)
    server.read()
    assert (before.answer["first_seq"], after.answer["first_seq"]) == (4, 1)


@cases.is_legal
def a_drop_of_unknown_outcome_that_did_not_happen(server: ScriptedServer) -> None:
    server.write(3)
    server.lose(server.send("drop"))
    server.write(1)
    server.read()
    server.ask("state")


@cases.is_legal
def a_drop_of_unknown_outcome_that_happened(server: ScriptedServer) -> None:
    server.write(3)
    server.lose(server.send("drop"), executed=True)
    server.read()
    server.write(2)
    server.read()


@cases.is_legal
def a_drop_of_unknown_outcome_and_nothing_that_tells(server: ScriptedServer) -> None:
    server.write(3)
    server.ask("delete", before_seq=9)
    server.lose(server.send("drop"))
    server.write(2)
    server.read()
    server.ask("state")


@cases.is_legal
def a_topic_made_by_a_write_of_unknown_outcome(server: ScriptedServer) -> None:
    server.lose(server.send_write(2, config=FSYNC), executed=True)
    server.event("power")
    server.read()
    server.ask("state")


@cases.breaks("dropped-visible")
def a_record_outlives_its_topic(server: ScriptedServer) -> None:
    server.write(3)
    row = server.held["t"].live[2]
    server.ask("drop")
    server.write(1)
    server.held["t"].head, server.held["t"].live[2] = 2, row
    server.read()


@cases.breaks("dropped-visible")
def seqs_go_on_after_a_drop(server: ScriptedServer) -> None:
    server.write(3)
    held = server.held["t"]
    server.ask("drop")
    server.held["t"] = held
    server.write(1)
    server.read()


@cases.breaks("existence")
def a_topic_vanishes(server: ScriptedServer) -> None:
    server.ask("put", **EPHEMERAL)
    server.event("power")
    del server.held["t"]
    server.read()


@cases.breaks("existence")
def a_topic_is_not_listed(server: ScriptedServer) -> None:
    server.write(topic="s")
    server.write()
    server.ask("list").answer["topics"].pop()


@cases.breaks("existence")
def a_dropped_topic_is_listed(server: ScriptedServer) -> None:
    server.write()
    held = server.held["t"]
    server.ask("drop")
    server.held["t"] = held
    server.ask("list")


@cases.breaks("existence")
def a_dropped_topic_comes_back(server: ScriptedServer) -> None:
    server.ask("put")
    server.ask("drop")
    server.event("kill")
    server.held["t"] = StoredTopic()
    server.ask("state")


@cases.breaks("existence")
def a_topic_is_created_twice(server: ScriptedServer) -> None:
    server.ask("put")
    del server.held["t"]
    server.ask("put")


@cases.breaks("existence")
def a_topic_that_nobody_made(server: ScriptedServer) -> None:
    server.held["t"] = StoredTopic()
    server.read()


# -- all cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", cases.legal, ids=lambda scenario: scenario.__name__)
def test_legal(scenario: Scenario) -> None:
    server = ScriptedServer()
    scenario(server)
    assert_ok(server.history)


@pytest.mark.parametrize(
    ("rule", "scenario"), cases.broken, ids=lambda value: getattr(value, "__name__", None)
)
def test_each_violation_is_found(rule: str, scenario: Scenario) -> None:
    server = ScriptedServer()
    scenario(server)
    assert rule in server.rules()
