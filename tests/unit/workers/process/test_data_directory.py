"""Goal: a data directory in an unexpected state is refused with a clear error, and nothing in it is changed.

Method: `DataDirectory` over real directories with one thing wrong in each.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.faults import fault
from tests.support.in_process import call
from topics.engine.storage.layout import Layout, encode_layout
from workers import verify
from workers.process.data_directory import DataDirectory
from workers.process.exit_codes import BadConfiguration
from workers.shard.local_store import LocalSegmentStore, claim, read_id

GOOD = {"format": 1, "generation": 1, "shards": 2}
REFUSED = "refused with exit code 2 and the file's name; the file is left as it is"


def text_with(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def text_without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def opened(path: Path) -> DataDirectory:
    return DataDirectory(str(path))


BAD = {
    "format is of a later version": text_with(format=3),
    "format is 0": text_with(format=0),
    "format is not a number": text_with(format="1"),
    "format is missing": text_without("format"),
    "generation is 0": text_with(generation=0),
    "generation is not a number": text_with(generation=None),
    "generation is missing": text_without("generation"),
    "shards is 0": text_with(shards=0),
    "shards is negative": text_with(shards=-2),
    "shards is not a whole number": text_with(shards=1.5),
    "shards is missing": text_without("shards"),
    "is cut short": text_with()[:-5],
    "is empty": b"",
    "is full of zeros": bytes(64),
    "is not UTF-8": text_with().replace(b"format", b"form\xff\xfe"),
    "is another kind of JSON": b"[1,1,2]",
}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(text, id=what, marks=fault("layout", f"layout.json: {what}", REFUSED))
        for what, text in BAD.items()
    ],
)
def test_bad_layout(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_bytes(content)
    directory = opened(tmp_path)
    try:
        with pytest.raises(BadConfiguration, match=r"layout\.json"):
            directory.layout(4)
    finally:
        directory.close()
    assert (tmp_path / "layout.json").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LOCK", "layout.json"]


@fault("layout", "a directory stands in place of layout.json", REFUSED)
def test_directory_in_place_of_the_layout(tmp_path: Path) -> None:
    (tmp_path / "layout.json").mkdir()
    directory = opened(tmp_path)
    try:
        with pytest.raises(BadConfiguration, match=r"layout\.json"):
            directory.layout(4)
    finally:
        directory.close()


@fault(
    "layout",
    "a half-written layout.json of a killed start is left behind",
    "it is not read; the start goes on",
)
def test_leftover_of_a_layout(tmp_path: Path) -> None:
    (tmp_path / ".layout.json.4711.new").write_bytes(b'{"format":1,"gen')
    directory = opened(tmp_path)
    try:
        assert directory.layout(4).shards == 4
        assert directory.layout(1).shards == 4
    finally:
        directory.close()


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(
            what,
            name,
            marks=fault("data directory", what, "refused with exit code 2 and the directory's name"),
        )
        for what, name in {
            "the path of the data directory is a file": ".",
            "LOCK is a directory": "LOCK",
        }.items()
    ],
)
def test_directory_that_is_none(what: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    if name == ".":
        path.write_text("a file")
    else:
        (path / name).mkdir(parents=True)
    with pytest.raises(BadConfiguration, match=f"cannot use the data directory {path}"):
        opened(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"/nowhere/at/all\n", id="nowhere"),
        pytest.param(b"../../elsewhere\n", id="relative"),
        pytest.param(b"\xff\xfe\x80/caf\xe9\n", id="not ASCII"),
        pytest.param(b"/tmp/topics-run-\0\n", id="NUL"),
        pytest.param(b"x" * 100_000, id="huge"),
    ],
)
@fault(
    "data directory",
    "the note of the directory for sockets is empty, names nothing or is not text",
    "a new directory is made and noted",
)
def test_note_of_the_run_directory(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "RUN").write_bytes(content)
    directory = opened(tmp_path)
    try:
        made = directory.make_run_dir()
        assert (tmp_path / "RUN").read_text().strip() == str(made)
        directory.remove_run_dir(made)
        assert not made.exists()
    finally:
        directory.close()


@fault(
    "data directory",
    "LOCK of a server that was killed is left behind",
    "it holds nobody up: the lock went with the process",
)
def test_stale_lock_file(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("4711\n")
    opened(tmp_path).close()


@fault("data directory", "a directory has the name RUN", "the server runs without the note")
def test_directory_in_place_of_the_note(tmp_path: Path) -> None:
    (tmp_path / "RUN").mkdir()
    directory = opened(tmp_path)
    try:
        made = directory.make_run_dir()
        assert made.is_dir()
        directory.remove_run_dir(made)
        assert not made.exists()
    finally:
        directory.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"caf\xe9\xff\n", b"0" * 31 + b"\n", b"0" * 100_000, None],
    ids=["empty", "not ASCII", "short", "huge", "a directory"],
)
@pytest.mark.parametrize("tier", ["data", "cold"])
@fault(
    "data directory",
    "cold-id of either tier is empty, not text, too long or a directory",
    "the file is named with what to do; a server goes on without the cold tier, and verify refuses",
)
def test_bad_cold_id(tier: str, content: bytes | None, tmp_path: Path) -> None:
    data, cold = tmp_path / "data", tmp_path / "cold"
    data.mkdir()
    identity = claim(str(data), str(cold))
    path = tmp_path / tier / "cold-id"
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    wanted = f"{path} does not contain an id of 32 hexadecimal digits"
    with pytest.raises(OSError, match=wanted):
        read_id(str(tmp_path / tier))
    if tier == "data":
        with pytest.raises(OSError, match=wanted):
            claim(str(data), str(cold))
    else:
        with pytest.raises(OSError, match=wanted):
            LocalSegmentStore(str(cold), identity=identity).check()
    (data / "layout.json").write_bytes(encode_layout(Layout.of(1, 1)))
    done = call(verify.main, data, "--cold-dir", cold)
    assert done.returncode == 3
    assert wanted in done.stderr
