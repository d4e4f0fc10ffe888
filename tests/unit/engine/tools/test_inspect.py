"""Goal: `topics inspect` shows the contents of every kind of file, and of a damaged one what is wrong and where.

Method: the files of every stored format in `golden/`; those of an engine on a simulated disk, intact, with single
bytes changed, cut, and of later versions; and the command's exit codes. It never ends with a traceback.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.images import images
from tests.fuzz.targets.files import check_inspection
from tests.support import length
from tests.unit.engine.storage.test_files_golden import GOLDEN
from topics.cli import inspect_file
from topics.cli.__main__ import main
from topics.engine.storage.files import WATCH_MAGIC, header, with_digest, xxh
from topics.engine.storage.frames import SKIP, encode_control
from topics.engine.storage.layout import Layout, encode_layout
from topics.engine.storage.snapshot import MAGIC as SNAPSHOT_MAGIC
from topics.engine.storage.wal import MAGIC as LOG_MAGIC
from topics.engine.storage.wal import encode_envelope, file_header
from topics.engine.tools.inspect.files import inspect
from topics.engine.tools.inspect.report import Inspection
from topics.system.read_only_disk import ReadOnlyDisk


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for a server that may be writing: there is none."""
    monkeypatch.setattr(inspect_file, "SETTLE_S", 0)
    monkeypatch.delenv("TOPICS_COLD_DIR", raising=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for path, content in images()[1].files.items():
        put(tmp_path / path, content)
    put(tmp_path / "layout.json", encode_layout(Layout.of(1, 1)))
    return tmp_path


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def look(path: Path, **options: Any) -> Inspection:
    return inspect(ReadOnlyDisk(), str(path), **options)


def one(data: Path, pattern: str) -> Path:
    return sorted(data.rglob(pattern))[0]


# -- every format ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_every_stored_format_is_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lonely = path.name == "seg-0000000000000002-0.del"  # its index is not kept
    assert main(["inspect", str(path)]) == (1 if lonely else 0)
    assert path.name.split(".")[0] in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == (1 if lonely else 0)
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == {"i": "intent", "s": "segment", "w": "log", "t": "transaction"}.get(
        path.name[0] if not path.name.startswith("snap") else "", "snapshot"
    )
    assert told["version"] in (1, 2)
    assert all(digest["holds"] for digest in told["digests"])


@pytest.mark.parametrize("suffix", ["data", "idx", "dict", "sum", "del"])
def test_any_file_of_a_segment_names_it(suffix: str) -> None:
    found = look(GOLDEN / f"seg-0000000000000001-0.{suffix}")
    assert (found.facts["rows"], found.facts["tags"], found.facts["nodes"], found.facts["deleted"]) == (
        4,
        2,
        2,
        1,
    )
    assert [(record.seq, record.tag, record.node, record.whole) for record in found.records] == [
        (1, "orders.eu", "node-1", True),
        (2, None, "node-2", True),
        (3, None, None, None),
        (4, "raw", None, True),
    ]
    assert "deleted" in found.records[0].flags
    assert {digest.of for digest in found.digests} == {".sum", ".data", ".idx", ".dict"}


def test_every_file_of_an_engine_is_sound(data: Path) -> None:
    kinds = set()
    for path in sorted(data.rglob("*")):
        if path.is_file():
            found = look(path)
            assert found.problems == [], path
            assert found.sound
            kinds.add(found.kind)
    assert kinds == {"segment", "log", "snapshot", "layout"}


def test_a_log_is_told_by_envelopes_and_records(data: Path) -> None:
    for path in sorted(data.rglob("wal-*.log")):
        found = look(path, records=2)
        if found.facts["envelopes"]:
            break
    lsns = [envelope.lsn for envelope in found.envelopes]
    assert lsns[0] == found.facts["first_lsn"] and lsns[-1] == found.facts["last_lsn"]
    assert len(lsns) <= 4
    assert "wal-start" in found.envelopes[0].frames
    whole = look(path, records=1000)
    assert (
        len(whole.records)
        == found.facts["frames append"]
        == len(found.records) + found.left_out.get("records", 0)
    )
    assert all(record.whole and record.lsn for record in whole.records)
    later = look(path, records=3, from_seq=4)
    assert later.records and all(record.seq >= 4 for record in later.records)


def test_a_snapshot_is_told_by_topics(data: Path) -> None:
    found = look(one(data, "snap-*"))
    assert {topic.name for topic in found.topics} == {"plain", "tagged", "held"}
    assert look(one(data, "snap-*"), records=1).left_out == {"topics": 1}


def test_records_from_a_seq_on(data: Path) -> None:
    path = one(data, "seg-0000000000000005-*.data")
    assert [record.seq for record in look(path, from_seq=7).records] == [7, 8]
    assert look(path, from_seq=99).records == []
    assert [record.seq for record in look(path, records=1).records] == [5, 8]
    assert look(path, records=0).records == []


def test_small_files(data: Path, tmp_path: Path) -> None:
    assert look(data / "layout.json").facts["shards"] == 1
    assert (
        look(put(tmp_path / "cold-id", b"0123456789abcdef" * 2 + b"\n")).facts["id"] == "0123456789abcdef" * 2
    )
    assert not look(put(tmp_path / "cold-id", b"mine")).sound
    assert look(put(tmp_path / "LOCK", b"4711\n")).facts == {"text": "4711"}
    assert look(put(tmp_path / "RUN", b"")).sound
    watch = look(put(tmp_path / "watch", with_digest(WATCH_MAGIC, b"\x92\x91\x91\xa1w\x90")))
    assert watch.facts == {"sessions": 1, "groups": 0}
    assert not look(put(tmp_path / "watch", with_digest(WATCH_MAGIC, b"\xc1"))).sound


# -- a cold segment ----------------------------------------------------------------------------------------


def test_the_records_of_a_cold_segment_are_read_from_there(data: Path, tmp_path: Path) -> None:
    path = one(data, "seg-0000000000000001-*.data")
    cold = tmp_path / "elsewhere"
    moved = cold / path.relative_to(data)
    put(moved, path.read_bytes())
    path.unlink()
    found = look(path.with_suffix(".idx"))
    assert found.sound and {record.whole for record in found.records} <= {None}
    assert any("cold tier" in note for note in found.notes)
    found = look(path.with_suffix(".idx"), cold_dir=str(cold))
    assert found.sound and all(record.whole for record in found.records if record.bytes)
    assert found.facts["tier"] == "cold"
    moved.write_bytes(moved.read_bytes()[:-1] + b"?")
    found = look(path.with_suffix(".idx"), cold_dir=str(cold))
    assert {trouble.path for trouble in found.problems} == {str(moved)}


# -- damage ------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x41
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["data", "idx", "dict", "sum"])
def test_one_wrong_byte_of_a_sealed_segment_is_found(data: Path, suffix: str) -> None:
    path = next(
        path.with_suffix(f".{suffix}")
        for path in sorted(data.rglob("*.sum"))
        if path.with_suffix(f".{suffix}").exists()
    )
    for at in length.calls(path.stat().st_size, each=4):
        flip(path, at - 1)
        found = look(path)
        assert any(trouble.path == str(path) for trouble in found.problems), at
        flip(path, at - 1)


