"""Checks of the `Host` and `Origin` headers against cross-site requests and DNS rebinding.

A browser lets any page send requests to a server on the same machine. Without API keys the server cannot tell such a
request from one sent by a program, so it refuses

    Origin   a page of another origin, unless TOPICS_CORS_ORIGINS lists it
    Host     an unknown name: an attacker can make the name of a page resolve to this server (DNS rebinding), which
             gives the page the server's origin. IP addresses and `localhost` cannot be rebound.

With keys a page would need a key. Then only WebSocket upgrades have their Origin checked: browsers do not restrict them.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TypeAlias, TypeVar

KNOWN_MAX = 256  # accepted values that are cached
KNOWN_BYTES_MAX = 512
ANY = "*"

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+?)\.?(?::([0-9]{1,5}))?")
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]/]+?)\.?(?::([0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}

_Known = TypeVar("_Known")
Refusal: TypeAlias = tuple[str, str, dict[str, object]]  # code, message, detail


def split_list(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def read_origin(text: str) -> tuple[str, str, str] | None:
    """Scheme, host and port, in lower case and with the default port; None if it is not an origin, such as `null`."""
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        return None
    scheme, name, port = found.groups()
    return scheme, name, port or _DEFAULT_PORTS.get(scheme, "")


def read_host(text: str) -> tuple[str, str] | None:
    """Host and port, in lower case; the port is empty if there is none."""
    found = _HOST.fullmatch(text.lower())
    return (found[1], found[2] or "") if found is not None else None


def _remember(known: set[_Known], value: _Known, size: int) -> None:
    if size <= KNOWN_BYTES_MAX:
        if len(known) >= KNOWN_MAX:
            known.clear()
        known.add(value)


# Response headers that a page may read.
EXPOSED = (
    "Allow",
    "Retry-After",
    "Topics-Catch-Up-Timed-Out",
    "Topics-Caught-Up",
    "Topics-Count",
    "Topics-Earliest-Seq",
    "Topics-Epoch",
    "Topics-Head-Seq",
    "Topics-Ignored",
    "Topics-Next-From-Seq",
    "Topics-Tombstone",
    "WWW-Authenticate",
)
_EXPOSE_HEAD = f"Access-Control-Expose-Headers: {', '.join(EXPOSED)}\r\n".encode()


class Origins:
    def __init__(self, *, allowed_hosts: str, cors_origins: str, bound_host: str, has_keys: bool) -> None:
        listed = split_list(allowed_hosts)
        self._any_host = has_keys or ANY in listed
        self._hosts = {read_host(name) for name in ("localhost", bound_host, *listed)} - {None}
        origins = split_list(cors_origins)
        self._any_origin = ANY in origins
        self._origins = {read_origin(origin) for origin in origins} - {None}
        self._has_keys = has_keys
        self.has_cors = bool(origins)
        self.known_hosts: set[bytes] = set()
        self._known_pages: set[tuple[bytes, bytes]] = set()  # Origin, and the Host it was sent with

    def refusal(self, host: bytes, origin: bytes, *, is_websocket: bool) -> Refusal | None:
        """The error for a request with these headers, if any. An absent header is empty."""
        if host not in self.known_hosts:
            if not self._answers_to(host):
                name = host.decode("utf-8", "replace")
                text = f"this server does not accept the host name {name}: add it to TOPICS_ALLOWED_HOSTS, or use localhost or an IP address"
                return "misdirected_request", text, {"host": name}
            _remember(self.known_hosts, host, len(host))
        if origin and (is_websocket or not self._has_keys) and (origin, host) not in self._known_pages:
            if not self._may_use(origin, host):
                name = origin.decode("utf-8", "replace")
                text = f"pages of {name} may not use this server: add the origin to TOPICS_CORS_ORIGINS"
                return "forbidden_origin", text, {"origin": name}
            _remember(self._known_pages, (origin, host), len(origin) + len(host))
        return None

    def _answers_to(self, host: bytes) -> bool:
        if self._any_host or not host:  # only HTTP/1.0 clients may omit it, and no browser does
            return True
        found = read_host(host.decode("utf-8", "replace"))
        if found is None:
            return False
        name, _ = found
        if found in self._hosts or (name, "") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _may_use(self, origin: bytes, host: bytes) -> bool:
        if self.lists(origin):
            return True
        page, here = (
            read_origin(origin.decode("utf-8", "replace")),
            read_host(host.decode("utf-8", "replace")),
        )
        if page is None or here is None:
            return False
        scheme, *authority = page
        # TLS may be terminated by a proxy: the scheme only determines the default port.
        default = _DEFAULT_PORTS.get(scheme)
        return default is not None and authority == [here[0], here[1] or default]

    def lists(self, origin: bytes) -> bool:
        """Whether TOPICS_CORS_ORIGINS lists the origin."""
        if self._any_origin or not self._origins:
            return self._any_origin
        return read_origin(origin.decode("utf-8", "replace")) in self._origins

    def cors_head(self, origin: bytes) -> bytes:
        """CORS header lines of a response to this origin."""
        if self._any_origin:
            return b"Access-Control-Allow-Origin: *\r\n" + _EXPOSE_HEAD
        if origin and self.lists(origin):
            return b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\n%b" % (origin, _EXPOSE_HEAD)
        return b"Vary: Origin\r\n"
