"""Goal: the proxies of docs/howto/tls.md pass writes, streams and WebSockets through unchanged.

Method: each configuration is taken from the page, with this test's ports and paths, and run by the real proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.pages import blocks
from tests.support.server import Server, until
from topics import Client

PAGE = "docs/howto/tls.md"


def on_page(language: str) -> str:
    [text] = [block.text for block in blocks(PAGE) if block.language == language]
    return text


def nginx(program: str, folder: Path, upstream: str, port: int) -> list[str]:
    site = on_page("nginx").replace("listen 443 ", f"listen 127.0.0.1:{port} ")
    site = site.replace("127.0.0.1:4000", upstream).replace("topics.example.com;", "localhost;")
    site = re.sub(r"/etc/ssl/topics\.example\.com", str(folder / "server"), site)
    temporary = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = f"daemon off; error_log stderr; pid {folder}/pid; events {{}} http {{ access_log off; {temporary}\n{site}}}"
    (folder / "nginx.conf").write_text(config)
    return [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(program: str, folder: Path, upstream: str, port: int) -> list[str]:
    site = on_page("caddy").replace("127.0.0.1:4000", upstream)
    own = f"https://localhost:{port} {{\n    tls {folder}/server.pem {folder}/server.key"
    site = site.replace("topics.example.com {", own)
    (folder / "Caddyfile").write_text("{\n    admin off\n    auto_https disable_redirects\n}\n" + site)
    return [program, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@pytest.fixture(params=[nginx, caddy], ids=["nginx", "caddy"])
def proxy(
    request: pytest.FixtureRequest, tmp_path: Path, shared_server: Server
) -> Iterator[tuple[str, ssl.SSLContext]]:
    """The address of a proxy in front of the server, and an SSL context that trusts it."""
    name = request.param.__name__
    program, openssl = shutil.which(name), shutil.which("openssl")
    if program is None or openssl is None:
        pytest.skip(f"not tested behind {name}: {name} or openssl is not installed")
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(tmp_path / "server.key")]
    made = [
        "-out",
        str(tmp_path / "server.pem"),
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
    ]
    subprocess.run([openssl, "req", "-x509", *key, *made], check=True, capture_output=True, timeout=120)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = request.param(program, tmp_path, f"{shared_server.host}:{shared_server.port}", port)
    environment = {**os.environ, "HOME": str(tmp_path)}
    with (tmp_path / "proxy.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:

        def listens() -> bool:
            assert process.poll() is None, (tmp_path / "proxy.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        until(listens)
        yield f"https://localhost:{port}", ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a graceful stop of Caddy would wait for its connections
        process.wait(60)


async def exchange(url: str, trust: ssl.SSLContext, topic: str) -> list[str]:
    """The ops of the messages that a WebSocket gets."""
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v0/ws", ssl=trust) as ws:
        await ws.send_json({"op": "subscribe", "topic": topic})
        return [(await ws.receive_json(timeout=60))["op"] for _ in range(2)]


def test_writes_streams_and_websockets_pass(proxy: tuple[str, ssl.SSLContext]) -> None:
    url, trust = proxy
    with Client(url, ssl_context=trust) as client:
        client.write("tls.large", "x" * 900_000)
        client.write_many("tls.large", ["y" * 900_000] * 4)  # more than a proxy accepts by default
        with client.tail("tls.>") as tail:
            # One after the other over an open stream: a buffering proxy would hold the first one back.
            for number in range(3):
                client.write("tls.live", number)
                assert next(tail).data == number
        assert client.read("tls.live", 3, wait_ms=50).caught_up
    assert asyncio.run(exchange(url, trust, "tls.live")) == ["subscribed", "record"]
