"""`verify --repair`: a damaged shard opens again, no record is invented, and every loss is announced.

Goal: whatever one fault does to any file, a repair leaves a directory that opens and serves, in which each record is
unchanged or announced as lost, and no byte of the old files is deleted; a crash during the repair does not change
that. Method: a shard with one file of every kind on a SimDisk is damaged by seeded flips, cuts, zeros and missing
files, then repaired, opened, read completely and verified again.
"""

from __future__ import annotations

import random
from collections.abc import Container
from functools import cache

import pytest

from tests.support import length
from tests.support.damaged_shard import CONFIG, Damaged, judge, rich
from tests.support.engine_harness import (
    DISK,
    FSYNC,
    MEMORY,
    META_DIR,
    WAL_DIR,
    Harness,
    append,
    lose,
    numbered,
    overwrite,
)
from tests.support.faults import fault
from tests.support.sim_disk import SimulatedCrash
from topics.api.errors import ShardReadOnly
from topics.engine.commands import topics as c
from topics.engine.storage.wal import ENVELOPE_BYTES, FILE_HEADER, file_header
from topics.engine.tools.salvage_log import SEQS_UNKNOWN, Hole, SalvagedLog, rewrite_log
from topics.engine.topic.flows import InflowRow
from topics.engine.topic.snapshot_row import TopicRow


@cache
def made(clean: bool) -> Damaged:
    return rich(clean=clean)


def shard(*, clean: bool = False) -> Damaged:
    return made(clean).copy()


def is_last_entry(d: Damaged, path: str, offset: int) -> bool:
    """Nothing confirms the end of the log: damage there looks like a write that a power cut interrupted."""
    last_path, last = list(d.envelopes())[-1]
    return path == last_path and offset >= last.start - ENVELOPE_BYTES


def deleted_may_return(path: str) -> set[int]:
    return {2} if path.endswith(".del") else set()


def assert_repaired(d: Damaged, *, may_return: Container[int] = ()) -> dict[str, list[int]]:
    d.repair()
    h = d.open()
    assert h.engine.shard.state.read_only is None
    gone = judge(h, d.rows, may_return=may_return)
    heads = {topic: h.state(topic).head_seq for topic in d.rows}
    for topic, rows in d.rows.items():
        assert heads[topic] >= rows[-1][0], "a seq was used twice"
        assert h.append(topic, b"new").first_seq == heads[topic] + 1
    h.close()
    assert d.damage() == []
    return gone


# ---- random damage


@fault(
    "verify",
    "any single flipped bit of any file, then --repair",
    "it opens; what is gone is announced, the rest unchanged",
)
@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("seed", length.seeds(short=2, long=20))
def test_any_flipped_bit(seed: int, clean: bool) -> None:
    rng = random.Random(seed)
    whole = shard(clean=clean)
    ends = {path: envelope.end for path, envelope in whole.envelopes()}
    for _ in range(length.pick(short=3, long=5)):
        d = whole.copy()
        path = rng.choice(d.disk.paths())
        offset = rng.randrange(ends.get(path, len(d.bytes(path))))
        if is_last_entry(d, path, offset):
            continue
        bit = rng.randrange(8)
        d.flip(path, offset, bit)
        try:
            assert_repaired(d, may_return=deleted_may_return(path))
        except BaseException as error:
            error.add_note(f"bit {bit} of byte {offset} of {path}")
            raise


@fault(
    "verify",
    "a file cut short, zeroed in part or in whole, or full of noise, then --repair",
    "it opens; what is gone is announced",
)
@pytest.mark.parametrize("seed", length.seeds(short=2, long=20))
def test_any_cut_or_overwritten_file(seed: int) -> None:
    rng = random.Random(100 + seed)
    whole = shard()
    for _ in range(length.pick(short=3, long=5)):
        d = whole.copy()
        path = rng.choice(d.disk.paths())
        data = d.bytes(path)
        at, size = rng.randrange(len(data)), rng.randrange(8, 128)
        end = max((e.end for p, e in d.envelopes() if p == path), default=0)
        what = rng.choice(["cut", "zeros", "noise", "all zeros"])
        if path.startswith(WAL_DIR) and (what == "cut" or (what != "all zeros" and at + size > end - 200)):
            continue  # the end of the log: see its tests
        if what == "cut":
            data = data[:at]
        elif what == "all zeros":
            data = bytes(len(data))
        else:
            patch = bytes(size) if what == "zeros" else rng.randbytes(size)
            data = (data[:at] + patch + data[at + size :])[: len(data)]
        overwrite(d.disk, path, data)
        try:
            assert_repaired(d, may_return=deleted_may_return(path))
        except BaseException as error:
            error.add_note(f"{what} at {at}, {size} bytes, of {path}")
            raise


