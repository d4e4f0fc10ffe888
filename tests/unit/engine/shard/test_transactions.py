"""Transactions in the engine: a batch is there once and complete, or not at all, whatever is repeated and whatever
dies.

Goal: each (producer, batch) whose commit was decided appears exactly once and in order; one that was not decided does
not appear; what was acked as staged or committed stays so. Method: an engine on a SimDisk; first single cases, then
one case with a crash or an error at each of its disk calls. Low bounds make small transactions count as large.
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterator
from typing import Any

import msgspec
import pytest

from tests.support.damaged_shard import ended
from tests.support.engine_harness import (
    DISK,
    EPHEMERAL,
    FSYNC,
    MEMORY,
    SMALL,
    Harness,
    append,
    holders,
)
from tests.support.sim_clock import SimClock
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import (
    InvalidRequest,
    RecordTooLarge,
    Throttled,
    TopicFull,
    TopicNotFound,
    TransactionCommitted,
    TransactionIncomplete,
    TransactionNotFound,
)
from topics.engine.commands import topics as c
from topics.engine.commands import transactions as t
from topics.engine.commands.topics import Records
from topics.engine.shard.transactions import STAGE_KIND
from topics.engine.storage.files import HEADER_BYTES
from topics.engine.tools.verify import ShardFiles, verify_shard
from workers.shard.metrics import ShardMetrics

CLASSES = [FSYNC, DISK, MEMORY, EPHEMERAL]
Parts = list[tuple[str, int, int]]


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every transaction with more than one chunk counts as large, and is appended chunk by chunk."""
    monkeypatch.setattr(limits, "TXN_WHOLE_RECORDS", 0)
    monkeypatch.setattr(limits, "TXN_SLICE_RECORDS", 1)
    yield


def begin(h: Harness, batch: int = 1, producer: str = "p", **options: Any) -> t.TransactionState:
    return h.do(t.BeginTransaction("t", producer, batch, **options))  # type: ignore[no-any-return]


def stage(h: Harness, txn: int, part: str, chunk: int, *payloads: bytes, **columns: Any) -> t.ChunkStaged:
    return h.do(t.StageChunk("t", txn, part, chunk, Records(list(payloads), **columns)))  # type: ignore[no-any-return]


def commit(h: Harness, txn: int, parts: Parts, wait_ms: int = 10_000) -> t.TransactionState:
    return h.do(t.CommitTransaction("t", txn, parts, wait_ms))  # type: ignore[no-any-return]


def payloads(h: Harness) -> list[bytes]:
    return [payload for _, payload in h.rows("t")]


def figures(h: Harness) -> dict[str, int]:
    """The metrics of transactions."""
    report = ShardMetrics(h.engine, lambda: 0).report(1.0)
    return {
        "open": report.txn_open,
        "staged": report.txn_bytes,
        "committed": report.txn_committed,
        "expired": report.txn_expired,
        "left": report.txn_left,
    }


def filled(config: TopicConfig = FSYNC, options: Any = SMALL) -> tuple[Harness, int]:
    """A transaction with two parts of two chunks each."""
    h = Harness(options)
    h.put("t", config)
    txn = begin(h).txn
    for part in ("a", "b"):
        for chunk in (0, 1):
            stage(h, txn, part, chunk, *named(part, chunk))
    return h, txn


def named(part: str, chunk: int, count: int = 2) -> list[bytes]:
    return [b'"%s%d-%d"' % (part.encode(), chunk, i) for i in range(count)]


PARTS: Parts = [("b", 2, 4), ("a", 2, 4)]
EXPECTED = [*named("b", 0), *named("b", 1), *named("a", 0), *named("a", 1)]


# ---- a batch, step by step


