"""Client settings: address, key, timeouts, retries."""

from __future__ import annotations

import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from topics.client.answers import RAW_TYPES
from topics.client.flows import Core, Retries
from topics.client.tracing import current_traceparent

DEFAULT_URL = "http://127.0.0.1:4000"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds. `wait_ms` of a call is added to `answer_s`."""

    connect_s: float = 5.0
    answer_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed server URL."""

    url: str
    is_https: bool
    host: str
    port: int
    root: str  # path prefix, for example behind a proxy

    @classmethod
    def parse(cls, url: str) -> Address:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        is_invalid = parts.scheme not in ("http", "https") or parts.query or parts.fragment
        if is_invalid or not parts.hostname or port == -1:
            raise ValueError(f"{url!r} is not the URL of a server; a valid one is {DEFAULT_URL}")
        is_https = parts.scheme == "https"
        root = parts.path.rstrip("/")
        return cls(
            f"{parts.scheme}://{parts.netloc}{root}",
            is_https,
            parts.hostname,
            port or (443 if is_https else 80),
            root,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of both clients."""

    address: Address
    headers: Mapping[str, str]  # sent with every request
    timeouts: Timeouts
    ssl_context: ssl.SSLContext | None
    pool_size: int
    core: Core


def make_settings(
    url: str | None,
    token: str | None,
    node: str | None,
    timeouts: Timeouts | None,
    retries: Retries | None,
    ssl_context: ssl.SSLContext | None,
    now: Callable[[], float] | None,
    chance: random.Random | None,
    pool_size: int = 16,
    raw: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Settings from the arguments, else from TOPICS_URL and TOPICS_TOKEN (or TOPICS_API_KEY)."""
    address = Address.parse(url or environ.get("TOPICS_URL") or DEFAULT_URL)
    if token is None:
        token = environ.get("TOPICS_TOKEN") or environ.get("TOPICS_API_KEY") or ""
    if not token.isascii() or not token.isprintable():
        raise ValueError("the token contains characters that are not printable ASCII")
    if pool_size < 1:
        raise ValueError("pool_size must be at least 1")
    # Idempotency keys must be unique even among processes that seed `random` alike.
    chance = chance or random.SystemRandom()
    core = Core(
        address.url,
        node or f"{socket.gethostname()[:64]}-{os.getpid()}-{chance.getrandbits(32):08x}",
        retries or Retries(),
        now or time.monotonic,
        lambda: time.time_ns() // 1_000_000,
        chance,
        RAW_TYPES if raw else {},
        current_traceparent,
    )
    headers = {"Topics-Strict": "1"}  # the server rejects unknown fields instead of ignoring them
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return Settings(address, headers, timeouts or Timeouts(), ssl_context, pool_size, core)
