"""Goal: fixed bugs stay fixed. Each docstring describes the bug.

Method: the smallest sequence of commands, faults and restarts that showed it, on the simulated disk.
"""

from __future__ import annotations

import errno

import msgspec
import pytest

from tests.support.engine_harness import SMALL, Harness, file_bytes, holders, numbered, overwrite, rows_of
from tests.support.faults import fault
from topics.api import limits
from topics.api.config import EngineConfig, TopicConfig
from topics.api.errors import InvalidRequest, ShardReadOnly, TopicsError, WrongLastSeq
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.storage import frames
from topics.engine.storage.wal import file_number

FSYNC = TopicConfig(durability="fsync")


def config(**changes: object) -> EngineConfig:
    return msgspec.structs.replace(SMALL, **changes)


def test_segments_may_be_sealed_in_another_order_than_their_seqs() -> None:
    """Records of an `ephemeral` phase are in RAM and sealed after younger ones; the chain follows the order of
    sealing, not of seqs.
    """
    h = Harness()
    h.put("t", TopicConfig(durability="ephemeral"))
    h.append("t", b"ram")
    h.put("t", FSYNC)
    h.append("t", b"precious")
    h.put("t", TopicConfig(durability="ephemeral"))
    h.checkpoint()
    h.put("t", FSYNC)
    h.checkpoint()
    h.restart()
    assert h.rows("t") == [(1, b"ram"), (2, b"precious")]


@fault(
    "disk",
    "the first read of a topic finds no free file descriptor half-way",
    "that request fails; the next one loads the topic whole",
)
def test_an_error_while_loading_leaves_the_topic_as_it_was() -> None:
    """After one failed read an unloaded topic counted as loaded, and empty."""
    h = Harness(config(index_rows_max=0))
    h.put("t")
    for payload in numbered(0, 30):
        h.append("t", payload)
    h.checkpoint()
    h.checkpoint()
    h.disk.fail_at(1, errno.EMFILE, of="open")
    assert isinstance(h.send(c.Diff("t")), TopicsError)
    h.rest()
    assert len(h.rows("t")) == 30
    h.restart()
    assert len(h.rows("t")) == 30


@pytest.mark.parametrize("seed", range(6))
def test_a_topic_that_left_class_memory_keeps_its_new_promise(seed: int) -> None:
    """Its config change was delayed with its records, so a power cut was not announced and seqs were reused."""
    h = Harness(seed=seed)
    h.put("t", TopicConfig(durability="memory"))
    h.append("t", b"one")
    h.pass_time(200)
    h.put("t", TopicConfig(durability="disk"))
    h.ask(c.Append("t", c.Records([b"two"])))
    h.power_cut()
    h.open()
    kept = [seq for seq, _ in h.rows("t")]
    assert h.append("t", b"three").first_seq > 2
    if 2 not in kept:
        assert any(first <= 2 <= last and reason == "crash" for first, last, reason in h.gaps("t"))


@fault("disk", "disk and log file are both full", "reads go on")
def test_reads_go_on_when_disk_and_log_file_are_full() -> None:
    """The time ceiling of a turn needed space that was not there."""
    h = Harness(config(wal_file_bytes=4096, snapshot_interval_ms=1 << 40, snapshot_wal_bytes=1 << 40))
    h.put("t")
    h.append("t", *numbered(0, 60))
    h.disk.full = True
    for seq in range(1, 61):
        h.send(c.Delete("t", seqs=[seq]))
        h.rest()
    for _ in range(40):
        h.clock.advance(3000)
        assert isinstance(h.do(c.Diff("t")), c.Page)


def test_an_erase_of_many_ranges_has_room_for_its_own_end() -> None:
    h = Harness(config(wal_file_bytes=8192))
    h.put("t")
    h.do(c.Skip("t", 1 << 32))
    h.append("t", *numbered(0, 1200))
    first = (1 << 32) + 1
    assert h.do(c.Delete("t", seqs=list(range(first, first + 1200, 2)), erase=True)).deleted == 600


