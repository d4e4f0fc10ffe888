"""Goal: on a server without keys, a page of another origin can neither read nor write; pages of its own origin and of listed ones can.

Method: a real browser, and pages from another port, which is another origin. For DNS rebinding the browser resolves a foreign name
to this machine. The pages try the requests that a browser sends without a preflight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.clients import url_of
from tests.browser.scripted_server import ScriptedServer
from tests.support import browser as browsers
from tests.support.browser import Browser, Page
from tests.support.server import Server

pytestmark = pytest.mark.browser

# Each resolves to the answer that the page got, or to the error.
TRIES = """
const base = %s, topic = %s, wid = %s;
const text = (promise) => promise.then(async (r) => `${r.status} ${await r.text()}`, (error) => `failed: ${error.name}`);
const post = (path, options) => text(fetch(base + path, { method: "POST", ...options }));
const json = { headers: { "Content-Type": "application/json" } };
const tries = {
  diff: () => post(`/v0/topics/${topic}/diff`),
  raw: () => post(`/v0/topics/${topic}/raw`, { body: "written by a page" }),
  unseen: () => fetch(`${base}/v0/topics/${topic}/raw`, { method: "POST", body: "unseen", mode: "no-cors" }).then((r) => r.type),
  write: () => post(`/v0/topics/${topic}`, { ...json, body: JSON.stringify({ records: [{ data: "asked first" }] }) }),
  stream: () => new Promise((resolve) => {
    const source = new EventSource(`${base}/v0/watch/${wid}`);
    source.addEventListener("record", (event) => { source.close(); resolve(event.data); });
    source.onerror = () => { source.close(); resolve("failed"); };
  }),
  socket: () => new Promise((resolve) => {
    const socket = new WebSocket(`${base.replace("http", "ws")}/v0/ws`);
    socket.onopen = () => socket.send(JSON.stringify({ op: "subscribe", topic }));
    socket.onmessage = (event) => { if (JSON.parse(event.data).op === "record") { socket.close(); resolve(event.data); } };
    socket.onclose = () => resolve("failed");
  }),
};
(async () => { const got = {}; for (const name in tries) got[name] = await tries[name](); return got; })()
"""


def tried(page: Page, server: Server, topic: str, base: str) -> dict[str, str]:
    session = server.post("/v0/watch", {"topics": {topic: {}}}).json
    wid = session["stream_url"].rpartition("/")[2]
    return dict(page.run("{%s}" % (TRIES % (json.dumps(base), json.dumps(topic), json.dumps(wid)))))


def written(server: Server, topic: str) -> list[Any]:
    return [record["data"] for record in server.post(f"/v0/topics/{topic}/diff", {}).json["records"]]


@pytest.fixture
def elsewhere() -> Iterator[ScriptedServer]:
    with ScriptedServer().listening() as server:
        yield server


def test_a_page_of_another_origin_gets_nothing_and_writes_nothing(
    shared_server: Server, topic: str, browser: Browser, elsewhere: ScriptedServer
) -> None:
    shared_server.write(topic, "secret")
    with browser.page(f"{elsewhere.origin}/") as page:
        got = tried(page, shared_server, topic, url_of(shared_server, ""))
    failed = "failed: TypeError"
    assert got == {
        "diff": failed, "raw": failed, "unseen": "opaque", "write": failed, "stream": "failed", "socket": "failed",
    }  # fmt: skip
    assert written(shared_server, topic) == ["secret"]


def test_a_page_of_the_server_itself_works(shared_server: Server, topic: str, browser: Browser) -> None:
    shared_server.write(topic, "seen")
    with browser.page(url_of(shared_server)) as page:
        check_all_work(tried(page, shared_server, topic, url_of(shared_server, "")))
    assert written(shared_server, topic) == ["seen", "written by a page", "unseen", "asked first"]


def test_a_listed_page_works(
    start_server: Callable[..., Server], topic: str, browser: Browser, elsewhere: ScriptedServer
) -> None:
    server = start_server(environment={"TOPICS_CORS_ORIGINS": elsewhere.origin})
    server.write(topic, "seen")
    with browser.page(f"{elsewhere.origin}/") as page:
        check_all_work(tried(page, server, topic, url_of(server, "")))
    assert written(server, topic) == ["seen", "written by a page", "unseen", "asked first"]


def check_all_work(got: dict[str, str]) -> None:
    assert got.pop("unseen") in ("opaque", "basic")
    assert all("seen" in got[name] for name in ("diff", "stream", "socket")), got
    assert all(got[name].startswith("200 ") for name in ("raw", "write")), got


def test_a_name_that_resolves_to_the_server_is_refused(
    shared_server: Server, topic: str, tmp_path: Path, browser: Browser
) -> None:
    shared_server.write(topic, "secret")
    path = browsers.program()
    assert path is not None
    rebound = f"http://evil.example:{shared_server.port}"
    with (
        browsers.running(path, tmp_path, "--host-resolver-rules=MAP evil.example 127.0.0.1") as deceived,
        deceived.page(f"{rebound}/v0/health") as page,
    ):
        assert page.run("JSON.parse(document.body.innerText).error.code") == "misdirected_request"
        got = tried(page, shared_server, topic, rebound)
    assert all(got[name].startswith("421 ") for name in ("diff", "raw", "write")), got
    assert (got["stream"], got["socket"]) == ("failed", "failed")
    assert written(shared_server, topic) == ["secret"]
