"""The long form of the crash tests (scripts/crash): rounds of random faults until the time is up.

Each round has a new server and its own history, which is checked at the end. Odd rounds run on the machine's disk, even ones
on a file system whose power can be cut. Failpoints are chosen from those that the load was seen to reach, new ones first.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.crash.campaign import SUPERVISOR, Campaign, start_campaign
from tests.support import power_cut
from tests.support.arguments import positive_number, seed_number
from tests.support.server import until

ROUND_S = 60.0
INTERRUPTED = 130
ERRORS = ("EIO", "ENOSPC", "EMFILE", "EACCES", "EROFS")
# The rest are kills of processes.
ERROR_SHARE, FAILPOINT_SHARE = 0.15, 0.6
TEARABLE = (".write.before", ".allocate.before")


class LongRun:
    def __init__(self, minutes: float, seed: int) -> None:
        self._end = time.monotonic() + minutes * 60
        self._rng = random.Random(seed)
        self._seed = seed
        self._known: set[str] = set()
        self._died_at: set[str] = set()
        self._not_reached: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.acks = self.requests = self.rounds = 0
        self.problems: list[str] = []
        self.folder: Path | None = None  # of the current round

    def run(self) -> None:
        while time.monotonic() < self._end:
            self.rounds += 1
            folder = self.folder = Path(tempfile.mkdtemp(prefix="topics-crash-"))
            try:
                self._round(folder, self._seed * 1000 + self.rounds)
            except Exception as error:
                if _was_interrupted(error):
                    raise KeyboardInterrupt from error
                traceback.print_exc()
                self.problems.append(f"round {self.rounds}: {error!s:.500}\n  kept: {folder}")
                continue
            self.folder = None
            shutil.rmtree(folder)

    def _round(self, folder: Path, seed: int) -> None:
        with contextlib.ExitStack() as stack:
            machine = None
            if self.rounds % 2 == 0 and power_cut.missing() is None:
                machine = stack.enter_context(power_cut.machine(folder, seed))
            print(f"round {self.rounds} {'with power cuts ' if machine else ''}in {folder}", flush=True)
            campaign = start_campaign(folder, seed, machine)
            stack.callback(campaign.server.close)
            began = time.monotonic()
            try:
                with campaign.workload.running():
                    while time.monotonic() - began < ROUND_S and time.monotonic() < self._end:
                        self._act(campaign)
                campaign.finish()
            except BaseException:
                campaign.workload.history.save(folder / "history.jsonl")
                if machine is not None:  # its files are in memory
                    shutil.copytree(machine.path, folder / "files")
                raise
            finally:
                self.done.update(campaign.done)
                self.acks += campaign.workload.acks
                self.requests += len(campaign.workload.history.ops)
        print(
            f"round {self.rounds} {'with power cuts ' if machine else ''}ok: "
            f"{campaign.workload.acks} acks, {sum(campaign.done.values())} faults, "
            f"killed at {len(self._died_at)} of {len(self._known)} failpoints",
            flush=True,
        )

    def _act(self, campaign: Campaign) -> None:
        rng = self._rng
        target = campaign.workload.acks + rng.randrange(20, 200)
        until(lambda: campaign.workload.acks >= target)
        self._known.update(campaign.failpoints.hits())
        kills: list[Callable[[], None]] = [
            *(
                lambda name=name: campaign.kill(name)
                for name in ("shard 0", "shard 1", "front 0", SUPERVISOR)
            ),
            campaign.kill_all,
            campaign.stop,
        ]
        if campaign.machine is not None:
            kills += [campaign.cut_power] * 4
        choice = rng.random()
        if choice < ERROR_SHARE:
            self._fail(campaign)
        elif choice < ERROR_SHARE + FAILPOINT_SHARE:
            self._die(campaign)
        else:
            rng.choice(kills)()

    def _die(self, campaign: Campaign) -> None:
        fresh = sorted(self._known - self._died_at)
        self._rng.shuffle(fresh)
        fresh.sort(key=self._not_reached.__getitem__)  # points that were often missed come last
        point = fresh[0] if fresh else self._rng.choice(sorted(self._known))
        action = "torn" if point.endswith(TEARABLE) and self._rng.random() < 0.5 else "kill"
        # A point that only a start reaches is not waited for: the next restart reaches it.
        at_start = ".make_dir." in point or point.startswith(("layout.", "topics."))
        if at_start:
            campaign.failpoints.arm(f"{point} {action}", deadly=False)
            campaign.kill_all()
            campaign.done[f"{action} at {point}"] += len(campaign.failpoints.fired())
            campaign.failpoints.disarm()
        elif not campaign.kill_at(point, action, timeout_s=12):
            self._not_reached[point] += 1
            return
        self._died_at.add(point)

    def _fail(self, campaign: Campaign) -> None:
        rng = self._rng
        points = [
            name
            for name in sorted(self._known)
            if name.endswith(".before")
            and ".make_dir." not in name
            and not name.startswith(("layout.", "topics."))
        ]
        campaign.error_at(rng.choice(points), rng.choice(ERRORS), shard=rng.randrange(2), timeout_s=8)


def _was_interrupted(error: BaseException) -> bool:
    """Ctrl-C in the terminal reaches the server too, so the cleanup may fail after it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    return cause is not None


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/crash", description=__doc__)
    parser.add_argument(
        "--minutes", type=positive_number, default=10.0, help="start no new fault after this time [10]"
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=int(time.time()) % 100_000,
        help="selects the faults [from the clock]. Processes and threads are real, so a run with the same seed is similar, not identical",
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    if why := power_cut.missing():
        print(f"WITHOUT POWER CUTS: {why}", flush=True)
    run = LongRun(arguments.minutes, arguments.seed)
    try:
        run.run()
    except KeyboardInterrupt:
        left = f"its history and files are left in {run.folder}" if run.folder else "nothing is left"
        print(f"interrupted in round {run.rounds}; {left}; {len(run.problems)} problems before")
        return INTERRUPTED
    print(f"\n{run.rounds} rounds, {run.requests} requests, {run.acks} acks checked")
    for what, count in sorted(run.done.items()):
        print(f"  {count:4}  {what}")
    print(f"{len(run.problems)} problems")
    for problem in run.problems:
        print(problem)
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
