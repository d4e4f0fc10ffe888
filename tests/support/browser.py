"""A real browser for tests: chromium without a window, driven over its DevTools protocol.

    with running(program(), folder) as browser, browser.page(url) as page:
        page.run("window.answer = 6 * 7")
        assert page.wait("window.answer") == 42

Everything is synchronous: one WebSocket, and each call reads from it until its own answer has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.server import until

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0
CALL_S = 60.0  # timeout of one protocol call
WAIT_S = 60.0  # timeout of a condition in a page, on a loaded machine
POLL_S = 0.02

OPTIONS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-sandbox",  # root has no sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have little shared memory
    "--no-proxy-server",  # ignore proxies of the environment
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--mute-audio",
    # Chromium slows down timers of pages in the background, and without a window every page is in the background.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
)


def program() -> str | None:
    """The browser's path. Some packages only install a script there that explains how to get the browser."""
    for name in PROGRAMS:
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def _group(pgid: int) -> list[int]:
    """Pids of the group's processes that are still running."""
    alive: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(group) == pgid and state not in "ZX":
                alive.append(int(folder.name))
    return alive


class JsError(AssertionError):
    """A script in a page threw an exception."""


class Browser:
    """One browser process and its helpers. All of them end with `close`, or when the test run dies."""

    def __init__(self, path: str, folder: Path, *options: str) -> None:
        self._home = folder / "home"
        self._profile = self._home / "profile"
        self._log_path = folder / "browser.log"
        self._home.mkdir()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                # The kernel kills the browser when this process ends; its helpers then end by themselves.
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    path,
                    *OPTIONS,
                    *options,
                    f"--user-data-dir={self._profile}",
                ],
                # It keeps some files in the home directory, wherever the profile is.
                env={**os.environ, "HOME": str(self._home), "XDG_CONFIG_HOME": str(self._home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._calls = 0
        try:
            self._loop.run_until_complete(self._connect(self._devtools_url()))
        except BaseException:
            self.close()
            raise

    def _devtools_url(self) -> str:
        port_file = self._profile / "DevToolsActivePort"

        def address() -> list[str]:
            if self._process.poll() is not None:
                raise AssertionError(f"the browser ended at once:\n{self._log_path.read_text()}")
            with contextlib.suppress(FileNotFoundError):
                lines = port_file.read_text().split()
                return lines if len(lines) == 2 else []
            return []

        port, path = until(address, START_S)
        return f"ws://127.0.0.1:{port}{path}"

    async def _connect(self, url: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(url, max_msg_size=0)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command of the protocol, to the browser or to the page of a session."""
        answer = asyncio.wait_for(self._call(method, session, params), CALL_S)
        try:
            return self._loop.run_until_complete(answer)
        except TimeoutError:
            raise AssertionError(f"no answer within {CALL_S} s: {method} {params}") from None

    async def _call(self, method: str, session: str | None, params: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        self._calls += 1
        number = self._calls
        command = {"id": number, "method": method, "params": params}
        await self._socket.send_json(command if session is None else {**command, "sessionId": session})
        while True:
            message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise AssertionError(f"the browser is gone:\n{self._log_path.read_text()}")
            answer = json.loads(message.data)
            if answer.get("id") != number:
                continue  # an event, or the answer to a call that timed out
            if "error" in answer:
                raise AssertionError(f"{method}: {answer['error']}")
            return dict(answer["result"])

    @contextlib.contextmanager
    def page(self, url: str) -> Iterator[Page]:
        """A page at the URL, with its own cookies, caches and connections."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        try:
            target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
            session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            page = Page(self, session)
            page.open(url)
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        # Its crash handlers are not in the process group; they end when the browser has.
        until(lambda: not _group(self._process.pid))
        self._loop.run_until_complete(self._disconnect())
        self._loop.close()
        shutil.rmtree(self._home, ignore_errors=True)

    async def _disconnect(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def open(self, url: str) -> None:
        failed = self._browser.call("Page.navigate", self._session, url=url).get("errorText")
        if failed:
            raise AssertionError(f"{url}: {failed}")
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of the script's last expression. A promise is awaited."""
        result = self._browser.call(
            "Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True
        )
        thrown = result.get("exceptionDetails")
        if thrown:
            raise JsError(thrown.get("exception", {}).get("description") or thrown["text"])
        return result["result"].get("value")

    def wait(
        self, expression: str, *, doomed: str = "null", shows: str = "null", timeout_s: float = WAIT_S
    ) -> Any:
        """Poll until the expression is true, and return its value. Fails after the timeout, or at once when `doomed`
        is true; the message includes the value of `shows`.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            value, hopeless = self.run(f"[({expression}), ({doomed})]")
            if value:
                return value
            if hopeless or time.monotonic() > give_up:
                why = f"{hopeless}, so never" if hopeless else f"not within {timeout_s} s"
                raise AssertionError(f"{why}: {expression}\n{self.run(f'JSON.stringify({shows}, null, 1)')}")
            time.sleep(POLL_S)


@contextlib.contextmanager
def running(path: str, folder: Path, *options: str) -> Iterator[Browser]:
    browser = Browser(path, folder, *options)
    try:
        yield browser
    finally:
        browser.close()
