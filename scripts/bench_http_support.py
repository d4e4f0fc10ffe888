"""What every row of the HTTP bench shares: servers, the load generator, raw requests."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORD = {"id": 1748, "text": "x" * 76}  # 100 bytes of compact JSON


def request(path: str, body: Any, *headers: str) -> bytes:
    """One request as bytes, its body as compact JSON."""
    text = json.dumps(body, separators=(",", ":")).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    head = "\r\n".join([*lines, f"Content-Length: {len(text)}"])
    return head.encode() + b"\r\n\r\n" + text


class Server:
    def __init__(self, folder: str, **environment: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.data_dir = f"{folder}/data"
        port_file = Path(f"{folder}/port")
        port_file.unlink(missing_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        with open(f"{folder}/log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers"],
                cwd=HERE.parent,
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
        while not port_file.exists():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended; see {folder}/log")
            time.sleep(0.01)
        self.address = port_file.read_text().strip()
        while self.call("GET", "/readyz")[0] != 200:
            time.sleep(0.05)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        text = json.dumps(body).encode() if body is not None else None
        connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, content

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far, by process."""
        ticks = os.sysconf("SC_CLK_TCK")
        found: dict[str, float] = {}
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in children:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            found[name.removeprefix("topics: ")] = (int(fields[11]) + int(fields[12])) / ticks
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@contextmanager
def server(folder: str, **environment: str) -> Iterator[Server]:
    running = Server(folder, **environment)
    try:
        yield running
    finally:
        running.stop()


def load(
    to: Server, text: bytes, *, connections: int, seconds: float, warm_up: float = 0.5
) -> dict[str, float]:
    """Let the load generator, a process of its own, keep that many connections busy."""
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "load.py"),
            to.address,
            f"--connections={connections}",
            f"--seconds={seconds}",
            f"--warm-up={warm_up}",
        ],
        input=text,
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result
