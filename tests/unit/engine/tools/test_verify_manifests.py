"""`topics verify`, `topics inspect` and `topics du` support manifests, pins, plans and the leftovers of a merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine_harness import Harness
from tests.support.merge_rig import begun, keys, merged, plan, work
from tests.support.sim_clock import SimClock
from tests.support.stores import ObjectStore
from topics.cli import inspect_file
from topics.cli.disk_usage import disk_usage
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.storage.layout import Layout, encode_layout
from topics.engine.storage.sealing import drain
from topics.engine.storage.tiered import TieredDisk
from topics.engine.tools.inspect.files import inspect
from topics.engine.tools.repair import repair_shard
from topics.engine.tools.verify import ShardFiles, verify_shard
from topics.system.read_only_disk import ReadOnlyDisk


def with_merges() -> tuple[Harness, ObjectStore]:
    """A merged topic with dead rows, a pin, and a plan for later segments."""
    store = ObjectStore()
    h = begun(store)
    merged(h)
    h.do(c.Delete("t", seqs=[6]))
    h.do(mrg.PinSnapshot("t"))
    for _ in range(3):
        h.append("t", *[b'"more"'] * 4)
        h.checkpoint()
    work(h, plan(h))
    return h, store


def verify(h: Harness, store: ObjectStore) -> ShardFiles:
    return drain(verify_shard(TieredDisk(h.disk, store), SimClock(), h.config, 1, store))


@pytest.mark.parametrize("how", ["stop", "kill", "kill right after"])
def test_a_merged_topic_is_sound(how: str) -> None:
    h, store = with_merges()
    if how == "kill right after":
        h = begun(store := ObjectStore())
        merged(h)
    rows = h.rows("t")
    h.close() if how == "stop" else h.kill()
    found = verify(h, store)
    assert [finding for finding in found.findings if finding.kind != "torn"] == []
    assert found.records == len(rows)


@pytest.mark.parametrize("name", ["MANIFEST", "DEAD", "CURRENT", "PIN"])
def test_a_damaged_manifest_is_told_of_and_is_no_damage(name: str) -> None:
    h, store = with_merges()
    h.close()
    key = sorted(key for key in keys(h) if key.rpartition("/")[2].startswith(name))[-1]
    store.objects[key] = store.objects[key][:-3]
    found = verify(h, store)
    assert {finding.kind for finding in found.findings} == {"extra"}
    assert key in {finding.path for finding in found.findings}
    assert found.damage == []


def test_a_corrupt_output_is_repaired_like_any_segment() -> None:
    h, store = with_merges()
    h.close()
    key = f"topics/{1024:016x}/seg-{1:016x}-1.data"
    store.rot(key, store.objects[key].index(b"record 9"))
    assert {finding.path for finding in verify(h, store).damage} == {key}
    done = drain(repair_shard(TieredDisk(h.disk, store), SimClock(), h.config, 1, 1, store))
    assert done.after is not None
    assert done.after.damage == []
    h.open()
    assert 9 not in h.seqs("t")
    assert {1, 8, 10, 16} <= set(h.seqs("t"))


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(inspect_file, "SETTLE_S", 0)
    _, store = with_merges()
    for key, content in store.objects.items():
        path = tmp_path / "cold" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "cold"


def test_inspect_tells_what_they_say(cold: Path) -> None:
    told = {}
    for path in sorted(path for path in cold.rglob("*") if path.is_file()):
        if path.name.startswith(("MANIFEST", "DEAD", "CURRENT", "PIN", "plan.json")):
            found = inspect(ReadOnlyDisk(), str(path))
            assert found.sound, (path, found.problems)
            told[found.kind] = found
            broken = path.with_name(path.name)
            broken.write_bytes(path.read_bytes()[:-4])
            assert not inspect(ReadOnlyDisk(), str(broken)).sound
    assert set(told) == {"manifest", "dead-rows", "current", "pin", "plan"}
    assert told["manifest"].facts["topic"] == "t"
    assert told["dead-rows"].facts["dead_rows"] == 1
    assert told["plan"].facts["groups"] == 1


def test_du_counts_them(cold: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "layout.json").write_bytes(encode_layout(Layout.of(1, 1)))
    for root in (data, cold):
        (root / "cold-id").write_text("0" * 32)
    kinds = {kind.kind: kind for kind in disk_usage(str(data), str(cold)).kinds}
    assert kinds["manifests"].files >= 5
    assert kinds["staging"].files >= 5, "outputs of jobs for a plan"
    assert (
        kinds["other"].bytes
        == sum((root / "cold-id").stat().st_size for root in (data, cold))
        + (data / "layout.json").stat().st_size
    )
