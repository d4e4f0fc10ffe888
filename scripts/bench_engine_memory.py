"""Rows about memory, each measured in a separate process, and about checkpoints with many topics."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tracemalloc

import msgspec
from bench_engine_support import PAYLOADS, QUIET, Row, Run, Shell, plain

from topics.engine.commands import topics as c
from topics.engine.reading.render import render_records
from workers.shard.posix import PosixDisk

MS = 1_000_000.0
CACHE_BYTES = 256 * 1024
KINDS = {"no tags": 60, "10 k tags": 80, "distinct tags": 250}
COUNT = 1_000_000


def _resident() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure_resident(path: str, kind: str, count: int) -> None:
    """In a new process: print how much resident memory `count` records take, after writing and after a start."""
    tag = {
        "no tags": None,
        "10 k tags": lambda i: b"sensor.%d.value" % (i * 7919 % 10_000),
        "distinct tags": lambda i: b"order.%d" % i,
    }[kind]
    config = msgspec.structs.replace(QUIET, cache_bytes=CACHE_BYTES)
    shell = Shell(path, config)
    shell.send(plain("warm"), plain("t"))
    shell.fill("warm", 5_000, lambda i: b"%d" % (i % 100))
    shell.checkpoint()
    before = _resident()
    for tenth in range(10):  # with checkpoints in between, as in a server
        shell.fill("t", count // 10, tag, tenth * count // 10)
        shell.checkpoint()
    written = _resident() - before - CACHE_BYTES
    shell.engine.close()
    del shell
    before = _resident()
    shell = Shell(path, config)
    opened = _resident()
    shell.send(c.State("t"))
    print(json.dumps({"written": written / count, "loaded": (_resident() - opened) / count}))


def resident_memory(run: Run) -> list[Row]:
    count = run.count(COUNT)
    rows: list[Row] = []
    for kind, aim in KINDS.items():
        with run.directory("memory") as path:
            command = [sys.executable, sys.argv[0], "--resident", path, kind, str(count)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        note = f"{found['loaded']:.0f} B when loaded at a start; cache {CACHE_BYTES // 1024} KiB"
        written = found["written"]
        rows.append(
            Row(
                f"resident memory, {kind}",
                written,
                "B/record",
                None,
                None,
                f"≤ {aim} B",
                written <= aim,
                note,
            )
        )
    return rows


class _TracingDisk(PosixDisk):
    """Counts live memory blocks at each write call, when a group's parts and their copies all exist."""

    blocks = 0
    is_tracing = False

    def write(self, handle: int, offset: int, data: bytes) -> None:
        if self.is_tracing:
            type(self).blocks = max(self.blocks, _blocks())
        super().write(handle, offset, data)


def _blocks() -> int:
    """Number of live memory blocks of Python and numpy."""
    return sum(stat.count for stat in tracemalloc.take_snapshot().statistics("filename"))


def allocated_blocks(run: Run) -> list[Row]:
    count = 2000
    with run.directory("blocks") as path:
        disk = _TracingDisk(path)
        shell = Shell(path, disk=disk)
        shell.send(plain("t"))
        shell.fill("t", 20_000)
        shell.checkpoint()
        records = c.Records([bytes(payload) for payload in PAYLOADS * (count // 100)])
        shell.send(c.Diff("t", 0, 1000))
        gc.collect()
        tracemalloc.start()
        before, disk.is_tracing = _blocks(), True
        before_bytes = tracemalloc.get_traced_memory()[0]
        shell.send(c.Append("t", records))
        disk.is_tracing = False
        peak, after = disk.blocks - before, _blocks() - before
        kept_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        base = _blocks()
        outcome = shell.engine.turn([(0, c.Diff("t", 1000, 1000))])
        page = outcome.replies[0][1]
        assert isinstance(page, c.Page)
        in_page = _blocks() - base
        tracemalloc.reset_peak()
        base_bytes = tracemalloc.get_traced_memory()[0]
        text = render_records(page)
        peak_bytes = tracemalloc.get_traced_memory()[1] - base_bytes
        tracemalloc.stop()
        shell.abandon()
    return [
        Row("blocks alive at the write, append", peak / count, "blocks/record", aim="reported",
            note=f"{after / count:.2f} stay, {kept_bytes / count:.0f} B/record with the cached entry"),
        Row("blocks of a page, diff", in_page / 1000, "blocks/record", aim="reported",
            note=f"rendering {len(text)} B peaks at {peak_bytes} B"),
    ]  # fmt: skip


def checkpoint_of_many(run: Run) -> list[Row]:
    topics = run.count(10_000)
    rows: list[Row] = []
    with run.directory("many") as path:
        shell = Shell(path)
        names = [f"topic-{i}" for i in range(topics)]
        for when in ("new", "known"):
            for first in range(0, topics, 64):
                shell.send(*[c.Append(name, c.Records(PAYLOADS[:4])) for name in names[first : first + 64]])
            while shell.engine.wal.synced_lsn < shell.engine.wal.last_lsn:
                shell.send()
            gc.collect()
            gc.freeze()  # as a worker does after recovery: the collector ignores long-lived objects
            shell.reset()
            shell.checkpoint()
            kinds = ", ".join(f"{kind} {ns / MS:.0f}" for kind, ns in sorted(shell.job_kinds.items()))
            rows += [
                Row(f"checkpoint of 10 k {when} topics, disk", shell.job_ns / MS, "ms", None, None, "< 1 s",
                    shell.job_ns < 1000 * MS, kinds),
                Row(f"checkpoint of 10 k {when} topics, longest turn", shell.longest_ns / MS, "ms", None, None,
                    "≤ 5 ms", shell.longest_ns <= 5 * MS, f"all turns {shell.loop_ns / MS:.0f} ms"),
            ]  # fmt: skip
        shell.abandon()
        gc.unfreeze()
    return rows


ROWS = [resident_memory, allocated_blocks, checkpoint_of_many]
