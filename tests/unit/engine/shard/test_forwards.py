"""Goal: a copy is in its dest once, in the order of its source, complete, and over every crash of either side.

Method: the test carries copies between two engines, so it can stop, repeat, reorder and crash between any two steps.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.engine_harness import DISK, EPHEMERAL, FSYNC, MEMORY, append, numbered
from tests.support.forward_harness import Pair, rule
from topics.api.config import TopicConfig
from topics.api.errors import Forbidden, ForwardNotFound, Throttled, TopicNotEmpty, TopicNotFound
from topics.engine.commands import forwards as f
from topics.engine.commands import topics as c

# -- rules -------------------------------------------------------------------------------------------------


def test_the_catalog_keeps_rules_over_restarts() -> None:
    pair = Pair()
    first, second = rule(3, state="active"), rule(5, dest="other", filter=(("Glob", "a*"),))
    for forward in (first, second):
        pair.dest.do(f.PutForward(forward))
    pair.dest.do(f.DropForward(5))
    pair.dest.kill_and_open()
    shard = pair.dest.engine.shard
    assert (shard.forwards.catalog, shard.forwards.last_uid) == ({3: first}, 5)
    pair.dest.checkpoint()
    pair.dest.checkpoint()
    pair.dest.restart()
    shard = pair.dest.engine.shard
    assert (shard.forwards.catalog, shard.forwards.last_uid) == ({3: first}, 5), "a uid is never used twice"


def test_a_rule_is_answered_after_its_sync() -> None:
    pair = Pair()
    (token,) = pair.dest.ask(f.PutForward(rule()))
    assert token not in pair.dest.replies
    pair.dest.power_cut()
    pair.dest.open()
    assert pair.dest.engine.shard.forwards.catalog == {}


def test_both_ends_are_made_and_say_so() -> None:
    pair = Pair()
    assert pair.dest.do(f.OpenInflow("dst", 1, "r1")) == f.InflowOpened(1, True)
    assert pair.dest.do(f.OpenInflow("dst", 1, "r1")) == f.InflowOpened(1, False)
    assert pair.source.do(f.OpenOutflow(rule())) == f.OutflowOpened(1, True)
    assert pair.source.do(f.OpenOutflow(rule())) == f.OutflowOpened(1, False)
    assert pair.source.state("src").head_seq == 0


@pytest.mark.parametrize("source", ["src", ""], ids=["source", "source-not-known"])
def test_a_key_ends_rules_with_a_topic_only_if_it_may_know_of_them(source: str) -> None:
    """`source` is empty in files from before it was stored; the rule itself can still be deleted then."""
    pair = Pair()
    pair.dest.do(f.OpenInflow("dst", 1, "r1", source=source))
    for _ in range(3):
        for prefixes in (("dst", "src"), ("dst", "r1"), ("r1", "src")):
            pair.dest.refused(c.DropTopic("dst", prefixes=prefixes), Forbidden)
        pair.dest.checkpoint()
        pair.dest.kill_and_open()
    drop = c.DropTopic("dst", prefixes=("dst", "r1", "src"))
    if source:
        dropped = pair.dest.do(drop)
        assert isinstance(dropped, c.TopicDropped) and dropped.forwards == [(1, "r1")]
    else:
        pair.dest.refused(drop, Forbidden)


def test_a_dest_that_must_be_there_is_not_made() -> None:
    pair = Pair()
    pair.dest.refused(f.OpenInflow("dst", 1, "r1", create=False), TopicNotFound)
    assert pair.dest.engine.shard.state.published == {}


@pytest.mark.parametrize("used", [False, True])
def test_topics_created_for_a_refused_rule_are_removed_unless_used(used: bool) -> None:
    pair = Pair()
    pair.open()
    if used:
        pair.dest.append("dst", b"1")
        pair.source.put("src", TopicConfig(ttl_ms=5))
    pair.dest.do(f.CloseInflow("dst", 1, undo=True))
    pair.source.do(f.CloseOutflow(1, "src", undo=True))
    for harness, name in ((pair.dest, "dst"), (pair.source, "src")):
        harness.kill_and_open()
        assert (name in harness.engine.shard.state.published) is used


# -- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("config", [FSYNC, DISK, MEMORY, EPHEMERAL])
def test_records_after_the_rule_are_copied_in_order(config: TopicConfig, one: bool) -> None:
    pair = Pair(one=one)
    pair.source.put("src", config)
    pair.source.append("src", b'"before"')
    forward = pair.open()
    for payload in numbered(1, 11):
        pair.source.append("src", payload)
    taken = pair.carry(forward)
    assert (taken.mark, taken.total, taken.full) == (12, 11, False)
    assert pair.payloads() == numbered(1, 11)
    assert pair.dest.seqs("dst") == list(range(1, 12))


def test_a_copy_carries_what_the_rule_says() -> None:
    pair = Pair()
    both, bare = pair.open(), pair.open(rule(2, dest="bare", preserve_node=False, preserve_tag=False))
    pair.source.do(append("src", b'{"a":1}{"u":2}', tags=[b"t"], nodes=[b"n"], meta_lens=[7]))
    pair.source.do(append("src", b"\x00\xff", raw=True, header_lens=[1]))
    pair.source.append("src", b"3")
    for forward in (both, bare):
        pair.carry(forward)
    page = pair.page()
    assert (page.tags, page.nodes) == ([b"t", None, None], [b"n", None, None])
    assert pair.payloads() == [b'{"a":1}{"u":2}', b"\x00\xff", b"3"]
    original = pair.source.diff("src", limit=10, frames=False)
    assert [flags & 8 for flags in page.flags] == [flags & 8 for flags in original.flags] == [0, 8, 0]
    bare_page = pair.page("bare")
    assert not any(bare_page.tags or []) and not any(bare_page.nodes or [])


def test_a_filter_is_applied_at_the_source_and_the_mark_goes_on() -> None:
    pair = Pair()
    forward = pair.open(rule(filter=(("Glob", "eu.*"), ("Subject", "us.*.hot"))))
    for i, tag in enumerate((b"eu.1", b"us.1", b"us.1.hot", b"asia", b"eu.2")):
        pair.source.append("src", b"%d" % i, tag=tag)
    pair.source.append("src", b"9")
    copies = pair.next(forward, 0, count=100)
    assert copies is not None and b"asia" not in copies.frames
    assert pair.carry(forward).mark == 6
    assert pair.payloads() == [b"0", b"2", b"4"]


def test_a_changed_rule_keeps_its_place_and_its_total() -> None:
    pair = Pair()
    forward = pair.open()
    pair.source.append("src", b"1", tag=b"a")
    pair.carry(forward)
    pair.source.append("src", b"2", tag=b"b")
    changed = msgspec.structs.replace(forward, filter=(("Eq", "a"),))
    pair.open(changed)
    pair.source.append("src", b"3", tag=b"a")
    assert pair.carry(changed).total == 2
    assert pair.payloads() == [b"1", b"3"]


def test_repeats_overlaps_and_gaps_of_batches() -> None:
    pair = Pair()
    forward = pair.open()
    for payload in numbered(1, 8):
        pair.source.append("src", payload)
    first, overlap = pair.next(forward, 0, count=4), pair.next(forward, 2, count=4)
    late = pair.next(forward, 6, count=4)
    assert first and overlap and late
    assert pair.take(late).mark == 0, "it must not continue from the mark"
    assert pair.take(first).mark == 4
    assert pair.take(first).mark == 4
    assert pair.take(overlap).mark == 6
    assert pair.take(late).mark == 8
    assert pair.payloads() == numbered(1, 8)


def test_copies_of_a_rule_that_was_made_again_under_its_name_are_refused() -> None:
    pair = Pair()
    forward = pair.open(rule(1, name="r"))
    pair.source.append("src", b"1")
    copies = pair.next(forward, 0)
    assert copies is not None
    pair.close(forward)
    pair.open(rule(2, name="r"))
    pair.refused(copies, ForwardNotFound)
    assert pair.payloads() == []


def test_a_rule_that_the_dest_does_not_know_is_refused() -> None:
    pair = Pair()
    forward = pair.open()
    pair.source.append("src", b"1")
    copies = pair.next(forward, 0)
    assert copies is not None
    pair.close(forward)
    pair.refused(copies, ForwardNotFound)
    pair.dest.do(c.DropTopic("dst"))
    pair.refused(copies, ForwardNotFound)
    pair.dest.put("dst")
    pair.refused(copies, ForwardNotFound)
    assert pair.payloads() == []


def test_two_rules_of_one_source_into_one_dest() -> None:
    pair = Pair()
    first, second = pair.open(), pair.open(rule(2))
    pair.source.append("src", b"1")
    pair.carry(first), pair.carry(second)
    assert pair.payloads() == [b"1", b"1"]


# -- patterns ----------------------------------------------------------------------------------------------


def test_a_pattern_copies_topics_that_are_there_and_those_that_come() -> None:
    pair = Pair()
    pair.source.append("orders.eu", b'"before"')
    pair.source.append("other", b'"no"')
    forward = pair.open(rule(source="orders.>"))
    pair.source.append("orders.eu", b'"eu"')
    pair.source.append("orders.us", b'"us"')
    assert pair.source.engine.shard.state.published["other"].outflows == ()
    pair.source.kill_and_open()
    assert sorted(log.name for log in pair.source.engine.shard.forwards.copies_due.values()) == [
        "orders.eu",
        "orders.us",
    ]
    for topic in ("orders.eu", "orders.us"):
        pair.carry(forward, topic)
    assert pair.payloads() == [b'"eu"', b'"us"']


def test_a_topic_that_comes_again_under_a_pattern_is_copied_from_its_start() -> None:
    pair = Pair()
    forward = pair.open(rule(source="orders.*"))
    pair.source.append("orders.eu", b"1", b"2")
    pair.carry(forward, "orders.eu")
    dropped = pair.source.do(c.DropTopic("orders.eu"))
    assert dropped.forwards == [], "the pattern stays"
    pair.source.append("orders.eu", b"3")
    pair.carry(forward, "orders.eu")
    assert pair.payloads() == [b"1", b"2", b"3"]


# -- dropped topics ----------------------------------------------------------------------------------------


def test_a_topic_takes_the_rules_with_it_that_cannot_be_without_it() -> None:
    pair = Pair(one=True)
    pair.open(rule(1, "a", "b", name="in"))
    pair.open(rule(2, "b", "c", name="out"))
    pair.open(rule(3, "*", "x.y", name="pattern"))
    pair.dest.append("b", b"1")
    pair.dest.refused(c.DropTopic("b", if_empty=True), TopicNotEmpty)
    assert sorted(pair.dest.engine.shard.forwards.outflows) == [1, 2, 3]
    assert pair.dest.do(c.DropTopic("b")).forwards == [(1, "in"), (2, "out")]
    for _ in range(2):
        assert sorted(pair.dest.engine.shard.forwards.outflows) == [1, 3], (
            "the first one ends when the catalog says so"
        )
        pair.dest.kill_and_open()
    pair.dest.append("b", b"2")
    assert pair.dest.engine.shard.state.published["b"].outflows == (3,)


# -- full dests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caps", [{"cap_records": 3}, {"cap_bytes": 8}])
def test_a_dest_that_rejects_takes_what_fits_and_goes_on_later(caps: dict[str, Any]) -> None:
    pair = Pair()
    pair.dest.put("dst", TopicConfig(discard="reject", durability="fsync", **caps))
    forward = pair.open()
    pair.source.append("src", b'"0"', b'"skip"', tag=b"x")
    changed = msgspec.structs.replace(forward, filter=(("Eq", "y"),))
    pair.open(changed)
    pair.source.append("src", b"10", b"20", b"300", b"4000", b"5000", tag=b"y")
    taken = pair.carry(changed)
    assert (taken.full, taken.mark, pair.payloads()) == (True, 5, [b"10", b"20", b"300"])
    assert pair.carry(changed).mark == 5
    pair.dest.do(c.Delete("dst", before_seq=4))
    assert pair.carry(changed).mark == 7
    assert pair.payloads() == [b"4000", b"5000"]


@pytest.mark.parametrize("count", [3, 100])
def test_one_batch_for_many_dests_is_to_each_what_its_rule_says(count: int) -> None:
    """The same frames, one after the other: state of one dest must not leak into the next."""
    pair = Pair()
    fields: list[dict[str, Any]] = [
        *({}, {}, {"preserve_tag": False}, {"preserve_node": False}),
        *({"guarantee": "exactly_once"}, {"guarantee": "exactly_once"}, {"allow_cycle": True}, {}),
    ]
    rules = [rule(uid, dest=f"d{uid}", **one) for uid, one in enumerate(fields, 1)]
    pair.dest.put("d2", TopicConfig(discard="reject", cap_records=2))
    for forward in rules:
        pair.open(forward)
    payloads = numbered(1, count)
    pair.source.do(append("src", *payloads, tags=[b"t"] * count, nodes=[b"n"] * count))
    for forward in rules:
        copies = pair.next(forward, 0, count=count)
        assert copies is not None
        taken = pair.take(copies)
        fits = 2 if forward.uid == 2 else count
        assert (taken.uid, taken.mark, taken.full) == (forward.uid, fits, fits < count)
        page = pair.page(forward.dest)
        assert page.tags == ([b"t"] * fits if forward.preserve_tag else None)
        assert page.nodes == ([b"n"] * fits if forward.preserve_node else None)
        if forward.guarantee == "exactly_once":
            keys = [b'"router:r%d:' % forward.uid in payload for payload in pair.payloads(forward.dest)]
            assert keys == [True] * count
        else:
            assert pair.payloads(forward.dest) == payloads[:fits]


def test_a_batch_that_was_taken_in_part_goes_on_from_there() -> None:
    """A second rule is ahead: it gets fewer of the same frames."""
    pair = Pair()
    ahead, behind = pair.open(), pair.open(rule(2, dest="late"))
    pair.source.append("src", *numbered(1, 6))
    whole, part = pair.next(behind, 0, count=6), pair.next(ahead, 0, count=2)
    assert whole is not None and part is not None
    pair.take(part)
    assert pair.take(whole).mark == 6
    again = f.Copies(ahead, whole.source, whole.source_id, whole.epochs, whole.start, 0, 6, whole.frames)
    assert pair.take(again).mark == 6
    assert pair.payloads("late") == pair.payloads() == numbered(1, 6)


def test_a_batch_is_answered_once_whatever_is_in_it() -> None:
    """Losses, JSON and raw bytes are several appends, with one answer that comes with the last."""
    pair = Pair()
    pair.source.put("src", TopicConfig(cap_records=4))
    forward = pair.open()
    pair.source.append("src", *numbered(1, 4))
    pair.source.do(append("src", b"\x00", b"\x01", raw=True, header_lens=[0, 0]))
    copies = pair.next(forward, 0, count=10)
    assert copies is not None and copies.lost == (1, 2)
    (token,) = pair.dest.ask(f.TakeCopies("dst", copies))
    pair.dest.rest()
    assert pair.dest.replies[token] == f.CopiesTaken(1, copies.source_id, 6, total=4)
    assert pair.payloads() == [*numbered(3, 2), b"\x00", b"\x01"]


def test_a_dest_that_evicts_evicts() -> None:
    pair = Pair()
    pair.dest.put("dst", TopicConfig(cap_records=3))
    forward = pair.open()
    for payload in numbered(1, 9):
        pair.source.append("src", payload)
    pair.carry(forward)
    assert pair.payloads() == numbered(7, 3)
    assert pair.dest.gaps("dst") == [(1, 6, "cap")]


def test_a_full_server_takes_nothing_of_a_batch() -> None:
    pair = Pair()
    forward = pair.open()
    pair.source.append("src", b"1", b"2")
    copies = pair.next(forward, 0)
    assert copies is not None
    pair.dest.engine.shard.state.disk_full = True
    pair.refused(copies, Throttled)
    assert pair.mark(forward) == 0
    pair.dest.engine.shard.state.disk_full = False
    assert pair.take(copies).mark == 2


# -- losses of the source ----------------------------------------------------------------------------------


def test_a_checkpoint_keeps_holes_that_are_not_visible_yet() -> None:
    """It stores the topic's logged state, which includes a hole that is not synced yet."""
    pair = Pair()
    pair.source.put("src", TopicConfig(cap_records=2, durability="fsync"))
    pair.dest.put("dst", TopicConfig(durability="fsync"))
    forward = pair.open()
    pair.source.append("src", b"1")
    pair.carry(forward)
    for payload in numbered(2, 6):
        pair.source.append("src", payload)
    copies = pair.next(forward, 1)
    assert copies is not None and copies.lost is not None
    pair.dest.rest()
    pair.dest.engine.checkpoint()
    pair.dest.ask(f.TakeCopies(forward.dest, copies))
    assert not pair.dest.engine.shard.state.published["dst"].view.losses, "it waits for its sync"
    pair.dest.rest()
    pair.dest.kill_and_open()
    assert pair.dest.gaps("dst") == [(2, 5, "source_trim")]


