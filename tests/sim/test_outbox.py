"""Goal: a dead letter reaches its topic once, whichever process dies, and a refused one goes back to its queue.

Method: real shards on simulated disks; the test carries the messages. A queue with jobs that are being moved is first
made on one of the disks; then the shards start and send the dead letters, as after any restart.
"""

from __future__ import annotations

import errno
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.support import length
from tests.support.engine_harness import Harness, append, numbered
from tests.support.faults import fault
from tests.support.shard_answers import ShardAnswer, as_answer
from tests.support.shard_rig import WORKER, Cluster, Rig, WireMessage, error_of, shard_config
from tests.support.sim_disk import SimDisk
from topics.api.config import EngineConfig, TopicConfig
from topics.api.limits import KIB, MIB
from topics.engine.commands import consumers as con
from topics.engine.core.placement import shard_of
from topics.link import wire
from workers.forward import outbox
from workers.forward.outbox import PAUSE_MS_MAX, PAUSE_MS_MIN, encode_dead_letters
from workers.peers import links as peers
from workers.shard.caps import PARK_US

ROOMY = EngineConfig(wal_file_bytes=64 * KIB, snapshot_interval_ms=1 << 40, verify=True)
JOBS = 10


def name_on(shard: int, stem: str, shards: int = 2) -> str:
    """A topic name that is placed on this shard."""
    return next(name for name in (f"{stem}{i}" for i in itertools.count()) if shard_of(name, shards) == shard)


QUEUE = name_on(1, "queue")
NEAR, FAR = name_on(1, "dead"), name_on(0, "dead")
EACH_TARGET = pytest.mark.parametrize("target", [FAR, NEAR], ids=["far", "near"])


def disks_with_letters(
    target: str,
    jobs: list[bytes] | None = None,
    *,
    target_config: TopicConfig | None = None,
    queues: tuple[str, ...] = (QUEUE,),
    seed: int = 1,
) -> list[SimDisk]:
    """The disks of two shards. All jobs of the queues, on shard 1, are being moved to the target."""
    harnesses = [Harness(shard_config(ROOMY, shard), disk=SimDisk(seed + shard)) for shard in range(2)]
    if target_config is not None:
        harnesses[shard_of(target, 2)].put(target, target_config)
    for queue in queues:
        move_jobs(harnesses[1], queue, target, jobs or numbered(1, JOBS))
    for harness in harnesses:
        harness.close()
    return [harness.disk for harness in harnesses]


def room(records: int) -> TopicConfig:
    return TopicConfig(cap_records=records, discard="reject")


def move_jobs(harness: Harness, queue: str, target: str, jobs: list[bytes]) -> None:
    harness.put(queue, TopicConfig(type="queue", dead_letter=target, max_deliveries=3, lease_ms=60_000))
    harness.do(append(queue, *jobs))
    claimed = harness.do(con.Claim(queue, node=b"n", max=len(jobs), max_bytes=8 * MIB))
    assert len(claimed.lease_ids) == len(jobs)
    harness.do(con.Settle(queue, "nack", b"n", [int(seq) for seq in claimed.page.seqs], nack="dead"))


def cluster(disks: list[SimDisk], **limits: int) -> Cluster:
    """Both shards, about to send. Attempts from before they knew each other are due again."""
    made = Cluster(2, disks, wal_file_bytes=64 * KIB, **limits)
    made.clock.advance(PAUSE_MS_MIN + 1)
    return made


def letters_on_wires(made: Cluster) -> list[WireMessage]:
    return [message for message in made.wires if b'"record' in b"".join(message.parts)]


def texts(made: Cluster, topic: str) -> list[str]:
    """The data of the live records of a topic, in order."""
    found: list[str] = []
    from_seq = 0
    while True:
        reply = made.ask(
            shard_of(topic, 2), wire.DIFF, topic, {"from_seq": from_seq, "max_batch_bytes": 8 * MIB}
        )
        assert reply is not None
        if reply.status == 404:
            return []
        page = json.loads(bytes(reply.body))
        found += [record["data"] for record in page["records"]]
        from_seq = page["next_from_seq"]
        if from_seq >= page["head_seq"]:
            return found


def all_texts(jobs: int = JOBS) -> list[str]:
    return [json.loads(text) for text in numbered(1, jobs)]


def on_their_way(made: Cluster) -> int:
    logs = made.rig(1).core.engine.shard.state.by_id.values()
    return sum(len(log.consumers.dead_letters) for log in logs if log.consumers is not None)


