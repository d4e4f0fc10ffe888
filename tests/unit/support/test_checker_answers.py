"""Goal: the checker blames answers that do not fit themselves, each other, or the records that are known.

Method: as in test_checker: histories told by hand, legal ones and such with a single lie in them.
"""

from __future__ import annotations

import pytest

from tests.support.checker import Unknown, assert_ok, check
from tests.support.checker_tale import Cases, Story, Tale

cases = Cases()

# -- going back ----------------------------------------------------------------------------------------------


@cases.breaks("undeleted")
def a_deleted_record_comes_back(tale: Tale) -> None:
    tale.write(3)
    row = tale.held["t"].live[2]
    tale.ask("delete", seqs=[2])
    tale.held["t"].live[2] = row
    tale.read()


@cases.breaks("undeleted")
def keep_deletes_too_little(tale: Tale) -> None:
    tale.write(5)
    row = tale.held["t"].live[1]
    tale.ask("delete", keep=2)
    tale.held["t"].live[1] = row
    tale.read()


@cases.breaks("came-back")
def an_unsure_delete_is_undone(tale: Tale) -> None:
    tale.write(3)
    row = tale.held["t"].live[2]
    tale.lose(tale.send("delete", seqs=[2]), executed=True)
    tale.read()
    tale.held["t"].live[2] = row
    tale.read()


@cases.breaks("came-back")
def an_evicted_record_comes_back(tale: Tale) -> None:
    tale.ask("put", cap_records=2)
    tale.write(4)
    held = tale.held["t"]
    row = held.live.pop(1)
    del held.live[2]
    held.gaps.append((1, 2, "cap"))
    tale.read()
    held.gaps.clear()
    held.live[1] = row
    tale.read(limit=1)


@cases.breaks("head")
def the_head_falls(tale: Tale) -> None:
    tale.write(3)
    tale.held["t"].head = 2
    del tale.held["t"].live[3]
    tale.ask("state")


@cases.breaks("head")
def the_head_is_past_anything(tale: Tale) -> None:
    tale.write(3)
    tale.held["t"].head = 5
    tale.ask("state")


@cases.breaks("earliest")
def the_floor_falls(tale: Tale) -> None:
    tale.write(3, ttl_ms=10)
    tale.held["t"].live.pop(1)
    tale.ask("state")
    tale.ask("state").answer["earliest_seq"] = 1


@cases.breaks("earliest")
def the_floor_is_past_a_record(tale: Tale) -> None:
    tale.write(3)
    tale.ask("state").answer["earliest_seq"] = 2


# -- form of pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        {"caught_up": False},
        {"lag": 1},
        {"next_from_seq": 2, "lag": 1},
        {"next_from_seq": 4, "lag": -1},
        {"earliest_seq": 2},
    ],
)
def test_a_page_that_does_not_fit_itself(lie: dict[str, object]) -> None:
    tale = Tale()
    tale.write(3)
    tale.read().answer.update(lie)
    assert "page" in tale.rules()


@cases.breaks("page")
def records_out_of_order(tale: Tale) -> None:
    tale.write(3)
    tale.read().answer["records"].reverse()


@cases.breaks("page")
def more_than_asked_for(tale: Tale) -> None:
    tale.write(3)
    tale.read().request["limit"] = 2


@cases.breaks("page")
def a_record_in_front_of_the_cursor(tale: Tale) -> None:
    tale.write(3)
    tale.read(1).request["from_seq"] = 2


@cases.breaks("page")
def a_cursor_past_the_head_without_a_word(tale: Tale) -> None:
    tale.write(3)
    page = tale.read(9)
    page.answer["tombstone"] = None


# -- counts, tags, newest, configs ---------------------------------------------------------------------------


@cases.is_legal
def by_tag(tale: Tale) -> None:
    tale.write(2, tag="a.1")
    tale.write(1, tag="a.2")
    tale.write()
    tale.ask("last", tag="a.*")
    tale.ask("last", tag="a.*", each=True)
    tale.ask("tags")
    tale.ask("delete", match="a.1")
    tale.ask("last", tag="a.1")
    tale.ask("tags")


@cases.breaks("count")
def too_few_are_counted(tale: Tale) -> None:
    tale.write(3)
    tale.ask("state").answer["count"] = 2


@cases.breaks("count")
def too_many_are_counted(tale: Tale) -> None:
    tale.write(3)
    tale.ask("delete", seqs=[1])
    tale.ask("state").answer["count"] = 3


