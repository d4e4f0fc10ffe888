"""Goal: the checker reports answers that contradict themselves, each other, or the known records.

Method: as in test_checker: histories built by hand, legal ones and ones with a single error.
"""

from __future__ import annotations

import pytest

from tests.support.checker import Unknown, assert_ok, check
from tests.support.scripted_server import Cases, Scenario, ScriptedServer

cases = Cases()

# -- going back ----------------------------------------------------------------------------------------------


@cases.breaks("undeleted")
def a_deleted_record_comes_back(server: ScriptedServer) -> None:
    server.write(3)
    row = server.held["t"].live[2]
    server.ask("delete", seqs=[2])
    server.held["t"].live[2] = row
    server.read()


@cases.breaks("undeleted")
def keep_deletes_too_little(server: ScriptedServer) -> None:
    server.write(5)
    row = server.held["t"].live[1]
    server.ask("delete", keep=2)
    server.held["t"].live[1] = row
    server.read()


@cases.breaks("came-back")
def an_unsure_delete_is_undone(server: ScriptedServer) -> None:
    server.write(3)
    row = server.held["t"].live[2]
    server.lose(server.send("delete", seqs=[2]), executed=True)
    server.read()
    server.held["t"].live[2] = row
    server.read()


@cases.breaks("came-back")
def an_evicted_record_comes_back(server: ScriptedServer) -> None:
    server.ask("put", cap_records=2)
    server.write(4)
    held = server.held["t"]
    row = held.live.pop(1)
    del held.live[2]
    held.gaps.append((1, 2, "cap"))
    server.read()
    held.gaps.clear()
    held.live[1] = row
    server.read(limit=1)


@cases.breaks("head")
def the_head_falls(server: ScriptedServer) -> None:
    server.write(3)
    server.held["t"].head = 2
    del server.held["t"].live[3]
    server.ask("state")


@cases.breaks("head")
def the_head_is_past_anything(server: ScriptedServer) -> None:
    server.write(3)
    server.held["t"].head = 5
    server.ask("state")


@cases.breaks("earliest")
def the_floor_falls(server: ScriptedServer) -> None:
    server.write(3, ttl_ms=10)
    server.held["t"].live.pop(1)
    server.ask("state")
    server.ask("state").answer["earliest_seq"] = 1


@cases.breaks("earliest")
def the_floor_is_past_a_record(server: ScriptedServer) -> None:
    server.write(3)
    server.ask("state").answer["earliest_seq"] = 2


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
    server = ScriptedServer()
    server.write(3)
    server.read().answer.update(lie)
    assert "page" in server.rules()


@cases.breaks("page")
def records_out_of_order(server: ScriptedServer) -> None:
    server.write(3)
    server.read().answer["records"].reverse()


@cases.breaks("page")
def more_than_asked_for(server: ScriptedServer) -> None:
    server.write(3)
    server.read().request["limit"] = 2


@cases.breaks("page")
def a_record_in_front_of_the_cursor(server: ScriptedServer) -> None:
    server.write(3)
    server.read(1).request["from_seq"] = 2


@cases.breaks("page")
def a_cursor_past_the_head_without_a_word(server: ScriptedServer) -> None:
    server.write(3)
    page = server.read(9)
    page.answer["tombstone"] = None


# -- counts, tags, newest, configs ---------------------------------------------------------------------------


@cases.is_legal
def by_tag(server: ScriptedServer) -> None:
    server.write(2, tag="a.1")
    server.write(1, tag="a.2")
    server.write()
    server.ask("last", tag="a.*")
    server.ask("last", tag="a.*", each=True)
    server.ask("tags")
    server.ask("delete", match="a.1")
    server.ask("last", tag="a.1")
    server.ask("tags")


@cases.breaks("count")
def too_few_are_counted(server: ScriptedServer) -> None:
    server.write(3)
    server.ask("state").answer["count"] = 2


@cases.breaks("count")
def too_many_are_counted(server: ScriptedServer) -> None:
    server.write(3)
    server.ask("delete", seqs=[1])
    server.ask("state").answer["count"] = 3


@cases.is_legal
def a_capped_topic_is_counted(server: ScriptedServer) -> None:
    server.ask("put", cap_records=2)
    server.write(3)
    held = server.held["t"]
    del held.live[1]
    held.gaps.append((1, 1, "cap"))
    server.ask("state")
    server.read()
    server.ask("delete", seqs=[3])
    server.read()