@fault("disk", "a long poll meets a read error", "it is answered with the error, and not left waiting")
def test_a_poll_that_meets_a_read_error_is_answered() -> None:
    h = Harness(config(cache_bytes=0))
    h.put("t")
    h.append("t", b"one")
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=5000))
    h.ask(c.Append("t", c.Records([b"y" * 2000])))
    h.disk.fail_at(1, errno.EIO, of="read")
    h.rest()
    assert poll in h.replies


def test_close_refuses_while_jobs_are_out() -> None:
    """It waited for ever for a sync that no thread ran."""
    h = Harness()
    h.ask(c.PutTopic("t", FSYNC))
    assert h.engine is not None
    with pytest.raises(RuntimeError, match="jobs are outstanding"):
        h.engine.close()


@pytest.mark.parametrize(
    "bad",
    [TopicConfig(durability="fsnyc"), TopicConfig(cap_records="4"), TopicConfig(cap_records=-1)],  # type: ignore[arg-type]
)
def test_a_config_that_could_not_be_read_back_is_refused(bad: TopicConfig) -> None:
    """Such a config was stored, and from then on the whole shard could not be opened."""
    h = Harness()
    h.refused(c.PutTopic("t", bad), InvalidRequest)
    h.refused(c.Append("t", c.Records([b"1"]), config=bad), InvalidRequest)
    h.restart()
    assert h.do(c.ListTopics()).topics == []


@pytest.mark.parametrize("stop", ["kill_and_open", "restart"])
def test_a_stored_config_outside_of_the_bounds_of_requests_is_read_back(stop: str) -> None:
    """Bounds that are made narrower later must not keep a shard from starting: from its log, or from its snapshot."""
    stored = TopicConfig(priority=2**40, lease_ms=1)
    h = Harness()
    h.do(c.PutTopic("t", stored))
    getattr(h, stop)()
    assert h.engine.shard.state.published["t"].config == stored


@pytest.mark.parametrize(
    "command",
    [
        c.Delete("t", keep=-1),
        c.Delete("t", before_seq=-1),
        c.Diff("t", from_seq=-1),
        c.Diff("t", limit=-1),
        c.Append("t", c.Records([b"1", b"2"], tags=[b"x"])),
    ],
)
def test_numbers_and_columns_that_make_no_sense_are_refused(command: c.Command) -> None:
    h = Harness()
    h.put("t")
    h.append("t", b"one")
    h.refused(command, InvalidRequest)
    assert h.rows("t") == [(1, b"one")]


def test_a_closed_engine_takes_nothing() -> None:
    """Another owner may have its file handles by then."""
    h = Harness()
    h.put("t")
    h.rest()
    engine = h.engine
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.turn([])


@fault("disk", "a shard is read-only for a long time", "it waits for requests; it does not spin")
def test_a_read_only_shard_has_nothing_to_wake_for() -> None:
    """A checkpoint that was due stayed due for ever: the loop of a read-only shard never slept."""
    h = Harness(config(snapshot_interval_ms=1000))
    h.put("t")
    h.append("t", b"1")
    h.disk.fail_at(1, errno.EIO, of="write")
    assert isinstance(h.send(c.Append("t", c.Records([b"2"]))), TopicsError)
    h.clock.advance(60_000)
    outcome = h.engine.turn([])
    assert (outcome.jobs, outcome.wake_at_ms) == ([], None)


@fault(
    "index",
    "the version in a sealed index file is corrupted",
    "the seal shows that it was of this version: the index is made again from the records",
)
@pytest.mark.parametrize("suffix", ["idx", "dict", "sum"])
def test_corruption_in_a_version_is_corruption_and_not_another_version(suffix: str) -> None:
    """One flipped bit there made every request fail that had to load the topic, lists of all topics included."""
    h = Harness()
    h.put("t")
    for payload in numbered(0, 12):
        h.append("t", payload, tag=b"a")
    h.checkpoint()
    rows = h.rows("t")
    for path in h.disk.paths():
        if path.endswith(f".{suffix}"):
            h.disk.flip_bit(path, 9, 3)
    assert h.rows("t") == rows
    h.restart()
    assert (h.rows("t"), h.gaps("t")) == (rows, [])
    assert h.engine.shard.state.read_only is None


