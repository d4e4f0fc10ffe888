"""Goal: the model that the engine is compared with follows the contract.

Method: examples from the text of the contract, one rule per test, with literal results.
"""

from __future__ import annotations

from tests.support.model import Conf, Gap, Loss, Model, NewRec, PageView, Refused, Topic


def recs(count: int, tag: bytes | None = None, node: bytes | None = None, size: int = 4) -> list[NewRec]:
    return [NewRec(b"x" * size, tag, node) for _ in range(count)]


def page(model: Model, from_seq: int, now: int = 0, **options: object) -> PageView:
    got = model.diff(now, "t", from_seq, **options)  # type: ignore[arg-type]
    assert isinstance(got, PageView)
    return got


def seqs(view: PageView) -> list[int]:
    return [row[0] for row in view.rows]


def capped(count: int, **conf: object) -> Model:
    model = Model()
    model.put(0, "t", Conf(**conf))  # type: ignore[arg-type]
    for _ in range(count):
        model.append(0, "t", recs(1))
    return model


def test_a_batch_takes_consecutive_seqs_from_one() -> None:
    model = Model()
    assert model.append(0, "t", recs(3)) == ("appended", 1, 3, 3, True, False)
    assert model.append(0, "t", recs(2)) == ("appended", 4, 2, 5, False, False)


def test_cap_evicts_from_the_front_and_is_announced() -> None:
    model = capped(10, cap_records=4)
    got = page(model, 0)
    assert got.gap == Gap(1, 6, "cap")
    assert seqs(got) == [7, 8, 9, 10]
    assert page(model, 5).gap == Gap(6, 6, "cap")
    assert page(model, 6).gap is None


def test_a_batch_larger_than_the_cap_loses_its_own_oldest() -> None:
    model = capped(0, cap_records=2)
    assert model.append(0, "t", recs(5)) == ("appended", 1, 5, 5, False, False)
    assert page(model, 0).gap == Gap(1, 3, "cap")


def test_byte_cap_counts_live_bytes() -> None:
    model = capped(0, cap_bytes=10)
    for _ in range(3):
        model.append(0, "t", recs(1, size=5))
    assert model.state(0, "t")[1:5] == (3, 2, 2, 10)


def test_deletes_are_silent_and_free_room_under_a_cap() -> None:
    model = capped(4, cap_records=4)
    assert model.delete(0, "t", before_seq=3) == ("deleted", 2, 3, 4, 2, 8)
    got = page(model, 0)
    assert (got.gap, seqs(got)) == (None, [3, 4])
    model.append(0, "t", recs(2))
    assert page(model, 0).gap is None


def test_popping_deleted_slots_never_moves_the_floor() -> None:
    model = capped(4, cap_records=4)
    model.delete(0, "t", before_seq=5)
    model.append(0, "t", recs(4))
    assert model.topics["t"].floor == 1
    model.append(0, "t", recs(1))
    assert model.topics["t"].floor == 6


def test_ttl_is_strict_and_moves_the_floor() -> None:
    model = Model()
    model.put(0, "t", Conf(ttl_ms=100))
    model.append(0, "t", recs(2))
    model.append(50, "t", recs(1))
    assert seqs(page(model, 0, now=100)) == [1, 2, 3]
    got = page(model, 0, now=101)
    assert (got.gap, seqs(got), got.earliest_seq) == (Gap(1, 2, "ttl"), [3], 3)


def test_mixed_when_both_causes_reach_into_the_gap() -> None:
    model = Model()
    model.put(0, "t", Conf(ttl_ms=100, cap_records=3))
    model.append(0, "t", recs(2))
    model.append(60, "t", recs(2))  # evicted by the cap: 1
    got = page(model, 0, now=101)  # expired by the TTL: 2
    assert got.gap == Gap(1, 2, "mixed")
    assert page(model, 1, now=101).gap == Gap(2, 2, "ttl")


def test_a_records_own_ttl_is_silent_anywhere() -> None:
    model = Model()
    model.append(0, "t", [NewRec(b"a"), NewRec(b"b", ttl_ms=10), NewRec(b"c")])
    got = page(model, 0, now=11)
    assert (got.gap, seqs(got), got.next_from_seq) == (None, [1, 3], 3)
    assert seqs(page(model, 0, now=11, nodes=())) == [1, 3]


