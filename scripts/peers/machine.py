"""Description of the machine, including the sync latency of its disk."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ZEROS = bytes(4 << 20)


def describe(folder: str, *, probe_s: float) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {_memory_gib()} GiB",
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": _filesystem(folder),
        "fsync_us": fsync_us(folder, probe_s),
    }


def fsync_us(folder: str, seconds: float) -> dict[str, float]:
    """Latency of writing 200 bytes to a zero-filled file with fdatasync: the minimum cost of a durable write."""
    path = f"{folder}/probe"
    took = []
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, ZEROS, 0)
        os.fsync(fd)
        end = time.perf_counter() + seconds
        at = 0
        while time.perf_counter() < end or not took:
            began = time.perf_counter()
            os.pwrite(fd, b"x" * 200, at % (len(ZEROS) - 200))
            os.fdatasync(fd)
            took.append((time.perf_counter() - began) * 1e6)
            at += 200
    finally:
        os.close(fd)
        os.unlink(path)
    took.sort()
    return {"p50": round(took[len(took) // 2], 1), "p99": round(took[int(len(took) * 0.99)], 1)}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))


def _filesystem(folder: str) -> str:
    """The type of the file system that contains the folder, by the longest matching mount point."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(point, kind) for point, kind in mounts if os.path.commonpath([point, folder]) == point]
    return max(holding, key=lambda mount: len(mount[0]))[1]
