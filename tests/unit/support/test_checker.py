"""Goal: the checker of histories reports what the contract forbids, under the right rule, and nothing else.

Method: small histories built with `ScriptedServer`, a server of a few lines. Each legal one has something that a careless
checker would report; each broken one is a legal one with a single error in it.
"""

from __future__ import annotations

import pytest

from tests.support.checker import assert_ok
from tests.support.scripted_server import Cases, Scenario, ScriptedServer

cases = Cases()
FSYNC = {"durability": "fsync"}

# -- acknowledgements ----------------------------------------------------------------------------------------


@cases.is_legal
def writes_and_pages(server: ScriptedServer) -> None:
    server.write(3)
    server.write(2, client="b", tag="x", node="n")
    server.read(include_tags=True)
    server.read(1, limit=2)
    server.read(5)
    server.ask("state")
    server.ask("list")


@cases.is_legal
def concurrent_writers(server: ScriptedServer) -> None:
    one, two = server.send_write(2), server.send_write(3, client="b")
    page = server.send("diff", client="r", from_seq=0)
    server.do(server.send("put"))
    second = server.do(two)
    server.reply(page, server.do(page))
    server.reply(one, server.do(one))
    server.reply(two, second)
    server.read()


@cases.breaks("ack")
def seqs_are_not_consecutive(server: ScriptedServer) -> None:
    server.write(3).answer["seqs"] = [1, 2, 4]


@cases.breaks("ack")
def count_is_wrong(server: ScriptedServer) -> None:
    server.write(3).answer["count"] = 2


@cases.breaks("ack")
def created_twice_without_status(server: ScriptedServer) -> None:
    server.write()
    server.write().answer["created"] = True


@cases.breaks("seq-shared")
def two_writes_get_the_same_seq(server: ScriptedServer) -> None:
    server.write()
    server.held["t"].head = 0
    server.write(client="b")


@cases.breaks("order")
def a_write_lands_behind_an_older_head(server: ScriptedServer) -> None:
    server.write(2)
    server.ask("delete", before_seq=2)
    server.held["t"].head = 4
    server.ask("state")
    server.held["t"].head = 2
    server.write()


@cases.breaks("workload")
def the_same_data_twice(server: ScriptedServer) -> None:
    server.again(server.write())


# -- retries -------------------------------------------------------------------------------------------------


@cases.is_legal
def a_retry_after_an_unknown_outcome_that_was_written(server: ScriptedServer) -> None:
    op = server.send_write(2, idempotency_key="k")
    server.lose(op, executed=True)
    server.finish(server.again(op))
    server.read()


@cases.is_legal
def a_retry_after_an_unknown_outcome_that_was_not_written(server: ScriptedServer) -> None:
    op = server.send_write(2, idempotency_key="k")
    server.lose(op)
    server.finish(server.again(op))
    server.read()


@cases.is_legal
def a_key_that_went_with_an_unsynced_tail(server: ScriptedServer) -> None:
    """The power cut lost the write, and its key with it: the retry is a new write."""
    server.ask("put")
    op = server.write(1, idempotency_key="k")
    server.event("power")
    held = server.held["t"]
    held.live.clear()
    held.keys.clear()
    held.head = 8
    held.gaps.append((1, 8, "crash"))
    server.finish(server.again(op))
    server.read()


@cases.is_legal
def a_retry_after_the_window(server: ScriptedServer) -> None:
    op = server.write(1, idempotency_key="k", config={"idempotency_window_ms": 50})
    server.held["t"].keys.clear()
    server.time += 100
    server.finish(server.again(op))
    server.read()


@cases.breaks("twice")
def a_retry_is_written_again(server: ScriptedServer) -> None:
    op = server.write(2, idempotency_key="k")
    server.held["t"].keys.clear()
    server.finish(server.again(op))
    server.read()


@cases.breaks("twice")
def a_retry_is_written_again_after_a_kill(server: ScriptedServer) -> None:
    server.ask("put", **FSYNC)
    op = server.send_write(2, idempotency_key="k")
    server.lose(op, executed=True)
    server.event("kill")
    server.held["t"].keys.clear()
    server.finish(server.again(op))
    server.read()


@cases.breaks("dedupe")
def a_retry_is_told_other_seqs(server: ScriptedServer) -> None:
    op = server.write(2, idempotency_key="k")
    server.write(2)
    server.held["t"].keys["k"] = (3, 2)
    server.finish(server.again(op))


@cases.breaks("dedupe")
def deduped_without_a_first_write(server: ScriptedServer) -> None:
    server.write(2)
    server.held["t"].keys["k"] = (1, 2)
    server.write(2, idempotency_key="k")


# -- what is shown -------------------------------------------------------------------------------------------


@cases.breaks("invented")
def a_record_that_nobody_wrote(server: ScriptedServer) -> None:
    server.write()
    server.held["t"].head = 2
    server.held["t"].live[2] = {"$seq": 2, "$ts": 2000, "data": "who?"}
    server.read()


