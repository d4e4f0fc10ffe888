"""Goal: a shard feeds each front every record once and in order, no faster than the front reads, and no more than is
safe.

Method: one shard on a simulated disk and clock; the test sends the messages of fronts.
"""

from __future__ import annotations

import errno
import itertools

import pytest

from tests.support.faults import fault
from tests.support.shard_rig import error_of
from tests.support.watch_rig import FeedRig, Page
from topics.link import wire
from topics.link.watch import PAGES_AHEAD, FeedOptions, WatchRead, encode
from topics.protocols.json import replies
from workers.shard import flow_control
from workers.watch import feeds
from workers.watch.feeds import FEEDS_PER_FRONT_MAX

STRONG = FeedOptions(strong=True)


def seqs(pages: list[Page]) -> list[int]:
    return [seq for page in pages for seq in page.seqs]


def check_chain(pages: list[Page]) -> None:
    for before, after in itertools.pairwise(pages):
        assert before.to_seq == after.from_seq, pages


def rig_with(count: int = 0, **config: object) -> FeedRig:
    rig = FeedRig()
    rig.put(**config)
    if count:
        rig.write(count)
    return rig


# ---- following


def test_a_feed_begins_at_the_head_and_says_so() -> None:
    rig = rig_with(3)
    (page,) = rig.pages(rig.follow())
    assert (page.span, page.seqs, page.caught_up) == ((3, 3), [], True)


def test_unknown_topics_cannot_be_followed() -> None:
    rig = FeedRig()
    key = rig.follow("none")
    assert [page.status for page in rig.pages(key)] == [404]
    rig.put("none")
    rig.write(1, "none")
    assert len(rig.pages(key)) == 1


def test_a_publication_reaches_every_front_in_the_same_turn() -> None:
    rig = rig_with()
    keys = [rig.follow(peer=peer) for peer in (b"a", b"b")]
    rig.receive(wire.WRITE, "t", {"records": [{"data": 1}]})
    rig.turn()
    rig.turn()  # the sync of the new records is not needed
    assert [rig.pages(key)[-1].seqs for key in keys] == [[1], [1]]


def test_no_more_pages_are_sent_than_the_front_is_behind() -> None:
    rig = rig_with()
    key = rig.follow()
    for _ in range(5):
        rig.write()
    assert [page.seqs for page in rig.pages(key)[1:]] == [[1], [2]]
    assert len(rig.pages(key)) == 1 + PAGES_AHEAD


def test_records_written_meanwhile_are_one_page() -> None:
    rig = rig_with()
    key = rig.follow()
    for _ in range(7):
        rig.write()
    rig.fed(key)
    assert [page.seqs for page in rig.pages(key)[1:]] == [[1], [2], [3, 4, 5, 6, 7]]
    rig.fed(key, key)
    rig.write()
    check_chain(rig.pages(key))
    assert seqs(rig.pages(key)) == list(range(1, 9))


def test_a_backlog_of_a_slow_front_goes_page_by_page() -> None:
    rig = rig_with()
    key = rig.follow(options=FeedOptions(limit=2))
    rig.write(9)
    for _ in range(6):
        rig.fed(key)
    pages = rig.pages(key)
    check_chain(pages)
    assert [len(page.seqs) for page in pages[1:]] == [2, 2, 2, 2, 1]
    assert [page.caught_up for page in pages[1:]] == [False] * 4 + [True]


def test_more_fed_than_was_sent_is_no_credit() -> None:
    rig = rig_with()
    key = rig.follow()
    for _ in range(10):
        rig.fed(key)
    for _ in range(5):
        rig.write()
    assert len(rig.pages(key)) == 1 + PAGES_AHEAD


def test_after_unfollow_nothing_more_comes() -> None:
    rig = rig_with()
    key = rig.follow()
    rig.write()
    rig.unfollow(key)
    rig.unfollow(key)
    rig.fed(key)
    rig.write()
    assert seqs(rig.pages(key)) == [1]
    assert len(rig.core.watch.feeds) == 0
    assert not rig.core.engine.shard.state.published["t"].waiters


