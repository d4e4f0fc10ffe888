"""Goal: a failed disk call is never treated as successful, whichever call it is.

Method: failpoints make calls of one shard fail under load. If the state of the log is in doubt, the shard becomes read-only, reports that in
readiness, metrics and errors, continues to serve reads, and recovers by a restart. A full disk ends by itself. The history is checked at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.campaign import Campaign
from tests.support.faults import fault
from tests.support.server import until

pytestmark = pytest.mark.crash

LATCHES = (
    "the shard becomes read-only: readiness, metrics and errors report it, reads continue; a restart ends it"
)
RESUMES = (
    "no write is lost or refused for good; the work is done again when there is space, or a free file handle"
)


@fault("log file", "a sync of it fails with EIO under load", LATCHES)
@fault("log file", "a write to it fails with EIO under load", LATCHES)
@fault("log file", "a write to it fails with ENOSPC although its space was allocated", LATCHES)
@fault("log file", "the file system becomes read-only (EROFS)", LATCHES)
@fault("log file", "opening the next one fails with EACCES", LATCHES)
@fault("segment", "a checkpoint's sync of it fails with EIO", LATCHES)
@fault("snapshot", "renaming it fails with EIO", LATCHES)
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
@fault("log file", "opening the next one fails with EMFILE", f"appends that need it wait; {RESUMES}")
@fault("segment", "no space to write it", RESUMES)
@fault("index", "no space to write it", RESUMES)
@fault("snapshot", "no space to write it", RESUMES)
@fault("segment", "no space for the marks of deleted records", RESUMES)
@fault(
    "data directory",
    "no space for the intent file of an erase",
    f"429 disk_full for the erase, which is done later; {RESUMES}",
)
def test_calls_that_lack_a_resource_are_retried(campaign: Callable[..., Campaign]) -> None:
    this: Campaign = campaign(seed=33)
    # An erase overwrites these files in place; one that is refused halfway makes the shard read-only.
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
