"""Goal: no crash, power cut, broken disk or clock change makes the server break a promise to a client.

Method: whole servers in one process (tests/sim/server_walk.py): the shipped engine, shard core, admission, endpoints
and front core on simulated disks, clocks and links, with random clients and random faults; the checker checks every
history. A fixed set of seeds, with `--long` many fresh ones; one that fails prints the command that repeats it. Rare
events are counted: runs without them prove nothing.

Longer: scripts/sim --minutes 30
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.queue_workers import LETTERS
from tests.sim.server_walk import (
    FIRST_WITH_MERGES,
    FIRST_WITH_TIERS,
    Simulation,
    digest,
    has_merges,
    has_sinks,
    has_tiers,
)
from tests.support import length
from tests.support.checker.copies import is_late
from tests.support.history import Op

pytestmark = pytest.mark.sim

ROOT = Path(__file__).resolve().parents[2]
SEEDS, SEEDS_PER_TEST = length.seeds(short=4, long=240), 4
# Much happens in the first.
RICH = (
    *(1016, 2062, 2042, 1040, 3026, 2072, 3004, 1022, 3007, 3014),
    *range(1000, 1200),
    *range(2010, 2200),
)
RARE = [
    "starts", "recoveries", "kills", "front kills", "power cuts", "stops", "crashes at a call", "failed starts",
    "read only", "rot", "fill_disk", "slow_disk", "stall", "set_clock", "lull", "checkpoint", "fail_call",
    "frame record", "frame tombstone", "frame caught-up", "frame topic-deleted", "frame error",
    "lose_cold", "slow_cold", "crash_at_cold_call", "fail_cold_call", "rot_cold", "moves", "cold fetches",
    "batches", "merges", "outputs refused", "scans",
]  # fmt: skip


@pytest.mark.parametrize("first", SEEDS[::SEEDS_PER_TEST])
def test_seeds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        Simulation(seed).run()


def test_seeds_with_tiers() -> None:
    seeds = [seed for seed in range(FIRST_WITH_TIERS, 2 * FIRST_WITH_TIERS) if has_tiers(seed)]
    for i in length.seeds(short=2, long=120):
        Simulation(seeds[i % len(seeds)]).run()


@pytest.mark.parametrize("has_it", [has_sinks, has_merges])
def test_seeds_with_sinks_and_jobs(has_it: Callable[[int], bool]) -> None:
    seeds = [seed for seed in range(FIRST_WITH_MERGES, 2 * FIRST_WITH_MERGES) if has_it(seed)]
    for i in length.seeds(short=1, long=120):
        Simulation(seeds[i % len(seeds)]).run()


def test_rare_events_happen() -> None:
    """Nearly all kinds within a few runs, and each of them within many (`--long`)."""
    counts: Counter[str] = Counter()
    missing = kinds = {*RARE, *ANSWERS}
    enough = length.pick(short=len(kinds) // 20, long=0)
    for seed in RICH[: length.pick(short=25, long=len(RICH))]:
        simulation = Simulation(seed)
        counts += simulation.run()
        counts += answers(simulation)
        missing = {name for name in kinds if not counts[name]}
        if len(missing) <= enough:
            return
    raise AssertionError(f"never met: {sorted(missing)}")


# Kinds of answers, by what produces them.
ANSWERS = [
    "200", "201", "404 topic_not_found", "409 wrong_last_seq", "422 topic_full", "429 disk_full", "429 max_topics",
    "500 read_only", "503 replaying", "503 shard down", "503 outcome unknown", "no answer", "deduped", "gap cap",
    "gap ttl", "gap crash", "gap recreated", "gap corrupt", "pushed gap from_seq_too_old", "pushed gap cap",
    "pushed gap crash", "pushed gap recreated", "stream resumed", "stream broken",
    "ack", "ack skipped", "nack", "extend", "extend skipped", "claimed", "claimed again", "fetched", "fetched again",
    "404 consumer_not_found", "dead letter", "router made", "router changed", "router ended", "ended with its topic", "counted",
    "202", "409 txn_incomplete", "409 txn_committed", "404 plan_not_found", "409 plan_leased",
    "410 lease_lost", "422 output_invalid",
    "404 router_not_found", "409 topic_exists_incompatible", "409 router_cycle", "gap source_trim", "late",
]  # fmt: skip


def answers(simulation: Simulation) -> Counter[str]:
    found: Counter[str] = Counter()
    for op in simulation.history.ops:
        if op.status is None:
            found["no answer"] += 1
        elif op.ok:
            found[str(op.status)] += 1
            found["deduped"] += op.kind == "write" and op.answer["deduped"]
            if op.kind == "diff" and op.answer["tombstone"]:
                found[f"gap {op.answer['tombstone']['reason']}"] += 1
            found += work(op)
            found += copying(op)
        else:
            found[kind_of_error(op.status, op.answer["error"])] += 1
    for stream in simulation.history.streams:
        found["stream resumed"] += stream.ok and stream.last_event_id is not None
        found["stream broken"] += stream.end == "broken"
        for frame in stream.frames:
            if frame.event == "tombstone":
                found[f"pushed gap {frame.data['reason']}"] += 1
            elif frame.event == "error":
                found[f"stream {frame.data['code']}"] += 1
    return found


def work(op: Op) -> Counter[str]:
    """What an answer shows about jobs."""
    found: Counter[str] = Counter()
    if op.kind == "claim":
        name = "fetched" if "consumer" in op.request else "claimed"
        for job in op.answer["claimed"]:
            found[name] += 1
            found[f"{name} again"] += job["deliveries"] > 1
    elif op.kind in ("ack", "nack", "extend"):
        found[op.kind] += len(op.request["seqs"]) > len(op.answer["skipped"])
        found[f"{op.kind} skipped"] += bool(op.answer["skipped"])
    elif op.kind == "diff" and op.topic == LETTERS:
        found["dead letter"] += len(op.answer["records"])
    return found


def copying(op: Op) -> Counter[str]:
    """What an answer shows about routers."""
    found: Counter[str] = Counter()
    if op.kind == "put_router":
        found["router made" if op.answer["created"] else "router changed"] += 1
    elif op.kind == "drop_router":
        found["router ended"] += op.answer["deleted"]
    elif op.kind == "drop":
        found["ended with its topic"] += len(op.answer["routers_removed"])
    elif op.kind == "router":
        found["counted"] += op.answer["forwarded_total"] > 0
    found["late"] += is_late(op)
    return found


def kind_of_error(status: int, error: dict[str, object]) -> str:
    detail = error.get("detail")
    assert detail is None or isinstance(detail, dict)
    known = detail or {}
    if known.get("outcome") == "unknown" and status == 503:
        return "503 outcome unknown"
    if known.get("read_only"):
        return "500 read_only"
    if status == 503:
        return "503 shard down" if "shard" in known else "503 replaying"
    return f"{status} {known.get('limit', error['code'])}"


def test_a_seed_is_the_whole_story() -> None:
    """The same seed in processes whose string hashes differ: every request, answer and event must be the same."""
    outputs = set()
    first = 3
    last = length.pick(short=first, long=5)
    for hash_seed in ("1", "2"):
        seeds = [str(first), "--until", str(last)]
        command = [sys.executable, "-m", "tests.sim.server_walk", *seeds, "--digest"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        outputs.add("\n".join(line for line in done.stdout.splitlines() if not line.startswith("{")))
    assert len(outputs) == 1
    again = Simulation(first)
    again.run()
    assert outputs.pop().splitlines()[0] == f"{first} {digest(again)}"


def test_the_simulation_runs_the_shipped_code() -> None:
    """In a process of its own: a tracer slows everything down, and definitions count only if nothing is imported yet."""
    program = (
        "from tests.sim import coverage_figure as c; f = c.measure(c.TYPICAL); print(len(f), c.share(f))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    modules, covered = done.stdout.split()
    assert int(modules) > 40
    assert float(covered) > 0.7, (
        f"only {float(covered):.0%} of the lines between a request's head and the disk"
    )