@fault("verify", "any single missing file, then --repair", "it opens; what is gone is announced")
def test_any_missing_file() -> None:
    whole = shard()
    for path in whole.disk.paths():
        if path.startswith("topics/") and "0400/" not in path:
            continue  # the same files again
        d = whole.copy()
        lose(d.disk, path)
        try:
            assert_repaired(d, may_return=deleted_may_return(path))
        except BaseException as error:
            error.add_note(f"without {path}")
            raise


# ---- the log


def rotate(h: Harness, topic: str, first: int, count: int) -> None:
    """One entry per record, over several log files."""
    for i in range(first, first + count):
        h.append(topic, *numbered(i, 1, pad=200))


@fault(
    "log file",
    "an entry is corrupted in front of synced ones, then --repair",
    "what follows is kept; exactly the missing seqs are announced",
)
def test_entries_after_a_corrupt_one_are_kept() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.put("other", FSYNC)
    for i in range(1, 7):
        h.append("t", *numbered(i, 1))
    h.append("other", *numbered(1, 1))
    h.kill()
    d = Damaged(h.disk, {"t": [(i, numbered(i, 1)[0]) for i in range(1, 7)]}, h.clock.wall_ms())
    path, envelope = next(
        (p, e) for p, e in d.envelopes() if numbered(3, 1)[0] in d.bytes(p)[e.start : e.end]
    )
    d.flip(path, envelope.start + 50)
    with_damage = d.copy().open()
    assert isinstance(with_damage.send(append("t", b"x")), ShardReadOnly)
    repaired = d.repair()
    assert repaired.after is not None
    assert (repaired.after.topics, repaired.after.records, repaired.after.opens) == (2, 6, "")
    assert repaired.losses == [("t", 3, 3)], "the next record of the other topic shows that it lost nothing"
    h = d.open()
    assert h.seqs("t") == [1, 2, 4, 5, 6]
    assert h.gaps("t") == [(3, 3, "corrupt")]
    assert h.read("other") == ([(1, numbered(1, 1)[0])], [])


@fault(
    "log file",
    "a log file in the middle is missing, then --repair",
    "the files after it are kept; the missing seqs are announced",
)
def test_a_missing_log_file_in_the_middle() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.put("quiet", FSYNC)
    rotate(h, "t", 1, 40)
    h.kill()
    d = Damaged(h.disk, {}, h.clock.wall_ms())
    used = sorted({path for path, _ in d.envelopes()})
    assert len(used) >= 3
    inside = [e for p, e in d.envelopes() if p == used[1]]
    lose(d.disk, used[1])
    assert any(f"{inside[0].lsn} to {inside[-1].lsn} are missing" in finding.what for finding in d.damage())
    repaired = d.repair()
    h = d.open()
    rows, gaps = h.read("t")
    ((first, last, reason),) = gaps
    assert reason == "corrupt"
    assert sorted([seq for seq, _ in rows] + list(range(first, last + 1))) == list(range(1, 41))
    assert all(payload == numbered(seq, 1, pad=200)[0] for seq, payload in rows)
    quiet = [loss for loss in repaired.losses if loss[0] == "quiet"]
    assert quiet and quiet[0][1] == 1, "it is unknown how many of its records were in the file"
    assert h.append("quiet", b"new").first_seq == quiet[0][2] + 1, "and none of their seqs may be used again"


@fault(
    "log file",
    "all log files are missing, then --repair",
    "the snapshot is served; seqs past it are announced and never used again",
)
def test_all_log_files_are_missing() -> None:
    d = shard()
    for path in d.disk.paths():
        if path.startswith(WAL_DIR):
            lose(d.disk, path)
    gone = assert_repaired(d)
    assert gone["tail"] == list(range(1, 9))
    assert gone["sealed"] == [11, 12]


