"""Benchmark of the server over HTTP against baselines measured in the same run: `scripts/bench http [--quick] [--json PATH]`.

Every ratio is the median over rounds in which both sides alternate, so that a busy machine slows down both. Servers,
load generator and baselines are separate processes that share the cores of one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import threading
import time
from dataclasses import asdict
from statistics import median

from bench_engine import show
from bench_engine_support import PAYLOADS, Row, Run, Shell
from bench_http_support import RECORD, load, request, server
from peers.systems import TopicsServer

from topics.api.config import TopicConfig
from topics.engine.commands import topics as c

SINGLE = {"records": [{"data": RECORD}]}
BATCH = {"records": [{"data": RECORD}] * 100}


class Plan:
    """Number and duration of rounds; a quick run is only a smoke test."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 1 if quick else 5
        self.seconds = 0.5 if quick else 3.0
        self.settle = 0.0 if quick else 2.0  # for background work after writes


def ratios(ours: list[float], floors: list[float]) -> float:
    return median([mine / floor for mine, floor in zip(ours, floors)])


def fast_against_full_parser(run: Run, plan: Plan) -> list[Row]:
    text = request("/v0/topics/hot", SINGLE)
    fast: list[float] = []
    slow: list[float] = []
    with (
        run.directory("fast") as a,
        run.directory("slow") as b,
        server(a) as ours,
        server(b, TOPICS_FAST_PATH="0") as theirs,
    ):
        for _ in range(plan.rounds):
            fast.append(load(ours, text, connections=64, seconds=plan.seconds)["per_s"])
            slow.append(load(theirs, text, connections=64, seconds=plan.seconds)["per_s"])
        cpu = f"CPU time per request: {cpu_per_request(ours, text, plan)}; "
        cpu += f"through the full parser: {cpu_per_request(theirs, text, plan)}"
    ratio = ratios(fast, slow)
    work = "single POST, 64 connections, disk: fast path vs full parser"
    return [Row(work, median(fast), "writes/s", median(slow), ratio, "≥ 1 x", ratio >= 1, cpu)]


def cpu_per_request(to: TopicsServer, text: bytes, plan: Plan) -> str:
    result = load(to, text, connections=64, seconds=plan.seconds)
    cost = {role: used / result["count"] * 1e6 for role, used in result["cpu_s"].items() if role != "load"}
    return ", ".join(f"{role} {one:.1f} µs" for role, one in cost.items())


def synced_against_disk(run: Run, plan: Plan) -> list[Row]:
    synced: list[float] = []
    disk: list[float] = []
    with run.directory("sync") as folder, server(folder) as to:
        to.call("PUT", "/v0/topics/synced", {"durability": "fsync"})
        to.call("PUT", "/v0/topics/disk", {"durability": "disk"})
        for _ in range(plan.rounds):
            synced.append(
                load(to, request("/v0/topics/synced", SINGLE), connections=64, seconds=plan.seconds)["per_s"]
            )
            disk.append(
                load(to, request("/v0/topics/disk", SINGLE), connections=64, seconds=plan.seconds)["per_s"]
            )
    ratio = ratios(synced, disk)
    work = "single POST, 64 connections: fsync vs disk"
    return [Row(work, median(synced), "writes/s", median(disk), ratio, "≥ 0.6 x", ratio >= 0.6)]


def batches_and_reads(run: Run, plan: Plan) -> list[Row]:
    writes: list[float] = []
    engine: list[float] = []
    reads: list[float] = []
    text = request("/v0/topics/batch?return_seqs=false", BATCH)
    with run.directory("batch") as folder, run.directory("engine") as inside, server(folder) as to:
        shell = Shell(inside)
        shell.send(c.PutTopic("batch", TopicConfig()))
        for _ in range(plan.rounds):
            writes.append(load(to, text, connections=16, seconds=plan.seconds)["per_s"] * 100)
            engine.append(engine_rate(shell, plan.seconds))
            time.sleep(plan.settle)
            reads.append(read_rate(to, plan))
        shell.engine.close()
    ratio = ratios(writes, engine)
    read_ratio = ratios(reads, writes)
    return [
        Row("batch 100, 16 connections, 1 worker vs the engine in process", median(writes), "records/s", median(engine), ratio, "≥ 0.5 x", ratio >= 0.5),
        Row("diff limit 1000 vs batch-100 writes", median(reads), "records/s", median(writes), read_ratio, "≥ 3 x", read_ratio >= 3),
    ]  # fmt: skip


def engine_rate(shell: Shell, seconds: float) -> float:
    """Records per second of the engine alone, with 16 batches per turn, as with 16 connections."""
    count = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds / 2:
        shell.send(*[c.Append("batch", c.Records(list(PAYLOADS))) for _ in range(16)])
        count += 1600
    return count / (time.perf_counter() - began)