@cases.breaks("count")
def a_page_shows_another_number(server: ScriptedServer) -> None:
    """Of a capped topic, where only the page shows how many there are."""
    a_capped_topic_is_counted(server)
    server.ask("state").answer["count"] = 2
    server.read()


@cases.breaks("count")
def more_are_deleted_than_there_were(server: ScriptedServer) -> None:
    server.write(3, tag="a")
    server.write(3, tag="b")
    server.ask("delete", match="a").answer["deleted"] = 4


@cases.breaks("tags")
def a_tag_is_counted_short(server: ScriptedServer) -> None:
    server.write(3, tag="a")
    server.ask("tags").answer["tags"][0]["count"] = 2


@cases.breaks("tags")
def a_tag_is_not_listed(server: ScriptedServer) -> None:
    server.write(3, tag="a")
    server.ask("tags").answer["tags"] = []


@cases.breaks("last")
def not_the_newest(server: ScriptedServer) -> None:
    server.write(tag="a")
    op = server.ask("last", tag="a")
    server.write(tag="a")
    server.ask("last", tag="a").answer["records"] = op.answer["records"]


@cases.breaks("last")
def a_tag_without_its_newest(server: ScriptedServer) -> None:
    server.write(tag="a.1")
    server.write(tag="a.2")
    del server.ask("last", tag="a.*", each=True).answer["records"][0]


@cases.is_legal
def conditions(server: ScriptedServer) -> None:
    server.write(2, tag="a")
    server.write(if_last_seq=2)
    op = server.send_write(if_last_seq=2)
    server.refuse(op, 409, "wrong_last_seq", expected=2, actual=3)
    server.write(if_tag_last_seq={"tag": "a", "seq": 2})
    op = server.send_write(if_tag_last_seq={"tag": "a", "seq": 0})
    server.refuse(op, 409, "wrong_last_seq", expected=0, actual=2)
    server.ask("delete", match="a")
    server.write(tag="a", if_tag_last_seq={"tag": "a", "seq": 0})


@cases.breaks("condition")
def a_write_in_spite_of_its_condition(server: ScriptedServer) -> None:
    server.write(2)
    server.write(if_last_seq=1)


@cases.breaks("condition")
def a_write_in_spite_of_a_newer_tag(server: ScriptedServer) -> None:
    server.write(2, tag="a")
    server.write(if_tag_last_seq={"tag": "a", "seq": 1})


@cases.breaks("condition")
def refused_for_no_reason(server: ScriptedServer) -> None:
    server.write(2)
    server.refuse(server.send_write(if_last_seq=2), 409, "wrong_last_seq", expected=2, actual=2)


@cases.breaks("condition")
def refused_with_a_head_that_never_was(server: ScriptedServer) -> None:
    server.write(2)
    server.refuse(server.send_write(if_last_seq=1), 409, "wrong_last_seq", expected=1, actual=7)


@cases.breaks("config")
def a_config_that_nobody_set(server: ScriptedServer) -> None:
    server.ask("put", cap_records=9)
    server.ask("state").answer["config"]["cap_records"] = 8


@cases.breaks("config")
def a_config_that_was_replaced(server: ScriptedServer) -> None:
    server.ask("put", cap_records=9)
    server.ask("put", cap_records=8)
    server.ask("state").answer["config"]["cap_records"] = 9


# -- unknown fields ------------------------------------------------------------------------------------------


def test_unknown_things_raise() -> None:
    for spoil in (
        lambda server: server.send("juggle"),
        lambda server: server.read(colour="red"),
        lambda server: server.write(urgent=True),
        lambda server: server.read().answer.update(mood="good"),
        lambda server: server.history.happened("flood"),
    ):
        server = ScriptedServer()
        server.write()
        with pytest.raises(Unknown):
            spoil(server)
            check(server.history)


def test_an_answer_without_its_fields() -> None:
    server = ScriptedServer()
    server.write()
    del server.read().answer["head_seq"]
    assert server.rules() == {"shape"}


def test_the_report_names_rule_topic_and_ops() -> None:
    server = ScriptedServer()
    server.write(30, topic="orders")
    server.held["orders"].live.clear()
    for _ in range(10):
        server.read(topic="orders")
    with pytest.raises(AssertionError, match=r"(?s)40 violations.*\[lost\] orders: seq 1 .*and 20 more"):
        assert_ok(server.history)


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
