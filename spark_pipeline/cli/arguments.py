"""What the commands have in common: arguments, exit codes, and how an error is told."""

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
from spark_pipeline.jobs.engines import Engine, LocalEngine, SparkEngine, TaskFailed, be_idle
from spark_pipeline.offline import CannotStart, InUse, private_server
from spark_pipeline.session import MEMORY, NoSpark, session
from spark_pipeline.tasks.manifest import FilesGone, NoManifest
from spark_pipeline.tasks.names import ALL_TOPICS
from spark_pipeline.tasks.server import TOKEN_ENV, Refused, Server, Unreachable
from topics.api.errors import TopicsError
from topics.cli.formatting import printable

OK, DAMAGED, USAGE, CANNOT, LATER, INTERRUPTED = 0, 1, 2, 3, 4, 130
DEFAULT_URL = "http://127.0.0.1:4000"
LATER_CODES = frozenset({"plan_leased", "throttled"})  # of refusals that pass by themselves

EXIT_CODES = """\
exit codes: 0 done, or there was nothing to do; 1 something is damaged, or could not be merged or exported; 2 wrong arguments;
3 no Java, Spark, server or data; 4 somebody else is at it or the data has changed, so run it again later
"""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_LENT: ContextVar[Engine | None] = ContextVar("lent engine", default=None)
_CANNOT = (NoJava, NoSpark, NoManifest, Unreachable, JobFailed, TaskFailed, CannotStart, ValueError)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"topics-spark {command}",
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_server(parser: argparse.ArgumentParser, *, default: str | None = None, otherwise: str = "") -> None:
    found = os.environ.get("TOPICS_URL") or default
    otherwise = otherwise or (f", or {default}" if default else "")
    parser.add_argument("--url", default=found, help=f"the server [$TOPICS_URL{otherwise}]")
    parser.add_argument(
        "--token-env",
        metavar="name",
        default=TOKEN_ENV,
        help=f"the variable that holds the key [{TOKEN_ENV}]",
    )


def add_topics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topics",
        metavar="topic",
        nargs="*",
        default=[ALL_TOPICS],
        help="a name, or a pattern like 'orders.*' or 'orders.>' [all]",
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """A server, or the cold directory alone."""
    parser.add_argument(
        "--cold-dir",
        metavar="path",
        default=os.environ.get("TOPICS_COLD_DIR") or "",
        help="the cold directory; without a server as its manifests have it [$TOPICS_COLD_DIR]",
    )
    add_server(parser, otherwise=f"; {DEFAULT_URL} where --cold-dir is missing, too")


def place_of(arguments: argparse.Namespace) -> None:
    """Without any word on where to look it is the server of this machine, as for all commands."""
    if not arguments.url and not arguments.cold_dir and not arguments.offline:
        arguments.url = DEFAULT_URL


def add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offline",
        metavar="dir",
        default="",
        help="the data directory of a server that does not run: one is started for this job alone, and stopped again",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("spark", "local"), default="spark", help="who does the work [spark]"
    )
    parser.add_argument("--master", default="local[*]", help="where Spark runs [local[*]]")
    parser.add_argument("--memory", default=MEMORY, help=f"of Spark's driver [{MEMORY}]")
    parser.add_argument(
        "--workers", metavar="n", type=count, default=0, help="processes of --engine local [cores]"
    )
    parser.add_argument(
        "--idle", action="store_true", help="take only processor time that nobody else on this machine wants"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result, and each step, as JSON")


def size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; one looks like 512MiB or 1g")
    return int(float(match[1]) * (1 << _UNITS[match[2].lower()]))


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of them; the least is 1")
    return int(text)


def share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; one lies between 0 and 1")
    return found


@contextmanager
def engine_of(arguments: argparse.Namespace) -> Iterator[Engine]:
    """The engine that was asked for, and its session of Spark's is ended with it; or the one that was lent, which stays."""
    lent = _LENT.get()
    if lent is not None:
        yield lent
        return
    if arguments.idle:
        be_idle()
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
def lending(engine: Engine) -> Iterator[None]:
    """Commands that run inside of this use the engine, whatever their arguments say: one session for many jobs."""
    token = _LENT.set(engine)
    try:
        yield
    finally:
        _LENT.reset(token)


@contextmanager
def _reached(arguments: argparse.Namespace) -> Iterator[None]:
    """With --offline, the server that is started for the job is the one that it talks to."""
    if not getattr(arguments, "offline", ""):
        yield
        return
    cold_dir = arguments.cold_dir or os.environ.get("TOPICS_COLD_DIR") or ""
    with private_server(arguments.offline, cold_dir) as private:
        arguments.url, arguments.token_env = private.url, private.token_env
        yield


def server_of(arguments: argparse.Namespace) -> Server:
    def say(text: str) -> None:
        print(f"topics-spark: {printable(text)}", file=sys.stderr, flush=True)

    return Server(arguments.url, arguments.token_env, on_wait=say)


def told(command: str, arguments: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Run a command; what keeps it from its work is one line on stderr, and an exit code."""
    try:
        with _reached(arguments):
            return work(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has seen enough; Python must not complain of it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (InUse, FilesGone) as error:
        print(f"topics-spark {command}: {printable(str(error))}", file=sys.stderr)
        return LATER
    except _CANNOT as error:
        said = str(error)
    except Refused as error:
        said = f"the server says: {error}" + (f" ({error.code})" if error.code else "")
        if error.code in LATER_CODES:
            print(f"topics-spark {command}: {printable(said)}", file=sys.stderr)
            return LATER
    except TopicsError as error:
        said = str(error)
        print(f"topics-spark {command}: {printable(said)}", file=sys.stderr)
        return DAMAGED
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"topics-spark {command}: {printable(said)}", file=sys.stderr)
    return CANNOT
