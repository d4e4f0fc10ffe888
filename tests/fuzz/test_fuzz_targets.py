"""Goal: no input, wherever it comes from, crashes a process, changes a record, or gets an answer outside the contract.

Method: each target runs its stored inputs, mutations of valid inputs from a fixed seed, and some
mutations from the seed of the run, which `--long` draws anew. What each target checks is described in its module. A failure writes its input to a file
and prints the command that replays it.
"""

from __future__ import annotations

import pytest

from tests.fuzz.runner import corpus_of, mutations, run_all, starting_points
from tests.fuzz.targets import TARGETS
from tests.support import length
from tests.support.faults import fault
from tests.support.length import pick

FRESH_S = pick(short=3, long=100) / 10
SHARE = pick(short=8, long=1)  # of the rounds that a target asks for
SEED = 20_24

_FAULTS = {
    "http1": [
        fault(
            "client",
            "arbitrary bytes on a connection",
            "a contract error, a proper answer or a clean close; never a 500",
        ),
        fault(
            "client",
            "a request cut at any byte, or sent byte by byte",
            "the same answers as if it came at once",
        ),
    ],
    "http2": [
        fault(
            "client",
            "arbitrary HTTP/2 frames after the preface",
            "each stream is answered at most once; budgets are given back",
        ),
    ],
    "frames": [
        fault(
            "log file",
            "arbitrary bytes in place of frames",
            "refused, or a frame that encodes to the same bytes",
        )
    ],
    "wal": [
        fault(
            "log file",
            "arbitrary contents of a log file",
            "torn, corrupt or refused with a documented error; every envelope found is complete",
        ),
    ],
    "files": [
        fault(
            "index",
            "arbitrary bytes in .idx, .dict, .del or .sum",
            "refused as corrupt or unsupported, or read",
        ),
        fault(
            "snapshot",
            "arbitrary bytes in a snapshot or an erase intent",
            "refused as corrupt or unsupported, or read",
        ),
    ],
    "directory": [
        fault(
            "data directory",
            "bytes of any files changed, files truncated or missing",
            "the records written, losses announced, read-only, or refused",
        ),
    ],
    "job_files": [
        fault(
            "disk",
            "arbitrary bytes in a manifest, its dead rows, a pin, a plan, a sidecar, or a transaction's file",
            "refused as corrupt or unsupported, or read",
        ),
    ],
    "messages": [
        fault(
            "link",
            "an arbitrary message between front and worker",
            "dropped with a line in the log, or answered; the shard continues to serve",
        ),
        fault(
            "link",
            "an arbitrary line on the control channel",
            "the channel is closed, with the reason in the log",
        ),
    ],
    "bodies": [
        fault(
            "request",
            "an arbitrary body for any operation",
            "a status of the contract; a refused request changes nothing",
        ),
    ],
    "jobs": [
        fault(
            "request",
            "arbitrary calls of queues and consumers, over restarts and jumps of the clock",
            "a status of the contract; the shard continues to serve",
        ),
    ],
    "texts": [
        fault(
            "request",
            "arbitrary query strings, cursors and encoded names",
            "read as absent, or refused as invalid_request",
        ),
        fault(
            "supervisor",
            "arbitrary settings and API keys",
            "defaults or a refusal to start that shows no secret",
        ),
    ],
}


def _every_target() -> list[object]:
    assert set(_FAULTS) == set(TARGETS), "every target names the faults that it shows"
    return [pytest.param(name, id=name, marks=marks) for name, marks in _FAULTS.items()]


@pytest.mark.parametrize("name", _every_target())
def test_kept_inputs_and_mutations_of_them(name: str) -> None:
    target = TARGETS[name]
    assert run_all(target, starting_points(target)) >= len(corpus_of(target)) + 4
    count = target.rounds // SHARE
    assert run_all(target, mutations(target, SEED, count=count)) == count


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_from_the_seed_of_the_run(name: str) -> None:
    target = TARGETS[name]
    seed = SEED + 1 + length.seed
    print(f"seed {seed}")
    assert run_all(target, mutations(target, seed, seconds=FRESH_S)) > 0
