"""Goal: whichever disk call fails, whatever the shard is doing, nothing acknowledged is lost and reads are right.

Method: one action at a time on the simulated disk (a commit, a new log file, a checkpoint, a rewrite, an erase, a
start), and one call of one kind in it fails once, with each of the errors that a disk has (with `--long`; a normal
run takes one of each sort): the first such call, the last, and some between. Then the shard is read, used again,
killed, started, cut off and started, and everything acknowledged must be there each time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from tests.support import length
from tests.support.engine_harness import FSYNC, SMALL, Harness, append, numbered
from tests.support.faults import fault
from topics.api.errors import TopicsError
from topics.engine.commands import topics as c

HARD = (errno.EIO, errno.EACCES, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
TRIES = length.pick(short=2, long=6)  # of the calls of one kind: the first, the last and some between
CONFIG = msgspec.structs.replace(SMALL, rewrite_dead_share=0.5)

READ_ONLY, GOES_ON, NO_START = "read-only", "goes on", "no start"


class Bench:
    """A shard with stored, deleted and logged records, and the acknowledged ones."""

    def __init__(self) -> None:
        self.h = Harness(CONFIG)
        self.acked: dict[int, bytes] = {}
        self.unknown: set[bytes] = set()
        self._serial = 0
        self.h.put("t", FSYNC)
        for _ in range(10):
            self.append()
        self.h.checkpoint()
        for seq in (1, 2, 4):
            self.delete(seq)
        self.append()
        self.h.rest()

    def append(self, pad: int = 0) -> bool:
        self._serial += 1
        payload = numbered(self._serial, 1, pad)[0]
        reply = self.h.send(append("t", payload))
        if isinstance(reply, TopicsError):
            self.unknown.add(payload)
            return False
        assert reply.first_seq not in self.acked
        self.acked[reply.first_seq] = payload
        return True

    def delete(self, seq: int, *, erase: bool = False) -> None:
        reply = self.h.send(c.Delete("t", seqs=[seq], erase=erase))
        payload = self.acked.pop(seq)
        if isinstance(reply, TopicsError):
            self.unknown.add(payload)

    def check(self) -> None:
        rows, gaps = self.h.read("t")
        assert gaps == [], gaps
        assert self.acked.items() <= dict(rows).items(), f"lost: {self.acked.keys() - dict(rows).keys()}"
        others = [(seq, payload) for seq, payload in rows if self.acked.get(seq) != payload]
        assert {payload for _, payload in others} <= self.unknown, f"changed or unknown records: {others}"


def commit(bench: Bench) -> None:
    bench.append()


def rotation(bench: Bench) -> None:
    for _ in range(28):
        if not bench.append(pad=100):
            return
        bench.h.rest()


def checkpoint(bench: Bench) -> None:
    bench.h.checkpoint()


def rewrite(bench: Bench) -> None:
    bench.h.checkpoint()
    bench.h.checkpoint()


def erase(bench: Bench) -> None:
    bench.delete(5, erase=True)
    bench.h.rest()


def start(bench: Bench) -> None:
    bench.h.open()


Doing = Callable[[Bench], None]


def prepared(doing: Doing) -> Bench:
    bench = Bench()
    if doing is start:
        bench.h.kill()
    return bench


@cache
def trace_of(doing: Doing) -> list[str]:
    """Its disk calls when nothing fails."""
    bench = prepared(doing)
    bench.h.disk.trace = trace = []
    doing(bench)
    bench.h.disk.trace = None
    bench.check()
    return trace


def numbers_of(doing: Doing, call: str) -> list[int]:
    """Which calls of this kind fail: the first, the last, and some between."""
    count = sum(line.split(" ")[0] == call for line in trace_of(doing))
    assert count, f"{call} is not called"
    return sorted({1 + (count - 1) * i // (TRIES - 1) for i in range(TRIES)})


def outcome(doing: Doing, call: str, number: int, error: int) -> str:
    bench = prepared(doing)
    bench.h.disk.fail_at(number, error, of=call)
    try:
        doing(bench)
        found = READ_ONLY if bench.h.engine.shard.state.read_only is not None else GOES_ON
    except OSError as failure:
        assert doing is start, "only a start may fail with an exception"
        assert failure.errno == error
        found = NO_START
        bench.h.kill()
        bench.h.open()
    bench.h.disk._plans.clear()
    bench.check()
    if found != READ_ONLY:
        for _ in range(3):
            bench.h.pass_time(1000)
        assert bench.append(), "it never accepts writes again"
        bench.h.checkpoint()
        assert bench.h.engine.shard.state.read_only is None
    bench.h.kill_and_open()
    bench.check()
    assert bench.append(), "a restart does not fix it"
    bench.h.power_cut()
    bench.h.open()
    bench.check()
    return found


KEPT = "all that was acknowledged is served, then and after a restart"
ERROR_NAMES = {HARD: "EIO, EACCES or EROFS", FULL: "ENOSPC or EDQUOT", SCARCE: "EMFILE, ENFILE or ENOMEM"}
ERROR_IDS = {HARD: "hard", FULL: "full", SCARCE: "scarce"}
SCARCE_CALLS = ("open", "sync_dir", "read", "list")  # calls that need a file handle or memory
BOTH = f"{GOES_ON} or {READ_ONLY}"
NO_OR_SMALL = f"{GOES_ON} or {NO_START}"
DOINGS: dict[str, Doing] = {
    "a commit": commit,
    "the change to a new log file": rotation,
    "a checkpoint": checkpoint,
    "the rewrite of a segment": rewrite,
    "an erase": erase,
    "a start": start,
}
# The action, the call that fails, and the outcome: of a hard error, and of a full disk.
TABLE = [
    ("a commit", "write", READ_ONLY, READ_ONLY),
    ("a commit", "sync", READ_ONLY, READ_ONLY),
    ("the change to a new log file", "open", READ_ONLY, GOES_ON),
    ("the change to a new log file", "allocate", READ_ONLY, GOES_ON),
    ("the change to a new log file", "sync_dir", READ_ONLY, GOES_ON),
    ("a checkpoint", "open", BOTH, GOES_ON),
    ("a checkpoint", "write", READ_ONLY, BOTH),
    ("a checkpoint", "sync", READ_ONLY, BOTH),
    ("a checkpoint", "rename", READ_ONLY, GOES_ON),
    ("a checkpoint", "sync_dir", READ_ONLY, BOTH),
    ("a checkpoint", "remove", READ_ONLY, GOES_ON),
    ("a checkpoint", "read", BOTH, GOES_ON),
    ("the rewrite of a segment", "open", BOTH, GOES_ON),
    ("the rewrite of a segment", "write", READ_ONLY, BOTH),
    ("the rewrite of a segment", "sync", READ_ONLY, BOTH),
    ("the rewrite of a segment", "rename", READ_ONLY, GOES_ON),
    ("the rewrite of a segment", "sync_dir", READ_ONLY, BOTH),
    ("the rewrite of a segment", "remove", READ_ONLY, GOES_ON),
    ("the rewrite of a segment", "read", BOTH, GOES_ON),
    ("an erase", "open", READ_ONLY, BOTH),
    ("an erase", "write", READ_ONLY, BOTH),
    ("an erase", "sync", READ_ONLY, BOTH),
    ("an erase", "rename", READ_ONLY, GOES_ON),
    ("an erase", "sync_dir", READ_ONLY, BOTH),
    ("an erase", "remove", READ_ONLY, READ_ONLY),
    ("an erase", "read", READ_ONLY, GOES_ON),
    ("a start", "open", NO_START, NO_OR_SMALL),
    ("a start", "write", NO_START, NO_OR_SMALL),
    ("a start", "allocate", NO_START, GOES_ON),
    ("a start", "sync", NO_START, NO_OR_SMALL),
    ("a start", "sync_dir", NO_START, NO_OR_SMALL),
    ("a start", "remove", NO_START, NO_START),
    ("a start", "read", NO_START, NO_START),
]
SEEN = {
    READ_ONLY: f"the shard turns read-only with the reason until it is restarted; {KEPT}",
    GOES_ON: f"it is done again later, and appends wait for it if they must; {KEPT}",
    BOTH: f"it is done again later, or the shard turns read-only until it is restarted; {KEPT}",
    NO_START: "the start fails with the disk's error; the next one serves all that was acknowledged",
    NO_OR_SMALL: "the start makes do with a smaller log file, or fails and the next one serves all that was acknowledged",
}


def cases() -> list[object]:
    found = []
    for name, call, of_hard, of_full in TABLE:
        of_scarce = NO_START if name == "a start" else of_full  # an operator can repeat a start
        for errors, expected in ((HARD, of_hard), (FULL, of_full), (SCARCE, of_scarce)):
            if errors is SCARCE and call not in SCARCE_CALLS:
                continue
            what = f"{call} fails during {name}: {ERROR_NAMES[errors]}"
            ident = f"{DOINGS[name].__name__}-{call}-{ERROR_IDS[errors]}"
            found.append(
                pytest.param(
                    name, call, errors, expected, id=ident, marks=fault("disk", what, SEEN[expected])
                )
            )
    return found


@pytest.mark.parametrize(("name", "call", "errors", "expected"), cases())
def test_a_call_that_fails(name: str, call: str, errors: tuple[int, ...], expected: str) -> None:
    doing = DOINGS[name]
    for turn, number in enumerate(numbers_of(doing, call), length.turn(len(errors))):
        for error in errors if length.is_long() else [errors[turn % len(errors)]]:
            found = outcome(doing, call, number, error)
            assert found in expected, f"{call} {number} of {name} with {errno.errorcode[error]}: {found}"


# ---- reads


def stored() -> Bench:
    """Records in segments and in the log, none of them in memory."""
    bench = Bench()
    bench.h.checkpoint()
    bench.h.restart()
    return bench


@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param(
            call,
            error,
            id=f"{call}-{errno.errorcode[error]}",
            marks=fault(
                "disk",
                f"{call} fails with {errno.errorcode[error]} while records are read",
                "that request fails; nothing is announced as lost, and the next read is whole",
            ),
        )
        for call, error in (
            ("read", errno.EIO),
            ("open", errno.EMFILE),
            ("open", errno.EACCES),
            ("open", errno.EIO),
        )
    ],
)
def test_a_read_that_fails(call: str, error: int) -> None:
    number = 0
    while True:
        number += 1
        bench = stored()
        bench.h.disk.fail_at(number, error, of=call)
        reply = bench.h.send(c.Diff("t", limit=1000))
        assert bench.h.engine.shard.state.read_only is None
        if bench.h.disk._plans:
            break  # a whole read makes fewer calls
        assert isinstance(reply, TopicsError), f"{call} {number} failed, but the read succeeded"
        bench.check()
    assert number > 2


# ---- permanent faults


@fault(
    "disk",
    "the file system is remounted read-only: every change fails with EROFS from now on",
    "the shard turns read-only and says why; reads go on; after a restart on a writable disk everything is there",
)
def test_read_only_remount() -> None:
    bench = Bench()
    for call in ("write", "sync", "truncate", "allocate", "rename", "remove", "make_dir", "sync_dir"):
        for number in range(1, 30):
            bench.h.disk.fail_at(number, errno.EROFS, of=call)
    assert not bench.append()
    reason = bench.h.engine.shard.state.read_only
    assert reason is not None
    assert "read-only file system" in reason.lower(), reason
    for _ in range(3):
        assert not bench.append()
        bench.h.pass_time(1000)
        bench.check()
    bench.h.kill_and_open()
    bench.check()
    assert bench.append()