@pytest.mark.parametrize("config", CLASSES)
def test_a_batch_appears_in_the_order_of_its_parts(config: TopicConfig) -> None:
    h, txn = filled(config)
    assert payloads(h) == []
    done = commit(h, txn, PARTS)
    assert (done.state, done.first_seq, done.last_seq, done.count) == ("committed", 1, 8, 8)
    assert payloads(h) == EXPECTED
    h.rest()
    assert not staged_files(h), "the file is removed"
    assert h.engine.shard.transactions.staged_bytes == 0


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("config", CLASSES)
def test_a_large_one_is_appended_piece_by_piece(config: TopicConfig) -> None:
    h, txn = filled(config)
    h.append("t", b'"before"')
    batches = h.engine.counters["batches"]
    done = commit(h, txn, PARTS)
    assert (done.state, done.first_seq, done.last_seq, done.count) == ("committed", 2, 9, 8)
    logged = 2 if config.durability == "ephemeral" else 5
    assert h.engine.counters["batches"] - batches >= logged, "a decision and four chunks, or the end of them"
    assert payloads(h) == [b'"before"', *EXPECTED]
    h.rest()
    assert not staged_files(h)


def staged_files(h: Harness) -> list[str]:
    return [name for name in h.segment_files("t") if name.startswith("txn-")]


def test_a_small_one_is_one_entry_of_the_log() -> None:
    h, txn = filled()
    batches = h.engine.counters["batches"]
    commit(h, txn, PARTS)
    assert h.engine.counters["batches"] - batches == 1


def test_everything_about_a_batch_can_be_repeated() -> None:
    h, txn = filled()
    assert begin(h).state == "open"
    again = stage(h, txn, "a", 0, b'"another text"')
    assert (again.repeated, again.records) == (True, 1)
    first = commit(h, txn, PARTS)
    assert commit(h, txn, PARTS) == first
    assert commit(h, txn, []) == first, "the chunks named by a repeated commit do not matter"
    begun = begin(h)
    assert (begun.txn, begun.state, begun.first_seq, begun.last_seq, begun.count) == (
        txn,
        "committed",
        1,
        8,
        8,
    )
    h.refused(t.StageChunk("t", txn, "c", 0, Records([b"1"])), TransactionCommitted)
    h.refused(t.AbortTransaction("t", txn), TransactionCommitted)
    assert payloads(h) == EXPECTED


def test_commits_of_one_transaction_at_the_same_time_have_one_answer() -> None:
    h, txn = filled()
    tokens = h.ask(*[t.CommitTransaction("t", txn, PARTS, 10_000) for _ in range(5)])
    h.rest()
    answers = [h.replies[token] for token in tokens]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].state == "committed"
    assert payloads(h) == EXPECTED


def test_the_same_chunk_twice_at_once_is_written_once() -> None:
    h, txn = filled()
    command = t.StageChunk("t", txn, "c", 0, Records([b'"c"']))
    tokens = h.ask(command, command)
    h.rest()
    assert [h.replies[token].repeated for token in tokens] == [False, True]
    commit(h, txn, [("c", 1, 1)])
    assert payloads(h) == [b'"c"']


def test_earlier_batches_are_known_and_later_ones_are_new() -> None:
    h, txn = filled()
    commit(h, txn, PARTS)
    older = begin(h, 0)
    assert (older.state, older.count, older.first_seq) == ("committed", None, 0)
    h.refused(t.CommitTransaction("t", older.txn, []), TransactionNotFound)
    newer = begin(h, 2)
    assert (newer.state, newer.txn != txn) == ("open", True)
    assert begin(h, 1, "another").state == "open"


def test_a_batch_without_records_is_committed_as_well() -> None:
    h, txn = filled()
    done = commit(h, txn, [])
    assert (done.state, done.first_seq, done.last_seq, done.count) == ("committed", 0, 0, 0)
    h.restart()
    assert begin(h).state == "committed"
    assert payloads(h) == []


def test_a_later_batch_ends_what_was_begun_for_an_earlier_one() -> None:
    h, txn = filled()
    later = begin(h, 2).txn
    stage(h, later, "x", 0, b'"x"')
    commit(h, later, [("x", 1, 1)])
    h.refused(t.StageChunk("t", txn, "c", 0, Records([b"1"])), TransactionNotFound)
    assert begin(h, 1).state == "committed"
    h.rest()
    assert not staged_files(h)


