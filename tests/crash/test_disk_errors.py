"""Goal: a disk call that fails is never taken for one that worked, wherever it is.

Method: failpoints let calls of one shard fail under load. Where the log is in doubt the shard turns read-only, says so everywhere,
goes on reading, and a restart heals it. A full disk ends by itself. The history is judged at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.campaign import Campaign
from tests.support.faults import fault
from tests.support.server import until

pytestmark = pytest.mark.crash

LATCHES = "the shard is read-only: readiness, metrics and errors say so, reads go on; a restart heals it"
RESUMES = (
    "no write is lost or refused for good; the work is done again when there is space, or a free file handle"
)


@fault("log file", "a sync of it fails with EIO under load", LATCHES)
@fault("log file", "a write to it fails with EIO under load", LATCHES)
@fault("log file", "a write to it fails with ENOSPC although its space was allocated", LATCHES)
@fault("log file", "the file system turns read-only (EROFS) under it", LATCHES)
@fault("log file", "the next one cannot be opened: EACCES", LATCHES)
@fault("segment", "a checkpoint's sync of it fails with EIO", LATCHES)
@fault("snapshot", "it cannot be renamed: EIO", LATCHES)
def test_where_an_error_makes_the_shard_read_only(campaign: Callable[..., Campaign]) -> None:
    this: Campaign = campaign(seed=31)
    failures = [
        ("wal.sync.before", "EIO"),
        ("wal.write.before", "EIO"),
        ("wal.write.before", "ENOSPC"),
        ("wal.write.after", "EROFS"),
        ("wal.open.before", "EACCES"),
        ("segment.sync.before", "EIO"),
        ("snapshot.rename.before", "EIO"),
    ]
    with this.workload.running():
        for i, (point, error) in enumerate(failures):
            assert this.error_at(point, error, shard=i % 2, latches=True), point
    assert this.done["read-only"] == len(failures), this.done
    this.finish()


@fault("log file", "no space to allocate the next one", f"429 disk_full until there is space; {RESUMES}")
@fault("log file", "the next one cannot be opened: EMFILE", f"appends wait for it if they must; {RESUMES}")
@fault("segment", "no space to write it", RESUMES)
@fault("index", "no space to write it", RESUMES)
@fault("snapshot", "no space to write it", RESUMES)
@fault("segment", "no space for the marks of deleted records", RESUMES)
@fault(
    "data directory",
    "no space for the notes of an erase",
    f"429 disk_full for the erase, which is done later; {RESUMES}",
)
def test_what_runs_out_is_tried_again(campaign: Callable[..., Campaign]) -> None:
    this: Campaign = campaign(seed=33)
    # An erase overwrites these files in place, and one that is refused half-way makes the shard read-only.
    this.workload.erasing = False
    with this.workload.running():
        assert this.error_at("wal.allocate.before", "ENOSPC", times=3)
        until(lambda: this.refused_for("disk_full"))
        assert this.error_at("wal.open.before", "EMFILE")
        for what in ("segment", "index", "snapshot", "deletes"):
            assert this.error_at(f"{what}.write.before", "ENOSPC"), what
        this.workload.erasing = True
        assert this.error_at("intent.write.before", "ENOSPC")
    assert this.done["read-only"] == 0, this.done
    this.finish()
