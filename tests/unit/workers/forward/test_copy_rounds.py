"""Goal: a source with many dests is copied in rounds, so that few records do not keep the cores busy; but a read that
waits for a copy does not wait for a round.

Method: real shards on simulated disks, as in test_forwarder.py; time passes only when a test lets it.
"""

from __future__ import annotations

import pytest

from tests.support.flow_rig import cluster, forward, name_on, numbered, stored, texts, write
from tests.support.shard_rig import Cluster
from topics.link import wire
from workers.forward import copy_rounds
from workers.forward.copy_rounds import GATHERED_MIN

SOURCE = name_on(1, "source")
DESTS = [name_on(i % 2, f"dest-{i}-") for i in range(6)]
ROUND_MS = 10


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_rounds, "DESTS_MIN", len(DESTS))
    monkeypatch.setattr(copy_rounds, "ROUND_US_PER_DEST", ROUND_MS * 1000 // len(DESTS) + 1)


def with_dests(count: int = len(DESTS)) -> Cluster:
    """A cluster whose source is idle, with the position of each dest known everywhere."""
    made = cluster()
    for i, dest in enumerate(DESTS[:count]):
        forward(made, SOURCE, dest, name=f"rule-{i}")
    write(made, SOURCE, ["record 0"])
    pass_ms(made, 2 * ROUND_MS)
    pass_ms(made, 2 * ROUND_MS)
    return made


def pass_ms(made: Cluster, ms: int) -> None:
    made.rest()
    made.clock.advance(ms)
    made.rest()


def all_stored(made: Cluster) -> list[int]:
    return [stored(made, dest) for dest in DESTS]


def test_records_gather_between_two_rounds() -> None:
    made = with_dests()
    write(made, SOURCE, ["record 1"])
    made.rest()
    assert all_stored(made) == [2] * 6, "it was idle, and does not wait"
    sender = made.rig(1).core.forwarding.forwarder
    before = sender.batches_sent
    for i in range(2, 7):
        write(made, SOURCE, [f"record {i}"])
        pass_ms(made, 1)
    assert all_stored(made) == [2] * 6
    assert sender.has_pending_copies, "a stop would wait for them"
    wake_at_ms = made.rig(1).wake_at_ms
    assert wake_at_ms is not None and wake_at_ms <= made.clock.monotonic_ms() + ROUND_MS
    pass_ms(made, ROUND_MS)
    assert all_stored(made) == [7] * 6
    assert sender.batches_sent == before + 6, "one batch for each dest"
    assert not sender.has_pending_copies
    assert all(texts(made, dest) == numbered(0, 6) for dest in DESTS)


def test_few_dests_do_not_rest() -> None:
    made = with_dests(5)
    for i in range(1, 4):
        write(made, SOURCE, [f"record {i}"])
        made.rest()
        assert [stored(made, dest) for dest in DESTS[:5]] == [i + 1] * 5


@pytest.mark.parametrize("dest", DESTS[:2], ids=["far", "near"])
def test_a_read_does_not_wait_for_a_round(dest: str) -> None:
    made = with_dests()
    write(made, SOURCE, ["record 1"])
    made.rest()
    write(made, SOURCE, ["record 2"])
    made.rest()
    assert texts(made, dest) == numbered(0, 2)
    assert sorted(all_stored(made)) == [2] * 5 + [3], "only that one was moved forward"
    pass_ms(made, ROUND_MS + 1)
    assert all_stored(made) == [3] * 6


def test_a_large_batch_does_not_wait() -> None:
    made = with_dests()
    write(made, SOURCE, ["record 1"])
    made.rest()
    write(made, SOURCE, numbered(2, GATHERED_MIN))
    made.rest()
    assert all_stored(made) == [2] * 6
    write(made, SOURCE, [f"record {GATHERED_MIN + 1}"])
    made.rest()
    assert all_stored(made) == [GATHERED_MIN + 2] * 6


def test_records_arriving_during_a_batch_wait_too() -> None:
    made = with_dests()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(1)
    before = rig.core.forwarding.forwarder.batches_sent
    while rig.core.forwarding.forwarder.batches_sent < before + 6:
        rig.step()
    write(made, SOURCE, ["record 2"])
    made.rest()
    assert all_stored(made) == [2] * 6
    pass_ms(made, ROUND_MS + 1)
    assert all_stored(made) == [3] * 6


def test_a_dest_that_starts_anew_while_its_source_rests() -> None:
    made = with_dests()
    write(made, SOURCE, ["record 1"])
    made.rest()
    write(made, SOURCE, ["record 2"])
    made.rest()
    made.kill(0)
    made.start(0)
    pass_ms(made, ROUND_MS + 1)
    assert all_stored(made) == [3] * 6


def test_a_topic_that_is_dropped_while_it_rests() -> None:
    made = with_dests()
    write(made, SOURCE, ["record 1"])
    made.rest()
    write(made, SOURCE, ["record 2"])
    made.rest()
    made.ask(1, wire.DROP_TOPIC, SOURCE, b"")
    pass_ms(made, ROUND_MS + 1)
    assert not made.rig(1).core.forwarding.forwarder.has_pending_copies
    assert all_stored(made) == [2] * 6