def test_cursor_past_the_head_is_recreated_and_may_go_down() -> None:
    model = capped(2)
    got = page(model, 9)
    assert (got.gap, seqs(got), got.next_from_seq) == (Gap(1, 2, "recreated"), [1, 2], 2)
    assert page(capped(0), 9).gap == Gap(1, 0, "recreated")
    assert page(model, 2).gap is None


def test_node_filter_is_silent_and_advances_the_cursor() -> None:
    model = capped(0)
    model.append(0, "t", recs(1, node=b"a") + recs(1, node=b"b") + recs(1))
    got = page(model, 0, nodes=(b"a",))
    assert (seqs(got), got.next_from_seq) == ([2, 3], 3)
    model.put(0, "t", Conf(dedupe_node=False))
    assert seqs(page(model, 0, nodes=(b"a",))) == [1, 2, 3]


def test_page_bounds() -> None:
    model = capped(5)
    assert seqs(page(model, 0, limit=2)) == [1, 2]
    assert seqs(page(model, 0, max_bytes=9)) == [1, 2]
    assert seqs(page(model, 0, max_bytes=1)) == [1]
    assert page(model, 0, limit=5).next_from_seq == 5


def test_a_page_stops_in_front_of_a_loss_and_the_next_read_announces_it() -> None:
    model = capped(2)
    topic: Topic = model.topics["t"]
    topic.head = 10
    topic.lose(3, 10, "crash")
    model.append(0, "t", recs(1))
    first = page(model, 0)
    assert (first.gap, seqs(first), first.next_from_seq) == (None, [1, 2], 2)
    second = page(model, 2)
    assert (second.gap, seqs(second), second.next_from_seq) == (Gap(3, 10, "crash"), [11], 11)
    assert page(model, 6).gap == Gap(7, 10, "crash")
    topic.head = 12
    topic.lose(11, 12, "crash")
    assert topic.losses == [Loss(3, 12, "crash")]


def test_skipped_seqs_are_silent() -> None:
    model = capped(1)
    assert model.skip(0, "t", 5) == ("skipped", 2, 5, 6)
    model.append(0, "t", recs(1))
    got = page(model, 0)
    assert (got.gap, seqs(got)) == (None, [1, 7])


def test_dedupe_returns_the_first_result_for_its_window() -> None:
    model = Model()
    model.put(0, "t", Conf(idempotency_window_ms=100, cap_records=1))
    model.append(0, "t", recs(2), key=b"k")
    model.append(0, "t", recs(1))
    assert model.append(100, "t", recs(7), key=b"k") == ("appended", 1, 2, 2, False, True)
    assert model.append(101, "t", recs(1), key=b"k") == ("appended", 4, 1, 4, False, False)
    model.put(0, "t", Conf(idempotency_window_ms=0))
    model.append(0, "t", recs(1), key=b"z")
    assert model.append(0, "t", recs(1), key=b"z")[5] is False


def test_reject_refuses_before_a_seq_is_taken_but_a_known_key_succeeds() -> None:
    model = Model()
    model.put(0, "t", Conf(cap_records=2, discard="reject"))
    model.append(0, "t", recs(2), key=b"k")
    assert model.append(0, "t", recs(1)) == Refused("topic_full")
    assert model.append(0, "t", recs(3)) == Refused("record_too_large")
    assert model.append(0, "t", recs(2), key=b"k")[5] is True
    assert model.topics["t"].head == 2


def test_conditional_appends() -> None:
    model = capped(0)
    model.append(0, "t", recs(1, b"a") + recs(1, b"b"))
    assert model.append(0, "t", recs(1), if_last_seq=1) == Refused("wrong_last_seq", 2)
    assert model.append(0, "t", recs(1), if_tag_last_seq=(b"a", 2)) == Refused("wrong_last_seq", 1)
    assert model.append(0, "t", recs(1, b"a"), if_tag_last_seq=(b"a", 1))[1] == 3
    assert model.append(0, "t", recs(1), if_tag_last_seq=(b"none", 0))[1] == 4
    assert model.append(0, "new", recs(1), if_last_seq=3) == Refused("wrong_last_seq", 0)
    assert "new" not in model.topics