def test_records_evicted_at_the_source_become_announced_holes() -> None:
    pair = Pair()
    pair.source.put("src", TopicConfig(cap_records=2, durability="fsync"))
    forward = pair.open()
    pair.source.append("src", b"1")
    pair.carry(forward)
    for payload in numbered(2, 6):
        pair.source.append("src", payload)
    pair.carry(forward)
    assert pair.dest.read("dst") == (
        [(1, b"1"), (6, b'"record 6"'), (7, b'"record 7"')],
        [(2, 5, "source_trim")],
    )
    pair.dest.kill_and_open()
    assert pair.dest.gaps("dst") == [(2, 5, "source_trim")]
    assert pair.mark(forward) == 7


def test_records_deleted_at_the_source_are_skipped_silently() -> None:
    pair = Pair()
    forward = pair.open()
    pair.source.append("src", b"1", b"2", b"3")
    pair.source.do(c.Delete("src", seqs=[2]))
    pair.carry(forward)
    assert pair.dest.read("dst") == ([(1, b"1"), (2, b"3")], [])


def test_a_tail_that_a_power_cut_took_is_announced_at_the_dest_too() -> None:
    pair = Pair()
    pair.source.put("src", DISK)
    forward = pair.open()
    pair.source.append("src", b"1")
    pair.source.sync()
    pair.carry(forward)
    pair.source.append("src", b"2")
    pair.source.power_cut()
    pair.source.open()
    pair.source.append("src", b"3")
    pair.carry(forward)
    rows, gaps = pair.dest.read("dst")
    assert (rows[0][1], rows[-1][1]) == (b"1", b"3")
    assert [reason for _, _, reason in gaps] == ["source_trim"]


