"""Commands whose work grows with the size of a topic, and their slices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from topics.api import limits
from topics.api.errors import Throttled, TopicNotFound
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.shard.long_commands import LongCommand, LongCommands, Work

READ = c.CountByTag("t", TagMatch("Glob", b"*"))
CHANGE = c.Delete("t", before_seq=10)


class Line:
    def __init__(self) -> None:
        self.failures: list[tuple[object, Exception]] = []
        self.entered: list[object] = []
        self.finished: list[object] = []
        self.worked: list[object] = []
        self.refuse: object = None
        self.long = LongCommands(self._enter, lambda token, _, error: self.failures.append((token, error)))
        self.long.begin_turn()

    def _enter(self, long: LongCommand) -> None:
        if long.token == self.refuse:
            raise TopicNotFound("t")
        self.entered.append(long.token)

    def work(self, token: object, units: int, step: int = 100) -> Work:
        for _ in range(0, units, step):
            self.worked.append(token)
            yield step
        self.finished.append(token)

    def start(self, token: object, units: int, command: c.Command = READ, *, refusable: bool = True) -> None:
        self.long.start(token, command, None, self.work(token, units), refusable=refusable)

    def turn(self) -> None:
        self.long.begin_turn()
        self.long.run_slices()

    def turns(self) -> Iterator[list[object]]:
        """What was processed in each turn."""
        while self.long.queue:
            self.worked = []
            self.turn()
            yield self.worked


def test_little_work_is_done_at_once():
    line = Line()
    line.start("a", limits.LONG_TURN_UNITS - 100)
    assert line.finished == ["a"]
    assert not line.long.queue


def test_first_slices_of_one_turn_share_what_it_has():
    line = Line()
    line.start("a", limits.LONG_TURN_UNITS * 10)
    line.start("b", 100)
    assert line.worked.count("a") == limits.LONG_TURN_UNITS // 100
    assert "b" not in line.worked
    line.turn()
    assert line.finished == ["b"]


def test_each_turn_has_a_share_of_work_and_all_that_wait_take_turns():
    line = Line()
    for token in range(3):
        line.start(token, limits.LONG_TURN_UNITS * 3)
    for worked in line.turns():
        assert len(worked) <= limits.LONG_TURN_UNITS // 100
        if not line.finished:
            counts = [worked.count(token) for token in range(3)]
            assert max(counts) - min(counts) <= limits.LONG_SLICE_UNITS // 100
    assert line.finished == [0, 1, 2]


def test_with_too_many_under_way_more_are_refused_but_little_work_is_done():
    line = Line()
    for token in range(limits.LONG_COMMANDS_MAX):
        line.start(token, 1 << 40)
    line.long.begin_turn()
    line.start("small", 100)
    assert line.finished == ["small"]
    with pytest.raises(Throttled) as refused:
        line.start("large", 1 << 40)
    assert refused.value.detail == {"limit": "long_commands", "max": limits.LONG_COMMANDS_MAX}
    assert len(line.long.queue) == limits.LONG_COMMANDS_MAX


def test_with_too_many_under_way_a_change_is_refused_before_it_begins():
    line = Line()
    for token in range(limits.LONG_COMMANDS_MAX):
        line.start(token, 1 << 40)
    line.long.begin_turn()
    with pytest.raises(Throttled):
        line.start("change", 100, CHANGE)
    assert "change" not in line.worked
    line.start("has to end", limits.LONG_TURN_UNITS * 2, CHANGE, refusable=False)
    assert len(line.long.queue) == limits.LONG_COMMANDS_MAX + 1


def test_a_topic_that_goes_ends_its_commands():
    line = Line()
    line.start("a", 1 << 40)
    line.start("b", 1 << 40)
    line.refuse = "a"
    line.turn()
    assert [(token, type(error)) for token, error in line.failures] == [("a", TopicNotFound)]
    assert [long.token for long in line.long.end()] == ["b"]
    assert not line.long.queue


def test_ended_ones_are_closed_and_others_go_on():
    line = Line()
    line.start("a", 1 << 40)
    line.start("b", 1 << 40)
    (ended,) = line.long.end(lambda token: token == "a")
    assert (ended.token, next(ended.work, None)) == ("a", None)
    line.worked = []
    line.turn()
    assert set(line.worked) == {"b"}
    assert not line.failures
