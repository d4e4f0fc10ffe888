"""Goal: a reply that is marked says so once, and in its own members. Method: bodies in which records look like the marks."""

from __future__ import annotations

import json

from topics.link import wire
from topics.protocols.json.replies import mark_late


def test_what_a_record_says_about_performance_is_left_alone() -> None:
    body = b'{"records":[{"data":{"performance":{"x":1}}}],"performance":{"server_total_ms":1.0}}'
    _, _, _, said = mark_late((wire.OK, wire.JSON, b"", body))
    found = json.loads(bytes(said))
    assert found["records"] == [{"data": {"performance": {"x": 1}}}]
    assert found["performance"] == {"catch_up_timed_out": True, "server_total_ms": 1.0}
    assert mark_late((wire.OK, wire.JSON, b"", b"{}"))[3] == b"{}"
    assert mark_late((wire.OK, wire.FEED, b"", b"x"))[3] == b"x"
