"""Goal: after a change of the number of shards, all records, floors, tombstones, leases, consumers, keys and rules
are the same.

Method: a data directory with data of every kind (tests/support/reshard_rig.py) on the simulated disk. A picture of
everything visible is taken before a change and after it, and the two must be equal: after a successful change, after
power cuts and kills at every disk call of one, whatever number the next start has, and after errors at every call.
"""

from __future__ import annotations

import copy
import errno
import re
from functools import cache

import msgspec
import pytest

from tests.sim.processes import calm
from tests.support import length
from tests.support.engine_harness import FSYNC, file_bytes, lose, numbered, overwrite
from tests.support.faults import fault
from tests.support.reshard_rig import CONFIG, NODE, RIDING, Fleet, Picture, fill, same
from tests.support.sim_disk import SimDisk, SimulatedCrash
from topics.api.config import EngineConfig
from topics.api.errors import TopicsError
from topics.engine.commands import consumers as k
from topics.engine.commands import forwards as f
from topics.engine.commands import topics as c
from topics.engine.core.placement import shard_of
from topics.engine.core.topic_ids import ID_STEP, OwnedIds, first_id_after, pack_ids
from topics.engine.storage.layout import LAYOUT_NAME, Layout, generation_of, stale_layouts
from topics.engine.tools.repair import repair_shard
from topics.engine.tools.reshard import CannotReshard, clear_stale

SHARES = 4
LOOKS = ("read", "size", "close", "exists", "list", "boot_id", "random_u64")


@cache
def filled(config: EngineConfig, how: str) -> tuple[SimDisk, Picture]:
    """A disk with two shards, after a stop or a kill, and what a start finds there. Read-only: copy it."""
    fleet = Fleet(2, config=config)
    fill(fleet)
    fleet.close()
    fleet.open()
    picture = fleet.picture()
    if how == "stopped":
        fleet.close()
    else:
        fleet.sync()
        fleet.kill()
    return fleet.disk, picture


def fleet_of(config: EngineConfig = CONFIG, how: str = "killed") -> tuple[Fleet, Picture]:
    disk, before = filled(config, how)
    fleet = Fleet(2, config=config, disk=copy.deepcopy(disk))
    fleet.clock.advance(3_200)
    return fleet, before


# -- everything is there -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "how"), [(CONFIG, "killed"), (RIDING, "stopped")], ids=["files", "riding"]
)
def test_any_number_after_any_other(config: EngineConfig, how: str) -> None:
    fleet, before = fleet_of(config, how)
    for shards in (5, 1, 3, 7):
        fleet.reshard(shards)
        assert fleet.layout.shards == shards
        assert fleet.disk.list("") == [fleet.layout.directory, LAYOUT_NAME, "topics"]
        assert fleet.verify() == []
        fleet.open()
        same(before, fleet.picture())
        fleet.close()


def test_segments_do_not_move() -> None:
    fleet, _ = fleet_of(how="stopped")
    before = {path: file_bytes(fleet.disk, path) for path in fleet.disk.paths() if path.startswith("topics/")}
    fleet.reshard(5)
    after = {path: file_bytes(fleet.disk, path) for path in fleet.disk.paths() if path.startswith("topics/")}
    assert after == before


def test_progress_is_told_and_only_grows() -> None:
    fleet, _ = fleet_of()
    told: list[tuple[str, float]] = []
    work = fleet.reshard(3, told.append)
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert {"switching", "recovering shard 1"} <= {what for what, _ in told}
    assert work.topics == 20 and work.records > 50 and not work.left


def test_an_empty_directory_changes_too() -> None:
    fleet = Fleet(3)
    fleet.close()
    fleet.reshard(2)
    fleet.open()
    assert fleet.logs() == {}
    fleet.put("t", FSYNC)
    fleet.close()
    fleet.reshard(1)
    fleet.open()
    assert list(fleet.logs()) == ["t"]


def test_writes_after_resharding_are_durable() -> None:
    fleet, _ = fleet_of()
    for shards in (3, 1, 4):
        fleet.reshard(shards)
        fleet.open()
        topic = f"new-{shards}"
        fleet.put(topic, FSYNC)
        fleet.append(topic, *numbered(1, 20))
        fleet.append("t0", b'"more"')
        fleet.checkpoint()
        fleet.append("t0", b'"and more"')
        fleet.power_cut()
        fleet.open()
        assert [payload for _, _, payload, _, _ in fleet.picture()["topics"]["t0"]["rows"][-2:]] == [
            b'"more"',
            b'"and more"',
        ]
        assert fleet.owner(topic).seqs(topic) == list(range(1, 21))
        fleet.kill()


