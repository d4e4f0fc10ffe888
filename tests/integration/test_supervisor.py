"""Goal: the supervisor starts and stops its children in order, restarts them, and handles addresses, signals, refusals and exit codes.

Method: it runs as a real process over small fake children (tests/support/fake_child.py) that record
what they are told. Tests wait for conditions, never for time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import topics
from tests.support import fork_server
from tests.support.faults import fault
from tests.support.in_process import call
from topics.cli import commands
from workers.__main__ import main as server_main
from workers.process import exit_codes

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
PROGRAM = "tests.support.fake_server"
Entry = dict[str, Any]


def until(question: Callable[[], Any], what: str) -> Any:
    """The first true result."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if answer := question():
            return answer
        time.sleep(0.01)
    raise AssertionError(f"not within {DEADLINE_S} s: {what}")


def is_alive(pid: int) -> bool:
    """Running, or our own zombie; a zombie of another parent does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class Server:
    """One supervisor with fake children; after its end `start` may be called again."""

    def __init__(self, tmp_path: Path) -> None:
        self.data = tmp_path / "deep" / "data"
        self.port_file = tmp_path / "port"
        self.journal = tmp_path / "journal"
        self.stderr = tmp_path / "stderr"
        self.process: subprocess.Popen[bytes] | fork_server.ForkedProcess | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "TOPICS_DATA_DIR": str(self.data),
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(self.port_file),
            "TOPICS_WAL_SHARDS": "2",
            "FAKE_JOURNAL": str(self.journal),
        }

    def refused(self, **environ: str) -> tuple[int, str]:
        """Exit code and output of a start that is refused before the first child."""
        return fork_server.refused({**self.environment, **environ})

    def start(self, *, as_program: bool = False, **environ: str) -> Server:
        """Forked from the fork server, or as a program, which inherits more of this process."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        self.port_file.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        given = {**inherited, **self.environment, **environ}
        with self.stderr.open("wb") as stderr:
            if as_program:
                command = [sys.executable, "-m", PROGRAM]
                self.process = subprocess.Popen(command, cwd=ROOT, env=given, stderr=stderr)
            else:
                self.process = fork_server.fork_server().start(given, stderr, PROGRAM)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def text(self) -> str:
        return self.stderr.read_text()

    def entries(self, event: str = "", role: str = "") -> list[Entry]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if event in ("", entry["event"]) and role in ("", entry["role"])]

    def pids(self, role: str = "") -> list[int]:
        return [entry["pid"] for entry in self.entries("started", role)]

    def peers_of(self, pid: int) -> list[list[int]]:
        """The shards in each `peers` message that the process got."""
        return [
            [worker[0] for worker in entry["workers"]]
            for entry in self.entries("peers")
            if entry["pid"] == pid
        ]

    def up(self, shards: int = 2, fronts: int = 1) -> Server:
        """Wait until every child knows all workers."""
        everyone = list(range(shards))

        def complete() -> bool:
            pids = self.pids()
            return len(pids) == shards + fronts and all(everyone in self.peers_of(pid) for pid in pids)

        until(complete, "complete start")
        return self

    def address(self) -> tuple[str, int]:
        text = until(lambda: self.port_file.exists() and self.port_file.read_text(), "port file")
        host, _, port = text.rpartition(":")
        return host.strip("[]"), int(port)

    def who_answers(self) -> int:
        with socket.create_connection(self.address(), timeout=DEADLINE_S) as connection:
            return int(connection.recv(100))

    def clean_up(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            until(lambda pid=pid: not is_alive(pid), f"end of {pid}")
        record = self.data / "RUN"
        if record.exists():
            shutil.rmtree(record.read_text().strip(), ignore_errors=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path)
    yield one
    one.clean_up()


# Starting.


def test_a_start_tells_each_child_its_place_and_its_peers(server: Server) -> None:
    server.start(TOPICS_FRONTS="2").up(fronts=2)
    started = server.entries("started", "worker") + server.entries("started", "front")
    assert {entry["parent"] for entry in started} == {server.pid}
    workers, fronts = (
        {entry["index"]: entry["spec"] for entry in started if entry["role"] == role}
        for role in ("worker", "front")
    )
    assert sorted(workers) == sorted(fronts) == [0, 1]
    for shard, given in workers.items():
        assert (given["shard"], given["shards"]) == (shard, 2)
        assert given["path"].endswith(f"/shard-{shard:02}-{given['incarnation']}.sock")
        assert len(given["path"]) < 100
    for front, given in fronts.items():
        assert (given["front"], given["shards"]) == (front, 2)
    told = [entry["workers"] for entry in server.entries("peers", "front")][-1]
    assert told == [[shard, given["incarnation"], given["path"]] for shard, given in sorted(workers.items())]
    run_dir = Path(workers[0]["path"]).parent
    assert run_dir.stat().st_mode & 0o777 == 0o700
    message = server.text()
    for part in (
        f"http://127.0.0.1:{server.address()[1]}",
        str(server.data),
        '"shards":2',
        '"fronts":2',
        str(server.pid),
    ):
        assert part in message


def test_the_port_is_open_before_any_child_runs(server: Server) -> None:
    server.start(FAKE_FAILS="front")
    with socket.create_connection(server.address(), timeout=DEADLINE_S):
        pass


def test_the_port_file_has_the_chosen_port_and_nothing_else(server: Server) -> None:
    server.start().up()
    host, port = server.address()
    assert server.port_file.read_text() == f"{host}:{port}"
    assert port > 0
    assert stat.S_IMODE(server.port_file.stat().st_mode) == 0o644, "other users may read it, unlike the data"
    assert server.who_answers() == server.pids("front")[0]


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_ipv6(server: Server, fronts: str) -> None:
    server.start(TOPICS_HOST="[::1]:0", TOPICS_FRONTS=fronts).up(fronts=int(fronts))
    assert server.port_file.read_text().startswith("[::1]:")
    assert server.who_answers() in server.pids("front")


def test_several_fronts_share_one_port(server: Server) -> None:
    server.start(TOPICS_FRONTS="3").up(fronts=3)
    found: set[int] = set()

    def all_found() -> bool:
        found.add(server.who_answers())
        return found == set(server.pids("front"))

    until(all_found, "answer from every front")


# Deaths.


@fault("supervisor", "a worker is killed", "all other children are told, and it is restarted")
def test_a_killed_worker_is_announced_and_replaced(server: Server) -> None:
    server.start().up()
    victim = server.entries("started", "worker")[0]
    lost, kept = victim["index"], 1 - victim["index"]
    front = server.pids("front")[0]
    before = len(server.peers_of(front))
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: server.peers_of(front)[before:][-1:] == [[0, 1]], "new peer")
    assert server.peers_of(front)[before:] == [[kept], [0, 1]]
    old, new = [entry for entry in server.entries("started", "worker") if entry["index"] == lost]
    assert new["spec"]["incarnation"] > old["spec"]["incarnation"]
    assert not Path(old["spec"]["path"]).exists()
    # The end was announced only once it was complete, and the other worker was told of both end and restart.
    other = next(entry["pid"] for entry in server.entries("started", "worker") if entry["index"] == kept)
    until(lambda: server.peers_of(other)[-2:] == [[kept], [0, 1]], "peers message at the other worker")
    assert server.stop() == 0