@fault(
    "log file",
    "the entry that made a topic is corrupted, then --repair",
    "its records are kept under a name that says so",
)
def test_a_topic_whose_making_is_lost_gets_a_name() -> None:
    h = Harness(CONFIG)
    h.put("first", FSYNC)
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 3))
    h.append("t", *numbered(4, 1))
    h.kill()
    d = Damaged(h.disk, {}, h.clock.wall_ms())
    path, envelope = next((p, e) for p, e in d.envelopes() if b"\xa1t" in d.bytes(p)[e.start : e.end])
    d.flip(path, envelope.start + 10)
    repaired = d.repair()
    assert any("its real name was in the lost part of the log" in note for note in repaired.notes)
    h = d.open()
    (name,) = [topic for topic in h.engine.shard.state.published if topic.startswith("recovered-")]
    assert h.rows(name) == [(i, numbered(i, 1)[0]) for i in range(1, 5)]


@fault(
    "log file",
    "the first 512 bytes of a young shard's log are overwritten with zeros, then --repair",
    "the records of the topic that was made there are kept as recovered-…, and counted; no seq is given twice",
)
def test_the_beginning_of_a_log_without_snapshot_is_lost() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    for i in range(1, 61):
        h.append("t", *numbered(i, 1))
    h.kill()
    d = Damaged(h.disk, {}, h.clock.wall_ms())
    path = next(d.envelopes())[0]
    overwrite(d.disk, path, bytes(512) + d.bytes(path)[512:])
    repaired = d.repair()
    ((name, count),) = repaired.recovered.items()
    assert any(
        f"{name}: its real name was in the lost part of the log. It has {count}" in note
        for note in repaired.notes
    )
    h = d.open()
    rows, gaps = h.read(name)
    first = rows[0][0]
    assert rows == [(i, numbered(i, 1)[0]) for i in range(first, 61)]
    assert (count, gaps) == (61 - first, [(1, first - 1, "corrupt")] if first > 1 else [])
    assert h.append(name, b"x").first_seq == 61
    assert not d.damage()


@fault(
    "log file",
    "both snapshots are missing, with a topic that had no segment yet, then --repair",
    "its records in the log are kept as recovered-…, with those of the other topics",
)
def test_a_topic_that_only_a_lost_snapshot_and_the_log_know() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.put("stored", FSYNC)
    rotate(h, "stored", 1, 30)
    h.checkpoint()
    h.append("stored", *numbered(31, 1))
    h.checkpoint()
    h.append("t", *numbered(1, 3))
    h.kill()
    d = Damaged(h.disk, {}, h.clock.wall_ms())
    for path in h.snapshots():
        lose(d.disk, path)
    repaired = d.repair()
    assert sorted(repaired.recovered.values()) == [3, 31]
    h = d.open()
    assert sorted(len(h.rows(name)) for name in repaired.recovered) == [3, 31]
    assert not d.damage()


@fault(
    "log file",
    "every log file of a shard without a snapshot is full of zeros",
    "the shard starts read-only, verify calls it damage, and a repair lets it start",
)
@pytest.mark.parametrize("kept", [0, 64])
def test_a_log_of_zeros_is_damage(kept: int) -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 3))
    h.rest()
    h.kill()
    d = Damaged(h.disk, {}, h.clock.wall_ms())
    paths = [path for path in d.disk.paths() if path.startswith(WAL_DIR)]
    for path in paths:
        data = d.bytes(path)
        overwrite(d.disk, path, data[:kept] + bytes(len(data) - kept))
    assert d.open().engine.shard.state.read_only
    (finding,) = d.damage()
    assert "all log entries are missing" in finding.what
    d.repair()
    h = d.open()
    assert h.engine.shard.state.read_only is None
    h.put("t", FSYNC)
    assert not d.damage()


