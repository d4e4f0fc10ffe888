"""Goal: the checker expects exactly the bytes to be gone that an erase has promised to overwrite.

Method: histories built by hand, as in test_checker. A topic's class does not follow from its name here, but from its
first write or a put.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.checker.erases import erased
from tests.support.history import Op
from tests.support.scripted_server import Row, ScriptedServer

FSYNC: Row = {"config": {"durability": "fsync"}}
DISK: Row = {"config": {"durability": "disk"}}
DEFAULT: Row = {}  # no config was given, so it is `disk`


def expected(server: ScriptedServer, erase: Op) -> list[bytes]:
    return erased(server.history, [erase])


def erase(server: ScriptedServer, **request: Any) -> Op:
    return server.ask("delete", "fsync-too", erase=True, **(request or {"before_seq": 100}))


def written(config: Row) -> ScriptedServer:
    server = ScriptedServer()
    server.write(2, "fsync-too", tag="b", **config)
    return server


BOTH = [b'{"w": "a-1", "i": 0, "of": 2', b'{"w": "a-1", "i": 1, "of": 2']


@pytest.mark.parametrize("config", [FSYNC, DISK, DEFAULT])
def test_erased_live_records_are_gone(config: Row) -> None:
    server = written(config)
    server.event("kill")
    assert expected(server, erase(server)) == BOTH


@pytest.mark.parametrize("config", [DISK, DEFAULT])
@pytest.mark.parametrize("events", [("power",), ("error", "kill")])
def test_records_a_crash_may_have_taken_are_not_expected(config: Row, events: tuple[str, ...]) -> None:
    """The log may still contain it after the position where it was cut. No delete can name it any more."""
    server = written(config)
    for event in events:
        server.event(event)
    assert expected(server, erase(server)) == []


def test_records_a_power_cut_cannot_take_are_expected() -> None:
    server = written(FSYNC)
    server.event("power")
    assert expected(server, erase(server)) == BOTH


def test_records_written_after_a_power_cut_are_expected() -> None:
    server = written(DEFAULT)
    server.event("power")
    server.write(1, "fsync-too")
    assert expected(server, erase(server)) == [b'{"w": "a-2", "i": 0, "of": 1']


def test_a_topic_of_which_nobody_knows_who_made_it() -> None:
    """A first write without a config got no answer: it may have made a `disk` topic."""
    server = ScriptedServer()
    server.lose(server.send_write(1, "fsync-too"), executed=True)
    server.write(1, "fsync-too", **FSYNC)
    server.event("power")
    assert expected(server, erase(server)) == []


@pytest.mark.parametrize("request_", [{"keep": 1}, {"match": "a*"}, {"before_seq": 1}, {"seqs": [7]}])
def test_records_an_erase_does_not_name_are_not_expected(request_: Row) -> None:
    server = written(FSYNC)
    assert expected(server, erase(server, **request_)) == []


@pytest.mark.parametrize("request_", [{"match": "b"}, {"match": "*"}, {"seqs": [1, 2]}])
def test_records_an_erase_names_are_expected(request_: Row) -> None:
    server = written(FSYNC)
    assert expected(server, erase(server, **request_)) == BOTH


def test_records_deleted_before_are_not_expected() -> None:
    server = written(FSYNC)
    server.ask("delete", "fsync-too", seqs=[1])
    assert expected(server, erase(server)) == []


def test_corruption_may_have_taken_it() -> None:
    server = written(FSYNC)
    server.event("rot", "fsync-too")
    assert expected(server, erase(server)) == []


def test_one_that_was_put_off_promises_nothing_yet() -> None:
    server = written(FSYNC)
    later = server.send("delete", "fsync-too", before_seq=100, erase=True)
    server.refuse(later, 429, "throttled", limit="disk_full", deleted=2)
    assert expected(server, later) == []
