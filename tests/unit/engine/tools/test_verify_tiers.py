"""Goal: `verify` and `--repair` treat both tiers as one, and do not take an unavailable cold tier for a lost one.

Method: a shard with two cold segments, damaged in one place; the tool reads a disk that shows both tiers, and the
result is opened by an engine with the same store.
"""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness, file_bytes
from tests.support.faults import fault
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from tests.support.stores import ObjectStore
from tests.support.tiered_engine import records, relocated
from topics.engine.commands import topics as c
from topics.engine.storage.sealing import drain
from topics.engine.storage.segment_store import DiskSegmentStore
from topics.engine.storage.tiered import TieredDisk
from topics.engine.tools.repair import CannotRepair, Repaired, repair_shard
from topics.engine.tools.verify import ShardFiles, verify_shard

FIRST = "topics/0000000000000400/seg-0000000000000001-0"


def stopped() -> tuple[Harness, ObjectStore]:
    store = ObjectStore()
    h = relocated(store)
    h.close()
    return h, store


def verify(h: Harness, store: ObjectStore | None) -> ShardFiles:
    disk = TieredDisk(h.disk, store) if store is not None else h.disk
    return drain(verify_shard(disk, SimClock(), h.config, 1, store))  # type: ignore[arg-type]


def repair(h: Harness, store: ObjectStore | None) -> Repaired:
    disk = TieredDisk(h.disk, store) if store is not None else h.disk
    return drain(repair_shard(disk, SimClock(), h.config, 1, 1, store))  # type: ignore[arg-type]


def test_both_tiers_are_sound() -> None:
    h, store = stopped()
    before = dict(store.objects), {path: file_bytes(h.disk, path) for path in h.disk.paths()}
    found = verify(h, store)
    assert found.findings == []
    assert (found.topics, found.records) == (1, 14)
    assert (dict(store.objects), {path: file_bytes(h.disk, path) for path in h.disk.paths()}) == before


def test_a_cold_tier_that_is_not_named_is_not_taken_for_lost() -> None:
    h, store = stopped()
    found = verify(h, None)
    assert [finding.kind for finding in found.findings] == ["unsupported", "unsupported"]
    assert "--cold-dir" in found.findings[0].what
    with pytest.raises(CannotRepair, match="--cold-dir"):
        repair(h, None)
    assert verify(h, store).findings == []


def test_a_corrupt_cold_record_is_found_and_repaired() -> None:
    h, store = stopped()
    store.rot(f"{FIRST}.data", store.objects[f"{FIRST}.data"].index(b"record 2"))
    damaged = store.objects[f"{FIRST}.data"]
    found = verify(h, store)
    assert {(finding.kind, finding.path) for finding in found.findings} == {("damage", f"{FIRST}.data")}
    assert (2, 2) in {(finding.first_seq, finding.last_seq) for finding in found.findings}
    done = repair(h, store)
    assert done.losses == [("t", 2, 2)]
    assert file_bytes(h.disk, f"quarantine/1/cold/{FIRST}.data") == damaged
    assert verify(h, store).damage == []
    h.open()
    assert h.read("t") == (records(1, *range(3, 15)), [(2, 2, "corrupt")])
    h.rest()
    for _ in range(3):
        h.append("t", b'"x"')
        h.checkpoint()
    assert not any(key.startswith(f"{FIRST}.") for key in store.objects), "it is not referenced any more"
    assert h.rows("t")[:13] == records(1, *range(3, 15))


@fault(
    "disk",
    "the cold tier is lost for good, and the shard is repaired without it",
    "its records are announced as lost; all others are served",
)
def test_a_lost_cold_tier_becomes_announced_losses() -> None:
    h, store = stopped()
    store.objects.clear()
    assert verify(h, store).damage
    done = repair(h, store)
    assert done.losses == [("t", 1, 4), ("t", 5, 8)]
    h.open()
    assert h.read("t") == (records(*range(9, 15)), [(1, 8, "corrupt")])


def test_a_damaged_index_of_a_cold_segment_is_made_again() -> None:
    h, store = stopped()
    h.disk.flip_bit(f"{FIRST}.idx", 40)
    assert {finding.path for finding in verify(h, store).damage} == {f"{FIRST}.idx"}
    assert repair(h, store).losses == []
    h.open()
    assert h.rows("t") == records(*range(1, 15))


def test_an_erase_in_the_cold_tier_leaves_it_sound() -> None:
    store = ObjectStore()
    h = relocated(store)
    h.do(c.Delete("t", seqs=[2], erase=True))
    h.close()
    assert verify(h, store).findings == []


def test_a_copy_that_differs_is_told() -> None:
    h, store = stopped()
    store.rot(f"{FIRST}.idx", 40)
    (finding,) = verify(h, store).findings
    assert (finding.kind, finding.path) == ("extra", f"{FIRST}.idx")


def test_the_disk_that_shows_both_tiers() -> None:
    far = SimDisk(2)
    store = DiskSegmentStore(far)
    store.put("topics/00aa/seg-0000000000000001-0.data", [b"cold"])
    store.put("topics/00aa/seg-0000000000000001-0.idx", [b"index"])
    hot = SimDisk(1)
    hot.make_dir("topics/00aa")
    hot.close(hot.open("topics/00aa/seg-0000000000000005-0.data", create=True))
    disk = TieredDisk(hot, store)
    assert disk.list("topics") == ["00aa"]
    assert disk.list("topics/00aa") == ["seg-0000000000000001-0.data", "seg-0000000000000005-0.data"]
    handle = disk.open("topics/00aa/seg-0000000000000001-0.data")
    assert (disk.size(handle), disk.read(handle, 1, 9)) == (4, b"old")
    with pytest.raises(OSError, match="read-only"):
        disk.write(handle, 0, b"x")
    disk.close(handle)
    assert not disk.exists("topics/00aa/seg-0000000000000001-0.idx")
    assert disk.exists("topics/00aa")