@fault(
    "log file",
    "all that was written to the newest log file is overwritten, but for its first 8 bytes, then --repair",
    "not taken for a file of a later version: what it may have held is announced, and the shard starts",
)
@pytest.mark.parametrize("rot", [b"\xff" * 400, b"x" * 400, random.Random(7).randbytes(400)])
def test_a_corrupt_header_is_not_a_later_version(rot: bytes) -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 3))
    h.kill_and_open()
    h.kill()
    d = Damaged(h.disk, {"t": [(i, numbered(i, 1)[0]) for i in range(1, 4)]}, h.clock.wall_ms())
    path = [path for path, _ in d.envelopes()][-1]
    overwrite(d.disk, path, d.bytes(path)[:8] + rot + d.bytes(path)[408:])
    gone = assert_repaired(d)
    assert gone.get("t", [4])[0] == 4


def entry_with(d: Damaged, text: bytes) -> tuple[str, int]:
    """Where the entry with this text begins."""
    return next((p, e.start) for p, e in d.envelopes() if text in d.bytes(p)[e.start : e.end])


@fault(
    "log file",
    "an entry is corrupted in front of the entries that made other topics, then --repair",
    "these topics keep their names, their config and all their records",
)
def test_topics_made_behind_a_corrupt_entry_are_untouched() -> None:
    h = Harness(CONFIG)
    for topic in ("alpha", "gamma", "delta"):
        h.put(topic, DISK if topic == "gamma" else FSYNC)
        for i in range(1, 7):
            h.append(topic, *numbered(i, 2))
    configs = {topic: h.state(topic).config for topic in ("gamma", "delta")}
    rows = {topic: h.rows(topic) for topic in ("gamma", "delta")}
    h.kill()
    d = Damaged(h.disk, {}, h.clock.wall_ms())
    path, start = entry_with(d, numbered(3, 1)[0])
    d.flip(path, start + 50)
    repaired = d.repair()
    assert {topic for topic, _, _ in repaired.losses} == {"alpha"}
    h = d.open()
    assert sorted(h.engine.shard.state.published) == ["alpha", "delta", "gamma"]
    assert {topic: h.state(topic).config for topic in configs} == configs
    assert {topic: h.read(topic) for topic in rows} == {topic: (rows[topic], []) for topic in rows}


@fault(
    "log file",
    "the entry that deleted a topic is corrupted, its name was given again, then --repair",
    "the name is the new topic's; the old one stays deleted",
)
def test_a_name_that_was_given_again_behind_a_corrupt_delete() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.append("t", b"of the old one")
    before = len(list(Damaged(h.disk, {}, 0).envelopes()))
    h.do(c.DropTopic("t"))
    h.put("t", FSYNC)
    h.append("t", b"of the new one")
    h.kill()
    d = Damaged(h.disk, {}, h.clock.wall_ms())
    path, envelope = list(d.envelopes())[before]
    d.flip(path, envelope.start + 5)
    assert d.damage()
    assert d.repair().losses == []
    h = d.open()
    assert len(h.engine.shard.state.by_id) == 1
    assert h.read("t") == ([(1, b"of the new one")], [])


@fault(
    "log file",
    "the copy that a recovery made of the log's tail is corrupted, then --repair",
    "the tail itself is still there and is used",
)
def test_the_copy_of_the_tail_is_corrupted() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 2))
    h.append("t", *numbered(3, 1))
    h.kill_and_open()
    h.append("t", *numbered(4, 1))
    h.append("t", *numbered(5, 1))
    h.kill()
    d = Damaged(h.disk, {"t": [(i, numbered(i, 1)[0]) for i in range(1, 6)]}, h.clock.wall_ms())
    newest = max(path for path, _ in d.envelopes())
    first = next(e for p, e in d.envelopes() if p == newest)
    d.flip(newest, first.start + 5)
    assert [finding.path for finding in d.damage()] == [newest, newest]
    assert assert_repaired(d) == {}


def stopped(*, clean: bool, starts: int = 2) -> Damaged:
    """A shard with a topic of each class, stopped several times, so that its log only has what the last start wrote."""
    h = Harness(CONFIG)
    rows = {}
    for topic, config in (("f", FSYNC), ("d", DISK), ("m", MEMORY)):
        h.put(topic, config)
        h.append(topic, *numbered(1, 5))
        rows[topic] = h.rows(topic)
    for _ in range(starts):
        h.restart()
    if clean:
        h.close()
    else:
        h.append("f", *numbered(6, 1))
        rows["f"] = h.rows("f")
        h.checkpoint()
        h.checkpoint()
        h.kill()
    return Damaged(h.disk, rows, h.clock.wall_ms())


