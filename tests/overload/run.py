"""An overload of ten times what a server sustains, on a disk whose syncs take 5 ms longer: memory, acked records, latency of
high priority, and time to recover. scripts/overload runs this; the test run has a short form.

    idle        a probe writes to a topic of priority 1000 and watches it
        sustained   a closed loop of 64 connections: the server's capacity
        overload    an open loop of ten times that, for the given time, beside the probe
        after       the probe alone, until it is as fast as before and the pressure is back to normal

With --attack, one of `tests/overload/attacks.py` instead: how long a bystander waits, and the peak memory of each process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.overload import attacks
from tests.overload.load import TOPICS, LoadProcess, Result, topic_of
from tests.support.server import Server, until
from tests.support.sse_client import open_stream, watch

HIGH = "high"
LAST = -1  # the last record of the probe, which ends its watcher
PROBE_EVERY_S = 0.02
CLOSED_CONNECTIONS = 64
TIMES = 10
MIB = 1 << 20


class Probe(threading.Thread):
    """Writes to the topic of high priority at intervals, and watches it. Times in ms."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._ending = threading.Event()
        self.sent: dict[int, float] = {}
        self.seen: dict[int, tuple[float, int]] = {}  # number → time of arrival, and the record's time
        self.refused = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def run(self) -> None:
        self._watcher.start()
        number = 0
        while not self._ending.wait(PROBE_EVERY_S):
            self.sent[number] = time.time() * 1000
            reply = self._server.write(HIGH, number)
            self.refused += reply.status == 429
            number += 1

    def _watch(self) -> None:
        stream = open_stream(self._server, watch(self._server, HIGH))
        while not self._ending.is_set():
            frame = stream.next()
            if frame.event != "record":
                continue
            now = time.time() * 1000
            for record in frame.data["records"]:
                self.seen[record["data"]] = now, record["$ts"]

    def end(self) -> None:
        self._ending.set()
        self.join()
        self._server.write(HIGH, LAST)
        self._watcher.join()

    def deliveries_ms(self, since: float, until: float) -> list[float]:
        """From a record's time to its arrival, for records sent in this interval."""
        numbers = [number for number, at in list(self.sent.items()) if since <= at < until]
        return [max(self.seen[n][0] - self.seen[n][1], 0.0) for n in numbers if n in self.seen]

    def unseen(self) -> int:
        return len(self.sent) - self.refused - len(self.seen.keys() - {LAST})


@dataclass
class Report:
    sustained: float = 0.0  # acked writes per second
    offered: float = 0.0
    taken: float = 0.0
    statuses: dict[int, int] = field(default_factory=dict)
    idle_p99_ms: float = 0.0
    overload_p99_ms: float = 0.0
    overload_p50_ms: float = 0.0
    grown_mib: dict[str, int] = field(default_factory=dict)  # peak of the second half minus peak of the first
    pressure_max: float = 0.0
    lost: int = 0
    records: int = 0
    recovered_s: float = 0.0
    unseen: int = 0


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0


def memory_mib(pids: dict[str, int]) -> dict[str, int]:
    found = {}
    for name, pid in pids.items():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found[name] = int(line.split()[1]) // 1024
    return found


def pressure_of(server: Server) -> float:
    return float(server.get("/v0/metrics", Accept="application/json").json["pressure"])


def lost_records(server: Server, results: list[Result]) -> tuple[int, int]:
    """The number of acked records that are missing, and of those that are there; no two loads share a connection number."""
    wanted: dict[str, set[tuple[int, int, int]]] = {f"bulk-{i}": set() for i in range(TOPICS)}
    for number, result in enumerate(results):
        for connection, acked in enumerate(result.acked):
            wanted[topic_of(connection)].update((number, connection, k) for k in acked)
    lost = records = 0
    for topic, expected in wanted.items():
        counts: dict[tuple[int, int], int] = {}
        from_seq = 0
        while True:
            page = server.diff(topic, from_seq=from_seq, limit=1000).json
            for record in page["records"]:
                key = tuple(record["data"])
                counts[key] = counts.get(key, 0) + 1
            records += len(page["records"])
            from_seq = page["next_from_seq"]
            if page["caught_up"]:
                break
        wanted_counts: dict[tuple[int, int], int] = {}
        for _, connection, k in expected:
            wanted_counts[connection, k] = wanted_counts.get((connection, k), 0) + 1
        lost += sum(max(count - counts.get(key, 0), 0) for key, count in wanted_counts.items())
    return lost, records