# -- crashes -----------------------------------------------------------------------------------------------


def test_a_copy_and_its_mark_are_there_together_or_not_at_all() -> None:
    pair = Pair()
    pair.dest.put("dst", FSYNC)
    forward = pair.open()
    pair.source.append("src", b"1", b"2")
    copies = pair.next(forward, 0)
    assert copies is not None
    (token,) = pair.dest.ask(f.TakeCopies("dst", copies))
    assert token not in pair.dest.replies, "a copy that a power cut would lose must not be visible"
    assert pair.payloads() == []
    pair.dest.power_cut()
    pair.dest.open()
    assert (pair.mark(forward), pair.payloads()) in ((0, []), (2, [b"1", b"2"]))
    pair.take(copies)
    pair.dest.power_cut()
    pair.dest.open()
    assert (pair.take(copies).mark, pair.payloads()) == (2, [b"1", b"2"])


def test_a_repeat_hears_of_the_copies_only_when_they_are_visible() -> None:
    pair = Pair()
    pair.dest.put("dst", FSYNC)
    forward = pair.open()
    pair.source.append("src", b"1")
    copies = pair.next(forward, 0)
    assert copies is not None
    _, token = pair.dest.ask(f.TakeCopies("dst", copies), f.TakeCopies("dst", copies))
    assert token not in pair.dest.replies
    pair.dest.rest()
    assert pair.dest.replies[token].mark == 1


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
def test_marks_and_starts_survive_checkpoints(checkpoints: int) -> None:
    pair = Pair()
    pair.source.append("src", b'"before"')
    forward = pair.open()
    pair.source.append("src", b"1")
    pair.carry(forward)
    pair.source.append("src", b"2")
    for harness in (pair.source, pair.dest):
        for _ in range(checkpoints):
            harness.checkpoint()
        harness.kill_and_open()
    assert pair.mark(forward) == 2
    assert pair.carry(forward).total == 2
    assert pair.payloads() == [b"1", b"2"]


