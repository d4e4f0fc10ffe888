"""Goal: any process of a server may die at any time, and all answers stay true.

Method: clients send a mixed load while processes are killed (-9) one after the other; the history of requests
and answers is checked against the contract.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.crash.campaign import SUPERVISOR, Campaign
from tests.support.faults import fault
from tests.support.server import until

pytestmark = pytest.mark.crash

KEPT = "every answer stays true; with an idempotency key each write is there once"


def work_on(campaign: Campaign, rng: random.Random) -> None:
    """Wait until the clients have got more acks."""
    target = campaign.workload.acks + rng.randrange(40, 160)
    until(lambda: campaign.workload.acks >= target)


@fault("worker", "killed (-9) under a mixed load", KEPT)
@fault("front", "killed (-9) under a mixed load", f"connections break; {KEPT}")
@fault(
    "supervisor",
    "killed (-9) under a mixed load",
    f"all processes end; after a restart nothing is missing; {KEPT}",
)
@fault(
    "supervisor", "stopped (SIGTERM) under a mixed load", "requests in flight are answered; nothing is lost"
)
@fault("data directory", "all processes of the server are killed (-9) at once", KEPT)
def test_processes_die_in_turn_and_together(campaign: Callable[..., Campaign]) -> None:
    rng = random.Random(1)
    this: Campaign = campaign(seed=1)
    deaths: list[Callable[[], None]] = [
        lambda: this.kill("shard 0"),
        lambda: this.kill("shard 1"),
        lambda: this.kill("front 0"),
        lambda: this.kill(SUPERVISOR),
        this.kill_all,
        this.stop,
    ]
    rng.shuffle(deaths)
    with this.workload.running():
        for death in deaths:
            work_on(this, rng)
            death()
        work_on(this, rng)
    this.finish()
