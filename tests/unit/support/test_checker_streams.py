"""Goal: the checker reports streams that violate the contract, and nothing else.

Method: one legal history of two connections to a session, with every kind of frame; each broken one differs from it
in one place.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.checker import check
from tests.support.history import Frame, History, Stream

WID = "wid_0123456789012345678901"


def event_id(**cursors: int) -> str:
    return urlsafe_b64encode(json.dumps(cursors).encode()).decode().rstrip("=")


def record(seq: int) -> dict[str, Any]:
    return {"$seq": seq, "$ts": 1000 + seq, "data": {"n": seq}}


def page(seqs: list[int], start: int, end: int, head: int) -> dict[str, Any]:
    records = [record(seq) for seq in seqs]
    return {"topic": "t", "records": records, "from_seq": start, "to_seq": end, "head_seq": head}


class TwoConnections:
    """Two connections: seqs 1 to 3 on the first, a gap of 4 and 5 and then 6 and 7 on the second."""

    def __init__(self, group: str | None = None) -> None:
        self.history = history = History()
        config = {"durability": "fsync", "cap_records": 2}
        for first, count in ((1, 3), (4, 2), (6, 2)):
            if first == 6:
                self._first_connection(group)
            request = {
                "config": config,
                "records": [{"data": {"n": n}} for n in range(first, first + count)],
            }
            op = history.sent("c", "write", "t", request)
            last = first + count - 1
            answer = {"topic": "t", "first_seq": first, "last_seq": last, "head_seq": last, "count": count}
            seqs = list(range(first, last + 1))
            status = 201 if first == 1 else 200
            history.answered(op, status, {**answer, "seqs": seqs, "created": first == 1, "deduped": False})
        self.second = history.opening("w", WID, event_id(t=3))
        history.opened(self.second, 200)
        gap = {"topic": "t", "reason": "from_seq_too_old", "gap_from": 4, "gap_to": 5}
        history.saw(self.second, "tombstone", event_id(t=5), {**gap, "earliest_seq": 6, "head_seq": 7})
        history.saw(self.second, "record", event_id(t=7), page([6, 7], 5, 7, 7))
        history.saw(self.second, "caught-up", event_id(t=7), {"topic": "t", "head_seq": 7})
        history.happened("rest")
        state = history.sent("a", "state", "t", {})
        answer = {
            "topic": "t",
            "type": "log",
            "config": config,
            "head_seq": 7,
            "earliest_seq": 6,
            "next_seq": 8,
        }
        more = {"count": 2, "bytes": 14, "effective_priority": 0, "last_write_ts": 1007, "last_read_ts": None}
        history.answered(state, 200, {**answer, **more})

    def _first_connection(self, group: str | None) -> None:
        history = self.history
        wish: dict[str, Any] = {"topics": {"t": {}}} | ({"group": group} if group else {})
        post = history.sent("w", "watch", "", wish)
        start = {"t": {"from_seq": 0, "head_seq": 3, "earliest_seq": 1}}
        told = {"wid": WID, "stream_url": f"/v0/watch/{WID}", "session_ttl_ms": 300_000, "topics": start}
        history.answered(post, 200, told)
        self.first = history.opening("w", WID, None)
        history.opened(self.first, 200)
        history.saw(self.first, "record", event_id(t=3), page([1, 2, 3], 0, 3, 3))
        history.saw(self.first, "caught-up", event_id(t=3), {"topic": "t", "head_seq": 3})
        history.ended(self.first, "client")


def test_legal() -> None:
    assert check(TwoConnections().history) == []


Change = Callable[[TwoConnections], Any]


def frame(stream: Stream, place: int, event: str | None = None, id: str | None = None, **data: Any) -> None:
    old = stream.frames[place]
    stream.frames[place] = Frame(old.at, event or old.event, id or old.id, {**old.data, **data})


BROKEN: dict[str, tuple[str, Change]] = {
    "a record is missing": (
        "lost",
        lambda t: frame(t.second, 1, records=[record(7)]),
    ),
    "a record comes again": ("stream", lambda t: frame(t.second, 1, **page([3, 6, 7], 2, 7, 7))),
    "records out of order": ("page", lambda t: frame(t.second, 1, records=[record(7), record(6)])),
    "a record that nobody wrote": (
        "invented",
        lambda t: frame(t.second, 1, **page([6, 7, 8], 5, 8, 8), id=event_id(t=8)),
    ),
    "an altered record": (
        "altered",
        lambda t: frame(t.second, 1, records=[record(6), {**record(7), "$tag": "x"}]),
    ),
    "a silent gap": ("lost", lambda t: t.second.frames.pop(0)),
    "a gap that is too long": ("tombstone", lambda t: frame(t.second, 0, gap_to=6, id=event_id(t=6))),
    "a gap before the cursor": ("stream", lambda t: frame(t.second, 0, gap_from=2)),
    "a head that goes back and nothing crashed": (
        "stream",
        lambda t: frame(t.second, 0, gap_from=3, gap_to=3, earliest_seq=3, id=event_id(t=2)),
    ),
    "an id that is too far": ("stream", lambda t: frame(t.second, 1, id=event_id(t=8))),
    "an id that is none": ("stream", lambda t: frame(t.second, 1, id="@")),
    "an id without a topic": ("stream", lambda t: frame(t.second, 1, id=event_id(u=1))),
    "caught up too early": (
        "stream",
        lambda t: t.first.frames.insert(
            0, Frame(t.first.frames[0].at, "caught-up", event_id(t=0), {"topic": "t", "head_seq": 2})
        ),
    ),
    "caught up twice": ("stream", lambda t: t.second.frames.append(t.second.frames[-1])),
    "never caught up": ("stream", lambda t: t.second.frames.pop()),
    "never anything": ("stream", lambda t: t.second.frames.clear()),
    "a topic that nobody asked for": (
        "stream",
        lambda t: frame(t.second, 2, topic="u", id=event_id(t=7, u=7)),
    ),
    "a topic that was not dropped ends": (
        "existence",
        lambda t: t.second.frames.append(
            Frame(
                t.second.frames[-1].at,
                "topic-deleted",
                event_id(t=7),
                {"topic": "t", "head_seq": 0, "reason": "deleted"},
            )
        ),
    ),
    "an event that the contract does not know": ("stream", lambda t: frame(t.second, 2, event="lagged")),
    "an event with another field": ("stream", lambda t: frame(t.second, 2, lag=1)),
    "a session that is gone": ("stream", lambda t: setattr(t.second, "status", 404)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_violation_is_found(name: str) -> None:
    rule, change = BROKEN[name]
    told = TwoConnections()
    change(told)
    assert rule in {problem.rule for problem in check(told.history)}


def test_a_group_gives_nothing_twice() -> None:
    told = TwoConnections(group="g")
    assert check(told.history) == []
    told.second.frames[1].data.update(page([3, 6, 7], 2, 7, 7))
    assert "stream" in {problem.rule for problem in check(told.history)}


# ---- streams that begin in the middle


class Scene:
    """One topic, its writers, and one watcher."""

    def __init__(self) -> None:
        self.history = History()
        self.head = 0
        self.written = 0  # in this topic and in earlier ones of its name

    def ask(self, kind: str, request: dict[str, Any], answer: dict[str, Any], topic: str = "t") -> None:
        op = self.history.sent("c", kind, topic, request)
        self.history.answered(op, 201 if answer.get("created") else 200, answer)

    def put(self, **config: Any) -> None:
        config["durability"] = "fsync"
        self.ask("put", config, {"topic": "t", "created": False, "config": config})

    def write(self, **fields: Any) -> None:
        self.head += 1
        self.written += 1
        request = {"config": {"durability": "fsync"}, "records": [{"data": {"n": self.written}, **fields}]}
        answer = {"topic": "t", "first_seq": self.head, "last_seq": self.head, "seqs": [self.head]}
        more = {"head_seq": self.head, "count": 1, "created": self.head == 1, "deduped": False}
        self.ask("write", request, {**answer, **more})

    def watch(self, **wish: Any) -> None:
        start = {"t": {"from_seq": 0, "head_seq": self.head, "earliest_seq": 1}}
        told = {"wid": WID, "stream_url": f"/v0/watch/{WID}", "session_ttl_ms": 300_000, "topics": start}
        self.ask("watch", {"topics": {"t": {}}, **wish}, told, topic="")

    def connect(self, last_id: str | None = None) -> Stream:
        stream = self.history.opening("w", WID, last_id)
        self.history.opened(stream, 200)
        return stream

    def blamed(self) -> set[str]:
        return {problem.rule for problem in check(self.history)}


@pytest.mark.parametrize(("start", "blamed"), [(1, set()), (0, {"lost"})])
def test_records_filtered_before_the_filter_was_removed_stay_out(start: int, blamed: set[str]) -> None:
    """A page that starts after it shows that it was passed earlier; one that starts before it was read too late for
    that.
    """
    scene = Scene()
    scene.write(node="me")
    scene.watch(node="me")
    stream = scene.connect()
    scene.put(dedupe_node=False)
    scene.write()
    scene.history.saw(stream, "record", event_id(t=2), page([2], start, 2, 2))
    assert scene.blamed() == blamed


@pytest.mark.parametrize(("is_dropped", "blamed"), [(True, set()), (False, {"stream", "page"})])
def test_an_old_id_does_not_move_a_session_in_the_next_topic_of_that_name(
    is_dropped: bool, blamed: set[str]
) -> None:
    scene = Scene()
    scene.write()
    scene.write()
    scene.watch()
    if is_dropped:
        scene.ask("drop", {}, {"topic": "t", "deleted": True, "routers_removed": []})
        scene.head = 0
        scene.write()
    stream = scene.connect(event_id(t=2))
    first = {**record(1), "data": {"n": 3 if is_dropped else 1}}
    shown = {**page([], 0, 1, scene.head), "records": [first]}
    scene.history.saw(stream, "record", event_id(t=1), shown)
    assert scene.blamed() == blamed


@pytest.mark.parametrize(
    ("lost_id", "start", "blamed"),
    [
        (event_id(t=1), 1, set()),
        (event_id(t=1), 2, set()),  # it may have advanced before the server noticed that the client was gone
        (event_id(t=1), 0, {"stream", "page"}),
        (event_id(t=3), 1, {"stream", "page"}),
        (None, 1, {"stream", "page"}),
        (event_id(u=1), 1, {"stream", "page"}),
    ],
)
def test_a_request_that_was_broken_off_may_set_the_session_back(
    lost_id: str | None, start: int, blamed: set[str]
) -> None:
    """Later requests overtook it, and it moved the session back when it arrived: no further than it requested."""
    scene = Scene()
    for _ in range(3):
        scene.write()
    scene.watch()
    lost = scene.history.opening("w", WID, lost_id)
    scene.history.ended(lost, "broken")
    stream = scene.connect(event_id(t=3))
    seqs = list(range(start + 1, 4))
    scene.history.saw(stream, "record", event_id(t=3), page(seqs, start, 3, 3))
    assert scene.blamed() == blamed


@pytest.mark.parametrize("is_broken_off", [True, False])
def test_an_id_from_before_a_topic_was_found_sets_it_back_to_its_beginning(is_broken_off: bool) -> None:
    scene = Scene()
    scene.watch(topics={"*": {}})
    scene.history.ops[-1].answer["topics"] = {}
    scene.write()
    if is_broken_off:
        scene.history.ended(scene.history.opening("w", WID, event_id(u=1)), "broken")
    stream = scene.connect(event_id(t=1))
    scene.history.saw(stream, "record", event_id(t=1), page([1], 0, 1, 1))
    assert scene.blamed() == (set() if is_broken_off else {"stream", "page"})