@pytest.mark.parametrize("pattern", ["snap-*", "intent-*"])
def test_one_wrong_byte_of_a_file_with_a_digest_is_found(tmp_path: Path, pattern: str) -> None:
    path = put(tmp_path / one(GOLDEN, pattern).name, one(GOLDEN, pattern).read_bytes())
    for at in range(path.stat().st_size):
        flip(path, at)
        assert not look(path).sound, at
        flip(path, at)


def test_corruption_in_a_log_is_told_with_its_place(tmp_path: Path) -> None:
    """A synced entry, the last one, the header, and the end."""
    pieces = [file_header(shard=0, number=1, salt=5, capacity=2048)]
    for lsn in range(1, 6):
        body = encode_control(SKIP, 1, 1_700_000_000_000 + lsn, [lsn, 1])
        envelope = encode_envelope(5, lsn, lsn - 1, max(0, lsn - 2), body)
        pieces.append(envelope + bytes(-len(envelope) % 8))
    whole = b"".join(pieces).ljust(2048, b"\0")
    path = put(tmp_path / "wal-0000000000000001.log", whole)
    envelopes = look(path).envelopes
    assert [(envelope.lsn, envelope.frames) for envelope in envelopes] == [
        (n, {"skip": 1}) for n in range(1, 6)
    ]
    flip(path, envelopes[1].offset + 50)
    found = look(path)
    assert [trouble.offset for trouble in found.problems] == [envelopes[1].offset]
    assert "corrupt" in found.problems[0].what
    assert [envelope.lsn for envelope in found.envelopes] == [1, 3, 4, 5]
    path.write_bytes(whole)
    flip(path, envelopes[4].offset + 50)
    found = look(path)
    assert found.sound and f"at byte {envelopes[4].offset}, after LSN 4" in found.notes[0]
    path.write_bytes(whole)
    flip(path, 20)
    found = look(path)
    assert [trouble.offset for trouble in found.problems] == [0]
    assert len(found.envelopes) == 5
    path.write_bytes(whole[:-1])
    found = look(path)
    assert [(trouble.offset, trouble.what) for trouble in found.problems] == [(2047, "is 1 bytes too short")]


