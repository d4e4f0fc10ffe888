"""Jobs on a data directory that no server uses: one is started for the job alone, and ends with it.

Only a server changes a topic, and it holds the directory's lock while it runs: so a job without a server brings its own, on a
port that the system chooses and with a key that nobody else knows. It keeps the number of shards that the directory has.
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
START_S = 600.0  # a long log takes its time
STOP_S = 120.0
POLL_S = 0.05
LOCKED = 3  # how a server ends that finds the directory in use
# It ends with this process, however that ends.
_PROGRAM = """
import runpy, sys
from topics.system.process import die_with_parent
die_with_parent(int(sys.argv[1]))
sys.argv = ["workers"]
runpy.run_module("workers", run_name="__main__")
"""
# What the server of every day says that is not for this one.
_DROPPED = (
    "TOPICS_HOST",
    "TOPICS_WAL_SHARDS",
    "TOPICS_FRONTS",
    "TOPICS_PROBE_AUTH",
    "TOPICS_ALLOW_INSECURE_NO_AUTH",
)


class CannotStart(Exception):
    """The text says why, and what to do."""


class InUse(CannotStart):
    """A server has the directory."""


@dataclass(frozen=True, slots=True)
class Private:
    url: str
    token_env: str


@contextmanager
def private_server(data_dir: str, cold_dir: str) -> Iterator[Private]:
    if not (Path(data_dir) / "LOCK").exists():
        raise CannotStart(f"{data_dir} is no data directory of a server: give its TOPICS_DATA_DIR")
    if not cold_dir:
        raise CannotStart("say where the cold tier is: --cold-dir, or TOPICS_COLD_DIR as for the server")
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
            # Without -P a folder named `workers` where the user happens to be would be run instead. A session of
            # its own: Ctrl-C is for the job, which then stops it.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid())],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        os.environ[TOKEN_ENV] = token  # also for the tasks
        try:
            yield Private(_ready(process, port_file, log), TOKEN_ENV)
        finally:
            os.environ.pop(TOKEN_ENV, None)
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # it is made for that
                process.wait()


def _ready(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            said = (log.read_text(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
            if process.returncode == LOCKED:
                raise InUse(
                    f"a server is running on it: give its --url instead of --offline. It says: {said}"
                )
            raise CannotStart(f"the server for this job has ended ({process.returncode}): {said}")
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
