"""Goal: the checker of histories blames what the contract forbids, by the right name, and nothing else.

Method: small histories told by hand with `Tale`, a server of a few lines. Each legal one shows something that a careless
checker would blame; each broken one is a legal one with a single lie in it.
"""

from __future__ import annotations

import pytest

from tests.support.checker import assert_ok
from tests.support.checker_tale import Cases, Story, Tale

cases = Cases()
FSYNC = {"durability": "fsync"}

# -- acknowledgements ----------------------------------------------------------------------------------------


@cases.is_legal
def writes_and_pages(tale: Tale) -> None:
    tale.write(3)
    tale.write(2, client="b", tag="x", node="n")
    tale.read(include_tags=True)
    tale.read(1, limit=2)
    tale.read(5)
    tale.ask("state")
    tale.ask("list")


@cases.is_legal
def concurrent_writers(tale: Tale) -> None:
    one, two = tale.send_write(2), tale.send_write(3, client="b")
    page = tale.send("diff", client="r", from_seq=0)
    tale.do(tale.send("put"))
    second = tale.do(two)
    tale.tell(page, tale.do(page))
    tale.tell(one, tale.do(one))
    tale.tell(two, second)
    tale.read()


@cases.breaks("ack")
def seqs_are_not_consecutive(tale: Tale) -> None:
    tale.write(3).answer["seqs"] = [1, 2, 4]


@cases.breaks("ack")
def count_is_wrong(tale: Tale) -> None:
    tale.write(3).answer["count"] = 2


@cases.breaks("ack")
def created_twice_without_status(tale: Tale) -> None:
    tale.write()
    tale.write().answer["created"] = True


@cases.breaks("seq-shared")
def two_writes_get_the_same_seq(tale: Tale) -> None:
    tale.write()
    tale.held["t"].head = 0
    tale.write(client="b")


@cases.breaks("order")
def a_write_lands_behind_an_older_head(tale: Tale) -> None:
    tale.write(2)
    tale.ask("delete", before_seq=2)
    tale.held["t"].head = 4
    tale.ask("state")
    tale.held["t"].head = 2
    tale.write()


@cases.breaks("workload")
def the_same_data_twice(tale: Tale) -> None:
    tale.again(tale.write())


# -- retries -------------------------------------------------------------------------------------------------


@cases.is_legal
def a_retry_after_an_unknown_outcome_that_was_written(tale: Tale) -> None:
    op = tale.send_write(2, idempotency_key="k")
    tale.lose(op, executed=True)
    tale.finish(tale.again(op))
    tale.read()


@cases.is_legal
def a_retry_after_an_unknown_outcome_that_was_not_written(tale: Tale) -> None:
    op = tale.send_write(2, idempotency_key="k")
    tale.lose(op)
    tale.finish(tale.again(op))
    tale.read()


@cases.is_legal
def a_key_that_went_with_an_unsynced_tail(tale: Tale) -> None:
    """The write was lost with the power, and its key with it: the retry is a new write."""
    tale.ask("put")
    op = tale.write(1, idempotency_key="k")
    tale.event("power")
    held = tale.held["t"]
    held.live.clear()
    held.keys.clear()
    held.head = 8
    held.gaps.append((1, 8, "crash"))
    tale.finish(tale.again(op))
    tale.read()


@cases.is_legal
def a_retry_after_the_window(tale: Tale) -> None:
    op = tale.write(1, idempotency_key="k", config={"idempotency_window_ms": 50})
    tale.held["t"].keys.clear()
    tale.time += 100
    tale.finish(tale.again(op))
    tale.read()


@cases.breaks("twice")
def a_retry_is_written_again(tale: Tale) -> None:
    op = tale.write(2, idempotency_key="k")
    tale.held["t"].keys.clear()
    tale.finish(tale.again(op))
    tale.read()


@cases.breaks("twice")
def a_retry_is_written_again_after_a_kill(tale: Tale) -> None:
    tale.ask("put", **FSYNC)
    op = tale.send_write(2, idempotency_key="k")
    tale.lose(op, executed=True)
    tale.event("kill")
    tale.held["t"].keys.clear()
    tale.finish(tale.again(op))
    tale.read()


@cases.breaks("dedupe")
def a_retry_is_told_other_seqs(tale: Tale) -> None:
    op = tale.write(2, idempotency_key="k")
    tale.write(2)
    tale.held["t"].keys["k"] = (3, 2)
    tale.finish(tale.again(op))


@cases.breaks("dedupe")
def deduped_without_a_first_write(tale: Tale) -> None:
    tale.write(2)
    tale.held["t"].keys["k"] = (1, 2)
    tale.write(2, idempotency_key="k")


# -- what is shown -------------------------------------------------------------------------------------------


@cases.breaks("invented")
def a_record_that_nobody_wrote(tale: Tale) -> None:
    tale.write()
    tale.held["t"].head = 2
    tale.held["t"].live[2] = {"$seq": 2, "$ts": 2000, "data": "who?"}
    tale.read()


