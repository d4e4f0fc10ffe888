"""What could not be read: an error, or a line on stderr and in the folder that the option `report` names."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence

import msgspec

from spark_pipeline.tasks.http_reading import Gap
from spark_pipeline.tasks.segments import Damage


class DataLoss(Exception):
    """Records that were asked for are lost; the text says which, and how to read on without them."""


def note(report: str, *, damage: Sequence[Damage] = (), gaps: Sequence[Gap] = ()) -> None:
    """Tell it. A file of its own for each part that is read: parts are read at the same time."""
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


def settle(gaps: Sequence[Gap], report: str, *, fail: bool) -> None:
    """Gaps are an error, or they are told."""
    if gaps and fail:
        more = f", and {len(gaps) - 1} further ranges" if len(gaps) > 1 else ""
        raise DataLoss(f"{gaps[0]}{more}; with failOnDataLoss=false they are passed over and told")
    note(report, gaps=gaps)
