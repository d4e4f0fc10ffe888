"""Goal: after a power cut all records that were acked as synced are there, and losses are announced.

Method: a real server on a file system that loses unsynced data (tests/support/power_cut.py), a mixed load, and power cuts.
The same file system runs full and fails syncs, too.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign
from tests.support import power_cut
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.power_cut import Machine
from tests.support.server import until

WHY_NOT = power_cut.missing()
pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(
        WHY_NOT is not None, reason=f"power cuts on real files are not tested here: {WHY_NOT}"
    ),
]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with power_cut.machine(tmp_path, seed=21) as made:
        yield made


def tree(root: Path) -> dict[str, bytes | None]:
    """Every path below `root`; None for directories."""
    paths = sorted(path for path in root.rglob("*") if path.name != power_cut.SYNC_ALL)
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in paths}


def random_change(root: Path, rng: random.Random) -> None:
    """One random change, determined by rng and tree. The file system may refuse it."""
    names = [f"{folder}/{name}" for folder in ("a", "a/b", "c") for name in "uvw"]
    one, other, size = root / rng.choice(names), root / rng.choice(names), rng.randrange(3 << 19)
    match rng.randrange(8):
        case 0 | 1:
            one.write_bytes(rng.randbytes(size))
        case 2:
            with one.open("r+b") as file:
                file.seek(rng.randrange(1 << 20))
                file.write(b"middle")
                os.replace(one, other)  # with the file open
                file.write(b"more")
        case 3:
            os.truncate(one, size)
        case 4:
            one.unlink()
        case 5:
            one.parent.mkdir(parents=True, exist_ok=True)
        case 6:
            one.parent.rename(other.parent)
        case _:
            one.parent.rmdir()


def test_the_file_system_behaves_like_a_real_one(machine: Machine, tmp_path: Path) -> None:
    """It behaves like a real file system, and keeps synced data."""
    real = tmp_path / "real"
    real.mkdir()
    for seed in range(150):
        results = []
        for root in (real, machine.path):
            try:
                random_change(root, random.Random(seed))
                results.append(0)
            except OSError as error:
                results.append(error.errno)
        assert results[0] == results[1], seed
    assert len(tree(real)) > 5
    assert tree(machine.path) == tree(real)
    fd = os.open(machine.path / power_cut.SYNC_ALL, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)
    survived = []
    for _ in range(20):
        (machine.path / "unsynced").write_bytes(b"kept or not")
        machine.lose()
        left = tree(machine.path)
        survived.append(left.pop("unsynced", None) == b"kept or not")
        assert left == tree(real)
        (machine.path / "unsynced").unlink(missing_ok=True)
    assert True in survived and False in survived
    assert (machine.failpoints / "boot_id").read_text() == "boot-21\n"


def work_on(campaign: Campaign, acks: int) -> None:
    target = campaign.workload.acks + acks
    until(lambda: campaign.workload.acks >= target)


@fault(
    "disk",
    "power cut under a real server with real files",
    "all acked fsync writes are there; lost tails of disk topics are announced; no seq is used twice",
)
@fault("disk", "power cut right after a worker was killed", "as after a power cut alone")
def test_power_cuts_under_load(machine: Machine, campaign: Callable[..., Campaign]) -> None:
    this: Campaign = campaign(seed=21, machine=machine)
    rng = random.Random(21)
    with this.workload.running():
        for _ in range(pick(short=1, long=2)):
            work_on(this, rng.randrange(50, 250))
            this.cut_power()
        until(lambda: "snapshot.rename.after" in this.failpoints.hits())
        this.kill("shard 0")
        this.cut_power()
        work_on(this, 50)
    this.finish()


@fault(
    "disk",
    "full under a real server with real files",
    "429 disk_full for appends; reads and deletes continue; ends by itself",
)
@fault(
    "disk",
    "a sync fails with EIO, and the power is cut later",
    "the shard becomes read-only; no acked record is lost",
)
def test_a_full_disk_a_failed_sync_and_a_power_cut(
    machine: Machine, campaign: Callable[..., Campaign]
) -> None:
    this: Campaign = campaign(seed=22, machine=machine)
    workload = this.workload
    with workload.running():
        workload.recorder.happened("full")
        machine.fill(True)
        until(lambda: this.refused_for("disk_full"))
        assert this.server.diff(workload.topics[0]).status == 200
        machine.fill(False)
        workload.recorder.happened("freed")
        work_on(this, 100)
        assert this.server.get("/readyz").status == 200, "still not ready though there is space again"
        workload.recorder.happened("error")
        machine.fail("sync", errno.EIO)
        until(this.latched)
        this.cut_power()
        work_on(this, 50)
    this.finish()