@cases.breaks("invented")
def a_record_that_is_sent_later(tale: Tale) -> None:
    tale.write()
    page = tale.read()
    later = tale.write()
    record = tale.read(1).answer["records"][0]
    page.answer["records"].append(record)
    page.answer.update(next_from_seq=2, head_seq=2)
    assert later.ok


@cases.breaks("altered")
def data_changes(tale: Tale) -> None:
    tale.write()
    tale.read()
    tale.held["t"].live[1] = tale.held["t"].live[1] | {"data": {"w": "a-1", "i": 0, "of": 2}}
    tale.read()


@cases.breaks("altered")
def a_time_changes(tale: Tale) -> None:
    tale.write()
    tale.read()
    tale.held["t"].live[1] = tale.held["t"].live[1] | {"$ts": 1}
    tale.read()


@cases.breaks("altered")
def a_tag_is_another(tale: Tale) -> None:
    tale.write(tag="x")
    tale.held["t"].live[1]["$tag"] = "y"
    tale.read(include_tags=True)


@cases.breaks("altered")
def a_node_gets_lost(tale: Tale) -> None:
    tale.write(node="n")
    del tale.held["t"].live[1]["$node"]
    tale.read()


@cases.breaks("ts")
def times_go_back(tale: Tale) -> None:
    tale.write()
    tale.time -= 100
    tale.write()
    tale.read()


@cases.breaks("altered")
def two_records_change_places(tale: Tale) -> None:
    tale.write(2)
    live = tale.held["t"].live
    live[1], live[2] = live[2] | {"$seq": 1}, live[1] | {"$seq": 2}
    tale.read()


@cases.breaks("seq-shared")
def an_unknown_batch_stands_at_a_taken_seq(tale: Tale) -> None:
    tale.write()
    op = tale.lose(tale.send_write(2))
    held = tale.held["t"]
    held.head, held.live = 2, {2: {"$seq": 2, "$ts": 2000, "data": op.request["records"][1]["data"]}}
    tale.read()


@cases.breaks("moved")
def a_batch_shows_up_at_two_places(tale: Tale) -> None:
    tale.write(1)
    held = tale.held["t"]
    held.head = 2
    held.live[2] = held.live[1] | {"$seq": 2}
    tale.read()


# -- refusals and unknown outcomes ---------------------------------------------------------------------------


@cases.is_legal
def refused_and_unknown_writes(tale: Tale) -> None:
    tale.write()
    tale.refuse(tale.send_write(), 429, "throttled", limit="disk_full")
    tale.refuse(tale.send_write(), 503, "not_ready", outcome="unknown")
    tale.lose(tale.send_write(3), executed=True)
    tale.lose(tale.send_write(2))
    tale.read()


@cases.is_legal
def an_unknown_write_that_is_seen_late(tale: Tale) -> None:
    tale.write()
    op = tale.send_write(2)
    tale.read()
    tale.do(op)
    tale.read()
    tale.lose(op)
    tale.read()


@cases.is_legal
def a_failed_disk_shows_a_write_only_after_the_restart(tale: Tale) -> None:
    tale.ask("put", **FSYNC)
    tale.write()
    op = tale.send_write()
    tale.event("error")
    tale.refuse(op, 500, "internal", read_only=True, outcome="unknown")
    tale.read()
    tale.event("kill")
    tale.do(op)
    tale.read()


@cases.breaks("refused-visible")
def a_refused_write_is_there(tale: Tale) -> None:
    tale.write()
    op = tale.send_write()
    tale.do(op)
    tale.refuse(op, 429, "throttled", limit="queue")
    tale.read()


@cases.breaks("head")
def an_unknown_write_is_executed_after_it_settled(tale: Tale) -> None:
    tale.write()
    op = tale.lose(tale.send_write())
    tale.read()
    tale.do(op)
    tale.read()


@cases.breaks("hole")
def an_unknown_write_appears_where_a_page_went_past(tale: Tale) -> None:
    tale.write()
    op = tale.lose(tale.send_write(), executed=True)
    row = tale.held["t"].live.pop(2)
    tale.write()
    tale.read()
    tale.held["t"].live[2] = row
    tale.read()
    assert op.status is None


# -- batches -------------------------------------------------------------------------------------------------


@cases.is_legal
def a_page_ends_within_a_batch(tale: Tale) -> None:
    tale.write(5)
    tale.read(limit=2)
    tale.read(2)


@cases.breaks("batch")
def half_a_batch_is_shown(tale: Tale) -> None:
    tale.write()
    op = tale.lose(tale.send_write(3), executed=True)
    del tale.held["t"].live[3]
    tale.read()
    assert op.status is None


@cases.breaks("batch")
def the_head_stands_within_a_batch(tale: Tale) -> None:
    op = tale.send_write(3)
    done = tale.do(op)
    held = tale.held["t"]
    held.head, row = 2, held.live.pop(3)
    tale.read()
    held.head, held.live[3] = 3, row
    tale.tell(op, done)
    tale.read()


