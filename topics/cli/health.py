"""`topics health`: whether the server serves, as an exit code. For container health checks and for scripts that wait for a start."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from topics.printing import while_it_is_read
from topics.settings import Settings, join_host

READY, NOT_READY, UNREACHABLE = 0, 1, 3
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listening there is reached here
_ANSWER_S = 4.0
_LOOK_S = 0.2


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="topics health",
        description="Ask a server whether every shard of it serves.",
        epilog="exit codes: 0 it does; 1 not yet, or not all; 3 it does not answer",
    )
    parser.add_argument("--url", help="default: TOPICS_URL, or where the server of this environment listens")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="look again for so long")
    parser.add_argument("--json", action="store_true", help="print what the server says as it is")
    options = parser.parse_args(arguments)
    url = (options.url or local_url(os.environ)).rstrip("/")
    end = time.monotonic() + options.wait
    while True:
        code, text = ask(url, os.environ.get("TOPICS_TOKEN", ""))
        if code == READY or time.monotonic() >= end:
            break
        time.sleep(_LOOK_S)
    with while_it_is_read():
        print(text if options.json and code != UNREACHABLE else f"{url}: {summary(code, text)}")
    return code


def local_url(environ: Mapping[str, str]) -> str:
    """Where a server with the same environment is to be found."""
    if environ.get("TOPICS_URL"):
        return environ["TOPICS_URL"]
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
