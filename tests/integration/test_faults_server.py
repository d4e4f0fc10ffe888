"""Goal: faults in the environment of a whole server are handled as the catalogue says: it refuses to start, answers 429 or 503, or nothing happens.

Method: a real server with one fault: its directory, its file limits, its disk, its locks, its port, or
clients that disconnect. Faults that need root are skipped with a message without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.faults import fault
from tests.support.server import ROOT, Server, is_alive, until
from topics.engine.core.placement import shard_of

NOBODY = 65534
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST instead of FIN
Start = Callable[..., Server]


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("not tested: this needs root")


def mounted(*command: str) -> None:
    """Run a mount command; in a container even root may not be allowed to."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"not tested: {' '.join(command[:3])}: {done.stderr.strip()}")


def run_server(data_dir: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Start a server that is expected to refuse."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    environment = {
        **clean,
        "TOPICS_PORT": "0",
        "TOPICS_DATA_DIR": str(data_dir),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "workers"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )  # type: ignore[call-overload]


def topic_on(shard: int, shards: int = 2) -> str:
    return next(name for i in range(100) if shard_of(name := f"topic{i}", shards) == shard)


# ---- directories


@fault(
    "data directory",
    "the server may not write to its data directory",
    "refused with exit code 2 and the path of the directory",
)
def test_directory_without_permission(tmp_path: Path) -> None:
    """Root drops its rights only after the program is loaded, because its files may be readable for root alone."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    program = f"""
import os, sys
from workers.process.data_directory import DataDirectory
from workers.process.exit_codes import Refusal
if os.geteuid() == 0:
    os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
try:
    DataDirectory({str(closed / "data")!r})