def test_columns_come_through() -> None:
    h = Harness()
    h.put("t", FSYNC)
    txn = begin(h).txn
    columns: dict[str, Any] = {
        "tags": [b"red", None],
        "nodes": [None, b"n"],
        "meta_lens": [2, 0],
        "sizes": [4, 1],
    }
    stage(h, txn, "a", 0, b"1 {}", b"2", **columns)
    stage(h, txn, "a", 1, b"h\x00\xff", raw=True, header_lens=[1])
    commit(h, txn, [("a", 2, 3)])
    assert payloads(h) == [b"1 {}", b"2", b"h\x00\xff"]
    log = h.engine.shard.state.published["t"]
    assert log.bytes == 4 + 1 + 3
    assert log.tags.count(b"red") == 1


def test_a_topic_is_made_as_by_a_write() -> None:
    h = Harness()
    assert begin(h).created
    assert h.state("t").config == TopicConfig()
    h.refused(t.BeginTransaction("u", "p", 1, create=False), TopicNotFound)
    h.refused(t.BeginTransaction("no/name", "p", 1), InvalidRequest)
    h.refused(t.StageChunk("u", 1, "a", 0, Records([b"1"])), TopicNotFound)


def test_waiting_readers_and_claims_get_the_records() -> None:
    h, txn = filled()
    (poll,) = h.ask(c.Diff("t", 0, wait_ms=1000))
    commit(h, txn, PARTS)
    h.rest()
    assert len(h.replies[poll].seqs) == 8


# ---- refusals


def test_a_commit_names_what_is_missing() -> None:
    h, txn = filled()
    error = h.refused(
        t.CommitTransaction("t", txn, [("a", 3, 6), ("b", 2, 3), ("z", 1, 1)], 1000), TransactionIncomplete
    )
    assert error.detail["parts"] == [
        {"part": "a", "chunks": 3, "missing": [2]},
        {"part": "b", "records": 3, "staged": 4},
        {"part": "z", "chunks": 1, "missing": [0]},
    ]
    h.refused(t.CommitTransaction("t", txn, [("a", 1 << 40, 1)], 1000), TransactionIncomplete)
    h.refused(t.CommitTransaction("t", txn, [("a", 2, 4), ("a", 2, 4)], 1000), InvalidRequest)
    stage(h, txn, "a", 2, *named("a", 2))
    assert commit(h, txn, [("a", 3, 6)]).count == 6
    assert payloads(h) == [*named("a", 0), *named("a", 1), *named("a", 2)]


def test_unnamed_parts_are_thrown_away() -> None:
    h, txn = filled()
    commit(h, txn, [("a", 1, 2)])
    assert payloads(h) == named("a", 0)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_full_topic_refuses_before_anything_is_decided(
    pieces: bool, request: pytest.FixtureRequest
) -> None:
    if pieces:
        request.getfixturevalue("in_pieces")
    h, txn = filled(TopicConfig(durability="fsync", cap_records=9, discard="reject"))
    h.append("t", b"1", b"2")
    h.refused(t.CommitTransaction("t", txn, PARTS, 1000), TopicFull)
    h.do(c.Delete("t", before_seq=2))
    assert commit(h, txn, PARTS).count == 8
    assert payloads(h) == [b"2", *EXPECTED]


@pytest.mark.usefixtures("in_pieces")
def test_others_cannot_take_the_room_of_what_is_decided() -> None:
    h, txn = filled(TopicConfig(durability="fsync", cap_records=9, discard="reject"))
    h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while not (known := h.engine.shard.state.staged["t"].transactions) or known.open[txn].decision is None:
        h.run_job()
    h.refused(append("t", b"1", b"2"), TopicFull)
    h.rest()
    assert payloads(h) == EXPECTED


def test_a_batch_larger_than_the_whole_cap_never_fits() -> None:
    h, txn = filled(TopicConfig(durability="fsync", cap_records=7, discard="reject"))
    h.refused(t.CommitTransaction("t", txn, PARTS, 1000), RecordTooLarge)


