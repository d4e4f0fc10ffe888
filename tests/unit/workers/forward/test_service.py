"""Goal: rules end with their topics, in the catalog and at both ends, and the drop of a topic returns which ones.

Method: real shards on simulated disks; the test carries the messages.
"""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.support.faults import fault
from tests.support.flow_rig import (
    ask,
    ask_catalog,
    cluster,
    forward,
    home,
    name_on,
    numbered,
    put,
    settle,
    stored,
    texts,
    write,
)
from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import Cluster
from topics.api import limits
from topics.link import wire
from workers.forward import service as forwarding
from workers.forward.service import REMOVAL_US

SOURCE = name_on(1, "source")
NEAR, FAR = name_on(1, "near"), name_on(0, "far")
EACH_DEST = pytest.mark.parametrize("dest", [FAR, NEAR], ids=["far", "near"])


def removed(reply: ShardAnswer) -> list[str]:
    body = json.loads(bytes(reply.body))
    assert body["deleted"] is True
    found: list[str] = body["routers_removed"]
    return found


def parts(made: Cluster) -> tuple[int, int, int]:
    """Rules in the catalog, outflows, inflows."""
    shards = [made.rig(shard).core.engine.shard for shard in range(len(made.rigs))]
    inflows = sum(len(log.inflows or ()) for shard in shards for log in shard.state.staged.values())
    return len(shards[0].forwards.catalog), sum(len(shard.forwards.outflows) for shard in shards), inflows


@EACH_DEST
@pytest.mark.parametrize("end", ["source", "dest"])
def test_a_topic_takes_its_rules_with_it(dest: str, end: str) -> None:
    made = cluster()
    forward(made, SOURCE, dest, name="b")
    forward(made, SOURCE, dest, name="a")
    forward(made, name_on(1, "other"), name_on(0, "another"), name="stays")
    write(made, SOURCE, numbered(1, 3))
    made.rest()
    assert removed(ask(made, wire.DROP_TOPIC, SOURCE if end == "source" else dest)) == ["a", "b"]
    assert parts(made) == (1, 1, 1)
    if end == "source":
        assert sorted(texts(made, dest)) == sorted(2 * numbered(1, 3)), "copies stay"
        write(made, SOURCE, ["in a new topic of that name"])
        settle(made)
        assert stored(made, dest) == 6
    else:
        write(made, SOURCE, numbered(4, 4))
        settle(made)
        assert stored(made, dest) == 0
    assert not made.rig(1).core.forwarding.forwarder.flows_owing()


def test_a_topic_that_a_pattern_finds_takes_nothing_with_it() -> None:
    made = cluster()
    topic = name_on(1, "orders.x")
    forward(made, "orders.>", FAR)
    write(made, topic, numbered(1, 2))
    made.rest()
    assert removed(ask(made, wire.DROP_TOPIC, topic)) == []
    write(made, topic, numbered(3, 4))
    made.rest()
    assert texts(made, FAR) == numbered(1, 4)
    assert removed(ask(made, wire.DROP_TOPIC, FAR)) == ["rule"]
    assert parts(made) == (0, 0, 0)


def test_a_topic_that_is_dropped_while_copies_are_on_their_way() -> None:
    for steps in range(100):
        made = cluster()
        forward(made, SOURCE, FAR)
        write(made, SOURCE, numbered(1, 3))
        went_on = all(made.step() for _ in range(steps))
        assert removed(ask(made, wire.DROP_TOPIC, FAR)) == ["rule"]
        settle(made)
        assert parts(made) == (0, 0, 0)
        assert FAR not in made.rig(0).core.engine.shard.state.staged
        if not went_on:
            return
    raise AssertionError("it never comes to rest")


@fault(
    "worker",
    "the catalog is down when a topic is dropped",
    "the client is answered, and the rules end when it is back",
)
def test_the_catalog_is_down_when_a_topic_is_dropped() -> None:
    made = cluster()
    forward(made, SOURCE, NEAR)
    made.kill(0)
    rig = made.rig(1)
    key = rig.receive(wire.DROP_TOPIC, NEAR)
    made.rest()
    assert key not in rig.replies
    assert rig.wake_at_ms is not None
    made.clock.advance(REMOVAL_US // 1000 + 1)
    made.rest()
    assert removed(rig.replies[key]) == ["rule"]
    made.start(0)
    settle(made)
    assert parts(made) == (0, 0, 0)


@pytest.mark.parametrize("who", [0, 1])
def test_a_death_at_any_step_leaves_no_rule_without_its_topic(who: int) -> None:
    for steps in range(200):
        made = cluster()
        forward(made, SOURCE, FAR)
        write(made, SOURCE, numbered(1, 2))
        rig = made.rig(home(made, SOURCE))
        rig.receive(wire.DROP_TOPIC, SOURCE)
        went_on = all(made.step() for _ in range(steps))
        made.kill(who)
        made.start(who)
        settle(made)
        is_there = SOURCE in made.rig(1).core.engine.shard.state.staged
        assert parts(made) == ((1, 1, 1) if is_there else (0, 0, 0)), steps
        if not went_on:
            return
    raise AssertionError("it never comes to rest")


def test_the_catalog_is_told_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "RETRY_US", 100_000)
    made = cluster()
    forward(made, SOURCE, NEAR)
    rig = made.rig(1)
    key = rig.receive(wire.DROP_TOPIC, NEAR)
    core = rig.core
    may_ask, core.forwarding._ask = core.forwarding._ask, lambda *args: False
    made.rest()
    assert key not in rig.replies
    core.forwarding._ask = may_ask
    made.clock.advance(101)
    made.rest()
    assert removed(rig.replies[key]) == ["rule"]
    assert core.forwarding.wake_at_us is None