@fault(
    "segment",
    "a bit of a .sum flips under a running shard",
    "records are checked one by one; none is lost",
)
def test_a_seal_that_is_corrupted_costs_no_record() -> None:
    """Readers got 500 until a restart, and the restart announced the whole segment as lost."""
    h = Harness()
    h.put("t")
    for payload in numbered(0, 12):
        h.append("t", payload)
    h.checkpoint()
    rows = h.rows("t")
    h.restart()
    for path in h.disk.paths():
        if path.endswith(".sum"):
            h.disk.flip_bit(path, 20, 1)
    assert h.rows("t") == rows
    h.restart()
    assert (h.rows("t"), h.gaps("t")) == (rows, [])


@fault(
    "segment",
    "a record is corrupted under a running shard after it was read",
    "at the latest a minute later a read announces it as `corrupt`",
)
def test_verified_blocks_are_checked_again() -> None:
    """A block that was verified once was trusted as long as its file stayed open."""
    h = Harness()
    h.put("t")
    for payload in numbered(0, 12):
        h.append("t", payload)
    h.checkpoint()
    assert len(h.rows("t")) == 12
    path = min(path for path in h.disk.paths() if path.endswith(".data"))
    h.disk.flip_bit(path, 60, 1)
    h.pass_time(61_000)
    rows, gaps = h.read("t")
    assert [seq for seq, _ in rows] == list(range(2, 13))
    assert gaps == [(1, 1, "corrupt")]


def test_a_read_by_time_stops_before_a_loss_that_may_be_young_enough() -> None:
    """`from_ts` skipped a range lost in a power cut without a tombstone, although the age of those records was
    unknown.
    """
    for seed in range(20):  # until the power cut takes the record
        h = Harness(seed=seed)
        h.put("t", TopicConfig(durability="disk"))
        h.append("t", b"old")
        h.pass_time(1000)
        young = h.engine.clock.now_ms + 1
        h.clock.advance(10)
        h.append("t", b"lost")
        h.power_cut()
        h.open()
        h.append("t", b"new")
        head = h.state("t").head_seq
        if 2 not in h.seqs("t"):
            break
    page = h.diff("t", from_ts=young)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (2, head - 1, "crash")
    assert page.seqs == [head]


def test_a_read_by_time_with_a_cursor_of_another_topic_begins_at_that_time() -> None:
    """A cursor beyond the head started over, and ignored the time."""
    h = Harness()
    h.put("t")
    h.append("t", b"old")
    h.clock.advance(1000)
    h.append("t", b"new")
    young = h.diff("t").timestamps[1]
    page = h.diff("t", 99, from_ts=young)
    assert page.tombstone is not None and page.tombstone.reason == "recreated"
    assert page.seqs == [2]


def test_ephemeral_records_are_not_stored_because_those_before_them_are_dead() -> None:
    """The block of a chunk's dead first rows was dropped, and a checkpoint treated the rest as logged records."""
    h = Harness()
    h.put("t", TopicConfig(durability="ephemeral"))
    h.append("t", b"1", b"2")
    h.append("t", b"x" * limits.RAM_BLOCK_BYTES)  # in a block of its own
    h.do(c.Delete("t", before_seq=3))
    h.checkpoint()
    assert h.segment_files("t") == []
    h.restart()
    assert h.rows("t") == []
    assert h.state("t").head_seq == 3


@fault(
    "disk",
    "the power goes between a write and the refusal that it made of another one",
    "the refusal is not sent before the write is safe",
)
def test_a_refusal_does_not_tell_of_what_a_crash_may_undo() -> None:
    """A refused conditional write returned a last seq that was not synced yet; after the power cut it did not exist."""
    h = Harness()
    h.put("t")
    h.append("t", b"1")
    write, refused = h.ask(c.Append("t", c.Records([b"2"])), c.Append("t", c.Records([b"3"]), if_last_seq=1))
    assert write not in h.replies and refused not in h.replies
    h.rest()
    assert h.order.index(write) < h.order.index(refused)
    assert isinstance(h.replies[refused], WrongLastSeq)
    assert h.replies[refused].detail["actual"] == 2


