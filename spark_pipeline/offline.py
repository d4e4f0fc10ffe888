"""A temporary server for a job on the data directory of a stopped server.

Only a server may change a topic, and it locks the data directory. So a job without a server starts its own one, on a
free port and with a random key. It keeps the directory's number of shards.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spark_pipeline.tasks.server import Refused, Server, Unreachable

TOKEN_ENV = "TOPICS_OFFLINE_TOKEN"
START_S = 600.0  # replaying a long log takes time
STOP_S = 120.0
POLL_S = 0.05
LOCKED = 3  # exit code of a server whose data directory is in use
# The server dies with this process.
_PROGRAM = """
import runpy, sys
from topics.system.process import die_with_parent
die_with_parent(int(sys.argv[1]))
sys.argv = ["workers"]
runpy.run_module("workers", run_name="__main__")
"""
# Settings of the regular server that do not apply here.
_DROPPED = (
    "TOPICS_HOST",
    "TOPICS_WAL_SHARDS",
    "TOPICS_FRONTS",
    "TOPICS_PROBE_AUTH",
    "TOPICS_ALLOW_INSECURE_NO_AUTH",
)


class CannotStart(Exception):
    """The temporary server could not be started; the message says what to do."""


class InUse(CannotStart):
    """A server is running on the directory."""


@dataclass(frozen=True, slots=True)
class PrivateServer:
    url: str
    token_env: str


@contextmanager
def private_server(data_dir: str, cold_dir: str) -> Iterator[PrivateServer]:
    if not (Path(data_dir) / "LOCK").exists():
        raise CannotStart(f"{data_dir} is not a server's data directory: give its TOPICS_DATA_DIR")
    if not cold_dir:
        raise CannotStart("give the cold directory with --cold-dir, or TOPICS_COLD_DIR as for the server")
    token = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="topics-spark-offline-") as folder:
        port_file, log = Path(folder) / "port", Path(folder) / "log"
        environment = {name: value for name, value in os.environ.items() if name not in _DROPPED} | {
            "TOPICS_DATA_DIR": os.path.abspath(data_dir),
            "TOPICS_COLD_DIR": os.path.abspath(cold_dir),
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(port_file),
            "TOPICS_API_KEYS": token,
            "TOPICS_LOG_FORMAT": "human",
        }
        with log.open("wb") as out:
            # Without -P, a directory named `workers` in the current directory would be run instead. In its own
            # session, so that Ctrl-C reaches only the job, which then stops the server.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid())],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        os.environ[TOKEN_ENV] = token  # also for the tasks
        try:
            yield PrivateServer(_wait_ready(process, port_file, log), TOKEN_ENV)
        finally:
            os.environ.pop(TOKEN_ENV, None)
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # safe: the server recovers from crashes
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            message = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            if process.returncode == LOCKED:
                raise InUse(
                    f"a server is using this directory: give its --url instead of --offline. Its message: {message}"
                )
            raise CannotStart(f"the server for this job exited with {process.returncode}: {message}")
        if port_file.exists():
            url = f"http://{port_file.read_text().strip()}"
            server = Server(url, TOKEN_ENV, patience_s=0)
            try:
                server.get("/v0/topics?page_size=1")
                return url
            except (Refused, Unreachable):
                pass  # not yet
            finally:
                server.close()
        time.sleep(POLL_S)
    raise CannotStart(f"the server for this job is not ready after {START_S:.0f} s")
