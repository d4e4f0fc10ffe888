"""`topics-spark doctor`: whether Spark works here, whether the data can be reached, and what to do where not."""

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

GOOD, BAD, LEFT_OUT = "ok", "failed", "skipped"

SIGNS = {GOOD: "ok     ", BAD: "FAILED ", LEFT_OUT: "skipped"}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: str
    said: str
    advice: str = ""
    took_ms: int = 0


class Failed(Exception):
    def __init__(self, said: str, advice: str) -> None:
        super().__init__(said)
        self.advice = advice


def main(argv: Sequence[str]) -> int:
    parser = parser_of("doctor", "Checks Java, Spark and the way to the data, and runs a small job.")
    add_server(parser)
    parser.add_argument(
        "--cold-dir",
        metavar="path",
        default=os.environ.get("TOPICS_COLD_DIR") or "",
        help="[$TOPICS_COLD_DIR]",
    )
    parser.add_argument("--master", default="local[2]", help="where Spark runs [local[2]]")
    parser.add_argument("--memory", default=MEMORY, help=f"of Spark's driver [{MEMORY}]")
    parser.add_argument("--no-spark", action="store_true", help="start no session")
    add_output(parser)
    arguments = parser.parse_args(argv)
    found: list[Check] = []
    for check in Doctor(arguments).checks():
        found.append(check)
        if not arguments.json:
            _print(check)
    well = all(check.state != BAD for check in found)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode({"ok": well, "checks": found})).decode())
    else:
        print("all is well" if well else "something is missing; see above", file=sys.stdout)
    return OK if well else CANNOT


def _print(check: Check) -> None:
    print(f"{SIGNS[check.state]}  {check.name:8}  {printable(check.said)}", flush=True)
    if check.advice:
        print(f"{'':19}→ {printable(check.advice)}", flush=True)