def test_epochs_stay_and_new_topics_have_others() -> None:
    fleet, _ = fleet_of(how="killed")
    fleet.open()  # for some, their progress is unknown
    before = {name: log.epoch for name, log in fleet.logs().items()}
    assert any(log.epochs for log in fleet.logs().values())
    fleet.close()
    for shards in (5, 1, 3):
        fleet.reshard(shards)
        fleet.open()
        assert {name: log.epoch for name, log in fleet.logs().items() if name in before} == before
        fleet.put(f"new-{shards}", FSYNC)
        epochs = [log.epoch for log in fleet.logs().values()]
        assert len(set(epochs)) == len(epochs)
        fleet.close()


def test_keys_are_remembered() -> None:
    fleet, _ = fleet_of()
    fleet.reshard(5)
    fleet.open()
    again = fleet.append("t0", *numbered(1, 6), key=b"first")
    assert (again.first_seq, again.deduped) == (1, True)


# -- ids -------------------------------------------------------------------------------------------------------


def test_ids_are_never_given_again() -> None:
    """Ids of topics that were deleted on shards that no longer exist are not reused either."""
    fleet = Fleet(4)
    seen: set[int] = set()
    for round_, shards in enumerate((1, 5, 2, 3)):
        for i in range(12):
            name = f"{round_}.{i}"
            fleet.put(name, FSYNC)
            topic_id = fleet.logs()[name].id
            assert topic_id not in seen
            seen.add(topic_id)
            if i % 3:
                fleet.do(c.DropTopic(name))
        fleet.close()
        fleet.reshard(shards)
        fleet.open()


def test_directories_of_topics_that_came_from_elsewhere_are_nobody_elses() -> None:
    """A start removes directories of topics that it knows to be deleted. It must know to which shard they belong."""
    fleet = Fleet(2)
    for i in range(8):
        fleet.put(f"t{i}", FSYNC)
        fleet.append(f"t{i}", *numbered(1, 9))
    fleet.checkpoint()
    fleet.close()
    for shards in (3, 2, 1):
        fleet.reshard(shards)
        for _ in range(2):
            fleet.open()
            assert all(len(fleet.owner(f"t{i}").seqs(f"t{i}")) == 9 for i in range(8))
            fleet.close()
    fleet.reshard(3)
    fleet.open()
    gone = fleet.logs()["t3"].id
    fleet.do(c.DropTopic("t3"))
    fleet.checkpoint()  # the snapshot does not know it any more
    fleet.close()
    # As if a power cut had undone the removal.
    overwrite(fleet.disk, f"topics/{gone:016x}/seg-0000000000000001-0.data", b"left")
    fleet.open()
    assert not fleet.disk.exists(f"topics/{gone:016x}")
    assert len(fleet.disk.list("topics")) == 7


def test_ids_of_a_shard() -> None:
    assert 2049 in OwnedIds(1) and 2048 not in OwnedIds(1)
    later = OwnedIds(1, 4096, pack_ids([7, 2048, 3073]))
    assert [id_ for id_ in (7, 2048, 2049, 3072, 3073, 4096, 4097, 5121) if id_ in later] == [
        7,
        2048,
        3073,
        4097,
        5121,
    ]
    assert OwnedIds(1, 4096, later.packed).packed == later.packed
    assert first_id_after([]) == ID_STEP
    assert first_id_after([1024, 5]) == 2048 == first_id_after([2047])


# -- queues, dead letters, rules ---------------------------------------------------------------------------------


def test_leases_hold_and_settle() -> None:
    fleet, before = fleet_of()
    fleet.reshard(3)
    fleet.open()
    held = [
        entry
        for entry in before["topics"]["q"]["consumers"][""].entries
        if entry[3] == NODE and entry[1] == 1
    ]
    assert held, before["topics"]["q"]["consumers"]
    assert not set(fleet.claim("q", 9).page.seqs) & {seq for seq, *_ in held}
    settled = fleet.do(k.Settle("q", "ack", NODE, [held[0][0]], lease_ids=[held[0][4]]))
    assert settled.count == 1


