"""Goal: a failpoint fires at the call it names, as often as it says, and other calls, files and shards are not affected.

Method: a FailpointDisk over a real folder; actions that kill the process run in a child process.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workers.shard.failpoints import BadFailpoint, FailpointDisk, kind_of, parse_point
from workers.shard.posix import PosixDisk

ROOT = Path(__file__).resolve().parents[2]
LOG = "layout-1/shard-00/wal/wal-0000000000000001.log"
SEGMENT = "topics/0000000000000001/seg-0000000000000001-0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    return folder


@pytest.fixture
def disk(tmp_path: Path, folder: Path) -> FailpointDisk:
    return FailpointDisk(PosixDisk(str(tmp_path / "data")), str(folder), 0)


def arm(folder: Path, *lines: str) -> None:
    new = folder / "points.new"
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(folder / "points")


def make_log(disk: FailpointDisk) -> int:
    disk.make_dir(LOG.rpartition("/")[0])
    return disk.open(LOG, create=True)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        (LOG, "wal"),
        ("layout-1/shard-00/wal", "wal"),
        ("layout-1/shard-00/meta", "meta"),
        ("layout-1/shard-00/meta/snap-000000000000000a", "snapshot"),
        ("layout-1/shard-00/meta/snap-000000000000000a.tmp", "snapshot"),
        ("layout-1/shard-00/meta/intent-000000000000000a", "intent"),
        ("layout-1/shard-00/meta/latched", "latch"),
        (f"{SEGMENT}.data", "segment"),
        (f"{SEGMENT}.data.tmp", "segment"),
        (f"{SEGMENT}.idx", "index"),
        (f"{SEGMENT}.dict", "index"),
        (f"{SEGMENT}.sum", "index"),
        (f"{SEGMENT}.del", "deletes"),
        ("topics", "topics"),
        ("topics/0000000000000001", "topic"),
        ("topics/0000000000000001.deleted", "topic"),
        ("layout-1/shard-00", "layout"),
        ("layout.json.tmp", "layout"),
        ("", "layout"),
        ("lost+found", "other"),
    ],
)
def test_names_of_paths(path: str, what: str) -> None:
    assert kind_of(path) == what


@pytest.mark.parametrize(
    "line",
    [
        "wal.sync.before",
        "log.sync.before kill",
        "wal.fsync.before kill",
        "wal.sync.during kill",
        "wal.sync.before explode",
        "wal.sync.before EWHATEVER",
        "wal.sync.before torn",
        "wal.write.after torn",
        "wal.sync.before kill nth=first",
        "wal.sync.before kill once=1",
    ],
)
def test_an_invalid_line_is_refused(line: str, tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadFailpoint):
        parse_point(line)
    arm(folder, line)
    with pytest.raises(BadFailpoint):
        FailpointDisk(PosixDisk(str(tmp_path / "data")), str(folder), 0)


def test_an_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFailpoint, match="does not name a folder"):
        FailpointDisk(PosixDisk(str(tmp_path / "data")), str(tmp_path / "absent"), 0)


def test_an_error_comes_at_the_nth_call_and_as_often_as_asked(disk: FailpointDisk, folder: Path) -> None:
    handle = make_log(disk)
    arm(folder, "wal.write.before ENOSPC nth=2 times=2")
    disk.write(handle, 0, b"one")
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            disk.write(handle, 3, b"two")
        assert caught.value.errno == errno.ENOSPC
    disk.write(handle, 3, b"six")
    assert disk.read(handle, 0, 9) == b"onesix"
    assert (folder / "fired").read_text().splitlines() == ["0 wal.write.before ENOSPC nth=2 times=2"] * 2


def test_after_means_that_the_call_was_made(disk: FailpointDisk, folder: Path) -> None:
    handle = make_log(disk)
    arm(folder, "wal.write.after EIO")
    with pytest.raises(OSError):
        disk.write(handle, 0, b"there")
    assert disk.read(handle, 0, 9) == b"there"


def test_other_shards_and_files_are_not_affected(disk: FailpointDisk, folder: Path) -> None:
    handle = make_log(disk)
    arm(folder, "wal.write.before EIO shard=1", "segment.write.before EIO")
    disk.write(handle, 0, b"fine")


def test_a_spent_point_stays_spent_for_the_next_worker(
    disk: FailpointDisk, folder: Path, tmp_path: Path
) -> None:
    arm(folder, "wal.make_dir.before EACCES")
    with pytest.raises(PermissionError):
        make_log(disk)
    FailpointDisk(PosixDisk(str(tmp_path / "data")), str(folder), 0).make_dir("wal")
    with pytest.raises(PermissionError):
        FailpointDisk(PosixDisk(str(tmp_path / "data")), str(folder), 1).make_dir("wal")


def test_hits_are_recorded_on_demand(disk: FailpointDisk, folder: Path) -> None:
    handle = make_log(disk)
    assert not (folder / "hits").exists()
    arm(folder, "record")
    disk.sync(handle)
    disk.sync(handle)
    disk.remove(f"{SEGMENT}.del")
    expected = [f"{call}.{when}" for call in ("wal.sync", "deletes.remove") for when in ("before", "after")]
    assert (folder / "hits").read_text().splitlines() == expected


def test_the_boot_id_can_be_replaced(disk: FailpointDisk, folder: Path) -> None:
    assert disk.boot_id() == PosixDisk(str(folder)).boot_id()
    (folder / "boot_id").write_text("boot-2\n")
    assert disk.boot_id() == "boot-2"


DYING = """
import sys
from workers.shard.failpoints import FailpointDisk
from workers.shard.posix import PosixDisk
disk = FailpointDisk(PosixDisk(sys.argv[1]), sys.argv[2], 0)
disk.make_dir("wal")
handle = disk.open("wal/wal-1.log", create=True)
disk.write(handle, 0, b"12345678")
disk.sync(handle)
"""


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("wal.write.before kill", b""),
        ("wal.write.before torn", b"1234"),
        ("wal.write.after kill", b"12345678"),
        ("wal.sync.after kill", b"12345678"),
    ],
)
def test_a_kill_leaves_exactly_what_was_done(line: str, left: bytes, tmp_path: Path, folder: Path) -> None:
    arm(folder, line)
    command = [sys.executable, "-c", DYING, str(tmp_path / "data"), str(folder)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "data/wal/wal-1.log").read_bytes() == left
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, (
        "a failpoint that has fired is spent"
    )


def test_a_pause_lasts_until_sigcont(tmp_path: Path, folder: Path) -> None:
    arm(folder, "wal.sync.before pause")
    child = subprocess.Popen([sys.executable, "-c", DYING, str(tmp_path / "data"), str(folder)], cwd=ROOT)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    assert child.wait(120) == 0


def test_slow_delays_every_call_and_is_not_recorded_as_fired(disk: FailpointDisk, folder: Path) -> None:
    arm(folder, "wal.sync.before slow ms=7")
    slept: list[float] = []
    patch = pytest.MonkeyPatch()
    patch.setattr("workers.shard.failpoints.time.sleep", slept.append)
    disk.make_dir("wal")
    handle = disk.open("wal/wal-1.log", create=True)
    for _ in range(3):
        disk.sync(handle)
    patch.undo()
    assert slept == [0.007] * 3
    assert not (folder / "fired").exists()


@pytest.mark.parametrize("line", ["wal.sync.before slow", "wal.sync.before kill ms=5"])
def test_only_slow_has_a_time(line: str) -> None:
    with pytest.raises(BadFailpoint):
        parse_point(line)
