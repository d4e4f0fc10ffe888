"""Python handles for the clients of page.js."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.browser import Page
from tests.support.server import Server

SCRIPT = Path(__file__).with_name("page.js")


class _Client:
    """A client in a global variable of the page."""

    gave_up = "null"

    def __init__(self, page: Page, variable: str) -> None:
        self.page, self.variable = page, variable

    def get(self, member: str) -> Any:
        return self.page.run(f"{self.variable}.{member}")

    def wait(self, condition: str) -> Any:
        """Wait until the JavaScript condition is true, in which `it` is the client."""
        it = self.variable
        return self.page.wait(
            f"((it) => {condition})({it})",
            doomed=f"((it) => {self.gave_up})({it})",
            shows=f"{it}.summary",
        )

    def wait_for(self, topic: str, data: Any) -> None:
        """Wait until this record has arrived."""
        self.wait(f"it.records.some(([topic, , data]) => topic === {_js(topic)} && data === {_js(data)})")

    def records(self, topic: str) -> list[tuple[int, Any]]:
        """Seq and data of the received records, in order of arrival."""
        return [(seq, data) for name, seq, data in self.get("records") if name == topic]


class Stream(_Client):
    gave_up = "it.gaveUp"


class TopicSocket(_Client):
    def publish(self, *data: Any) -> dict[str, Any]:
        """Publish, and return the server's answer."""
        return dict(self.get(f"publish(...{_js(data)})"))


def load_clients(page: Page) -> None:
    page.run(SCRIPT.read_text("utf-8"))


def new_session(page: Page, *topics: str, token: str | None = None, **options: Any) -> dict[str, Any]:
    """POST /v0/watch from the page; returns the answer."""
    body = {"topics": {topic: {} for topic in topics}, **options}
    return dict(page.run(f"watch({_js(body)}, {_js(token)})"))


def open_stream(page: Page, url: str, variable: str = "stream") -> Stream:
    page.run(f"var {variable} = new Stream({_js(url)})")
    return Stream(page, variable)


def follow(page: Page, *topics: str, variable: str = "stream", **options: Any) -> Stream:
    """A stream with its own session, open and at the end of all topics."""
    stream = open_stream(page, new_session(page, *topics, **options)["stream_url"], variable)
    stream.wait(f"it.frames.filter(([event]) => event === 'caught-up').length >= {len(topics)}")
    return stream


def open_socket(page: Page, topic: str) -> TopicSocket:
    page.run(f"var open_socket = new TopicSocket({_js(topic)})")
    client = TopicSocket(page, "open_socket")
    client.wait("it.ops.length > 0")
    return client


def url_of(server: Server, path: str = "/v0/health") -> str:
    """Any URL of the server, so that the page has the server's origin."""
    return f"http://{server.host}:{server.port}{path}"


_js = json.dumps
