"""Goal: the checker expects those bytes to be gone that an erase has promised to overwrite, and no others.

Method: histories told by hand, as in test_checker. A topic's name says nothing: its class is what its first write or a put made
of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.checker.erases import erased
from tests.support.checker_tale import Row, Tale
from tests.support.history import Op

FSYNC: Row = {"config": {"durability": "fsync"}}
DISK: Row = {"config": {"durability": "disk"}}
DEFAULT: Row = {}  # nobody said anything, and it is `disk`


def expected(tale: Tale, erase: Op) -> list[bytes]:
    return erased(tale.history, [erase])


def erase(tale: Tale, **request: Any) -> Op:
    return tale.ask("delete", "fsync-too", erase=True, **(request or {"before_seq": 100}))


def written(config: Row) -> Tale:
    tale = Tale()
    tale.write(2, "fsync-too", tag="b", **config)
    return tale


BOTH = [b'{"w": "a-1", "i": 0, "of": 2', b'{"w": "a-1", "i": 1, "of": 2']


@pytest.mark.parametrize("config", [FSYNC, DISK, DEFAULT])
def test_what_was_alive_is_gone(config: Row) -> None:
    tale = written(config)
    tale.event("kill")
    assert expected(tale, erase(tale)) == BOTH


@pytest.mark.parametrize("config", [DISK, DEFAULT])
@pytest.mark.parametrize("events", [("power",), ("error", "kill")])
def test_what_a_crash_may_have_taken_is_not_expected(config: Row, events: tuple[str, ...]) -> None:
    """The log may still hold it behind the place where it was cut off. No delete can name it any more."""
    tale = written(config)
    for event in events:
        tale.event(event)
    assert expected(tale, erase(tale)) == []


def test_what_a_power_cut_cannot_take_is_expected() -> None:
    tale = written(FSYNC)
    tale.event("power")
    assert expected(tale, erase(tale)) == BOTH


def test_what_was_written_after_a_power_cut_is_expected() -> None:
    tale = written(DEFAULT)
    tale.event("power")
    tale.write(1, "fsync-too")
    assert expected(tale, erase(tale)) == [b'{"w": "a-2", "i": 0, "of": 1']


def test_a_topic_of_which_nobody_knows_who_made_it() -> None:
    """A first write without a config got no answer: it may have made a `disk` topic."""
    tale = Tale()
    tale.lose(tale.send_write(1, "fsync-too"), executed=True)
    tale.write(1, "fsync-too", **FSYNC)
    tale.event("power")
    assert expected(tale, erase(tale)) == []


@pytest.mark.parametrize("request_", [{"keep": 1}, {"match": "a*"}, {"before_seq": 1}, {"seqs": [7]}])
def test_what_an_erase_does_not_name(request_: Row) -> None:
    tale = written(FSYNC)
    assert expected(tale, erase(tale, **request_)) == []


@pytest.mark.parametrize("request_", [{"match": "b"}, {"match": "*"}, {"seqs": [1, 2]}])
def test_what_an_erase_names(request_: Row) -> None:
    tale = written(FSYNC)
    assert expected(tale, erase(tale, **request_)) == BOTH


def test_what_was_deleted_before_is_not_expected() -> None:
    tale = written(FSYNC)
    tale.ask("delete", "fsync-too", seqs=[1])
    assert expected(tale, erase(tale)) == []


def test_rot_may_have_taken_it() -> None:
    tale = written(FSYNC)
    tale.event("rot", "fsync-too")
    assert expected(tale, erase(tale)) == []


def test_one_that_was_put_off_promises_nothing_yet() -> None:
    tale = written(FSYNC)
    later = tale.send("delete", "fsync-too", before_seq=100, erase=True)
    tale.refuse(later, 429, "throttled", limit="disk_full", deleted=2)
    assert expected(tale, later) == []
