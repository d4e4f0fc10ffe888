"""`topics inspect` for the staging files of a merge: the job's sidecars and outputs, and the server's marks.

Files are checked on their own here. Only a commit compares an output with its inputs.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np

from topics.api.errors import Corrupt, TopicsError
from topics.engine.storage.delete_marks import mark_blocks
from topics.engine.storage.files import HEADER_BYTES, check_header, without_digest
from topics.engine.storage.merge_plan_file import STAGING, decode_sidecar
from topics.engine.storage.sealing import Sum
from topics.engine.storage.segments import DEL_MAGIC, DEL_VERSION, SUM_MAGIC
from topics.engine.tools.inspect.report import Digest, Inspection
from topics.engine.tools.inspect.segment import MAGICS

_NAME = re.compile(r"group-(\d{1,4})\.(?:json|(?P<attempt>.+)\.(?P<suffix>data|idx|dict|sum))")


def kind_in_staging(path: str) -> str | None:
    """The kind of a file in the staging of a plan. None if it is not in staging, or has its usual kind there."""
    folder, _, name = path.rpartition("/")
    if not folder.rpartition("/")[0].endswith(STAGING):
        return None
    match = _NAME.fullmatch(name)
    if match is not None:
        return "sidecar" if match["suffix"] is None else "output"
    return "marks" if name.endswith(".del") else None


def inspect_staging(found: Inspection, head: bytes, data: bytes) -> None:
    """`data`: the contents of the file, empty for .data, .idx and .dict."""
    match = _NAME.fullmatch(found.path.rpartition("/")[2])
    if found.kind == "marks":
        _marks(found, data)
        return
    assert match is not None
    group = int(match[1])
    if found.kind == "sidecar":
        found.version = None
        try:
            sidecar = decode_sidecar(found.path, data, group)
        except ValueError as error:
            raise Corrupt(found.path, 0, str(error)) from None
        found.facts |= msgspec.to_builtins(sidecar)
        return
    suffix = match["suffix"]
    found.facts |= {"group": group, "attempt": match["attempt"], "file": suffix}
    found.notes.append("the output of a job: a commit compares it with the segments it was merged from")
    check_header(found.path, head, MAGICS[suffix])
    if suffix == "sum":
        try:
            summary = msgspec.msgpack.decode(without_digest(found.path, data, SUM_MAGIC), type=Sum)
        except (TopicsError, msgspec.DecodeError) as error:
            found.digests.append(Digest("the file", False))
            raise Corrupt(found.path, 0, str(error)) from None
        found.digests.append(Digest("the file", True))
        names = ("first_seq", "generation", "rows", "live", "data_bytes", "dict_bytes")
        found.facts |= {name: getattr(summary, name) for name in names}


def _marks(found: Inspection, data: bytes) -> None:
    check_header(found.path, data[:HEADER_BYTES], DEL_MAGIC, DEL_VERSION)
    deleted, end, holds = 0, HEADER_BYTES, True
    for ranges, whole, _, block_end in mark_blocks(data):
        holds = holds and whole
        if whole:
            deleted += int((ranges["stop"].astype(np.int64) - ranges["first"]).sum())
            end = block_end
    found.digests.append(Digest("marks", holds and end == len(data)))
    if not holds or end != len(data):
        found.add_problem(found.path, end, "the marks of dead records do not match their digest")
    found.facts["dead"] = deleted
    found.notes.append("the dead records of an input at the time of the plan")