def test_a_front_that_is_gone_is_fed_no_more_and_others_are() -> None:
    rig = rig_with()
    gone, left = rig.follow(peer=b"gone"), rig.follow(peer=b"left")
    rig.follow("t", FeedOptions(limit=1), peer=b"gone")
    rig.core.forget_peer(b"gone")
    rig.write(2)
    assert (seqs(rig.pages(gone)), seqs(rig.pages(left))) == ([], [1, 2])
    assert len(rig.core.watch.feeds) == 1
    assert len(rig.core.engine.shard.state.published["t"].waiters) == 1


def test_a_read_that_was_asked_for_in_vain_does_not_stay_in_the_engine() -> None:
    rig = rig_with(durability="disk")
    rig.is_syncing = False
    rig.write(2)
    for _ in range(20):
        key = rig.receive(wire.FOLLOW, "t", encode((STRONG,)))
        rig.tell(wire.UNFOLLOW, key)
        rig.rest()
    assert not rig.core.engine.shard.state.published["t"].waiters


# ---- contents of pages


def test_filtered_records_move_the_feed() -> None:
    rig = rig_with()
    key = rig.follow(options=FeedOptions(nodes=("me",)))
    rig.write(2, node="me")
    rig.write(1, node="you")
    pages = rig.pages(key)
    check_chain(pages)
    assert [(page.span, page.seqs) for page in pages[1:]] == [((0, 2), []), ((2, 3), [3])]


def test_deleted_records_are_passed_over_in_silence() -> None:
    rig = rig_with()
    key = rig.follow()
    for _ in range(5):
        rig.write()
    rig.ask(wire.DELETE, "t", {"seqs": [3, 5]})
    rig.fed(key, key)
    pages = rig.pages(key)
    check_chain(pages)
    assert seqs(pages) == [1, 2, 4]
    assert pages[-1].to_seq == 5 and all(page.tombstone is None for page in pages)


def test_records_evicted_between_two_pages_are_announced() -> None:
    rig = rig_with(cap_records=2)
    key = rig.follow()
    for _ in range(8):
        rig.write()
    rig.fed(key)
    pages = rig.pages(key)
    gone = pages[-1].tombstone
    assert gone is not None and (gone.gap_from, gone.gap_to, gone.reason) == (3, 6, "cap")
    assert seqs(pages) == [1, 2, 7, 8]
    check_chain(pages)


def test_a_dropped_topic_ends_its_feeds() -> None:
    rig = rig_with(1)
    keys = [rig.follow(peer=peer) for peer in (b"a", b"b")]
    rig.drop()
    assert [rig.pages(key)[-1].status for key in keys] == [404, 404]
    assert len(rig.core.watch.feeds) == 0
    rig.write()
    assert [len(rig.pages(key)) for key in keys] == [2, 2]


def test_a_front_that_is_behind_hears_of_the_drop_when_it_has_room() -> None:
    rig = rig_with()
    key = rig.follow()
    for _ in range(3):
        rig.write()
    rig.drop()
    assert len(rig.pages(key)) == 1 + PAGES_AHEAD
    rig.fed(key)
    assert rig.pages(key)[-1].status == 404


def test_a_front_that_is_behind_hears_that_a_topic_was_made_again() -> None:
    rig = rig_with()
    key = rig.follow()
    for _ in range(6):
        rig.write()
    rig.drop()
    rig.write()
    rig.fed(key)
    page = rig.pages(key)[-1]
    if page.status == 200:  # otherwise it gets the message that the old one is gone, which is equivalent
        assert page.tombstone is not None and page.tombstone.reason == "recreated"
        assert page.seqs == [1]


