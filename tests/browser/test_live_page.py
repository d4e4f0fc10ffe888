"""Goal: the page of deploy/examples/live-page shows every record once and in order, also when the server behind its proxy restarts."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.browser import Browser, Page
from tests.support.server import ROOT, Server, until

pytestmark = pytest.mark.browser

PROXY = ROOT / "deploy" / "examples" / "live-page" / "serve.py"
SEEN = "[...document.querySelectorAll('#news li')].map((item) => item.textContent.trim()).reverse()"


@contextlib.contextmanager
def proxied(server: Server) -> Iterator[str]:
    """The address of the page."""
    process = subprocess.Popen(
        [sys.executable, "-u", PROXY, "--port", "0", "--url", f"http://{server.host}:{server.port}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        [port] = re.findall(r":(\d+)", line)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(60)


def shows(page: Page, *lines: str) -> None:
    page.wait(f"{SEEN}.length >= {len(lines)}", shows=SEEN)
    assert page.run(SEEN) == list(lines)


def test_the_page_shows_what_is_written(
    browser: Browser, start_fixed_port_server: Callable[..., Server]
) -> None:
    server = start_fixed_port_server()
    server.write("live.news", "before")
    with proxied(server) as url, browser.page(url) as page:
        shows(page, "live.news 1 before")
        server.write("live.other", {"n": 1})  # a topic that is created later
        shows(page, "live.news 1 before", 'live.other 1 {"n":1}')
        page.run("text.value = '<b>hello</b>'; document.querySelector('#write button').click()")
        shows(page, "live.news 1 before", 'live.other 1 {"n":1}', "live.page 1 <b>hello</b>")
        page.wait("text.value === ''")

        server.stop()
        page.wait("state.textContent.includes('retrying')")
        # Meanwhile the proxy answers 502, after which an EventSource does not reconnect by itself.
        host = url.removeprefix("http://").rstrip("/")
        until(lambda: status_of(host) == 502)
        server.start()
        server.write("live.news", "after")
        page.wait(f"{SEEN}.at(-1) === 'live.news 2 after'", shows=SEEN)
        assert len(page.run(SEEN)) == 4

        server.put("/v0/topics/live.short", {"cap_records": 1})
        server.write("live.short", 1, 2, 3)
        page.wait(f"{SEEN}.at(-1) === 'live.short 3 3'", shows=SEEN)
        assert any(line.startswith("live.short: 1 to 2 are lost") for line in page.run(SEEN))


def status_of(host: str) -> int:
    connection = http.client.HTTPConnection(host, timeout=120)
    try:
        connection.request("GET", "/v0/health")
        return connection.getresponse().status
    finally:
        connection.close()