def test_records_are_checked_when_they_are_staged() -> None:
    h, txn = filled(TopicConfig(durability="fsync", max_record_bytes=10))
    h.refused(t.StageChunk("t", txn, "c", 0, Records([b"x" * 11])), RecordTooLarge)
    h.refused(t.StageChunk("t", txn, "c", 0, Records([])), InvalidRequest)
    h.refused(t.StageChunk("t", txn, "c", 0, Records([b"1"], tags=[b"x" * 2000])), InvalidRequest)


@pytest.mark.parametrize(
    ("field", "limit"), [("txn_bytes_max", "txn_max_bytes"), ("txn_shard_bytes_max", "txn_shard_bytes")]
)
def test_staged_bytes_are_bounded(field: str, limit: str) -> None:
    h, txn = filled(options=msgspec.structs.replace(SMALL, **{field: 700}))
    error = h.refused(t.StageChunk("t", txn, "c", 0, Records([b"x" * 600])), Throttled)
    assert error.detail == {"limit": limit, "max": 700}
    h.do(t.AbortTransaction("t", txn))
    h.rest()
    txn = begin(h).txn
    stage(h, txn, "c", 0, b'"fits"')


def test_transactions_chunks_and_producers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    h, txn = filled()
    monkeypatch.setattr(limits, "TXN_CHUNKS_MAX", 4)
    error = h.refused(t.StageChunk("t", txn, "c", 0, Records([b"1"])), Throttled)
    assert error.detail["limit"] == "txn_chunks"
    monkeypatch.setattr(limits, "TXN_OPEN_PER_TOPIC_MAX", 2)
    begin(h, 2)
    assert h.refused(t.BeginTransaction("t", "p", 3), Throttled).detail["limit"] == "txn_open_per_topic"
    monkeypatch.setattr(limits, "TXN_OPEN_MAX", 2)
    assert h.refused(t.BeginTransaction("u", "p", 3), Throttled).detail["limit"] == "txn_open"


def test_idle_producers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics.engine.topic.transactions.TXN_PRODUCERS_MAX", 2)
    monkeypatch.setattr(limits, "TXN_PRODUCERS_MAX", 2)
    h = Harness()
    h.put("t", FSYNC)
    for producer in ("a", "b"):
        commit(h, begin(h, 1, producer).txn, [])
    assert h.refused(t.BeginTransaction("t", "c", 1), Throttled).detail["limit"] == "txn_producers"
    h.pass_time(limits.TXN_PRODUCER_IDLE_MS + 1)
    assert begin(h, 1, "a").state == "committed", "it is kept as long as there is room"
    commit(h, begin(h, 2, "b").txn, [])
    commit(h, begin(h, 1, "c").txn, [])
    h.kill_and_open()
    assert begin(h, 1, "c").state == begin(h, 2, "b").state == "committed"
    assert sorted(h.engine.shard.state.staged["t"].transactions.producers) == ["b", "c"]  # type: ignore[union-attr]


# ---- metrics


def test_open_staged_and_committed_transactions_are_counted(in_pieces: None) -> None:
    h, txn = filled()
    (name,) = staged_files(h)
    size = h.disk.size(h.disk.open(f"{h.topic_dir('t')}/{name}")) - HEADER_BYTES
    assert figures(h) == {"open": 1, "staged": size, "committed": 0, "expired": 0, "left": 0}
    begin(h, 2, "q")
    assert figures(h)["open"] == 2
    commit(h, txn, PARTS)
    h.rest()
    assert figures(h) == {"open": 1, "staged": 0, "committed": 1, "expired": 0, "left": 0}


def test_a_file_that_cannot_be_removed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    h, txn = filled()
    remove = h.disk.remove

    def refuse(path: str) -> None:
        if "/txn-" in path:
            raise OSError(errno.EIO, "no")
        remove(path)

    monkeypatch.setattr(h.disk, "remove", refuse)
    commit(h, txn, PARTS)
    h.rest()
    assert staged_files(h)
    assert figures(h) == {"open": 0, "staged": 0, "committed": 1, "expired": 0, "left": 1}