def test_a_page_is_rendered_once_for_two_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with()
    keys = [rig.follow(peer=b"front-%d" % i) for i in range(3)]
    other = rig.follow(options=FeedOptions(include_meta=False), peer=b"front-0")
    calls: list[bool] = []
    real = replies.render_records

    def counted(page: object, **options: bool) -> bytes:
        calls.append(options["include_meta"])
        return real(page, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(replies, "render_records", counted)
    rig.write(3)
    assert sorted(calls) == [False, True]
    assert [seqs(rig.pages(key)) for key in [*keys, other]] == [[1, 2, 3]] * 4
    rig.ask(wire.DELETE, "t", {"seqs": [2]})
    again = rig.ask(wire.WATCH_READ, "t", encode(WatchRead(FeedOptions(), 0)))
    assert again is not None and b'"$seq":2' not in bytes(again.body)


# ---- a front that does not read


def test_a_front_that_takes_nothing_is_not_read_for_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "WINDOW_BYTES", 500)
    rig = rig_with()
    slow, quick = rig.follow(peer=b"slow"), rig.follow(peer=b"quick")
    rig.takes = False
    rig.core._window.sent(b"slow", 1000)
    rig.write(3)
    assert (seqs(rig.pages(slow)), seqs(rig.pages(quick))) == ([], [1, 2, 3])
    rig.core.receive(b"slow", wire.message_head(rig.incarnation) + wire.window_update(1000))
    rig.rest()
    assert seqs(rig.pages(slow)) == [1, 2, 3]


def test_a_feed_that_asks_while_the_window_is_closed_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "WINDOW_BYTES", 500)
    rig = rig_with()
    key = rig.follow()
    for _ in range(4):
        rig.write()
    rig.takes = False
    rig.core._window.sent(key[0], 1000)
    rig.fed(key)
    assert seqs(rig.pages(key)) == [1, 2]
    rig.core.receive(key[0], wire.message_head(rig.incarnation) + wire.window_update(1000))
    rig.rest()
    assert seqs(rig.pages(key)) == [1, 2, 3, 4]


def test_a_front_that_dies_with_its_window_closed_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flow_control, "WINDOW_BYTES", 500)
    rig = rig_with()
    key = rig.follow()
    for _ in range(4):
        rig.write()
    rig.takes = False
    rig.core._window.sent(key[0], 1000)
    rig.fed(key)
    rig.core.forget_peer(key[0])
    rig.write()
    assert seqs(rig.pages(key)) == [1, 2]
    assert not rig.core._read_queue and not rig.core.engine.shard.state.published["t"].waiters


# ---- strong


def test_strong_shows_what_is_synced_and_the_rest_with_its_sync() -> None:
    rig = rig_with(durability="disk")
    strong, eventual = rig.follow(options=STRONG), rig.follow()
    rig.is_syncing = False
    rig.write(2)
    assert (seqs(rig.pages(strong)), seqs(rig.pages(eventual))) == ([], [1, 2])
    rig.advance(2000)
    rig.is_syncing = True
    rig.write()  # not covered by the sync that runs now
    rig.rest()
    assert seqs(rig.pages(strong))[:2] == [1, 2]
    rig.advance(2000)
    assert seqs(rig.pages(strong)) == [1, 2, 3]
    check_chain(rig.pages(strong))


def test_strong_that_comes_while_something_is_not_synced() -> None:
    rig = rig_with(durability="disk")
    rig.write(2)
    rig.advance(2000)
    rig.is_syncing = False
    rig.write(2)
    key = rig.follow(options=STRONG)
    read = rig.ask(wire.WATCH_READ, "t", encode(WatchRead(STRONG, 0)))
    assert read is not None and seqs(rig.pages((b"front", read.id)))[2:] == []
    rig.is_syncing = True
    rig.advance(2000)
    read = rig.ask(wire.WATCH_READ, "t", encode(WatchRead(STRONG, 0)))
    assert read is not None
    assert seqs(rig.pages((b"front", read.id))) == [1, 2, 3, 4]
    # Earlier records are for reads; the feed continues from where all of that is synced.
    assert [(page.span, page.seqs) for page in rig.pages(key)[1:]] == [((4, 4), [])]
    rig.write()
    rig.fed(key)
    rig.advance(2000)
    assert [(page.span, page.seqs) for page in rig.pages(key)[2:]] == [((4, 5), [5])]