@fault("supervisor", "a front is killed", "it is restarted on the same port")
def test_a_killed_front_is_replaced_on_the_same_port(server: Server) -> None:
    server.start().up()
    address = server.address()
    victim = server.who_answers()
    os.kill(victim, signal.SIGKILL)
    # The port stays open meanwhile: this connection waits for the next front.
    answer = server.who_answers()
    assert answer != victim
    assert server.address() == address
    until(lambda: [0, 1] in server.peers_of(answer), "peers at the new front")


@fault("supervisor", "a child hangs", "it is killed and restarted")
def test_a_hung_child_is_killed_and_replaced(server: Server) -> None:
    server.start(TOPICS_PING_TIMEOUT_MS="2000").up()
    victim = server.pids("worker")[0]
    os.kill(victim, signal.SIGSTOP)
    until(lambda: len(server.pids("worker")) == 3, "replacement")
    assert not is_alive(victim)
    assert "does not answer" in server.text()


@fault("supervisor", "a child cannot start", "it is retried with growing delays; the others serve")
def test_a_child_that_cannot_start_is_retried_with_growing_delays(server: Server) -> None:
    server.start(FAKE_FAILS="front", TOPICS_LOG_FORMAT="json")
    until(lambda: len(server.pids("front")) >= 4, "fourth try")
    lines = [json.loads(line) for line in server.text().splitlines() if '"restart_in_ms"' in line]
    assert [line["message"] for line in lines[:3]] == ["front 0 died"] + ["front 0 keeps failing"] * 2
    assert [line["fields"]["restart_in_ms"] for line in lines[:3]] == [100, 200, 400]
    assert [line["fields"]["failures"] for line in lines[:3]] == [1, 2, 3]
    assert lines[0]["fields"]["reason"] == "exit status 9"
    outages = [entry["outages"] for entry in server.entries("peers", "worker") if entry["outages"]]
    assert outages[0] == [["front 0", None, 2, "exit status 9"]]
    assert server.stop() == 5