def test_a_refusal_that_waits_is_certain_when_the_sync_fails() -> None:
    h = Harness()
    h.put("t")
    h.append("t", b"1")
    write, refused = h.ask(c.Append("t", c.Records([b"2"])), c.Append("t", c.Records([b"3"]), if_last_seq=1))
    h.disk.fail_at(1, errno.EIO, of="sync")
    h.rest()
    assert h.replies[write].detail.get("outcome") == "unknown"
    assert isinstance(h.replies[refused], ShardReadOnly)
    assert "outcome" not in h.replies[refused].detail


@fault(
    "segment",
    "a record is corrupted, and then another one in its block is erased",
    "a read announces the corrupt one as `corrupt`",
)
def test_an_erase_does_not_validate_corruption() -> None:
    """The block got a new digest, computed from its damaged contents."""
    h = Harness()
    h.put("t")
    for payload in numbered(0, 12):
        h.append("t", payload)
    h.checkpoint()
    path = min(path for path in h.disk.paths() if path.endswith(".data"))
    h.restart()
    h.disk.flip_bit(path, 60, 1)
    h.do(c.Delete("t", seqs=[3], erase=True))
    h.restart()
    rows, gaps = h.read("t")
    assert [seq for seq, _ in rows] == [2, *range(4, 13)]
    assert gaps == [(1, 1, "corrupt")]


def sealed(*, records: int = 12) -> tuple[Harness, str]:
    """A topic with sealed segments that were not read since the start, and the first of its .data files."""
    h = Harness()
    h.put("t")
    for payload in numbered(0, records):
        h.append("t", payload)
    h.checkpoint()
    h.restart()
    return h, min(path for path in h.disk.paths() if path.endswith(".data"))


@fault(
    "segment",
    "the length of a record is corrupted, and it or one behind it is erased",
    "no other record is touched, and the erased bytes are gone",
)
@pytest.mark.parametrize("erased", [1, 2, 3])
def test_an_erase_believes_only_whole_records(erased: int) -> None:
    """It followed damaged lengths: it overwrote the next record, or stopped before the one to erase."""
    h, path = sealed()
    h.disk.flip_bit(path, 16, 3)  # in the length of seq 1, the first after the header
    h.do(c.Delete("t", seqs=[erased], erase=True))
    assert holders(h.disk, numbered(erased - 1, 1)[0]) == []
    h.restart()
    rows, gaps = h.read("t")
    assert [seq for seq, _ in rows] == [seq for seq in range(2, 13) if seq != erased]
    assert gaps == ([] if erased == 1 else [(1, 1, "corrupt")])


@fault(
    "disk",
    "the power goes between the drop of a topic and a refusal that names no such topic",
    "the refusal is not sent before the drop is safe",
)
def test_a_404_does_not_tell_of_a_drop_that_a_crash_may_undo() -> None:
    h = Harness()
    h.put("t")
    h.append("t", b"1")
    dropped, refused = h.ask(c.DropTopic("t"), c.Append("t", c.Records([b"2"]), create=False))
    assert dropped not in h.replies and refused not in h.replies
    h.rest()
    assert h.order.index(dropped) < h.order.index(refused)


def with_corrupt_topics() -> Harness:
    """Two topics that were not accessed since the start, each with a damaged record."""
    h = Harness(config(index_rows_max=0))
    for name in ("a", "b"):
        h.put(name, TopicConfig(durability="memory"))
        for payload in numbered(0, 8):
            h.append(name, payload)
    h.checkpoint()
    for name in ("a", "b"):
        h.append(name, b"more")
    h.kill()
    for path in h.disk.paths():
        if path.endswith(".data") and "/seg-0000000000000001-" in path:
            h.disk.flip_bit(path, 60, 1)
        if path.endswith((".idx", ".sum")):
            h.disk.flip_bit(path, 40, 1)
    h.open()
    return h