def test_cap_per_tag_trims_silently_before_the_cap() -> None:
    model = capped(0, cap_per_tag=1, cap_records=3)
    for tag in (b"a", b"b", b"a", b"c"):
        model.append(0, "t", recs(1, tag))
    got = page(model, 0)
    assert (got.gap, seqs(got)) == (None, [2, 3, 4])


def test_delete_selectors() -> None:
    model = capped(0)
    model.append(0, "t", [r for tag in (b"a.1", b"a.2", None, b"a.1", b"b") for r in recs(1, tag)])
    assert model.delete(0, "t") == Refused("invalid_request")
    assert model.delete(0, "t", match=("prefix", b"a"), keep=1)[1] == 1
    assert list(model.topics["t"].live) == [2, 3, 4, 5]
    assert model.delete(0, "t", match=("eq", b"a.1"), before_seq=4)[1] == 0
    assert model.delete(0, "t", seqs=[2, 99])[1] == 1
    assert model.delete(0, "t", keep=1)[1] == 2
    assert list(model.topics["t"].live) == [5]
    assert model.delete(0, "t", match=("prefix", b""))[1] == 1


def test_drop_and_create_again_starts_from_one() -> None:
    model = capped(3)
    assert model.drop(0, "t", if_empty=True) == Refused("topic_not_empty")
    assert model.drop(0, "t") == ("dropped", True)
    assert model.drop(0, "t") == ("dropped", False)
    assert model.append(0, "t", recs(1), create=False) == Refused("topic_not_found")
    assert model.append(0, "t", recs(1)) == ("appended", 1, 1, 1, True, False)


def test_tightening_acts_at_once_and_loosening_brings_nothing_back() -> None:
    model = capped(5)
    model.put(0, "t", Conf(cap_records=2))
    model.put(0, "t", Conf())
    assert page(model, 0).gap == Gap(1, 3, "cap")
    model.put(200, "t", Conf(ttl_ms=100))
    model.put(200, "t", Conf())
    assert seqs(page(model, 0, now=200)) == []
    assert page(model, 0, now=200).gap == Gap(1, 5, "mixed")
    assert model.put(0, "t", Conf(type="queue")) == Refused("topic_exists_incompatible")


def test_by_tag() -> None:
    model = capped(0)
    model.append(0, "t", [r for tag in (b"a.1", b"a.2", b"a.1", b"b") for r in recs(1, tag)])
    assert [row[0] for row in model.last_by_tag(0, "t", ("prefix", b"a"), each=True)[1]] == [2, 3]  # type: ignore[attr-defined]
    assert [row[0] for row in model.last_by_tag(0, "t", ("prefix", b"a"))[1]] == [3]  # type: ignore[attr-defined]
    assert [row[0] for row in model.next_by_tag(0, "t", ("eq", b"a.1"), 2)[1]] == [3]  # type: ignore[attr-defined]
    assert model.count_by_tag(0, "t", ("prefix", b"a")) == ("counts", [(b"a.1", 2), (b"a.2", 1)])


def test_a_read_with_a_match_passes_over_the_rest() -> None:
    model = Model()
    for tag in (b"a", b"b", None, b"a", b"ab"):
        model.append(0, "t", recs(1, tag))
    assert seqs(page(model, 0, match=("eq", b"a"))) == [1, 4]
    assert seqs(page(model, 1, match=("prefix", b"a"))) == [4, 5]
    got = page(model, 0, match=("eq", b"b"))
    assert (seqs(got), got.next_from_seq) == ([2], 5)


def test_a_read_by_time_tells_gaps_only_when_all_that_lives_is_young() -> None:
    model = capped(0, cap_records=3)
    for now in (10, 20, 30, 40):
        model.append(now, "t", recs(1))
    assert page(model, 0, now=40, from_ts=20).gap == Gap(1, 1, "cap")
    later = page(model, 0, now=40, from_ts=21)
    assert (later.gap, seqs(later)) == (None, [3, 4])
    assert page(model, 3, now=40, from_ts=21).rows == later.rows[1:]
    assert page(model, 0, now=40, from_ts=41).next_from_seq == 4