def files_of(pid: int) -> set[str]:
    """Open files of a process, except its standard streams."""
    found: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            found |= {os.readlink(entry)} if int(entry.name) > 2 else set()
    return found


def test_a_child_inherits_only_its_own_descriptors(server: Server) -> None:
    """Neither the directory's lock nor another child's channel: the child would keep both open after the supervisor's end. Also after a restart."""
    server.start(TOPICS_FRONTS="2").up(fronts=2)
    for role in ("worker", "front"):
        os.kill(server.pids(role)[0], signal.SIGKILL)
        until(lambda role=role: len(server.entries("started", role)) == 3, f"another {role}")
    workers = [pid for pid in server.pids("worker") if is_alive(pid)]
    fronts = [pid for pid in server.pids("front") if is_alive(pid)]
    assert any(name.endswith("/LOCK") for name in files_of(server.pid))

    def only_listeners_are_shared() -> bool:
        supervisors = files_of(server.pid)
        listeners = [files_of(pid) & supervisors for pid in fronts]
        return (
            not any(files_of(pid) & supervisors for pid in workers)
            and [len(held) for held in listeners] == [1, 1]
            and not listeners[0] & listeners[1]
        )

    # At first the supervisor still holds the child's end of the new channel.
    until(only_listeners_are_shared, "child with only its own descriptors")
    assert server.stop() == 0


@fault(
    "supervisor",
    "its log cannot be written, and SIGCHLD is ignored in the process that started it",
    "children that die are restarted all the same",
)
def test_a_child_is_restarted_though_nothing_can_be_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(
        "PYTHONUNBUFFERED", raising=False
    )  # so that unwritten lines stay in the stream's buffer
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full does not exist")
    server.stderr = Path("/dev/full")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        server.start(as_program=True)
    finally:
        signal.signal(signal.SIGCHLD, before)
    server.up()
    for role, count in (("worker", 3), ("front", 2)):
        os.kill(server.pids(role)[0], signal.SIGKILL)
        until(lambda role=role, count=count: len(server.entries("started", role)) == count, f"another {role}")
    assert server.stop() in (0, 120)  # 120: Python could not flush its standard streams at exit


@fault(
    "supervisor",
    "its log goes into a full pipe",
    "lines are dropped; children that die are restarted, and it stops when told to",
)
def test_a_full_log_pipe_blocks_no_process(server: Server, tmp_path: Path) -> None:
    server.stderr = tmp_path / "pipe"
    os.mkfifo(server.stderr)
    pipe = os.open(server.stderr, os.O_RDWR | os.O_NONBLOCK)
    try:
        server.start().up()
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"x" * 4096)
        os.kill(server.pids("worker")[0], signal.SIGKILL)
        until(lambda: len(server.entries("started", "worker")) == 3, "another worker")
        assert server.stop() == 0
    finally:
        os.close(pipe)


