"""Goal: know when a browser's EventSource reconnects, and when it gives up.

Method: a fake server with scripted answers. The results agree with the HTML standard, and the server relies on them:
GET /v0/watch/:wid must wait while a process that it needs restarts. A 503 would end the stream of every page that
reconnects at that moment, with or without Retry-After. If the wait has to end, the server must close the connection without
an answer: only then does the EventSource try again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.browser.clients import load_clients, open_stream
from tests.browser.scripted_server import STREAM_HEAD, ScriptedServer
from tests.support.browser import Browser

pytestmark = pytest.mark.browser

REFUSALS = 10
OTHER_ANSWERS = {
    "no-content": b"HTTP/1.1 204 No Content\r\n",
    "not-found": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n",
    "throttled": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n",
    "internal": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n",
    "not-ready": b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n",
    "no-stream": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n",
    "no-type": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n",
}
HALF_A_HEAD = {"half-a-head": STREAM_HEAD[:20]}
BREAKS = {
    "closed": b"",
    "reset": None,
    "closed-after-the-head": STREAM_HEAD,
    "closed-before-its-length": STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 100\r\n\r\n"),
}


@pytest.fixture
def scripted_server() -> Iterator[ScriptedServer]:
    answers = {name: head + b"Connection: close\r\n\r\n" for name, head in OTHER_ANSWERS.items()}
    with ScriptedServer(answers={**answers, **HALF_A_HEAD, **BREAKS}).listening() as server:
        yield server


def test_any_answer_but_a_stream_ends_it(browser: Browser, scripted_server: ScriptedServer) -> None:
    with browser.page(f"{scripted_server.origin}/") as page:
        load_clients(page)
        for name in OTHER_ANSWERS:
            stream = open_stream(page, f"/{name}")
            page.wait("stream.gaveUp", shows="stream.summary")
            assert (stream.get("opened"), stream.get("broken")) == (1, 2), name
    assert scripted_server.seen == {name: ["", "id-1"] for name in OTHER_ANSWERS}


def test_half_a_head_is_an_answer_too(browser: Browser, scripted_server: ScriptedServer) -> None:
    """The lines that arrived count as the whole head, without the content type of a stream: so a head must be sent in one piece."""
    with browser.page(f"{scripted_server.origin}/") as page:
        load_clients(page)
        open_stream(page, "/half-a-head")
        page.wait("stream.gaveUp", shows="stream.summary")


def test_a_connection_that_ends_is_made_again(browser: Browser, scripted_server: ScriptedServer) -> None:
    """With the id of the last complete frame."""
    with browser.page(f"{scripted_server.origin}/") as page:
        load_clients(page)
        for name in BREAKS:
            stream = open_stream(page, f"/{name}")
            stream.wait("it.frames.length === 2")
            assert [last_event_id for _, _, last_event_id in stream.get("frames")] == ["id-1", "id-4"], name
            stream.get("source.close()")
    assert scripted_server.seen == {name: ["", "id-1", "id-1", "id-1"] for name in BREAKS}


def test_a_refused_connection_is_tried_again(browser: Browser) -> None:
    scripted_server = ScriptedServer(answers={"stream": b""}, times=0)
    with contextlib.ExitStack() as pages:
        with scripted_server.listening():
            page = pages.enter_context(browser.page(f"{scripted_server.origin}/"))
            load_clients(page)
            stream = open_stream(page, "/stream")
            stream.wait("it.opened === 2")
        stream.wait(f"it.broken >= {REFUSALS}")
        with scripted_server.listening():
            stream.wait("it.opened === 3")
    assert scripted_server.seen == {"stream": ["", "id-1", "id-2"]}
