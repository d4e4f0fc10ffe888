"""Much more data than memory: `scripts/soak memory records` and `scripts/soak memory topics`. Short forms: tests/integration/test_memory.py.

`records`: one topic of records of 1 KiB that do not fit in memory. Head and history are readable, the memory of the processes stays
within the bound of docs/storage.md, and a start reads no records: only indexes, and these when the topic is first used.
`topics`: many topics with 10 records each. Measures the memory of an idle topic, and the time of a start.

Processes are real; memory and reads are the kernel's figures.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.server import Server

MIB = 1 << 20
CACHE_BYTES = 64 * MIB
RECORD_BYTES = 1024
BATCH = 1000
WRITERS = 16
STOP_S = 600.0
PROCESS_BYTES = (
    96 * MIB
)  # a Python process with the server's code, and its working memory: pages, batches, copies
ROW_BYTES = 32 * 1.5  # a row of the index, with the spare capacity of a growing one
WAITING_BYTES = 32 * MIB  # reads that wait for cold blocks
START_READ_BYTES = 24 * MIB  # of code
PAD = "x" * 980


class Client:
    """One persistent connection."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=300)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        text = json.dumps(body).encode() if body is not None else None
        self._connection.request(method, path, text, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        content = json.loads(response.read())
        assert response.status < 300, (method, path, content)
        return content


# ---- the kernel's figures


def processes(server: Server) -> dict[str, int]:
    """The server's processes by name."""
    assert server.process is not None
    supervisor = server.process.pid
    found = {"supervisor": supervisor}
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    return found


def resident(pid: int) -> int:
    """Resident memory of a process without mapped files."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def bytes_read(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split("rchar:")[1].split()[0])


def shard_of(server: Server) -> int:
    return next(pid for name, pid in processes(server).items() if "shard" in name)


def size_of(server: Server, *patterns: str) -> int:
    return sum(path.stat().st_size for pattern in patterns for path in server.data_dir.rglob(pattern))


# ---- many records


@dataclass
class RecordsReport:
    records: int
    data_bytes: int
    peak_bytes: int  # of the shard, while it was filled and read
    bound_bytes: int
    start_s: float
    start_read_bytes: int  # until it was ready
    touch_read_bytes: int  # and until the topic had answered
    index_bytes: int  # .idx, .dict, .sum, .del, snapshots and log: all that a start may read
    history_ms: float  # median of a page at a random place

    def problems(self) -> list[str]:
        found = []
        if self.peak_bytes > self.bound_bytes:
            found.append(f"the shard used {self.peak_bytes} bytes, more than {self.bound_bytes}")
        if self.touch_read_bytes > self.index_bytes + START_READ_BYTES:
            found.append(f"a start read {self.touch_read_bytes} bytes; all indexes have {self.index_bytes}")
        return found


def many_records(folder: Path, count: int) -> RecordsReport:
    server = Server(folder, environment={"TOPICS_CACHE_BYTES": str(CACHE_BYTES)}, shards=1).start()
    try:
        client, peak = Client(server), 0
        client.ask("PUT", "/v0/topics/t", {})
        for first in range(1, count + 1, BATCH):
            records = [{"data": [n, PAD]} for n in range(first, min(first + BATCH, count + 1))]
            client.ask("POST", "/v0/topics/t", {"records": records})
            if first // BATCH % 16 == 0:
                peak = max(peak, resident(shard_of(server)))
        peak = max(peak, *(read_somewhere(client, count, server)[0] for _ in range(2)))
        server.stop(STOP_S)
        began = time.monotonic()
        server.start(wait_ready=False).wait_ready(STOP_S)
        start_s = time.monotonic() - began
        start_read = bytes_read(shard_of(server))
        client = Client(server)
        assert client.ask("GET", "/v0/topics/t")["count"] == count
        client.ask("POST", "/v0/topics/t/diff", {"from_seq": count - 1})
        touch_read = bytes_read(shard_of(server))
        index = size_of(server, "*.idx", "*.dict", "*.sum", "*.del", "snap-*", "wal-*")
        held, history_ms = read_somewhere(client, count, server)
        return RecordsReport(
            count, size_of(server, "*.data"), max(peak, held), bound_of(count), start_s, start_read, touch_read, index, history_ms
        )  # fmt: skip
    finally:
        server.close()


def bound_of(count: int) -> int:
    """docs/storage.md: rows, caches, waiting reads, and the base of any process."""
    cold_cache = 32 * MIB
    return int(PROCESS_BYTES + ROW_BYTES * count + CACHE_BYTES + cold_cache + WAITING_BYTES)


def read_somewhere(client: Client, count: int, server: Server) -> tuple[int, float]:
    """Read and check pages at the head and at random places; the peak memory, and the median time of a page."""
    rng, peak, took = random.Random(count), 0, []
    for _ in range(100):
        seq = rng.choice((count - 100, rng.randrange(max(1, count - 100))))
        began = time.monotonic()
        page = client.ask("POST", "/v0/topics/t/diff", {"from_seq": seq, "limit": 100})
        took.append((time.monotonic() - began) * 1000)
        assert [record["data"][0] for record in page["records"]] == list(range(seq + 1, seq + 101))
        peak = max(peak, resident(shard_of(server)))
    return peak, sorted(took)[50]


# ---- many topics


@dataclass
class TopicsReport:
    topics: int
    bytes_by_process: dict[str, int]  # after a start, when no topic has been used yet
    empty_bytes: int  # of all processes of a server without topics
    stop_s: float
    start_s: float  # from the command until it is ready
    recovery_s: float  # the slowest shard's part of it

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_process.values())

    @property
    def bytes_per_topic(self) -> float:
        return (self.total_bytes - self.empty_bytes) / self.topics


def write_topics(server: Server, numbers: range) -> None:
    client = Client(server)
    for number in numbers:
        records = [{"data": [number, i], "tag": f"tag{i}"} for i in range(10)]
        client.ask("POST", f"/v0/topics/topic.{number}", {"records": records})


def many_topics(folder: Path, count: int, shards: int = 2) -> TopicsReport:
    environment = {"TOPICS_MAX_TOPICS": "0"}
    server = Server(folder, environment=environment, shards=shards).start()
    try:
        empty = sum(map(resident, processes(server).values()))
        with ThreadPoolExecutor(
            WRITERS
        ) as writers:  # each new topic waits for a sync; parallel ones share it
            list(
                writers.map(lambda first: write_topics(server, range(first, count, WRITERS)), range(WRITERS))
            )
        began = time.monotonic()
        server.stop(STOP_S)
        stop_s = time.monotonic() - began
        began = time.monotonic()
        server.start()
        start_s = time.monotonic() - began
        held = {name: resident(pid) for name, pid in processes(server).items()}
        client = Client(server)
        for number in range(0, count, max(1, count // 20)):
            page = client.ask("POST", f"/v0/topics/topic.{number}/diff", {"from_seq": 0})
            assert [record["data"] for record in page["records"]] == [[number, i] for i in range(10)]
        ready = [json.loads(line) for line in server.log.splitlines() if '"the shard is ready"' in line]
        recovery_s = max(line["fields"]["took_ms"] for line in ready[-shards:]) / 1000
        return TopicsReport(count, held, empty, stop_s, start_s, recovery_s)
    finally:
        server.close()


# ---- the long forms


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("records", "topics"))
    parser.add_argument("--count", type=int, help="[20 000 000 records, 100 000 topics]")
    parser.add_argument("--dir", help="where to work [a temporary directory]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topics-soak-", dir=options.dir) as name:
        folder = Path(name)
        if options.what == "records":
            return records_soak(folder, options.count or 20_000_000)
        return topics_soak(folder, options.count or 100_000)


def records_soak(folder: Path, count: int) -> int:
    fits = shutil.disk_usage(folder).free // 2 // (RECORD_BYTES + 128)
    if fits < count:
        print(f"half of the free space has room for {fits} records, so the run is limited to these")
        count = fits // BATCH * BATCH
    report = many_records(folder, count)
    print(report)
    for problem in report.problems():
        print(f"failed: {problem}", file=sys.stderr)
    return int(bool(report.problems()))


def topics_soak(folder: Path, count: int) -> int:
    report = many_topics(folder, count)
    print(report)
    print(f"{report.total_bytes / MIB:.0f} MiB in all, {report.bytes_per_topic:.0f} bytes a topic")
    is_held = report.total_bytes <= 1 << 30
    if not is_held:
        print("failed: more than 1 GiB", file=sys.stderr)
    return int(not is_held)


if __name__ == "__main__":
    sys.exit(main())
