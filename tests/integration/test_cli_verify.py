"""`topics verify` on the data of a real server.

Goal: a directory in use is refused, a sound one passes, damage is reported with its place and an exit code, after a repair
the server starts again and serves the rest. Method: a real server writes and is stopped, bytes of
its files are changed, and the command's `main` is called. It runs as a program on a terminal and on a directory in use.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_digest

from tests.support.faults import fault
from tests.support.in_process import Done, call
from tests.support.server import ROOT, Server
from workers import verify

TOPICS = ("a", "b", "c", "d")
RECORDS = 30
ENVIRONMENT = {"TOPICS_SEGMENT_MAX_EVENTS": "10"}


def run(*arguments: str | Path) -> Done:
    return call(verify.main, *arguments)


def run_program(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "topics.cli", "verify", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def report(*arguments: str | Path) -> tuple[int, Any]:
    done = run(*arguments, "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a server with some topics, stopped cleanly."""
    server = Server(tmp_path_factory.mktemp("filled"), environment=ENVIRONMENT).start()
    for topic in TOPICS:
        server.put(f"/v0/topics/{topic}", {"durability": "fsync"})
        for i in range(RECORDS):
            server.post(
                f"/v0/topics/{topic}", {"records": [{"tag": "x", "data": {"n": i, "pad": "." * 300}}]}
            )
    assert server.stop() == 0
    return server.data_dir


@pytest.fixture
def stopped(filled: Path, tmp_path: Path) -> Server:
    """A stopped server with a copy of that directory."""
    server = Server(tmp_path, environment=ENVIRONMENT)
    shutil.copytree(filled, server.data_dir)
    return server


def files(server: Server) -> dict[str, bytes]:
    return {
        str(path.relative_to(server.data_dir)): path.read_bytes()
        for path in sorted(server.data_dir.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def read_all(server: Server, topic: str) -> tuple[list[int], list[tuple[int, int, str]]]:
    seqs: list[int] = []
    gaps: list[tuple[int, int, str]] = []
    cursor = 0
    while True:
        page = server.post(f"/v0/topics/{topic}/diff", {"from_seq": cursor, "limit": 1000}).json
        seqs += [record["$seq"] for record in page["records"]]
        if page["tombstone"] is not None:
            stone = page["tombstone"]
            gaps.append((stone["gap_from"], stone["gap_to"], stone["reason"]))
        if page["caught_up"]:
            return seqs, gaps
        cursor = page["next_from_seq"]


def test_a_sound_directory_passes_and_is_left_alone(stopped: Server) -> None:
    before = files(stopped)
    done = run(stopped.data_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sound: 2 shards, 4 topics, {4 * RECORDS} records" in done.stdout
    assert "checking shard 0" in done.stderr, "without a terminal the progress is plain lines"
    code, found = report(stopped.data_dir)
    assert (code, found["sound"], found["repaired"], found["findings"]) == (0, True, False, [])
    assert files(stopped) == before
    code, found = report(stopped.data_dir, "--repair")
    assert (code, found["repaired"], found["quarantined"]) == (0, False, [])
    assert files(stopped) == before


def test_a_bar_on_a_terminal(stopped: Server) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "topics.cli", "verify", str(stopped.data_dir)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass  # reading a terminal whose other end is closed fails like this
    os.close(ours)
    assert process.wait(60) == 0
    assert b"\r\x1b[K" in shown
    assert b"records of a" in shown


@fault(
    "data directory",
    "verify on a directory that a server uses",
    "refused with exit code 3 and the pid of the server",
)
def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        done = run_program(server.data_dir)
        assert done.returncode == 3
        assert "is in use; stop the server first" in done.stderr
        assert server.get("/readyz").status == 200
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["missing"], 3), ([], 2), (["missing", "--mend"], 2), (["missing", "more"], 2)],
    ids=["absent", "no-argument", "unknown-option", "too-many"],
)
def test_exit_codes_of_invalid_arguments(tmp_path: Path, arguments: list[str], code: int) -> None:
    made = [str(tmp_path / argument) if not argument.startswith("-") else argument for argument in arguments]
    done = run(*made)
    assert done.returncode == code, done.stderr
    assert done.stderr
    assert not (tmp_path / "missing").exists(), "a check must not create the directory"


def test_an_empty_path_is_not_the_current_directory() -> None:
    done = run("")
    assert done.returncode == 2
    assert "is empty" in done.stderr


@fault(
    "data directory",
    "verify on a file, or on a directory that is not a data directory",
    "refused with exit code 3; nothing is written there",
)
def test_other_files_and_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "topics").mkdir()
    (tmp_path / "notes").write_text("not ours")
    for path, problem in (
        (tmp_path, "is not a data directory of topics"),
        (tmp_path / "notes", "is not a directory"),
        (tmp_path / "missing", "does not exist"),
    ):
        for arguments in ([], ["--repair"]):
            done = run(path, *arguments)
            assert done.returncode == 3
            assert problem in done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes", "topics"]