@pytest.mark.parametrize("config", [MEMORY, EPHEMERAL])
@pytest.mark.parametrize("copied_between", [True, False])
def test_seqs_that_a_crash_gave_again_are_copied_again(config: TopicConfig, copied_between: bool) -> None:
    pair = Pair()
    pair.source.put("src", config)
    forward = pair.open()
    pair.source.append("src", *numbered(1, 3))
    pair.carry(forward)
    pair.source.power_cut()
    pair.source.open()
    lost_to = pair.source.state("src").head_seq
    assert lost_to < 3
    pair.source.append("src", *numbered(11, 4))
    if copied_between:
        pair.carry(forward)
    else:  # another start in between, whose head is above the mark again
        pair.source.checkpoint()
        pair.source.kill_and_open()
        pair.source.append("src", b'"last"')
    pair.carry(forward)
    copied = pair.payloads()
    rows = pair.source.rows("src")
    assert copied[:3] == numbered(1, 3)
    assert copied[3:] == [payload for _, payload in rows] or copied[3:] == numbered(11, 4)
    if config is MEMORY:
        assert numbered(11, 4) == copied[3:7]


def test_a_memory_source_that_lost_nothing_repeats_nothing() -> None:
    pair = Pair()
    pair.source.put("src", MEMORY)
    forward = pair.open()
    pair.source.append("src", b"1", b"2")
    pair.carry(forward)
    pair.source.sync()
    for _ in range(3):
        pair.source.kill_and_open()
        pair.source.append("src", b"3")
        pair.carry(forward)
        pair.source.sync()
    assert pair.payloads() == [b"1", b"2", b"3", b"3", b"3"]