def test_metrics_tell_of_copies() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    write(made, SOURCE, numbered(1, 3))
    made.rest()
    texts(made, FAR)
    reports = []
    for shard in range(2):
        core = made.rig(shard).core
        report = core.metrics.report(1.0)
        core.forwarding.report(report)
        reports.append(report)
    dest, source = reports
    assert (dest.copies, source.copies) == (3, 0)
    assert source.copy_batches >= 1 and dest.copy_batches == 0
    assert (dest.catch_ups, dest.catch_ups_late) == (1, 0)
    assert source.flows_owing == 0


def test_bounds_fit_each_other() -> None:
    """A batch fits into a link and a group of the log. A request finds room next to everything else on a link."""
    from workers.forward import catch_up, forwarder, outbox
    from workers.forward.rules import reads as rule_reads
    from workers.peers import links as peers

    requests = forwarder.BATCHES_MAX + catch_up.QUERIES_MAX + outbox.BATCHES_MAX + rule_reads.READS_MAX
    assert requests < peers.REQUESTS_MAX
    assert forwarder.BYTES_MAX + outbox.BYTES_MAX < peers.BYTES_MAX
    assert forwarder.BATCH_BYTES <= limits.DIFF_BYTES_MAX


@pytest.mark.parametrize("first", ["records", "rule"])
def test_a_dest_in_memory_knows_its_rules_after_a_crash(first: str) -> None:
    """Its records are replayed when they are read; the rules that copy to it are known at once."""
    made = cluster()
    put(made, FAR, durability="memory")
    if first == "records":
        write(made, FAR, ["own"])
    forward(made, SOURCE, FAR)
    write(made, SOURCE, numbered(1, 3))
    settle(made)
    made.kill(home(made, FAR))
    made.start(home(made, FAR))
    settle(made)
    got = json.loads(bytes(ask_catalog(made, wire.GET_FORWARD, "rule").body))
    assert got.get("forwarded_total") == 3, got
    write(made, SOURCE, ["record 4"])
    assert [text for text in texts(made, FAR) if text != "own"] == numbered(1, 4)


def test_a_rule_that_cannot_be_encoded_is_an_error_of_that_request() -> None:
    made = cluster()
    rule = forward(made, SOURCE, FAR)
    core = made.rig(0).core
    assert core.rules is not None
    core.rules.book.put(msgspec.structs.replace(rule, filter=(("Eq", "\ud800"),)))
    reply = ask_catalog(made, wire.GET_FORWARD, "rule")
    assert reply.status == 500 and b"could not be encoded" in bytes(reply.body)
    write(made, SOURCE, ["the shard still works"])


def test_a_topic_with_many_rules_takes_them_along_together() -> None:
    """Not one by one, each with its own syncs; and rules that are ending are not shown any more."""
    made = cluster()
    names = [f"rule-{i}" for i in range(70)]
    for i, name in enumerate(names):
        forward(made, SOURCE, f"dest-{i}", name=name)
    rig = made.rig(0)
    before = rig.core.engine.counters["batches"]
    key = made.rig(1).receive(wire.DROP_TOPIC, SOURCE)
    while rig.core.rules is None or not rig.core.rules.book.gone:
        assert made.step()
    assert ask_catalog_at_once(made, names[-1]).status == 404
    made.rest()
    assert removed(made.rig(1).replies[key]) == sorted(names)
    assert parts(made) == (0, 0, 0)
    assert rig.core.engine.counters["batches"] - before < 20
    assert rig.core.rules is not None and not rig.core.rules.book.gone


def ask_catalog_at_once(made: Cluster, name: str) -> ShardAnswer:
    rig = made.rig(0)
    key = rig.receive(wire.GET_FORWARD, "", args=wire.encode_args(wire.Args(forward=name)))
    rig._take(rig.core.tend())
    return rig.replies[key]
