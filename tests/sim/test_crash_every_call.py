"""Goal: there is no disk call at which a power cut, a process crash or an I/O error breaks a promise.

Method: one scripted workload uses every operation, every durability class, a checkpoint, a segment rewrite, a topic
drop and an erase. It runs once for each disk call that may change something, with a crash planned there (a crash at a
read leaves the same as one at the next change, where more has been promised). After each crash the engine is
recovered twice (the second time after another crash right away) and compared with what was acked. The same with each
call failing once with EIO, and each that may need space with ENOSPC: the engine may refuse or turn read-only, reads
go on, and after a restart everything acked is there. The calls are distributed over several tests, so that they run
in parallel; a normal run takes a sample of them, `--long` every one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest

from tests.support import length
from tests.support import model_commands as d
from tests.support.driver import SMALL, Driver
from tests.support.faults import fault
from tests.support.model import Conf, NewRec
from tests.support.model_commands import Divergence
from tests.support.sim_disk import SimulatedCrash
from topics.api.errors import TopicsError

pytestmark = pytest.mark.sim

SHARES = 2
CONFIG = msgspec.structs.replace(
    SMALL, verify=False
)  # random runs check invariants; here the number of runs counts
FSYNC, DISK = Conf(durability="fsync"), Conf()
LOOKS = ("read", "size", "close", "exists", "list", "boot_id", "random_u64")


def recs(serial: int, count: int, tag: bytes | None = None) -> list[NewRec]:
    return [NewRec(b'{"call":%d,"of":%d,"pad":"%s"}' % (serial, i, b"x" * 60), tag) for i in range(count)]


def workload(driver: Driver) -> Iterator[None]:
    """Everything once, in steps; the caller decides where it ends."""
    send, drain = driver.send, driver.drain
    send(d.put("f", FSYNC), d.put("d", DISK), d.put("m", Conf(durability="memory")))
    send(d.put("e", Conf(durability="ephemeral")), d.put("c", Conf(durability="fsync", cap_records=3)))
    yield
    drain()
    yield
    send(d.append("f", recs(1, 3, b"a"), key=b"k1"), d.append("d", recs(2, 3, b"a"), key=b"k2"))
    yield
    send(d.append("m", recs(3, 2)), d.append("e", recs(4, 2)), d.append("c", recs(5, 2)))
    yield
    drain()
    send(d.append("c", recs(6, 4)), d.append("f", recs(7, 6, b"b")), d.append("made", recs(8, 1), conf=FSYNC))
    yield
    send(d.diff("f"), d.diff("d"), d.diff("c"), d.state("m"), d.list_topics())
    drain()
    yield
    driver.advance(150)
    yield
    for serial in range(10, 16):
        send(d.append("d", recs(serial, 2, b"a" if serial % 2 else b"b"), key=b"k%d" % serial))
        yield
    assert driver.engine is not None
    driver.engine.checkpoint()
    send()
    yield
    drain()
    yield
    send(d.delete("f", match=("eq", b"a")), d.delete("d", match=("prefix", b"b")), d.skip("f", 5))
    yield
    send(d.delete("d", before_seq=4, erase=True))
    yield
    drain()
    yield
    send(d.drop("made"), d.append("f", recs(20, 2), key=b"k1"), d.put("d", Conf(cap_records=6)))
    yield
    drain()
    driver.advance(1_200)
    yield
    driver.engine.checkpoint()
    send(d.append("d", recs(21, 4, b"a")))
    yield
    drain()
    yield
    send(d.delete("d", keep=2), d.delete("f", keep=1), d.append("made", recs(22, 2), conf=DISK))
    drain()
    yield
    driver.advance(2_500)
    driver.engine.checkpoint()
    send()
    drain()
    yield
    send(
        d.append("f", recs(23, 1)), d.append("m", recs(24, 3)), d.put("m", FSYNC), d.append("m", recs(25, 1))
    )
    yield
    drain()
    send(d.diff("f"), d.diff("d"), d.last_by_tag("d", ("prefix", b"")))
    drain()
    yield
    driver.close()


def start(number: int) -> Driver:
    driver = Driver(number, config=CONFIG)
    driver.open()
    return driver


def afterwards(driver: Driver) -> None:
    """The shard serves as if nothing had happened."""
    driver.send(d.append("f", recs(90, 2), conf=FSYNC), d.append("d", recs(91, 5), conf=DISK))
    driver.drain()
    driver.compare()
    driver.restart()
    driver.close()
    driver.check_erased()


@cache
def calls(seed: int = 0) -> list[str]:
    """The disk calls of the workload, from the disk's trace."""
    driver = start(seed)
    driver.disk.trace = trace = []
    for _ in workload(driver):
        pass
    assert trace.pop() == "kill"  # closes the handles of the closed engine
    assert len(trace) > 500, "the workload hardly touched the disk"
    return trace