@fault(
    "segment",
    "a checkpoint is the first to load a topic with a corrupt segment",
    "the loss is logged before anything is captured; the checkpoint goes on",
)
def test_a_checkpoint_may_find_a_loss() -> None:
    """Each checkpoint failed with an assertion, until a client happened to access that topic."""
    h = with_corrupt_topics()
    h.checkpoint()
    assert h.gaps("a") == [(1, 1, "corrupt")]


@fault(
    "log file",
    "a bit flips in an entry whose sync no later entry vouches for, with whole ones behind it",
    "on the same boot the shard starts read-only and names the place: no crash of a process does that",
)
def test_whole_entries_behind_a_bad_one_are_not_cut_off_as_torn() -> None:
    """Acknowledged writes after the bad entry were lost without a tombstone, and their seqs were used again."""
    h = Harness()
    h.put("t")
    h.append("t", b"first")
    for payload in (b"second", b"third"):
        h.ask(c.Append("t", c.Records([payload])))
    h.rest()
    (path,) = holders(h.disk, b"second")
    h.disk.flip_bit(path, file_bytes(h.disk, path).index(b"second"), 1)
    h.kill_and_open()
    assert h.engine.shard.state.read_only is not None
    assert path in h.engine.shard.state.read_only


def test_a_loss_found_by_a_read_does_not_show_an_eviction_that_waits_for_its_sync() -> None:
    """The loss moved the first visible seq past a record whose eviction was only staged, which was never announced."""
    h, path = sealed(records=4)
    h.put("t", TopicConfig(durability="fsync", cap_records=4))
    h.append("t", b"5")  # evicts 1
    offset = 2 + file_bytes(h.disk, path).index(numbered(2, 1)[0])
    h.disk.flip_bit(path, offset, 1)  # seq 3
    h.engine.reader.forget_checks()
    (write,) = h.ask(c.Append("t", c.Records([b"6"])))  # evicts 2, once it is synced
    assert write not in h.replies
    rows, gaps = h.read("t")
    assert write not in h.replies or gaps == [(1, 2, "cap"), (3, 3, "corrupt")]
    seen = {seq for seq, _ in rows} | {seq for first, last, _ in gaps for seq in range(first, last + 1)}
    assert seen >= {1, 2, 3, 4, 5}


def test_answered_long_polls_do_not_pile_up() -> None:
    """Each stayed in the heap of deadlines until its half minute was over, though it had been answered."""
    h = Harness()
    h.put("t", FSYNC)
    for i in range(150):
        (poll,) = h.ask(c.Diff("t", i, wait_ms=30_000))
        h.append("t", b"%d" % i)
        assert rows_of(h.replies[poll]) == [(i + 1, b"%d" % i)]
    (poll,) = h.ask(c.Diff("t", 150, wait_ms=30_000))
    assert len(h.engine.shard.reads.polls) < 100
    h.pass_time(30_000)
    assert rows_of(h.replies[poll]) == []


