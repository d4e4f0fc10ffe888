"""Goal: the stages of one delivery follow each other without a gap, so their sum is what the client measured.

Method: handwritten marks of one write and one waiting reader, joined by scripts/peers/stage_join.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "scripts"))

from peers import stage_join, stage_load, stage_marks
from peers import stage_marks as p

READER, WRITER, SEQ = 1, 2, 7
FRONT = [
    (p.PARSING, READER, 0, 1), (p.PLACED, READER, 0, 2), (p.LINKED, 0, 0, 3),
    (p.PARSING, WRITER, 0, 110), (p.PLACED, WRITER, 0, 120), (p.LINKED, 0, 0, 125),
    (p.RETURNED, 0, 0, 900), (p.ANSWERING, 0, 0, 905), (p.WRITTEN, WRITER, 0, 910),
    (p.ANSWERING, 0, 0, 920), (p.WRITTEN, READER, 0, 950),
]  # fmt: skip
DISK = [
    (p.RECEIVED, WRITER, 0, 200), (p.DECODED, 0, 0, 230), (p.TURN, 0, 0, 250), (p.TAKEN, WRITER, 0, 250),
    (p.APPENDING, 0, 0, 300), (p.APPENDED, 0, 0, 340), (p.PUBLISHED, WRITER, SEQ, 345), (p.WOKEN, 0, 0, 400),
    (p.READ, READER, SEQ, 450), (p.SENT, 0, 0, 460),
]  # fmt: skip
FSYNC = [*DISK[:6], (p.TURN, 0, 1, 700), (p.PUBLISHED, WRITER, SEQ, 710)]
FSYNC += [(p.WOKEN, 0, 0, 740), (p.READ, READER, SEQ, 780), (p.SENT, 0, 0, 800)]
SYNCS = [(p.SYNCING, 0, 1, 360), (p.SYNCED, 0, 1, 680)]


def joined(worker: list[stage_marks.Mark], *, seen_ns: int = 1000) -> dict[str, int]:
    seen = stage_load.Seen(sent={SEQ: 100}, acked={SEQ: 940}, read={SEQ: seen_ns})
    (found,) = stage_join.deliveries(
        seen,
        stage_join.follow_front(FRONT),
        stage_join.follow_worker(worker),
        stage_join.follow_syncs(SYNCS),
    )
    return found


@pytest.mark.parametrize("worker", [DISK, FSYNC], ids=["disk", "fsync"])
@pytest.mark.parametrize("seen_ns", [1000, 930], ids=["after the write", "while the front still writes"])
def test_stages_add_up_to_what_the_client_measured(worker: list[stage_marks.Mark], seen_ns: int) -> None:
    found = joined(worker, seen_ns=seen_ns)
    assert found["end to end"] == seen_ns - 100
    assert found["sum"] + found["arrive"] + found["leave"] == found["end to end"]
    for stage in ("queue", "sync", "socket"):
        parts = [value for name, value in found.items() if name.startswith(f"{stage}/")]
        assert sum(parts) == found.get(stage, 0)


def test_a_write_that_waits_for_a_sync_says_where() -> None:
    found = joined(FSYNC)
    assert (found["sync/start"], found["sync/fdatasync"], found["sync/report"]) == (20, 320, 20)
    assert found["index"] == 10


def test_a_record_that_met_no_waiting_reader_is_left_out() -> None:
    worker = [mark for mark in DISK if mark[0] != p.READ]
    seen = stage_load.Seen(sent={SEQ: 100}, acked={SEQ: 940}, read={SEQ: 2000})
    assert not stage_join.deliveries(
        seen, stage_join.follow_front(FRONT), stage_join.follow_worker(worker), {}
    )


def test_marks_survive_their_file(tmp_path: Path) -> None:
    marks = stage_marks.Marks()
    for mark in FRONT:
        marks.put(*mark)
    marks.save(tmp_path / "front.marks")
    assert list(stage_marks.load(tmp_path / "front.marks")) == FRONT