@pytest.mark.parametrize("taken", [False, True], ids=["not there yet", "there, and the source has not heard"])
def test_a_letter_that_moves_arrives_once(taken: bool) -> None:
    fleet, _ = fleet_of()
    fleet.open()
    if taken:
        fleet.take_letters(fleet.letters("q"))
    fleet.kill()
    for shards in (5, 1, 2):
        fleet.reshard(shards)
    fleet.open()
    fleet.ship("q")
    fleet.ship("q")
    assert len(fleet.owner("dead").seqs("dead")) == 1
    assert 3 not in fleet.owner("q").seqs("q")
    fleet.kill()
    fleet.reshard(4)
    fleet.open()
    assert fleet.ship("q") == 0
    assert len(fleet.owner("dead").seqs("dead")) == 1


def test_copies_go_on_where_they_were() -> None:
    fleet, _ = fleet_of()
    for shards in (3, 1, 4):
        fleet.reshard(shards)
        fleet.open()
        fleet.kill()
    fleet.open()
    assert fleet.copy(1, "t0") == 1  # three were written, two were copied before
    for i in range(4):
        assert fleet.copy(2, f"p.{i}") == 1
        assert fleet.copy(2, f"p.{i}") == 0
    assert len(fleet.owner("many").seqs("many")) == 12
    fleet.put("p.new", FSYNC)
    fleet.append("p.new", *numbered(1, 3))
    assert fleet.copy(2, "p.new") == 3, "a topic that is made later must be copied from its first record"


def test_a_rule_that_is_being_made_copies_nothing_from_before() -> None:
    """Shard 0 knows of it, shard 1 does not: topics there must not be copied from their beginning."""
    fleet, _ = fleet_of()
    fleet.reshard(3)
    fleet.open()
    assert all(3 in open_shard.engine.shard.forwards.outflows for open_shard in fleet.open_shards)
    rule = fleet.open_shards[0].engine.shard.forwards.catalog[3]
    assert rule.state == "making"
    for open_shard in fleet.open_shards:  # the catalog continues with it
        open_shard.do(f.OpenOutflow(rule))
    there = Fleet(2, disk=copy.deepcopy(filled(CONFIG, "killed")[0]))
    there.open()
    late = [name for name in (f"p.{i}" for i in range(4)) if shard_of(name, 2) == 1]
    assert late
    for name in late:
        assert fleet.copy(3, name) == 0
        fleet.append(name, b'"new"')
        assert fleet.copy(3, name) == 1


def test_rules_are_at_shard_0_alone() -> None:
    fleet, before = fleet_of()
    fleet.reshard(4)
    fleet.open()
    assert [sorted(open_shard.engine.shard.forwards.catalog) for open_shard in fleet.open_shards] == [
        [1, 2, 3],
        [],
        [],
        [],
    ]
    literal = [
        open_shard.config.shard
        for open_shard in fleet.open_shards
        if 1 in open_shard.engine.shard.forwards.outflows
    ]
    assert literal == [shard_of("t0", 4)]
    assert before["last uid"] == 3


# -- time ----------------------------------------------------------------------------------------------------------


def test_time_goes_on_from_the_latest_shard() -> None:
    """One shard's clock may be ahead of another's, because the wall clock was set back between their starts."""
    fleet = Fleet(2)
    fleet.put("a", FSYNC)
    fleet.close()
    fleet.clock.jump_wall(60_000)
    layout = fleet.layout
    fleet.open()
    ahead = fleet.open_shards[1]
    assert ahead.config.shard_dir == layout.shard_dir(1)
    late = ahead.engine.clock.now_ms
    fleet.close()
    fleet.clock.jump_wall(-60_000)
    fleet.reshard(3)
    fleet.open()
    for open_shard in fleet.open_shards:
        assert open_shard.engine.clock.now_ms >= late


# -- crashes ---------------------------------------------------------------------------------------------------


def calls_of(config: EngineConfig, shards: int) -> list[str]:
    fleet, _ = fleet_of(config)
    fleet.disk.trace = []
    fleet.reshard(shards)
    return list(fleet.disk.trace)


@cache
def changes(config: EngineConfig, shards: int) -> list[int]:
    """Numbers of the calls of a change that may change the disk."""
    trace = calls_of(config, shards)
    names = [call.split(" ") for call in trace]
    return [
        number
        for number, (name, *arguments) in enumerate(names, 1)
        if name not in LOOKS and (name != "open" or arguments[-1] == "True")
    ]


