"""The measured systems: how to start them, and their requests.

All listen on loopback and keep their data on the same disk. A `Target` is a system at one durability:

| | `fsync`: acknowledged after a sync | `disk`: acknowledged after the write, synced soon after |
|---|---|---|
| topics | `durability: fsync` | `durability: disk` |
| Redis | `appendfsync always` | `appendfsync everysec` |
| NATS | `sync_interval: always` | its default, a sync every 2 minutes |

A third, `ephemeral`, is in memory only: topics with that durability, Redis without its log, NATS without JetStream.

Streams are deleted and created again between measurements, to limit disk and memory usage. Redis takes no snapshots, and
compacts its log between measurements instead of during them, which is to its advantage.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import protocols
from peers.load import SCRIPTS
from peers.protocols import Exchange

STREAM = "bench"
TAIL_STREAM = "tail"
START_S = 60.0
FILL_STEP = 1000  # records per request
WAIT_MS = 30_000


class TopicsServer:
    """A topics server; keyword arguments are its environment variables."""

    def __init__(self, folder: str, **environment: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.data_dir = f"{folder}/data"
        port_file = Path(f"{folder}/port")
        port_file.unlink(missing_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        with open(f"{folder}/log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers"],
                cwd=SCRIPTS.parent,
                stdout=log,
                stderr=log,
                env={
                    **clean,
                    "TOPICS_PORT": "0",
                    "TOPICS_PORT_FILE": str(port_file),
                    "TOPICS_DATA_DIR": self.data_dir,
                    "TOPICS_WAL_SHARDS": "1",
                    **environment,
                },
            )
        wait_until(port_file.exists, self._process, folder)
        self.address = port_file.read_text().strip()
        wait_until(lambda: self.call("GET", "/readyz")[0] == 200, self._process, folder)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        text = json.dumps(body).encode() if body is not None else None
        connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, content

    def pids(self) -> dict[str, list[int]]:
        """The processes that handle requests, by role: front, shard."""
        found: dict[str, list[int]] = {}
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in children:
            name = Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("topics: ")
            found.setdefault(name.rstrip("0123456789- "), []).append(int(pid))
        return found

    def all_pids(self) -> dict[str, list[int]]:
        """All processes, including the supervisor."""
        return {**self.pids(), "supervisor": [self._process.pid]}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], folder: str) -> None:
    give_up = time.monotonic() + START_S
    while not condition():
        if process.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"{process.args} did not start; see {folder}/log")
        time.sleep(0.02)


def memory_bytes(pids: dict[str, list[int]]) -> int:
    """Resident memory of the processes."""
    pages = [
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for group in pids.values() for pid in group
    ]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


class Target:
    """One system at one durability, with one stream to write to."""

    system: str
    protocol: str
    cursor_first = 0  # the cursor of a reader from the start

    def __init__(self, durability: str) -> None:
        self.durability = durability
        self.address = ""

    def pids(self) -> dict[str, list[int]]:
        raise NotImplementedError

    def make(self, stream: str = STREAM) -> None:
        """Create the stream, empty."""
        raise NotImplementedError

    def clear(self, stream: str = STREAM) -> None:
        """Delete the stream, and wait until that causes no more work."""
        raise NotImplementedError

    def clear_all(self, streams: list[str]) -> None:
        for stream in streams:
            self.clear(stream)

    def write(self, payload: bytes, count: int, stream: str = STREAM) -> Exchange:
        raise NotImplementedError

    def append(self, payload: bytes, count: int, stream: str = STREAM) -> Exchange:
        """Like `write`, with the records numbered from 1, so that a reader's cursor is the number of records before it."""
        return self.write(payload, count, stream)

    def read(self, count: int, *, expected: int | None = None) -> Exchange:
        """Read up to `count` records after the cursor; exactly `expected` must come."""
        raise NotImplementedError

    def wait(self, stream: str) -> Exchange | None:
        """The request of a reader that waits for what comes after the cursor; None: the server pushes."""
        raise NotImplementedError

    def fill(self, payload: bytes, records: int) -> None:
        exchange = self.append(payload, FILL_STEP)
        for _ in range(records // FILL_STEP):
            protocols.ask(self.address, exchange)

    def stop(self) -> None:
        raise NotImplementedError


class Topics(Target):
    system = "topics"
    protocol = "http"

    def __init__(self, durability: str, server: TopicsServer) -> None:
        super().__init__(durability)
        self.server = server
        self.address = server.address

    def pids(self) -> dict[str, list[int]]:
        return self.server.pids()

    def make(self, stream: str = STREAM) -> None:
        status, _, text = self.server.call("PUT", f"/v0/topics/{stream}", {"durability": self.durability})
        if status not in {200, 201}:
            raise protocols.BadAnswer(text)

    def clear(self, stream: str = STREAM) -> None:
        self.server.call("DELETE", f"/v0/topics/{stream}")

    def write(self, payload: bytes, count: int, stream: str = STREAM) -> Exchange:
        body = b'{"records":[' + b",".join([b'{"data":%b}' % payload] * count) + b"]}"
        path = f"/v0/topics/{stream}" + ("?return_seqs=false" if count > 1 else "")
        return Exchange("http", protocols.http_post(path, body), count)

    def read(self, count: int, *, expected: int | None = None) -> Exchange:
        body = b'{"from_seq":%b,"limit":%d}' % (protocols.CURSOR, count)
        marks = count if expected is None else expected
        return Exchange(
            "http", protocols.http_post(f"/v0/topics/{STREAM}/diff", body), max(1, marks), marks=marks
        )

    def wait(self, stream: str) -> Exchange:
        body = b'{"from_seq":%b,"wait_ms":%d}' % (protocols.CURSOR, WAIT_MS)
        return Exchange("http", protocols.http_post(f"/v0/topics/{stream}/diff", body))

    def stop(self) -> None:
        self.server.stop()


class Process(Target):
    """A peer: one server process per durability."""

    def __init__(self, durability: str, folder: str) -> None:
        super().__init__(durability)
        os.makedirs(folder, exist_ok=True)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        with open(f"{folder}/log", "ab") as log:
            self._process = subprocess.Popen(self.command(folder, port), stdout=log, stderr=log)
        wait_until(self._answers, self._process, folder)

    def command(self, folder: str, port: int) -> list[str]:
        raise NotImplementedError

    def _answers(self) -> bool:
        try:
            self.clear()
        except (OSError, protocols.BadAnswer):
            return False
        return True

    def pids(self) -> dict[str, list[int]]:
        return {"server": [self._process.pid]}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


class Redis(Process):
    system = "redis"
    protocol = "resp"

    def command(self, folder: str, port: int) -> list[str]:
        settings = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": folder,
            "appendonly": "no" if self.durability == "ephemeral" else "yes",
            "appendfsync": "always" if self.durability == "fsync" else "everysec",
            "save": "",
            "auto-aof-rewrite-percentage": "0",
        }
        return ["redis-server", *[word for name, value in settings.items() for word in (f"--{name}", value)]]

    def make(self, stream: str = STREAM) -> None:
        """Created by the first XADD."""

    def clear(self, stream: str = STREAM) -> None:
        self.clear_all([stream])

    def clear_all(self, streams: list[str]) -> None:
        self._call(b"DEL", *[stream.encode() for stream in streams])
        if self.durability == "ephemeral":
            return
        self._call(b"BGREWRITEAOF")
        while b"aof_rewrite_in_progress:1" in (text := self._info()) or b"aof_rewrite_scheduled:1" in text:
            time.sleep(0.02)

    def _call(self, *words: bytes) -> bytes:
        return protocols.ask(self.address, Exchange("resp", protocols.redis_command(*words)))

    def _info(self) -> bytes:
        return self._call(b"INFO", b"persistence")

    def write(self, payload: bytes, count: int, stream: str = STREAM) -> Exchange:
        one = protocols.redis_command(b"XADD", stream.encode(), b"*", b"d", payload)
        return Exchange("resp", one * count, count, count)

    def append(self, payload: bytes, count: int, stream: str = STREAM) -> Exchange:
        one = protocols.redis_command(b"XADD", stream.encode(), protocols.NEXT_ID + b"-1", b"d", payload)
        return Exchange("resp", one * count, count, count)

    def fill(self, payload: bytes, records: int) -> None:
        name = protocols.NEXT_ID
        for first in range(1, records + 1, FILL_STEP):
            one, *rest = self.append(payload, FILL_STEP).request.split(name)
            numbered = b"".join([b"%020d%b" % (first + i, part) for i, part in enumerate(rest)])
            protocols.ask(self.address, Exchange("resp", one + numbered, replies=FILL_STEP))

    def read(self, count: int, *, expected: int | None = None) -> Exchange:
        words = (b"XRANGE", STREAM.encode(), b"(%b-1" % protocols.CURSOR_ID, b"+", b"COUNT", b"%d" % count)
        marks = count if expected is None else expected
        return Exchange("resp", protocols.redis_command(*words), max(1, marks), marks=marks)

    def wait(self, stream: str) -> Exchange:
        place = (b"STREAMS", stream.encode(), b"%b-1" % protocols.CURSOR_ID)
        return Exchange("resp", protocols.redis_command(b"XREAD", b"BLOCK", b"%d" % WAIT_MS, *place))


