"""Replies that are built from bytes have the form of their declared types.

A reply is decoded as its type: nothing in it is undeclared, missing or misnamed. Members are added once, and only to
the reply itself.
"""

from __future__ import annotations

import json

import pytest

from tests.support.answers import assert_declared
from tests.unit.protocols.json.test_consumer_replies import FULL, page
from topics.api.requests import DiffBody
from topics.api.responses.records import Page, Written
from topics.engine.commands import topics as cmd
from topics.engine.commands.page import Tombstone
from topics.engine.storage.frames import HEADER
from topics.link import wire
from topics.protocols.json import replies
from topics.protocols.json.replies import mark_late


@pytest.mark.parametrize("with_seqs", [True, False])
@pytest.mark.parametrize(("count", "epoch", "more"), [(1, "", b""), (3, "e1", b',"pressure":0.5')])
def test_a_write(with_seqs: bool, count: int, epoch: str, more: bytes) -> None:
    result = cmd.Appended("t", 7, count, 9, False, epoch=epoch)
    status, _, _, body = replies.appended(
        result, with_seqs=with_seqs, total_ms=1.5, append_ms=0.5, sync_ms=0.0, more=more
    )
    assert status == wire.OK
    written = assert_declared(Written, bytes(body))
    assert (written.seqs, written.epoch) == ([*range(7, 7 + count)] if with_seqs else [], epoch)


@pytest.mark.parametrize("gone", [None, Tombstone(1, 4, "cap", 4, 5, 9)])
@pytest.mark.parametrize("cold", [0, 2])
def test_a_page(gone: Tombstone | None, cold: int) -> None:
    result = page(FULL, cmd.Records([b"\x00\xff"], raw=True))
    result.flags = [HEADER.unpack_from(result.frames[0], start)[2] for start in result.starts]
    result.tombstone, result.cold_segments, result.epoch = gone, cold, "e1" if cold else ""
    result.tags, result.nodes = [b"eu", None, None], [None, b"n", None]
    _, _, _, body = replies.page(result, DiffBody(include_tags=True), 1.5)
    found = assert_declared(Page, bytes(body))
    assert [record.data for record in found.records] == [{"a": 1}, "x", "AP8="]
    assert json.loads(bytes(body))["records"][2]["$encoding"] == "base64"


def test_performance_in_the_data_of_a_record_is_kept() -> None:
    body = b'{"records":[{"data":{"performance":{"x":1}}}],"performance":{"server_total_ms":1.0}}'
    _, _, _, said = mark_late((wire.OK, wire.JSON, b"", body))
    found = json.loads(bytes(said))
    assert found["records"] == [{"data": {"performance": {"x": 1}}}]
    assert found["performance"] == {"catch_up_timed_out": True, "server_total_ms": 1.0}
    assert mark_late((wire.OK, wire.JSON, b"", b"{}"))[3] == b"{}"
    assert mark_late((wire.OK, wire.FEED, b"", b"x"))[3] == b"x"