def test_an_unknown_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = header(SNAPSHOT_MAGIC, 77) + b"what comes"
    put(tmp_path / "snap-0000000000000001", body + xxh(body))
    head = LOG_MAGIC + (77).to_bytes(4, "little") + bytes(44)
    put(tmp_path / "wal-0000000000000001.log", head + xxh(head) + bytes(100))
    put(tmp_path / "seg-0000000000000001-0.idx", header(b"TPCSIDX\0", 77))
    put(tmp_path / "layout.json", b'{"format":77,"generation":1,"shards":1}')
    for path in sorted(tmp_path.iterdir()):
        assert main(["inspect", str(path)]) == 1
        assert "version 77, which" in capsys.readouterr().out, path


def test_foreign_files_are_no_files_of_topics(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"hello"), ("empty", b""), ("x.bin", bytes(100))):
        found = look(put(tmp_path / name, content))
        assert found.kind == "unknown" and not found.sound
    found = look(put(tmp_path / "wal-0000000000000001.log", b"x" * 200))
    assert found.kind == "log" and not found.sound
    renamed = put(tmp_path / "copy", one(GOLDEN, "wal-*").read_bytes())
    assert look(renamed).kind == "log" and look(renamed).sound
    assert not look(put(tmp_path / "other", one(GOLDEN, "*.data").read_bytes())).sound


def test_a_file_that_was_never_finished_is_no_damage(tmp_path: Path) -> None:
    found = look(put(tmp_path / "wal-0000000000000001.log", bytes(4096)))
    assert found.sound and "never written" in found.notes[0]
    found = look(put(tmp_path / "snap-0000000000000003.tmp", one(GOLDEN, "snap-*3").read_bytes()))
    assert found.sound and "a temporary file" in found.notes[0]


def test_damage_anywhere_is_an_answer(data: Path) -> None:
    rng = random.Random(11)
    files = [path for path in sorted(data.rglob("*")) if path.is_file()]
    files += [put(data / "golden" / path.name, path.read_bytes()) for path in GOLDEN.iterdir()]
    files.append(put(data / "watch", with_digest(WATCH_MAGIC, b"\x92\x91\x91\xa1w\x90")))
    disk = ReadOnlyDisk()
    for number in range(length.pick(short=150, long=5000)):
        path = files[number % len(files)]
        content = path.read_bytes()
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(len(damaged), 4096) or 1)
            damaged[at : at + rng.randint(0, 9)] = rng.choice(
                [rng.randbytes(rng.randint(0, 9)), b"\xff" * 8, bytes(8)]
            )
        if rng.random() < 0.3:
            damaged[-8:] = xxh(bytes(damaged[:-8]))
        path.write_bytes(damaged)
        check_inspection(disk, str(path), rng.choice([None, 3]))
        path.write_bytes(content)


# -- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [[], [""], ["x", "--records", "-1"], ["x", "--records", "1000000"], ["x", "--from-seq", "a"], ["x", "y"]],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    assert main(["inspect", *arguments]) == 2


def test_unreadable_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", Path("/dev/null")):
        assert main(["inspect", str(path)]) == 3
        assert capsys.readouterr().err.startswith("topics inspect: ")


def test_names_that_are_no_text_can_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = os.fsencode(tmp_path) + b"/d\xff\x1b[31m"
    os.mkdir(folder)
    path = os.fsdecode(folder) + "/seg-0000000000000001-0.idx"
    Path(path).write_bytes(b"x")
    for arguments in ([], ["--json"]):
        assert main(["inspect", path, *arguments]) == 1
        assert "\x1b" not in capsys.readouterr().out


def test_a_file_in_the_present_directory(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = one(data, "seg-*.idx")
    monkeypatch.chdir(path.parent)
    assert main(["inspect", path.name]) == 0
