"""Shared parts of the commands: arguments, exit codes, error messages."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from spark_pipeline.java import NoJava
from spark_pipeline.jobs.consolidate import JobFailed
from spark_pipeline.jobs.engines import Engine, LocalEngine, SparkEngine, TaskFailed, use_idle_priority
from spark_pipeline.offline import CannotStart, InUse, private_server
from spark_pipeline.session import MEMORY, NoSpark, session
from spark_pipeline.tasks.manifest import FilesGone, NoManifest
from spark_pipeline.tasks.names import ALL_TOPICS
from spark_pipeline.tasks.server import TOKEN_ENV, Refused, Server, Unreachable
from topics.api.errors import TopicsError
from topics.cli.formatting import printable

OK, DAMAGED, USAGE, CANNOT, LATER, INTERRUPTED = 0, 1, 2, 3, 4, 130
DEFAULT_URL = "http://127.0.0.1:4000"
LATER_CODES = frozenset({"plan_leased", "throttled"})  # temporary errors of the server

EXIT_CODES = """\
exit codes: 0 success, or nothing to do; 1 something is damaged, or could not be merged or exported; 2 wrong arguments;
3 no Java, Spark, server or data; 4 another job is running or the data has changed: run it again later
"""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_SHARED_ENGINE: ContextVar[Engine | None] = ContextVar("shared engine", default=None)
_CANNOT = (NoJava, NoSpark, NoManifest, Unreachable, JobFailed, TaskFailed, CannotStart, ValueError)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"topics-spark {command}",
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_server(parser: argparse.ArgumentParser, *, default: str | None = None, fallback: str = "") -> None:
    url = os.environ.get("TOPICS_URL") or default
    fallback = fallback or (f", or {default}" if default else "")
    parser.add_argument("--url", default=url, help=f"URL of the server [$TOPICS_URL{fallback}]")
    parser.add_argument(
        "--token-env",
        metavar="name",
        default=TOKEN_ENV,
        help=f"environment variable with the API key [{TOKEN_ENV}]",
    )


def add_topics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topics",
        metavar="topic",
        nargs="*",
        default=[ALL_TOPICS],
        help="name of a topic, or a pattern like 'orders.*' or 'orders.>' [all]",
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """Options for a server, or for a cold directory without one."""
    parser.add_argument(
        "--cold-dir",
        metavar="path",
        default=os.environ.get("TOPICS_COLD_DIR") or "",
        help="cold directory; without a server, its manifests are used [$TOPICS_COLD_DIR]",
    )
    add_server(parser, fallback=f"; {DEFAULT_URL} without --cold-dir")


def default_place(arguments: argparse.Namespace) -> None:
    """Default to the server of this machine if neither a server nor a directory is given."""
    if not arguments.url and not arguments.cold_dir and not arguments.offline:
        arguments.url = DEFAULT_URL


def add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offline",
        metavar="dir",
        default="",
        help="data directory of a stopped server; a temporary server is started for this job",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("spark", "local"), default="spark", help="Spark, or local processes [spark]"
    )
    parser.add_argument("--master", default="local[*]", help="Spark master [local[*]]")
    parser.add_argument("--memory", default=MEMORY, help=f"memory of Spark's driver [{MEMORY}]")
    parser.add_argument(
        "--workers",
        metavar="n",
        type=count,
        default=0,
        help="number of processes for --engine local [number of CPUs]",
    )
    parser.add_argument("--idle", action="store_true", help="run with idle CPU priority")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result and the progress as JSON")


def size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512MiB or 1g")
    return int(float(match[1]) * (1 << _UNITS[match[2].lower()]))


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return found


@contextmanager
def engine_of(arguments: argparse.Namespace) -> Iterator[Engine]:
    """The engine given by the arguments, closed afterwards; or the one of `use_engine`, which stays open."""
    shared = _SHARED_ENGINE.get()
    if shared is not None:
        yield shared
        return
    if arguments.idle:
        use_idle_priority()
    engine: Engine
    if arguments.engine == "local":
        engine = LocalEngine(arguments.workers)
    else:
        started = session(arguments.master, memory=arguments.memory, only_tasks=True)
        engine = SparkEngine(started, stop_session=True)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def use_engine(engine: Engine) -> Iterator[None]:
    """Make commands use this engine, whatever their arguments say: one session for many jobs."""
    token = _SHARED_ENGINE.set(engine)
    try:
        yield
    finally:
        _SHARED_ENGINE.reset(token)


@contextmanager
def _offline_server(arguments: argparse.Namespace) -> Iterator[None]:
    """With --offline, start a temporary server and use it."""
    if not getattr(arguments, "offline", ""):
        yield
        return
    cold_dir = arguments.cold_dir or os.environ.get("TOPICS_COLD_DIR") or ""
    with private_server(arguments.offline, cold_dir) as server:
        arguments.url, arguments.token_env = server.url, server.token_env
        yield


def server_of(arguments: argparse.Namespace) -> Server:
    def print_note(text: str) -> None:
        print(f"topics-spark: {printable(text)}", file=sys.stderr, flush=True)

    return Server(arguments.url, arguments.token_env, on_wait=print_note)


def execute(command: str, arguments: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Run a command. Errors become one line on stderr and an exit code."""
    try:
        with _offline_server(arguments):
            return work(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has closed it. Avoid a second error when Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (InUse, FilesGone) as error:
        print(f"topics-spark {command}: {printable(str(error))}", file=sys.stderr)
        return LATER
    except _CANNOT as error:
        message = str(error)
    except Refused as error:
        message = f"the server refused: {error}" + (f" ({error.code})" if error.code else "")
        if error.code in LATER_CODES:
            print(f"topics-spark {command}: {printable(message)}", file=sys.stderr)
            return LATER
    except TopicsError as error:
        message = str(error)
        print(f"topics-spark {command}: {printable(message)}", file=sys.stderr)
        return DAMAGED
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"topics-spark {command}: {printable(message)}", file=sys.stderr)
    return CANNOT