@fault(
    "supervisor", "the supervisor is killed", "its children end too, and the directory can be used at once"
)
def test_children_do_not_outlive_the_supervisor(server: Server) -> None:
    server.start().up()
    run_dir = Path((server.data / "RUN").read_text().strip())
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    for pid in server.pids():
        until(lambda pid=pid: not is_alive(pid), f"end of {pid}")
    assert run_dir.exists()
    incarnations = [entry["spec"]["incarnation"] for entry in server.entries("started", "worker")]
    server.start().up()
    assert not run_dir.exists(), "the next start removes the run directory of the killed one"
    again = [entry["spec"]["incarnation"] for entry in server.entries("started", "worker")]
    assert min(again) > max(incarnations)


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_drains_fronts_before_workers(server: Server, number: signal.Signals) -> None:
    server.start(TOPICS_FRONTS="2").up(fronts=2)
    run_dir = Path((server.data / "RUN").read_text().strip())
    os.kill(server.pid, number)
    assert server.wait() == 0
    ends = [
        (entry["role"], entry["event"])
        for entry in server.entries()
        if entry["event"] in ("drain", "stopped")
    ]
    assert sorted(ends[:4]) == [("front", "drain")] * 2 + [("front", "stopped")] * 2
    assert sorted(ends[4:]) == [("worker", "drain")] * 2 + [("worker", "stopped")] * 2
    assert not run_dir.exists()
    assert not (server.data / "RUN").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address())


def test_workers_stop_when_none_owes_copies(server: Server) -> None:
    server.start().up()
    assert server.stop() == 0
    events = [entry["event"] for entry in server.entries() if entry["role"] == "worker"]
    assert events.index("drain") > max(i for i, event in enumerate(events) if event == "flush_copies")
    assert events.count("flush_copies") == 2


@fault(
    "supervisor",
    "a worker owes copies to others when the server stops",
    "the stop waits for them, for a bounded time",
)
def test_a_worker_that_keeps_owing_copies_does_not_block_the_stop(server: Server) -> None:
    server.start(FAKE_PENDING="worker", FLUSH_COPIES_S="0.2").up()
    assert server.stop() == 0
    assert len(server.entries("stopped", "worker")) == 2
    assert "will be sent after the next start" in server.stderr.read_text()


@fault("supervisor", "a worker does not stop in time", "it is killed, and the exit code tells")
def test_a_worker_that_does_not_drain_is_killed_and_the_exit_code_tells(server: Server) -> None:
    server.start(FAKE_DEAF="worker", WORKER_DRAIN_S="0.2").up()
    assert server.stop() == 1
    assert not any(is_alive(pid) for pid in server.pids())


@fault("supervisor", "a front does not stop in time", "it is killed; workers still stop cleanly")
def test_a_front_that_does_not_drain_is_killed_and_workers_still_drain(server: Server) -> None:
    server.start(FAKE_DEAF="front", FRONT_DRAIN_S="0.2").up()
    assert server.stop() == 0
    assert len(server.entries("stopped", "worker")) == 2


@fault("supervisor", "a second signal arrives during a stop", "all children are killed at once")
def test_a_second_signal_kills_all_at_once(server: Server) -> None:
    server.start(FAKE_DEAF="front").up()
    os.kill(server.pid, signal.SIGTERM)
    until(lambda: server.entries("drain", "front"), "drain")

    def heeds_another() -> bool:
        if "second signal" in server.text():
            return True
        os.kill(server.pid, signal.SIGINT)
        return False

    until(heeds_another, "second signal")  # signals within a short time count as one
    assert server.wait() == 1
    assert server.entries("stopped") == []
    assert not any(is_alive(pid) for pid in server.pids())


@fault(
    "supervisor",
    "one stop arrives as two signals, to the process and to its group",
    "they count as one stop: all children are drained",
)
def test_two_signals_at_once_are_one_stop(server: Server) -> None:
    server.start().up()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)  # both signals are pending when it continues
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        os.kill(pid, number)
    assert server.wait() == 0
    assert len(server.entries("stopped")) == 3
    assert "second signal" not in server.text()


