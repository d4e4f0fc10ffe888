"""Goal: a reader that sends its epoch learns that a topic was created again, or that seqs were used twice.

Method: an engine on a simulated disk that is stopped, killed and loses power, and the pages that it then returns for
old cursors.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_harness import DISK, EPHEMERAL, FSYNC, MEMORY, Harness, numbered
from tests.support.log_rig import new_log
from tests.support.watch_rig import Town
from topics.api.config import ConsumerConfig, TopicConfig
from topics.api.errors import WrongEpoch
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as c
from topics.engine.commands.page import Tombstone
from topics.engine.topic.flows import EPOCHS_MAX, Epochs, add_epoch, epoch_text


def read(h: Harness, topic: str, from_seq: int, epoch: str | None, **options: Any) -> Any:
    return h.do(c.Diff(topic, from_seq, epoch=epoch, include_epoch=True, **options))


def told(page: Any) -> tuple[int, int, str, int] | None:
    gone: Tombstone | None = page.tombstone
    return None if gone is None else (gone.gap_from, gone.gap_to, gone.reason, gone.earliest_seq)


def gone_back(durability: TopicConfig) -> Harness:
    """With a topic whose head came back as 3, and which had used 4, 5 and 6 before. Which bytes a power cut loses is
    random.
    """
    for seed in range(100):
        h = Harness(seed=seed)
        h.put("t", durability)
        h.append("t", *numbered(1, 3))
        h.checkpoint()
        h.append("t", *numbered(4, 3))
        if durability is EPHEMERAL:
            h.kill()
        else:
            h.power_cut()
        h.open()
        if h.engine.shard.state.published["t"].epochs == [(1, 3)]:
            return h
    raise AssertionError("the tail was never lost")


# ---- instances


def test_a_topic_that_was_made_again_answers_an_old_cursor_as_one_beyond_its_head() -> None:
    h = Harness()
    old = h.append("t", *numbered(1, 3), include_epoch=True).epoch
    h.do(c.DropTopic("t"))
    new = h.append("t", *numbered(1, 5), include_epoch=True).epoch
    assert old != new == h.state("t").epoch

    beyond = h.do(c.Diff("t", 9))
    page = read(h, "t", 3, old)
    assert (told(page), page.seqs, page.next_from_seq) == (told(beyond), beyond.seqs, beyond.next_from_seq)
    assert told(page) == (1, 5, "recreated", 1)
    assert page.epoch == new
    assert read(h, "t", 3, new).seqs == [4, 5]
    assert h.do(c.Diff("t", 3)).seqs == [4, 5]  # a number alone is accepted as it is
    assert h.do(c.Diff("t", 3)).epoch == ""
    assert told(read(h, "t", 0, old)) == (1, 5, "recreated", 1)


@pytest.mark.parametrize(
    "epoch", ["", ".", "x", "0", "400", "400.", "400.1", "400.00", "400.0 ", "0400.0", "401.0"]
)
def test_an_epoch_that_is_not_of_this_topic_is_of_another_one(epoch: str) -> None:
    h = Harness()
    h.append("t", *numbered(1, 3))
    assert h.state("t").epoch == "400.0"
    assert told(read(h, "t", 2, epoch)) == (1, 3, "recreated", 1)


def test_an_epoch_lasts_over_stops_kills_power_cuts_and_checkpoints() -> None:
    h = Harness()
    for name, config in {"f": FSYNC, "d": DISK, "m": MEMORY, "e": EPHEMERAL}.items():
        h.put(name, config)
        h.append(name, *numbered(1, 3))
    before = {name: h.state(name).epoch for name in "fdme"}
    h.restart()
    h.checkpoint()
    h.restart()
    assert {name: h.state(name).epoch for name in "fdme"} == before
    h.kill_and_open()
    after = {name: h.state(name).epoch for name in "fdme"}
    assert after == before | {"e": f"{before['e'][:-1]}1"}
    h.power_cut()
    h.open()
    assert {name: h.state(name).epoch for name in "fd"} == {name: before[name] for name in "fd"}
    assert h.state("m").epoch == f"{before['m'][:-1]}1"


def test_a_write_that_is_known_by_its_key_names_the_epoch_too() -> None:
    h = Harness()
    first = h.append("t", b"1", key=b"k", include_epoch=True)
    again = h.append("t", b"1", key=b"k", include_epoch=True)
    assert again.deduped
    assert again.epoch == first.epoch == h.state("t").epoch


# ---- heads that went back


@pytest.mark.parametrize("durability", [MEMORY, EPHEMERAL], ids=["memory", "ephemeral"])
def test_seqs_that_were_given_twice_are_announced_from_the_lowest_one(durability: TopicConfig) -> None:
    h = gone_back(durability)
    old = "400.0"
    assert h.state("t").head_seq == 3
    h.append("t", b"x", b"y", b"z", b"w")
    new = h.state("t").epoch
    assert new != old

    page = read(h, "t", 6, old)
    assert told(page) == (4, 6, "crash", 4)
    assert (page.seqs, page.next_from_seq, page.epoch) == ([4, 5, 6, 7], 7, new)
    assert told(read(h, "t", 4, old)) == (4, 4, "crash", 4)
    assert told(read(h, "t", 9, old)) == (4, 7, "crash", 4)
    assert told(read(h, "t", 3, old)) is None  # it has read nothing that was lost
    assert read(h, "t", 3, old).seqs == [4, 5, 6, 7]
    assert told(read(h, "t", 6, new)) is None
    frames = read(h, "t", 6, old, frames=True)
    assert (told(frames), frames.count, frames.epoch) == ((4, 6, "crash", 4), 4, new)


def test_a_reader_of_an_old_epoch_hears_of_all_that_went_back_since() -> None:
    h = Harness()
    h.put("e", EPHEMERAL)
    epochs: list[str] = []
    for kept, lost in ((5, 3), (2, 4)):
        epochs.append(h.state("e").epoch)
        h.append("e", *numbered(1, kept))
        h.checkpoint()
        h.append("e", *numbered(1, lost))
        h.kill_and_open()
    h.append("e", *numbered(1, 9))
    assert [told(read(h, "e", 12, epoch)) for epoch in epochs] == [(6, 12, "crash", 6), (8, 12, "crash", 8)]


def test_evicted_records_with_reused_seqs_are_announced_next() -> None:
    h = Harness()
    h.put("e", TopicConfig(durability="ephemeral", cap_records=2))
    old = h.state("e").epoch
    h.append("e", *numbered(1, 6))
    h.kill_and_open()
    h.append("e", *numbered(1, 7))
    page = read(h, "e", 6, old)
    assert (told(page), page.seqs, page.next_from_seq) == ((1, 6, "crash", 1), [], 0)
    page = read(h, "e", page.next_from_seq, page.epoch)
    assert (told(page), page.seqs) == ((1, 5, "cap", 6), [6, 7])


def test_a_memory_topic_that_nobody_has_asked_for_keeps_its_epochs() -> None:
    """Its appends are replayed later, but its head is known."""
    h = Harness()
    h.put("m", MEMORY)
    h.append("m", *numbered(1, 3))
    h.sync()
    h.power_cut()
    h.open()
    log = h.engine.shard.state.published["m"]
    assert log.deferred
    assert log.epochs == [(1, 3)]
    h.restart()
    h.append("m", *numbered(4, 6))
    assert told(read(h, "m", 5, "400.0")) == (4, 5, "crash", 4)
    assert told(read(h, "m", 3, "400.0")) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=3 * EPOCHS_MAX), st.data())
def test_no_seq_that_was_given_twice_is_taken_for_read(bases: list[int], data: st.DataObject) -> None:
    """The oldest of many epochs are merged: then more is announced, and never less."""
    log = new_log()
    texts: list[str] = []
    epochs: Epochs = log.epochs
    for base in bases:
        texts.append(epoch_text(log.id, epochs))
        add_epoch(epochs, base)
    assert len(epochs) <= EPOCHS_MAX
    at = data.draw(st.integers(0, len(texts) - 1))
    cursor = data.draw(st.integers(0, 250))
    stands = log.cursor_of(texts[at], cursor)
    assert stands is not None
    assert stands <= min([cursor, *bases[at:]])
    if len(bases) <= EPOCHS_MAX:
        assert stands == min([cursor, *bases[at:]])
    assert log.cursor_of(log.epoch, cursor) == cursor


# ---- consumers


def test_a_consumer_is_not_reset_to_a_seq_of_another_epoch() -> None:
    h = Harness()
    h.put("e", EPHEMERAL)
    h.append("e", *numbered(1, 2))
    h.checkpoint()
    old = h.state("e").epoch
    h.append("e", *numbered(3, 2))
    h.kill_and_open()
    h.append("e", *numbered(3, 4))
    h.do(con.PutConsumer("e", "mail", ConsumerConfig()))
    reset = con.ResetConsumer("e", "mail", "seq", 5, epoch=old)
    refused = h.refused(reset, WrongEpoch)
    assert refused.detail == {"topic": "e", "expected": old, "actual": h.state("e").epoch}
    h.refused(con.ResetConsumer("e", "mail", "seq", 1, epoch="other"), WrongEpoch)
    assert h.do(con.ResetConsumer("e", "mail", "seq", 3, epoch=old)).to_seq == 3
    assert h.do(con.ResetConsumer("e", "mail", "seq", 5, epoch=h.state("e").epoch)).to_seq == 5


# ---- streams


def test_an_open_stream_hears_that_the_head_went_back() -> None:
    """The worker dies, and the seqs that the stream has seen are used for other records before it is followed again."""
    town = Town()
    town.rig.put("e", durability="ephemeral")
    town.write(3, "e")
    town.rig.core.engine.checkpoint()
    town.write(1, "other")  # the head when it is created
    town.rest()
    client = town.front.stream({"e": 0})
    town.write(3, "e")
    town.rest()
    assert client.seqs("e") == [1, 2, 3, 4, 5, 6]
    town.kill()
    rig = town.start()
    rig.write(5, "e")
    town.advance(5_000_000)
    (gap,) = client.named("tombstone")
    assert (gap.data["gap_from"], gap.data["gap_to"], gap.data["earliest_seq"]) == (4, 6, 4)
    assert gap.data["reason"] == "crash"
    assert gap.cursors == {"e": 3}
    after = client.frames[client.frames.index(gap) :]
    assert [frame.seqs for frame in after if frame.event == "record"] == [[4, 5, 6, 7, 8]]


def test_a_member_of_a_group_does_not_know_more_of_it_than_the_epoch_allows() -> None:
    town = Town()
    town.rig.put("e", durability="ephemeral")
    town.write(2, "e")
    town.rig.core.engine.checkpoint()
    town.write(1, "other")  # the head when it is created
    town.rest()
    client = town.front.stream({"e": 0}, group="g")
    town.write(4, "e")
    town.rest()
    assert client.seqs("e", is_shared=True) == [1, 2, 3, 4, 5, 6]
    town.kill()
    rig = town.start()
    rig.write(6, "e")
    town.advance(5_000_000)
    records = [frame.seqs for frame in client.frames if frame.event == "record"]
    assert [seq for page in records for seq in page] == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8]
