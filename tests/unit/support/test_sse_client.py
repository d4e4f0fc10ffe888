"""Goal: the stream clients refuse what a server must not send, so tests that use them need not check it.

Method: frames as bytes, valid ones and ones with a single error.
"""

from __future__ import annotations

import pytest

from tests.support.frame_checker import FrameChecker
from tests.support.sse_client import Frame, make_id, parse_frame, read_id
from tests.support.ws_client import check_message

ID = make_id({"t": 3}).encode()
CAUGHT_UP = b'event: caught-up\nid: %b\ndata: {"topic":"t","head_seq":3}\n\n' % ID


def test_good_frames() -> None:
    assert parse_frame(b"retry: 2000\n\n") == Frame("retry", 2000)
    assert parse_frame(b": hb 1763298000000\n\n") == Frame("hb", 1763298000000)
    frame = parse_frame(CAUGHT_UP)
    assert (frame.event, frame.data, frame.cursors) == ("caught-up", {"topic": "t", "head_seq": 3}, {"t": 3})
    error = (
        b'event: error\ndata: {"code":429,"error":"e","message":"m","retry_after_ms":5,"topics":["t"]}\n\n'
    )
    assert parse_frame(error).data["code"] == 429


@pytest.mark.parametrize(
    "text",
    [
        b"retry: 3000\n\n",
        b": hello\n\n",
        b": hb soon\n\n",
        CAUGHT_UP.replace(b"\n", b"\r\n"),
        CAUGHT_UP.replace(b"event: ", b"event:"),
        CAUGHT_UP.replace(b"id: " + ID + b"\n", b""),
        CAUGHT_UP.replace(ID, ID + b"="),
        CAUGHT_UP.replace(b"caught-up", b"caught_up"),
        CAUGHT_UP.replace(b"data: {", b"data: {\ndata: "),
        b'id: %b\nevent: caught-up\ndata: {"topic":"t","head_seq":3}\n\n' % ID,
        b'event: caught-up\nid: %b\ndata: {"head_seq":3,"topic":"t"}\n\n' % ID,
        b'event: caught-up\nid: %b\ndata: {"topic":"t","head_seq":3,"more":1}\n\n' % ID,
        b'event: error\ndata: {"code":410,"message":"m"}\n\n',
    ],
)
def test_bad_frames(text: bytes) -> None:
    with pytest.raises((AssertionError, KeyError)):
        parse_frame(text)


def records(from_seq: int, seqs: list[int], to_seq: int, cursors: dict[str, int] | None = None) -> Frame:
    rows = [{"$seq": seq, "data": seq} for seq in seqs]
    data = {"topic": "t", "records": rows, "from_seq": from_seq, "to_seq": to_seq, "head_seq": 9}
    return Frame("record", data, make_id(cursors or {"t": to_seq, "u": 0}))


def tombstone(first: int, last: int) -> Frame:
    data = {
        "topic": "t",
        "reason": "cap",
        "gap_from": first,
        "gap_to": last,
        "earliest_seq": last + 1,
        "head_seq": 9,
    }
    return Frame("tombstone", data, make_id({"t": last, "u": 0}))


def test_a_good_course() -> None:
    frame_checker = FrameChecker({"t": 1, "u": 0})
    frame_checker.take_all([records(1, [2, 3], 4), tombstone(5, 6), records(6, [7], 7), records(7, [9], 9)])
    assert (frame_checker.seqs["t"], frame_checker.gaps["t"]) == ([2, 3, 7, 9], [("cap", 5, 6)])
    assert frame_checker.last_id is not None
    assert read_id(frame_checker.last_id) == frame_checker.cursors == {"t": 9, "u": 0}


@pytest.mark.parametrize(
    "frame",
    [
        records(0, [1, 2, 3], 3),  # a repeat
        records(2, [3], 3),  # a loss
        records(1, [], 3),
        records(1, [3, 2], 3),
        records(1, [1, 2], 3),
        records(1, [2, 4], 3),
        records(1, [2, 3], 3, {"t": 2, "u": 0}),
        records(1, [2, 3], 3, {"t": 3, "u": 1}),
        tombstone(1, 4),
        tombstone(3, 4),
        Frame("caught-up", {"topic": "t", "head_seq": 2}, make_id({"t": 2, "u": 0})),
    ],
)
def test_bad_courses(frame: Frame) -> None:
    with pytest.raises(AssertionError):
        FrameChecker({"t": 1, "u": 0}).take(frame)


def test_only_a_ledger_that_skips_follows_a_jump() -> None:
    frame_checker = FrameChecker({"t": 1, "u": 0}, skips=True)
    frame_checker.take(records(2, [3], 3, {"t": 3, "u": 5}))
    with pytest.raises(AssertionError):
        frame_checker.take(records(2, [3], 3))


def test_messages() -> None:
    check_message({"op": "pong", "request_id": None})
    check_message({"op": "error", "code": "server_shutting_down", "message": "m"})
    for bad in (
        {"op": "pong"},
        {"request_id": 1, "op": "pong"},
        {"op": "error", "code": "forbidden", "message": "m"},
        {"op": "topic_deleted", "topic": "t", "head_seq": 1, "reason": "deleted"},
    ):
        with pytest.raises(AssertionError):
            check_message(bad)