def test_only_the_supervisor_minds_the_signals_of_a_terminal(server: Server) -> None:
    server.start().up()
    for pid in [server.pid, *server.pids()]:
        os.kill(pid, signal.SIGHUP)
    for pid in server.pids():
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert server.who_answers() == server.pids("front")[0]
    assert server.stop() == 0
    assert len(server.pids()) == 3, "no child was restarted"


@fault(
    "supervisor",
    "a stop arrives while a shard keeps failing",
    "the server stops at once, and exit code 5 says that the shard was not stopped cleanly",
)
def test_a_stop_does_not_wait_for_a_restart(server: Server) -> None:
    server.start(FAKE_FAILS="worker")
    # By then both workers wait for their restart, and there is no child to drain.
    until(lambda: server.text().count('"restart_in_ms":1600') == 2, "long wait for both")
    code = server.stop()
    after = server.text().partition('"message":"draining"')[2]
    assert not re.search(r'"shard \d started"', after)
    assert code == 5
    stopped = json.loads(after.splitlines()[-1])
    assert stopped["fields"]["processes"] == ["shard 0", "shard 1"]


# Refusals.


@fault(
    "data directory",
    "two servers on one data directory",
    "the second one is refused with exit code 3 and the pid of the first",
)
def test_a_locked_directory_is_refused_by_name(server: Server, tmp_path: Path) -> None:
    server.start().up()
    second = Server(tmp_path / "second")
    (tmp_path / "second").mkdir()
    second.data = server.data
    try:
        assert second.start().wait() == 3
        assert str(server.data) in second.text()
        assert f"pid {server.pid}" in second.text()
    finally:
        second.process = None
    assert server.stop() == 0
    server.start().up()


@fault(
    "layout",
    "the configuration asks for another number of shards than the layout has",
    "the number of shards is changed before anything else is started",
)
def test_another_number_of_shards_starts_resharding_and_none_means_the_stored_one(server: Server) -> None:
    server.start().up().stop()
    assert json.loads((server.data / "layout.json").read_text()) == {
        "format": 1,
        "generation": 1,
        "shards": 2,
    }
    server.start(TOPICS_WAL_SHARDS="3").up(shards=3)
    assert "the data directory has 3 shards" in server.text()
    assert len(server.pids("worker")) == 3
    generations = [entry["spec"]["generation"] for entry in server.entries("started", "worker")]
    assert generations == [2] * 3
    server.stop()
    server.start(TOPICS_WAL_SHARDS="").up(shards=3)
    assert "the data directory has" not in server.text()


@fault(
    "layout",
    "the layout file is empty, not JSON, incomplete or of another format",
    "refused with exit code 2 and the path of the file, which is not changed",
)
@pytest.mark.parametrize("text", ['{"format":3,"generation":1,"shards":2}', "nonsense", '{"format":1}', ""])
def test_an_unknown_layout_is_refused(server: Server, text: str) -> None:
    server.data.mkdir(parents=True)
    (server.data / "layout.json").write_text(text)
    code, said = server.refused()
    assert code == 2
    assert "layout.json" in said
    assert (server.data / "layout.json").read_text() == text


@fault(
    "layout",
    "the layout file is missing beside data",
    "refused with exit code 2: with a guessed number of shards topics would not be found",
)
def test_data_without_a_layout_is_refused(server: Server) -> None:
    """As a program, with the output that an operator would see."""
    (server.data / "layout-1" / "shard-00").mkdir(parents=True)
    assert server.start().wait() == 2
    assert "layout.json is missing" in server.text()


@fault("supervisor", "the port is in use", "refused with exit code 4; no child is started")
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_port_in_use_is_refused(server: Server, fronts: str) -> None:
    with socket.socket() as taken:
        # A server that shares its port with its fronts must not join it by accident.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = server.refused(TOPICS_PORT=port, TOPICS_FRONTS=fronts)
    assert code == 4
    assert port in said
    assert not server.port_file.exists()


