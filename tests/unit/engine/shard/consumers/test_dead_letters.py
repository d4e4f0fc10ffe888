"""Goal: a job that had its last delivery is moved to its dead letter topic, once, complete, and over every crash.

Method: one engine is both ends; the test carries dead letters, so it can stop between any two steps. What a server
does between two shards is tested separately.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.engine_harness import append
from tests.support.lease_harness import LEASE_MS, LeaseHarness, queue
from topics.api.config import TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c


def dying(jobs: int = 1, **fields: object) -> LeaseHarness:
    """A queue whose jobs may be delivered once."""
    return LeaseHarness(queue(**{"max_deliveries": 1, "dead_letter": "dead", **fields}), jobs=jobs)


def exhaust(h: LeaseHarness, count: int = 1) -> None:
    """Every job has had its delivery, and a client asks for another one."""
    assert len(h.got(count)) == count
    h.pass_time(LEASE_MS + 1)
    assert h.got(count) == []
    h.rest()


def test_the_last_delivery_is_followed_by_a_move() -> None:
    h = LeaseHarness(queue(max_deliveries=3, dead_letter="dead"), jobs=2)
    for delivery in (1, 2, 3):
        claimed = h.claim()
        assert (claimed.page.seqs, claimed.deliveries) == ([1], [delivery])
        h.nack(1)
    claimed = h.claim(5)
    assert (claimed.page.seqs, claimed.deliveries) == ([2], [1])
    assert h.ship() == 1
    assert h.seqs("q") == [2]
    assert h.counts() == (0, 1, 1)


def test_a_letter_is_the_job_with_its_story() -> None:
    h = dying(jobs=0)
    h.do(append("q", b'{"a":1}{"unit":"C"}', tags=[b"t"], nodes=[b"n"], meta_lens=[12]))
    exhaust(h)
    (letter,) = h.letters()
    assert (letter.source, letter.consumer, letter.seq, letter.target) == ("q", "", 1, "dead")
    assert (letter.data, letter.tag, letter.node) == (b'{"a":1}', b"t", b"n")
    assert msgspec.json.decode(letter.meta) == {
        "unit": "C",
        "$dead_letter_from": "q",
        "$dead_letter_deliveries": "1",
        "$dead_letter_src_seq": "1",
    }
    h.ship()
    page = h.diff("dead")
    assert (page.seqs, page.tags, page.nodes) == ([1], [b"t"], [b"n"])
    assert h.rows("dead")[0][1].startswith(b'{"a":1}')


def test_a_meta_that_is_no_object_is_replaced() -> None:
    h = dying(jobs=0)
    h.do(append("q", b"1[2]", meta_lens=[3]))
    exhaust(h)
    (letter,) = h.letters()
    assert sorted(msgspec.json.decode(letter.meta)) == [
        "$dead_letter_deliveries", "$dead_letter_from", "$dead_letter_src_seq",
    ]  # fmt: skip


def test_the_target_is_made_with_defaults() -> None:
    h = dying()
    exhaust(h)
    h.ship()
    assert h.state("dead").config == TopicConfig()
    assert h.seqs("dead") == [1]


def test_the_target_may_be_there_and_is_left_as_it_is() -> None:
    h = dying()
    h.put("dead", TopicConfig(durability="fsync", cap_records=5))
    h.append("dead", b'"before"')
    exhaust(h)
    h.ship()
    assert h.state("dead").config == TopicConfig(durability="fsync", cap_records=5)
    assert h.seqs("dead") == [1, 2]


def test_a_moving_job_is_nobodys() -> None:
    h = dying(jobs=2)
    exhaust(h, 2)
    assert h.counts()[:2] == (0, 0)
    assert h.ack(1).skipped == [1]
    assert h.nack(1).skipped == [1]
    assert h.extend(1).skipped == [1]
    assert h.got(9) == []
    h.pass_time(100_000)
    assert h.got(9) == []


def test_jobs_move_in_the_order_of_their_numbers() -> None:
    h = dying(jobs=5)
    exhaust(h, 5)
    letters = h.letters()
    assert [letter.seq for letter in letters] == [1, 2, 3, 4, 5]
    numbers = [letter.number for letter in letters]
    assert numbers == sorted(set(numbers))
    assert h.ship() == 5
    assert len(h.seqs("dead")) == 5
    assert h.seqs("q") == []
    assert h.gaps("q") == []


def test_nothing_may_be_sent_before_it_is_synced() -> None:
    h = dying()
    h.claim()
    h.pass_time(LEASE_MS + 1)
    h.run_jobs()
    h.ask(h.claim_of())
    assert h.letters() == [], "a crash could undo what was sent"
    h.rest()
    h.sync()
    assert len(h.letters()) == 1


def test_letters_are_taken_once() -> None:
    h = dying(jobs=3)
    exhaust(h, 3)
    letters = h.letters()
    h.deliver(letters[:2])
    h.deliver(letters)
    h.deliver(letters)
    assert len(h.seqs("dead")) == 3
    h.end_move(letters)
    assert h.counts() == (0, 0, 3)


def test_letters_are_taken_once_over_the_target_s_restart() -> None:
    for end in (LeaseHarness.restart, LeaseHarness.kill_and_open):
        h = dying(jobs=2)
        exhaust(h, 2)
        letters = h.letters()
        h.deliver(letters)
        end(h)
        h.sync()
        assert [letter.number for letter in h.letters()] == [letter.number for letter in letters]
        assert h.ship() == 2
        assert len(h.seqs("dead")) == 2
        assert h.seqs("q") == []


def test_two_sources_do_not_hide_each_others_letters() -> None:
    h = dying()
    h.put("other", queue(max_deliveries=1, dead_letter="dead"))
    h.append("other", b'"other"')
    exhaust(h)
    h.do(k.Claim("other", node=b"w"))
    h.pass_time(LEASE_MS + 1)
    h.do(k.Claim("other", node=b"w"))
    h.sync()
    shard = h.engine.shard
    for log in list(shard.dead_letters.due.values()):
        letters = shard.dead_letters.dead_letters_to_send(log, 64, 1 << 20)
        h.deliver(letters)
        h.do(k.SettleDeadLetters(log.name, letters[-1].source_id, letters[-1].number, True))
    assert len(h.seqs("dead")) == 2
    assert not shard.dead_letters.due


def test_a_source_of_the_same_name_is_another_source() -> None:
    h = dying()
    exhaust(h)
    h.ship()
    h.do(c.DropTopic("q"))
    h.put("q", queue(max_deliveries=1, dead_letter="dead"))
    assert h.counts() == (0, 0, 0)
    h.produce(1)
    exhaust(h)
    assert h.ship() == 1
    assert len(h.seqs("dead")) == 2


def test_a_refused_move_is_tried_again() -> None:
    h = dying()
    exhaust(h)
    letters = h.letters()
    h.end_move(letters, done=False)
    assert h.seqs("q") == [1], "not lost"
    assert h.counts()[1:] == (0, 0)
    for _ in range(100):
        h.pass_time(1000)
        assert h.got() == [], "not delivered either"
        h.rest()
        if h.letters():
            break
    assert h.ship() == 1
    assert h.seqs("q") == []
    assert len(h.seqs("dead")) == 1


def test_a_refusal_of_new_letters_does_not_bring_back_those_that_were_taken() -> None:
    """The target took one, its answer was lost, and then it is full: the next batch has that one and another."""
    h = dying(jobs=1)
    h.put("dead", TopicConfig(durability="fsync", cap_records=1, discard="reject"))
    exhaust(h)
    h.deliver(h.letters())
    h.produce(1)
    exhaust(h)
    letters = h.letters()
    assert [letter.seq for letter in letters] == [1, 2]
    reply = h.send(k.TakeDeadLetters("dead", letters[0].source_id, letters))
    taken = reply.last_number if isinstance(reply, k.DeadLettersTaken) else 0
    for number, done in ((taken, True), (letters[-1].number, False)):
        if number:
            h.do(k.SettleDeadLetters("q", letters[0].source_id, number, done))
    h.put("dead", TopicConfig(durability="fsync"))
    for _ in range(10):
        h.pass_time(1000)
        assert h.got(9) == []
        h.ship()
    assert sorted(payload[:10] for _, payload in h.rows("dead")) == [b'"record 1"', b'"record 2"']
    assert h.counts() == (0, 0, 2)


def test_a_refused_dead_letter_is_not_delivered_again() -> None:
    h = LeaseHarness(queue(max_deliveries=9, dead_letter="dead"), jobs=1)
    h.claim()
    h.nack(1, nack="dead", reason="broken")
    h.rest()
    h.end_move(h.letters(), done=False)
    for _ in range(20):
        h.pass_time(1000)
        assert h.got() == []
    h.rest()
    assert [letter.reason for letter in h.letters()] == ["broken"]


def test_nack_dead_goes_at_once_with_its_reason() -> None:
    h = LeaseHarness(queue(max_deliveries=9, dead_letter="dead"), jobs=2)
    h.claim(2)
    nacked = h.nack(1, nack="dead", reason="cannot be read")
    assert (nacked.count, nacked.ready, nacked.in_flight) == (1, 0, 1)
    h.rest()
    (letter,) = h.letters()
    assert (letter.deliveries, letter.reason) == (1, "cannot be read")
    assert "cannot be read" in msgspec.json.decode(letter.meta).values()
    h.ship()
    assert h.seqs("q") == [2]
    assert h.counts() == (0, 1, 1)


@pytest.mark.parametrize("max_deliveries", [0, 1])
def test_nack_dead_needs_no_bound_of_deliveries(max_deliveries: int) -> None:
    h = LeaseHarness(queue(max_deliveries=max_deliveries, dead_letter="dead"), jobs=1)
    h.claim()
    h.nack(1, nack="dead")
    assert h.ship() == 1


def test_a_release_is_no_delivery_towards_the_last() -> None:
    h = dying()
    for _ in range(5):
        assert h.claim().deliveries == [1]
        h.nack(1, nack="release")
    assert h.got() == [1]
    h.nack(1)
    assert h.got() == []
    assert h.ship() == 1


@pytest.mark.parametrize("end", ["restart", "kill", "power cut", "checkpoint"])
@pytest.mark.parametrize("after", ["moving", "taken", "ended"])
def test_no_crash_loses_or_doubles_a_letter(end: str, after: str) -> None:
    h = dying(jobs=3)
    h.put("dead", TopicConfig(durability="fsync"))
    exhaust(h, 3)
    letters = h.letters()
    if after != "moving":
        h.deliver(letters)
    if after == "ended":
        h.end_move(letters)
    if end == "checkpoint":
        h.checkpoint()
    if end == "power cut":
        h.power_cut()
        h.open()
    elif end == "restart":
        h.restart()
    else:
        h.kill_and_open()
    h.pass_time(LEASE_MS + 1)
    assert h.got(9) == [], "it has had its deliveries"
    h.sync()
    h.ship()
    assert h.seqs("q") == []
    assert sorted(payload[:10] for _, payload in h.rows("dead")) == [b'"record %d"' % i for i in (1, 2, 3)]
    assert h.counts() == (0, 0, 3)


def test_a_deleted_job_is_not_moved() -> None:
    h = dying(jobs=2)
    h.claim(2)
    h.pass_time(LEASE_MS + 1)
    h.do(c.Delete("q", seqs=[1]))
    assert h.got(2) == []
    h.rest()
    assert h.ship() == 1
    assert len(h.seqs("dead")) == 1


def test_dead_letters_of_a_topic_that_goes_do_not_hold_up_others() -> None:
    h = dying(jobs=1)
    exhaust(h)
    letters = h.letters()
    h.do(c.DropTopic("q"))
    assert not h.engine.shard.dead_letters.due
    h.deliver(letters)  # it was being moved
    reply = h.send(k.SettleDeadLetters("q", letters[-1].source_id, letters[-1].number, True))
    assert reply is not None


def test_the_dead_letters_of_a_queue_are_a_queue_if_somebody_made_it_one() -> None:
    h = dying()
    h.put("dead", queue())
    exhaust(h)
    h.ship()
    claimed = h.do(k.Claim("dead", node=b"w"))
    assert (claimed.page.seqs, claimed.deliveries) == ([1], [1])
