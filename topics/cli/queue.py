"""`topics queue`: claim and settle jobs of a queue or a consumer, or run a command for each job."""

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

from topics.cli import record_format
from topics.cli.errors import FAILED, OK, CommandError
from topics.cli.formatting import format_time
from topics.cli.options import COUNT, SEQ, duration
from topics.cli.session import Session, topic_argument, with_server
from topics.client import GiveUp, Job, RetryLater, Worker, leased
from topics.client.answers import Settled

GIVE_UP = 65  # EX_DATAERR of sysexits.h
consumer_option = click.option(
    "--consumer", help="Take records of this consumer; the topic need not be a queue."
)
node_option = click.option("--node", help="Name of the lease holder. [one name per user and machine]")


def default_node() -> str:
    """The same for all processes of a user, so that one can ack what another claimed."""
    return f"topics-cli-{os.uname().nodename[:64]}-{os.getuid()}"


@click.group()
def queue() -> None:
    """Claim and settle jobs of a queue, or run a command for each job. With --consumer the topic need not be a queue."""


@queue.command("claim")
@topic_argument
@consumer_option
@click.option(
    "--max",
    "max_jobs",
    type=click.IntRange(1, 1000),
    default=1,
    metavar="N",
    help="Maximum number of jobs. [1]",
)
@click.option("--wait", "wait_ms", type=duration, default="0s", help="How long to wait for a job. [0s]")
@click.option("--lease", "lease_ms", type=duration, help="Duration of the lease. [lease of the queue]")
@node_option
@with_server
def claim(
    session: Session,
    topic: str,
    consumer: str | None,
    max_jobs: int,
    wait_ms: int,
    lease_ms: int | None,
    node: str | None,
) -> None:
    """Claim jobs and print them. `topics queue ack` reads the output of --json."""
    client, node = session.client, node or default_node()
    if consumer is None:
        claimed = client.claim(topic, max_jobs, wait_ms=wait_ms, lease_ms=lease_ms, node=node)
    else:
        claimed = client.fetch(topic, consumer, max_jobs, wait_ms=wait_ms, lease_ms=lease_ms, node=node)
    if claimed.tombstone is not None:
        session.note(claimed.tombstone.text)
    for job in claimed:
        session.write(_as_json(job) if session.as_json else _as_text(job))


def _as_json(job: Job) -> bytes:
    lease = {
        "deliveries": job.deliveries,
        "lease_id": job.lease_id,
        "deadline": job.deadline,
        "holder": job.holder,
    }
    if job.consumer is not None:
        lease["consumer"] = job.consumer
    return msgspec.json.encode(record_format.fields(job) | lease) + b"\n"


def _as_text(job: Job) -> bytes:
    until = "" if job.deadline is None else f" until {format_time(job.deadline)}"
    line = record_format.choose()(job).rstrip(b"\n")
    return line + f"  (delivery {job.deliveries}{until})\n".encode()


class _ClaimedJob(msgspec.Struct):
    """A line of `claim --json`, as far as `ack` and `nack` need it."""

    topic: str
    seq: int = msgspec.field(name="$seq")
    holder: str
    lease_id: str = ""
    consumer: str | None = None


def _jobs(topic: str, consumer: str | None, seqs: Sequence[int], node: str | None) -> list[Job]:
    if seqs:
        return leased(topic, *seqs, node=node or default_node(), consumer=consumer)
    if sys.stdin.isatty():
        raise click.UsageError("give seqs, or the output of `topics queue claim --json` on stdin")
    jobs = []
    for number, line in enumerate(sys.stdin.buffer, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_ClaimedJob)
        except msgspec.DecodeError as error:
            raise CommandError(
                f"line {number} is not a job in the format of `topics queue claim --json`: {error}"
            ) from error
        if row.topic != topic:
            raise CommandError(f"line {number} is a job of {row.topic!r}, not of {topic!r}")
        jobs.append(
            Job(
                topic=row.topic,
                seq=row.seq,
                ts=0,
                holder=row.holder,
                lease_id=row.lease_id,
                consumer=row.consumer,
            )
        )
    return jobs