# ---- ends


def test_an_aborted_one_leaves_nothing() -> None:
    h, txn = filled()
    assert h.do(t.AbortTransaction("t", txn)).state == "aborted"
    h.refused(t.AbortTransaction("t", txn), TransactionNotFound)
    h.refused(t.CommitTransaction("t", txn, PARTS), TransactionNotFound)
    h.rest()
    assert (
        staged_files(h),
        h.engine.shard.transactions.staged_bytes,
        h.engine.shard.transactions.staged_chunks,
    ) == ([], 0, 0)
    assert figures(h) == {"open": 0, "staged": 0, "committed": 0, "expired": 0, "left": 0}
    assert begin(h).state == "open"
    h.refused(t.CommitTransaction("t", txn, PARTS), TransactionIncomplete)


def test_one_that_nobody_works_on_expires() -> None:
    h = Harness()
    h.put("t", FSYNC)
    txn = begin(h, ttl_ms=5000).txn
    h.pass_time(4000)
    stage(h, txn, "a", 0, b'"a"')
    h.pass_time(4000)
    stage(h, txn, "a", 1, b'"b"')
    due_ms = h.engine.shard.transactions.due_ms
    assert due_ms is not None and h._wake_at is not None and h._wake_at <= due_ms, (
        "it wakes up without a request"
    )
    assert figures(h)["open"] == 1
    h.pass_time(5000)
    h.refused(t.CommitTransaction("t", txn, [("a", 2, 2)]), TransactionNotFound)
    h.rest()
    assert not staged_files(h)
    assert figures(h) == {"open": 0, "staged": 0, "committed": 0, "expired": 1, "left": 0}
    h.kill_and_open()
    h.refused(t.CommitTransaction("t", txn, [("a", 2, 2)]), TransactionNotFound)


def test_a_dropped_topic_takes_its_transactions_along() -> None:
    h, txn = filled()
    (token,) = h.ask(t.StageChunk("t", txn, "c", 0, Records([b'"c"'])))
    h.do(c.DropTopic("t"))
    h.rest()
    assert isinstance(h.replies[token], TransactionNotFound | TopicNotFound)
    assert not [path for path in h.disk.paths() if path.startswith("topics/")]
    assert not h.engine.shard.transactions.open
    h.put("t", FSYNC)
    assert begin(h).state == "open"


@pytest.mark.parametrize("request_of", ["stage", "commit"])
def test_no_reply_tells_of_a_drop_before_it_is_in_the_log(request_of: str) -> None:
    h, txn = filled()
    (token,) = h.ask(
        t.StageChunk("t", txn, "c", 0, Records([b'"c"']))
        if request_of == "stage"
        else t.CommitTransaction("t", txn, PARTS, 10_000)
    )
    (drop,) = h.ask(c.DropTopic("t"))
    assert token not in h.replies and drop not in h.replies
    h.power_cut()
    h.open()
    assert begin(h).txn == txn

    (token,) = h.ask(t.StageChunk("t", txn, "c", 0, Records([b'"c"'])))
    h.do(c.DropTopic("t"))
    h.rest()
    assert isinstance(h.replies[token], TopicNotFound)


def test_no_reply_tells_of_an_abort_before_it_is_in_the_log() -> None:
    h, txn = filled()
    (token,) = h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    (abort,) = h.ask(t.AbortTransaction("t", txn))
    assert token not in h.replies and abort not in h.replies
    h.rest()
    assert isinstance(h.replies[token], TransactionNotFound) and h.replies[abort].state == "aborted"


@pytest.mark.usefixtures("in_pieces")
def test_a_drop_in_the_middle_of_a_commit() -> None:
    h, txn = filled()
    (token,) = h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while h.engine.shard.state.staged["t"].next_seq < 3:
        h.run_job() if h.jobs else h.ask()
    h.do(c.DropTopic("t"))
    h.rest()
    assert isinstance(h.replies[token], TopicNotFound)
    assert not [path for path in h.disk.paths() if path.startswith("topics/")]