@fault(
    "segment",
    "a corrupt record in a server's data, then topics verify --repair",
    "the server starts, serves all others and announces this one as lost",
)
def test_damage_is_named_repaired_and_announced(stopped: Server) -> None:
    path = next(stopped.data_dir.glob("topics/*/*.data"))
    flip(path, 200)
    relative = str(path.relative_to(stopped.data_dir))
    code, found = report(stopped.data_dir)
    assert (code, found["sound"]) == (1, False)
    damage = [f for shard in found["shards"] for f in shard["findings"] if f["kind"] == "damage"]
    assert {f["path"] for f in damage} == {relative}
    (lost,) = [f for f in damage if f["first_seq"]]
    assert (lost["first_seq"], lost["last_seq"], lost["records"]) == (1, 1, 1)

    done = run(stopped.data_dir, "--repair")
    assert done.returncode == 0, done.stdout
    assert f"announced as lost: topic {lost['topic']}, seqs 1 to 1" in done.stdout
    assert f"repaired: 2 shards, 4 topics, {4 * RECORDS - 1} records" in done.stdout
    assert "a server would start it" not in done.stdout, "it describes the state before the repair"
    assert (stopped.data_dir / "quarantine" / "1" / relative).exists()
    assert run(stopped.data_dir).returncode == 0

    stopped.start()
    try:
        for topic in TOPICS:
            seqs, gaps = read_all(stopped, topic)
            hurt = topic == lost["topic"]
            assert seqs == list(range(2 if hurt else 1, RECORDS + 1))
            assert gaps == ([(1, 1, "corrupt")] if hurt else [])
    finally:
        assert stopped.stop() == 0


@fault(
    "layout",
    "layout.json is missing, then topics verify --repair",
    "it is rebuilt from the shards' directories and checked against the topics",
)
@pytest.mark.parametrize(
    "content", [None, b"", b'{"format":1,"generation":1,"sha'], ids=["missing", "empty", "cut"]
)
def test_a_lost_layout_is_rebuilt(stopped: Server, content: bytes | None) -> None:
    path = stopped.data_dir / "layout.json"
    right = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    code, found = report(stopped.data_dir)
    assert (code, [f["path"] for f in found["findings"]]) == (1, ["layout.json"])
    assert report(stopped.data_dir, "--repair")[0] == 0
    assert path.read_bytes() == right
    assert run(stopped.data_dir).returncode == 0


@fault("layout", "layout.json of a later format", "verify refuses with exit code 3 and changes nothing")
def test_a_later_layout_is_refused(stopped: Server) -> None:
    (stopped.data_dir / "layout.json").write_bytes(b'{"format":3,"generation":1,"shards":2}')
    before = files(stopped)
    for arguments in ([], ["--repair"]):
        done = run(stopped.data_dir, *arguments)
        assert done.returncode == 3
        assert "format 3" in done.stderr
    assert files(stopped) == before


@fault("verify", "a snapshot of a later version", "exit code 3 with and without --repair; nothing is changed")
@pytest.mark.parametrize("arguments", [[], ["--repair"]], ids=["check", "repair"])
def test_a_later_version_is_refused(stopped: Server, arguments: list[str]) -> None:
    path = max(stopped.data_dir.rglob("snap-*"))
    data = bytearray(path.read_bytes())
    data[8:12] = (99).to_bytes(4, "little")
    data[-8:] = xxh3_64_digest(bytes(data[:-8]))[::-1]
    path.write_bytes(data)
    before = files(stopped)
    done = run(stopped.data_dir, *arguments)
    assert done.returncode == verify.CANNOT, done
    assert "has format version 99" in done.stderr
    assert files(stopped) == before


@fault(
    "layout",
    "layout.json and a shard's directory are missing",
    "a number of shards that does not fit the topics is not written",
)
def test_a_layout_that_does_not_fit_the_topics_is_not_written(stopped: Server) -> None:
    (stopped.data_dir / "layout.json").unlink()
    os.rename(stopped.data_dir / "layout-1" / "shard-01", stopped.folder / "elsewhere")
    done = run(stopped.data_dir, "--repair")
    assert done.returncode == 3
    assert "restore it from a backup" in done.stderr
    assert not (stopped.data_dir / "layout.json").exists()


def test_topics_without_a_name_have_an_exit_code(stopped: Server) -> None:
    for path in stopped.data_dir.glob("layout-1/shard-00/meta/snap-*"):
        path.unlink()
    log = min(stopped.data_dir.glob("layout-1/shard-00/wal/*.log"))
    log.write_bytes(bytes(512) + log.read_bytes()[512:])
    code, found = report(stopped.data_dir, "--repair")
    assert (code, found["sound"], found["repaired"]) == (4, True, True)
    assert found["recovered"]
    assert all(name.startswith("recovered-") for name in found["recovered"])
    assert set(found["recovered"].values()) == {RECORDS}
    assert any("topics pub NAME --records" in note for note in found["notes"])
    assert run(stopped.data_dir).returncode == 0
