"""`topics health`: whether the server serves, as an exit code. For container health checks and for scripts that wait for a start."""

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
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listening there is reached here
_ANSWER_S = 4.0
_LOOK_S = 0.2


@click.command(epilog="Exit codes: 0 every shard serves; 1 not yet, or not all of them; 3 no answer.")
@contexts.server_options
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Keep asking for this long until it is ready.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the server's own answer.")
def health(url: str | None, token: str | None, context: str | None, wait_s: float, as_json: bool) -> int:
    """Check whether every shard of a server serves, and say so with the exit code.

    Without --url, --context and TOPICS_URL it asks the server that TOPICS_HOST and TOPICS_PORT describe.
    """
    server = choose(url, token, context, os.environ)
    end = time.monotonic() + wait_s
    while True:
        code, text = ask(server.url, server.token)
        if code == READY or time.monotonic() >= end:
            break
        time.sleep(_LOOK_S)
    with ignore_broken_pipe():
        print(text if as_json and code != UNREACHABLE else f"{server.url}: {summary(code, text)}")
    return code


def choose(
    url: str | None, token: str | None, context: str | None, environ: Mapping[str, str]
) -> contexts.Server:
    """As for every command; but beside a server its own settings go before a saved server."""
    is_beside = any(environ.get(name) for name in ("TOPICS_HOST", "TOPICS_PORT"))
    if is_beside and not (url or context or environ.get("TOPICS_URL")):
        url = local_url(environ)
    server = contexts.choose(url, token, context, environ)
    address = server.url or local_url(environ)
    return contexts.Server((address if "://" in address else f"http://{address}").rstrip("/"), server.token)


def local_url(environ: Mapping[str, str]) -> str:
    """Where a server with the same environment listens."""
    settings = Settings.from_env(environ)
    return f"http://{join_host(_ANYWHERE.get(settings.host, settings.host), settings.port)}"


def ask(url: str, token: str) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(f"{url}/readyz", headers=headers), timeout=_ANSWER_S) as answer:
            return READY, answer.read().decode()
    except HTTPError as error:
        return NOT_READY, error.read().decode(errors="replace")
    except (URLError, OSError, ValueError, http.client.HTTPException) as error:
        return UNREACHABLE, str(getattr(error, "reason", error))


def summary(code: int, text: str) -> str:
    if code == READY:
        return "ready"
    if code == UNREACHABLE:
        return f"no answer ({text}); is the server running, and is this its address?"
    try:
        said = json.loads(text)
        return str(said.get("message") or said.get("error", {}).get("message") or said.get("status") or text)
    except (ValueError, AttributeError):
        return "it does not answer like a topics server; is this its address?"
