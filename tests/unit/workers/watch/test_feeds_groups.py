"""Goal: each record of a group goes to one member, in order, and none is delivered again that a member may have seen.

Method: one shard on a simulated disk and clock; the test sends the messages of fronts.
"""

from __future__ import annotations

import errno
import functools
import operator

import pytest

from tests.support import length
from tests.support.faults import fault
from tests.support.shard_rig import error_of
from tests.support.sim_disk import SimDisk
from tests.support.watch_rig import FeedRig
from topics.link import wire
from topics.link.watch import SESSION_TTL_MS, FeedOptions
from workers.watch import feeds
from workers.watch.feeds import REJOIN_MS
from workers.watch.service import SAVE_MS

Key = tuple[bytes, int]
ONE = FeedOptions(limit=1)


def rig_with(count: int = 0) -> FeedRig:
    rig = FeedRig()
    rig.put()
    if count:
        rig.write(count)
    return rig


def join(rig: FeedRig, **options: object) -> Key:
    return rig.follow("t", **{"group": "g", **options})  # type: ignore[arg-type]


def given(rig: FeedRig, *keys: Key) -> list[list[int]]:
    return [[seq for page in rig.pages(key) for seq in page.seqs] for key in keys]


def cursors(rig: FeedRig) -> dict[str, int]:
    return {group.name: group.cursor for group in rig.core.watch.feeds._groups.values()}


# ---- assignment


def test_a_new_group_begins_where_its_first_member_says() -> None:
    rig = rig_with(5)
    first = join(rig, from_seq=2)
    second = join(rig, from_seq=0)
    assert given(rig, first, second) == [[3, 4, 5], []]
    assert [page.status for page in rig.pages(second)] == [200]


def test_a_member_ahead_of_the_topic_begins_at_its_end() -> None:
    rig = rig_with(2)
    key = join(rig, from_seq=100)
    rig.write()
    assert given(rig, key) == [[3]]


def test_pages_go_round_among_members() -> None:
    rig = rig_with()
    keys = [join(rig, peer=b"front-%d" % i) for i in range(3)]
    for _ in range(6):
        rig.write()
    dealt = given(rig, *keys)
    assert sorted(seq for seqs in dealt for seq in seqs) == [1, 2, 3, 4, 5, 6]
    assert [len(seqs) for seqs in dealt] == [2, 2, 2]


def test_a_large_page_is_split_among_those_who_have_room() -> None:
    rig = rig_with()
    keys = [join(rig) for _ in range(3)]
    rig.write(10)
    dealt = given(rig, *keys)
    assert sorted(map(len, dealt)) == [3, 3, 4]
    assert sorted(seq for seqs in dealt for seq in seqs) == list(range(1, 11))
    assert all(seqs == sorted(seqs) for seqs in dealt)
    assert all(page.caught_up for key in keys for page in rig.pages(key)[1:])


def test_a_full_member_is_skipped_and_delays_nobody() -> None:
    rig = rig_with()
    stuck, busy = join(rig), join(rig)
    for _ in range(20):
        rig.write()
        rig.fed(busy)
    dealt = given(rig, stuck, busy)
    assert len(dealt[0]) == 2
    assert sorted(dealt[0] + dealt[1]) == list(range(1, 21))
    assert dealt[1] == sorted(dealt[1])


def test_while_nobody_has_room_the_cursor_stays_and_then_goes_on() -> None:
    rig = rig_with()
    key = join(rig)
    for _ in range(6):
        rig.write()
    assert (given(rig, key), cursors(rig)) == ([[1, 2]], {"g": 2})
    rig.fed(key)
    assert given(rig, key) == [[1, 2, 3, 4, 5, 6]]


def test_deleted_records_move_the_cursor_and_nobody_is_bothered() -> None:
    rig = rig_with()
    key = join(rig)
    rig.write()
    rig.write()
    rig.write(3)
    rig.ask(wire.DELETE, "t", {"seqs": [3, 4, 5]})
    rig.fed(key)
    assert (given(rig, key), cursors(rig)) == ([[1, 2]], {"g": 5})


def test_a_gap_is_told_to_one_member() -> None:
    rig = FeedRig()
    rig.put(cap_records=2)
    keys = [join(rig), join(rig)]
    for _ in range(10):
        rig.write()
    rig.fed(keys[0])
    gaps = [page.tombstone for key in keys for page in rig.pages(key) if page.tombstone is not None]
    (gap,) = gaps
    assert (gap.gap_from, gap.gap_to) == (5, 8)
    assert sorted(functools.reduce(operator.iadd, given(rig, *keys), [])) == [1, 2, 3, 4, 9, 10]