def changes() -> list[int]:
    """Numbers of the calls that may change the disk, from 1 on."""
    return [number for number, call in enumerate(calls(), 1) if may_change(call)]


def may_change(call: str) -> bool:
    name, *arguments = call.split(" ")
    return name not in LOOKS and (name != "open" or arguments[-1] == "True")  # create


def beginning(how: str) -> int:
    """Where to begin, so that a kill and a power cut use different calls of the sample."""
    some = length.some()
    return (length.turn(some) + (some // 2 if how == "kill" else 0)) % some


def test_the_calls_are_the_same_whatever_the_seed() -> None:
    """Each crash has its own seed, and is planned by a call number that was counted with another seed."""
    names = [[call.split(" ")[0] for call in calls(seed)] for seed in (0, 1)]
    assert names[0] == names[1]


@fault(
    "disk",
    "the power fails or the process is killed at any disk call of a workload that uses everything",
    "all that was acknowledged is served by the next two starts; losses of weaker classes are announced",
)
@pytest.mark.parametrize("how", ["power", "kill"])
@pytest.mark.parametrize("share", range(SHARES))
def test_crash_at_every_call(share: int, how: str) -> None:
    numbers = [*changes(), len(calls())][share + SHARES * beginning(how) :: SHARES * length.some()]
    for turn, number in enumerate(numbers):
        driver = start(number)
        driver.disk.crash_at(number, midway=bool(turn % 2))
        try:
            for _ in workload(driver):
                pass
            raise Divergence("the workload never reached that call")
        except SimulatedCrash:
            pass
        except Exception as problem:
            raise Divergence(f"{how} at call {number}, before the crash: {problem}") from problem
        try:
            driver.crash(how)
            driver.crash(how)
            afterwards(driver)
        except Exception as problem:
            raise Divergence(f"{how} at call {number}: {type(problem).__name__}: {problem}") from problem


@fault(
    "disk",
    "any disk call of a workload that uses everything fails with EIO or ENOSPC",
    "refused or read-only, reads go on, and after a restart all that was acknowledged is there",
)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("share", range(SHARES))
def test_failure_of_every_call(share: int, error: int) -> None:
    numbers = changes() if error == errno.ENOSPC else range(1, len(calls()) + 1)
    first = share + SHARES * length.turn(length.some())
    for turn, number in enumerate(numbers[first :: SHARES * length.some()]):
        driver = start(number)
        driver.faulty = True
        before = driver.disk.calls
        driver.disk.fail_at(number, error)
        try:
            try:
                for _ in workload(driver):
                    pass
            except (OSError, TopicsError):
                if driver.engine is None or not driver.closing:
                    raise  # only a stop may report the failure; a turn answers
            if driver.engine is not None and not driver.closing:
                driver.compare()
            assert driver.disk.calls - before >= number, "the workload never reached that call"
            driver.disk_calm()
            driver.crash("kill" if turn % 4 < 2 else "power")
            driver.faulty = False
            afterwards(driver)
        except Exception as problem:
            raise Divergence(
                f"call {number} fails with {error}: {type(problem).__name__}: {problem}"
            ) from problem
