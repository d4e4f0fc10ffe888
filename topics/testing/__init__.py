"""A real server for tests, with its own processes, port and data directory.

    with running_server() as server, server.client() as client:
        client.write("orders", {"item": "tea"})

`topics.testing.fixtures` has pytest fixtures.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import topics
from topics.client.blocking import Client
from topics.client.errors import ClientError, Disconnected, NotReady
from topics.client.flows import Retries

if TYPE_CHECKING:
    from topics.client.asynchronous import AsyncClient

START_S = 60.0  # enough on a loaded machine
STOP_S = 30.0


class TestServer:
    """A server process. `environment` extends and overrides the default settings of test servers."""

    __test__ = False  # not a test class, despite its name

    def __init__(
        self, folder: Path, *, shards: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.shards = folder, shards
        self.environment = dict(environment or {})
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """The server's log output."""
        return (self.folder / "server.log").read_text(errors="replace")

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def token(self) -> str:
        """The first key of TOPICS_API_KEYS, used by `client`; "" without keys."""
        return self.environment.get("TOPICS_API_KEYS", "").split(",")[0].split(":")[0]

    def client(self, **options: Any) -> Client:
        return Client(self.url, **{"token": self.token, **options})

    def async_client(self, **options: Any) -> AsyncClient:
        from topics.client.asynchronous import AsyncClient

        return AsyncClient(self.url, **{"token": self.token, **options})

    def start(self) -> TestServer:
        """Start, or restart on the same port with the same data."""
        self.folder.mkdir(parents=True, exist_ok=True)
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        # Run this checkout's modules, not a directory named `workers` in the current one.
        package = str(Path(topics.__file__).resolve().parents[1])
        environment = {
            **clean,
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")])),
            "TOPICS_HOST": "127.0.0.1",
            # After a restart the same port, so that clients can reconnect.
            "TOPICS_PORT": self.url.rpartition(":")[2] or "0",
            "TOPICS_PORT_FILE": str(port_file),
            "TOPICS_DATA_DIR": str(self.data_dir),
            "TOPICS_WAL_SHARDS": str(self.shards),
            "TOPICS_WAL_FILE_BYTES": str(4 << 20),
            "TOPICS_MIN_FREE_BYTES": "0",
            **self.environment,
        }
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers"],
                process_group=0,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up = time.monotonic() + START_S
        while not port_file.exists():
            self._check(give_up)
            time.sleep(0.01)
        self.url = f"http://{port_file.read_text().strip()}"
        self._wait_ready(give_up)
        return self

    def _check(self, give_up: float) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the server exited with {self._process.returncode}:\n{self.log}")
        if time.monotonic() > give_up:
            self.close()
            raise RuntimeError(f"the server did not start within {START_S:g} s:\n{self.log}")

    def _wait_ready(self, give_up: float) -> None:
        with self.client(retries=Retries(for_s=0)) as client:
            while True:
                try:
                    client.ready()
                    return
                except (Disconnected, NotReady):
                    self._check(give_up)
                    time.sleep(0.02)
                except ClientError:  # with TOPICS_PROBE_AUTH any response will do
                    return

    def stop(self) -> int:
        """Stop with SIGTERM; return the exit code. Acknowledged writes are synced, streams end."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)

    def kill(self) -> None:
        """Kill all processes with SIGKILL, as in a crash."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        give_up = time.monotonic() + STOP_S
        while _group_lives(self._process.pid) and time.monotonic() < give_up:
            time.sleep(0.005)  # the data directory is locked until the last process is gone

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        # RUN names the directory of the sockets, which the next start would remove.
        with contextlib.suppress(OSError):
            shutil.rmtree((self.data_dir / "RUN").read_text().strip())


def _group_lives(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


@contextlib.contextmanager
def running_server(
    folder: Path | str | None = None, *, shards: int = 1, environment: Mapping[str, str] | None = None
) -> Iterator[TestServer]:
    """Run a server within a `with` block. Its data is deleted afterwards, unless `folder` is given."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            # A worker that is being killed may still create a file.
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="topics-", ignore_cleanup_errors=True)
            )
        server = TestServer(Path(folder), shards=shards, environment=environment)
        stack.callback(server.close)
        yield server.start()