def test_groups_of_one_topic_do_not_know_each_other() -> None:
    rig = rig_with(3)
    a, b, alone = join(rig, group="a"), join(rig, group="b"), rig.follow()
    rig.write()
    assert given(rig, a, b, alone) == [[1, 2, 3, 4], [1, 2, 3, 4], [4]]


# ---- leaving


def test_unwritten_records_of_a_member_go_to_the_others() -> None:
    rig = rig_with()
    leaves = join(rig)
    rig.write()
    rig.write()
    stays = join(rig)
    rig.fed(leaves)
    rig.unfollow(leaves)
    assert given(rig, leaves, stays) == [[1, 2], [2]]


def test_unwritten_records_of_the_last_member_wait_for_the_next() -> None:
    rig = rig_with()
    leaves = join(rig)
    rig.write()
    rig.unfollow(leaves)
    assert cursors(rig) == {"g": 0}
    rig.write()
    assert given(rig, join(rig, from_seq=99)) == [[1, 2]]


def test_nothing_is_handed_back_when_later_records_were_dealt() -> None:
    rig = rig_with()
    leaves, stays = join(rig), join(rig)
    rig.write()
    rig.write()  # the other's
    dealt = given(rig, leaves, stays)
    assert sorted(map(len, dealt)) == [1, 1]
    first = leaves if 1 in dealt[0] else stays
    other = stays if first is leaves else leaves
    rig.unfollow(first)
    rig.fed(other)
    assert given(rig, other) == [[2]]
    assert cursors(rig) == {"g": 2}


@fault(
    "front",
    "a front dies with records of a group on their way",
    "nobody else gets them: they may have arrived",
)
def test_records_in_flight_to_a_dead_front_belong_to_nobody() -> None:
    rig = rig_with()
    dies = join(rig, peer=b"dies")
    rig.write()
    rig.write()
    rig.core.forget_peer(b"dies")
    lives = join(rig, peer=b"lives")
    rig.write()
    assert given(rig, dies, lives) == [[1, 2], [3]]


def test_any_order_of_joining_leaving_and_feeding_deals_every_record_once() -> None:
    """What is passed on is passed on once, and what is lost was assigned to a member that left."""
    for seed in length.seeds(short=6, long=100):
        rig = rig_with()
        members: list[Key] = []
        passed: list[int] = []
        unfed: dict[Key, list[list[int]]] = {}
        seen: dict[Key, int] = {}
        left: list[int] = []
        state = seed + 1
        for _ in range(60):
            state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
            choice, who = (state >> 33) % 10, (state >> 40)
            if choice < 3 or not members:
                rig.write(1 + who % 5)
            elif choice < 5 and len(members) < 4:
                members.append(join(rig, options=FeedOptions(limit=3)))
            elif choice < 6:
                key = members.pop(who % len(members))
                left += functools.reduce(operator.iadd, unfed.pop(key, []), [])
                rig.unfollow(key)
            else:
                key = members[who % len(members)]
                if unfed.get(key):
                    passed += unfed[key].pop(0)
                    rig.fed(key)
            if not members:
                members.append(join(rig))
            for key in members:
                pages = [page.seqs for page in rig.pages(key)[1 + seen.get(key, 0) :]]
                seen[key] = seen.get(key, 0) + len(pages)
                unfed.setdefault(key, []).extend(pages)
        held = [seq for pages in unfed.values() for seqs in pages for seq in seqs]
        assert len(set(passed)) == len(passed), seed
        assert not set(passed) & set(held), seed
        (cursor,) = cursors(rig).values()
        assert set(range(1, cursor + 1)) == set(passed) | set(held) | {s for s in left if s <= cursor}, seed


# ---- dropped topics


def test_a_dropped_topic_takes_its_groups_along() -> None:
    rig = rig_with(1)
    keys = [join(rig), join(rig)]
    rig.fed(*keys)
    rig.drop()
    assert [rig.pages(key)[-1].status for key in keys] == [404, 404]
    assert (cursors(rig), len(rig.core.watch.feeds)) == ({}, 0)
    rig.write(2)
    assert given(rig, join(rig)) == [[1, 2]]


def test_a_topic_that_is_made_again_while_nobody_has_room_has_another_group() -> None:
    rig = rig_with()
    old = join(rig)
    for _ in range(4):
        rig.write()
    rig.drop()
    rig.write(2)
    new = join(rig)
    assert rig.pages(old)[-1].status == 404
    rig.fed(old, new)
    rig.write()
    assert given(rig, old, new) == [[1, 2], [1, 2, 3]]


def test_a_member_that_has_room_again_hears_that_its_topic_was_made_again() -> None:
    rig = rig_with()
    key = join(rig)
    for _ in range(4):
        rig.write()
    rig.drop()
    rig.write(2)
    rig.fed(key)
    assert [page.status for page in rig.pages(key)[-2:]] == [200, 404]
    assert (cursors(rig), len(rig.core.watch.feeds)) == ({}, 0)


