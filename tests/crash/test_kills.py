"""Goal: any process of a server may die at any moment, and what clients were told stays true.

Method: clients do a bit of everything while processes are killed (-9) one after the other; the history of all requests
and answers is judged against the contract.
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
    """Let the clients get some more done."""
    target = campaign.workload.acks + rng.randrange(40, 160)
    until(lambda: campaign.workload.acks >= target)


@fault("worker", "killed (-9) under a mixed load", KEPT)
@fault("front", "killed (-9) under a mixed load", f"connections break; {KEPT}")
@fault(
    "supervisor", "killed (-9) under a mixed load", f"all processes end; the next server has it all; {KEPT}"
)
@fault("supervisor", "stopped (SIGTERM) under a mixed load", "what is under way is answered; nothing is lost")
@fault("data directory", "every process of the server killed (-9) at the same moment", KEPT)
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