@cases.breaks("invented")
def a_record_that_is_sent_later(server: ScriptedServer) -> None:
    server.write()
    page = server.read()
    later = server.write()
    record = server.read(1).answer["records"][0]
    page.answer["records"].append(record)
    page.answer.update(next_from_seq=2, head_seq=2)
    assert later.ok


@cases.breaks("altered")
def data_changes(server: ScriptedServer) -> None:
    server.write()
    server.read()
    server.held["t"].live[1] = server.held["t"].live[1] | {"data": {"w": "a-1", "i": 0, "of": 2}}
    server.read()


@cases.breaks("altered")
def a_time_changes(server: ScriptedServer) -> None:
    server.write()
    server.read()
    server.held["t"].live[1] = server.held["t"].live[1] | {"$ts": 1}
    server.read()


@cases.breaks("altered")
def a_tag_is_another(server: ScriptedServer) -> None:
    server.write(tag="x")
    server.held["t"].live[1]["$tag"] = "y"
    server.read(include_tags=True)


@cases.breaks("altered")
def a_node_gets_lost(server: ScriptedServer) -> None:
    server.write(node="n")
    del server.held["t"].live[1]["$node"]
    server.read()


@cases.breaks("ts")
def times_go_back(server: ScriptedServer) -> None:
    server.write()
    server.time -= 100
    server.write()
    server.read()


@cases.breaks("altered")
def two_records_change_places(server: ScriptedServer) -> None:
    server.write(2)
    live = server.held["t"].live
    live[1], live[2] = live[2] | {"$seq": 1}, live[1] | {"$seq": 2}
    server.read()


@cases.breaks("seq-shared")
def an_unknown_batch_stands_at_a_taken_seq(server: ScriptedServer) -> None:
    server.write()
    op = server.lose(server.send_write(2))
    held = server.held["t"]
    held.head, held.live = 2, {2: {"$seq": 2, "$ts": 2000, "data": op.request["records"][1]["data"]}}
    server.read()


@cases.breaks("moved")
def a_batch_shows_up_at_two_places(server: ScriptedServer) -> None:
    server.write(1)
    held = server.held["t"]
    held.head = 2
    held.live[2] = held.live[1] | {"$seq": 2}
    server.read()


# -- refusals and unknown outcomes ---------------------------------------------------------------------------


@cases.is_legal
def refused_and_unknown_writes(server: ScriptedServer) -> None:
    server.write()
    server.refuse(server.send_write(), 429, "throttled", limit="disk_full")
    server.refuse(server.send_write(), 503, "not_ready", outcome="unknown")
    server.lose(server.send_write(3), executed=True)
    server.lose(server.send_write(2))
    server.read()


@cases.is_legal
def an_unknown_write_that_is_seen_late(server: ScriptedServer) -> None:
    server.write()
    op = server.send_write(2)
    server.read()
    server.do(op)
    server.read()
    server.lose(op)
    server.read()


@cases.is_legal
def a_failed_disk_shows_a_write_only_after_the_restart(server: ScriptedServer) -> None:
    server.ask("put", **FSYNC)
    server.write()
    op = server.send_write()
    server.event("error")
    server.refuse(op, 500, "internal", read_only=True, outcome="unknown")
    server.read()
    server.event("kill")
    server.do(op)
    server.read()


@cases.breaks("refused-visible")
def a_refused_write_is_there(server: ScriptedServer) -> None:
    server.write()
    op = server.send_write()
    server.do(op)
    server.refuse(op, 429, "throttled", limit="queue")
    server.read()


@cases.breaks("head")
def an_unknown_write_is_executed_after_it_settled(server: ScriptedServer) -> None:
    server.write()
    op = server.lose(server.send_write())
    server.read()
    server.do(op)
    server.read()


@cases.breaks("hole")
def an_unknown_write_appears_where_a_page_went_past(server: ScriptedServer) -> None:
    server.write()
    op = server.lose(server.send_write(), executed=True)
    row = server.held["t"].live.pop(2)
    server.write()
    server.read()
    server.held["t"].live[2] = row
    server.read()
    assert op.status is None


# -- batches -------------------------------------------------------------------------------------------------


@cases.is_legal
def a_page_ends_within_a_batch(server: ScriptedServer) -> None:
    server.write(5)
    server.read(limit=2)
    server.read(2)


@cases.breaks("batch")
def half_a_batch_is_shown(server: ScriptedServer) -> None:
    server.write()
    op = server.lose(server.send_write(3), executed=True)
    del server.held["t"].live[3]
    server.read()
    assert op.status is None


@cases.breaks("batch")
def the_head_stands_within_a_batch(server: ScriptedServer) -> None:
    op = server.send_write(3)
    done = server.do(op)
    held = server.held["t"]
    held.head, row = 2, held.live.pop(3)
    server.read()
    held.head, held.live[3] = 3, row
    server.reply(op, done)
    server.read()


