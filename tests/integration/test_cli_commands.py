"""The `topics` command against a real server: its output, its effect on the server, and its exit codes.

Method: most commands are called in this process, with its stdin and descriptors; those that are ended by signals or wait for a
reader run as processes.
"""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ROOT, Server, running, until
from topics.cli import contexts, top
from topics.cli.__main__ import main
from topics.cli.bench import Bench
from topics.cli.formatting import format_time
from topics.cli.options import size, when
from topics.client import Client, errors
from topics.system.quantities import milliseconds

KEYS = "root,reader:read:open."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("cli"), environment={"TOPICS_API_KEYS": KEYS}) as server:
        yield server.with_key("root")


class Cli:
    """Runs commands. `out` and `err` are those of the last one."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd, self._monkeypatch = capfd, monkeypatch
        self.out = self.err = ""

    def __call__(self, *arguments: str, stdin: str | bytes = "") -> int:
        text = stdin.encode() if isinstance(stdin, str) else stdin
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        code = main(arguments)
        sys.stdout.flush()
        self.out, self.err = self._capfd.readouterr()
        return code

    def rows(self, *arguments: str, stdin: str = "") -> list[Any]:
        """The parsed lines of --json."""
        assert self(*arguments, "--json", stdin=stdin) == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def cli(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    for name in [name for name in os.environ if name.startswith("TOPICS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TOPICS_URL", f"http://{server.host}:{server.port}")
    monkeypatch.setenv("TOPICS_TOKEN", "root")
    monkeypatch.setenv("TOPICS_CONFIG", str(tmp_path / "own" / "contexts.json"))
    return Cli(capfd, monkeypatch)


def data(rows: list[Any]) -> list[Any]:
    return [row["data"] for row in rows]


# -- records -----------------------------------------------------------------------------------------------


def test_arguments_are_one_write(cli: Cli, topic: str) -> None:
    (written,) = cli.rows("pub", topic, '{"a": 1}', "2", "--tag", "eu")
    assert (written["first_seq"], written["last_seq"], written["created"]) == (1, 2, True)
    assert [(row["$tag"], row["data"]) for row in cli.rows("read", topic)] == [("eu", {"a": 1}), ("eu", 2)]
    assert cli("pub", topic, "3", "tea") == 1
    assert "argument 2 is not valid JSON" in cli.err
    assert "--text" in cli.err
    assert len(cli.rows("read", topic)) == 2  # nothing of the call is written, not even the valid record


def test_lines_are_written_in_their_order(cli: Cli, topic: str) -> None:
    lines = "".join(f"{n}\n" for n in range(5000))
    (told,) = cli.rows("pub", topic, stdin=lines)
    assert told == {"topic": topic, "written": 5000, "failed": 0, "first_seq": 1, "last_seq": 5000}
    assert data(cli.rows("read", topic)) == list(range(5000))
    assert data(cli.rows("read", topic, "--from", "4990", "-n", "3")) == [4990, 4991, 4992]


def test_no_digit_of_a_number_changes(cli: Cli, topic: str) -> None:
    text = '{"a": 1.000000000000000000001, "b": 1E5, "c": 123456789012345678901234567890}'
    assert cli("pub", topic, stdin=text + "\n") == 0
    assert cli("read", topic, "--raw") == 0
    assert cli.out == text + "\n"


def test_a_copy_has_tags_meta_and_bytes(cli: Cli, topic: str, server: Server) -> None:
    first = [{"data": 1, "tag": "a.b", "node": "n1", "meta": {"k": [1]}}, {"data": None}]
    server.post(f"/v0/topics/{topic}", {"records": first})
    server.post(f"/v0/topics/{topic}", {"records": [{"data_base64": "AAH/", "tag": "raw"}]})
    assert cli("read", topic, "--json") == 0
    lines = cli.out
    assert cli("pub", f"{topic}.copy", "--records", stdin=lines) == 0, cli.err

    def contents(name: str) -> list[Any]:
        return [
            {key: value for key, value in row.items() if key not in ("topic", "$ts")}
            for row in cli.rows("read", name)
        ]

    assert contents(f"{topic}.copy") == contents(topic)
    assert cli.rows("read", f"{topic}.copy", "--last")[0]["$encoding"] == "base64"


def test_a_wrong_line_ends_it_and_those_before_are_written(cli: Cli, topic: str) -> None:
    assert cli("pub", topic, stdin="1\n\n2\noops\n3\n") == 1
    assert "line 4 is not valid JSON" in cli.err
    assert data(cli.rows("read", topic)) == [1, 2]
    assert cli("pub", topic, "--at-once", stdin="3\noops\n") == 1
    assert data(cli.rows("read", topic)) == [1, 2]
    assert cli("pub", topic, "--at-once", stdin="3\n4\n") == 0
    assert data(cli.rows("read", topic)) == [1, 2, 3, 4]


def test_a_refused_line_is_reported_and_skipped(cli: Cli, topic: str) -> None:
    assert cli("topic", "create", topic, "--set", "max_record_byte=100") == 2
    assert "no such setting: 'max_record_byte'; valid ones are" in cli.err
    assert cli("topic", "create", topic, "--set", "max_record_bytes=100") == 0
    assert cli("pub", topic, stdin=f'1\n"{"x" * 500}"\n3\n') == 1
    assert "line 2: " in cli.err
    assert "2 records written" in cli.out
    assert "1 failed" in cli.out
    assert data(cli.rows("read", topic)) == [1, 3]


def test_losses_are_reported(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--cap-records", "2")
    cli("pub", topic, "1", "2", "3")
    assert cli("read", topic, "--from", "0", "--raw") == 0
    assert cli.out == "2\n3\n"
    assert f"{topic}: record 1 is lost" in cli.err


def test_the_last_records(cli: Cli, topic: str, server: Server) -> None:
    """Deletes leave gaps larger than the command's first steps back, and a cap drops the oldest."""
    cli("topic", "create", topic, "--cap-records", "3000")
    records = "".join(f'{{"data":{n},"tag":"{"even" if n % 2 == 0 else "odd"}"}}\n' for n in range(1, 4001))
    assert cli("pub", topic, "--records", stdin=records) == 0
    assert data(cli.rows("read", topic, "--last")) == data(cli.rows("read", "--last", topic)) == [4000]
    assert data(cli.rows("read", topic, "--last", "3")) == [3998, 3999, 4000]
    assert data(cli.rows("read", topic, "--last", "2", "--tag", "odd")) == [3997, 3999]
    server.post(f"/v0/topics/{topic}/delete", {"seqs": [*range(2000, 3000), *range(3002, 4000)]})
    assert data(cli.rows("read", topic, "--last", "3")) == [3000, 3001, 4000]
    assert data(cli.rows("read", topic, "--last", "5")) == [1998, 1999, 3000, 3001, 4000]
    assert data(cli.rows("read", topic, "--last", "3", "--tag", "od*")) == [1997, 1999, 3001]
    assert data(cli.rows("read", topic, "--last", "5000")) == [*range(1001, 2000), 3000, 3001, 4000]
    assert cli.rows("read", topic, "--last", "2", "--tag", "none") == []
    cli("topic", "purge", topic, "--yes")
    assert cli.rows("read", topic, "--last", "2") == []
    assert cli.rows("read", topic, "--last", str(sys.maxsize)) == []
    for wrong in ("0", str(1 << 64)):
        assert cli("read", topic, "--last", wrong) == 2
        assert cli("read", topic, "--limit", wrong) == 2
    assert cli("read", topic, "--last", "2", "--from", "1") == 2


