"""The load generator: a C program (scripts/load), compiled when it is needed, and run as a separate process.

A `Load` is requests of many clients. A client is one connection with one request in flight (which may be a pipeline); it
sends the next one as soon as the response is complete, or at a pace. With a maximum number of requests, the load ends
with the last response, unless the time is over first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.protocols import HELLO, Exchange

SCRIPTS = Path(__file__).resolve().parents[1]
SOURCES = SCRIPTS / "load"
BUILT = SCRIPTS.parent / "bench-out" / "load"
FLAGS = ("-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror")

Pids = dict[str, list[int]]  # processes whose CPU time to report, by role


@dataclass
class Load:
    address: str
    exchange: Exchange
    clients: int
    seconds: float
    warm_up: float = 1.0
    rate: float = 0.0  # requests per second of all clients; 0: unlimited
    pids: Pids = field(default_factory=dict)
    most: int = 0  # maximum number of requests of all clients, without a rate; 0: unlimited
    every_s: float = 0.0  # a client sends one request in this time; 0: as fast as possible
    then: tuple[Exchange, ...] = ()  # a client sends these after the first, and begins again
    topics: int = 1  # numbers of {topic}
    cursor: tuple[int, int] = (0, 0)  # {cursor} begins at the first, and again at the second; 0: never

    def plan(self) -> bytes:
        every_s = self.clients / self.rate if self.rate else self.every_s
        return plan(
            self.address,
            self.exchange.protocol,
            {
                "mode": "requests",
                "clients": self.clients,
                "seconds": self.seconds,
                "warm_up": self.warm_up,
                "every_us": every_s * 1e6,
                "most": self.most,
                "topics": self.topics,
                "cursor": f"{self.cursor[0]} {self.cursor[1]}",
            },
            [("request", one) for one in (self.exchange, *self.then)],
            self.pids,
        )


def plan(
    address: str,
    protocol: str,
    settings: dict[str, object],
    requests: list[tuple[str, Exchange]],
    pids: Pids | None = None,
) -> bytes:
    """A plan in the format of scripts/load/plan.c."""
    host, _, port = address.rpartition(":")
    lines = [f"connect {host} {port or 0}", f"protocol {protocol}"]
    lines += [f"{name} {value}" for name, value in settings.items()]
    lines += [f"cpu {role} {pid}" for role, group in (pids or {}).items() for pid in group]
    if protocol in HELLO:
        requests = [("hello", Exchange(protocol, HELLO[protocol])), *requests]
    text = "".join([f"{line}\n" for line in lines]).encode()
    return text + b"".join([_request(name, one) for name, one in requests])


def _request(name: str, one: Exchange) -> bytes:
    about = f"{name} {one.replies} {one.records} {one.marks} {int(one.timed)} {len(one.request)}\n"
    return about.encode() + one.request + b"\n"


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def program() -> Path:
    """The compiled generator. Its name has a hash of its sources and its compiler, so that a change compiles it again."""
    if not (found := compiler()):
        raise SystemExit("The load generator needs a C compiler: install gcc and libc6-dev, or set CC.")
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join([source.read_bytes() for source in sources]))
    digest.update(repr((found, FLAGS, os.uname().machine)).encode())
    path = BUILT / f"load-{digest.hexdigest()[:16]}"
    if path.exists():
        return path
    BUILT.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")  # renamed when complete: others may compile it at the same time
    units = [source for source in sources if source.suffix == ".c"]
    done = subprocess.run([found, *FLAGS, "-o", own, *units], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The load generator could not be compiled:\n{done.stderr}")
    own.rename(path)
    return path


def start(text: bytes) -> subprocess.Popen[bytes]:
    """Start the generator with a plan."""
    process = subprocess.Popen(
        [program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        process.stdin.write(text)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has refused the plan, and says why
    process.stdin = None  # or communicate() would flush it
    return process


def result_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, errors = process.communicate()
    if process.returncode or not output:
        raise RuntimeError(errors.decode(errors="replace").strip() or "the load generator failed")
    result: dict[str, Any] = json.loads(output)
    return result


def drive(load: Load) -> dict[str, Any]:
    """Run the generator and return its results."""
    return result_of(start(load.plan()))


def cpu_s(pids: Pids) -> dict[str, float]:
    """CPU time so far, by role; `load` is this process."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for role, group in pids.items():
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in group]
        found[role] = sum(int(one[11]) + int(one[12]) for one in fields) / ticks
    return {**found, "load": time.process_time()}