# -- completeness --------------------------------------------------------------------------------------------


@cases.is_legal
def deletes_of_all_sorts(tale: Tale) -> None:
    for i in range(12):
        tale.write(tag="ab"[i % 2] + ".x")
    tale.ask("delete", seqs=[2, 5])
    tale.read()
    tale.ask("delete", match="b.*", before_seq=7)
    tale.read(include_tags=True)
    tale.ask("delete", match="a.x", keep=2)
    tale.read()
    tale.ask("delete", keep=3)
    tale.read()
    tale.ask("delete", before_seq=100)
    tale.read()
    tale.write()
    tale.ask("state")


@cases.is_legal
def a_delete_of_unknown_outcome(tale: Tale) -> None:
    tale.write(4)
    op = tale.send("delete", before_seq=3)
    tale.read()
    tale.do(op)
    tale.read()
    tale.lose(op)
    tale.write()
    tale.read()


@cases.is_legal
def a_delete_on_its_way_and_a_page(tale: Tale) -> None:
    tale.write(4)
    op = tale.send("delete", seqs=[2])
    done = tale.do(op)
    tale.read()
    tale.tell(op, done)


@cases.is_legal
def an_unknown_write_that_was_deleted_before_anyone_saw_it(tale: Tale) -> None:
    tale.write(tag="a")
    tale.lose(tale.send_write(2, tag="b"), executed=True)
    tale.ask("delete", match="b")
    tale.write()
    tale.read()


@cases.is_legal
def an_erase_on_a_full_disk_has_deleted(tale: Tale) -> None:
    tale.write(3)
    tale.event("full")
    op = tale.send("delete", before_seq=3, erase=True)
    tale.do(op)
    tale.refuse(op, 429, "throttled", limit="disk_full", deleted=2)
    tale.read()


@cases.is_legal
def filters_and_own_time_to_live(tale: Tale) -> None:
    tale.write(2, node="n", tag="a")
    tale.write(2, tag="b")
    tale.write(2, ttl_ms=50)
    tale.read(node="n")
    tale.read(tag="b")
    tale.read(tag=["tag", "Subject", "a"])
    for seq in (5, 6):
        del tale.held["t"].live[seq]
    tale.read()


@cases.is_legal
def old_records_of_a_tag_go_silently(tale: Tale) -> None:
    tale.ask("put", cap_per_tag=1)
    tale.write(tag="a")
    tale.write(tag="a")
    del tale.held["t"].live[1]
    tale.read()
    tale.ask("tags")


@cases.breaks("lost")
def an_acknowledged_record_is_missing(tale: Tale) -> None:
    tale.write(3)
    del tale.held["t"].live[2]
    tale.read()


@cases.breaks("lost")
def a_record_that_was_seen_is_missing(tale: Tale) -> None:
    tale.write()
    tale.lose(tale.send_write(), executed=True)
    tale.read()
    del tale.held["t"].live[2]
    tale.write()
    tale.read()


@cases.breaks("lost")
def a_delete_takes_a_neighbour(tale: Tale) -> None:
    tale.write(4)
    tale.ask("delete", seqs=[2])
    del tale.held["t"].live[3]
    tale.read()


@cases.breaks("lost")
def a_delete_takes_what_came_after_it(tale: Tale) -> None:
    tale.write(2, tag="a")
    tale.ask("delete", match="a")
    tale.write(tag="a")
    del tale.held["t"].live[3]
    tale.write()
    tale.read()


@cases.breaks("lost")
def a_refused_delete_deletes(tale: Tale) -> None:
    tale.write(2)
    op = tale.send("delete", before_seq=2)
    tale.do(op)
    tale.refuse(op, 503, "not_ready")
    tale.read()


@cases.breaks("lost")
def keep_keeps_too_few(tale: Tale) -> None:
    tale.write(5)
    tale.ask("delete", keep=3)
    del tale.held["t"].live[3]
    tale.read()


@cases.breaks("lost")
def a_tag_filter_hides_what_matches(tale: Tale) -> None:
    tale.write(2, tag="a")
    del tale.held["t"].live[1]
    tale.read(tag="a")


@cases.breaks("lost")
def the_newest_of_a_capped_tag_is_gone(tale: Tale) -> None:
    tale.ask("put", cap_per_tag=2)
    tale.write(2, tag="a")
    del tale.held["t"].live[1]
    tale.read()


@cases.breaks("hole")
def a_seq_of_which_nobody_ever_heard(tale: Tale) -> None:
    tale.write()
    tale.lose(tale.send_write())
    tale.held["t"].head = 2
    tale.write()
    tale.read()


@cases.breaks("filter")
def a_filter_lets_a_node_through(tale: Tale) -> None:
    tale.write(node="n")
    tale.read().request["node"] = "n"


@cases.breaks("filter")
def a_filter_lets_a_tag_through(tale: Tale) -> None:
    tale.write(tag="x")
    tale.read().request["tag"] = "y"


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