@fault("disk", "a sync fails with records that are shown already", "`strong` watchers never see them")
def test_strong_never_shows_what_a_failed_sync_may_have_undone() -> None:
    rig = rig_with(durability="disk")
    rig.write(2)
    rig.advance(2000)
    strong, eventual = rig.follow(options=STRONG), rig.follow()
    rig.disk.fail_at(1, errno.EIO, of="sync")
    rig.write(2)
    rig.advance(2000)
    assert rig.core.engine.shard.state.read_only is not None
    read = rig.ask(wire.WATCH_READ, "t", encode(WatchRead(STRONG, 0)))
    assert read is not None
    assert seqs(rig.pages((b"front", read.id))) == [1, 2]
    assert (seqs(rig.pages(strong)), seqs(rig.pages(eventual))) == ([], [3, 4])


def test_strong_on_an_ephemeral_topic_waits_for_nothing() -> None:
    rig = rig_with(durability="ephemeral")
    rig.advance(2000)
    key = rig.follow(options=STRONG)
    rig.is_syncing = False
    rig.write(2)
    assert seqs(rig.pages(key)) == [1, 2]


def test_after_a_restart_strong_waits_for_no_sync_that_nobody_needs() -> None:
    """Everything recovered is synced. A change that leaves nothing in the log must not make it look otherwise."""
    before = rig_with(2, durability="fsync")
    before.disk.kill()
    rig = FeedRig(incarnation=2, clock=before.clock, disk=before.disk)
    rig.ask(wire.DELETE, "t", {"before_seq": 1})  # nothing is older
    read = rig.ask(wire.WATCH_READ, "t", encode(WatchRead(STRONG, 0)))
    assert read is not None
    assert seqs(rig.pages((b"front", read.id))) == [1, 2]
    (page,) = rig.pages(rig.follow(options=STRONG))
    assert (page.span, page.caught_up) == ((2, 2), True)


def test_strong_on_a_synced_topic_comes_with_the_answer_to_the_writer() -> None:
    rig = rig_with(durability="fsync")
    key = rig.follow(options=STRONG)
    rig.write(2)
    assert seqs(rig.pages(key)) == [1, 2]


# ---- bounds


def test_a_front_has_no_more_feeds_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FEEDS_PER_FRONT_MAX >= 100_000
    monkeypatch.setattr(feeds, "FEEDS_PER_FRONT_MAX", 2)
    rig = rig_with()
    keys = [rig.follow() for _ in range(3)]
    assert [rig.pages(key)[0].status for key in keys] == [200, 200, 429]
    assert error_of(rig.replies[keys[2]])["detail"]["limit"] == "feeds"
    assert rig.pages(rig.follow(peer=b"other"))[0].status == 200
    rig.unfollow(keys[0])
    assert rig.pages(rig.follow())[0].status == 200


@fault("link", "a word about watching cannot be read", "it is refused; the shard goes on")
@pytest.mark.parametrize("op", [wire.FOLLOW, wire.WATCH_NAMES, wire.FIND, wire.SESSION, wire.WATCH_READ])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02\x03", encode("x" * 10)])
def test_unreadable_requests_are_refused(op: int, body: bytes) -> None:
    rig = rig_with()
    reply = rig.ask(op, "t", body)
    assert reply is not None and reply.status == 400
    key = rig.follow()
    rig.write()
    assert seqs(rig.pages(key)) == [1]


def test_a_file_that_cannot_be_read_is_told_and_the_feed_ends() -> None:
    rig = rig_with()
    key = rig.follow()
    for _ in range(3):
        rig.write()

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "rotten")

    rig.core.engine.reader.diff = fails  # type: ignore[method-assign, assignment]
    rig.fed(key)
    assert rig.pages(key)[-1].status == 500
    assert len(rig.core.watch.feeds) == 0
