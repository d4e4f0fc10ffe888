"""The server as the command line sees it: over HTTP, like any other client."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

DEFAULT_URL = "http://127.0.0.1:4000"
ANSWER_S = 35.0  # a stream says something every 15 s, or it is broken


class Unreachable(Exception):
    """No answer, or one that broke off: the server may be back in a moment."""


class Refused(Exception):
    """An answer that is not a success. `code` is empty when it is not one of this server's."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Server:
    def __init__(self, url: str, key: str = "") -> None:
        """ValueError says what is wrong with the address or the key."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; one looks like {DEFAULT_URL}")
        if not key.isprintable() or not key.isascii():
            raise ValueError("the key has characters that no key has")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._root = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def post(self, path: str, body: Any) -> bytes:
        headers = {"Content-Type": "application/json"}
        with self._request("POST", path, msgspec.json.encode(body), headers) as response:
            return response.read()

    @contextmanager
    def stream(self, path: str, last_event_id: str) -> Iterator[Iterator[bytes]]:
        """The lines of an event stream, until it ends or breaks."""
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        with self._request("GET", path, None, headers) as response:
            yield iter(response.readline, b"")

    @contextmanager
    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=ANSWER_S)
        try:
            connection.request(method, self._root + path, body, {**self._headers, **headers})
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            yield response
        except ssl.SSLCertVerificationError as error:
            raise Refused(0, "", f"its certificate is not trusted: {error.verify_message}") from error
        except TimeoutError as error:
            raise Unreachable("it does not answer") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(_reason(error)) from error
        finally:
            connection.close()


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected):
        return "the connection broke"
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).lower()


class _Error(msgspec.Struct):
    code: str
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


def _refused(response: http.client.HTTPResponse) -> Refused:
    try:
        error = msgspec.json.decode(response.read(1 << 20), type=_ErrorBody).error
    except msgspec.DecodeError:
        what = f"it answers {response.status} {response.reason}, and not like a topics server"
        return Refused(response.status, "", what)
    return Refused(response.status, error.code, error.message)
