"""Merge plans: the choice of segments to merge, and the files that server and job exchange.

    staging/plans/<plan id>/plan.json             the plan, as in the response; written first, so that the other files have an owner
    staging/plans/<plan id>/seg-….del             the dead rows of an input when the plan was made, in the format of delete_marks.py
    staging/plans/<plan id>/group-<k>.<attempt>.{data,idx,dict,sum}     the output of a job for group k
    staging/plans/<plan id>/group-<k>.json        its sidecar: renamed into place when the output is synced

Only encoding, decoding and the choice; no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from topics.api.errors import Corrupt
from topics.api.limits import (
    MERGE_BYTES_MAX,
    MERGE_ROWS_MAX,
    PLAN_GROUPS_MAX,
    PLAN_ROWS_MAX,
    PLAN_SEGMENTS_MAX,
)
from topics.engine.commands.merges import MergeParameters
from topics.engine.storage.manifest import Segment
from topics.engine.storage.segments import segment_name

STAGING = "staging/plans"
PLAN_NAME = "plan.json"

_ID = re.compile(r"[0-9a-f]{16}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class PlanInput(Segment, frozen=True, kw_only=True):
    """A segment to be merged. `dead`: key of the marks of its dead rows in the cold tier; None if it has none."""

    dead: str | None


class PlanGroup(msgspec.Struct, frozen=True):
    """Segments to merge into one segment of this generation, whose .sum gets `chain` and `origin`."""

    group: int
    first_seq: int
    next_seq: int
    generation: int
    chain: str
    origin: str
    inputs: list[PlanInput]

    @property
    def rows(self) -> int:
        return self.next_seq - self.first_seq

    @property
    def data_bytes(self) -> int:
        return sum(one.data_bytes for one in self.inputs)


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    topic_id: str
    plan_id: str
    delete_epoch: int
    created_at_ms: int
    staging: str
    parameters: MergeParameters
    groups: list[PlanGroup]


class Sidecar(msgspec.Struct, frozen=True):
    """The report of a job on a finished group."""

    group: int
    attempt: str
    rows: int
    live: int
    data_bytes: int
    idx_bytes: int
    dict_bytes: int
    tag_names: int
    node_names: int
    ts_min: int
    ts_max: int
    sum_digest: str


class FailedSidecar(msgspec.Struct, frozen=True):
    """The report of a job on a group that could not be merged because an input is damaged."""

    group: int
    failed: str
    segment: str = ""


# ── Names ─────────────────────────────────────────────────────────────────────────────


def staging_dir(plan_id: str) -> str:
    return f"{STAGING}/{plan_id}"


def parse_staging_key(key: str) -> tuple[str, str] | None:
    """Plan id and file name of a key in staging; None for other keys."""
    plan_id, _, name = key.removeprefix(f"{STAGING}/").partition("/")
    return (plan_id, name) if _ID.fullmatch(plan_id) and name else None


def sidecar_key(plan_id: str, group: int) -> str:
    return f"{staging_dir(plan_id)}/group-{group}.json"


def output_key(plan_id: str, sidecar: Sidecar, suffix: str) -> str:
    return f"{staging_dir(plan_id)}/group-{sidecar.group}.{sidecar.attempt}.{suffix}"


def plan_id_of(topic_id: str, epoch: int, parameters: MergeParameters, inputs: Sequence[Segment]) -> str:
    what = [topic_id, epoch, parameters, [(one.name, one.sum_digest) for one in inputs]]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(what))


# ── Files ─────────────────────────────────────────────────────────────────────────────


def encode_plan(plan: PlanFile) -> bytes:
    return msgspec.json.encode(plan)


def decode_plan(path: str, data: bytes) -> PlanFile:
    """Decode and check a plan: jobs can write to staging, so it may not be what the server wrote."""
    try:
        plan = msgspec.json.decode(data, type=PlanFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(path, 0, f"cannot be decoded: {error}") from error
    if problem := _problem_of(plan):
        raise Corrupt(path, 0, problem)
    return plan


def _problem_of(plan: PlanFile) -> str:
    inputs = [one for group in plan.groups for one in group.inputs]
    if not _ID.fullmatch(plan.topic_id) or plan.staging != staging_dir(plan.plan_id):
        return "the topic id or the staging directory is invalid"
    if plan.plan_id != plan_id_of(plan.topic_id, plan.delete_epoch, plan.parameters, inputs):
        return "the content does not match the plan id"
    for number, group in enumerate(plan.groups):
        if group.group != number or not group.inputs:
            return f"group {number} is empty or out of order"
        if not (_ID.fullmatch(group.chain) and _ID.fullmatch(group.origin)):
            return f"group {number} has an invalid chain or origin"
        at = group.first_seq
        for one in group.inputs:
            marks = f"{plan.staging}/{one.name}.del"
            if one.name != segment_name(one.first_seq, one.generation) or one.dead not in (None, marks):
                return f"an input of group {number} does not match its name"
            if one.first_seq != at or one.rows < 1:
                return f"the inputs of group {number} are not adjacent"
            at = one.next_seq
        # The output of any other generation could overwrite an existing segment.
        generation = max(one.generation for one in group.inputs) + 1
        if (at, generation) != (group.next_seq, group.generation):
            return f"group {number} has the wrong end or generation"
    return ""


def decode_sidecar(path: str, data: bytes, group: int) -> Sidecar | FailedSidecar:
    """Decode the report of a job. The message of the ValueError is for the author of the job."""
    try:
        fields = msgspec.json.decode(data)
        found: Sidecar | FailedSidecar
        if isinstance(fields, dict) and "failed" in fields:
            found = msgspec.convert(fields, FailedSidecar)
        else:
            found = msgspec.convert(fields, Sidecar)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if found.group != group:
        raise ValueError(f"{path} is for group {found.group}")
    if isinstance(found, Sidecar) and not _ATTEMPT.fullmatch(found.attempt):
        raise ValueError(
            f"{path}: attempt must be 1 to 100 letters, digits and any of . _ -, and not start with a dot"
        )
    return found


# ── Choice of segments ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cold segment that may be merged; bytes without the header."""

    first_seq: int
    rows: int
    data_bytes: int
    dead_bytes: int

    @property
    def kept_bytes(self) -> int:
        return self.data_bytes - self.dead_bytes