def test_a_topic_made_while_a_checkpoint_loads_others_survives_it() -> None:
    """The snapshot claimed every change up to the end of the log, but was captured from topics that had changed
    before.
    """
    h = with_corrupt_topics()  # losses that it finds have to be logged, and it has to wait for that
    h.engine.checkpoint()
    h.ask()
    (made, written) = h.ask(c.PutTopic("new", FSYNC), c.Append("new", c.Records([b"1"])))
    h.rest()
    assert {made, written} <= set(h.replies)
    h.kill()
    h.open()
    assert h.rows("new") == [(1, b"1")]


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@fault(
    "segment",
    "a whole record lies where another one should be: a write went astray",
    "the record that should be there is announced as lost; the other is not served in its place",
)
def test_a_whole_record_in_the_place_of_another_is_damage(sealed: bool) -> None:
    """It matched its own digest, and was served under the seq of the record whose place it had."""
    h = Harness()
    h.put("t", FSYNC)
    payloads = numbered(1, 6 if sealed else 3)
    for payload in payloads:
        h.append("t", payload)
    h.checkpoint()
    h.kill()
    path = next(path for path in h.disk.paths() if path.endswith("seg-0000000000000001-0.data"))
    data = file_bytes(h.disk, path)
    length = data.index(payloads[1]) - data.index(payloads[0])
    at = data.index(payloads[0]) - frames.HEADER_BYTES
    overwrite(h.disk, path, data[: at + length] + data[at : at + length] + data[at + 2 * length :])
    h.open()
    assert h.rows("t") == [(i + 1, payload) for i, payload in enumerate(payloads) if i != 1]
    assert h.gaps("t") == [(2, 2, "corrupt")]


def test_the_last_records_of_many_tags_come_in_pages_of_bounded_size() -> None:
    """A page had up to a thousand records, each as large as a record may be."""
    h = Harness(config(segment_max_bytes=64 * limits.MIB, wal_file_bytes=4 * limits.MIB))
    h.put("t", FSYNC)
    for i in range(12):
        h.append("t", b"x" * (limits.MIB - 1000), tag=b"tag-%02d" % (11 - i))
    found: list[bytes | None] = []
    after, more = b"", True
    while more:
        page = h.do(c.LastByTag("t", TagMatch("Glob", b"tag-*"), each=True, after=after))
        assert 0 < page.size <= limits.DIFF_BYTES_MAX
        found += page.tags
        after, more = max(page.tags), page.more
    assert sorted(found) == [b"tag-%02d" % i for i in range(12)]
    assert h.do(c.LastByTag("t", TagMatch("Glob", b"tag-*"))).seqs == [12]


@fault(
    "log file",
    "a stray file with a number that is none (`wal-².log`)",
    "it is not taken for a log file; the start goes on",
)
def test_a_stray_name_that_looks_like_a_number_is_no_log_file() -> None:
    """A character that is a digit but not a decimal one ended the start with a ValueError."""
    assert file_number("wal-²²².log") is None
    assert file_number("wal-0000000000000012.log") == 12
    h = Harness()
    h.put("t", FSYNC)
    h.append("t", b"1")
    h.kill()
    folder = next(path for path in h.disk.paths() if path.endswith(".log")).rpartition("/")[0]
    handle = h.disk.open(f"{folder}/wal-².log", create=True)
    h.disk.close(handle)
    h.open()
    assert h.rows("t") == [(1, b"1")]


@fault(
    "snapshot",
    "the newest one is corrupted after a segment was closed and rewritten since the one before",
    "the start goes on from the one before; everything is served",
)
def test_a_start_from_the_older_snapshot_replays_the_rewriting_of_a_segment() -> None:
    """Rows that the older snapshot did not have in a segment were searched in the log, at offsets of the segment."""
    h = Harness(config(rewrite_dead_share=0.5))
    h.put("t", FSYNC)
    payloads = numbered(1, 6)
    for payload in payloads[:2]:
        h.append("t", payload)
    h.checkpoint()
    for payload in payloads[2:]:
        h.append("t", payload)
    h.do(c.Delete("t", seqs=[1, 2, 3]))
    h.checkpoint()
    assert h.engine.counters["swaps"] == 1
    h.kill()
    h.disk.flip_bit(h.snapshots()[-1], 40, 1)
    h.open()
    assert h.rows("t") == [(4, payloads[3]), (5, payloads[4]), (6, payloads[5])]
    h.checkpoint()
    h.kill_and_open()
    assert h.seqs("t") == [4, 5, 6]


EPHEMERAL = TopicConfig(durability="ephemeral")


def keyed(h: Harness, key: bytes) -> tuple[int, bool]:
    """Write a record with this key: its seq, and whether it was deduplicated."""
    done = h.do(c.Append("t", c.Records([key]), key))
    return done.first_seq, done.deduped


