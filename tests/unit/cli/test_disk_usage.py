"""Goal: `topics du` counts every byte once, under the right kind and topic, and copes with whatever it finds.

Method: files of an engine on a simulated disk, written to a real directory, with a cold one made of copies. Then the
same with files that are damaged or vanish while it reads, and with names that are not valid text.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.fuzz.images import images
from topics.cli import disk_usage as du_module
from topics.cli.__main__ import main
from topics.cli.disk_usage import KINDS, NotADataDirectory, disk_usage
from topics.engine.storage.layout import Layout, encode_layout
from topics.system.read_only_disk import ReadOnlyDisk


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for path, content in images()[0].files.items():
        put(root / path, content)
    put(root / "layout.json", encode_layout(Layout.of(1, 1)))
    put(root / "LOCK", b"1\n")
    return root


@pytest.fixture
def cold(data: Path, tmp_path: Path) -> Path:
    root = tmp_path / "cold"
    put(data / "cold-id", b"abc\n")
    put(root / "cold-id", b"abc\n")
    for path in (data / "topics").rglob("*.sum"):
        put(root / path.relative_to(data), path.read_bytes())
    put(root / "staging/shard-00/incoming", b"12345")
    return root


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def size_of(root: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in root.rglob(pattern) if path.is_file())


def test_every_byte_is_counted_once(data: Path, cold: Path) -> None:
    put(data / "lost+found/shard-00-x", b"1" * 11)
    put(data / "quarantine/1/layout-1/shard-00/wal/wal-0000000000000001.log", b"1" * 12)
    put(data / "layout-2/shard-00/meta/snap-0000000000000001", b"1" * 13)
    put(data / "topics/0000000000000400/seg-0000000000000001-0.del.tmp", b"1" * 14)
    put(data / "topics/notes.txt", b"1" * 15)
    usage = disk_usage(str(data), str(cold))
    kinds = {kind.kind: kind.bytes for kind in usage.kinds}
    assert tuple(kinds) == KINDS
    assert (usage.hot_bytes, usage.cold_bytes) == (size_of(data), size_of(cold))
    assert sum(kinds.values()) == usage.hot_bytes + usage.cold_bytes
    for suffix, what in (
        ("data", "data"),
        ("idx", "index"),
        ("dict", "dict"),
        ("sum", "sums"),
        ("del", "deletes"),
    ):
        assert kinds[f"hot {what}"] == size_of(data, f"*.{suffix}")
        assert kinds[f"cold {what}"] == size_of(cold, f"*.{suffix}")
    assert kinds["lost+found"] == 11
    assert kinds["quarantine"] == 12
    assert kinds["staging"] == 13 + 14 + 5
    assert kinds["log"] + kinds["spare log"] == size_of(data / "layout-1", "wal-*.log")
    assert kinds["log"] > 0
    assert kinds["snapshots"] == size_of(data / "layout-1", "snap-*")
    assert usage.problems == []
    assert usage.same_disk
    assert usage.data_disk is not None and usage.data_disk.total_bytes >= usage.data_disk.free_bytes > 0


def test_a_log_file_that_was_never_written_to_is_a_spare(data: Path) -> None:
    log = next((data / "layout-1").rglob("wal-*.log"))
    before = {kind.kind: kind.bytes for kind in disk_usage(str(data)).kinds}
    put(log.with_name("wal-0000000000000099.log"), log.read_bytes()[:64] + bytes(1000))
    after = {kind.kind: kind.bytes for kind in disk_usage(str(data)).kinds}
    assert after["spare log"] - before["spare log"] == 1064
    assert after["log"] == before["log"]


def test_topics_have_the_names_and_counts_of_the_snapshot(data: Path, cold: Path) -> None:
    put(data / "topics/0000000000ffff00/seg-0000000000000001-0.data", b"1" * 100)
    usage = disk_usage(str(data), str(cold))
    topics = {topic.name: topic for topic in usage.topics}
    assert {"plain", "tagged", "held", ""} == set(topics)
    assert (topics["plain"].records, topics["plain"].shard) == (8, 0)  # ten, and two were deleted
    assert topics["plain"].live_bytes and topics["plain"].dead_bytes is not None
    folder = f"topics/{topics['plain'].id:016x}"
    assert (topics["plain"].hot_bytes, topics["plain"].cold_bytes) == (
        size_of(data / folder),
        size_of(cold / folder),
    )
    unknown = topics[""]
    assert (unknown.id, unknown.hot_bytes, unknown.records, unknown.live_bytes) == (0xFFFF00, 100, None, None)
    sizes = [topic.hot_bytes + topic.cold_bytes for topic in usage.topics]
    assert sizes == sorted(sizes, reverse=True)


def test_topics_without_files_ride_in_the_snapshot(tmp_path: Path) -> None:
    for path, content in images()[2].files.items():
        put(tmp_path / path, content)
    put(tmp_path / "layout.json", encode_layout(Layout.of(1, 1)))
    usage = disk_usage(str(tmp_path))
    assert any(topic.name and not topic.hot_files and topic.live_bytes for topic in usage.topics)


def test_a_damaged_snapshot_leaves_the_older_one_to_tell(data: Path) -> None:
    snapshots = sorted((data / "layout-1").rglob("snap-*"))
    assert len(snapshots) == 2
    snapshots[1].write_bytes(snapshots[1].read_bytes()[:-3])
    usage = disk_usage(str(data))
    assert usage.problems == []
    assert "plain" in {topic.name for topic in usage.topics}
    snapshots[0].write_bytes(b"x")
    usage = disk_usage(str(data))
    assert len(usage.problems) == 1 and "snap-" in usage.problems[0]
    assert {topic.name for topic in usage.topics} == {""}
    assert usage.hot_bytes == size_of(data)


def test_a_snapshot_that_is_replaced_meanwhile_is_looked_for_again(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []

    def stale(disk: ReadOnlyDisk, meta_dir: str) -> list[int]:
        listed.append(meta_dir)
        return [0xDEAD] if len(listed) == 1 else real(disk, meta_dir)

    real = du_module.list_snapshots
    monkeypatch.setattr(du_module, "list_snapshots", stale)
    usage = disk_usage(str(data))
    assert len(listed) == 2 and usage.problems == []
    assert "plain" in {topic.name for topic in usage.topics}


def test_files_and_folders_that_vanish_are_not_counted(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("topics"):
            raise FileNotFoundError(2, "gone", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    usage = disk_usage(str(data))
    monkeypatch.undo()
    assert usage.problems == []
    assert usage.hot_bytes == size_of(data) - size_of(data / "topics")


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"format":99,"generation":1,"shards":1}', b"\xff\xff", b"null"]
)
def test_without_a_layout_that_can_be_read_the_files_are_still_counted(data: Path, text: bytes) -> None:
    (data / "layout.json").write_bytes(text)
    usage = disk_usage(str(data))
    assert usage.shards is None and len(usage.problems) == 1
    assert usage.hot_bytes == size_of(data)
    if b"99" in text:
        assert "format version 99" in usage.problems[0]


def test_another_cold_directory_is_not_counted(data: Path, cold: Path, tmp_path: Path) -> None:
    (cold / "cold-id").write_bytes(b"other\n")
    for path in (cold, tmp_path / "absent"):
        usage = disk_usage(str(data), str(path))
        assert usage.cold_bytes == 0 and len(usage.problems) == 1


def test_damage_anywhere_never_ends_it(data: Path) -> None:
    rng = random.Random(7)
    files = [path for path in sorted(data.rglob("*")) if path.is_file()]
    for _ in range(150):
        path = rng.choice(files)
        content = path.read_bytes()
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged) or 1) : rng.randrange(len(damaged) + 1)] = rng.randbytes(
                rng.randint(0, 9)
            )
        path.write_bytes(damaged)
        disk_usage(str(data))
        path.write_bytes(content)


@pytest.mark.parametrize("what", ["absent", "file", "foreign"])
def test_a_folder_that_is_no_data_directory_is_refused(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_bytes(b"")
    elif what == "foreign":
        put(path / "topics" / "x", b"")
    with pytest.raises(NotADataDirectory):
        disk_usage(str(path))
    assert main(["du", str(path)]) == 3
    assert capsys.readouterr().err.startswith("topics du: ")


def test_the_command_prints_tables_or_json(
    data: Path, cold: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["du", str(data), "--cold-dir", str(cold), "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert "hot data" in text and " free" in text and "on the same disk" in text
    assert "and 2 smaller topics" in text
    monkeypatch.setenv("TOPICS_DATA_DIR", str(data))
    monkeypatch.setenv("TOPICS_COLD_DIR", str(cold))
    assert main(["du", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cold_bytes"] == size_of(cold)
    assert report["topic_count"] == len(report["topics"]) == 3
    assert main(["du", "--json", "--top", "2"]) == 0
    assert len(json.loads(capsys.readouterr().out)["topics"]) == 2


def test_names_that_are_no_text_can_be_told(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = os.fsencode(data.parent) + b"/d\xff\n"
    os.rename(os.fsencode(data), odd)
    os.unlink(odd + b"/layout.json")
    for arguments in (["--json"], []):
        assert main(["du", os.fsdecode(odd), *arguments]) == 1
        capsys.readouterr()


@pytest.mark.parametrize("arguments", [["--top", "-1"], ["--top", "x"], ["a", "b"], ["--what"], [""]])
def test_wrong_arguments(arguments: list[str]) -> None:
    assert main(["du", *arguments]) == 2


def test_nothing_is_changed(data: Path, cold: Path) -> None:
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in data.rglob("*") if path.is_file()
    }
    disk_usage(str(data), str(cold))
    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in data.rglob("*") if path.is_file()
    }
    disk = ReadOnlyDisk()
    for call in (
        lambda: disk.write(0, 0, b""), lambda: disk.truncate(0, 0), lambda: disk.allocate(0, 0),
        lambda: disk.sync(0), lambda: disk.make_dir(""), lambda: disk.rename("", ""), lambda: disk.remove(""),
        lambda: disk.remove_dir(""), lambda: disk.sync_dir(""), disk.sync_all,
    ):  # fmt: skip
        with pytest.raises(OSError, match="read-only"):
            call()


def test_progress_tells_of_both_directories(data: Path, cold: Path) -> None:
    heard: list[str] = []
    disk_usage(str(data), str(cold), heard.append)
    assert [what for what in heard if what.startswith(f"{data}: ")]
    assert [what for what in heard if what.startswith(f"{cold}: ")]
    assert heard[-1].endswith("reading topics")
