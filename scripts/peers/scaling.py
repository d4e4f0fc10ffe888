"""Measurements of topics alone: with more shards, and with a larger backlog."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peers import protocols
from peers.load import Load, drive
from peers.protocols import CLIENT, Exchange
from peers.systems import Topics, TopicsServer
from peers.work import Say, cpu_us_per_record, settle, warm_up_s

SHARDS = (1, 2, 4)
BACKLOGS = (10_000, 1_000_000, 10_000_000)
FILL_STEP = 10_000  # records per request
CLIENTS = {"single": 64, "batch": 16}
PAYLOAD = protocols.payload(100)


@contextmanager
def running(folder: str, **environment: str) -> Iterator[Topics]:
    shutil.rmtree(folder, ignore_errors=True)
    target = Topics("disk", TopicsServer(folder, **environment))
    try:
        yield target
    finally:
        target.stop()
        shutil.rmtree(folder, ignore_errors=True)


def measure_shards(folder: str, *, seconds: float, say: Say) -> Iterator[dict[str, Any]]:
    """Measure with 1 to several shards. Every client has its own topic, so that all shards have work."""
    for shards in SHARDS:
        with running(f"{folder}/shards-{shards}", TOPICS_WAL_SHARDS=str(shards)) as target:
            for work, clients in CLIENTS.items():
                say(f"scaling {work}, {shards} shards")
                stream = work + CLIENT.decode()
                exchange = target.write(PAYLOAD, 1 if work == "single" else 100, stream)
                for client in range(clients):
                    target.make(f"{work}{client:05}")
                settle(target)
                load = Load(
                    target.address, exchange, clients, seconds, warm_up_s(seconds), pids=target.pids()
                )
                result = drive(load)
                yield {
                    "shards": shards,
                    "work": work,
                    "records_per_s": result["records_per_s"],
                    "cpu_us_per_record": cpu_us_per_record([result]),
                }
                settle(target)


def measure_backlog(folder: str, *, most: int, seconds: float, say: Say) -> Iterator[dict[str, Any]]:
    """Measure single writes at the end and reads of 100 records from the middle, with 16 clients."""
    held = 0
    with running(f"{folder}/backlog") as target:
        target.make()
        bulk = target.write(PAYLOAD, FILL_STEP)
        for records in [size for size in BACKLOGS if size <= most]:
            say(f"backlog, up to {records} records")
            for _ in range((records - held) // FILL_STEP):
                protocols.ask(target.address, bulk)
            held = records
            settle(target)
            works = {"write": target.write(PAYLOAD, 1), "diff": page(records // 2)}
            for work, exchange in works.items():
                say(f"backlog {records}, {work}")
                result = drive(Load(target.address, exchange, 16, seconds, warm_up_s(seconds)))
                kept = ("per_s", "p50_ms", "p99_ms", "p999_ms")
                yield {"records": records, "work": work, **{name: result[name] for name in kept}}
                settle(target)


def page(from_seq: int) -> Exchange:
    body = b'{"from_seq":%d,"limit":100}' % from_seq
    return Exchange("http", protocols.http_post("/v0/topics/bench/diff", body), 100, marks=100)
