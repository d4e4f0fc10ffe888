"""Requests of merge jobs, from bytes to commands: defaults, limits, and error messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from topics.api import limits
from topics.api.errors import InvalidRequest
from topics.engine.commands import merges as mrg
from topics.engine.commands.merges import MergeParameters
from topics.link import wire
from topics.protocols.json.merges import read, rendered


def asked(call: str, body: Any = None, named: str = "") -> Any:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body) if body is not None else b""
    request = wire.Request(1, 0, 0, wire.CONSOLIDATE, 0, b"t", b"", raw)
    return read("t", request, wire.Args(call=call, named=named))[0]


def test_defaults() -> None:
    assert asked("plan") == asked("plan", {}) == mrg.PlanMerge("t")
    assert asked("pin") == asked("pin", {}) == mrg.PinSnapshot("t", 3_600_000)
    assert asked("state") == mrg.GetMerges("t")
    assert asked("commit", {"lease": "x"}, "p") == mrg.CommitPlan("t", "p", "x", 10_000)
    assert asked("renew", {"lease": "x"}, "p") == mrg.RenewPlan("t", "p", "x")
    assert asked("abandon", {"lease": "x"}, "p") == mrg.AbandonPlan("t", "p", "x")
    assert asked("renew_pin", None, "s") == mrg.RenewSnapshot("t", "s", 3_600_000)
    assert asked("release", None, "s") == mrg.ReleaseSnapshot("t", "s")


def test_clamps() -> None:
    much = {
        "target_bytes": 1 << 63,
        "min_segments": 0,
        "max_groups": 1 << 31,
        "lease_ms": 1 << 62,
        "min_garbage": 1,
    }
    assert asked("plan", much) == mrg.PlanMerge(
        "t", MergeParameters(limits.MERGE_BYTES_MAX, 1.0, 2, 64), limits.PLAN_LEASE_MS_MAX
    )
    little = asked("plan", {"target_bytes": 0, "max_groups": 0, "lease_ms": 0, "min_garbage": 0})
    assert (little.parameters, little.lease_ms) == (MergeParameters(1, 0.0, 2, 1), limits.PLAN_LEASE_MS_MIN)
    assert asked("commit", {"lease": "x", "wait_ms": 1 << 31}).wait_ms == limits.MERGE_WAIT_MS_MAX
    assert asked("pin", {"ttl_ms": 0}).ttl_ms == 1000
    assert asked("pin", {"ttl_ms": 1 << 60}).ttl_ms == limits.SNAPSHOT_TTL_MS_MAX


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("plan", b"{"),
        ("plan", []),
        ("plan", {"target_bytes": "1"}),
        ("plan", {"target_bytes": -1}),
        ("plan", {"target_bytes": 1 << 64}),
        ("plan", {"min_garbage": 1.5}),
        ("plan", {"min_garbage": -0.1}),
        ("plan", {"lease": 5}),
        ("plan", {"lease": "x" * 65}),
        ("plan", {"min_segments": 1 << 32}),
        ("commit", b""),
        ("commit", {}),
        ("commit", {"lease": "x", "wait_ms": -1}),
        ("renew", {"lease": None}),
        ("abandon", {"lease": "x" * 1000}),
        ("pin", {"ttl_ms": 1.5}),
        ("renew_pin", {"ttl_ms": 1 << 64}),
        ("pin", b"\xff"),
    ],
)
def test_errors_name_the_problem(call: str, body: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(call, body)
    assert len(str(refused.value)) > 10


def test_an_answer_that_is_not_final_is_unfinished() -> None:
    assert rendered(mrg.MergeReply({"a": 1}), 0.1)[0] == wire.OK
    assert rendered(mrg.MergeReply({"a": 1}, is_final=False), 0.1)[0] == wire.UNFINISHED
