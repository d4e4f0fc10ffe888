"""A real server for tests: supervisor and children as processes, with a data directory and a port of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkedProcess, fork_server

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0  # on a loaded machine, with several servers starting at once
PROGRAM = (sys.executable, "-m", "workers")
PATIENCE_S = 120.0  # of all other waits; only failures take that long


@dataclass
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


def readable(sock: socket.socket, timeout_s: float) -> bool:
    """Whether there is something to read, now or within the timeout. (select() is limited to 1024 descriptors.)"""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def until(condition: Any, timeout_s: float = PATIENCE_S, every_s: float = 0.01) -> Any:
    """Poll until the condition returns something true, and return that. Fails after the timeout."""
    give_up = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {timeout_s} s: {condition}")
        time.sleep(every_s)


def caught_up(read: Callable[[], Reply]) -> Reply:
    """Repeat a request until its answer includes all copies. On an overloaded machine an answer may say that it did
    not wait for them.
    """
    give_up = time.monotonic() + PATIENCE_S
    while True:
        reply = read()
        if b'"catch_up_timed_out":true' not in reply.body or time.monotonic() > give_up:
            return reply


def let_in(ask: Callable[[], Reply]) -> Reply:
    """Repeat a request until the server accepts it. On an overloaded machine it refuses writes without executing
    them, so they may be repeated.
    """

    def answer() -> Reply | None:
        reply = ask()
        return None if reply.status == 429 and b'"limit":"pressure"' in reply.body else reply

    reply: Reply = until(answer, every_s=0.1)
    return reply


@dataclass
class Server:
    """One server. `environment` is added to the defaults of test servers, and overrides them."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    shards: int = 2
    host: str = ""
    port: int = 0
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    credentials: Mapping[str, str] = field(default_factory=dict)  # headers of every request
    command: Sequence[str] = ()  # the command that starts it; without one it is forked from the fork server

    def with_key(self, secret: str) -> Server:
        """The same server, accessed with this key."""
        return replace(self, credentials={"Authorization": f"Bearer {secret}"})

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def log_path(self) -> Path:
        return self.folder / "server.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def start(self, *, wait_ready: bool = True) -> Server:
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        environment = {
            **clean,
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(port_file),
            "TOPICS_DATA_DIR": str(self.data_dir),
            "TOPICS_WAL_SHARDS": str(self.shards),
            "TOPICS_WAL_FILE_BYTES": str(4 << 20),  # a test machine starts many servers
            "TOPICS_LOG_FORMAT": "json",
            "TOPICS_ALLOWED_HOSTS": "x",  # the Host of requests that tests write byte by byte
            **self.environment,
        }
        with self.log_path.open("ab") as log:
            if self.command:
                self.process = subprocess.Popen(
                    self.command, cwd=ROOT, env=environment, stdout=log, stderr=log
                )
            else:
                self.process = fork_server().start(environment, log)
        until(lambda: port_file.exists() or self.process.poll() is not None, START_S)
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
        self.host, _, port = port_file.read_text().strip().rpartition(":")
        self.port = int(port)
        if wait_ready:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = START_S) -> None:
        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            # When probes need a key, any answer but 503 will do.
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.get("/readyz").status != 503
            return False

        until(ready, timeout_s)

    def stop(self, timeout_s: float = PATIENCE_S, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """kill -9 of the supervisor; its children end too."""
        assert self.process is not None
        children = list(self.children().values())
        self.process.kill()
        self.process.wait(PATIENCE_S)
        until(lambda: not any(is_alive(pid) for pid in children))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        with contextlib.suppress(OSError):  # its sockets, which the next start would remove
            shutil.rmtree((self.data_dir / "RUN").read_text().strip())

    # -- processes -----------------------------------------------------------------------------------------

    def children(self) -> dict[str, int]:
        """Pids by name: `shard 0`, `front 0`."""
        assert self.process is not None
        found: dict[str, int] = {}
        for pid in _children_of(self.process.pid):
            title = _title(pid)
            if title.startswith("topics: "):
                found[title.removeprefix("topics: ")] = pid
        return found

    def pid(self, name: str) -> int:
        return int(until(lambda: self.children().get(name)))

    # -- requests ------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = PATIENCE_S,
    ) -> Reply:
        """One request on a connection of its own. A body that is not bytes is sent as JSON."""
        return let_in(lambda: self._ask(method, path, body, headers, timeout_s))

    def _ask(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None, timeout_s: float
    ) -> Reply:
        sent = {**self.credentials, **(headers or {})}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body, separators=(",", ":")).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection(self.host.strip("[]"), self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            received = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, received, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return caught_up(lambda: self.request("GET", path, headers=headers))

    def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        return self.request("POST", path, body, headers)

    def put(self, path: str, body: Any = None, **headers: str) -> Reply:
        return self.request("PUT", path, body, headers)

    def delete(self, path: str, **headers: str) -> Reply:
        return self.request("DELETE", path, headers=headers)

    def write(self, topic: str, *data: Any, **fields: Any) -> Reply:
        """Write these payloads, one record each; `fields` are further fields of the body."""
        return self.post(f"/v0/topics/{topic}", {"records": [{"data": value} for value in data], **fields})

    def diff(self, topic: str, **fields: Any) -> Reply:
        return caught_up(lambda: self.post(f"/v0/topics/{topic}/diff", fields))

    def connect(self, timeout_s: float = PATIENCE_S) -> socket.socket:
        """A plain socket, for requests that no HTTP library would send."""
        return socket.create_connection((self.host.strip("[]"), self.port), timeout_s)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    return ""


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(text) for text in task.read_text().split()]
    return found


@contextlib.contextmanager
def running(folder: Path, **options: Any) -> Iterator[Server]:
    server = Server(folder, **options)
    try:
        yield server.start()
    finally:
        server.close()