def test_a_commit_that_takes_long_is_answered_meanwhile() -> None:
    h, txn = filled()
    (token,) = h.ask(t.CommitTransaction("t", txn, PARTS, 1000))
    h.clock.advance(1000)
    h.ask()
    assert h.replies[token] == t.TransactionState("t", txn, "committing")
    h.rest()
    assert commit(h, txn, PARTS).state == "committed"
    assert payloads(h) == EXPECTED


# ---- restarts


@pytest.mark.parametrize("config", [FSYNC, DISK])
@pytest.mark.parametrize("how", ["restart", "kill", "checkpoint"])
def test_open_transactions_survive(config: TopicConfig, how: str) -> None:
    h, txn = filled(config)
    if how == "restart":
        h.restart()
    else:
        if how == "checkpoint":
            h.checkpoint()
        h.kill_and_open()
    assert begin(h).state == "open"
    assert stage(h, txn, "a", 1, b'"another"').repeated
    stage(h, txn, "c", 0, *named("c", 0))
    commit(h, txn, [*PARTS, ("c", 1, 2)])
    assert payloads(h) == [*EXPECTED, *named("c", 0)]
    h.restart()
    assert begin(h).state == "committed"
    assert payloads(h) == [*EXPECTED, *named("c", 0)]


def test_acked_commits_survive_a_power_cut_if_the_class_promises_it() -> None:
    for seed in range(20):
        h = Harness(seed=seed)
        h.put("t", FSYNC)
        txn = begin(h).txn
        for part, chunk in [(part, chunk) for part in ("a", "b") for chunk in (0, 1)]:
            stage(h, txn, part, chunk, *named(part, chunk))
        h.power_cut()
        h.open()
        assert commit(h, txn, PARTS).count == 8
        assert payloads(h) == EXPECTED


@pytest.mark.usefixtures("in_pieces")
def test_a_decided_one_goes_on_by_itself() -> None:
    h, txn = filled()
    h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while h.engine.shard.state.staged["t"].next_seq < 5:
        h.run_job() if h.jobs else h.ask()
    h.kill_and_open()
    h.rest()
    assert payloads(h) == EXPECTED
    assert commit(h, txn, PARTS).count == 8
    assert not staged_files(h)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_start_appends_all_of_a_decided_one_again_where_records_are_not_kept(
    with_checkpoint: bool,
) -> None:
    h, txn = filled(TopicConfig(durability="ephemeral"))
    h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while h.engine.shard.state.staged["t"].next_seq < 5:
        h.run_job() if h.jobs else h.ask()
    if with_checkpoint:
        h.engine.checkpoint()
        h.ask()
        while others := [job.kind for job in h.jobs if job.kind != STAGE_KIND]:
            h.run_job(others[0])
            h.ask()
        assert h.snapshots()
    h.kill_and_open()
    h.rest()
    assert payloads(h) == EXPECTED
    found = commit(h, txn, PARTS)
    assert (found.count, found.last_seq) == (8, found.first_seq + 7)
    assert not staged_files(h)


@pytest.mark.usefixtures("in_pieces")
def test_a_chunk_that_is_corrupt_after_the_decision_is_announced() -> None:
    h, txn = filled()
    h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while h.engine.shard.state.staged["t"].next_seq < 3:
        h.run_job() if h.jobs else h.ask()
    h.kill()
    (path,) = [path for path in h.disk.paths() if "/txn-" in path]
    at = bytes(h.disk._find(path).live).index(b"a0-1")  # type: ignore[union-attr]
    h.disk.flip_bit(path, at)
    h.open()
    h.rest()
    rows, gaps = h.read("t")
    assert [payload for _, payload in rows] == [payload for payload in EXPECTED if b"a0" not in payload]
    assert gaps == [(5, 6, "corrupt")]
    assert commit(h, txn, PARTS).count == 6


