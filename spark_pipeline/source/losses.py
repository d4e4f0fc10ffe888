"""Reporting of lost and damaged records: an exception, or lines on stderr and in the directory of option `report`."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence

import msgspec

from spark_pipeline.tasks.http_reading import Gap
from spark_pipeline.tasks.segments import Damage


class DataLoss(Exception):
    """Requested records are lost; the message says which, and how to read on without them."""


def report_lost(report: str, *, damage: Sequence[Damage] = (), gaps: Sequence[Gap] = ()) -> None:
    """Report on stderr and in a new file: partitions are read in parallel."""
    lines = [msgspec.to_builtins(one) | {"kind": "damage"} for one in damage]
    lines += [msgspec.to_builtins(one) | {"kind": "gap"} for one in gaps]
    if not lines:
        return
    content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    print(content.decode(), end="", file=sys.stderr, flush=True)
    if report:
        os.makedirs(report, exist_ok=True)
        path = os.path.join(report, f"lost-{uuid.uuid4().hex}.jsonl")
        with open(path, "xb") as file:
            file.write(content)


def handle_gaps(gaps: Sequence[Gap], report: str, *, fail: bool) -> None:
    """Raise DataLoss if there are gaps and `fail` is set; otherwise report them."""
    if gaps and fail:
        more = f", and {len(gaps) - 1} further ranges" if len(gaps) > 1 else ""
        raise DataLoss(f"{gaps[0]}{more}; with failOnDataLoss=false they are reported and skipped")
    report_lost(report, gaps=gaps)