@fault(
    "layout",
    "the power fails or the process is killed at any disk call of a change of the number of shards",
    "the next start goes by the old or the new layout, with this number, the old one or another; nothing is missing or there twice",
)
@pytest.mark.parametrize("how", ["power", "kill"])
@pytest.mark.parametrize("shards", [1, 3], ids=["shrinking", "growing"])
@pytest.mark.parametrize("share", range(SHARES))
def test_crash_at_every_call(share: int, shards: int, how: str) -> None:
    config = (CONFIG, RIDING)[shards == 3]
    some = length.pick(short=32, long=1)
    shift = (length.turn(some) + (how == "kill") * (some // 2)) % some  # other calls for each of the two
    first = share + SHARES * shift
    for i, number in list(enumerate(changes(config, shards)))[first :: SHARES * some]:
        fleet, before = fleet_of(config)
        fleet.disk.crash_at(number, midway=bool(number % 2))
        with pytest.raises(SimulatedCrash):
            fleet.reshard(shards)
        fleet.die(how)
        wanted = (shards, 2, 4)[(i // SHARES // some) % 3]
        try:
            assert fleet.layout.shards in (2, shards)
            fleet.start(wanted)
            assert fleet.layout.shards == wanted
            assert stale_layouts(fleet.disk.list(""), fleet.layout.generation) == []
            same(before, fleet.picture(), power=how == "power")
            if i % 5 == 0:
                fleet.close()
                assert fleet.verify() == []
        except Exception as problem:
            raise AssertionError(f"{how} at call {number}, then {wanted} shards: {problem!r}") from problem


def test_a_crash_while_a_crash_is_cleared_up() -> None:
    """Crash again and again, each time a little later, until one attempt succeeds."""
    fleet, before = fleet_of()
    for attempt in range(1, 100):
        fleet.disk.crash_at(29 * attempt, midway=bool(attempt % 2))
        try:
            fleet.start((3, 1)[attempt % 2])
            calm(fleet.disk)
            break
        except SimulatedCrash:
            fleet.die(("power", "kill")[attempt // 2 % 2])
    else:
        raise AssertionError("it never succeeded")
    same(before, fleet.picture(), power=True)


@fault(
    "layout",
    "any disk call of a change of the number of shards fails with EIO or ENOSPC",
    "refused, or done; a start with the old number finds everything",
)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("share", range(SHARES))
def test_failure_of_every_call(share: int, error: int) -> None:
    some = length.pick(short=32, long=1)
    numbers = changes(CONFIG, 3) if error == errno.ENOSPC else range(1, len(calls_of(CONFIG, 3)) + 1)
    for number in list(numbers)[share + SHARES * length.turn(some) :: SHARES * some]:
        fleet, before = fleet_of()
        fleet.disk.fail_at(number, error)
        failed = False
        try:
            fleet.reshard(3)
        except (OSError, TopicsError):
            failed = True
        try:
            assert fleet.layout.shards == 3 or failed
            fleet.die("kill" if number % 3 else "power")
            fleet.start(2)
            same(before, fleet.picture(), power=True)
        except Exception as problem:
            raise AssertionError(f"call {number} fails with {error}: {problem!r}") from problem


@fault(
    "layout",
    "the disk is full before the new layout is written, or while it is",
    "refused; the old layout is untouched, and what was written of the new one is removed",
)
def test_a_full_disk() -> None:
    fleet, before = fleet_of(how="stopped")
    used = sum(len(file_bytes(fleet.disk, path)) for path in fleet.disk.paths())
    refused = 0
    for share in range(60, 200, 2):
        fleet, before = fleet_of(how="stopped")
        fleet.disk.capacity_bytes = used * share // 100
        try:
            fleet.reshard(5)
        except (OSError, TopicsError) as problem:
            assert not isinstance(problem, OSError) or problem.errno == errno.ENOSPC
            refused += 1
            assert fleet.disk.list("") == ["layout-1", LAYOUT_NAME, "topics"], (
                "the removed files must not use space"
            )
            fleet.disk.kill()
            fleet.disk.capacity_bytes = None
            fleet.start(2)
            same(before, fleet.picture())
        else:
            break
    assert refused > 10


# -- refusals ----------------------------------------------------------------------------------------------------


@fault(
    "layout",
    "a shard is damaged, and the configuration asks for another number of shards",
    "refused with a word about `topics verify --repair`; the old layout is untouched",
)
@pytest.mark.parametrize("what", ["the log", "both snapshots", "a log file"])
def test_a_damaged_shard_is_refused(what: str) -> None:
    fleet = Fleet(2)
    for i in range(6):
        fleet.put(f"t{i}", FSYNC)
        for _ in range(20):
            fleet.append(f"t{i}", *numbered(1, 4))
        fleet.checkpoint()
    for i in range(6):
        fleet.append(f"t{i}", *numbered(1, 4))
        fleet.append(f"t{i}", *numbered(1, 4))
    fleet.kill()
    disk = fleet.disk
    wal = [path for path in disk.paths() if path.startswith("layout-1/shard-01/wal/")]
    if what == "the log":
        used = [path for path in wal if b"record" in file_bytes(disk, path)][-1]
        places = [match.start() for match in re.finditer(b"record", file_bytes(disk, used))]
        disk.flip_bit(used, places[-6])  # in the entry before the last one
    elif what == "both snapshots":
        for path in [path for path in disk.paths() if path.startswith("layout-1/shard-01/meta/snap-")]:
            disk.flip_bit(path, 40)
    else:
        disk.remove(wal[0])
        disk.remove(wal[-1])
    before = {path: file_bytes(disk, path) for path in disk.paths() if "shard-01" in path}
    with pytest.raises(CannotReshard, match=r"shard 1 is damaged: .*; run `topics verify --repair` first"):
        fleet.reshard(3)
    assert {path: file_bytes(disk, path) for path in disk.paths() if "shard-01" in path} == before
    assert fleet.layout == Layout.of(1, 2)
    assert not disk.exists("layout-2")


@fault(
    "layout",
    "layout.json is an old copy: what it names is gone, and a later layout is there",
    "refused; nothing is removed",
)
def test_an_old_copy_of_the_layout_removes_nothing() -> None:
    fleet, _ = fleet_of()
    old = file_bytes(fleet.disk, LAYOUT_NAME)
    fleet.reshard(3)
    overwrite(fleet.disk, LAYOUT_NAME, old)
    before = fleet.disk.paths()
    with pytest.raises(CannotReshard, match="an old copy"):
        clear_stale(fleet.disk, fleet.layout)
    assert fleet.disk.paths() == before


def test_both_snapshots_lost_is_no_empty_shard() -> None:
    """A new shard's log does not begin with number 1: a start without snapshots must not take it for everything."""
    fleet, _ = fleet_of()
    fleet.reshard(2)
    layout = fleet.layout
    for path in fleet.disk.paths():
        if path.startswith(f"{layout.shard_dir(1)}/meta/"):
            fleet.disk.flip_bit(path, 30)
    with pytest.raises(TopicsError, match="are missing"):
        fleet.open()


def test_a_repair_without_snapshots_gives_no_id_that_counts_as_dropped() -> None:
    """Shard 0 owned topics without an owner when the number was changed: no new topic may be taken for one of those."""
    fleet, _ = fleet_of()
    fleet.reshard(2)
    config = msgspec.structs.replace(fleet.config, shard=1, shard_dir=fleet.layout.shard_dir(1))
    for path in fleet.disk.paths():
        if path.startswith(f"{config.shard_dir}/meta/snap-"):
            lose(fleet.disk, path)
    for _ in repair_shard(fleet.disk, fleet.clock, config, 2, 1):
        pass
    fleet.open()
    name = next(f"new{i}" for i in range(100) if shard_of(f"new{i}", 2) == 1)
    fleet.put(name, FSYNC)
    made = fleet.logs()[name].id
    assert made not in fleet.open_shards[0].engine.shard.state.owned_ids
    assert made in fleet.open_shards[1].engine.shard.state.owned_ids


def test_one_snapshot_may_be_corrupted_at_once() -> None:
    fleet, before = fleet_of()
    fleet.reshard(3)
    for shard in range(3):
        fleet.disk.flip_bit(f"{fleet.layout.shard_dir(shard)}/meta/snap-{2:016x}", 50)
    fleet.open()
    same(before, fleet.picture())


# -- names -------------------------------------------------------------------------------------------------------


def test_names_of_layouts() -> None:
    names = ["LOCK", "layout-1", "layout-10", "layout-2", "layout-02", "layout-x", "layout-", "layout.json"]
    assert stale_layouts(names, 2) == ["layout-1", "layout-10"]
    assert generation_of("layout-10") == 10 and generation_of("layout-0") is None
    assert Layout.of(1, 4).format == 1 and Layout.of(2, 4).format == 2


def test_the_rig_itself_sees_a_difference() -> None:
    fleet, before = fleet_of()
    fleet.open()
    fleet.append("t0", b'"one more"')
    with pytest.raises(AssertionError):
        same(before, fleet.picture())