def settle(made: Cluster) -> None:
    """Do everything that can be done, including what waits for a pause to end."""
    for _ in range(20):
        made.rest()
        if not on_their_way(made):
            return
        made.clock.advance(PAUSE_MS_MAX)
    raise AssertionError("dead letters never arrive")


# ---- the normal case


@EACH_TARGET
def test_letters_come_to_their_topic_in_order_and_leave_the_queue(target: str) -> None:
    made = cluster(disks_with_letters(target))
    settle(made)
    assert texts(made, target) == all_texts()
    assert texts(made, QUEUE) == []


@EACH_TARGET
def test_a_letter_says_where_it_comes_from(target: str) -> None:
    made = cluster(disks_with_letters(target, numbered(1, 1)))
    settle(made)
    reply = made.ask(shard_of(target, 2), wire.DIFF, target, {})
    assert reply is not None
    (record,) = json.loads(bytes(reply.body))["records"]
    assert record["meta"]["$dead_letter_from"] == QUEUE
    assert record["meta"]["$dead_letter_src_seq"] == "1"


@EACH_TARGET
def test_one_batch_of_a_topic_is_on_its_way_and_it_is_bounded(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "BATCH_RECORDS", 3)
    made = cluster(disks_with_letters(target))
    while made.step():
        letters = letters_on_wires(made)
        assert len(letters) <= 1
        assert all(bytes(message.parts[0]).count(b'"record') <= 3 for message in letters)
    assert texts(made, target) == all_texts()


def test_large_letters_go_apart() -> None:
    made = cluster(disks_with_letters(FAR, numbered(1, 5, 300_000)))
    settle(made)
    assert len(texts(made, FAR)) == 5


def test_many_topics_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "BATCHES_MAX", 2)
    queues = tuple(name_on(1, f"queue-{letter}-") for letter in "abcdef")
    made = cluster(disks_with_letters(FAR, numbered(1, 3), queues=queues))
    while made.step():
        assert len(letters_on_wires(made)) <= 2
    assert sorted(texts(made, FAR)) == sorted(all_texts(3) * 6)
    assert made.rig(1).core.outbox.wake_at_us is None


# ---- deaths


def die(made: Cluster, who: str) -> None:
    if who == "power":
        made.cut_power()
        made.start(0)
        made.start(1)
        return
    shard = {"source": 1, "target": 0}[who]
    made.kill(shard)
    made.start(shard)


@EACH_TARGET
@pytest.mark.parametrize("who", ["source", "target", "power"])
@fault(
    "worker",
    "the worker of a queue or of its dead letter topic dies between any two steps of a move",
    "the job is in one place",
)
def test_a_death_at_any_step_loses_and_doubles_nothing(
    who: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "BATCH_RECORDS", 4)
    some = length.pick(short=11, long=1)
    for steps in range(length.turn(some), 1000, some):
        made = cluster(disks_with_letters(target))
        went_on = all(made.step() for _ in range(steps))
        die(made, who)
        settle(made)
        assert texts(made, target) == all_texts(), steps
        assert texts(made, QUEUE) == [], steps
        if not went_on:
            return
    raise AssertionError("the shards always have more work to do")


@pytest.mark.sim
@pytest.mark.parametrize("seed", length.seeds(short=3, long=60))
def test_any_number_of_deaths_loses_and_doubles_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(outbox, "BATCH_RECORDS", rng.choice((1, 2, 5)))
    target = rng.choice((NEAR, FAR))
    made = cluster(disks_with_letters(target))
    for _ in range(rng.randrange(1, 8)):
        for _ in range(rng.randrange(12)):
            made.step()
        if rng.random() < 0.5:
            made.clock.advance(rng.choice((PAUSE_MS_MIN, PAUSE_MS_MAX)))
        die(made, rng.choice(("source", "target", "power")))
    settle(made)
    assert texts(made, target) == all_texts()
    assert texts(made, QUEUE) == []