@fault(
    "log file",
    "the only entry is corrupted after a clean stop, then --repair",
    "nothing is lost and nothing is announced: the snapshot contains it",
)
@pytest.mark.parametrize("what", ["head", "body", "all", "zeros", "cut"])
def test_the_only_entry_is_corrupted_after_a_clean_stop(what: str) -> None:
    whole = stopped(clean=True)
    ((path, envelope),) = whole.envelopes()
    begin, data = envelope.start - ENVELOPE_BYTES, whole.bytes(path)
    step = length.pick(short=3, long=1)
    places = {
        "head": range(begin, envelope.start, 3 * step),
        "body": range(envelope.start, envelope.end, 17 * step),
    }
    for place in places.get(what, [0]):
        d = whole.copy()
        if what in places:
            d.flip(path, place, place % 8)
        elif what == "all":
            overwrite(
                d.disk, path, data[:begin] + bytes([0xA5]) * (envelope.end - begin) + data[envelope.end :]
            )
        elif what == "zeros":
            overwrite(d.disk, path, data[: begin + 8] + bytes(len(data) - begin - 8))
        else:
            overwrite(d.disk, path, data[: envelope.end - 1])
        repaired = d.repair()
        assert repaired.quarantined and repaired.losses == []
        h = d.open()
        for topic, rows in d.rows.items():
            assert h.read(topic) == (rows, [])
            assert h.append(topic, b"new").first_seq == rows[-1][0] + 1
        h.close()
        assert d.damage() == []