def test_a_chunk_that_is_corrupt_before_can_be_staged_again() -> None:
    h, txn = filled()
    (name,) = staged_files(h)
    path = f"{h.topic_dir('t')}/{name}"
    at = bytes(h.disk._find(path).live).index(b"b1-1")  # type: ignore[union-attr]
    h.disk.flip_bit(path, at)
    error = h.refused(t.CommitTransaction("t", txn, PARTS, 1000), TransactionIncomplete)
    assert error.detail["parts"] == [{"part": "b", "missing": [1]}]
    stage(h, txn, "b", 1, *named("b", 1))
    commit(h, txn, PARTS)
    assert payloads(h) == EXPECTED


# ---- erase


SECRET = b'"nobody may find this again"'


@pytest.mark.parametrize("how", ["run on", "kill"])
def test_an_erase_leaves_no_copy_in_a_file_that_was_staged(how: str) -> None:
    h, txn = filled()
    stage(h, txn, "s", 0, SECRET)
    h.ask(t.CommitTransaction("t", txn, [("s", 1, 1)], 10_000))
    while h.engine.shard.state.staged["t"].view.head < 1:
        h.run_job()
    if how == "kill":
        h.kill_and_open()
    h.do(c.Delete("t", seqs=[1], erase=True))
    assert holders(h.disk, SECRET) == []


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("how", ["run on", "kill"])
def test_an_erase_in_the_middle_of_a_commit(how: str) -> None:
    h, txn = filled()
    stage(h, txn, "s", 0, SECRET)
    h.ask(t.CommitTransaction("t", txn, [("s", 1, 1), *PARTS], 10_000))
    while h.engine.shard.state.staged["t"].view.head < 1:
        h.run_job() if h.jobs else h.ask()
    if how == "kill":
        h.kill_and_open()
    h.do(c.Delete("t", seqs=[1], erase=True))
    assert holders(h.disk, SECRET) == []
    h.rest()
    assert payloads(h) == EXPECTED


# ---- files


@pytest.mark.usefixtures("in_pieces")
def test_the_file_stays_until_the_last_records_are_synced() -> None:
    """In whatever order the disk works."""
    h, txn = filled()
    h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while staged_files(h):
        kinds = [job.kind for job in h.jobs]
        if kinds:
            h.run_job("stage" if "stage" in kinds else None)
        else:
            h.ask()
    assert h.engine.wal.synced_lsn == h.engine.wal.last_lsn
    assert payloads(h) == EXPECTED


@pytest.mark.parametrize("config", CLASSES)
@pytest.mark.parametrize("pieces", [False, True])
def test_a_commit_is_answered_when_it_is_synced(
    config: TopicConfig, pieces: bool, request: pytest.FixtureRequest
) -> None:
    if pieces:
        request.getfixturevalue("in_pieces")
    h, txn = filled(config)
    (token,) = h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while token not in h.replies:
        h.run_job() if h.jobs else h.ask()
    assert h.engine.wal.synced_lsn == h.engine.wal.last_lsn


@pytest.mark.usefixtures("in_pieces")
def test_verify_knows_the_files_and_finds_what_is_corrupt_in_them() -> None:
    h, txn = filled()
    stage(h, begin(h, 1, "q").txn, "x", 0, b'"open"')
    h.ask(t.CommitTransaction("t", txn, PARTS, 10_000))
    while h.engine.shard.state.staged["t"].next_seq < 3:
        h.run_job() if h.jobs else h.ask()
    h.engine.stop_tasks()
    h.jobs = [job for job in h.jobs if job.kind != "stage"]
    h.checkpoint()
    h.kill()
    assert [finding for finding in ended(verify(h)).findings if "/txn-" in finding.path] == []
    path = next(path for path in h.disk.paths() if f"/txn-{txn:016x}" in path)
    h.disk.flip_bit(path, bytes(h.disk._find(path).live).index(b"a0-1"))  # type: ignore[union-attr]
    (damage,) = ended(verify(h)).damage
    assert (damage.path, damage.topic, damage.records) == (path, "t", 2)


def verify(h: Harness) -> Generator[str, None, ShardFiles]:
    return verify_shard(h.disk, SimClock(h.clock.wall_ms()), SMALL, 1)