def choose(candidates: Sequence[Candidate | None], parameters: MergeParameters) -> list[tuple[int, int]]:
    """Half-open index ranges of segments that are worth merging. None stands for a segment that cannot be merged; it ends a run, as
    does a gap between seqs."""
    chosen: list[tuple[int, int]] = []
    segments = rows = 0
    for first, stop in _runs(candidates, min(parameters.target_bytes, MERGE_BYTES_MAX)):
        for low, high in _worthwhile(candidates, first, stop, parameters):
            more = sum(one.rows for one in candidates[low:high] if one is not None)
            segments += high - low
            rows += more
            too_much = segments > PLAN_SEGMENTS_MAX or rows > PLAN_ROWS_MAX
            if too_much or len(chosen) >= min(parameters.max_groups, PLAN_GROUPS_MAX):
                return chosen
            chosen.append((low, high))
    return chosen


def _runs(candidates: Sequence[Candidate | None], target_bytes: int) -> Iterator[tuple[int, int]]:
    """Maximal runs of adjacent segments within the target size."""
    first = size = rows = 0
    for i, one in enumerate(candidates):
        previous = candidates[i - 1] if i > first else None
        fits = (
            one is not None
            and previous is not None
            and previous.first_seq + previous.rows == one.first_seq
            and size + one.kept_bytes <= target_bytes
            and rows + one.rows <= MERGE_ROWS_MAX
            and i - first < PLAN_SEGMENTS_MAX
        )
        if not fits:
            if i > first:
                yield first, i
            first = i if one is not None else i + 1
            size = rows = 0
        if one is not None:
            size += one.kept_bytes
            rows += one.rows
    if first < len(candidates):
        yield first, len(candidates)


def _worthwhile(
    candidates: Sequence[Candidate | None], first: int, stop: int, parameters: MergeParameters
) -> Iterator[tuple[int, int]]:
    """The run, if it has enough segments or garbage; otherwise the single segments with enough garbage."""
    run = [one for one in candidates[first:stop] if one is not None]
    if stop - first >= max(parameters.min_segments, 2) or _is_garbage(run, parameters):
        if (
            sum(one.rows for one in run) <= MERGE_ROWS_MAX
            and sum(one.kept_bytes for one in run) <= MERGE_BYTES_MAX
        ):
            yield first, stop
        return
    for i, one in enumerate(run):
        if (
            _is_garbage([one], parameters)
            and one.rows <= MERGE_ROWS_MAX
            and one.kept_bytes <= MERGE_BYTES_MAX
        ):
            yield first + i, first + i + 1


def _is_garbage(run: Sequence[Candidate], parameters: MergeParameters) -> bool:
    dead = sum(one.dead_bytes for one in run)
    return dead > 0 and dead >= parameters.min_garbage * sum(one.data_bytes for one in run)
