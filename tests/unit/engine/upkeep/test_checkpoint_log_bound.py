"""The log between checkpoints is bounded, however slow the machine is.

Goal: a start never replays more than `log_bytes_max` and one request, and a client that is refused for this reason
can write again when a checkpoint has finished. Method: an engine on a SimDisk whose checkpoints the test delays, a
clock on which every reading takes time, and a full disk.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.engine_harness import DISK, EPHEMERAL, FSYNC, SMALL, Harness, append, numbered
from tests.support.faults import fault
from tests.support.sim_clock import SimClock
from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Throttled
from topics.engine.commands import topics as c

BOUND = 40_000
BOUNDED = msgspec.structs.replace(SMALL, wal_file_bytes=16_384, log_bytes_max=BOUND)
PAYLOAD = b'"%s"' % (b"x" * 400)


class SlowClock(SimClock):
    """Each reading takes a millisecond, as on an overloaded machine."""

    def monotonic_ms(self) -> int:
        self.advance(1)
        return super().monotonic_ms()


def begun(config: EngineConfig = BOUNDED) -> Harness:
    h = Harness(config)
    h.put("t", DISK)
    h.put("ram", EPHEMERAL)
    return h


def checkpoints(h: Harness) -> int:
    return h.engine.counters["checkpoints"]


def run_but_segments(h: Harness) -> None:
    """The disk syncs and creates log files, but does not write segments yet."""
    while kinds := [job.kind for job in h.jobs if job.kind != "segments"]:
        h.run_job(kinds[0])


def write_until_refused(h: Harness) -> tuple[int, Throttled]:
    """With a checkpoint that makes no progress; how many writes were accepted, and how the next was refused."""
    for count in range(10 * BOUND // len(PAYLOAD)):
        (token,) = h.ask(append("t", PAYLOAD))
        run_but_segments(h)
        if isinstance(reply := h.replies[token], Throttled):
            return count, reply
    raise AssertionError("never refused")


# ---- when a checkpoint begins


def test_a_checkpoint_begins_at_once_when_much_was_written() -> None:
    """No time passes at all."""
    h = begun()
    written = 0
    while checkpoints(h) < 4:
        h.append("t", PAYLOAD)
        h.rest()
        written += len(PAYLOAD)
        assert h.engine.checkpointer.log_bytes < BOUND // limits.LOG_CHECKPOINT_PARTS + 2 * len(PAYLOAD)
        assert written < 2 * BOUND
    assert h.clock.monotonic_ms() == 0


@fault(
    "worker",
    "each turn of a worker takes longer than a slice of work in the background",
    "checkpoints go on, and the log stays short",
)
def test_checkpoints_go_on_when_nothing_is_quick() -> None:
    """The last step of one used up its turn, and no other was begun until an erase."""
    h = begun(msgspec.structs.replace(SMALL, snapshot_wal_bytes=2000))
    h.close()
    h.clock = SlowClock(h.clock.wall_ms())
    h.open()
    for number in range(1, 5):
        for _ in range(6):
            h.append("t", PAYLOAD)
        h.pass_time(6000)
        assert checkpoints(h) == number


def test_writes_during_a_checkpoint_are_not_covered_by_it() -> None:
    h = begun(SMALL)
    h.append("t", PAYLOAD)
    h.engine.checkpoint()
    h.ask()
    while not any(job.kind == "segments" for job in h.jobs):
        h.run_job()
    h.ask(append("t", *[PAYLOAD] * 5))
    h.rest()
    assert checkpoints(h) == 1
    assert 5 * len(PAYLOAD) < h.engine.checkpointer.log_bytes < 7 * len(PAYLOAD)


@pytest.mark.parametrize("how", ["kill", "power"])
def test_log_bytes_read_at_a_start_count(how: str) -> None:
    h = begun(SMALL)
    h.put("s", FSYNC)
    for _ in range(30):
        h.append("s", PAYLOAD)
    before = h.engine.checkpointer.log_bytes
    h.kill() if how == "kill" else h.power_cut()
    h.open()
    assert before <= h.engine.checkpointer.log_bytes < before + 1000
    h.kill()
    h.config = BOUNDED
    h.open()
    h.rest()
    assert checkpoints(h) == 1
    assert h.engine.checkpointer.log_bytes < 1000
    h.restart()
    assert h.engine.checkpointer.log_bytes < 1000


# ---- when checkpoints cannot keep up


@fault(
    "disk",
    "checkpoints cannot keep up with what is written",
    "records are refused with 429 and limit log before a start would have to read more than its bound; all else goes on, and writes do "
    "when a checkpoint is done",
)
def test_the_log_never_grows_past_its_bound() -> None:
    h = begun()
    count, refused = write_until_refused(h)
    assert refused.detail == {"limit": "log", "max": BOUND, "retry_after_ms": limits.LOG_RETRY_MS}
    assert BOUND <= h.engine.checkpointer.log_bytes < BOUND + 2 * len(PAYLOAD)
    assert checkpoints(h) == 0
    assert len(h.rows("t")) == count, "reads go on"
    assert isinstance(h.send(append("ram", PAYLOAD)), c.Appended), "and so do writes that are not logged"
    (token,) = h.ask(c.Delete("t", seqs=[2]))
    run_but_segments(h)
    assert h.replies[token].deleted == 1
    h.rest()  # the disk gets to it
    assert checkpoints(h) >= 1
    h.append("t", PAYLOAD)
    assert len(h.rows("t")) == count


def test_a_start_reads_no_more_than_the_bound() -> None:
    h = begun()
    count, _ = write_until_refused(h)
    h.kill()
    h.open()
    assert h.engine.checkpointer.log_bytes < BOUND + 2000
    assert len(h.rows("t")) == count
    h.rest()
    h.append("t", PAYLOAD)


def test_a_full_disk_is_not_tried_again_and_again() -> None:
    """A checkpoint is due all the time, and each attempt fails."""
    h = begun(msgspec.structs.replace(BOUNDED, log_bytes_max=8000))
    h.disk.full = True
    for _ in range(40):
        h.send(append("t", PAYLOAD))
    h.rest()
    tries = len([path for name, path in h.line.calls if name == "open" and path.endswith(".data")])
    for _ in range(100):
        h.ask()
        h.rest()
    again = len([path for name, path in h.line.calls if name == "open" and path.endswith(".data")])
    assert again <= tries + 1
    h.disk.full = False
    for _ in range(3):
        h.pass_time(1000)
    assert checkpoints(h) >= 1
    h.append("t", *numbered(1, 1))


def test_without_a_bound_nobody_is_refused() -> None:
    h = begun(msgspec.structs.replace(BOUNDED, log_bytes_max=0))
    for _ in range(2 * BOUND // len(PAYLOAD)):
        h.append("t", PAYLOAD)
    assert checkpoints(h) == 0
