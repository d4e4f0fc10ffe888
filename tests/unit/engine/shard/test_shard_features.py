"""A shard is composed of features: one without transactions and merges works, and refuses a log that needs them.

Method: engines on a simulated disk, with and without the optional features, open each other's shard.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine_harness import SMALL
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from topics.api.config import TopicConfig
from topics.api.errors import FeatureAbsent
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.commands import transactions as txc
from topics.engine.runtime.engine import Engine
from topics.engine.shard.shard import OPTIONAL_FEATURES

BARE = frozenset(OPTIONAL_FEATURES)


def opened(disk: SimDisk, absent: frozenset[str] = frozenset()) -> Engine:
    engine = Engine(disk, SimClock(), SMALL, absent=absent)
    for _ in engine.recover_steps():
        pass
    return engine


def ask(engine: Engine, command: Any) -> Any:
    """Run a command, and all jobs that result."""
    outcome = engine.turn([("token", command)])
    replies, jobs = outcome.replies, outcome.jobs
    while jobs:
        job = jobs.pop(0)
        job.run()
        outcome = engine.finish(job)
        replies += outcome.replies
        jobs += outcome.jobs
    (reply,) = [result for token, result in replies if token == "token"]
    return reply


def append(engine: Engine, topic: str, *data: bytes) -> cmd.Appended:
    return ask(engine, cmd.Append(topic, cmd.Records(list(data))))  # type: ignore[no-any-return]


def test_a_shard_without_the_optional_features_works_and_restarts() -> None:
    disk = SimDisk(0)
    engine = opened(disk, BARE)
    assert engine.shard.transactions is None
    ask(engine, cmd.PutTopic("jobs", TopicConfig(type="queue", durability="fsync")))
    assert append(engine, "jobs", b"1", b"2", b"3").head_seq == 3
    claimed = ask(engine, con.Claim("jobs", node=b"node", lease_ms=1000))
    assert claimed.page.seqs == [1]
    settled = ask(engine, con.Settle("jobs", "ack", b"node", [1]))
    assert settled.count == 1
    ask(engine, cmd.Delete("jobs", before_seq=3, erase=True))
    engine.close()

    again = opened(disk, BARE)
    page = ask(again, cmd.Diff("jobs", 0, 10))
    assert page.seqs == [3]
    again.close()
    assert ask(opened(disk), cmd.Diff("jobs", 0, 10)).seqs == [3], "its files are those of any shard"


@pytest.mark.parametrize("is_closed", [False, True], ids=["log", "snapshot"])
def test_stored_transactions_are_refused_by_a_shard_that_cannot_read_them(is_closed: bool) -> None:
    disk = SimDisk(0)
    engine = opened(disk)
    ask(engine, txc.BeginTransaction("t", "producer", 1, create=True))
    if is_closed:
        engine.close()
    with pytest.raises(
        FeatureAbsent, match="snap-.* has transactions" if is_closed else "wal-.* kind txn-opened"
    ):
        opened(disk, BARE)
    state = ask(opened(disk), txc.BeginTransaction("t", "producer", 1))
    assert state.state == "open", "nothing was lost by the attempt"
