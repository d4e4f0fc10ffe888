"""Runs a target on inputs with limits on CPU time and memory, and saves the input of a failure.

This module knows nothing about targets. `Target.run` takes bytes; any exception that it raises is a failure.
The limits count CPU time and peak memory, so a busy machine causes no failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.mutate import Mutator

CORPUS = Path(__file__).parent / "corpus"
DEADLINE_S = 5.0  # of CPU time for one input of a few KiB: a thousand times what it needs
PEAK_BYTES_MAX = 96 << 20  # by which one input may raise the peak memory of the process
ADDRESS_BYTES_MAX = 1 << 30  # of address space beyond the current size; a length field of 2^60 needs more
GROWTH_BYTES_MAX = 192 << 20  # of the peak, over one run of thousands of inputs


@dataclass(frozen=True)
class Target:
    """Something that takes bytes. `seeds` makes valid inputs to start from, `tokens` are words of its format."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    tokens: tuple[bytes, ...] = ()
    rounds: int = 200  # inputs in a normal run; about two seconds


class Hang(BaseException):
    """Not an Exception, so that no handler of the product catches it."""


class Failed(AssertionError):
    """An input failed; the message says how to replay it."""


class Errors(logging.Handler):
    """Collects errors that the product logs: for input from outside these are failures, too."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self.found.append(text)


@contextlib.contextmanager
def logged_errors() -> Iterator[list[str]]:
    """The errors logged inside the block, which do not appear in the test's output."""
    handler = Errors()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler.found
    finally:
        root.removeHandler(handler)


@contextlib.contextmanager
def deadline(seconds: float = DEADLINE_S) -> Iterator[None]:
    """Raise Hang after this much CPU time. Not by SIGALRM, which pytest and libFuzzer use."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"still busy after {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Limit the address space, so that a huge allocation fails at once although its pages are never touched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_BYTES_MAX, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_one(target: Target, data: bytes) -> None:
    """Run one input with all limits; Failed names the file with the input."""
    peak = peak_bytes()
    try:
        with deadline():
            target.run(data)
        grown = peak_bytes() - peak
        assert grown <= PEAK_BYTES_MAX, f"{grown >> 20} MiB for an input of {len(data)} bytes"
    except (Exception, Hang) as error:
        raise Failed(f"{target.name}: {error!r}\n{_how_to_replay(target, data)}") from error


def _how_to_replay(target: Target, data: bytes) -> str:
    name = f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path = Path(tempfile.gettempdir()) / f"topics-fuzz-{name}"
    path.write_bytes(data)
    shown = repr(data if len(data) <= 400 else data[:400] + b"...")
    return f"input: {shown}\nsee it again: scripts/fuzz --target {target.name} --replay {path}"


def run_all(target: Target, inputs: Iterable[bytes]) -> int:
    """Run every input with all limits, and limit the growth of memory over all of them; returns their number."""
    count = 0
    with bounded_memory():
        peak = peak_bytes()
        for data in inputs:
            run_one(target, data)
            count += 1
        grown = peak_bytes() - peak
    assert grown <= GROWTH_BYTES_MAX, f"{target.name}: {grown >> 20} MiB more after {count} inputs"
    return count


def corpus_of(target: Target) -> dict[str, bytes]:
    """The stored inputs by name: those that once failed, and those that add coverage."""
    folder = CORPUS / target.name
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def starting_points(target: Target) -> list[bytes]:
    return [*target.seeds(), *corpus_of(target).values()]


def mutations(
    target: Target, seed: int, *, count: int | None = None, seconds: float | None = None
) -> Iterator[bytes]:
    """Mutations from one seed: a number of them, or for some time."""
    mutator = Mutator(seed, starting_points(target), target.tokens)
    end = None if seconds is None else time.monotonic() + seconds
    made = 0
    while (count is None or made < count) and (end is None or time.monotonic() < end):
        yield mutator.next()
        made += 1
