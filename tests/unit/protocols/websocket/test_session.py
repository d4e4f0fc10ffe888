"""Messages of a WebSocket: are they found wherever the bytes are cut, and is everything invalid refused with its code?"""

from __future__ import annotations

import pytest
from websockets.frames import Frame, Opcode

from topics.protocols.websocket.session import (
    Closed,
    Message,
    Nothing,
    Ping,
    WebSocketError,
    WebSocketSession,
)

TEXT, BINARY, CONT, CLOSE, PING, PONG = (
    Opcode.TEXT,
    Opcode.BINARY,
    Opcode.CONT,
    Opcode.CLOSE,
    Opcode.PING,
    Opcode.PONG,
)


def frame(payload: bytes, opcode: Opcode = TEXT, *, fin: bool = True) -> bytes:
    return Frame(opcode, payload, fin).serialize(mask=True)


def take_all(session: WebSocketSession, data: bytes) -> list[Message]:
    session.receive(data)
    found = []
    while (message := session.next_message()) is not None:
        if not isinstance(message, Nothing):
            found.append(message)
    return found


def test_messages() -> None:
    data = (
        frame(b"one ", fin=False)
        + frame(b"here?", PING)
        + frame("zwölf".encode()[:3], CONT, fin=False)
        + frame(b"", PONG)
        + frame("zwölf".encode()[3:], CONT)
        + frame(b"\xff", BINARY)
        + frame(b"", fin=False)
        + frame(b"", CONT)
        + frame(b"\x03\xe8bye", CLOSE)
    )
    expected = [Ping(b"here?"), "one zwölf", b"\xff", "", Closed()]
    session = WebSocketSession(100)
    assert take_all(session, data) == expected and session.buffered == 0
    for size in (1, 2, 7):
        session, found = WebSocketSession(100), []
        for i in range(0, len(data), size):
            found += take_all(session, data[i : i + size])
        assert found == expected and session.buffered == 0


def test_control_frames_between_fragments_need_no_room_in_the_message() -> None:
    session = WebSocketSession(200)
    ping = frame(b"p" * 125, PING)
    found = take_all(
        session, frame(b"a" * 199, fin=False) + ping + frame(b"a", CONT, fin=False) + ping + frame(b"", CONT)
    )
    assert found == [Ping(b"p" * 125), Ping(b"p" * 125), "a" * 200]
    take_all(session, frame(b"a" * 199, fin=False) + ping)
    with pytest.raises(WebSocketError) as refused:
        take_all(session, frame(b"ab", CONT))
    assert refused.value.code == 1009


def test_buffered_bytes_are_counted() -> None:
    session = WebSocketSession(1000)
    whole = frame(b"a" * 300)
    take_all(session, frame(b"b" * 10, fin=False) + whole[:200].replace(b"\x81", b"\x80", 1))
    assert session.buffered == 210


def test_a_message_is_taken_only_when_asked_for() -> None:
    session = WebSocketSession(100)
    session.receive(frame(b"a") + b"\xff" * 100)
    assert session.next_message() == "a" and session.buffered == 100
    with pytest.raises(WebSocketError):
        session.next_message()


INVALID = {
    "no mask": (b"\x81\x01a", 1002),
    "a reserved bit": (b"\xc1\x80abcd", 1002),
    "an unknown opcode": (b"\x83\x80abcd", 1002),
    "a ping in parts": (b"\x09\x80abcd", 1002),
    "a continuation of nothing": (frame(b"a", CONT), 1002),
    "a message in a message": (frame(b"a", fin=False) + frame(b"b"), 1002),
    "half a close code": (frame(b"a", CLOSE), 1002),
    "a close code that is never sent": (frame(b"\x03\xed", CLOSE), 1002),
    "a reason that is not UTF-8": (frame(b"\x03\xe8\xff", CLOSE), 1007),
    "text that is not UTF-8": (frame(b"\xff"), 1007),
    "a character cut by another": (frame(b"\xc3", fin=False) + frame(b"a", CONT), 1007),
    "too large": (b"\x81\xff" + (101).to_bytes(8, "big"), 1009),
    "too large in parts": (frame(b"a" * 60, fin=False) + frame(b"a" * 41, CONT), 1009),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_frames_are_refused(name: str) -> None:
    data, code = INVALID[name]
    session = WebSocketSession(100)
    with pytest.raises(WebSocketError) as refused:
        take_all(session, frame(b"before") + data)
    assert refused.value.code == code
