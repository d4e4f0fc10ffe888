"""Reads and deletes over many tags: executed in slices, with the same results as at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.support.engine_harness import DISK, FSYNC, SMALL, Harness, holders
from topics.api import limits
from topics.api.errors import ShardReadOnly, Stopping, Throttled, TopicNotFound
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.topic import tags

MANY = 3000
LARGE = structs.replace(
    SMALL, wal_file_bytes=1 << 20, segment_max_events=1000, cache_bytes=1 << 20, verify=False
)
ALL = TagMatch("Glob", b"*")
NONE = TagMatch("Subject", b"*.*.nothing.>")


def tag(i: int) -> bytes:
    return b"a.%d.%d" % (i % 7, i)


def filled(count: int = MANY, config: Any = DISK) -> Harness:
    h = Harness(LARGE)
    h.put("t", config)
    h.put("other", DISK)
    h.do(c.Append("t", c.Records([b"%d" % i for i in range(count)], tags=[tag(i) for i in range(count)])))
    h.rest()
    return h


def turns(h: Harness, token: int, most: int = 100_000) -> Iterator[int]:
    """Make turns until there is an answer."""
    for number in range(most):
        if token in h.replies:
            return
        yield number
        if h.jobs:
            h.run_job()
        h.ask()
    raise AssertionError("never answered")


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LONG_TURN_UNITS", 50)
    monkeypatch.setattr(limits, "LONG_SLICE_UNITS", 20)
    monkeypatch.setattr(tags, "_BATCH", 4)


COMMANDS = [
    c.LastByTag("t", ALL, each=True, limit=5),
    c.LastByTag("t", ALL, each=True, after=tag(5), limit=1000),
    c.LastByTag("t", NONE, each=True),
    c.LastByTag("t", NONE),
    c.LastByTag("t", TagMatch("Subject", b"*.3.*")),
    c.NextByTag("t", TagMatch("Subject", b"*.3.*"), 2),
    c.CountByTag("t", NONE),
    c.CountByTag("t", ALL, limit=1000),
    c.Delete("t", match=ALL),
    c.Delete("t", subject=TagMatch("Subject", b"*.3.*"), keep=1),
    c.Delete("t", match=TagMatch("Glob", b"a.2*"), before_seq=MANY // 2),
    c.Delete("t", before_seq=MANY),
    c.Delete("t", keep=10),
    c.Delete("t", seqs=list(range(1, MANY, 2))),
    c.Delete("t", match=TagMatch("Glob", b"a.1*"), seqs=list(range(1, MANY))),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command}"[:60])
def test_a_bystander_is_answered_in_each_turn(command: c.Command, small_slices: None) -> None:
    h, whole = filled(), filled()
    (token,) = h.ask(command)
    waited = 0
    for _ in turns(h, token):
        (write,) = h.ask(c.Append("other", c.Records([b"x"])))
        assert write in h.replies or h.jobs, "a write waits for a sync at most"
        waited += 1
    assert waited > 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LONG_TURN_UNITS", 1 << 40)
        assert str(whole.do(command)) == str(h.replies[token])
    assert whole.seqs("t") == h.seqs("t")
    h.engine.check_invariants()
    h.kill_and_open()
    assert whole.seqs("t") == h.seqs("t")


tag_names = st.sampled_from([b"", b"a", b"a.b", b"a.b.c", b"b.b", b"c", b"\xff"])
matches = st.sampled_from(
    [
        ALL,
        TagMatch("Glob", b"a*"),
        TagMatch("Subject", b"*.b"),
        TagMatch("Subject", b"a.>"),
        TagMatch("Eq", b"a"),
    ]
)
commands = st.one_of(
    st.lists(st.none() | tag_names, min_size=1, max_size=12).map(
        lambda names: c.Append("t", c.Records([b"x"] * len(names), tags=names))
    ),
    st.builds(
        c.Delete,
        st.just("t"),
        before_seq=st.none() | st.integers(0, 40),
        match=st.none() | matches,
        seqs=st.none() | st.lists(st.integers(0, 40), max_size=6),
        keep=st.none() | st.integers(0, 2),
        erase=st.booleans(),
        subject=st.none() | matches,
    ),
    st.builds(c.LastByTag, st.just("t"), matches, st.booleans(), tag_names, st.integers(0, 3)),
    st.builds(c.CountByTag, st.just("t"), matches, tag_names, st.integers(0, 3)),
    st.builds(c.NextByTag, st.just("t"), matches, st.integers(0, 20)),
)


@given(st.lists(commands, max_size=12), st.integers(1, 12))
def test_slices_change_no_answer(asked: list[c.Command], units: int) -> None:
    sliced, whole = Harness(SMALL), Harness(SMALL)
    for h in (sliced, whole):
        h.put("t", DISK)
    for command in asked:
        expected = whole.send(command)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "LONG_TURN_UNITS", units)
            patch.setattr(limits, "LONG_SLICE_UNITS", units)
            patch.setattr(tags, "_BATCH", 1)
            assert str(sliced.send(command)) == str(expected)
    assert sliced.seqs("t") == whole.seqs("t")
    sliced.restart()
    assert sliced.seqs("t") == whole.seqs("t")


def test_a_delete_leaves_what_comes_after_it(small_slices: None) -> None:
    h = filled()
    (token, write) = h.ask(c.Delete("t", match=ALL), c.Append("t", c.Records([b"new"], tags=[tag(MANY - 1)])))
    for number in turns(h, token):
        if number == 3:
            h.ask(c.Append("t", c.Records([b"newer"], tags=[b"zz"])))
    assert h.replies[token].deleted == MANY
    assert [payload for _, payload in h.rows("t")] == [b"new", b"newer"]
    assert write in h.replies


@pytest.mark.parametrize("command", [c.Delete("t", match=ALL, keep=2), c.Delete("t", keep=200)])
def test_keep_counts_what_was_there(command: c.Delete, small_slices: None) -> None:
    h = Harness(LARGE)
    h.put("t", DISK)
    names = [tag(i % 100) for i in range(400)]
    h.do(c.Append("t", c.Records([b"x"] * 400, tags=names)))
    delete, _ = h.ask(command, c.Append("t", c.Records([b"x"] * 100, tags=names[:100])))
    for _ in turns(h, delete):
        pass
    assert h.replies[delete].deleted == 200
    assert h.seqs("t") == list(range(201, 501))


def test_it_ends_with_its_topic(small_slices: None) -> None:
    h = filled()
    read, delete = h.ask(c.LastByTag("t", NONE), c.Delete("t", match=ALL))
    h.do(c.DropTopic("t"))
    h.do(c.Append("t", c.Records([b"x"], tags=[tag(0)])))
    h.rest()
    assert [type(h.replies[token]) for token in (read, delete)] == [TopicNotFound, TopicNotFound]
    assert h.rows("t") == [(1, b"x")]


def test_it_ends_with_the_engine(small_slices: None) -> None:
    h = filled()
    read, delete = h.ask(c.LastByTag("t", NONE), c.Delete("t", match=ALL))
    for _ in range(30):
        h.ask()
    while h.jobs:
        h.run_job()
    for token, reply in h.engine.close().replies:
        assert isinstance(token, int)
        h.replies[token] = reply
    assert [type(h.replies[token]) for token in (read, delete)] == [Stopping, Stopping]
    assert (h.replies[read].detail, h.replies[delete].detail) == ({}, {"outcome": "unknown"})
    h.kill_and_open()
    assert 0 < len(h.seqs("t")) <= MANY


def test_it_ends_with_the_log(small_slices: None) -> None:
    h = filled(config=FSYNC)
    read, delete = h.ask(c.CountByTag("t", ALL, limit=3), c.Delete("t", match=ALL))
    h.engine._fail_shard("the disk is gone")
    h.rest()
    assert isinstance(h.replies[delete], ShardReadOnly)
    assert h.replies[delete].detail["outcome"] == "unknown"
    assert [count for _, count in h.replies[read].counts] == [1, 1, 1], "reads go on"


def test_a_change_does_not_go_on_once_the_shard_is_read_only(small_slices: None) -> None:
    """The change was waiting for its topic, and not queued, when the log failed."""
    h = filled()
    (token,) = h.ask(c.Delete("t", match=ALL))
    h.engine.shard.state.read_only = "the disk is gone"
    h.ask()
    assert isinstance(h.replies[token], ShardReadOnly)


def test_long_deletes_of_a_lost_client_end_and_erase_what_they_deleted(small_slices: None) -> None:
    h = filled()
    (token,) = h.ask(c.Delete("t", match=ALL, erase=True))
    while h.state("t").count == MANY:
        h.ask()
    assert [long.token for long in h.engine.shard.state.long.end()] == [token]
    left = h.state("t").count
    h.rest()
    assert (h.state("t").count, h.engine.counters["erases"]) == (left, 1)
    assert 0 < left < MANY


def test_a_delete_that_is_refused_has_deleted_nothing(small_slices: None) -> None:
    h = filled()
    h.ask(*[c.LastByTag("t", NONE)] * limits.LONG_COMMANDS_MAX)
    h.engine.shard.state.long.begin_turn()
    few = [c.Delete("t", seqs=list(range(i, i + 60, 2))) for i in (1, 101, 201)]
    refused = h.ask(*few, c.Delete("t", match=ALL), c.Delete("t", before_seq=MANY))
    assert {type(h.replies[token]) for token in refused} == {Throttled}
    assert h.state("t").count == MANY


@pytest.mark.parametrize("snapshot", [False, True])
def test_an_erase_that_a_crash_cuts_short_leaves_no_bytes_of_what_it_deleted(
    small_slices: None, snapshot: bool
) -> None:
    """Its records are deleted, so no other erase would find them. The bytes that it did not reach are still there."""
    h = Harness(structs.replace(LARGE, segment_max_events=50))
    h.put("t", DISK)
    h.do(
        c.Append("t", c.Records([b"secret %04d" % i for i in range(200)], tags=[tag(i) for i in range(200)]))
    )
    h.checkpoint()
    h.ask(c.Delete("t", match=ALL, erase=True))
    while h.engine.shard.state.published["t"].view.count > 100:
        h.ask()
    if snapshot:
        h.engine.checkpoint()
        while h.engine.counters["checkpoints"] < 2:
            h.run_job() if h.jobs else h.ask()
    assert h.engine.shard.state.long.queue
    h.kill_and_open()
    left = set(h.seqs("t"))
    assert 0 < len(left) <= 100
    h.rest()
    assert h.engine.counters["erases"] == 1
    held = {seq for seq in range(1, 201) if holders(h.disk, b"secret %04d" % (seq - 1))}
    assert held == left
    h.kill_and_open()
    assert not h.engine.shard.state.erase_requests, "it is recorded as done"
    assert set(h.seqs("t")) == left


def test_an_erase_without_room_for_its_next_piece_says_so_and_erases_the_rest(small_slices: None) -> None:
    h = filled()
    (token,) = h.ask(c.Delete("t", match=ALL, erase=True))
    while h.engine.shard.state.published["t"].view.count == MANY:
        h.ask()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(h.engine.shard.state, "has_room", lambda size: False)
        while token not in h.replies:
            h.ask()
    reply = h.replies[token]
    assert isinstance(reply, Throttled) and reply.detail["outcome"] == "unknown"
    h.rest()
    left = set(h.seqs("t"))
    assert 0 < len(left) < MANY
    assert h.engine.counters["erases"] == 1


def test_names_are_put_in_order_a_few_at_a_time_while_they_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tags, "_BATCH", 8)
    monkeypatch.setattr(tags, "_CHANGES_MAX", 16)
    index = tags.TagIndex()
    ids = index.add_batch(1, [b"%d" % i for i in range(500)])
    names: list[bytes] = []
    dead = 0
    for step, (units, found) in enumerate(tags.scan(lambda: index, ALL)):
        assert units <= 8 * 4
        names += found
        if step < 250:
            index.remove(ids[dead])
            index.add(1000 + step, b"new-%d" % step)
            dead += 1
    stay = {b"%d" % i for i in range(dead, 500)}
    assert stay <= set(names)
    assert names == sorted(set(names))
    assert set(index.names(ALL)) == stay | {b"new-%d" % i for i in range(dead)}


@given(st.lists(st.sampled_from(b"abcdef").map(lambda i: bytes([i])) | st.none(), max_size=40))
def test_a_name_that_goes_and_comes_back_is_there_once(steps: list[bytes | None]) -> None:
    """A name: it is added, or removed if it is there. None: the next slice of a scan."""
    index = tags.TagIndex(hold=True)
    held: dict[bytes, int] = {}
    scan = tags.scan(lambda: index, ALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags, "_BATCH", 1)
        for seq, name in enumerate(steps, 1):
            if name is None:
                next(scan, None)
            elif name in held:
                index.remove(held.pop(name))
            else:
                held[name] = index.add(seq, name)
    assert index.names(ALL) == sorted(held)


# -- while others write and delete


KEYS = structs.replace(DISK, cap_per_tag=1)
KEYS_SYNCED = structs.replace(FSYNC, cap_per_tag=1)


def tagged(*names: bytes) -> c.Append:
    return c.Append("t", c.Records([b"x"] * len(names), tags=list(names)))


@pytest.mark.parametrize(
    "get",
    [
        c.LastByTag("t", TagMatch("Eq", b"k")),
        c.LastByTag("t", ALL),
        c.LastByTag("t", ALL, each=True),
        c.NextByTag("t", TagMatch("Eq", b"k"), 2),
        c.NextByTag("t", ALL, 2),
    ],
    ids=str,
)
def test_a_record_that_dies_while_a_read_waits_for_its_sync_is_replaced(get: c.Command) -> None:
    h = Harness(LARGE)
    h.put("t", KEYS_SYNCED)
    h.do(tagged(b"k"))
    h.rest()
    _, *reads = h.ask(tagged(b"k"), get, get)
    h.ask(tagged(b"k"))
    h.rest()
    assert [h.replies[read].seqs for read in reads] == [[3], [3]]


def test_a_key_that_is_written_in_every_turn_is_read(small_slices: None) -> None:
    """Whenever a read could be answered, its record has been replaced; and there is more than one read per turn."""
    h = Harness(LARGE)
    h.put("t", KEYS_SYNCED)
    asked: list[int] = []
    for _ in range(20):
        asked += h.ask(tagged(b"k"), *[c.LastByTag("t", TagMatch("Eq", b"k"))] * 3)[1:]
        h.ask(tagged(b"k"))
        h.run_job()
    assert sum(token not in h.replies for token in asked) <= 12
    h.rest()
    assert all(len(h.replies[token].seqs) == 1 for token in asked)


def test_a_page_whose_tags_have_gone_meanwhile_is_the_next_one() -> None:
    h = Harness(LARGE)
    h.put("t", FSYNC)
    h.do(tagged(b"c", b"d"))
    h.rest()
    _, read = h.ask(tagged(b"a", b"b"), c.LastByTag("t", ALL, each=True, limit=2))
    h.ask(c.Delete("t", seqs=[3, 4]))
    h.rest()
    assert (h.replies[read].seqs, h.replies[read].more) == ([1, 2], False)


@pytest.mark.parametrize("config", [KEYS, DISK], ids=["replaced", "deleted"])
def test_the_newest_is_found_while_it_changes_in_every_turn(config: Any, small_slices: None) -> None:
    h = filled(300, config)
    (get,) = h.ask(c.LastByTag("t", ALL))
    newest: list[int] = []
    for number in turns(h, get, 2000):
        newest.append(301 + number)
        h.ask(tagged(tag(0)), *([] if config is KEYS else [c.Delete("t", seqs=[300 + number])]))
    assert len(newest) > 10
    assert h.replies[get].seqs[0] in newest


def test_the_newest_is_an_older_one_when_it_was_deleted(small_slices: None) -> None:
    h = filled(300)
    (get,) = h.ask(c.LastByTag("t", TagMatch("Subject", b"*.3.*")))
    for number in turns(h, get, 2000):
        if number < 40:
            h.ask(c.Delete("t", seqs=[300 - number]))
    matching = [seq for seq in h.seqs("t") if (seq - 1) % 7 == 3]
    assert h.replies[get].seqs == matching[-1:]


def test_the_next_is_found_while_a_worker_deletes_from_the_front(small_slices: None) -> None:
    h = Harness(LARGE)
    h.put("t", DISK)
    h.do(tagged(*[b"a.%03d" % i for i in range(600)]))
    (get,) = h.ask(c.NextByTag("t", ALL, 0))
    deleted = 0
    for number in turns(h, get, 300):
        deleted = number + 1
        h.ask(c.Delete("t", before_seq=deleted + 1))
    assert deleted > 10
    assert h.replies[get].seqs[0] in (deleted, deleted + 1)


def test_records_that_come_and_go_are_never_none_at_all(small_slices: None) -> None:
    """One record at each moment, each with its own tag, and many others that do not match."""
    h = filled(300)
    last = h.do(tagged(b"z.z")).first_seq
    match = TagMatch("Subject", b"*.z")
    reads = h.ask(c.LastByTag("t", match), c.NextByTag("t", match, 0))
    for read in reads:
        for _ in turns(h, read, 2000):
            h.ask(tagged(b"A%d.z" % last), c.Delete("t", seqs=[last]))
            last += 1
    assert all(len(h.replies[read].seqs) == 1 for read in reads)


def test_a_scan_ends_while_tags_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "_BATCH", 8)
    index = tags.TagIndex()
    ids = index.add_batch(1, [b"%d" % i for i in range(20)])
    assert len(index.names(ALL)) == 20
    index.remove(ids[0])
    index.add_batch(50, [b"new-%d" % i for i in range(50, 100)])
    seq = 100
    for step, _ in enumerate(tags.scan(lambda: index, TagMatch("Glob", b"1*"))):
        assert step < 100
        index.add_batch(seq, [b"new-%d" % i for i in range(seq, seq + 20)])
        seq += 20