def _print_settled(session: Session, settled: Settled, verb: str) -> int:
    if session.as_json:
        session.write(msgspec.json.encode({verb: settled.done, "skipped": settled.skipped}) + b"\n")
    else:
        print(f"{settled.done} {verb}")
    if settled.skipped:
        seqs = ", ".join(map(str, settled.skipped))
        session.note(f"already settled, or no longer leased to this node: {seqs}")
        return FAILED
    return OK


@queue.command("ack")
@topic_argument
@click.argument("seqs", nargs=-1, type=SEQ, metavar="[SEQ...]")
@consumer_option
@node_option
@with_server
def ack(session: Session, topic: str, seqs: tuple[int, ...], consumer: str | None, node: str | None) -> int:
    """Acknowledge jobs as done. Without SEQ, reads the output of `claim --json` from stdin.

    Exit code 1: some leases were lost.
    """
    return _print_settled(session, session.client.ack(_jobs(topic, consumer, seqs, node)), "acked")


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
    help="Delay before the jobs are delivered again. [0s]",
)
@click.option(
    "--release", "kind", flag_value="release", help="Return the jobs without counting the delivery."
)
@click.option(
    "--dead", "kind", flag_value="dead", help="Do not deliver the jobs again: they become dead letters."
)
@click.option("--reason", default="", help="Reason to store with a dead letter.")
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
    """Return jobs to be delivered again. Without SEQ, reads the output of `claim --json` from stdin."""
    jobs = _jobs(topic, consumer, seqs, node)
    settled = session.client.nack(jobs, delay_ms=delay_ms, kind=kind or "retry", reason=reason)
    return _print_settled(session, settled, "nacked")


# -- work --------------------------------------------------------------------------------------------------


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
    help="Number of commands that run at the same time. [1]",
)
@click.option(
    "--lease",
    "lease_ms",
    type=duration,
    default="30s",
    help="Lease of a job, extended while its command runs. [30s]",
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

    It gets the data on stdin (JSON and a newline, or the bytes), and TOPICS_JOB_TOPIC, _SEQ, _TAG, _TS and _DELIVERIES
    in its environment. Exit code 0: the job is done. 65: it becomes a dead letter. Any other: it is retried with backoff.
    """
    if command[:1] == ("--",):
        command = command[1:]
    if not command or shutil.which(command[0]) is None:
        raise click.UsageError(f"command {command[0]!r} not found" if command else "give the command to run")
    runner = Runner(command, count, session.note)
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
        return _run_worker(session, worker)
    finally:
        runner.kill()


def _run_worker(session: Session, worker: Worker) -> int:
    stats = worker.run()
    counts = {
        "done": stats.done,
        "failed": stats.failed,
        "given_up": stats.given_up,
        "lost": stats.lost,
        "released": stats.released,
    }
    if session.as_json:
        session.write(msgspec.json.encode(counts) + b"\n")
    else:
        session.note(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    return OK


class Runner:
    """Runs the command for jobs, in several threads."""

    def __init__(self, command: Sequence[str], count: int | None, note: Callable[[str], None]) -> None:
        self._command, self._left, self._note = command, count, note
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stop: Callable[[], None] = lambda: None

    def run(self, job: Job) -> None:
        with self._lock:
            if self._left is not None:
                if self._left <= 0:
                    raise RetryLater(0)  # another thread took the last job of --count
                self._left -= 1
                if not self._left:
                    self.stop()
        code = self._call(job)
        if not code:
            return
        reason = f"{self._command[0]} exited with {code}"
        self._note(f"{job.topic} seq {job.seq}: {reason}; {'given up' if code == GIVE_UP else 'will retry'}")
        raise GiveUp(reason) if code == GIVE_UP else RuntimeError(reason)

    def _call(self, job: Job) -> int:
        variables = {
            "TOPIC": job.topic,
            "SEQ": job.seq,
            "TS": job.ts,
            "TAG": job.tag or "",
            "DELIVERIES": job.deliveries,
        }
        environment = os.environ | {f"TOPICS_JOB_{name}": str(value) for name, value in variables.items()}
        try:
            # Its own process group: Ctrl-C stops this process, and running commands finish.
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=environment, process_group=0)
        except OSError as error:
            self.stop()
            self._note(f"cannot run {self._command[0]}: {error.strerror}")
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
        """Kill commands that are still running, after the timeout or a second signal. Their jobs are redelivered."""
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