except Refusal as refusal:
    print(refusal)
    sys.exit(refusal.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.strip() == f"cannot use the data directory {closed}/data: Permission denied"
    assert list(closed.iterdir()) == []


@fault(
    "data directory",
    "the data directory is on a read-only mount",
    "refused with exit code 2 and the path of the directory",
)
def test_directory_on_a_read_only_mount(tmp_path: Path) -> None:
    needs_root()
    data = tmp_path / "data"
    data.mkdir()
    mounted("mount", "-t", "tmpfs", "-o", "ro,size=1m", "topics-test", str(data))
    try:
        done = run_server(data)
    finally:
        subprocess.run(["umount", str(data)], check=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"cannot use the data directory {data}: Read-only file system" in done.stderr


# ---- locks


@fault(
    "worker",
    "a worker of an earlier server still holds the lock of its shard",
    "its topics get 503, other shards serve existing topics; once the lock is released, the shard serves too",
)
def test_lock_of_a_shard_is_held(start_server: Start, tmp_path: Path) -> None:
    folder = tmp_path / "held"
    lock = folder / "data" / "layout-1" / "shard-01" / "LOCK"
    first = start_server(folder=folder)
    for shard in (0, 1):
        assert first.write(topic_on(shard), "kept").status == 201
    first.stop()
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = start_server(folder=folder, wait_ready=False)
        until(lambda: "waiting for the previous worker" in second.log)
        until(lambda: second.write(topic_on(0), "free").status == 200)
        refused = second.diff(topic_on(1))
        assert (refused.status, refused.error["code"]) == (503, "not_ready")
        assert second.get("/readyz").status == 503
        assert second.get("/healthz").status == 200
        assert second.stop() == 0  # also while a worker waits for the lock
        second.start(wait_ready=False)
        until(lambda: second.log.count("waiting for the previous worker") == 2)
    second.wait_ready()
    assert [row["data"] for row in second.diff(topic_on(1)).json["records"]] == ["kept"]


@fault(
    "supervisor",
    "the fronts of a server that was just killed still hold the port",
    "the new server waits for it up to 1.5 s, then serves",
)
def test_same_port_right_after_kill_9(start_server: Start, tmp_path: Path) -> None:
    folder = tmp_path / "port"
    first = start_server(folder=folder)
    first.write("a", "kept")
    assert first.process is not None
    children = list(first.children().values())
    os.kill(first.process.pid, signal.SIGKILL)  # its children exit a moment later
    first.process.wait(120)
    second = start_server(folder=folder, environment={"TOPICS_PORT": str(first.port)})
    assert second.port == first.port
    assert [row["data"] for row in second.diff("a").json["records"]] == ["kept"]
    assert not any(is_alive(pid) for pid in children)


# ---- open files


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def file_limit(pid: int, count: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@fault(
    "front",
    "no open files left: EMFILE when a client connects",
    "open connections are served; new ones are closed at once until others close",
)
def test_front_without_open_files(start_server: Start) -> None:
    server = start_server()
    front = server.pid("front 0")
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack, file_limit(front, files_of(front) + 8):
        connections = [stack.enter_context(server.connect()) for _ in range(30)]
        served = [connection for connection in connections if is_served(connection, request)]
        assert 1 <= len(served) < len(connections)
        assert all(is_served(connection, request) for connection in served), (
            "open connections are still served"
        )
        for connection in served:
            connection.close()
        until(lambda: is_served(stack.enter_context(server.connect()), request))
    assert server.pid("front 0") == front
    assert server.get("/healthz").status == 200


def is_served(connection: socket.socket, request: bytes) -> bool:
    try:
        connection.sendall(request)
        return connection.recv(65536).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


@fault(
    "worker",
    "no open files left: EMFILE when a segment is opened for a read",
    "that read fails with 500; once files can be opened again it succeeds, and nothing is announced as lost",
)
def test_worker_without_open_files(start_server: Start, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    options = {"folder": folder, "shards": 1, "environment": {"TOPICS_SEGMENT_MAX_EVENTS": "1000"}}
    first = start_server(**options)
    for _ in range(4):
        assert first.write("a", *["x" * 500] * 900).status in (200, 201)
    first.stop()
    server = start_server(**options)
    worker = server.pid("shard 0")
    with file_limit(
        worker, 3
    ):  # lower than any descriptor that could be free: files are opened and closed in the background
        refused = server.diff("a", limit=1000)
        assert refused.status == 500, refused
        assert server.get("/healthz").status == 200
    page = server.diff("a", limit=1000)
    assert page.status == 200
    assert (len(page.json["records"]), page.json.get("tombstone")) == (1000, None)
    assert server.pid("shard 0") == worker


# ---- a full disk


@fault(
    "disk",
    "a real file system runs full under the server",
    "writes get 429 with limit disk_full, reads and deletes continue, and writes resume by themselves",
)
def test_full_file_system(start_server: Start, tmp_path: Path) -> None:
    needs_root()
    folder = tmp_path / "full"
    (folder / "data").mkdir(parents=True)
    mounted("mount", "-t", "tmpfs", "-o", "size=12m", "topics-test", str(folder / "data"))
    try:
        server = start_server(
            folder=folder,
            shards=1,
            environment={"TOPICS_WAL_FILE_BYTES": str(1 << 20), "TOPICS_SEGMENT_MAX_EVENTS": "1000"},
        )
        seqs = fill(server)
        assert server.get("/healthz").status == 200
        page = server.diff("a", limit=10)
        assert [row["$seq"] for row in page.json["records"]] == seqs[:10]
        deleted = server.post("/v0/topics/a/delete", {"before_seq": seqs[-1]})
        assert (deleted.status, deleted.json["deleted"]) == (200, len(seqs) - 1)
        until(lambda: server.write("a", "again").status == 200)
        assert server.diff("a", limit=2).json["records"][0]["$seq"] == seqs[-1]
        server.stop()
    finally:
        # Lazily: after a failed test the server still has open files there, and is stopped later.
        subprocess.run(["umount", "-l", str(folder / "data")], check=True, timeout=120)


def fill(server: Server) -> list[int]:
    """Write until the disk is full; returns the seqs that were acknowledged."""
    seqs: list[int] = []
    for _ in range(1000):
        reply = server.write("a", *["x" * 50_000] * 4, return_seqs=True)
        if reply.status == 429:
            assert reply.error["detail"]["limit"] == "disk_full"
            assert "retry-after" in reply.headers
            return seqs
        assert reply.status in (200, 201), reply
        seqs += range(reply.json["first_seq"], reply.json["head_seq"] + 1)
    raise AssertionError("the disk did not become full")


@fault(
    "disk",
    "another program uses the last byte, and the server is killed and restarted, three times",
    "each time it starts; reads, deletes and acks continue, appends get 429 disk_full; deletes free space, and writes resume",
)
def test_restarts_without_a_free_byte(start_server: Start, tmp_path: Path) -> None:
    needs_root()
    folder = tmp_path / "full"
    (folder / "data").mkdir(parents=True)
    mounted("mount", "-t", "tmpfs", "-o", "size=12m", "topics-test", str(folder / "data"))
    try:
        server = start_server(
            folder=folder,
            shards=1,
            environment={"TOPICS_WAL_FILE_BYTES": str(1 << 20), "TOPICS_SEGMENT_MAX_EVENTS": "100"},
        )
        for first in range(0, 1000, 10):
            assert server.write("a", *[f"{seq:01000d}" for seq in range(first, first + 10)]).status in (
                200,
                201,
            )
        assert server.put("/v0/topics/jobs", {"type": "queue"}).status in (200, 201)
        assert server.write("jobs", 1, 2).status == 200
        reserve = folder / "data" / "layout-1" / "shard-00" / "reserve"
        until(lambda: reserve.exists() and reserve.stat().st_size > 500_000)
        for _ in range(3):
            take_all(folder / "data" / "other")
            server.kill()
            take_all(folder / "data" / "other")
            server.start()
            page = server.diff("a", limit=1000, max_batch_bytes=8 << 20).json
            assert [row["data"] for row in page["records"]] == [f"{seq:01000d}" for seq in range(1000)]
            refused = server.write("a", "x")
            assert (refused.status, refused.error["detail"]["limit"]) == (429, "disk_full")
        job = server.post("/v0/topics/jobs/claim", {"node": "n"}).json["claimed"][0]
        acked = server.post("/v0/topics/jobs/ack", {"node": "n", "seqs": [job["$seq"]]})
        assert acked.json["acked"] == 1
        assert server.post("/v0/topics/a/delete", {"before_seq": 900}).json["deleted"] == 899
        until(lambda: server.write("a", "again").status == 200)
        server.kill()
        server.start()
        rows = server.diff("a", limit=1000).json["records"]
        assert [row["data"] for row in rows] == [*(f"{seq:01000d}" for seq in range(899, 1000)), "again"]
        server.stop()
    finally:
        subprocess.run(["umount", "-l", str(folder / "data")], check=True, timeout=120)


def take_all(path: Path) -> None:
    """Fill the file system with a file outside of the data directory."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


# ---- clients that disconnect


@fault(
    "client",
    "clients disconnect during a large answer",
    "the rest of the answer is dropped; others are served, and no error is logged",
)
def test_clients_that_disconnect_during_an_answer(start_server: Start) -> None:
    server = start_server(shards=1)
    for _ in range(4):
        assert server.write("big", "x" * 900_000).status in (200, 201)
    body = json.dumps({"limit": 1000, "max_batch_bytes": 8 << 20}).encode()
    head = f"POST /v0/topics/big/diff HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        with server.connect() as connection:
            connection.sendall(head.encode() + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    front = server.pid("front 0")
    base = files_of(front)
    until(lambda: files_of(front) <= base)
    assert len(server.diff("big", limit=1000, max_batch_bytes=8 << 20).json["records"]) == 4
    errors = [line for line in server.log.splitlines() if '"level":"error"' in line.lower().replace(" ", "")]
    assert errors == []
