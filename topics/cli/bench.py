"""`topics bench`: how quick a server is from here. A topic of its own, which goes when it is done."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Literal

import click
import msgspec

from topics.cli.failures import Failed
from topics.cli.quantities import duration, size
from topics.cli.session import Session, with_server
from topics.cli.tables import table
from topics.client import Client, ClientError


class Figure(msgspec.Struct):
    """Of one phase. Times are those of a call; of `follow`, from before a write until its record is there."""

    phase: str
    calls: int
    records: int
    records_s: float
    mib_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def figure(phase: str, times_s: list[float], records: int, size: int, took_s: float) -> Figure:
    if not times_s:
        raise Failed(f"nothing was measured of {phase}: say a longer --time")
    ordered = sorted(times_s)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)

    rate = records / max(took_s, 1e-6)
    return Figure(
        phase,
        len(ordered),
        records,
        round(rate, 1),
        round(rate * size / (1 << 20), 3),
        at(0.5),
        at(0.99),
        at(1.0),
    )


class Bench:
    """Its topic exists. No write makes it: one that comes late, after Ctrl-C and the delete, would make it again."""

    def __init__(self, client: Client, topic: str, seconds: float, size: int, threads: int) -> None:
        self._client, self._topic = client, topic
        self._seconds, self._size, self._threads = seconds, size, threads
        # Not compressible, as JSON text: somebody's disk may be clever.
        self._data = os.urandom(size // 2 + 1).hex()[: max(0, size - 2)]

    def writes(self, batch: int) -> Figure:
        records = [self._data] * batch
        times, took_s = self._repeat(lambda: self._client.write_many(self._topic, records, create=False))
        phase = "write" if batch == 1 else f"write {batch} at once"
        return figure(phase, times, len(times) * batch, self._size, took_s)

    def _repeat(self, call: Callable[[], object]) -> tuple[list[float], float]:
        """The call in several threads, for so long, and once at least: how long each took, and all."""
        times: list[float] = []
        errors: list[ClientError] = []
        is_over = threading.Event()
        begun = time.perf_counter()
        end = begun + self._seconds

        def work() -> None:
            try:
                while not errors and not is_over.is_set():
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
                # In pieces: Ctrl-C that the system hands to another thread does not end a wait of this one.
                while thread.is_alive():
                    thread.join(0.1)
        finally:
            # Ctrl-C may come before all have begun.
            is_over.set()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        if errors:
            raise errors[0]
        return times, time.perf_counter() - begun

    def reads(self) -> Figure:
        """Everything, page by page, from the beginning and again if there is time."""
        times: list[float] = []
        records = after = 0
        begun = time.perf_counter()
        while (start := time.perf_counter()) < begun + self._seconds or not times:
            page = self._client.read(self._topic, after, limit=1000)
            times.append(time.perf_counter() - start)
            records += len(page.records)
            after = 0 if page.caught_up else page.next_from_seq
        return figure("read 1000 at once", times, records, self._size, time.perf_counter() - begun)

    def follows(self) -> Figure:
        """One record after the other: written, and seen in a stream."""
        times: list[float] = []
        with self._client.tail(self._topic) as tail:
            begun = time.perf_counter()
            while (start := time.perf_counter()) < begun + self._seconds or not times:
                seq = self._client.write(self._topic, self._data, create=False).last_seq
                while next(tail).seq != seq:
                    pass
                times.append(time.perf_counter() - start)
            return figure("write and follow", times, len(times), self._size, time.perf_counter() - begun)


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
@click.option("--topic", help="Name of the topic to create. [bench.…]")
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
    """Measure writes and reads against a server, in a topic of its own that is deleted in the end.

    It is one Python process: it tells what such a client gets, and of the server only that it can do as much.
    """
    client = session.client
    name = topic or f"bench.{secrets.token_hex(4)}"
    made = client.create_topic(name, durability=durability)
    if not made.created:
        raise Failed(f"{name} exists, and a measurement would write to it: name another --topic")
    try:
        run = Bench(client, name, each_ms / 1000, size, threads)
        phases: list[Callable[[], Figure]] = [
            lambda: run.writes(1),
            lambda: run.writes(batch),
            run.reads,
            run.follows,
        ]
        figures = []
        for phase in phases:
            figures.append(phase())
            if session.as_json:
                session.write(msgspec.json.encode(figures[-1]) + b"\n")
    finally:
        if not keep:
            client.delete_topic(name)
    if not session.as_json:
        heads = ["phase", "calls", "records/s", "MiB/s", "p50 ms", "p99 ms", "max ms"]
        rows = [
            [row.phase, str(row.calls), f"{row.records_s:.0f}", f"{row.mib_s:.2f}"]
            + [f"{value:.2f}" for value in (row.p50_ms, row.p99_ms, row.max_ms)]
            for row in figures
        ]
        print("\n".join(table(heads, rows, left=1)))