class Doctor:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._session: Any = None

    def checks(self) -> Iterator[Check]:
        """One after the other; those that need one that failed are left out."""
        java = _timed("java", self._java)
        yield java
        packages = _timed("packages", self._packages)
        yield packages
        if self._arguments.no_spark:
            yield Check("spark", LEFT_OUT, "not asked for")
        elif BAD in {java.state, packages.state}:
            yield Check("spark", LEFT_OUT, "needs Java and the packages")
        else:
            try:
                started = _timed("spark", self._spark)
                yield started
                if started.state == GOOD:
                    yield _timed("job", self._job)
            finally:
                if self._session is not None:
                    self._session.stop()
        if self._arguments.cold_dir:
            yield _timed("files", self._files)
        else:
            yield Check(
                "files", LEFT_OUT, "no --cold-dir", "give the server's TOPICS_COLD_DIR to check the way to it"
            )
        if self._arguments.url:
            yield _timed("server", self._server)
        else:
            yield Check("server", LEFT_OUT, "no --url", "give the server's address to check the way to it")

    def _java(self) -> str:
        try:
            found = find_java()
        except NoJava as error:
            raise Failed("there is no Java that Spark can use", str(error)) from error
        return f"Java {found.version} from {found.origin}, {found.home}"

    def _packages(self) -> str:
        told = []
        for name in ("pyspark", "pyarrow"):
            try:
                told.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                raise Failed(f"{name} is not installed", install_command("spark")) from None
        if not told[0].startswith("pyspark 4.3."):
            raise Failed(f"{told[0]} is not the version that is supported", install_command("spark"))
        return ", ".join(told)

    def _spark(self) -> str:
        try:
            self._session = session(
                self._arguments.master,
                memory=self._arguments.memory,
                app="topics-spark doctor",
                only_tasks=True,
            )
        except (NoJava, NoSpark) as error:
            raise Failed("no session", str(error)) from error
        except Exception as error:
            advice = "is there memory for it (--memory)? With another --master: can it be reached from here?"
            raise Failed(f"no session: {_first_line(error)}", advice) from error
        return f"Spark {self._session.version} on {self._arguments.master}"

    def _job(self) -> str:
        """A file by the JVM, and something by its Python workers, which must find the same modules as we do."""
        try:
            with tempfile.TemporaryDirectory(prefix="topics-spark-doctor-") as folder:
                frame = self._session.range(1000).selectExpr("id", "cast(id as string) as text")
                frame.write.parquet(f"{folder}/rows")
                count = self._session.read.parquet(f"{folder}/rows").count()
            workers = self._session.sparkContext.parallelize(range(2), 2).map(_who).collect()
        except Exception as error:
            advice = "the workers' Python needs the same packages; PYSPARK_PYTHON says which Python they are"
            if is_noexec("/tmp"):
                advice = "/tmp is mounted noexec, and Java loads the libraries that it unpacks there: mount it with exec"
            raise Failed(f"a small job failed: {_first_line(error)}", advice) from error
        if count != 1000:
            raise Failed(f"1000 rows were written and {count} came back", "this is a bug, or a broken disk")
        mine = topics.__version__
        others = {version for _, version in workers} - {mine}
        if others:
            raise Failed(
                f"workers have topics {', '.join(others)}, and this is {mine}",
                "install the same version there",
            )
        return f"1000 rows written and read, workers on Python {workers[0][0]}"

    def _files(self) -> str:
        folder = self._arguments.cold_dir
        if os.path.isfile(os.path.join(folder, COLD_ID_NAME)) and not os.path.exists(
            os.path.join(folder, "topics")
        ):
            return f"{folder} is a server's, and nothing has moved there yet"
        try:
            topics = list(topics_in(folder))
        except (NoManifest, TopicsError) as error:
            raise Failed(str(error), "is this the server's TOPICS_COLD_DIR, and is it mounted?") from error
        except PermissionError as error:
            raise Failed(
                f"{error.filename} may not be read", "run this as the server's user, or one of its group"
            ) from error
        segments = sum(len(topic.manifest.segments) for topic in topics)
        staging = os.path.join(folder, "staging", "plans")
        if os.path.isdir(staging) and not os.access(staging, os.W_OK | os.X_OK):
            raise Failed(f"{staging} may not be written", "merges write there: run them as a user who may")
        return f"{len(topics)} topics with {segments} segments in {folder}"

    def _server(self) -> str:
        try:
            server = server_of(self._arguments)
            server.patience_s = 3.0
            topics = server.topics()
        except ValueError as error:
            raise Failed(str(error), "give an address like http://127.0.0.1:4000") from error
        except Unreachable as error:
            raise Failed(str(error), "is the server running, and this its address?") from error
        except Refused as error:
            advice = f"put a key with the scopes read and admin into {self._arguments.token_env}"
            raise Failed(f"{error} ({error.status})", advice if error.status in {401, 403} else "") from error
        if not topics:
            return f"{server.url} answers; it has no topics yet"
        return f"{server.url} answers; it shows {len(topics)} topics. {self._may_merge(server, topics[0]['topic'])}"

    def _may_merge(self, server: Any, topic: str) -> str:
        try:
            server.get(server.topic(topic, "/consolidation"))
        except Refused as error:
            if error.code == "no_cold_tier":
                return "It has no cold tier, so there is nothing to merge"
            raise Failed(f"{error} ({error.status})", "merging needs a key with the scope admin") from error
        return "Merges may be asked for"


def _who(_: int) -> tuple[str, str]:
    import spark_pipeline.tasks.merge as _needed  # noqa: F401

    return sys.version.split()[0], topics.__version__


def _timed(name: str, check: Callable[[], str]) -> Check:
    began = time.monotonic()
    try:
        said, state, advice = check(), GOOD, ""
    except Failed as error:
        said, state, advice = str(error), BAD, error.advice
    return Check(name, state, said, advice, round((time.monotonic() - began) * 1000))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[
        :300
    ]
