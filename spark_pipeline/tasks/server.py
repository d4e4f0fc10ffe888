"""HTTP client for jobs and readers, with a key from the environment and retries.

Temporary errors (429, 503) and broken connections are retried: all calls here are idempotent.
"""

from __future__ import annotations

import http.client
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from spark_pipeline.tasks.manifest import NoManifest
from spark_pipeline.tasks.names import is_pattern, pick_names, split_names

ANSWER_S = 60.0
PATIENCE_S = 60.0  # how long to retry while a server is starting or overloaded
PAUSE_S = (0.1, 5.0)  # first pause between retries, doubled each time, and the maximum
TOKEN_ENV = "TOPICS_TOKEN"
FRAMES = "application/vnd.topics.frames"

_BUSY = frozenset({429, 503})
# Limits that do not clear up soon, so that a retry does not help.
_FINAL_LIMITS = frozenset({"snapshots", "disk_full", "txn_producers", "txn_max_bytes"})


class Unreachable(Exception):
    """No response, after all retries."""


class Refused(Exception):
    """The server responded with an error."""

    def __init__(self, status: int, code: str, message: str, detail: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status, self.code, self.detail = status, code, detail


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Server:
    """Client with one connection, which is reopened when it breaks. Not thread-safe."""

    def __init__(
        self,
        url: str,
        token_env: str = TOKEN_ENV,
        *,
        patience_s: float = PATIENCE_S,
        answer_s: float = ANSWER_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """Raises ValueError for an invalid URL. If the variable `token_env` is not set, no key is sent."""
        invalid = ValueError(f"{url!r} is not the URL of a server; a valid one is http://127.0.0.1:4000")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:  # invalid port
            raise invalid from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise invalid
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._root = parts.path.rstrip("/")
        token = os.environ.get(token_env, "")
        self._headers = {"Topics-Strict": "1"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self.token_env = token_env
        self.patience_s, self._answer_s = patience_s, answer_s
        self._on_wait = on_wait  # called once when there is no response yet
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str) -> Any:
        return self.request("GET", path).json

    def post(self, path: str, body: Any) -> Any:
        return self.request("POST", path, body).json

    def topic(self, name: str, path: str = "") -> str:
        """The path of a topic, with an optional suffix."""
        return f"/v0/topics/{quote(name, safe='')}{path}"

    def topics(self) -> list[dict[str, Any]]:
        """All topics that the key has access to."""
        rows: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = self.get(f"/v0/topics?page_size=1000{cursor}")
            rows += page["topics"]
            if not page.get("next_cursor"):
                return rows
            cursor = f"&cursor={quote(page['next_cursor'], safe='')}"

    def request(self, method: str, path: str, body: Any = None, *, accept: str = "") -> Answer:
        """Send a request with retries; return the successful response. Raises Refused or Unreachable."""
        content = None if body is None else msgspec.json.encode(body)
        headers = dict(self._headers)
        if content is not None:
            headers["Content-Type"] = "application/json"
        if accept:
            headers["Accept"] = accept
        give_up = time.monotonic() + self.patience_s
        pause_s = PAUSE_S[0]
        while True:
            wait_s = pause_s
            try:
                answer = self._once(method, self._root + path, content, headers)
            except ssl.SSLCertVerificationError as error:
                raise Unreachable(
                    f"{self.url}: its certificate is not trusted ({error.verify_message})"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() + wait_s > give_up:
                    raise Unreachable(f"{self.url} is unreachable: {_reason(error)}") from error
                if self._on_wait is not None:
                    self._on_wait(f"{self.url} is unreachable ({_reason(error)}); retrying")
                    self._on_wait = None
            else:
                if 200 <= answer.status < 300:
                    return answer
                refused = self._refused(answer)
                limit = str(refused.detail.get("limit", ""))
                wait_s = max(wait_s, _retry_after_s(answer))
                is_temporary = answer.status in _BUSY and limit not in _FINAL_LIMITS
                if not is_temporary or time.monotonic() + wait_s > give_up:
                    raise refused
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _once(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> Answer:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=self._answer_s)
        self._connection.request(method, path, content, headers)
        response = self._connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, received, response.read())

    def _refused(self, answer: Answer) -> Refused:
        try:
            error = answer.json["error"]
            code, message, detail = error["code"], error["message"], error.get("detail", {})
        except (msgspec.DecodeError, KeyError, TypeError):
            return Refused(
                answer.status, "", f"{self.url} is not a topics server: it responded with {answer.status}", {}
            )
        if answer.status in {401, 403}:
            message += f"; the key is read from the environment variable {self.token_env}"
        if detail.get("limit") == "snapshots":
            message += ". Each batch that Spark reads keeps a snapshot for its pinTtl"
        return Refused(answer.status, code, message, detail)


def _retry_after_s(answer: Answer) -> float:
    text = answer.headers.get("retry-after", "")
    return min(float(text), PAUSE_S[1]) if text.isdigit() else 0.0


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).lower()


def wanted_topics(server: Server, wanted: str) -> list[str]:
    """The topics of a comma-separated list of names and patterns. A single name is not looked up: later calls fail if it does not exist."""
    parts = split_names(wanted)
    if len(parts) == 1 and not is_pattern(parts[0]):
        return parts
    picked = pick_names(sorted(row["topic"] for row in server.topics()), parts)
    if isinstance(picked, str):
        raise NoManifest(f"{server.url} has no topic {picked!r}, or the key has no access to it")
    return picked