# -- cycles ------------------------------------------------------------------------------------------------


def carry_round(pair: Pair, ways: list[tuple[f.Forward, str]]) -> None:
    for _ in range(20):
        for forward, topic in ways:
            pair.carry(forward, topic)


@pytest.mark.parametrize("both", [True, False])
def test_a_circle_ends_after_eight_hops(both: bool) -> None:
    pair = Pair(one=True)
    there = pair.open(rule(1, "a", "b", allow_cycle=both))
    back = pair.open(rule(2, "b", "a", allow_cycle=True))
    pair.dest.append("a", b"1")
    carry_round(pair, [(there, "a"), (back, "b")])
    assert (len(pair.payloads("a")), len(pair.payloads("b"))) == (5, 4)


def test_a_long_chain_is_not_cut() -> None:
    pair = Pair(one=True)
    ways = [(pair.open(rule(i, f"t{i}", f"t{i + 1}")), f"t{i}") for i in range(1, 12)]
    pair.dest.append("t1", b"1")
    carry_round(pair, ways)
    assert pair.payloads("t12") == [b"1"]


# -- exactly once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "kept"),
    [
        (b"", {}),
        (b'{"u": 1e400}', {"u": None}),
        (b"{ }", {}),
        (b"[1]", {"_topics_original_meta": [1]}),
        (msgspec.json.encode({str(i): i for i in range(64)}), {"_topics_original_meta": None}),
        (msgspec.json.encode({str(i): i for i in range(63)}), {str(i): i for i in range(63)}),
    ],
)
def test_a_copy_says_where_it_comes_from(meta: bytes, kept: dict[str, Any]) -> None:
    pair = Pair()
    forward = pair.open(rule(name="src->dst", guarantee="exactly_once"))
    pair.source.do(append("src", b'"d"' + meta, meta_lens=[len(meta)]))
    pair.carry(forward)
    topic_id = pair.source.engine.shard.state.published["src"].id
    text = pair.payloads()[0].removeprefix(b'"d"')
    found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    assert msgspec.json.decode(found.pop("_topics_router")) == {
        "idempotency_key": f"router:src->dst:{topic_id}:0:1",
        "router": "src->dst",
        "source_topic": "src",
        "source_topic_id": topic_id,
        "source_epoch": 0,
        "source_seq": 1,
    }
    assert sorted(found) == sorted(kept)
    for key, value in kept.items():
        if value is not None:
            assert msgspec.json.decode(found[key]) == value
    if b"1e400" in meta:
        assert b'"u": 1e400' in text, "a sent copy must not change"


def test_the_last_way_counts_of_a_copy_of_a_copy() -> None:
    pair = Pair(one=True)
    first = pair.open(rule(1, "a", "b", guarantee="exactly_once"))
    second = pair.open(rule(2, "b", "c", guarantee="exactly_once"))
    pair.dest.append("a", b"1")
    carry_round(pair, [(first, "a"), (second, "b")])
    meta = msgspec.json.decode(pair.payloads("c")[0].removeprefix(b"1"))
    assert meta["_topics_router"]["router"] == "r2"