def overload(
    server: Server, *, seconds: float, connections: int, calm_s: float = 4.0, slack_ms: float = 2.0
) -> Report:
    """Run all phases against a running server. It has recovered when the probe is as fast as before, within a tolerance."""
    report = Report()
    address = (server.host, server.port)
    server.put(f"/v0/topics/{HIGH}", {"priority": 1000, "durability": "fsync"})
    for i in range(TOPICS):
        server.put(f"/v0/topics/bulk-{i}", {"durability": "fsync"})
    probe = Probe(server)
    probe.start()
    until(lambda: len(probe.seen) > 10)
    began = time.time() * 1000
    time.sleep(calm_s)
    report.idle_p99_ms = p99(probe.deliveries_ms(began, time.time() * 1000))
    closed = LoadProcess(address, connections=CLOSED_CONNECTIONS, rate=0, seconds=calm_s).result()
    report.sustained = closed.acks / calm_s
    began = time.time() * 1000
    load = LoadProcess(address, connections=connections, rate=TIMES * report.sustained, seconds=seconds)
    pids = server.children()
    first: dict[str, int] = {}
    most: dict[str, int] = {}
    while time.time() * 1000 < began + seconds * 1000:
        time.sleep(min(0.25, seconds / 20))
        now = memory_mib(pids)
        half = time.time() * 1000 < began + seconds * 500
        for name, size in now.items():
            into = first if half else most
            into[name] = max(into.get(name, 0), size)
        report.pressure_max = max(report.pressure_max, pressure_of(server))
    ended = time.time() * 1000
    during = probe.deliveries_ms(began + seconds * 100, ended)
    report.recovered_s = recovery_s(server, probe, 2 * report.idle_p99_ms + slack_ms)
    result = load.result()
    report.overload_p99_ms = p99(during)
    report.overload_p50_ms = statistics.median(during) if during else 0.0
    report.offered, report.taken = result.offered / seconds, result.acks / seconds
    report.statuses = result.statuses
    report.grown_mib = {name: most.get(name, 0) - first.get(name, 0) for name in pids}
    assert server.children() == pids, "a process died"
    time.sleep(0.5)
    probe.end()
    report.unseen = probe.unseen()
    report.lost, report.records = lost_records(server, [closed, result])
    return report


def recovery_s(server: Server, probe: Probe, quick_ms: float) -> float:
    """Time until all probes of half a second are this fast, without that half second."""
    began = time.monotonic()
    while time.monotonic() < began + 60:
        since = time.time() * 1000
        time.sleep(0.5)
        found = probe.deliveries_ms(since, time.time() * 1000 - 50)
        if found and statistics.median(found) <= quick_ms and pressure_of(server) < 0.2:
            return time.monotonic() - began - 0.5
    return time.monotonic() - began


def start(folder: Path, *, sync_ms: int = 5) -> Server:
    points = folder / "failpoints"
    points.mkdir()
    (points / "points").write_text(f"wal.sync.before slow ms={sync_ms}\n")
    environment = {"TOPICS_FAILPOINTS": str(points), "TOPICS_WAL_FILE_BYTES": str(64 * MIB)}
    return Server(folder, environment, shards=1).start()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument(
        "--attack", action="append", choices=attacks.NAMES, help="instead of the load; may be repeated"
    )
    arguments = parser.parse_args()
    for name in arguments.attack or ():
        with tempfile.TemporaryDirectory(prefix="topics-attack-") as folder:
            server = attacks.start(Path(folder))
            try:
                print(json.dumps({name: asdict(attacks.attack(server, name, arguments.seconds))}, indent=2))
            finally:
                server.close()
    if arguments.attack:
        return 0
    with tempfile.TemporaryDirectory(prefix="topics-overload-") as folder:
        server = start(Path(folder))
        try:
            report = overload(server, seconds=arguments.seconds, connections=arguments.connections)
        finally:
            server.close()
    print(json.dumps(asdict(report), indent=2))
    ratio = report.overload_p99_ms / max(report.idle_p99_ms, 1.0)
    print(f"delivery of the high topic, p99: {ratio:.1f} x of idle (aim 5)")
    print(f"recovered after {report.recovered_s:.1f} s (aim 2); lost {report.lost} of {report.records}")
    return int(report.lost > 0 or report.unseen > 0)


if __name__ == "__main__":
    sys.exit(main())
