"""A server under a mixed load to which bad things are done, one after the other: the short tests and scripts/crash."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.processes import is_gone
from tests.crash.workload import SHARDS, SMALL_FILES, Workload
from tests.support.checker import assert_ok
from tests.support.power_cut import Machine
from tests.support.server import Server, until
from workers.shard.failpoints import VARIABLE

SUPERVISOR = "supervisor"
DEATHS_MAX = 4  # of shards, before the supervisor takes its time with restarting them


class Failpoints:
    """The folder that the workers look into; workers/shard/failpoints.py says what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deadly = False
        folder.mkdir(exist_ok=True)

    def arm(self, *lines: str, deadly: bool = True) -> None:
        """These points from now on; `deadly` ones end the worker. Hits are recorded all the time."""
        self.deadly = deadly
        self._write(*lines)

    def disarm(self) -> None:
        self._write()
        # Only now: a point that is forgotten to have fired would do it again.
        (self.folder / "fired").unlink(missing_ok=True)

    def _write(self, *lines: str) -> None:
        new = self.folder / "points.new"
        new.write_text("".join(f"{line}\n" for line in ("record", *lines)))
        new.replace(self.folder / "points")

    def alarm(self) -> bool:
        """A worker is dead, or dies at this moment."""
        return self.deadly and (self.folder / "fired").exists()

    def fired(self) -> list[int]:
        """The shards at which a point was reached, in order."""
        path = self.folder / "fired"
        if not path.exists():
            return []
        return [int(line.split()[0]) for line in path.read_text().splitlines()]

    def hits(self) -> list[str]:
        """The names of all places that were reached so far, sorted."""
        path = self.folder / "hits"
        return sorted(set(path.read_text().split())) if path.exists() else []