@fault(
    "supervisor",
    "an invalid configuration",
    "refused with exit code 2 and the name of the variable, without any secret",
)
@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"TOPICS_HOST": "0.0.0.0"}, "TOPICS_ALLOW_INSECURE_NO_AUTH"),
        ({"TOPICS_API_KEYS": "swordfish:reed"}, "reed"),
        ({"TOPICS_DATA_DIR": "/proc/nowhere"}, "/proc/nowhere"),
        ({"TOPICS_PORT_FILE": "/proc/nowhere"}, "TOPICS_PORT_FILE"),
    ],
)
def test_bad_configuration_is_refused(server: Server, environ: dict[str, str], part: str) -> None:
    code, said = server.refused(**environ)
    assert code == 2
    assert part in said
    assert "swordfish" not in said


WRONG = {"TOPICS_FRONTS": "one", "TOPICS_KEEPALIVE_MS": "30x", "TOPICS_APIKEYS": "swordfish"}
WARNINGS = (
    "TOPICS_FRONTS='one' is not a whole number; in use: 1",
    "TOPICS_KEEPALIVE_MS='30x' is not a duration",
    "TOPICS_APIKEYS is not a known variable and is ignored; did you mean TOPICS_API_KEYS? In use: none",
)


@fault("supervisor", "settings that are misspelt or invalid", "one warning each, with the value in use")
def test_wrong_settings_are_one_warning_each(server: Server) -> None:
    server.start(**WRONG, TOPICS_LOG_FORMAT="human", TOPICS_SERVICE_HOST="10.0.0.1").up()
    lines = [line for line in server.text().splitlines() if " warning " in line]
    assert len(lines) == len(WARNINGS)
    assert all(any(f"supervisor: {warning}" in line for line in lines) for warning in WARNINGS)
    assert "swordfish" not in server.text()
    assert server.stop() == 0


@fault(
    "supervisor",
    "settings that are misspelt or invalid, with TOPICS_STRICT_SETTINGS=1",
    "all of them are listed, and the server refuses to start with exit code 2",
)
def test_strict_settings_refuse_wrong_ones(server: Server) -> None:
    code, said = server.refused(**WRONG, TOPICS_STRICT_SETTINGS="1", TOPICS_LOG_FORMAT="json")
    assert code == 2
    *warnings, refusal = [json.loads(line) for line in said.splitlines()]
    assert [entry["level"] for entry in warnings] == ["warning"] * 3
    assert all(any(entry["message"].startswith(text) for entry in warnings) for text in WARNINGS)
    assert refusal["message"].startswith("not started: TOPICS_STRICT_SETTINGS=1 refuses ")
    assert all(name in refusal["message"] for name in WRONG)
    assert "swordfish" not in said
    assert not server.data.exists()


@fault(
    "data directory",
    "the recorded directory for sockets was not made by this server",
    "it is not touched, and another one is made",
)
def test_a_foreign_run_directory_is_not_touched(server: Server, tmp_path: Path) -> None:
    precious = tmp_path / "topics-run-precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    server.data.mkdir(parents=True)
    (server.data / "RUN").write_text(f"{precious}\n")
    server.start().up()
    assert (precious / "file").exists()


# The command line.


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_the_variables_and_exit_codes() -> None:
    done = call(commands.run, "serve", "--help")
    assert done.returncode == 0
    assert "TOPICS_DATA_DIR" in done.stdout
    assert all(f"\n  {code}  " in done.stdout for code in exit_codes.MEANINGS)
    page = (ROOT / "docs" / "operations.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", page, re.M) == [str(code) for code in exit_codes.MEANINGS]


def test_the_topics_command() -> None:
    assert run("-m", "topics.cli", "--version").stdout == f"topics {topics.__version__}\n"
    assert "serve" in call(commands.run, "--help").stdout
    for done in (call(commands.run), run("-m", "topics.cli", "nonsense")):
        assert (done.returncode, done.stdout) == (2, "")
        assert "Usage: topics" in done.stderr
    refused = call(server_main, "--help")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "topics serve --help" in refused.stderr
