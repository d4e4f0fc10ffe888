"""`topics-spark doctor`: checks whether Spark works and the data is accessible, with advice for each failure."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import topics
from spark_pipeline.cli.arguments import CANNOT, OK, add_output, add_server, parser_of, server_of
from spark_pipeline.java import NoJava, find_java, is_noexec
from spark_pipeline.session import MEMORY, NoSpark, session
from spark_pipeline.tasks.manifest import NoManifest, topics_in
from spark_pipeline.tasks.server import Refused, Unreachable
from topics.api.errors import TopicsError
from topics.cli.formatting import printable
from topics.engine.storage.layout import COLD_ID_NAME
from topics.system.extras import install_command

PASSED, FAILED, SKIPPED = "ok", "failed", "skipped"

LABELS = {PASSED: "ok     ", FAILED: "FAILED ", SKIPPED: "skipped"}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: str
    said: str
    advice: str = ""
    took_ms: int = 0


class CheckFailed(Exception):
    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def main(argv: Sequence[str]) -> int:
    parser = parser_of("doctor", "Check Java, Spark, the server and the cold directory, and run a small job.")
    add_server(parser)
    parser.add_argument(
        "--cold-dir",
        metavar="path",
        default=os.environ.get("TOPICS_COLD_DIR") or "",
        help="cold directory [$TOPICS_COLD_DIR]",
    )
    parser.add_argument("--master", default="local[2]", help="Spark master [local[2]]")
    parser.add_argument("--memory", default=MEMORY, help=f"memory of Spark's driver [{MEMORY}]")
    parser.add_argument("--no-spark", action="store_true", help="do not start a Spark session")
    add_output(parser)
    arguments = parser.parse_args(argv)
    checks: list[Check] = []
    for check in Doctor(arguments).checks():
        checks.append(check)
        if not arguments.json:
            _print(check)
    ok = all(check.state != FAILED for check in checks)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode({"ok": ok, "checks": checks})).decode())
    else:
        print("all checks passed" if ok else "some checks failed; see above", file=sys.stdout)
    return OK if ok else CANNOT


def _print(check: Check) -> None:
    print(f"{LABELS[check.state]}  {check.name:8}  {printable(check.said)}", flush=True)
    if check.advice:
        print(f"{'':19}→ {printable(check.advice)}", flush=True)


class Doctor:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._session: Any = None

    def checks(self) -> Iterator[Check]:
        """Run the checks in order; those that depend on a failed one are skipped."""
        java = _timed("java", self._java)
        yield java
        packages = _timed("packages", self._packages)
        yield packages
        if self._arguments.no_spark:
            yield Check("spark", SKIPPED, "--no-spark was given")
        elif FAILED in {java.state, packages.state}:
            yield Check("spark", SKIPPED, "needs Java and the packages")
        else:
            try:
                started = _timed("spark", self._spark)
                yield started
                if started.state == PASSED:
                    yield _timed("job", self._job)
            finally:
                if self._session is not None:
                    self._session.stop()
        if self._arguments.cold_dir:
            yield _timed("files", self._files)
        else:
            yield Check(
                "files", SKIPPED, "no --cold-dir", "give the server's TOPICS_COLD_DIR to check access to it"
            )
        if self._arguments.url:
            yield _timed("server", self._server)
        else:
            yield Check("server", SKIPPED, "no --url", "give the server's URL to check access to it")

    def _java(self) -> str:
        try:
            found = find_java()
        except NoJava as error:
            raise CheckFailed("no Java that Spark can use", str(error)) from error
        return f"Java {found.version} from {found.origin}, {found.home}"

    def _packages(self) -> str:
        versions = []
        for name in ("pyspark", "pyarrow"):
            try:
                versions.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                raise CheckFailed(f"{name} is not installed", install_command("spark")) from None
        if not versions[0].startswith("pyspark 4.3."):
            raise CheckFailed(f"{versions[0]} is not supported", install_command("spark"))
        return ", ".join(versions)

    def _spark(self) -> str:
        try:
            self._session = session(
                self._arguments.master,
                memory=self._arguments.memory,
                app="topics-spark doctor",
                only_tasks=True,
            )
        except (NoJava, NoSpark) as error:
            raise CheckFailed("no session", str(error)) from error
        except Exception as error:
            advice = "is there enough memory (--memory)? Is the --master reachable from here?"
            raise CheckFailed(f"no session: {_first_line(error)}", advice) from error
        return f"Spark {self._session.version} on {self._arguments.master}"

    def _job(self) -> str:
        """Write a file with the JVM, and run Python workers, which must find the same modules as this process."""
        try:
            with tempfile.TemporaryDirectory(prefix="topics-spark-doctor-") as folder:
                frame = self._session.range(1000).selectExpr("id", "cast(id as string) as text")
                frame.write.parquet(f"{folder}/rows")
                count = self._session.read.parquet(f"{folder}/rows").count()
            workers = self._session.sparkContext.parallelize(range(2), 2).map(_versions).collect()
        except Exception as error:
            advice = "the workers' Python needs the same packages; PYSPARK_PYTHON selects it"
            if is_noexec("/tmp"):
                advice = "/tmp is mounted noexec, but Java unpacks libraries there and loads them: mount it with exec"
            raise CheckFailed(f"a small job failed: {_first_line(error)}", advice) from error
        if count != 1000:
            raise CheckFailed(
                f"1000 rows were written, but {count} were read", "this is a bug, or a broken disk"
            )
        mine = topics.__version__
        others = {version for _, version in workers} - {mine}
        if others:
            raise CheckFailed(
                f"workers have topics {', '.join(others)}, but this is {mine}",
                "install the same version there",
            )
        return f"1000 rows written and read, workers on Python {workers[0][0]}"

    def _files(self) -> str:
        folder = self._arguments.cold_dir
        if os.path.isfile(os.path.join(folder, COLD_ID_NAME)) and not os.path.exists(
            os.path.join(folder, "topics")
        ):
            return f"{folder} is a cold directory without any segments yet"
        try:
            topics = list(topics_in(folder))
        except (NoManifest, TopicsError) as error:
            raise CheckFailed(
                str(error), "is this the server's TOPICS_COLD_DIR, and is it mounted?"
            ) from error
        except PermissionError as error:
            raise CheckFailed(
                f"no permission to read {error.filename}", "run this as the server's user or group"
            ) from error
        segments = sum(len(topic.manifest.segments) for topic in topics)
        staging = os.path.join(folder, "staging", "plans")
        if os.path.isdir(staging) and not os.access(staging, os.W_OK | os.X_OK):
            raise CheckFailed(
                f"no permission to write to {staging}", "run merges as a user with write access to it"
            )
        return f"{len(topics)} topics with {segments} segments in {folder}"

    def _server(self) -> str:
        try:
            server = server_of(self._arguments)
            server.patience_s = 3.0
            topics = server.topics()
        except ValueError as error:
            raise CheckFailed(str(error), "give a URL like http://127.0.0.1:4000") from error
        except Unreachable as error:
            raise CheckFailed(str(error), "is the server running, and is this its address?") from error
        except Refused as error:
            advice = f"set {self._arguments.token_env} to a key with the scopes read and admin"
            raise CheckFailed(
                f"{error} ({error.status})", advice if error.status in {401, 403} else ""
            ) from error
        if not topics:
            return f"{server.url} is reachable; it has no topics yet"
        merges = self._check_merges(server, topics[0]["topic"])
        return f"{server.url} is reachable and has {len(topics)} topics; {merges}"

    def _check_merges(self, server: Any, topic: str) -> str:
        try:
            server.get(server.topic(topic, "/consolidation"))
        except Refused as error:
            if error.code == "no_cold_tier":
                return "it has no cold tier, so there is nothing to merge"
            raise CheckFailed(
                f"{error} ({error.status})", "merging needs a key with the scope admin"
            ) from error
        return "merging is allowed"


def _versions(_: int) -> tuple[str, str]:
    import spark_pipeline.tasks.merge as _needed  # noqa: F401

    return sys.version.split()[0], topics.__version__


def _timed(name: str, check: Callable[[], str]) -> Check:
    began = time.monotonic()
    try:
        said, state, advice = check(), PASSED, ""
    except CheckFailed as error:
        said, state, advice = str(error), FAILED, error.advice
    return Check(name, state, said, advice, round((time.monotonic() - began) * 1000))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[
        :300
    ]
