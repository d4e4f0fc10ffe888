"""Queues: jobs are produced, claimed and acknowledged; and the cost of a claim with many queued jobs.

All systems alternate, at equal durability, with concurrent producers and workers. Then, for topics alone, a worker claims
from queues of up to a million jobs: three queues of one server, alternating.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peers import protocols, queue_protocols
from peers.load import plan, result_of, start
from peers.protocols import BadAnswer
from peers.queue_aims import FEW, MANY
from peers.queue_protocols import QUEUE
from peers.scaling import FILL_STEP, running
from peers.systems import Fleet, Target, Topics
from peers.turns import summary, take_turns
from peers.work import Say, settle, warm_up_s

WAITING = (FEW, 100_000, MANY)
PRODUCERS = 4
BATCH = 100  # jobs per request of a producer
# Jobs sent and not acknowledged: those of 50 workers (400), those in flight from producers (400), and more than that
# again, so that a claim always finds jobs.
WAITING_MAX = 2000
PAYLOAD = protocols.payload(100)
FIGURES = (
    *("jobs_per_s", "jobs_per_claim", "p50_ms", "p99_ms", "p999_ms"),
    *("ack_p50_ms", "ack_p99_ms", "ack_p999_ms"),
)


def measure(
    fleet: Fleet, durability: str, workers: int, *, seconds: float, rounds: int, say: Say
) -> Iterator[dict[str, Any]]:
    """Yield a row for each system, also for failed ones."""
    turns = take_turns(
        fleet.at(durability),
        rounds=rounds,
        once=lambda target: measure_once(target, workers, seconds),
        say=say,
        name=lambda target: f"queue {durability} {workers} workers, {target.system}",
    )
    for target, outcome in turns:
        row = {"system": target.system, "durability": durability, "workers": workers}
        if isinstance(outcome, str):
            yield {"section": "queue", **row, "failed": outcome}
        else:
            yield {**row, **summary(outcome, FIGURES, each="job")}


def measure_once(target: Target, workers: int, seconds: float) -> dict[str, Any]:
    target.clear(QUEUE)  # in case of an earlier failure
    queue_protocols.make(target)
    try:
        result = drive(target, QUEUE, workers=workers, producers=PRODUCERS, seconds=seconds)
        if kept := queue_protocols.left(target):
            raise BadAnswer(b"%d jobs are kept although all are acknowledged" % kept)
        return result
    finally:
        target.clear(QUEUE)
        settle(target)


def drive(
    target: Target, queue: str, *, workers: int, producers: int, seconds: float, held: int = 0
) -> dict[str, Any]:
    """Run the load generator. With `held` jobs in the queue at the start, their number is kept; else it is drained."""
    settings: dict[str, object] = {
        "mode": "queue",
        "clients": workers,
        "producers": producers,
        "waiting_max": held or WAITING_MAX,
        "held": held,
        "queue": queue,
        "group": queue_protocols.GROUP,
        "seconds": seconds,
        "warm_up": warm_up_s(seconds),
    }
    requests = [target.write(PAYLOAD, BATCH, queue), queue_protocols.claim(target.protocol, queue)]
    text = plan(
        target.address, target.protocol, settings, [("request", one) for one in requests], target.pids()
    )
    return result_of(start(text))


def measure_waiting(
    folder: str, sizes: list[int], *, seconds: float, rounds: int, say: Say
) -> Iterator[dict[str, Any]]:
    """Measure one worker of topics, while one producer adds as many jobs as it claims. There are no concurrent claims."""
    with running(f"{folder}/waiting") as target:
        for size in sizes:
            say(f"queue of {size} jobs, filling")
            fill(target, size)
        settle(target)
        turns = take_turns(
            sizes,
            rounds=rounds,
            once=lambda size: measure_held(target, size, seconds),
            say=say,
            name=lambda size: f"queue of {size} jobs",
        )
        for size, outcome in turns:
            if isinstance(outcome, str):
                yield {"section": "waiting", "jobs": size, "failed": outcome}
            else:
                yield {"jobs": size, **summary(outcome, FIGURES, each="job")}


def fill(target: Topics, size: int) -> None:
    queue = named(size)
    queue_protocols.make_topics(target, queue)
    step = min(size, FILL_STEP)
    request = target.write(PAYLOAD, step, queue)
    for _ in range(size // step):
        protocols.ask(target.address, request)


def measure_held(target: Target, size: int, seconds: float) -> dict[str, Any]:
    result = drive(target, named(size), workers=1, producers=1, seconds=seconds, held=size)
    settle(target)
    return result


def named(size: int) -> str:
    return f"{QUEUE}-{size}"