@fault(
    "log file",
    "the only entry is corrupted after a kill, then --repair",
    "what the bytes could hold is announced, or nothing when its head says that the snapshot contains it",
)
def test_the_only_entry_is_corrupted_after_a_kill() -> None:
    whole = stopped(clean=False)
    *_, (path, last) = whole.envelopes()
    others = [p for p, _ in whole.envelopes() if p != path]
    for place in (last.start - ENVELOPE_BYTES + 16, last.end - 1):
        d = whole.copy()
        for other in others:
            lose(d.disk, other)
        data = d.bytes(path)
        # Everything but the last entry is gone, and that one is moved to the front.
        entry = data[last.start - ENVELOPE_BYTES : last.end]
        overwrite(d.disk, path, data[:64] + entry + bytes(len(data) - 64 - len(entry)))
        d.flip(path, place - last.start + ENVELOPE_BYTES + 64)
        repaired = d.repair()
        in_head = place < last.start
        assert all(
            end - first < (2000 if topic == "d" else len(entry) // 46 + 2)
            for topic, first, end in repaired.losses
        )
        assert bool(repaired.losses) == in_head
        assert judge(d.open(), d.rows) == {}


def lights_out(h: Harness) -> None:
    """A power cut: the next start announces seqs of `disk` topics that may be gone."""
    h.power_cut()
    h.open()


@fault(
    "log file",
    "one byte of any entry is corrupted after a stop or a kill, then --repair",
    "what is lost is announced, and not much more than the entry could hold",
)
@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("seed", length.seeds(short=2, long=6))
def test_losses_announced_for_a_corrupt_byte_of_the_log(seed: int, clean: bool) -> None:
    rng = random.Random(seed)
    h = Harness(CONFIG, seed=seed)
    topics = {"f": FSYNC, "d": DISK, "m": MEMORY}
    for topic, config in topics.items():
        h.put(topic, config)
        h.append(topic, *numbered(1, 1))
    h.checkpoint()  # a topic whose creation is lost has another name: see its test
    for _ in range(rng.randint(5, 40)):
        topic = rng.choice("fffdm")
        head = h.state(topic).head_seq
        h.append(topic, *numbered(head + 1, rng.choice([1, 1, 3, 8])))
        if rng.random() < 0.1:
            rng.choice([h.checkpoint, h.restart, h.kill_and_open, lambda: lights_out(h)])()
    h.sync()
    rows = {topic: h.rows(topic) for topic in topics}
    heads = {topic: h.state(topic).head_seq for topic in topics}
    ceilings = {log.name: log.ceiling for log in h.engine.shard.state.by_id.values()}
    h.close() if clean else h.kill()
    whole = Damaged(h.disk, rows, h.clock.wall_ms())
    entries = list(whole.envelopes())
    longest = max(envelope.end - envelope.start for _, envelope in entries)
    for _ in range(length.pick(short=3, long=12)):
        d = whole.copy()
        path, envelope = rng.choice(entries)
        offset = rng.randrange(envelope.start - ENVELOPE_BYTES, envelope.end)
        if not clean and is_last_entry(d, path, offset):
            continue  # see docs/verify.md: nothing confirms it
        bit = rng.randrange(8)
        d.flip(path, offset, bit)
        try:
            gone = assert_repaired(d)
            if clean:
                assert gone == {}
            again = d.open()
            for topic, head in heads.items():
                assert again.state(topic).head_seq > head, "a seq that readers have seen was used again"
                told = [last for _, last, _ in again.gaps(topic)]
                # If the length of an entry is damaged, it may have extended to the end of its file.
                most = head + max(longest, CONFIG.wal_file_bytes) // 46 + 2
                if topic == "d":
                    most = max(most, ceilings[topic] + 1024)
                assert max(told, default=0) <= (head if clean else most)
        except BaseException as error:
            error.add_note(f"bit {bit} of byte {offset} of {path}")
            raise


def test_a_topic_that_takes_copies_may_have_been_told_of_any_loss() -> None:
    """Goal: losses of its source use seqs with only a few bytes in the log, so the number of missing bytes is no
    bound here.
    """
    h = Harness(CONFIG)
    log = SalvagedLog([], holes=[Hole(0, 1, 1, "", 0, 5, "", begins_file=False)])
    rows = [
        TopicRow(number, name, FSYNC, 0, 0, 1, 0, 0, 0, 0, [], 0, [], [], 0, [], [], bytes(8), False)
        for number, name in ((1024, "plain"), (2048, "dest"))
    ]
    rows[1].inflows = [InflowRow(7, "copies", 0, [])]
    said = rewrite_log(h.disk, "layout-1/shard-00", log, rows, base_lsn=0, ts=1, shard=0, shards=1)
    assert said.losses == [("plain", 1, 5), ("dest", 1, SEQS_UNKNOWN)]


def test_a_second_repair_finds_nothing_to_do() -> None:
    d = shard()
    d.flip(next(path for path in d.disk.paths() if path.endswith(".sum")), 50)
    assert d.repair().quarantined
    before = d.everything()
    again = d.repair(run=2)
    assert (again.quarantined, again.losses, again.notes) == ([], [], [])
    assert d.everything() == before


def test_a_log_file_of_another_shard_is_put_aside() -> None:
    d = shard()
    path = next(path for path, _ in d.envelopes())
    data = d.bytes(path)
    _, _, _, number, salt, capacity = FILE_HEADER.unpack_from(data)
    overwrite(d.disk, path, file_header(shard=7, number=number, salt=salt, capacity=capacity) + data[64:])
    assert any("another shard" in finding.what for finding in d.damage())
    d.repair()
    assert d.bytes(f"quarantine/1/{path}")[12] == 7
    h = d.open()
    judge(h, d.rows)


# ---- snapshots


@fault(
    "snapshot",
    "both snapshots are corrupted, then --repair",
    "topics are made again from segments and log; what is gone is announced",
)
def test_both_snapshots_corrupted() -> None:
    d = shard()
    for path in d.disk.paths():
        if path.startswith(f"{META_DIR}/snap-"):
            d.flip(path, 40)
    gone = assert_repaired(d, may_return={2})
    assert gone == {}, "names and small topics are still readable, and records have their own digests"


@fault("snapshot", "both snapshots are missing, then --repair", "records are kept under names that say so")
def test_both_snapshots_are_missing() -> None:
    d = shard()
    for path in d.disk.paths():
        if path.startswith(f"{META_DIR}/snap-"):
            lose(d.disk, path)
    repaired = d.repair()
    assert any("its real name was in the lost snapshots" in note for note in repaired.notes)
    h = d.open()
    found = {name: dict(h.rows(name)) for name in h.engine.shard.state.published}
    for topic in ("sealed", "plain", "tail"):
        wanted = dict(d.rows[topic])
        assert any(wanted.items() <= rows.items() for rows in found.values()), topic
    h.close()
    assert d.damage() == []


def test_no_snapshot_and_the_whole_log_is_an_ordinary_start() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 6))
    h.checkpoint()
    h.append("t", *numbered(7, 1))
    h.kill()
    d = Damaged(h.disk, {"t": [(i, numbered(i, 1)[0]) for i in range(1, 8)]}, h.clock.wall_ms())
    d.flip(h.snapshots()[0], 50)
    assert assert_repaired(d) == {}


