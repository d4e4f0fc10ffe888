"""`topics queue`: jobs of a queue, or of a consumer: by hand, or a command for each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click
import msgspec

from topics.cli import lines
from topics.cli.failures import FAILED, OK, Failed
from topics.cli.quantities import COUNT, SEQ, duration
from topics.cli.session import Session, topic_argument, with_server
from topics.cli.tables import as_time
from topics.client import GiveUp, Job, RetryLater, Worker, leased
from topics.client.answers import Settled

GIVE_UP = 65  # EX_DATAERR of sysexits.h
consumer_option = click.option(
    "--consumer", help="Take the jobs of this consumer of the topic; it need not be a queue."
)
node_option = click.option(
    "--node", help="Name of the lease holder. [one name for all commands of this user on this machine]"
)


def default_node() -> str:
    """One process after the other is the same holder: what one claims another may ack."""
    return f"topics-cli-{os.uname().nodename[:64]}-{os.getuid()}"


@click.group()
def queue() -> None:
    """Claim jobs of a queue and settle them, or run a command for each. With --consumer the topic need not be a queue."""


@queue.command("claim")
@topic_argument
@consumer_option
@click.option(
    "--max", "most", type=click.IntRange(1, 1000), default=1, metavar="N", help="Maximum number of jobs. [1]"
)
@click.option("--wait", "wait_ms", type=duration, default="0s", help="How long to wait for a job. [0s]")
@click.option("--lease", "lease_ms", type=duration, help="How long the lease lasts. [that of the queue]")
@node_option
@with_server
def claim(
    session: Session,
    topic: str,
    consumer: str | None,
    most: int,
    wait_ms: int,
    lease_ms: int | None,
    node: str | None,
) -> None:
    """Claim jobs and print them, perhaps none. `topics queue ack` reads the lines that --json prints."""
    client, node = session.client, node or default_node()
    if consumer is None:
        claimed = client.claim(topic, most, wait_ms=wait_ms, lease_ms=lease_ms, node=node)
    else:
        claimed = client.fetch(topic, consumer, most, wait_ms=wait_ms, lease_ms=lease_ms, node=node)
    if claimed.tombstone is not None:
        session.say(claimed.tombstone.text)
    for job in claimed:
        session.write(_as_json(job) if session.as_json else _as_line(job))


def _as_json(job: Job) -> bytes:
    found = {
        "deliveries": job.deliveries,
        "lease_id": job.lease_id,
        "deadline": job.deadline,
        "holder": job.holder,
    }
    if job.consumer is not None:
        found["consumer"] = job.consumer
    return msgspec.json.encode(lines.fields(job) | found) + b"\n"


def _as_line(job: Job) -> bytes:
    until = "" if job.deadline is None else f" until {as_time(job.deadline)}"
    line = lines.chosen()(job).rstrip(b"\n")
    return line + f"  (delivery {job.deliveries}{until})\n".encode()


class _Line(msgspec.Struct):
    """What settling needs of a line of `claim --json`."""

    topic: str
    seq: int = msgspec.field(name="$seq")
    holder: str
    lease_id: str = ""
    consumer: str | None = None


def _jobs(topic: str, consumer: str | None, seqs: Sequence[int], node: str | None) -> list[Job]:
    if seqs:
        return leased(topic, *seqs, node=node or default_node(), consumer=consumer)
    if sys.stdin.isatty():
        raise click.UsageError("name seqs, or give the lines of `topics queue claim --json` on stdin")
    found = []
    for number, line in enumerate(sys.stdin.buffer, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise Failed(
                f"line {number} is not a job as `topics queue claim --json` prints it: {error}"
            ) from error
        if row.topic != topic:
            raise Failed(f"line {number} is a job of {row.topic!r}, not of {topic!r}")
        found.append(
            Job(
                topic=row.topic,
                seq=row.seq,
                ts=0,
                holder=row.holder,
                lease_id=row.lease_id,
                consumer=row.consumer,
            )
        )
    return found


def _tell(session: Session, settled: Settled, what: str) -> int:
    if session.as_json:
        session.write(msgspec.json.encode({what: settled.done, "skipped": settled.skipped}) + b"\n")
    else:
        print(f"{settled.done} {what}")
    if settled.skipped:
        seqs = ", ".join(map(str, settled.skipped))
        session.say(f"not leased to this node any more, or settled before: {seqs}")
        return FAILED
    return OK


@queue.command("ack")
@topic_argument
@click.argument("seqs", nargs=-1, type=SEQ, metavar="[SEQ...]")
@consumer_option
@node_option
@with_server
def ack(session: Session, topic: str, seqs: tuple[int, ...], consumer: str | None, node: str | None) -> int:
    """Acknowledge jobs: they are done. Without SEQ, those on stdin, as `claim --json` printed them.

    Exit code 1: some leases were lost.
    """
    return _tell(session, session.client.ack(_jobs(topic, consumer, seqs, node)), "acked")


@queue.command("nack")
@topic_argument
@click.argument("seqs", nargs=-1, type=SEQ, metavar="[SEQ...]")
@consumer_option
@node_option
@click.option(
    "--delay",
    "delay_ms",
    type=duration,
    default="0s",
    help="How long to wait before they are handed out again. [0s]",
)
@click.option(
    "--release", "kind", flag_value="release", help="Hand them back as if they had never been handed out."
)
@click.option(
    "--dead", "kind", flag_value="dead", help="Never hand them out again: they become dead letters."
)
@click.option("--reason", default="", help="Reason to keep with a dead letter.")
@with_server
def nack(
    session: Session,
    topic: str,
    seqs: tuple[int, ...],
    consumer: str | None,
    node: str | None,
    delay_ms: int,
    kind: Literal["release", "dead"] | None,
    reason: str,
) -> int:
    """Return jobs that are not done: they are handed out again. Without SEQ, those on stdin, as `claim --json` printed them."""
    jobs = _jobs(topic, consumer, seqs, node)
    settled = session.client.nack(jobs, delay_ms=delay_ms, kind=kind or "retry", reason=reason)
    return _tell(session, settled, "nacked")


# -- a command for each ------------------------------------------------------------------------------------


@queue.command("work", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@topic_argument
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARG...]")
@consumer_option
@click.option(
    "--concurrency",
    "-c",
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="Number of commands that run at a time. [1]",
)
@click.option(
    "--lease",
    "lease_ms",
    type=duration,
    default="30s",
    help="Lease of a job; extended while its command runs. [30s]",
)
@click.option("--count", "-n", type=COUNT, metavar="N", help="Stop after N jobs.")
@with_server
def work(
    session: Session,
    topic: str,
    command: tuple[str, ...],
    consumer: str | None,
    concurrency: int,
    lease_ms: int,
    count: int | None,
) -> int:
    """Run COMMAND for every job, until Ctrl-C or SIGTERM. Options come before the topic.

    The data is its stdin: JSON and a newline, or the bytes. TOPICS_JOB_TOPIC, _SEQ, _TAG, _TS and _DELIVERIES are in its
    environment. Exit code 0: done. 65: never again (to the dead letters). Any other: again, later and later.
    """
    if command[:1] == ("--",):
        command = command[1:]
    if not command or shutil.which(command[0]) is None:
        raise click.UsageError(
            f"there is no command {command[0]!r}" if command else "name the command to run"
        )
    runner = Runner(command, count, session.say)
    worker = session.client.worker(
        topic,
        runner.run,
        consumer=consumer,
        concurrency=concurrency if count is None else min(concurrency, count),
        lease_ms=lease_ms,
        poll_ms=1000,
    )
    runner.stop = worker.stop
    try:
        return _worked(session, worker)
    finally:
        runner.kill()


def _worked(session: Session, worker: Worker) -> int:
    stats = worker.run()
    told = {
        "done": stats.done,
        "failed": stats.failed,
        "given_up": stats.given_up,
        "lost": stats.lost,
        "released": stats.released,
    }
    if session.as_json:
        session.write(msgspec.json.encode(told) + b"\n")
    else:
        session.say(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in told.items()))
    return OK


class Runner:
    """Starts the command, for several threads at a time."""

    def __init__(self, command: Sequence[str], count: int | None, say: Callable[[str], None]) -> None:
        self._command, self._left, self._say = command, count, say
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stop: Callable[[], None] = lambda: None

    def run(self, job: Job) -> None:
        with self._lock:
            if self._left is not None:
                if self._left <= 0:
                    raise RetryLater(0)  # another thread has taken the last one
                self._left -= 1
                if not self._left:
                    self.stop()
        code = self._call(job)
        if not code:
            return
        reason = f"{self._command[0]} ended with {code}"
        self._say(f"{job.topic} seq {job.seq}: {reason}; {'given up' if code == GIVE_UP else 'again later'}")
        raise GiveUp(reason) if code == GIVE_UP else RuntimeError(reason)

    def _call(self, job: Job) -> int:
        said = {
            "TOPIC": job.topic,
            "SEQ": job.seq,
            "TS": job.ts,
            "TAG": job.tag or "",
            "DELIVERIES": job.deliveries,
        }
        environment = {**os.environ, **{f"TOPICS_JOB_{name}": str(value) for name, value in said.items()}}
        try:
            # A group of its own: Ctrl-C is for us, and what runs is finished.
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=environment, process_group=0)
        except OSError as error:
            self.stop()
            self._say(f"cannot run {self._command[0]}: {error.strerror}")
            raise
        with self._lock:
            self._running.add(process)
        try:
            process.communicate(_stdin(job))
            return process.returncode
        finally:
            with self._lock:
                self._running.discard(process)

    def kill(self) -> None:
        """Those that were not done in time, or when a second signal says so: their jobs go to others."""
        with self._lock:
            for process in self._running:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def _stdin(job: Any) -> bytes:
    if job.encoding == "base64":
        import base64

        return base64.b64decode(msgspec.json.decode(job.data, type=str))
    return bytes(job.data) + b"\n"