def test_tags_meta_and_formats(cli: Cli, topic: str, server: Server) -> None:
    assert cli("pub", topic, "1", "--tag", "eu", "--meta", "by=ada", "--meta", '{"n":2}') == 0
    assert cli("pub", topic, "--meta", "by=bob", stdin="2\n") == 0
    own = '{"data":3,"tag":"a b","node":"n1","meta":{"own":true}}\n{"data":4}\n'
    assert cli("pub", topic, "--records", "--meta", "by=eve", stdin=own) == 0
    metas = [{"by": "ada", "n": 2}, {"by": "bob"}, {"own": True}, {"by": "eve"}]
    assert [row["meta"] for row in cli.rows("read", topic)] == metas
    for wrong in ("by", "=x", "{", "[1]"):
        assert cli("pub", topic, "1", "--meta", wrong) == 2

    def shown(*options: str) -> list[str]:
        assert cli("read", topic, *options) == 0
        return [line.split(" ", 3)[3] for line in cli.out.splitlines()]

    assert shown() == ["tag=eu 1", "2", 'tag="a b" 3', "4"]
    assert shown("--meta")[:2] == ['tag=eu meta={"by":"ada","n":2} 1', 'meta={"by":"bob"} 2']
    assert cli("read", topic, "-n", "1", "--from", "2", "--format", r"%t\t%s|%g|%n|%m|%d%%\\") == 0
    assert cli.out == f'{topic}\t3|"a b"|n1|{{"own":true}}|3%\\\n'
    assert cli("read", topic, "-n", "1", "--format", "%T") == 0
    assert cli.out == f"{format_time(cli.rows('read', topic)[0]['$ts'])}\n"
    for wrong in ("%x", "%", r"\q"):
        assert cli("read", topic, "--format", wrong) == 2
        assert "%d data" in cli.err
    assert cli("read", topic, "--raw", "--format", "%d") == 2
    cli("pub", topic, "5", "--tag", "ex")
    command = tail_command(topic, "--all", "--tag", "e*", "-n", "2", "--format", "%s %g")
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout == b"1 eu\n5 ex\n"
    assert cli("tail", topic, "--tag", "eu", "--group", "g") == 2


