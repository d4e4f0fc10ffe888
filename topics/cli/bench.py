"""`topics bench`: throughput and latency of a server as seen by one client, in a temporary topic."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Literal

import click
import msgspec

from topics.cli.errors import CommandError
from topics.cli.formatting import table
from topics.cli.options import duration, size
from topics.cli.session import Session, with_server
from topics.client import Client, ClientError


class PhaseResult(msgspec.Struct):
    """Latencies are per call; in "write and follow", from the start of a write until the stream delivers the record."""

    phase: str
    calls: int
    records: int
    records_s: float
    mib_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def phase_result(phase: str, times_s: list[float], records: int, size: int, duration_s: float) -> PhaseResult:
    if not times_s:
        raise CommandError(f"no call of phase {phase!r} completed: use a longer --time")
    ordered = sorted(times_s)

    def percentile_ms(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)

    rate = records / max(duration_s, 1e-6)
    return PhaseResult(
        phase,
        len(ordered),
        records,
        round(rate, 1),
        round(rate * size / (1 << 20), 3),
        percentile_ms(0.5),
        percentile_ms(0.99),
        percentile_ms(1.0),
    )


class Bench:
    """The phases of a benchmark on an existing topic.

    Writes do not create the topic: a late write, after Ctrl-C and the delete, would create it again.
    """

    def __init__(self, client: Client, topic: str, seconds: float, size: int, threads: int) -> None:
        self._client, self._topic = client, topic
        self._seconds, self._size, self._threads = seconds, size, threads
        # Random, so that a compressing file system does not flatter the result.
        self._data = os.urandom(size // 2 + 1).hex()[: max(0, size - 2)]

    def writes(self, batch: int) -> PhaseResult:
        records = [self._data] * batch
        times, duration_s = self._repeat(lambda: self._client.write_many(self._topic, records, create=False))
        phase = "write" if batch == 1 else f"write {batch} at once"
        return phase_result(phase, times, len(times) * batch, self._size, duration_s)

    def _repeat(self, call: Callable[[], object]) -> tuple[list[float], float]:
        """Run the call in several threads, at least once. Return the time of each call and the total time."""
        times: list[float] = []
        errors: list[ClientError] = []
        stop = threading.Event()
        begun = time.perf_counter()
        end = begun + self._seconds

        def work() -> None:
            try:
                while not errors and not stop.is_set():
                    start = time.perf_counter()
                    if start >= end and times:
                        return
                    call()
                    times.append(time.perf_counter() - start)
            except ClientError as error:
                errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self._threads)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                # With a timeout: Ctrl-C delivered to another thread does not interrupt a join.
                while thread.is_alive():
                    thread.join(0.1)
        finally:
            # After Ctrl-C some threads may not have started.
            stop.set()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        if errors:
            raise errors[0]
        return times, time.perf_counter() - begun

    def reads(self) -> PhaseResult:
        """Read the topic page by page, from the beginning again whenever the end is reached."""
        times: list[float] = []
        records = after = 0
        begun = time.perf_counter()
        while (start := time.perf_counter()) < begun + self._seconds or not times:
            page = self._client.read(self._topic, after, limit=1000)
            times.append(time.perf_counter() - start)
            records += len(page.records)
            after = 0 if page.caught_up else page.next_from_seq
        return phase_result("read 1000 at once", times, records, self._size, time.perf_counter() - begun)

    def follows(self) -> PhaseResult:
        """Write records one at a time and wait for each in a stream."""
        times: list[float] = []
        with self._client.tail(self._topic) as tail:
            begun = time.perf_counter()
            while (start := time.perf_counter()) < begun + self._seconds or not times:
                seq = self._client.write(self._topic, self._data, create=False).last_seq
                while next(tail).seq != seq:
                    pass
                times.append(time.perf_counter() - start)
            return phase_result(
                "write and follow", times, len(times), self._size, time.perf_counter() - begun
            )


@click.command()
@click.option(
    "--time", "each_ms", type=duration, default="2s", help="Duration of each of the four phases. [2s]"
)
@click.option("--size", type=size, default="100", help="Size of a record's data. [100]")
@click.option(
    "--batch",
    type=click.IntRange(2, 10_000),
    default=100,
    metavar="N",
    help="Number of records in a batch. [100]",
)
@click.option(
    "--threads", type=click.IntRange(1, 16), default=4, metavar="N", help="Number of writing threads. [4]"
)
@click.option("--durability", type=click.Choice(["ephemeral", "memory", "disk", "fsync"]), default="disk", help="Durability of the topic. [disk]")  # fmt: skip
@click.option("--topic", help="Name of the topic to create. [bench. and a random suffix]")
@click.option("--keep", is_flag=True, help="Do not delete the topic.")
@with_server
def bench(
    session: Session,
    each_ms: int,
    size: int,
    batch: int,
    threads: int,
    durability: Literal["ephemeral", "memory", "disk", "fsync"],
    topic: str | None,
    keep: bool,
) -> None:
    """Measure writes and reads against a server, in a temporary topic.

    The load comes from one Python process, so the result is what one such client gets, not the server's limit.
    """
    client = session.client
    name = topic or f"bench.{secrets.token_hex(4)}"
    if not client.create_topic(name, durability=durability).created:
        raise CommandError(f"{name} already exists: choose another --topic")
    try:
        run = Bench(client, name, each_ms / 1000, size, threads)
        phases: list[Callable[[], PhaseResult]] = [
            lambda: run.writes(1),
            lambda: run.writes(batch),
            run.reads,
            run.follows,
        ]
        results = []
        for phase in phases:
            results.append(phase())
            if session.as_json:
                session.write(msgspec.json.encode(results[-1]) + b"\n")
    finally:
        if not keep:
            client.delete_topic(name)
    if not session.as_json:
        heads = ["phase", "calls", "records/s", "MiB/s", "p50 ms", "p99 ms", "max ms"]
        rows = [
            [row.phase, str(row.calls), f"{row.records_s:.0f}", f"{row.mib_s:.2f}"]
            + [f"{value:.2f}" for value in (row.p50_ms, row.p99_ms, row.max_ms)]
            for row in results
        ]
        print("\n".join(table(heads, rows, left=1)))