# ---- segments


@fault(
    "segment",
    "the deletion marks are missing, then --repair",
    "it opens; the report says which deletes are undone",
)
def test_missing_marks_are_reported() -> None:
    d = shard()
    path = next(path for path in d.disk.paths() if path.endswith(".del"))
    lose(d.disk, path)
    repaired = d.repair()
    assert any("have reappeared" in note and "sealed" in note for note in repaired.notes)
    assert d.open().seqs("sealed")[:3] == [1, 2, 3]


@fault(
    "segment",
    "several records of one segment are corrupted, then --repair",
    "each is announced, the others are kept with tags and nodes",
)
def test_several_corrupt_records() -> None:
    d = shard()
    path = next(path for path in d.disk.paths() if path.endswith("400/seg-0000000000000005-0.data"))
    data = d.bytes(path)
    for seq in (5, 7):
        d.flip(path, data.find(numbered(seq, 1)[0]))
    assert assert_repaired(d) == {"sealed": [5, 7]}
    h = d.open()
    page = h.diff("sealed", 5, limit=3)
    assert page.tags is not None and page.tags[0] == b"us"


# ---- erase intents


@fault(
    "segment",
    "an erase intent is corrupted, then --repair",
    "it is put aside, and the report says what that means",
)
def test_a_corrupt_intent() -> None:
    d = shard()
    overwrite(d.disk, f"{META_DIR}/intent-0000000000000001", b"not an intent at all")
    assert [finding.path for finding in d.damage()] == [f"{META_DIR}/intent-0000000000000001"]
    assert assert_repaired(d) == {}


# ---- crashes


@fault(
    "verify",
    "the power goes inside a repair",
    "the next run finishes it or starts over; nothing is lost by it",
)
@pytest.mark.parametrize("share", [i / 12 for i in range(0, 13, length.pick(short=3, long=1))])
def test_a_crash_inside_a_repair(share: float) -> None:
    whole, writes, total = twice_damaged()
    d = whole.copy()
    originals = d.everything()
    d.disk.calls = 0
    d.disk.crash_at(writes + int((total - writes - 1) * share) + 1, midway=True)
    with pytest.raises(SimulatedCrash):
        d.repair()
    d.disk.crash()
    gone = assert_repaired_after_crash(d)
    assert gone == {"sealed": [1], "tail": [4]}
    kept = d.everything().values()
    assert all(data in kept for data in originals.values()), "a byte of the old files was deleted"


@cache
def twice_damaged() -> tuple[Damaged, int, int]:
    """A damaged record and a damaged entry; how many calls a repair makes before its first change, and in total."""
    d = shard()
    d.flip(next(path for path in d.disk.paths() if path.endswith("400/seg-0000000000000001-0.data")), 60)
    base_lsn = d.verify().base_lsn
    path, envelope = [(p, e) for p, e in d.envelopes() if e.lsn > base_lsn][3]
    d.flip(path, envelope.start + 4)
    trial = d.copy()
    writes = _first_write(trial)
    return d, writes, trial.disk.calls


def _first_write(trial: Damaged) -> int:
    """How many calls a repair makes before its first change, and (in `calls`) in total."""
    trial.disk.calls = 0
    trial.disk.trace = []
    trial.repair()
    return next(i for i, line in enumerate(trial.disk.trace) if line.startswith(("write", "make_dir")))


def assert_repaired_after_crash(d: Damaged) -> dict[str, list[int]]:
    d.repair(run=2)
    h = d.open()
    assert h.engine.shard.state.read_only is None
    gone = judge(h, d.rows)
    h.kill()
    assert d.damage() == []
    return gone