def read_rate(to: TopicsServer, plan: Plan) -> float:
    result = load(to, request("/v0/topics/batch/diff", {"limit": 1000}), connections=16, seconds=plan.seconds)
    return result["per_s"] * 1000


def raw_frames(run: Run, plan: Plan) -> list[Row]:
    ours: list[float] = []
    floor: list[float] = []
    with run.directory("frames") as folder, server(folder) as to:
        for _ in range(200 if plan.rounds > 1 else 20):
            to.call("POST", "/v0/topics/bulk?return_seqs=false", {"records": [{"data": RECORD}] * 10_000})
        accept = "Accept: application/vnd.topics.frames"
        one = request("/v0/topics/bulk/diff", {}, accept)
        path = f"{run.root}/plain"
        with open(path, "wb") as file:
            file.write(os.urandom(1 << 20) * 8)  # as large as one page of frames
        try:
            for _ in range(plan.rounds):
                ours.append(load(to, one, connections=1, seconds=plan.seconds)["bytes_per_s"] / 1e6)
                floor.append(plain_rate(path, plan.seconds) / 1e6)
        finally:
            os.unlink(path)
    ratio = ratios(ours, floor)
    work = "raw frames, pages of 8 MiB, vs the same bytes of a file over a plain socket"
    return [Row(work, median(ours), "MB/s", median(floor), ratio, "≥ 0.4 x", ratio >= 0.4)]


def plain_rate(path: str, seconds: float) -> float:
    """Bytes per second of a process that reads a file and writes it to a socket, one page per request."""
    listening = socket.create_server(("127.0.0.1", 0))
    size = os.path.getsize(path)
    pid = os.fork()
    if pid == 0:
        connection, _ = listening.accept()
        fd = os.open(path, os.O_RDONLY)
        while connection.recv(1):
            connection.sendall(os.pread(fd, size, 0))
        os._exit(0)
    received = 0
    with socket.create_connection(listening.getsockname()) as client:
        buffer = bytearray(1 << 18)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            client.sendall(b"x")
            left = size
            while left:
                left -= client.recv_into(buffer)
            received += size
        took = time.perf_counter() - began
    listening.close()
    os.waitpid(pid, 0)
    return received / took


def lone_sync(run: Run, plan: Plan) -> list[Row]:
    ours: list[float] = []
    floor: list[float] = []
    with run.directory("lone") as folder, server(folder) as to:
        to.call("PUT", "/v0/topics/lone", {"durability": "fsync"})
        time.sleep(plan.settle)  # a new server is still zero-filling its next log file
        text = request("/v0/topics/lone", SINGLE)
        for _ in range(plan.rounds):
            ours.append(load(to, text, connections=1, seconds=plan.seconds)["p99_ms"])
            floor.append(bare_sync_p99_ms(f"{folder}/bare", plan.seconds))
    above = median([mine - bare for mine, bare in zip(ours, floor)])
    work = "p99 of a lone fsync write vs a bare write + fdatasync"
    note = f"{above:.2f} ms above"
    return [Row(work, median(ours), "ms", median(floor), None, "≤ 1 ms above", above <= 1, note)]


def bare_sync_p99_ms(path: str, seconds: float) -> float:
    """p99 of writing and syncing 200 bytes at a time to a zero-filled file, like the log, in a separate thread."""
    took: list[float] = []

    def work() -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, bytes(4 << 20), 0)
        os.fsync(fd)
        began = time.perf_counter()
        at = 0
        while time.perf_counter() - began < seconds:
            one = time.perf_counter()
            os.pwrite(fd, b"x" * 200, at % (4 << 20))
            os.fdatasync(fd)
            took.append((time.perf_counter() - one) * 1000)
            at += 200
        os.close(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return sorted(took)[int(len(took) * 0.99)]


GROUPS = [fast_against_full_parser, synced_against_disk, batches_and_reads, raw_frames, lone_sync]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench http", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument(
        "--json", default="bench-out/http.json", metavar="PATH", help="output file for the results"
    )
    parser.add_argument("--dir", default="bench-out/data", help="where to create data directories")
    parser.add_argument("--only", default="", metavar="NAME", help="only groups whose name contains this")
    options = parser.parse_args()
    run, plan = Run(os.path.abspath(options.dir), options.quick), Plan(options.quick)
    rows: list[Row] = []
    for group in GROUPS:
        if options.only in group.__name__:
            print(f"{group.__name__} …", file=sys.stderr, flush=True)
            rows += group(run, plan)
    show(rows)
    os.makedirs(os.path.dirname(os.path.abspath(options.json)), exist_ok=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(
            {"quick": options.quick, "machine": machine, "rows": [asdict(row) for row in rows]},
            file,
            indent=1,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