@fault(
    "worker",
    "a worker with an ephemeral topic ends, and a client repeats a write whose answer it did not get",
    "the record is written again: the one that the key stood for is gone",
)
@pytest.mark.parametrize("clean", [False, True])
def test_the_keys_of_records_that_are_gone_are_gone(clean: bool) -> None:
    """A repeated write was answered with the seq of a record that was lost with the worker."""
    h = Harness()
    h.put("t", EPHEMERAL)
    assert keyed(h, b"key") == (1, False)
    h.checkpoint()
    assert keyed(h, b"key") == (1, True)
    if clean:
        h.restart()
    else:
        h.kill_and_open()
    assert keyed(h, b"key") == (2, False)
    assert h.rows("t") == [(2, b"key")]


def test_the_keys_of_evicted_records_do_not_outlast_the_class_they_had() -> None:
    """A snapshot kept the key of a record in RAM when nothing of its segment was left to announce."""
    h = Harness()
    h.put("t", TopicConfig(durability="ephemeral", cap_records=1))
    keyed(h, b"early")
    for payload in numbered(0, 9):
        h.append("t", payload)
    h.checkpoint()
    h.kill_and_open()
    assert keyed(h, b"early") == (11, False)


def test_keys_of_stored_records_outlast_a_change_to_ephemeral() -> None:
    """All keys of a topic that was last ephemeral were dropped, though some of its records were still there."""
    h = Harness()
    h.put("t", FSYNC)
    keyed(h, b"stored")
    h.checkpoint()
    keyed(h, b"logged")
    h.put("t", EPHEMERAL)
    keyed(h, b"in ram")
    h.checkpoint()
    for _ in range(2):
        h.kill_and_open()
        assert h.rows("t") == [(1, b"stored"), (2, b"logged")]
        assert [keyed(h, b"stored"), keyed(h, b"logged")] == [(1, True), (2, True)]
    assert keyed(h, b"in ram") == (4, False)


def test_keys_of_records_in_ram_outlast_what_stores_those() -> None:
    """Records in RAM are stored by the first checkpoint of another class, and from then on their keys are kept."""
    h = Harness()
    h.put("t", EPHEMERAL)
    keyed(h, b"1")
    h.checkpoint()
    h.put("t", FSYNC)
    h.kill_and_open()  # too early: nothing has stored it
    assert keyed(h, b"1") == (2, False)
    h.put("t", EPHEMERAL)
    keyed(h, b"3")
    h.put("t", FSYNC)
    h.checkpoint()
    h.put("t", EPHEMERAL)
    keyed(h, b"4")
    h.checkpoint()
    h.kill_and_open()
    assert h.rows("t") == [(2, b"1"), (3, b"3")]
    assert [keyed(h, b"1"), keyed(h, b"3"), keyed(h, b"4")] == [(2, True), (3, True), (5, False)]


def test_followers_of_a_topic_see_frames_that_recovery_deferred() -> None:
    """A feed began at the head of a topic whose last records were only replayed when a client read it."""
    h = Harness()
    h.put("t", TopicConfig(durability="memory"))
    h.append("t", b"1")
    h.checkpoint()
    h.append("t", b"2")
    h.kill_and_open()
    shard = h.engine.shard
    assert shard.state.published["t"].deferred
    assert shard.state.loaded_topic("t").view.head == 2


def test_a_gap_reaches_no_further_than_the_head_that_is_told_with_it() -> None:
    """A reader of synced records only got a head inside the gap."""
    h = Harness()
    h.put("t", TopicConfig(cap_records=2))
    h.engine.shard.reads.track_synced_head(h.engine.shard.state.loaded_topic("t"))
    for text in numbered(0, 6):
        h.append("t", text)
    log = h.engine.shard.state.published["t"]
    log.synced_head = 0
    page = h.engine.reader.diff(log, c.Diff("t", synced=True))
    assert page.tombstone is not None
    assert (page.tombstone.gap_to, page.tombstone.head_seq, page.head_seq) == (4, 4, 4)
