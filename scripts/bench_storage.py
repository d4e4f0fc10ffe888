"""Benchmark of the storage tiers, as ratios: `scripts/bench storage` (docs/storage.md#measured).

| row | what is compared |
|---|---|
| slow cold tier | p99 of writes and of live delivery with a cold tier that takes 2 s per call, and with a fast one |
| relocation | p99 of writes while segments move to the cold tier, and while none do |
| relocation, rewriting | MB/s of relocation and of rewriting segments, against `cp` and `cp` with a sync of the same files |

Each p99 is the median over pairs of consecutive measurements, so that other load affects both. `--quick` is a smoke test
without meaningful results.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from bench_engine_support import QUIET
from peers.systems import TopicsServer

from topics.api.config import EngineConfig, TopicConfig
from topics.engine.commands import topics as c
from topics.engine.runtime.engine import Engine, Job
from workers.shard.local_store import LocalSegmentStore
from workers.shard.posix import PosixDisk, SystemClock

MIB = 1 << 20
PAD = "x" * 980
SLOW = "segment.open.before slow ms=2000\n"
WRITES_PER_S = 200
HISTORY_PER_S = 2
AIM = 1.5


@dataclass
class Ratio:
    work: str
    unit: str
    ours: float
    baseline: float
    ratio: float
    aim: float | None = None

    @property
    def line(self) -> str:
        aim = "" if self.aim is None else f"≤ {self.aim:g}{'' if self.ratio <= self.aim else ', missed'}"
        return f"| {self.work} | {self.ours:.3g} {self.unit} | {self.baseline:.3g} {self.unit} | {self.ratio:.2f} | {aim} |"


@dataclass(frozen=True)
class Size:
    """Amount of work."""

    pairs: int
    seconds: float  # duration of a measurement
    segments: int  # to move or rewrite, of 10 000 records of 1 KiB

    @classmethod
    def of(cls, *, quick: bool) -> Size:
        return cls(2, 3.0, 4) if quick else cls(7, 20.0, 150)


# ---- clients


class Client:
    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=120)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        text = json.dumps(body).encode() if body is not None else None
        self._connection.request(method, path, text, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        content = json.loads(response.read())
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {content}")
        return content


def p99(samples: list[float]) -> float:
    return sorted(samples)[min(len(samples) - 1, len(samples) * 99 // 100)]


@contextmanager
def working(*loops: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run each loop in a thread until the block ends."""
    over = threading.Event()
    threads = [threading.Thread(target=loop, args=(over,), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def live_delays(server: TopicsServer, topic: str, delays: list[float]) -> Callable[[threading.Event], None]:
    """Follow the topic and record the delays: records contain their time of sending."""
    wid = Client(server.address).ask("POST", "/v0/watch", {"topics": {topic: {"tail": True}}})["wid"]

    def follow(over: threading.Event) -> None:
        connection = http.client.HTTPConnection(server.address, timeout=120)
        connection.request("GET", f"/v0/watch/{wid}")
        stream = connection.getresponse()
        while not over.is_set():
            line = stream.readline()
            if line.startswith(b"data: ") and b'"records"' in line:
                now = time.perf_counter()
                delays.extend(now - record["data"]["at"] for record in json.loads(line[6:])["records"])
        connection.close()

    return follow


def history(server: TopicsServer, topic: str) -> Callable[[threading.Event], None]:
    """Read old records now and then."""

    def read(over: threading.Event) -> None:
        client, seq = Client(server.address), 0
        while not over.wait(1 / HISTORY_PER_S):
            page = client.ask("POST", f"/v0/topics/{topic}/diff", {"from_seq": seq, "limit": 50})
            seq = page["next_from_seq"] if not page["caught_up"] else 0

    return read


def write_for(server: TopicsServer, topic: str, seconds: float) -> list[float]:
    """Write at a constant rate; return the latencies, measured from when each write was due."""
    client, took = Client(server.address), []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        client.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": {"at": began, "pad": PAD}}]})
        took.append(time.perf_counter() - due)
        due += 1 / WRITES_PER_S
    return took


def fill(server: TopicsServer, topic: str, records: int) -> None:
    client = Client(server.address)
    client.ask("PUT", f"/v0/topics/{topic}", {})
    for _ in range(0, records, 500):
        client.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": PAD}] * 500})


def metric(server: TopicsServer, name: str) -> float:
    text = server.call("GET", "/v0/metrics?format=prometheus")[2].decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


# ---- rows


def slow_cold_tier(folder: str, size: Size) -> list[Ratio]:
    points = Path(folder) / "points"
    points.mkdir(parents=True)
    environment = {
        "TOPICS_COLD_DIR": f"{folder}/cold",
        "TOPICS_COLD_FAILPOINTS": str(points),
        "TOPICS_COLD_CACHE_BYTES": "0",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_SEGMENT_MAX_EVENTS": "500",
        "TOPICS_WAL_FILE_BYTES": str(2 * MIB),  # for frequent checkpoints and relocations
    }
    found: list[tuple[float, float, float, float]] = []
    server = TopicsServer(folder, **environment)
    try:
        fill(server, "old", 5000)
        fill(server, "t", 500)
        give_up = time.monotonic() + 120
        while metric(server, "topics_relocations_total") < 5 and time.monotonic() < give_up:
            fill(server, "old", 500)
            time.sleep(1)
        for _ in range(size.pairs):
            pair: list[float] = []
            for is_slow in (True, False):
                (points / "points").write_text(SLOW if is_slow else "")
                delays: list[float] = []
                with working(live_delays(server, "t", delays), history(server, "old")):
                    time.sleep(0.5)
                    took = write_for(server, "t", size.seconds)
                pair += [p99(took) * 1000, p99(delays) * 1000]
            found.append((pair[0], pair[1], pair[2], pair[3]))
    finally:
        (points / "points").write_text("")
        server.stop()
    return [
        paired("write p99, cold tier of 2 s a call", [(p[0], p[2]) for p in found]),
        paired("live delivery p99, cold tier of 2 s a call", [(p[1], p[3]) for p in found]),
    ]


def paired(work: str, pairs: list[tuple[float, float]]) -> Ratio:
    ratio = median(ours / baseline for ours, baseline in pairs)
    return Ratio(work, "ms", median(p[0] for p in pairs), median(p[1] for p in pairs), ratio, AIM)


def during_relocation(folder: str, size: Size) -> list[Ratio]:
    """Use copies of one directory: once with everything to relocate, once with nothing."""
    origin = f"{folder}/origin"
    server = TopicsServer(origin, TOPICS_HOT_RETAIN_SEGMENTS="1000000", TOPICS_COLD_DIR=f"{origin}/cold")
    fill(server, "old", size.segments * 10_000)
    server.stop()
    pairs: list[tuple[float, float]] = []
    for _ in range(size.pairs):
        pair: list[float] = []
        for retain in ("1", "1000000"):
            copy = f"{folder}/run"
            shutil.rmtree(copy, ignore_errors=True)
            subprocess.run(["cp", "-r", "--reflink=auto", origin, copy], check=True)
            os.sync()
            server = TopicsServer(copy, TOPICS_HOT_RETAIN_SEGMENTS=retain, TOPICS_COLD_DIR=f"{copy}/cold")
            try:
                Client(server.address).ask("PUT", "/v0/topics/t", {})
                took = write_for(server, "t", size.seconds)
                pair.append(p99(took) * 1000)
                moved = metric(server, "topics_relocations_total")
                if (moved > 0) != (retain == "1"):
                    raise RuntimeError(f"{moved:.0f} segments were relocated: the measurement is invalid")
            finally:
                server.stop()
        pairs.append((pair[0], pair[1]))
    shutil.rmtree(f"{folder}/run", ignore_errors=True)
    return [paired("write p99 during relocation to the cold tier", pairs)]


class Shell:
    """Runs an engine and its jobs, one after the other."""

    def __init__(self, folder: str, config: EngineConfig, cold: LocalSegmentStore | None = None) -> None:
        self.engine = Engine.open(PosixDisk(f"{folder}/data"), SystemClock(), config, cold)
        self._jobs: list[Job] = []

    def fill(self, size: Size) -> None:
        records = c.Records([b'"' + PAD.encode() + b'"'] * 1000)
        self.send(c.PutTopic("t", TopicConfig()))
        for _ in range(size.segments * 10 + 1):
            self.send(c.Append("t", records))
        self.checkpoint()

    def send(self, command: c.Command) -> None:
        self._jobs += self.engine.turn([(0, command)]).jobs
        while self._jobs:
            self._step()

    def checkpoint(self) -> None:
        before = self.engine.counters["checkpoints"]
        self.engine.checkpoint()
        self.until(lambda: self.engine.counters["checkpoints"] > before)

    def until(self, is_done: Callable[[], bool]) -> float:
        """Run until done; return the seconds it took."""
        began = time.perf_counter()
        while not is_done():
            self._step()
        return time.perf_counter() - began

    def _step(self) -> None:
        if self._jobs:
            job = self._jobs.pop(0)
            job.run()
            self._jobs += self.engine.finish(job, None).jobs
        else:
            self._jobs += self.engine.turn([]).jobs

    def close(self) -> None:
        self.engine.stop_cold()
        while self._jobs:
            self._step()
        self.engine.close()


def copying(files: list[Path], target: str) -> tuple[float, float]:
    """Seconds for `cp`, and for `cp` with a sync of the copies."""
    os.makedirs(target)
    began = time.perf_counter()
    subprocess.run(["cp", *map(str, files), target], check=True)
    copied = time.perf_counter() - began
    subprocess.run(["sync", *(f"{target}/{file.name}" for file in files)], check=True)
    synced = time.perf_counter() - began
    shutil.rmtree(target)
    return copied, synced


def throughput(work: str, size: int, taken: float, copied: tuple[float, float]) -> list[Ratio]:
    rate = size / taken / 1e6
    return [
        Ratio(f"{work}, against {what}", "MB/s", rate, size / other / 1e6, other / taken)
        for what, other in zip(("cp", "cp and sync"), copied, strict=True)
    ]


def data_files(folder: str, size: Size) -> tuple[list[Path], int]:
    files = sorted(Path(f"{folder}/data/topics").rglob("*.data"))[: size.segments]
    return files, sum(file.stat().st_size for file in files)


def relocation_rate(folder: str, size: Size) -> list[Ratio]:
    config = msgspec.structs.replace(QUIET, hot_retain_segments=0, relocate_bytes_per_s=0)
    shell = Shell(folder, config)  # without a cold tier, so that nothing moves while it is filled
    shell.fill(size)
    shell.close()
    files, total = data_files(folder, size)
    copied = copying(files, f"{folder}/copy")
    shell = Shell(folder, config, LocalSegmentStore(f"{folder}/cold"))
    taken = shell.until(lambda: shell.engine.counters.get("relocations", 0) >= size.segments)
    shell.close()
    return throughput("relocation, without a bound", total, taken, copied)


def rewrite_rate(folder: str, size: Size) -> list[Ratio]:
    shell = Shell(folder, msgspec.structs.replace(QUIET, reclaim_bytes_per_s=0, rewrite_dead_share=0.4))
    shell.fill(size)
    files, total = data_files(folder, size)
    copied = copying(files, f"{folder}/copy")
    last = size.segments * 10_000
    for first in range(1, last, 50_000):
        shell.send(c.Delete("t", seqs=list(range(first, min(first + 50_000, last + 1), 2))))
    shell.checkpoint()
    taken = shell.until(lambda: shell.engine.counters["swaps"] >= size.segments)
    shell.close()
    return throughput("rewriting, half of it dead, without a bound", total, taken, copied)


ROWS = {
    "slow": slow_cold_tier,
    "moving": during_relocation,
    "relocation": relocation_rate,
    "rewriting": rewrite_rate,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench storage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smoke test of a minute or two")
    parser.add_argument("--only", choices=ROWS, action="append", help="only this part; repeatable")
    parser.add_argument("--dir", help="working directory, on the disk to measure [a temporary directory]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    size = Size.of(quick=options.quick)
    found: list[Ratio] = []
    for name in options.only or ROWS:
        with tempfile.TemporaryDirectory(prefix="topics-bench-", dir=options.dir) as folder:
            rows = ROWS[name](folder, size)
        found += rows
        for row in rows:
            print(row.line, file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    else:
        print("| work | here | baseline | ratio | aim |\n|---|---|---|---|---|")
        print("\n".join(row.line for row in found))
    return int(any(row.aim is not None and row.ratio > row.aim for row in found) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
