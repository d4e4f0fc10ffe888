"""Goal: a worker may die before, after or during any of its disk calls.

Method: record which failpoints the load reaches (workers/shard/failpoints.py), choose some of each kind, and kill a worker at each of
them under load. scripts/crash takes all of them. The history is checked at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.crash.campaign import Campaign
from tests.support.faults import fault
from tests.support.server import until

pytestmark = pytest.mark.crash

KEPT = "the next worker recovers: every answer stays true, and no change is visible in part"


def kill_at_some(campaign: Campaign, whats: tuple[str, ...], rng: random.Random) -> None:
    """Kill a worker at one failpoint of each kind, once it is known which are reached."""
    for what in whats:
        until(lambda what=what: campaign.reached(what))
        point = rng.choice(campaign.reached(what))
        print("killed at", point)
        assert campaign.kill_at(point), f"{point} is no longer reached"


@fault("worker", "killed before or after a disk call of a commit", KEPT)
@fault("worker", "killed while it recovers from being killed", KEPT)
@fault("log file", "the worker dies during a write to it", KEPT)
@fault("log file", "the worker dies while it creates the next one", KEPT)
@fault("data directory", "the worker dies while it overwrites erased records", KEPT)
@fault("data directory", "the worker dies while it removes a dropped topic", KEPT)
def test_a_worker_dies_while_it_commits_erases_and_drops(campaign: Callable[..., Campaign]) -> None:
    this: Campaign = campaign(seed=11)
    with this.workload.running():
        assert this.kill_at("wal.write.before", "torn", nth=40)
        assert this.kill_at("wal.allocate.before", "torn")
        assert this.kill_at("meta.sync_dir.before", deaths=2), "every start reaches it"
        kill_at_some(this, ("wal", "intent", "topic"), random.Random(11))
    this.finish()


@fault("worker", "killed before or after a disk call of a checkpoint", KEPT)
@fault("segment", "the worker dies while it writes, seals or drops one", KEPT)
@fault("index", "the worker dies while it writes one", KEPT)
@fault("snapshot", "the worker dies while it writes or publishes one", KEPT)
@fault("segment", "the worker dies while it marks deleted records", KEPT)
def test_a_worker_dies_during_a_checkpoint(campaign: Callable[..., Campaign]) -> None:
    this: Campaign = campaign(seed=12)
    with this.workload.running():
        kill_at_some(this, ("segment", "index", "snapshot", "deletes"), random.Random(12))
    this.finish()
