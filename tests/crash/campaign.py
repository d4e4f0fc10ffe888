"""A server under mixed load that is killed, cut from power or given disk errors; for the short tests and scripts/crash."""

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
DEATHS_MAX = 4  # of shards, before the supervisor's restart delay grows


class Failpoints:
    """The failpoint folder of the workers; workers/shard/failpoints.py describes its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deadly = False
        folder.mkdir(exist_ok=True)

    def arm(self, *lines: str, deadly: bool = True) -> None:
        """Enable these failpoints; `deadly` ones end the worker. Hits are always recorded."""
        self.deadly = deadly
        self._write(*lines)

    def disarm(self) -> None:
        self._write()
        # Cleared only now: a failpoint that is not recorded as fired would fire again.
        (self.folder / "fired").unlink(missing_ok=True)

    def _write(self, *lines: str) -> None:
        new = self.folder / "points.new"
        new.write_text("".join(f"{line}\n" for line in ("record", *lines)))
        new.replace(self.folder / "points")

    def alarm(self) -> bool:
        """A worker is dead or about to die."""
        return self.deadly and (self.folder / "fired").exists()

    def fired(self) -> list[int]:
        """The shards at which a failpoint fired, in order."""
        path = self.folder / "fired"
        if not path.exists():
            return []
        return [int(line.split()[0]) for line in path.read_text().splitlines()]

    def hits(self) -> list[str]:
        """The names of all failpoints reached so far, sorted."""
        path = self.folder / "hits"
        return sorted(set(path.read_text().split())) if path.exists() else []


@dataclass
class Campaign:
    """One server and its load. `done` counts the faults by kind."""

    server: Server
    failpoints: Failpoints
    workload: Workload
    machine: Machine | None = None
    done: Counter[str] = field(default_factory=Counter)
    _deaths: int = 0

    # -- kills ---------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """kill -9 of one process while requests are in flight; returns when the server is complete again."""
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
        self._reset_restart_delay()

    def kill_all(self) -> None:
        """kill -9 of all processes at once."""
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
        """End the whole server while requests are in flight, and start it again."""
        workload = self.workload
        workload.hold(wait=False)
        end()
        workload.hold()
        workload.recorder.nothing_in_flight()
        workload.recorder.happened(event)
        self._deaths = 0
        self.server.start()
        workload.resume()

    def _reset_restart_delay(self) -> None:
        """The supervisor delays each further restart of a shard; after several, kill it: a new one starts without delays."""
        if self._deaths >= DEATHS_MAX:
            self.kill(SUPERVISOR)

    # -- failpoints ----------------------------------------------------------------------------------------

    def kill_at(
        self, point: str, action: str = "kill", *, nth: int = 1, deaths: int = 1, timeout_s: float = 150.0
    ) -> bool:
        """Kill a shard's worker at `point`, and its successors too if `deaths` is more than 1.

        False if the point was not reached in time.
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
            failpoints.arm()  # no more points, but what has fired stays recorded
            self._note_deaths(sorted(set(fired)), pids, f"{action} at {point}")
            failpoints.disarm()
            self.server.wait_ready()
            workload.resume()
        self._reset_restart_delay()
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
        """Make disk calls of a shard fail at `point`; False if it was not reached in time.

        If the shard becomes read-only it must report that, serve reads, and recover by a restart; otherwise it must continue.
        """
        workload, failpoints = self.workload, self.failpoints
        # Space of log files is allocated in advance; ENOSPC without that is an error like any other.
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
            self._rearm_until_read_only(f"{point} {error} times={times} shard={shard}")
        # Wait for the shard to become read-only; the other shard continues meanwhile.
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

    def _rearm_until_read_only(self, arm: str) -> None:
        """A resource that runs out while a spare log file is made is only retried: arm the failpoint again for a later call."""
        for _ in range(8):
            try:
                until(self.latched, 10)
                return
            except AssertionError:
                self.failpoints.arm(arm, deadly=False)
                until(self.failpoints.fired, 150, every_s=0.005)
                self.failpoints.disarm()

    def latched(self) -> list[int]:
        """The shards that report themselves read-only."""
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
        """Whether a request was refused because of this limit."""
        return limit in self.workload.recorder.limits

    def reached(self, what: str) -> list[str]:
        """The failpoints of this kind that the load reaches, except those of a start."""
        return [
            name for name in self.failpoints.hits() if name.startswith(f"{what}.") and "make_dir" not in name
        ]

    # -- final check ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Read everything before and after a clean restart, when no client runs, and check the history."""
        self.workload.read_everything()
        self.stop()
        self.workload.read_everything()
        try:
            assert_ok(self.workload.history)
        except AssertionError:
            self.workload.history.save(self.server.folder / "history.jsonl")
            raise


def start_campaign(folder: Path, seed: int, machine: Machine | None = None, **options: str) -> Campaign:
    """A server with small files and failpoints, and clients that are not started yet."""
    failpoints = Failpoints(folder / "failpoints" if machine is None else machine.failpoints)
    failpoints.disarm()
    environment = {**SMALL_FILES, VARIABLE: str(failpoints.folder), **options}
    server = Server(folder, environment, shards=SHARDS).start()
    workload = Workload(server, seed=seed, alarm=failpoints.alarm)
    return Campaign(server, failpoints, workload, machine)