# -- completeness --------------------------------------------------------------------------------------------


@cases.is_legal
def deletes_of_all_sorts(server: ScriptedServer) -> None:
    for i in range(12):
        server.write(tag="ab"[i % 2] + ".x")
    server.ask("delete", seqs=[2, 5])
    server.read()
    server.ask("delete", match="b.*", before_seq=7)
    server.read(include_tags=True)
    server.ask("delete", match="a.x", keep=2)
    server.read()
    server.ask("delete", keep=3)
    server.read()
    server.ask("delete", before_seq=100)
    server.read()
    server.write()
    server.ask("state")


@cases.is_legal
def a_delete_of_unknown_outcome(server: ScriptedServer) -> None:
    server.write(4)
    op = server.send("delete", before_seq=3)
    server.read()
    server.do(op)
    server.read()
    server.lose(op)
    server.write()
    server.read()


@cases.is_legal
def a_delete_on_its_way_and_a_page(server: ScriptedServer) -> None:
    server.write(4)
    op = server.send("delete", seqs=[2])
    done = server.do(op)
    server.read()
    server.reply(op, done)


@cases.is_legal
def an_unknown_write_that_was_deleted_before_anyone_saw_it(server: ScriptedServer) -> None:
    server.write(tag="a")
    server.lose(server.send_write(2, tag="b"), executed=True)
    server.ask("delete", match="b")
    server.write()
    server.read()


@cases.is_legal
def an_erase_on_a_full_disk_has_deleted(server: ScriptedServer) -> None:
    server.write(3)
    server.event("full")
    op = server.send("delete", before_seq=3, erase=True)
    server.do(op)
    server.refuse(op, 429, "throttled", limit="disk_full", deleted=2)
    server.read()


@cases.is_legal
def filters_and_own_time_to_live(server: ScriptedServer) -> None:
    server.write(2, node="n", tag="a")
    server.write(2, tag="b")
    server.write(2, ttl_ms=50)
    server.read(node="n")
    server.read(tag="b")
    server.read(tag=["tag", "Subject", "a"])
    for seq in (5, 6):
        del server.held["t"].live[seq]
    server.read()


@cases.is_legal
def old_records_of_a_tag_go_silently(server: ScriptedServer) -> None:
    server.ask("put", cap_per_tag=1)
    server.write(tag="a")
    server.write(tag="a")
    del server.held["t"].live[1]
    server.read()
    server.ask("tags")


@cases.breaks("lost")
def an_acknowledged_record_is_missing(server: ScriptedServer) -> None:
    server.write(3)
    del server.held["t"].live[2]
    server.read()


@cases.breaks("lost")
def a_record_that_was_seen_is_missing(server: ScriptedServer) -> None:
    server.write()
    server.lose(server.send_write(), executed=True)
    server.read()
    del server.held["t"].live[2]
    server.write()
    server.read()


@cases.breaks("lost")
def a_delete_takes_a_neighbour(server: ScriptedServer) -> None:
    server.write(4)
    server.ask("delete", seqs=[2])
    del server.held["t"].live[3]
    server.read()


@cases.breaks("lost")
def a_delete_takes_what_came_after_it(server: ScriptedServer) -> None:
    server.write(2, tag="a")
    server.ask("delete", match="a")
    server.write(tag="a")
    del server.held["t"].live[3]
    server.write()
    server.read()


@cases.breaks("lost")
def a_refused_delete_deletes(server: ScriptedServer) -> None:
    server.write(2)
    op = server.send("delete", before_seq=2)
    server.do(op)
    server.refuse(op, 503, "not_ready")
    server.read()


@cases.breaks("lost")
def keep_keeps_too_few(server: ScriptedServer) -> None:
    server.write(5)
    server.ask("delete", keep=3)
    del server.held["t"].live[3]
    server.read()


@cases.breaks("lost")
def a_tag_filter_hides_what_matches(server: ScriptedServer) -> None:
    server.write(2, tag="a")
    del server.held["t"].live[1]
    server.read(tag="a")


@cases.breaks("lost")
def the_newest_of_a_capped_tag_is_gone(server: ScriptedServer) -> None:
    server.ask("put", cap_per_tag=2)
    server.write(2, tag="a")
    del server.held["t"].live[1]
    server.read()


@cases.breaks("hole")
def a_seq_of_which_nobody_ever_heard(server: ScriptedServer) -> None:
    server.write()
    server.lose(server.send_write())
    server.held["t"].head = 2
    server.write()
    server.read()


@cases.breaks("filter")
def a_filter_lets_a_node_through(server: ScriptedServer) -> None:
    server.write(node="n")
    server.read().request["node"] = "n"


@cases.breaks("filter")
def a_filter_lets_a_tag_through(server: ScriptedServer) -> None:
    server.write(tag="x")
    server.read().request["tag"] = "y"


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