@fault(
    "disk",
    "a topic's file cannot be read for a group",
    "its members follow again later; the group stays where it was",
)
def test_a_group_outlives_a_read_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with()
    keys = [join(rig, options=ONE), join(rig, options=ONE)]
    for _ in range(8):
        rig.write()

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "rotten")

    with monkeypatch.context() as patch:
        patch.setattr(rig.core.engine.reader, "diff", fails)
        rig.fed(keys[0])
    assert [rig.pages(key)[-1].status for key in keys] == [500, 500]
    assert cursors(rig) == {"g": 4}  # what is in flight will be written before they learn of it
    again = join(rig, from_seq=0)
    assert given(rig, again) == [[5, 6, 7, 8]]


# ---- restarts


def restarted(rig: FeedRig) -> FeedRig:
    rig.advance(SAVE_MS)
    rig.disk.kill()
    return FeedRig(rig.config, incarnation=rig.incarnation + 1, clock=rig.clock, disk=rig.disk)


def test_a_group_is_where_it_was_after_a_restart() -> None:
    rig = rig_with(5)
    rig.fed(join(rig))
    rig = restarted(rig)
    assert cursors(rig) == {"g": 5}
    key = join(rig, from_seq=0)
    rig.write()
    rig.advance(REJOIN_MS)
    assert given(rig, key) == [[6]]


@fault(
    "worker",
    "a worker dies and its groups' cursors are a second old",
    "the greatest that a member knows counts",
)
def test_after_a_restart_nothing_is_dealt_before_all_had_the_time_to_speak() -> None:
    rig = rig_with(2)
    key = join(rig)
    rig.fed(key)
    rig.advance(SAVE_MS)
    rig.is_syncing = False
    rig.write(6)  # assigned, and never saved
    rig.disk.sync_all()
    rig.disk.kill()
    rig = FeedRig(rig.config, incarnation=2, clock=rig.clock, disk=rig.disk)
    assert cursors(rig) == {"g": 2}
    slow = join(rig, seen=3, peer=b"a")
    rig.advance(REJOIN_MS - 1)
    far = join(rig, seen=7, peer=b"b")
    assert given(rig, slow, far) == [[], []]
    rig.advance(1)
    assert sorted(functools.reduce(operator.iadd, given(rig, slow, far), [])) == [8]
    late = join(rig, seen=8, peer=b"c")
    rig.write()
    assert sorted(functools.reduce(operator.iadd, given(rig, slow, far, late), [])) == [8, 9]


def test_a_member_cannot_have_seen_more_than_there_is() -> None:
    rig = rig_with(2)
    rig.fed(join(rig))
    rig = restarted(rig)
    key = join(rig, seen=1000)
    rig.write()
    rig.advance(REJOIN_MS)
    assert given(rig, key) == [[3]]


def test_a_restored_group_whose_members_leave_again_is_dealt_to_the_next() -> None:
    rig = rig_with(2)
    leaves = join(rig)
    rig.unfollow(leaves)
    rig = restarted(rig)
    rig.unfollow(join(rig))
    rig.advance(REJOIN_MS)
    assert given(rig, join(rig)) == [[1, 2]]


def test_rows_of_a_topic_that_is_another_now_are_not_loaded() -> None:
    rig = rig_with(5)
    rig.fed(join(rig))
    rig.advance(SAVE_MS)
    rig.is_syncing = True
    rig.drop()
    rig.write(3)
    disk: SimDisk = rig.disk
    disk.kill()
    rig = FeedRig(rig.config, incarnation=2, clock=rig.clock, disk=disk)
    assert cursors(rig) == {}
    assert given(rig, join(rig)) == [[1, 2, 3]]


# ---- bounds


def test_a_group_without_members_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "GROUPS_MAX", 1)
    rig = rig_with(3)
    first = join(rig, group="a")
    rig.fed(first)
    rig.unfollow(first)
    refused = join(rig, group="b")
    assert error_of(rig.replies[refused])["detail"] == {"limit": "groups", "max": 1}
    assert len(rig.core.watch.feeds) == 0
    rig.advance(SESSION_TTL_MS)
    assert rig.pages(join(rig, group="b"))[0].status == 429
    rig.advance(1)
    assert rig.pages(join(rig, group="b"))[0].status == 200
    assert cursors(rig) == {"b": 3}


def test_a_group_with_members_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "GROUPS_MAX", 1)
    rig = rig_with(3)
    key = join(rig)
    rig.fed(key)
    rig.advance(2 * SESSION_TTL_MS)
    join(rig, group="b")
    rig.write()
    assert given(rig, key) == [[1, 2, 3, 4]]
