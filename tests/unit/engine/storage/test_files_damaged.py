"""Damaged small files.

Goal: each is reported in one line that says what to do, with the documented exit code, without a traceback and
without reading a huge file into memory. Method: every kind of damage in place of every such file, and the commands
that read it, in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import fault
from tests.support.in_process import call
from tests.support.small_files import MEMORY_MAX, check, one_line
from topics.api.errors import Corrupt
from topics.cli import commands, inspect_file
from topics.engine.storage.files import header
from topics.engine.storage.layout import Layout, encode_layout
from topics.engine.storage.snapshot import MAGIC, read_snapshot
from topics.engine.tools.verify import check_manifests
from workers import verify
from workers.process.data_directory import DataDirectory
from workers.process.exit_codes import BadConfiguration
from workers.process.listeners import write_port_file
from workers.shard.local_store import LocalSegmentStore
from workers.shard.posix import PosixDisk


def start(path: Path, what: str) -> None:
    directory = DataDirectory(str(path.parent))
    try:
        if what in {"a dangling link", "a link to itself"}:
            (path.parent / "layout-1").mkdir()
        with pytest.raises(BadConfiguration, match=r"layout\.json.*restore"):
            directory.layout(1)
    finally:
        directory.close()


def verified(path: Path, what: str) -> None:
    (path.parent / "layout-1" / "shard-00").mkdir(parents=True)
    for code, options in ((1, []), (0, ["--repair"]), (0, [])):
        done = call(verify.main, path.parent, "--json", *options)
        assert (done.returncode, done.stderr) == (code, ""), done
        assert not code or "layout.json" in done.stdout
    assert path.read_bytes() == encode_layout(Layout.of(1, 1))


def inspected(path: Path, what: str) -> None:
    done = call(commands.run, "inspect", path)
    is_file = what not in {"a directory", "a dangling link", "a link to itself"}
    assert done.returncode == (1 if is_file else 3), done
    assert path.name in done.stdout + done.stderr
    assert "is not a file of topics" not in done.stdout


def context(path: Path, what: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOPICS_CONFIG", str(path))
        done = call(commands.run, "context", "ls")
    if what == "a dangling link":
        assert done.returncode == 0
    else:
        one_line(done, path, 1)


def port_file(path: Path, what: str) -> None:
    if what == "a directory":
        with pytest.raises(BadConfiguration, match=path.name):
            write_port_file(str(path), "127.0.0.1:80")
    else:
        write_port_file(str(path), "127.0.0.1:80")
        assert path.read_text() == "127.0.0.1:80"


def current(path: Path, what: str) -> None:
    if what not in {"a directory", "a dangling link", "a link to itself"}:  # which the store does not list
        store = LocalSegmentStore(str(path.parents[1]))
        problems = check_manifests(store, path.parent.name)
        assert [where for where, _ in problems] == [f"{path.parent.name}/CURRENT"]


def snapshot(path: Path, what: str) -> None:
    if what == "300 MiB":  # one whose beginning is whole
        with path.open("r+b") as file:
            file.write(header(MAGIC))
            file.truncate(2 * MEMORY_MAX)  # it is read to its end
    with pytest.raises((Corrupt, OSError), match=path.name):
        read_snapshot(PosixDisk(str(path.parents[1])), path.parent.name, 1)


READERS: dict[str, tuple[str, Callable[[Path, str], None]]] = {
    "layout.json at a start": ("layout.json", start),
    "layout.json in verify": ("layout.json", verified),
    "layout.json in inspect": ("layout.json", inspected),
    "CURRENT in inspect": ("CURRENT", inspected),
    "PIN in inspect": (f"PIN-{'0' * 16}", inspected),
    "watch in inspect": ("watch", inspected),
    "CURRENT in verify": ("CURRENT", current),
    "contexts": ("contexts.json", context),
    "port file": ("port", port_file),
    "snapshot": (f"snap-{1:016x}", snapshot),
}


@pytest.mark.parametrize("reader", READERS)
@fault(
    "data directory",
    "a small file is empty, not text, nested deeply, a directory, a dangling link or huge",
    "the file is named in one line with what to do, and it is not read into memory",
)
def test_small_files(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_file, "SETTLE_S", 0)
    name, read = READERS[reader]
    check(read, name, tmp_path)


@pytest.mark.parametrize("shards", [1025, 10**12, 10**30])
def test_a_layout_of_absurdly_many_shards(shards: int, tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_text(f'{{"format":1,"generation":1,"shards":{shards}}}')
    directory = DataDirectory(str(tmp_path))
    try:
        with pytest.raises(BadConfiguration, match=f"{shards} shards, generation 1: out of range"):
            directory.layout(1)
    finally:
        directory.close()


def test_a_lock_of_a_shard_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_bytes(encode_layout(Layout.of(1, 1)))
    (tmp_path / "layout-1" / "shard-00" / "LOCK").mkdir(parents=True)
    done = call(verify.main, tmp_path)
    one_line(done, tmp_path / "LOCK", 3)
