"""Goal: the checker blames a stream that does what no stream may do, and only that.

Method: one legal history of two connections to a session, with everything that a stream can say; each broken one differs
from it in one place.
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


class Told:
    """Two connections: seqs 1 to 3 through the first, a gap of 4 and 5 and then 6 and 7 through the second."""

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
    assert check(Told().history) == []


Change = Callable[[Told], Any]


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
def test_broken(name: str) -> None:
    rule, change = BROKEN[name]
    told = Told()
    change(told)
    assert rule in {problem.rule for problem in check(told.history)}


def test_a_group_gives_nothing_twice() -> None:
    told = Told(group="g")
    assert check(told.history) == []
    told.second.frames[1].data.update(page([3, 6, 7], 2, 7, 7))
    assert "stream" in {problem.rule for problem in check(told.history)}