def tail_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "topics.cli", "tail", *arguments]


def test_tail_since(cli: Cli, topic: str) -> None:
    cli("pub", topic, "1", "2")
    done = subprocess.run(
        tail_command(f"{topic}.>", topic, "--since", "1h", "-n", "2", "--raw"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "1\n2\n"


# -- topics ------------------------------------------------------------------------------------------------


def test_a_topic_from_its_making_to_its_end(cli: Cli, topic: str) -> None:
    assert cli("topic", "create", topic, "--durability", "fsync", "--ttl", "7d", "--cap-bytes", "1MiB") == 0
    assert cli.out == f"{topic}: created (log, fsync)\n"
    assert cli("topic", "set", topic, "--cap-records", "10") == 0
    config = cli.rows("topic", "info", topic)[0]["config"]
    wanted = {"durability": "fsync", "ttl_ms": 604_800_000, "cap_bytes": 1 << 20, "cap_records": 10}
    assert wanted.items() <= config.items()
    cli("pub", topic, "1", "2", "3", "--tag", "a")
    cli("pub", topic, "4", "--tag", "b")
    assert [row["count"] for row in cli.rows("topic", "ls", topic)] == [4]
    assert cli("topic", "purge", topic, "--tag", "a", "--keep", "1", "--yes") == 0
    assert cli.out == f"{topic}: 2 records deleted, 2 left\n"
    cli("pub", topic, "5", "--tag", "eu.tea")
    assert cli("topic", "purge", topic, "--subject", "eu.>", "--yes") == 0
    assert cli.out == f"{topic}: 1 records deleted, 2 left\n"
    assert cli("topic", "purge", topic, "--subject", "eu.", "--yes") == 1
    assert cli("topic", "purge", topic) == 2  # without a terminal it cannot ask for confirmation
    assert "--yes" in cli.err
    assert cli("topic", "delete", topic, "--if-empty") == 1
    assert cli("topic", "purge", topic, "--yes") == 0
    assert cli("topic", "delete", topic, "--if-empty") == 0
    assert cli.rows("topic", "delete", topic, "--yes")[0]["deleted"] is False


def test_a_limit_of_zero_means_no_limit(cli: Cli, topic: str) -> None:
    limits = ["--ttl", "7d", "--cap-records", "5", "--cap-bytes", "1KiB", "--set", "cap_per_tag=2"]
    assert cli("topic", "create", topic, "--durability", "fsync", *limits) == 0
    assert cli("topic", "set", topic, "--ttl", "0") == 0
    config = cli.rows("topic", "info", topic)[0]["config"]
    assert (config["ttl_ms"], config["cap_records"], config["durability"]) == (0, 5, "fsync")
    zeros = ["--cap-records", "0", "--cap-bytes", "0", "--set", "cap_per_tag=0"]
    assert cli("topic", "set", topic, *zeros) == 0
    config = cli.rows("topic", "info", topic)[0]["config"]
    assert (config["cap_records"], config["cap_bytes"], config["cap_per_tag"]) == (0, 0, 0)


def test_settings_of_queues_are_refused_for_logs(cli: Cli, topic: str) -> None:
    for option in (
        ["--lease", "5s"],
        ["--max-deliveries", "3"],
        ["--dead-letter", "d"],
        ["--set", "leases_durable=true"],
    ):
        assert cli("topic", "create", topic, *option) == 2
        assert "--type queue" in cli.err
    assert cli("topic", "info", topic) == 1
    cli("topic", "create", topic)
    assert cli("topic", "set", topic, "--lease", "5s") == 2
    assert f"only queues have lease_ms. {topic} is a log" in cli.err
    cli("topic", "create", f"{topic}.q", "--type", "queue", "--lease", "5s")
    assert cli("topic", "set", f"{topic}.q", "--max-deliveries", "3") == 0
    config = cli.rows("topic", "info", f"{topic}.q")[0]["config"]
    assert (config["lease_ms"], config["max_deliveries"]) == (5000, 3)


def test_topics_by_prefix_and_pattern(cli: Cli, topic: str) -> None:
    for name in (f"{topic}.a", f"{topic}.b.c", f"{topic}x"):
        cli("pub", name, "1")
    assert [row["topic"] for row in cli.rows("topic", "ls", f"{topic}.")] == [f"{topic}.a", f"{topic}.b.c"]
    assert [row["topic"] for row in cli.rows("topic", "ls", f"{topic}.*")] == [f"{topic}.a"]
    cli("topic", "create", f"{topic}xq", "--type", "queue", "--durability", "memory")
    cli("pub", f"{topic}xq", "1", "2")
    cli("queue", "claim", f"{topic}xq")
    assert cli("topic", "ls", f"{topic}x") == 0
    assert [line.split() for line in cli.out.splitlines()] == [
        ["topic", "type", "durability", "records", "bytes", "first", "last", "ready"],
        [f"{topic}x", "log", "disk", "1", "1", "B", "1", "1", "-"],
        [f"{topic}xq", "queue", "memory", "2", "2", "B", "1", "2", "1"],
    ]


# -- jobs --------------------------------------------------------------------------------------------------


def dead_letters(cli: Cli, topic: str) -> list[Any]:
    """Polled: they may arrive from another shard a moment later."""
    until(lambda: cli("read", f"{topic}.dead", "--raw") == 0 and cli.out)
    return [json.loads(line) for line in cli.out.splitlines()]


def test_jobs_by_hand(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--type", "queue", "--dead-letter", f"{topic}.dead")
    cli("pub", topic, "1", "2", "3")
    assert cli("queue", "claim", topic, "--max", "2", "--json") == 0
    first, second = cli.out.splitlines()
    assert cli("queue", "ack", topic, stdin=first + "\n") == 0
    assert cli("queue", "ack", topic, stdin=first + "\n") == 1
    assert "no longer leased to this node" in cli.err
    assert cli("queue", "nack", topic, str(json.loads(second)["$seq"]), "--release") == 0
    (again,) = cli.rows("queue", "claim", topic)
    assert (again["$seq"], again["deliveries"], again["data"]) == (2, 1, 2)
    assert cli("queue", "nack", topic, "2", "--dead", "--reason", "no good") == 0
    assert dead_letters(cli, topic) == [2]
    assert cli("queue", "ack", topic, "3", "--node", "somebody") == 1
    assert cli("queue", "claim", f"{topic}.dead") == 1
    assert "--type queue" in cli.err


def test_a_command_for_each_job(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--type", "queue", "--dead-letter", f"{topic}.dead")
    cli("pub", topic, '{"n": 1.50}', '"bad"', '"worse"', "--tag", "t")
    script = 'read -r x; echo "$TOPICS_JOB_TOPIC $TOPICS_JOB_SEQ $TOPICS_JOB_TAG $x"; case $x in *bad*) exit 65;; *worse*) exit 3;; esac'
    assert cli("queue", "work", "--json", "-n", "3", topic, "--", "sh", "-c", script) == 0
    told = cli.out.splitlines()
    assert told[:-1] == [f'{topic} 1 t {{"n": 1.50}}', f'{topic} 2 t "bad"', f'{topic} 3 t "worse"']
    assert json.loads(told[-1]) == {"done": 1, "failed": 1, "given_up": 1, "lost": 0, "released": 0}
    assert f"{topic} seq 3: sh exited with 3; will retry" in cli.err
    assert dead_letters(cli, topic) == ["bad"]
    assert cli("queue", "work", topic, "no-such-command-here") == 2


def test_a_signal_lets_running_commands_finish(cli: Cli, topic: str, server: Server) -> None:
    cli("topic", "create", topic, "--type", "queue")
    cli("pub", topic, "1")
    script = "echo begun; read -r x; read -r go <&9; echo done"
    go, gate = os.pipe()
    work = subprocess.Popen(
        [sys.executable, "-m", "topics.cli", "queue", "work", topic, "bash", "-c", script.replace("<&9", f"< /proc/{os.getpid()}/fd/{go}")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert work.stdout is not None
    assert work.stdout.readline() == "begun\n"
    work.send_signal(signal.SIGINT)
    os.write(gate, b"go\n")
    out, err = work.communicate(timeout=60)
    os.close(go)
    os.close(gate)
    assert (work.returncode, out) == (0, "done\n")
    assert "1 done" in err
    assert server.get(f"/v0/topics/{topic}").json["count"] == 0


# -- consumers and routers ---------------------------------------------------------------------------------


def test_consumers(cli: Cli, topic: str) -> None:
    cli("pub", topic, "1", "2", "--tag", "eu")
    cli("pub", topic, "3", "--tag", "us")
    (made,) = cli.rows(
        "consumer", "create", topic, "c", "--filter", "eu", "--backoff", "1s,5s", "--ack-wait", "20s", "--set", "max_waiting=7"
    )  # fmt: skip
    assert made["created"] is True
    wanted = {"backoff_ms": [1000, 5000], "ack_wait_ms": 20_000, "max_waiting": 7}
    assert wanted.items() <= cli.rows("consumer", "info", topic, "c")[0]["config"].items()
    jobs = cli.rows("queue", "claim", topic, "--consumer", "c", "--max", "10")
    assert data(jobs) == [1, 2]
    assert cli("queue", "ack", topic, "1", "2", "--consumer", "c") == 0
    assert [row["lag_records"] for row in cli.rows("consumer", "ls", topic)] == [0]
    (moved,) = cli.rows("consumer", "reset", topic, "c", "--to", "start")
    assert moved["redelivers"] == 2
    assert cli("consumer", "reset", topic, "c") == 2
    assert cli("consumer", "pause", topic, "c") == 0
    assert cli.out == f"{topic}/c: paused\n"
    assert cli.rows("queue", "claim", topic, "--consumer", "c") == []
    (paused,) = cli.rows("consumer", "pause", topic, "c", "--for", "1h")
    assert abs(paused["paused_until_ts"] - time.time() * 1000 - 3_600_000) < 60_000
    (paused,) = cli.rows("consumer", "pause", topic, "c", "--until", "2100-01-01T00:00:00Z")
    assert paused["paused_until_ts"] == 4_102_444_800_000
    assert cli("consumer", "pause", topic, "c", "--for", "1h", "--until", "2100-01-01") == 2
    assert cli("consumer", "resume", topic, "c") == 0
    assert cli.out == f"{topic}/c: not paused\n"
    assert data(cli.rows("queue", "claim", topic, "--consumer", "c")) == [1]
    assert cli("consumer", "delete", topic, "c", "--yes") == 0
    assert cli("consumer", "info", topic, "c") == 1
    assert "topics consumer create" in cli.err


def test_routers(cli: Cli, topic: str) -> None:
    name, dest = f"r-{topic}", f"{topic}.copies"
    assert cli("router", "create", name, topic, dest, "--filter", "eu", "--exactly-once") == 0, cli.err
    cli("pub", topic, "1", "--tag", "eu")
    cli("pub", topic, "2", "--tag", "us")
    assert cli.rows("router", "info", name)[0]["forwarded_total"] == 1
    assert data(cli.rows("read", dest)) == [1]
    (row,) = cli.rows("router", "ls", name)
    assert (row["source"], row["dest"], row["guarantee"]) == (topic, dest, "exactly_once")
    assert cli("router", "delete", name, "--yes") == 0
    assert cli.rows("router", "ls", name) == []


# -- the server --------------------------------------------------------------------------------------------


def test_top_shows_rates_and_lag(cli: Cli, topic: str) -> None:
    cli("pub", topic, "1", "2", "3")
    cli("consumer", "create", topic, "slow")
    (screen,) = cli.rows("top", "-n", "1", "--interval", "1ms", "--rows", "1000")
    assert screen["ready"] is True
    (row,) = [row for row in screen["rows"] if row["topic"] == topic]
    assert (row["records"], row["lag"], row["ready"]) == (3, 3, None)
    assert cli("top", "-n", "1", "--interval", "1ms") == 0
    assert "pressure" in cli.out


def test_rates_are_of_the_time_between_two_samples() -> None:
    server = {name: 0 for name in ("ready", "pressure", "topics", "records_live", "bytes_live", "sse_connections", "consumers", "copies", "flows_owing", "pressure_refused")}  # fmt: skip
    wal = {"fsyncs": 10, "bytes_written": 100, "queue_depth": 0}
    text = 'topics_topic_head_seq{topic="a"} 5\ntopics_topic_head_seq{topic="b\\"\\\\"} 9\n'
    before = top.Sample(0.0, {**server, "wal": wal}, top.topic_metrics(text))
    assert before.topics == {"a": {"head_seq": 5}, 'b"\\': {"head_seq": 9}}
    now = top.Sample(2.0, {**server, "wal": {**wal, "fsyncs": 30}}, {"a": {"head_seq": 25}})
    screen = top.compare(before, now, 10)
    assert (screen.fsyncs_s, screen.rows[0].writes_s) == (10.0, 10.0)
    assert top.compare(now, before, 10).fsyncs_s == 0.0  # the counter fell: the server was restarted


def test_bench_measures_and_cleans_up(cli: Cli, topic: str) -> None:
    figures = cli.rows("bench", "--time", "50ms", "--threads", "2", "--batch", "10", "--topic", topic)
    assert [row["phase"] for row in figures] == [
        "write",
        "write 10 at once",
        "read 1000 at once",
        "write and follow",
    ]
    assert all(row["records"] > 0 and 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in figures)
    assert cli("topic", "info", topic) == 1
    cli("pub", topic, "1")
    assert cli("bench", "--topic", topic) == 1
    assert len(cli.rows("read", topic)) == 1


def test_serve_takes_options_before_variables(cli: Cli, tmp_path: Path) -> None:
    """An option wins over its variable, also over a port in TOPICS_HOST, and `health` finds that server without options."""
    port_file = tmp_path / "port"
    environment = {**os.environ, "TOPICS_HOST": "127.0.0.1:1", "TOPICS_DATA_DIR": "/dev/null", "TOPICS_PORT_FILE": str(port_file)}  # fmt: skip
    command = ["serve", "--port", "0", "--data", str(tmp_path / "data"), "--shards", "1"]
    with started(*command, env=environment) as process:
        until(lambda: process.poll() is not None or (port_file.exists() and port_file.read_text()))
        host, _, port = port_file.read_text().strip().partition(":")
        beside = {**os.environ, "TOPICS_URL": "", "TOPICS_HOST": host, "TOPICS_PORT": port}
        with started("health", "--wait", "60", env=beside, stdout=subprocess.PIPE) as health:
            assert health.communicate(timeout=60)[0] == f"http://{host}:{port}: ready\n".encode()
        assert [path.name for path in (tmp_path / "data" / "layout-1").iterdir()] == ["shard-00"]
        assert cli("verify", str(tmp_path / "data")) == 3
        assert cli.err == f"topics verify: {tmp_path}/data is in use; stop the server first\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    for wrong in (
        ["--port", "65536"],
        ["--shards", "0"],
        ["--data", ""],
        ["--host", "a:1", "--port", "2"],
        ["x"],
    ):
        assert cli("serve", *wrong) == 2
    assert cli("serve", "--help") == 0
    assert "docs/configuration.md" in cli.out


def test_health_has_the_options_of_every_command(cli: Cli, server: Server) -> None:
    url = f"http://{server.host}:{server.port}"
    assert cli("health") == 0
    assert cli.out == f"{url}: ready\n"
    assert cli("context", "add", "there", "http://127.0.0.1:1") == 0
    assert cli("health", "--context", "there") == 3
    assert cli("health", "--url", url.removeprefix("http://"), "--token", "root", "--json") == 0
    assert json.loads(cli.out)["status"] == "ready"
    assert cli("health", "--wait", "soon") == 2


def test_short_forms(cli: Cli, topic: str) -> None:
    cli("pub", topic, "1")
    for short, long in (
        (["ls", topic], ["topic", "ls", topic]),
        (["topic", "show", topic], ["topic", "info", topic]),
        (["version"], ["--version"]),
        (["help"], ["--help"]),
        (["help", "topic", "create"], ["topic", "create", "--help"]),
    ):
        assert cli(*long) == 0
        wanted = cli.out
        assert (cli(*short), cli.out) == (0, wanted)
    assert cli("help", "sub") == 0
    assert cli.out.startswith("Usage: topics sub ")
    assert cli("help", "topc") == 2
    assert "Did you mean topic" in cli.err
    assert cli("help", "topic") == 0
    assert "delete, rm" in cli.out
    assert cli("topic", "rm", topic, "--yes") == 0
    assert cli("topic", "show", topic) == 1


def test_errors_say_what_to_do(cli: Cli, topic: str, server: Server) -> None:
    assert cli("read", topic) == 1
    assert "topics topic create" in cli.err
    assert cli("read", topic, "--token", "wrong") == 1
    assert "TOPICS_TOKEN" in cli.err
    assert cli("pub", topic, "1", "--token", "reader") == 1
    assert cli("read", topic, "--url", "http://127.0.0.1:1") == 3
    assert "topics serve" in cli.err
    assert cli("pub", topic, "--url", "http://127.0.0.1:1", stdin="1\n") == 3  # without a minute of retries
    assert cli("read", topic, "--url", "ftp://x") == 2
    assert cli("read", topic, "--since", "yesterday") == 2
    assert "10m" in cli.err
    assert cli("read", topic, "--since", "99999999999d") == 2  # before 1970
    assert cli("pub", "", "1") == 2
    assert "is empty" in cli.err
    assert cli("pub", topic, '"\udcff"') == 2  # an argument that is not UTF-8
    assert "UTF-8" in cli.err
    assert cli("read", topic, "--url", "http://127.0.0.1:99999") == 2
    assert "99999' is not the URL of a server" in cli.err
    assert cli("read", topic, "--url", f"https://{server.host}:{server.port}") == 3
    assert "does not use TLS" in cli.err


def test_an_unreachable_server_is_reported_at_once(cli: Cli, topic: str) -> None:
    for command in (["read", topic], ["tail", topic]):
        with started(*command, "--url", "http://127.0.0.1:1", "--retry", "1") as process:
            first, *rest = process.communicate(timeout=60)[1].decode().splitlines()
            assert process.returncode == 3
        assert first.startswith(f"topics {command[0]}: cannot reach http://127.0.0.1:1: ")
        assert first.endswith("retrying for 1 s")
        assert len(rest) == 1


def test_a_closed_pipe_is_no_error(cli: Cli, topic: str) -> None:
    assert cli("pub", topic, stdin="".join(f"{n}\n" for n in range(20_000))) == 0
    for command in (
        ["read", topic],
        ["tail", topic, "--all"],
        ["top"],
        ["--help"],
        ["serve", "--help"],
        ["health"],
    ):
        # The reader closes before anything is written.
        into, out = os.pipe()
        os.close(into)
        with started(*command, stdout=out) as process:
            os.close(out)
            assert (process.wait(60), process.communicate()[1]) == (0, b""), command


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_reported(cli: Cli, topic: str) -> None:
    with open("/dev/full", "wb") as full, started("topic", "ls", stdout=full) as process:
        assert process.communicate(timeout=60)[1] == b"topics: output: No space left on device\n"
        assert process.returncode == 1


def test_standard_streams_that_the_shell_has_closed(cli: Cli, topic: str) -> None:
    command = f"{sys.executable} -m topics.cli pub {topic} 1 >&- 2>&- && {sys.executable} -m topics.cli read {topic} <&-"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(f"{topic} 1 ".encode())


def test_an_interrupted_pub_reports_its_progress(cli: Cli, topic: str, server: Server) -> None:
    with started("pub", topic, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"1\n2\n")
        process.stdin.flush()
        until(lambda: server.get(f"/v0/topics/{topic}").json.get("head_seq") == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stdout.read() == f"{topic}: 2 records written, up to seq 2\n".encode()


def test_each_phase_of_a_bench_has_a_figure_however_short(cli: Cli, topic: str) -> None:
    figures = cli.rows("bench", "--time", "1ms", "--threads", "2", "--batch", "10", "--topic", topic)
    assert [row["records"] > 0 for row in figures] == [True] * 4


def test_an_interrupted_bench_leaves_nothing(cli: Cli, server: Server) -> None:
    def topics() -> list[Any]:
        return list(server.get("/v0/topics?prefix=bench.").json["topics"])

    with started("bench", "--time", "60s") as process:
        until(lambda: any(row["count"] for row in topics()))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not topics()


def test_a_late_write_of_a_bench_does_not_create_its_topic_again(server: Server, topic: str) -> None:
    with Client(f"http://{server.host}:{server.port}", token="root") as client:
        run = Bench(client, topic, seconds=60, size=10, threads=1)
        with pytest.raises(errors.TopicNotFound):
            run.writes(1)
        with pytest.raises(errors.TopicNotFound):
            run.writes(2)
        with pytest.raises(errors.TopicNotFound):
            run.follows()
    assert server.get(f"/v0/topics/{topic}").status == 404


@contextmanager
def started(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "topics.cli", *command], cwd=ROOT, stderr=subprocess.PIPE, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_nothing_of_the_server_is_loaded_for_help() -> None:
    script = "import sys; from topics.cli.__main__ import main; main(['--help']); print('topics.client' in sys.modules, 'aiohttp' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"


# -- contexts and completion -------------------------------------------------------------------------------


def test_contexts(cli: Cli, topic: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://{server.host}:{server.port}"
    cli("pub", topic, "1")
    monkeypatch.delenv("TOPICS_URL")
    monkeypatch.delenv("TOPICS_TOKEN")
    assert cli("context", "add", "here", url, "--token", "-", stdin="root\n") == 0
    path = contexts.config_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cli("read", topic, "--raw") == 0
    assert cli.out == "1\n"
    assert cli("context", "add", "away", "http://127.0.0.1:1", "--token", "other") == 0
    assert cli("read", topic, "--context", "away") == 3
    assert cli("context", "use", "away") == 0
    assert cli("read", topic) == 3
    assert "topics context use" in cli.err  # says which server is in use and how to change that
    assert cli("read", topic, "--context", "here") == 0
    # A saved key is not used for another server.
    assert contexts.choose(url, None, None, {"TOPICS_CONFIG": str(path)}).token == ""
    assert cli("context", "ls") == 0
    assert "root" not in cli.out
    assert [row["in_use"] for row in cli.rows("context", "ls")] == [True, False]
    assert cli("context", "rm", "away") == 0
    assert cli("context", "use", "away") == 1
    path.chmod(0o644)
    assert cli("read", topic) == 1
    assert "chmod 600" in cli.err
    path.chmod(0o600)
    path.write_text("{")
    assert cli("read", topic) == 1
    assert "is damaged" in cli.err


def test_completion(cli: Cli, topic: str) -> None:
    cli("pub", f"{topic}.long.name", "1")
    for shell in ("bash", "zsh", "fish"):
        assert cli("completion", shell) == 0
        assert "_TOPICS_COMPLETE" in cli.out

    def completed(*words: str) -> str:
        environment = {
            "_TOPICS_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        command = [sys.executable, "-c", "from topics.cli.__main__ import main; main()"]
        return subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
        ).stdout  # fmt: skip

    assert completed("topics", "con").split() == ["plain,consumer", "plain,context"]
    assert completed("topics", "s").split() == ["plain,serve", "plain,sub"]
    assert completed("topics", "topic", "r").split() == ["plain,rm"]
    assert completed("topics", "help", "topic", "cr").split() == ["plain,create"]
    assert completed("topics", "verify", "--re").split() == ["plain,--repair"]
    assert completed("topics", "du", "x").split() == ["dir,x"]
    assert completed("topics", "inspect", "x").split() == ["file,x"]
    until(
        lambda: completed("topics", "read", f"{topic}.l").split() == [f"plain,{topic}.long.name"]
    )  # with a short timeout
    cli("consumer", "create", f"{topic}.long.name", "billing")
    until(
        lambda: (
            completed("topics", "consumer", "info", f"{topic}.long.name", "b").split() == ["plain,billing"]
        )
    )  # with a short timeout
    cli("router", "create", f"{topic}.rule", f"{topic}.long.name", f"{topic}.copy")
    until(
        lambda: completed("topics", "router", "delete", f"{topic}.r").split() == [f"plain,{topic}.rule"]
    )  # with a short timeout
    cli("context", "add", "there", "http://127.0.0.1:1")
    assert completed("topics", "context", "use", "th").split() == ["plain,there"]
    assert completed("topics", "health", "--context", "th").split() == ["plain,there"]
    # Completion does not wait for a server that is down, and prints no error into the command line.
    assert completed("topics", "read", "--context", "there", "x").strip() == ""


def test_a_command_that_is_nearly_right(cli: Cli) -> None:
    for typed, meant in (("topics", "topic"), ("consumers", "consumer"), ("tial", "tail")):
        assert cli(typed) == 2
        assert meant in cli.err.partition("Did you mean")[2]
    assert cli("quux") == 2
    assert "No such command 'quux'" in cli.err


def test_moments_are_shown_as_such(cli: Cli, topic: str) -> None:
    cli("pub", topic, "1")
    (row,) = cli.rows("topic", "info", topic)
    assert cli("topic", "info", topic) == 0
    shown = dict(line.split(maxsplit=1) for line in cli.out.splitlines())
    assert shown["last_write_ts"] == format_time(row["last_write_ts"])
    assert shown["config.dead_letter"] == "-"
    assert shown["count"] == "1"


# -- parsing of values -------------------------------------------------------------------------------------


def test_durations_sizes_and_times() -> None:
    assert [milliseconds(text) for text in ("250ms", "10m", "1h30m", "1.5s", "7d")] == [
        250, 600_000, 5_400_000, 1500, 604_800_000,
    ]  # fmt: skip
    assert [milliseconds(text) for text in ("", "10", "m", "10 m", "-1s", "1s1")] == [None] * 6
    assert [size(text) for text in ("100", "1k", "64KiB", "1.5MiB", "2GB")] == [
        100,
        1000,
        65536,
        1_572_864,
        2 * 10**9,
    ]
    assert str(when("2026-11-17T04:30:00Z")) == "2026-11-17 04:30:00+00:00"
