"""The stage budget: the latency of a write and of its delivery to a waiting reader, by stage.

    python scripts/peers/stages.py [--seconds 5] [--dir FOLDER] [--json PATH]

The real server runs with marks around the methods that end a stage (staged_server.py); the clients are in this process,
and all use one clock. `lone`: one writer, which waits until its record is acknowledged and read, and then pauses, so
that all processes sleep when the next write comes. `half`: 64 writers at random times, at half of their maximum rate.
Both with one reader in a long poll.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path[0] = str(SCRIPTS)

from peers import stage_join, stage_marks  # noqa: E402
from peers.stage_load import Seen, load  # noqa: E402
from peers.systems import wait_until  # noqa: E402

TOPIC = "stages"
WRITERS = 64
WARM_UP_S = 0.5
MAXIMUM_S = 1.5

# Expected duration of each stage, from the initial design.
SEED_BUDGET = {
    "parse": "50–200 µs (HTTP parse + validate)",
    "write": "10–50 µs (WAL frame serialize + buffered write)",
    "sync": "50–500 µs (fdatasync)",
    "index": "< 10 µs (index update + notify)",
    "wake": "20–100 µs (worker wake + filter + frame build), with render",
    "render": "in wake",
    "socket": "10–50 µs (socket write + flush)",
}
END_TO_END_BUDGET = {"disk": "well under 1 ms, p99 1–5 ms", "fsync": "p99 1–5 ms"}

MEANING = {
    "arrive": "client's send → the front has the bytes: kernel and one wake-up",
    "parse": "bytes received → request placed on its shard",
    "queue": "placed → the worker's turn begins; the four parts below",
    "queue/tick": "placed → handed to the link at the end of the tick",
    "queue/link": "handed over → the worker's loop has it: three wake-ups",
    "queue/decode": "body decoded and checked",
    "queue/turn": "decoded → the turn begins: the worker looks whether more has come",
    "stage": "the engine decides",
    "write": "envelope made and written to the log",
    "sync": "log written → the sync is reported to the loop; the three parts below",
    "sync/start": "log written → its thread begins",
    "sync/fdatasync": "the system call",
    "sync/report": "synced → the loop's turn for it begins",
    "index": "→ readers see the record",
    "wake": "published → the waiting reader has its records",
    "render": "→ answers made and handed to the link",
    "return": "handed over → the front's loop has it: three wake-ups",
    "socket": "answer received → bytes written",
    "socket/answer": "the answer's turn comes: the writer's, in the same message, goes first",
    "socket/send": "head and body joined, the system call",
    "leave": "bytes written → the reading client has them: kernel and one wake-up",
}
ROWS = (
    "arrive", "parse", "queue", "queue/tick", "queue/link", "queue/decode", "queue/turn", "stage", "write",
    "sync", "sync/start", "sync/fdatasync", "sync/report", "index", "wake", "render", "return", "socket",
    "socket/answer", "socket/send", "leave",
)  # fmt: skip


def measure(folder: str, *, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for durability in ("disk", "fsync"):
        for kind in ("lone", "half"):
            _say(f"stages: {durability} {kind}, {seconds:g} s")
            point = f"{folder}/{durability}-{kind}"
            with _server(f"{point}/plain", durability) as address:
                plain, _ = _load(address, kind, seconds=max(1.0, seconds / 2))
            with _server(point, durability, staged=True) as address:
                seen, note = _load(address, kind, seconds=seconds)
            found = stage_join.deliveries(seen, *_followed(point))
            rows += _rows(durability, kind, found, seen, plain, note)
    return rows


def measure_acks(folder: str, *, seconds: float) -> list[dict[str, Any]]:
    """One client in a closed loop without a reader, as in the comparison of single writes."""
    rows: list[dict[str, Any]] = []
    for durability in ("disk", "fsync"):
        _say(f"stages: {durability} acks, {seconds:g} s")
        point = f"{folder}/{durability}-acks"
        with _server(f"{point}/plain", durability) as address:
            plain = _load_acks(address, max(1.0, seconds / 2))
        with _server(point, durability, staged=True) as address:
            seen = _load_acks(address, seconds)
        found = stage_join.acknowledgements(seen, *_followed(point))
        rows += _rows(durability, "acks", found, seen, plain, "no reader, no pause")
    return rows


def _followed(point: str) -> tuple[Any, Any, Any]:
    return (
        stage_join.follow_front(stage_marks.load(Path(point, "front.marks"))),
        stage_join.follow_worker(stage_marks.load(Path(point, "worker.marks"))),
        stage_join.follow_syncs(stage_marks.load(Path(point, "syncs.marks"))),
    )


def _load_acks(address: str, seconds: float) -> Seen:
    with load(address, TOPIC, 1, with_reader=False) as clients:
        clients.run(WARM_UP_S, 0)
        return _undisturbed(lambda: clients.run(seconds, 0))


def _load(address: str, kind: str, *, seconds: float) -> tuple[Seen, str]:
    if kind == "lone":
        with load(address, TOPIC, 1) as clients:
            clients.run(WARM_UP_S, None)
            seen = _undisturbed(lambda: clients.run(seconds, None))
            return seen, "one write at a time"
    with load(address, TOPIC, WRITERS, with_reader=False) as clients:
        clients.run(WARM_UP_S, 0)
        maximum = clients.run(MAXIMUM_S, 0).writes_per_s
    with load(address, TOPIC, WRITERS) as clients:
        clients.run(WARM_UP_S, maximum / 2)
        seen = _undisturbed(lambda: clients.run(seconds, maximum / 2))
    return seen, f"{seen.writes_per_s:,.0f} writes/s; the most was {maximum:,.0f}"


def _undisturbed(run: Any) -> Seen:
    gc.collect()
    gc.disable()
    try:
        seen: Seen = run()
        return seen
    finally:
        gc.enable()


def _rows(
    durability: str, kind: str, found: list[dict[str, int]], seen: Seen, plain: Seen, note: str
) -> list[dict[str, Any]]:
    if not found:
        raise RuntimeError(f"no write of {durability} {kind} woke the reader")
    where = {"durability": durability, "load": kind}

    def row(stage: str, values: Sequence[int], budget: str, note: str) -> dict[str, Any]:
        times = {"p50_us": _at(values, 0.5), "p99_us": _at(values, 0.99)}
        return {"stage": stage, **where, **times, "seed_budget": budget, "note": note}

    rows = [
        row(name, [stages[name] for stages in found], SEED_BUDGET.get(name, ""), MEANING[name])
        for name in ROWS
        if name in found[0]
    ]
    explained = statistics.median(s["sum"] / s["end to end"] for s in found)
    count = f"{len(found):,} of {len(seen.acked):,} writes"
    if seen.read:
        without = f"without marks p50 {_at(_delivery(plain), 0.5):,.0f} µs"
        told = f"client's send → reader has it; {count} met a waiting reader; {note}; {without}"
    else:
        told = f"{count}; {note}"
    ack = f"without marks p50 {_at(_acks(plain), 0.5):,.0f} µs"
    rows.append(
        row(
            "sum",
            [s["sum"] for s in found],
            "",
            f"parse … socket of one write; {explained:.0%} of its end to end, the rest is the client's",
        )
    )
    rows.append(
        row(
            "end to end",
            [s["end to end"] for s in found],
            END_TO_END_BUDGET[durability],
            told,
        )
    )
    rows.append(row("write ack", [s["write ack"] for s in found], "", f"client's send → its answer; {ack}"))
    return rows


def _delivery(seen: Seen) -> list[int]:
    return [seen.read[seq] - sent for seq, sent in seen.sent.items() if seq in seen.read]


def _acks(seen: Seen) -> list[int]:
    return [acked - seen.sent[seq] for seq, acked in seen.acked.items()]


def _at(values: Sequence[int], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1000, 1)


@contextmanager
def _server(folder: str, durability: str, *, staged: bool = False) -> Iterator[str]:
    """Start a server with one front and one shard, and create the topic."""
    os.makedirs(folder, exist_ok=True)
    port_file = Path(folder, "port")
    port_file.unlink(missing_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    environment = {
        **clean,
        "PYTHONPATH": f"{SCRIPTS.parent}:{SCRIPTS}",
        "TOPICS_PORT": "0",
        "TOPICS_PORT_FILE": str(port_file),
        "TOPICS_DATA_DIR": f"{folder}/data",
        "TOPICS_WAL_SHARDS": "1",
        "TOPICS_FRONTS": "1",
    }
    command = ["peers.staged_server", folder] if staged else ["workers"]
    with open(f"{folder}/log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=log, stderr=log)
    try:
        wait_until(port_file.exists, process, folder)
        address = port_file.read_text().strip()
        wait_until(lambda: _call(address, "GET", "/readyz") == 200, process, folder)
        _call(address, "PUT", f"/v0/topics/{TOPIC}", {"durability": durability})
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _call(address: str, method: str, path: str, body: Any = None) -> int:
    connection = http.client.HTTPConnection(address, timeout=60)
    text = json.dumps(body).encode() if body is not None else None
    connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
    status = connection.getresponse().status
    connection.close()
    return status


def table(rows: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    before = None
    for row in rows:
        where = f"{row['durability']}, {row['load']}"
        if where != before:
            lines += ["", f"{where:18}{'p50 µs':>10}{'p99 µs':>10}   expected / what it is"]
            before = where
        indent = "  " if "/" in row["stage"] else ""
        text = " – ".join(filter(None, (row["seed_budget"], row["note"])))
        lines.append(f"{indent + row['stage']:18}{row['p50_us']:>10,.1f}{row['p99_us']:>10,.1f}   {text}")
    return "\n".join(lines[1:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5, help="of each of the four points")
    parser.add_argument("--dir", default=None, help="where to create a data directory")
    parser.add_argument("--json", metavar="PATH", help="also write the rows there")
    parser.add_argument(
        "--acks", action="store_true", help="instead: one writer in a closed loop, and no reader"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topics-stages-", dir=options.dir) as folder:
        rows = (measure_acks if options.acks else measure)(folder, seconds=options.seconds)
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
