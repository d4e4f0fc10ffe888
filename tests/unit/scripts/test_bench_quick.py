"""Goal: `scripts/bench quick` fails where a ratio is worse than expected, and expects nothing of rows that are gone.

Method: rows worked out by hand, and the stored expectations against the rows there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_quick
from bench_quick import Guarded


def test_each_expectation_is_of_a_row() -> None:
    rows = {
        bench_quick.name_of(str(point), one) for point, many in bench_quick.POINTS.items() for one in many
    }
    rows |= {bench_quick.name_of(bench_quick.queue_name(*one), "jobs_per_s") for one in bench_quick.QUEUES}
    rows |= {
        bench_quick.name_of(bench_quick.fan_out_name(count), measure)
        for count, measure in bench_quick.WATCHERS.items()
    }
    assert set(bench_quick.expectations()) <= rows


def test_a_ratio_is_missed_by_what_is_beyond_its_bound() -> None:
    assert Guarded("a rate", 0.8, 1.0, at_most=False).missed_by == pytest.approx(0.2)
    assert Guarded("a rate", 1.2, 1.0, at_most=False).missed_by == 0
    assert Guarded("a latency", 3.0, 2.0, at_most=True).missed_by == pytest.approx(0.5)
    assert Guarded("a latency", 1.0, 2.0, at_most=True).missed_by == 0
    assert Guarded("a new row", 1.0, None, at_most=True).missed_by == 0


def test_recording_keeps_unmeasured_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored = tmp_path / "quick.json"
    stored.write_text('{"a": 1.0, "b": 2.0}')
    monkeypatch.setattr(bench_quick, "EXPECTATIONS", stored)
    bench_quick.record([Guarded("b", 2.5, 2.0, at_most=True), Guarded("c", 0.1234, None, at_most=False)])
    assert json.loads(stored.read_text()) == {"a": 1.0, "b": 2.5, "c": 0.123}