class Nats(Process):
    system = "nats"
    protocol = "nats"
    cursor_first = 1

    def command(self, folder: str, port: int) -> list[str]:
        sync = "sync_interval: always\n" if self.durability == "fsync" else ""
        stored = f"jetstream {{\nstore_dir: {json.dumps(folder)}\nmax_file_store: 64G\n{sync}}}\n"
        Path(f"{folder}/server.conf").write_text(
            f"listen: 127.0.0.1:{port}\nping_interval: 10m\n"  # so that clients that only count need not respond to pings
            + ("" if self.durability == "ephemeral" else stored)
        )
        return [nats_server(), "-c", f"{folder}/server.conf"]

    def make(self, stream: str = STREAM) -> None:
        config = {
            "name": stream,
            "subjects": [f"{stream}.>"],
            "storage": "file",
            "allow_direct": True,
            "num_replicas": 1,
        }
        protocols.nats_ask(self.address, f"$JS.API.STREAM.CREATE.{stream}", config)
        if stream == TAIL_STREAM:
            consumer = {
                "durable_name": "tail",
                "deliver_subject": f"_INBOX.{protocols.TAIL:05}",
                "ack_policy": "none",
                "deliver_policy": "all",
            }
            body = {"stream_name": stream, "config": consumer}
            protocols.nats_ask(self.address, f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.tail", body)

    def clear(self, stream: str = STREAM) -> None:
        if self.durability == "ephemeral":  # NATS core stores nothing
            protocols.ask(self.address, Exchange("nats", b"PING\r\n"))
            return
        try:
            protocols.nats_ask(self.address, f"$JS.API.STREAM.DELETE.{stream}", None)
        except protocols.BadAnswer as error:
            if b"stream not found" not in error.args[0]:
                raise

    def write(self, payload: bytes, count: int, stream: str = STREAM) -> Exchange:
        return Exchange("nats", protocols.nats_publish(f"{stream}.1", payload) * count, count, count)

    def read(self, count: int, *, expected: int | None = None) -> Exchange:
        body = b'{"seq":%b,"batch":%d}' % (protocols.CURSOR, count)
        request = protocols.nats_publish(f"$JS.API.DIRECT.GET.{STREAM}", body)
        # An empty message ends the batch.
        return Exchange("nats", request, count, replies=count + 1, marks=count)

    def wait(self, stream: str) -> None:
        return None


def nats_server() -> str:
    """The path of a program, preferably from the virtual environment."""
    return shutil.which("nats-server", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}") or ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Fleet:
    """All systems at all durabilities. They keep running, but are idle unless measured."""

    def __init__(
        self, folder: str, names: tuple[str, ...], durabilities: tuple[str, ...], **environment: str
    ) -> None:
        """`environment`: variables of the topics server."""
        self.folder = folder
        self._environment = environment
        self.missing = {name: why for name in names if (why := absent(name))}
        self.targets: dict[tuple[str, str], Target] = {}
        shutil.rmtree(folder, ignore_errors=True)
        try:
            for name in names:
                if name not in self.missing:
                    self._start(name, durabilities)
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, durabilities: tuple[str, ...]) -> None:
        if name == "topics":
            server = TopicsServer(f"{self.folder}/topics", **self._environment)
            self.targets |= {(name, durability): Topics(durability, server) for durability in durabilities}
            return
        kind = Redis if name == "redis" else Nats
        for durability in durabilities:
            self.targets[name, durability] = kind(durability, f"{self.folder}/{name}-{durability}")

    def at(self, durability: str) -> list[Target]:
        return [target for (_, own), target in self.targets.items() if own == durability]

    def stop(self) -> None:
        for target in self.targets.values():
            target.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def absent(name: str) -> str:
    """Why a system cannot be measured here, or ""."""
    if name == "redis" and not shutil.which("redis-server"):
        return "redis-server is not installed"
    if name == "nats" and not nats_server():
        return "nats-server is not installed"
    return ""


def version(name: str) -> str:
    if name == "topics":
        import topics

        return topics.__version__
    command = ["redis-server", "--version"] if name == "redis" else [nats_server(), "--version"]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return text.split("v=")[1].split()[0] if name == "redis" else text.split()[-1].removeprefix("v")
