"""Tests of small files that are damaged in every way: they are refused, and reading them takes bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

from tests.support.in_process import Done

HUGE = 300 << 20
MEMORY_MAX = 64 << 20

DAMAGE: dict[str, bytes | None] = {
    "empty": b"",
    "not UTF-8": b'{"current":"\xff","jobs":{"\xff":3},"topics":{"\xff":3}}',
    "nested deeply": b'{"x":' + b"[" * 100_000,
    "arrays nested deeply": b"[" * 100_000,
    "TOML nested deeply": b"x=" + b"[" * 100_000,
    "a number with 5000 digits": b"x=" + b"9" * 5000,
    "a list": b"[]",
    "wrong types": b'{"servers":3,"jobs":3,"topics":[],"wanted":"","format":"1","shards":[]}',
    "a directory": None,
    "a dangling link": None,
    "a link to itself": None,
    "300 MiB": None,
}


def put(path: Path, what: str) -> None:
    content = DAMAGE[what]
    if content is not None:
        path.write_bytes(content)
    elif what == "a directory":
        path.mkdir()
    elif what == "300 MiB":
        with path.open("wb") as file:
            file.truncate(HUGE)
    else:
        path.symlink_to(path if what == "a link to itself" else path.with_name("nothing"))
    if not path.is_symlink():
        path.chmod(0o700 if path.is_dir() else 0o600)


def one_line(done: Done, path: Path, code: int) -> None:
    assert done.returncode == code, done
    (line,) = done.stderr.strip().splitlines()
    assert path.name in line


def check(read: Callable[[Path, str], None], name: str, tmp_path: Path) -> None:
    """Replace the file by every kind of damage and read it, in bounded memory."""
    for number, what in enumerate(DAMAGE):
        folder = tmp_path / str(number) / "folder"
        folder.mkdir(parents=True)
        put(folder / name, what)
        tracemalloc.start()
        try:
            read(folder / name, what)
            _, peak = tracemalloc.get_traced_memory()
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
        finally:
            tracemalloc.stop()
        assert peak < MEMORY_MAX, what