@dataclass
class Campaign:
    """What is done is counted in `done`, by kind."""

    server: Server
    failpoints: Failpoints
    workload: Workload
    machine: Machine | None = None
    done: Counter[str] = field(default_factory=Counter)
    _deaths: int = 0

    # -- kills ---------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """kill -9 of one process with requests under way; returns when the server is whole again."""
        workload, server = self.workload, self.server
        self.done[f"kill {name}"] += 1
        if name == SUPERVISOR:
            self.restart(server.kill, "kill")
            return
        pid = server.pid(name)
        workload.hold(wait=False)
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_gone(pid))
        workload.hold()
        kind, _, number = name.partition(" ")
        if kind == "shard":
            workload.recorder.happened("kill", workload.names(int(number)), note=name)
            self._deaths += 1
        else:
            workload.recorder.happened("front", note=name)
        until(lambda: server.children().get(name) not in (None, pid))
        server.wait_ready()
        workload.resume()
        self._calm()

    def kill_all(self) -> None:
        """kill -9 of every process at the same moment."""
        self.done["kill all"] += 1

        def kill() -> None:
            assert self.server.process is not None
            pids = [self.server.process.pid, *self.server.children().values()]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self.server.kill()

        self.restart(kill, "kill")

    def cut_power(self) -> None:
        assert self.machine is not None
        self.done["power cut"] += 1
        machine = self.machine
        self.restart(lambda: machine.cut(self.server), "power")

    def stop(self) -> None:
        """A clean shutdown."""
        self.done["stop"] += 1

        def stop() -> None:
            assert self.server.stop() == 0, self.server.log

        self.restart(stop, "stop")

    def restart(self, end: Callable[[], None], event: str) -> None:
        """End the whole server with requests under way, and start it again."""
        workload = self.workload
        workload.hold(wait=False)
        end()
        workload.hold()
        workload.recorder.nothing_under_way()
        workload.recorder.happened(event)
        self._deaths = 0
        self.server.start()
        workload.resume()

    def _calm(self) -> None:
        """The supervisor waits longer after each death of a shard; a new one begins anew."""
        if self._deaths >= DEATHS_MAX:
            self.kill(SUPERVISOR)

    # -- failpoints ----------------------------------------------------------------------------------------

    def kill_at(
        self, point: str, action: str = "kill", *, nth: int = 1, deaths: int = 1, timeout_s: float = 150.0
    ) -> bool:
        """Have a shard die where `point` says, and its successors as well when there are to be more deaths.

        False when nobody came there in time.
        """
        workload, failpoints = self.workload, self.failpoints
        pids = [self.server.pid(f"shard {shard}") for shard in range(SHARDS)]
        failpoints.arm(f"{point} {action} nth={nth} times={deaths}")
        fired: list[int] = []
        try:
            until(failpoints.fired, timeout_s, every_s=0.005)
            workload.hold()
            until(lambda: max(Counter(failpoints.fired()).values()) == deaths, timeout_s)
            fired = failpoints.fired()
        except AssertionError:
            fired = failpoints.fired()
            return False
        finally:
            failpoints.arm()  # nobody else, but what has fired is not forgotten yet
            self._note_deaths(sorted(set(fired)), pids, f"{action} at {point}")
            failpoints.disarm()
            self.server.wait_ready()
            workload.resume()
        self._calm()
        return True

    def _note_deaths(self, shards: list[int], pids: list[int], what: str) -> None:
        for shard in shards:
            until(lambda shard=shard: is_gone(pids[shard]))
            self.workload.recorder.happened("kill", self.workload.names(shard), note=what)
            self.done[what] += 1
            self._deaths += 1

    def error_at(
        self,
        point: str,
        error: str,
        *,
        shard: int = 1,
        times: int = 1,
        latches: bool = False,
        timeout_s: float = 150.0,
    ) -> bool:
        """Have disk calls of a shard fail where `point` says; False when it did not come there in time.

        If it turns read-only it must say so, serve reads, and heal by a restart; else it must go on.
        """
        workload, failpoints = self.workload, self.failpoints
        # In the log's own files there is space by promise; without it that is an error like others.
        is_full = error == "ENOSPC" and point != "wal.write.before"
        begin, end = ("full", "freed") if is_full else ("error", None)
        workload.recorder.happened(begin, workload.names(shard), note=f"{error} at {point}")
        failpoints.arm(f"{point} {error} times={times} shard={shard}", deadly=False)
        try:
            until(failpoints.fired, timeout_s, every_s=0.005)
        except AssertionError:
            return False
        finally:
            if times == 1:
                failpoints.disarm()
        self.done[f"{error} at {point}"] += 1
        target = workload.acks + 20
        if latches and error == "ENOSPC":
            self._again_until_latched(f"{point} {error} times={times} shard={shard}")
        # Where it must turn read-only that is waited for: the other shard goes on meanwhile.
        until(lambda: (workload.acks > target and not latches) or self.latched(), 150)
        workload.hold()
        if end:
            workload.recorder.happened(end, workload.names(shard))
        if self.latched():
            self.done["read-only"] += 1
            self._check_latched(shard)
            self.kill(f"shard {shard}")
        until(lambda: self.server.get("/readyz").status == 200, 150)
        workload.resume()
        return True

    def _again_until_latched(self, arm: str) -> None:
        """What runs out while a spare file is made is no damage, and is tried again: then the error meets a later call."""
        for _ in range(8):
            try:
                until(self.latched, 10)
                return
            except AssertionError:
                self.failpoints.arm(arm, deadly=False)
                until(self.failpoints.fired, 150, every_s=0.005)
                self.failpoints.disarm()

    def latched(self) -> list[int]:
        """The shards that say that they are read-only."""
        ready = self.server.get("/readyz")
        if ready.status == 200 or "read_only" not in ready.error.get("detail", {}):
            return []
        return [row["shard"] for row in ready.error["detail"]["shards"]]

    def _check_latched(self, shard: int) -> None:
        server = self.server
        topic = self.workload.names(shard)[0]
        refused = server.write(topic, "refused")
        assert refused.status == 500 and refused.error["detail"]["read_only"] is True, refused
        assert refused.error["detail"]["reason"], refused
        assert server.diff(topic).status == 200
        assert b"topics_wal_read_only 0" not in server.get("/v0/metrics").body

    def refused_for(self, limit: str) -> bool:
        """Whether somebody was refused because of this limit."""
        return limit in self.workload.recorder.limits

    def reached(self, what: str) -> list[str]:
        """The places of this sort that the load comes to, without those of a start."""
        return [
            name for name in self.failpoints.hits() if name.startswith(f"{what}.") and "make_dir" not in name
        ]

    # -- the end -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """When no client runs: look at everything, before and after a clean restart, and have it judged."""
        self.workload.read_everything()
        self.stop()
        self.workload.read_everything()
        try:
            assert_ok(self.workload.history)
        except AssertionError:
            self.workload.history.save(self.server.folder / "history.jsonl")
            raise


def start_campaign(folder: Path, seed: int, machine: Machine | None = None, **options: str) -> Campaign:
    """A server with small files and failpoints, and clients that are not running yet."""
    failpoints = Failpoints(folder / "failpoints" if machine is None else machine.failpoints)
    failpoints.disarm()
    environment = {**SMALL_FILES, VARIABLE: str(failpoints.folder), **options}
    server = Server(folder, environment, shards=SHARDS).start()
    workload = Workload(server, seed=seed, alarm=failpoints.alarm)
    return Campaign(server, failpoints, workload, machine)