def test_while_the_target_is_down_it_is_tried_ever_more_seldom() -> None:
    made = cluster(disks_with_letters(FAR))
    made.kill(0)
    made.rest()
    rig = made.rig(1)
    pauses = []
    for _ in range(8):
        assert rig.core.outbox.wake_at_us is not None
        pauses.append(rig.core.outbox.wake_at_us // 1000 - made.clock.monotonic_ms())
        made.clock.advance(pauses[-1])
        assert rig.wake_at_ms is not None and rig.wake_at_ms <= made.clock.monotonic_ms() + 1
        made.clock.advance(1)
        made.rest()
    assert pauses == [200, 400, 800, 1600, 3200, 5000, 5000, 5000]
    made.start(0)
    settle(made)
    assert texts(made, FAR) == all_texts()


@fault("link", "a worker does not answer another's letters", "they are given up, and sent again")
def test_letters_without_an_answer_are_sent_again() -> None:
    made = cluster(disks_with_letters(FAR))
    while not letters_on_wires(made):
        assert made.step()
    for message in letters_on_wires(made):
        made.wires.remove(message)
    made.rest()
    assert on_their_way(made) == JOBS
    made.clock.advance(peers.GIVE_UP_US // 1000)
    settle(made)
    assert texts(made, FAR) == all_texts()


@fault(
    "worker", "the record of a dead letter cannot be read from the disk", "the letter is tried again later"
)
def test_letters_that_cannot_be_read_are_tried_again() -> None:
    made = cluster(disks_with_letters(FAR, numbered(1, 5, 3000)))  # too large for any cache
    made.disks[1].fail_at(1, errno.EIO, of="read")
    made.rest()
    assert on_their_way(made) == 5
    settle(made)
    assert len(texts(made, FAR)) == 5


@fault("disk", "the record of a dead letter is corrupt", "it is lost, and said so; the other letters arrive")
def test_a_corrupt_record_does_not_keep_back_the_other_letters() -> None:
    disks = disks_with_letters(FAR, numbered(1, 5, 3000))
    (segment,) = [path for path in disks[1].paths() if path.endswith(".data")]
    disks[1].flip_bit(segment, 5000)
    made = cluster(disks)
    settle(made)
    assert [text.rstrip(".") for text in texts(made, FAR)] == ["record 1", "record 3", "record 4", "record 5"]
    assert texts(made, QUEUE) == []
    made.kill(1)
    made.start(1)
    settle(made)
    assert len(texts(made, FAR)) == 4


# ---- refusals


@EACH_TARGET
def test_letters_that_a_full_target_refuses_are_returned(target: str) -> None:
    made = cluster(disks_with_letters(target, target_config=room(3)))
    settle(made)
    moved = texts(made, target)
    assert moved == all_texts()[:3]
    assert texts(made, QUEUE) == all_texts()[3:]


@EACH_TARGET
def test_a_refusal_does_not_give_back_what_an_earlier_try_has_brought(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt delivers three dead letters and its answer is lost; the next, with all ten, is more than
    there is room for.
    """
    some = length.pick(short=11, long=1)
    for steps in range(length.turn(some), 1000, some):
        monkeypatch.setattr(outbox, "BATCH_RECORDS", 3)
        made = cluster(disks_with_letters(target, target_config=room(5)))
        went_on = all(made.step() for _ in range(steps))
        made.kill(0)
        made.kill(1)
        monkeypatch.setattr(outbox, "BATCH_RECORDS", JOBS)
        made.start(0)
        made.start(1)
        settle(made)
        assert texts(made, target) + texts(made, QUEUE) == all_texts(), steps
        if not went_on:
            return
    raise AssertionError("the shards always have more work to do")


@EACH_TARGET
@pytest.mark.parametrize("seed", [3, 13])  # of what a power cut leaves
def test_a_returned_letter_stays_returned_after_the_next_is_accepted(target: str, seed: int) -> None:
    """The target forgets numbers below the last that it took: a dead letter that was refused before may never be sent
    again under its number, not even after a power cut.
    """
    jobs = [b'"record large %s"' % (b"x" * 2000), *numbered(1, 3)]
    everything = sorted(json.loads(job) for job in jobs)
    config = TopicConfig(cap_bytes=1000, discard="reject")
    some = length.pick(short=11, long=1)
    for steps in range(length.turn(some), 1000, some):
        made = cluster(disks_with_letters(target, jobs, target_config=config, seed=seed))
        went_on = all(made.step() for _ in range(steps))
        die(made, "power")
        settle(made)
        assert sorted(texts(made, target) + texts(made, QUEUE)) == everything, steps
        if not went_on:
            return
    raise AssertionError("the shards always have more work to do")


# ---- the target's side


def letter(number: int, target: str = "t", source_id: int = 1025, data: bytes = b"1") -> con.DeadLetter:
    return con.DeadLetter("q", source_id, "", number, number, target, 3, "", data, b"{}", None, None)


def send(rig: Rig, letters: list[con.DeadLetter], **options: Any) -> ShardAnswer | None:
    return rig.ask(wire.DEAD_LETTERS, "t", encode_dead_letters(letters), peer=WORKER + b"1-1", **options)


def answers(rig: Rig) -> list[ShardAnswer]:
    found = [
        as_answer(reply)
        for _, (first, *apart) in rig.answers
        for reply in wire.read_replies(bytes(first), *apart)
    ]
    rig.answers.clear()
    return found


def test_letters_are_answered_when_they_are_synced_and_taken_once() -> None:
    rig = Rig(ROOMY)
    for numbers, is_new in (([1, 2], True), ([1, 2], False), ([2, 3], True)):
        rig.receive(
            wire.DEAD_LETTERS,
            "t",
            encode_dead_letters([letter(number) for number in numbers]),
            peer=WORKER + b"1-1",
        )
        rig.turn()
        if is_new:
            assert answers(rig) == []
        rig.rest()
        (reply,) = answers(rig)
        assert (reply.status, reply.kind) == (200, wire.MSGPACK)
        taken = msgspec.msgpack.decode(reply.body, type=con.DeadLettersTaken)
        assert taken == con.DeadLettersTaken("t", 1025, numbers[-1])
    reply = rig.ask(wire.DIFF)
    assert reply is not None and len(json.loads(bytes(reply.body))["records"]) == 3


def test_letters_are_checked_like_any_request() -> None:
    rig = Rig(ROOMY)
    batches = {
        400: [
            b"no letters",
            encode_dead_letters([]),
            encode_dead_letters([letter(1, target="other")]),
            encode_dead_letters([letter(1), letter(2, source_id=2049)]),
        ]
    }
    for status, bodies in batches.items():
        for body in bodies:
            assert rig.ask(wire.DEAD_LETTERS, "t", body, peer=WORKER + b"1-1") is None
            assert [reply.status for reply in answers(rig)] == [status]
    rig.clock.advance(60_000)
    send(rig, [letter(1)], received_us=0)
    (reply,) = answers(rig)
    assert error_of(reply)["code"] == "not_ready", "it must be too late"
    send(rig, [letter(1)], incarnation=7)
    assert answers(rig) == [], "it must be refused: it was for another incarnation"
    starting = Rig(ROOMY, recovered=False)
    starting.receive(wire.DEAD_LETTERS, "t", encode_dead_letters([letter(1)]), peer=WORKER + b"1-1")
    starting.rest()
    (reply,) = answers(starting)
    assert error_of(reply)["code"] == "not_ready"


@EACH_TARGET
def test_letters_over_a_cap_of_the_server_wait_for_a_grant(target: str) -> None:
    made = cluster(disks_with_letters(target), max_topics=100)
    settle(made)
    assert texts(made, target) == all_texts()


@EACH_TARGET
def test_letters_over_a_cap_of_the_server_go_back(target: str) -> None:
    made = cluster(disks_with_letters(target), max_topics=1)  # the queue exists already
    settle(made)
    assert texts(made, target) == []
    assert texts(made, QUEUE) == all_texts()


def test_letters_that_wait_for_a_cap_in_vain_are_sent_again() -> None:
    made = cluster(disks_with_letters(NEAR), max_topics=10)
    made.kill(0)  # and the catalog with it
    made.rest()
    made.kill(1)
    rig = made.start(1)
    made.rest()
    made.clock.advance(PARK_US // 1000 + 1)
    made.rest()
    assert on_their_way(made) == JOBS
    made.start(0)
    settle(made)
    assert texts(made, NEAR) == all_texts()
    assert not rig.core.needs_turn


# ---- answers that wait for dead letters


Key = tuple[bytes, int]


def with_jobs(target: str, jobs: int = 1) -> Cluster:
    """Jobs that have had their only delivery; the next claim moves them."""
    made = Cluster(2, wal_file_bytes=64 * KIB)
    made.clock.advance(PAUSE_MS_MIN + 1)
    configure(made, target)
    return with_more_jobs(made, jobs)


def configure(made: Cluster, target: str, **config: Any) -> None:
    made.ask(
        1, wire.PUT_TOPIC, QUEUE, {"type": "queue", "dead_letter": target, "max_deliveries": 1, **config}
    )


def with_more_jobs(made: Cluster, jobs: int) -> Cluster:
    write(made, QUEUE, *(f"record {i}" for i in range(jobs)))
    reply = made.ask(1, wire.CLAIM, QUEUE, {"node": "n", "max": jobs})
    assert reply is not None
    seqs = [job["$seq"] for job in json.loads(bytes(reply.body))["claimed"]]
    made.ask(1, wire.NACK, QUEUE, {"node": "n", "seqs": seqs})
    return made


def write(made: Cluster, topic: str, *data: str) -> None:
    records = [{"data": text} for text in data]
    made.rig(shard_of(topic, 2)).ask(wire.WRITE, topic, {"records": records})


def asked(made: Cluster, op: int = wire.CLAIM, **fields: Any) -> Key:
    return made.rig(1).receive(op, QUEUE, {"node": "n", **fields})


def is_answered(made: Cluster, key: Key) -> bool:
    return key in made.rig(1).replies


@EACH_TARGET
@pytest.mark.parametrize("wait_ms", [0, 100])
def test_a_claim_that_moves_jobs_is_answered_when_the_target_has_them(target: str, wait_ms: int) -> None:
    made = with_jobs(target, 3)
    key = asked(made, wait_ms=wait_ms)
    while not is_answered(made, key):
        if not made.step():
            made.clock.advance(wait_ms)  # dead letters alone do not end the wait
    assert on_their_way(made) == 0
    assert len(texts(made, target)) == 3
    assert made.rig(1).core.outbox.wake_at_us is None


def test_claims_of_one_window_wait_together() -> None:
    made = with_jobs(FAR)
    configure(made, FAR, claim_jitter_ms=50)
    keys = [asked(made), asked(made)]
    made.rest()
    made.clock.advance(51)
    while made.step():
        assert not on_their_way(made) or not any(is_answered(made, key) for key in keys)
    assert all(is_answered(made, key) for key in keys)
    assert texts(made, FAR) == ["record 0"]


def stuck(made: Cluster) -> None:
    """Everything that can happen while shard 0 stands still."""
    rig = made.rig(1)
    made._collect()
    while rig.step():
        made._collect()


@fault(
    "worker",
    "the worker of a dead letter topic stands still",
    "a claim that moves jobs there is answered after a second",
)
def test_an_answer_waits_for_a_second_and_no_longer() -> None:
    made = with_jobs(FAR)
    write(made, QUEUE, "more")
    key = asked(made, wait_ms=30_000)
    stuck(made)
    assert not is_answered(made, key), "there is a job for it, and its dead letter is in flight"
    other = asked(made)
    stuck(made)
    assert is_answered(made, other), "it must not move anything"
    made.clock.advance(outbox.WAIT_US // 1000 - 1)
    stuck(made)
    assert not is_answered(made, key)
    wake_at_ms = made.rig(1).wake_at_ms
    assert wake_at_ms is not None and wake_at_ms <= made.clock.monotonic_ms() + 2
    made.clock.advance(2)
    stuck(made)
    assert is_answered(made, key)
    made.rest()
    assert texts(made, FAR) == ["record 0"]


def test_a_claim_that_waits_for_jobs_does_not_wait_for_its_letters_again() -> None:
    made = with_jobs(FAR)
    key = asked(made, wait_ms=2000)
    stuck(made)
    made.clock.advance(2001)
    stuck(made)
    assert is_answered(made, key)


def gone(made: Cluster) -> None:
    made.rig(1).receive(wire.DROP_TOPIC, QUEUE)


def deleted(made: Cluster) -> None:
    made.rig(1).receive(wire.DELETE, QUEUE, {"seqs": [1]})


def closed(made: Cluster) -> None:
    made.rig(1)._take(made.rig(1).core.close())


@pytest.mark.parametrize("end", [gone, deleted, closed])
def test_nothing_waits_for_letters_that_will_not_come(end: Callable[[Cluster], None]) -> None:
    made = with_jobs(FAR)
    key = asked(made)
    stuck(made)
    assert not is_answered(made, key)
    end(made)
    if end is not closed:
        stuck(made)
    assert is_answered(made, key)


def test_a_refusal_ends_the_wait() -> None:
    made = with_jobs(FAR)
    made.ask(0, wire.PUT_TOPIC, FAR, {"cap_records": 1, "discard": "reject"})
    write(made, FAR, "full")
    key = asked(made)
    made.rest()
    assert is_answered(made, key)
    assert texts(made, FAR) == ["full"]


def test_beyond_the_bounds_answers_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "HELD_MAX", 1)
    made = with_jobs(FAR)
    first = asked(made)
    stuck(made)
    write(made, QUEUE, "more")
    made.rig(1).ask(wire.CLAIM, QUEUE, {"node": "n"})
    second = asked(made, wire.NACK, seqs=[2], kind="dead")
    stuck(made)
    assert (is_answered(made, first), is_answered(made, second)) == (False, True)
    made.rest()
    assert is_answered(made, first)
    monkeypatch.setattr(outbox, "HELD_BYTES_MAX", 0)
    with_more_jobs(made, 1)
    write(made, QUEUE, "more")
    third = asked(made)
    stuck(made)
    assert is_answered(made, third)
