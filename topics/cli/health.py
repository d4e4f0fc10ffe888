"""`topics health`: readiness check with an exit code, for container health checks and start scripts."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click

from topics.cli import contexts
from topics.system.settings import Settings, join_host
from topics.system.stdio import ignore_broken_pipe

READY, NOT_READY, UNREACHABLE = 0, 1, 3
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # for a server that listens on all addresses
_TIMEOUT_S = 4.0
_INTERVAL_S = 0.2


@click.command(epilog="Exit codes: 0 all shards are ready; 1 some are not; 3 no response.")
@contexts.server_options
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Wait for this long until it is ready.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the server's response.")
def health(url: str | None, token: str | None, context: str | None, wait_s: float, as_json: bool) -> int:
    """Check whether all shards of a server are ready; the exit code tells.

    Without --url, --context and TOPICS_URL it checks the server at TOPICS_HOST and TOPICS_PORT.
    """
    server = choose(url, token, context, os.environ)
    end = time.monotonic() + wait_s
    while True:
        code, text = check(server.url, server.token)
        if code == READY or time.monotonic() >= end:
            break
        time.sleep(_INTERVAL_S)
    with ignore_broken_pipe():
        print(text if as_json and code != UNREACHABLE else f"{server.url}: {summary(code, text)}")
    return code


def choose(
    url: str | None, token: str | None, context: str | None, environ: Mapping[str, str]
) -> contexts.Server:
    """As for every command, except that the server's own variables take precedence over the context in use."""
    has_server_settings = any(environ.get(name) for name in ("TOPICS_HOST", "TOPICS_PORT"))
    if has_server_settings and not (url or context or environ.get("TOPICS_URL")):
        url = local_url(environ)
    server = contexts.choose(url, token, context, environ)
    address = server.url or local_url(environ)
    return contexts.Server((address if "://" in address else f"http://{address}").rstrip("/"), server.token)


def local_url(environ: Mapping[str, str]) -> str:
    """URL of a server that runs with the same environment."""
    settings = Settings.from_env(environ)
    return f"http://{join_host(_LOOPBACK.get(settings.host, settings.host), settings.port)}"


def check(url: str, token: str) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(f"{url}/readyz", headers=headers), timeout=_TIMEOUT_S) as response:
            return READY, response.read().decode()
    except HTTPError as error:
        return NOT_READY, error.read().decode(errors="replace")
    except (URLError, OSError, ValueError, http.client.HTTPException) as error:
        return UNREACHABLE, str(getattr(error, "reason", error))


def summary(code: int, text: str) -> str:
    if code == READY:
        return "ready"
    if code == UNREACHABLE:
        return f"no response ({text}); is the server running, and is this its address?"
    try:
        body = json.loads(text)
        return str(body.get("message") or body.get("error", {}).get("message") or body.get("status") or text)
    except (ValueError, AttributeError):
        return "not the response of a topics server; is this its address?"