@cases.is_legal
def a_capped_topic_is_counted(tale: Tale) -> None:
    tale.ask("put", cap_records=2)
    tale.write(3)
    held = tale.held["t"]
    del held.live[1]
    held.gaps.append((1, 1, "cap"))
    tale.ask("state")
    tale.read()
    tale.ask("delete", seqs=[3])
    tale.read()


@cases.breaks("count")
def a_page_shows_another_number(tale: Tale) -> None:
    """Of a capped topic, where only the page can tell how many there are."""
    a_capped_topic_is_counted(tale)
    tale.ask("state").answer["count"] = 2
    tale.read()


@cases.breaks("count")
def more_are_deleted_than_there_were(tale: Tale) -> None:
    tale.write(3, tag="a")
    tale.write(3, tag="b")
    tale.ask("delete", match="a").answer["deleted"] = 4


@cases.breaks("tags")
def a_tag_is_counted_short(tale: Tale) -> None:
    tale.write(3, tag="a")
    tale.ask("tags").answer["tags"][0]["count"] = 2


@cases.breaks("tags")
def a_tag_is_not_listed(tale: Tale) -> None:
    tale.write(3, tag="a")
    tale.ask("tags").answer["tags"] = []


@cases.breaks("last")
def not_the_newest(tale: Tale) -> None:
    tale.write(tag="a")
    op = tale.ask("last", tag="a")
    tale.write(tag="a")
    tale.ask("last", tag="a").answer["records"] = op.answer["records"]


@cases.breaks("last")
def a_tag_without_its_newest(tale: Tale) -> None:
    tale.write(tag="a.1")
    tale.write(tag="a.2")
    del tale.ask("last", tag="a.*", each=True).answer["records"][0]


@cases.is_legal
def conditions(tale: Tale) -> None:
    tale.write(2, tag="a")
    tale.write(if_last_seq=2)
    op = tale.send_write(if_last_seq=2)
    tale.refuse(op, 409, "wrong_last_seq", expected=2, actual=3)
    tale.write(if_tag_last_seq={"tag": "a", "seq": 2})
    op = tale.send_write(if_tag_last_seq={"tag": "a", "seq": 0})
    tale.refuse(op, 409, "wrong_last_seq", expected=0, actual=2)
    tale.ask("delete", match="a")
    tale.write(tag="a", if_tag_last_seq={"tag": "a", "seq": 0})


@cases.breaks("condition")
def a_write_in_spite_of_its_condition(tale: Tale) -> None:
    tale.write(2)
    tale.write(if_last_seq=1)


@cases.breaks("condition")
def a_write_in_spite_of_a_newer_tag(tale: Tale) -> None:
    tale.write(2, tag="a")
    tale.write(if_tag_last_seq={"tag": "a", "seq": 1})


@cases.breaks("condition")
def refused_for_no_reason(tale: Tale) -> None:
    tale.write(2)
    tale.refuse(tale.send_write(if_last_seq=2), 409, "wrong_last_seq", expected=2, actual=2)


@cases.breaks("condition")
def refused_with_a_head_that_never_was(tale: Tale) -> None:
    tale.write(2)
    tale.refuse(tale.send_write(if_last_seq=1), 409, "wrong_last_seq", expected=1, actual=7)


@cases.breaks("config")
def a_config_that_nobody_set(tale: Tale) -> None:
    tale.ask("put", cap_records=9)
    tale.ask("state").answer["config"]["cap_records"] = 8


@cases.breaks("config")
def a_config_that_was_replaced(tale: Tale) -> None:
    tale.ask("put", cap_records=9)
    tale.ask("put", cap_records=8)
    tale.ask("state").answer["config"]["cap_records"] = 9


# -- what the checker was not made for -----------------------------------------------------------------------


def test_unknown_things_raise() -> None:
    for spoil in (
        lambda tale: tale.send("juggle"),
        lambda tale: tale.read(colour="red"),
        lambda tale: tale.write(urgent=True),
        lambda tale: tale.read().answer.update(mood="good"),
        lambda tale: tale.history.happened("flood"),
    ):
        tale = Tale()
        tale.write()
        with pytest.raises(Unknown):
            spoil(tale)
            check(tale.history)


def test_an_answer_without_its_fields() -> None:
    tale = Tale()
    tale.write()
    del tale.read().answer["head_seq"]
    assert tale.rules() == {"shape"}


def test_the_report_names_rule_topic_and_ops() -> None:
    tale = Tale()
    tale.write(30, topic="orders")
    tale.held["orders"].live.clear()
    for _ in range(10):
        tale.read(topic="orders")
    with pytest.raises(AssertionError, match=r"(?s)40 things.*\[lost\] orders: seq 1 .*and 20 more"):
        assert_ok(tale.history)


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
