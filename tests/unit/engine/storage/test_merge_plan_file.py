"""Which segments are worth merging, and the files of a plan."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.api import limits
from topics.api.errors import Corrupt
from topics.engine.commands.merges import MergeParameters
from topics.engine.storage.merge_plan_file import (
    Candidate,
    FailedSidecar,
    choose,
    decode_plan,
    decode_sidecar,
    parse_staging_key,
    plan_id_of,
)


def row(*sizes: int | tuple[int, int] | None, rows: int = 10) -> list[Candidate | None]:
    """Segments with these sizes; with how many rows are dead; None: one that cannot be merged."""
    made: list[Candidate | None] = []
    for i, size in enumerate(sizes):
        data, dead = size if isinstance(size, tuple) else (size, 0)
        made.append(None if data is None else Candidate(1 + i * rows, rows, data, dead))
    return made


def chosen(candidates: list[Candidate | None], **fields: float) -> list[tuple[int, int]]:
    return choose(candidates, msgspec.structs.replace(MergeParameters(target_bytes=100), **fields))


def test_neighbours_are_joined_up_to_the_target() -> None:
    assert chosen(row(30, 30, 30, 30, 30)) == [(0, 3), (3, 5)]
    assert chosen(row(100, 100)) == []
    assert chosen(row(90, 20, 80)) == [(1, 3)]
    assert chosen(row(30, 30, 30), min_segments=4) == []
    assert chosen(row()) == []
    assert chosen(row(30)) == []


def test_dead_bytes_make_room_and_are_a_reason_of_their_own() -> None:
    assert chosen(row((90, 60), (90, 60))) == [(0, 2)]
    assert chosen(row((100, 10))) == [(0, 1)]
    assert chosen(row((100, 9))) == []
    assert chosen(row((100, 0)), min_garbage=0) == [], "nothing would be saved"
    assert chosen(row(30, (30, 9), 30), min_segments=5) == [(0, 3)], "a tenth of all of it is dead"
    assert chosen(row(30, (30, 6), 30), min_segments=5) == [(1, 2)], "a fifth of this one is"
    assert chosen(row((500, 200))) == [(0, 1)], "also segments larger than the target"


def test_a_hole_or_one_that_cannot_be_merged_ends_a_run() -> None:
    assert chosen(row(30, None, 30, 30)) == [(2, 4)]
    assert chosen(row(None, 30, 30, None)) == [(1, 3)]
    apart = row(30, 30)
    apart[1] = Candidate(50, 10, 30, 0)
    assert chosen(apart) == []


def test_bounds() -> None:
    many = row(*[1] * 5000)
    assert sum(stop - first for first, stop in chosen(many)) <= limits.PLAN_SEGMENTS_MAX
    assert len(chosen(many, target_bytes=2)) == limits.PLAN_GROUPS_MAX
    assert len(chosen(many, target_bytes=2, max_groups=3)) == 3
    million = row(*[1] * 20, rows=1 << 20)
    assert chosen(million) == [(0, 4), (4, 8)], "rows of an output, and of a plan"
    assert chosen(row((5, 5), rows=limits.MERGE_ROWS_MAX + 1)) == []


@given(
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 120), st.integers(0, 120)))), st.integers(1, 200)
)
def test_chosen_segments_are_in_order_and_fit(sizes: list[tuple[int, int] | None], target: int) -> None:
    candidates = row(*[None if size is None else (max(size), min(size)) for size in sizes])
    end = 0
    for first, stop in chosen(candidates, target_bytes=target):
        assert end <= first < stop <= len(candidates)
        run = [one for one in candidates[first:stop] if one is not None]
        assert len(run) == stop - first
        assert stop - first == 1 or sum(one.kept_bytes for one in run) <= target
        end = stop


def test_the_id_goes_by_everything() -> None:
    ids = {
        plan_id_of("1", 5, MergeParameters(), []),
        plan_id_of("2", 5, MergeParameters(), []),
        plan_id_of("1", 6, MergeParameters(), []),
        plan_id_of("1", 5, MergeParameters(min_garbage=0.2), []),
    }
    assert len(ids) == 4
    assert plan_id_of("1", 5, MergeParameters(), []) in ids


def test_files_that_are_none_are_refused() -> None:
    for raw in (b"", b"{}", b"[]"):
        with pytest.raises(Corrupt):
            decode_plan("plan.json", raw)
        with pytest.raises(ValueError, match=r"group-0\.json"):
            decode_sidecar("group-0.json", raw, 0)
    failed = decode_sidecar("g", b'{"group":2,"failed":"rot","segment":"seg-1"}', 2)
    assert failed == FailedSidecar(2, "rot", "seg-1")
    with pytest.raises(ValueError, match="is for group 2"):
        decode_sidecar("g", b'{"group":2,"failed":"rot"}', 1)


def test_keys() -> None:
    assert parse_staging_key("staging/plans/00000000000000ab/group-0.json") == (
        "00000000000000ab",
        "group-0.json",
    )
    assert parse_staging_key("staging/plans/x/plan.json") is None
    assert parse_staging_key("staging/shard-00/incoming") is None
