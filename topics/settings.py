"""What the environment says. A field `max_topics` is read from the variable TOPICS_MAX_TOPICS.

Numbers are forgiving, as the interface promises: text that is no whole number of
at least zero means the default, and a number outside its range means the nearest
end of it. What would be unsafe is not forgiven: `problems()` lists it, and the server refuses to start.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from topics import api_keys
from topics.engine import limits
from topics.extras import install

PREFIX = "TOPICS_"
LogFormat = Literal["auto", "human", "json"]

_HIDDEN = frozenset({"api_keys"})
# Only these two switch something on: TOPICS_ALLOW_INSECURE_NO_AUTH must not be guessed from other words.
_BOOLS = {"1": True, "true": True, "0": False, "false": False, "no": False, "off": False}
_LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
# Eighteen digits always fit a signed 64-bit number.
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


def _doc(description: str, *, ge: int | None = None, le: int | None = None) -> Meta:
    return Meta(description=description, ge=ge, le=le)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The server's settings; every process of it reads the same environment."""

    # Where it listens, and for whom.
    host: Annotated[str, _doc("address, or host:port; TOPICS_PORT is then ignored")] = "127.0.0.1"
    port: Annotated[int, _doc("port; 0 lets the system choose")] = 4000
    port_file: Annotated[str | None, _doc("gets the actual host:port once it is bound")] = None
    api_keys: Annotated[str, _doc("secret[:scopes[:prefixes]],…; none: everyone may do everything")] = ""
    allow_insecure_no_auth: Annotated[bool, _doc("1: listen beyond loopback without keys")] = False
    probe_auth: Annotated[bool, _doc("1: health and readiness need a key")] = False

    # Where data is, and in what portions.
    data_dir: Annotated[str, _doc("all that lasts; one server at a time")] = "./topics-data"
    cold_dir: Annotated[str | None, _doc("where old segments go; unset: nowhere")] = None
    # None lets an existing data directory decide, and the number of CPUs for a new one.
    wal_shards: Annotated[
        int | None, _doc("worker processes [as before; at first CPUs, at most 8]", ge=1, le=256)
    ] = None
    segment_max_events: Annotated[int, _doc("records that seal a segment", ge=1)] = 10_000
    segment_max_bytes: Annotated[int, _doc("bytes that seal a segment", ge=1)] = 64 * limits.MIB
    segment_max_age_ms: Annotated[int, _doc("age that seals a segment; 0: none")] = 3_600_000
    hot_retain_segments: Annotated[int, _doc("newest sealed segments kept hot")] = 4
    hot_retain_bytes: Annotated[int, _doc("a further bound on them; 0: none")] = 0
    relocate_bytes_per_s: Annotated[int, _doc("segments that move there, per shard; 0: no bound")] = (
        32 * limits.MIB
    )
    cold_cache_bytes: Annotated[int, _doc("cold records in memory, per shard")] = 32 * limits.MIB
    retire_grace_ms: Annotated[int, _doc("merged segments stay on disk this long")] = 86_400_000
    plan_ttl_ms: Annotated[int, _doc("a merge plan nobody leases is forgotten after this")] = 604_800_000
    min_free_bytes: Annotated[int, _doc("less space than this: no appends; 0: off")] = 256 * limits.MIB
    reclaim_bytes_per_s: Annotated[int, _doc("rewriting of dead segments, per shard; 0: no bound")] = (
        32 * limits.MIB
    )
    cache_bytes: Annotated[int, _doc("recent payloads in memory, per shard")] = 32 * limits.MIB
    wal_file_bytes: Annotated[int, _doc("size of one log file", ge=limits.MIB)] = 64 * limits.MIB

    # What one request may hold. The engine's own bounds cannot be raised from here.
    max_body_bytes: Annotated[int, _doc("a larger request body is refused", ge=1)] = 64 * limits.MIB

    # What may exist at once; 0 means no cap.
    max_topics: Annotated[int, _doc("topics; 0: no cap, here and below")] = 100_000
    max_routers: Annotated[int, _doc("forwarding rules")] = 10_000
    max_watch_sessions: Annotated[int, _doc("stored watch sessions")] = 10_000
    max_sse_connections: Annotated[int, _doc("open streams and WebSockets")] = 10_000
    max_sse_connections_per_key: Annotated[int, _doc("the same, per key")] = 1000
    max_inflight_per_key: Annotated[int, _doc("concurrent requests per key")] = 1000
    max_memory_bytes: Annotated[
        int, _doc("records of ephemeral topics, per shard; no record fits into 0")
    ] = 256 * limits.MIB
    max_total_bytes: Annotated[int, _doc("live bytes of all topics")] = 0
    txn_max_bytes: Annotated[int, _doc("staged in one transaction")] = 16 << 30
    txn_shard_bytes: Annotated[int, _doc("staged in all transactions, per shard")] = 64 << 30

    # How the processes run.
    fronts: Annotated[int, _doc("front processes that share the port", ge=1, le=64)] = 1
    ping_timeout_ms: Annotated[int, _doc("a process silent for this long is restarted", ge=100)] = 30_000
    keepalive_ms: Annotated[int, _doc("an idle connection is closed after this")] = 75_000
    request_timeout_ms: Annotated[int, _doc("an incomplete request is given up after this")] = 60_000
    fast_path: Annotated[bool, _doc("0: no short cut for plain requests; for finding faults")] = True
    otel: Annotated[
        bool | None, _doc("1: spans of requests, as OTEL_… says [if OTEL_… names a collector]")
    ] = None
    log_format: Annotated[LogFormat, _doc("auto: human on a terminal, else json")] = "auto"
    verify: Annotated[bool, _doc("1: check every invariant after every turn; slow")] = False
    test_min_heartbeat_ms: Annotated[int, _doc("test aid: lowest heartbeat_ms of a watch", ge=1, le=1000)] = (
        1000
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        texts = {name: environ.get(variable(name), "").strip() for name in cls.__struct_fields__}
        texts["host"], port = split_host(texts["host"])
        if port is not None:
            texts["port"] = port
        values: dict[str, Any] = {name: _parse(kind, meta, texts[name]) for name, kind, meta in _fields()}
        if port is not None and not texts["host"]:
            values["host"] = ""
        if (values["port"] or 0) > 65535:
            values["port"] = None
        return cls(**{name: value for name, value in values.items() if value is not None})

    def problems(self) -> list[str]:
        """Why the server must not start like this, in words that name no secret. May ask the resolver."""
        try:
            keys = api_keys.parse_keys(self.api_keys)
        except ValueError as error:
            return [f"TOPICS_API_KEYS: {error}"]
        if self.otel and not _can_trace():
            return [f"TOPICS_OTEL=1 needs packages that are not installed: {install('otel')}, or unset it"]
        if not self.host:
            return ["TOPICS_HOST names a port but no host"]
        if not keys and not self.allow_insecure_no_auth and not is_loopback(self.host):
            return [
                f"TOPICS_HOST={self.host} is not a loopback address and there are no API keys, so anyone who reaches it "
                "could read and write everything; set TOPICS_API_KEYS, or TOPICS_ALLOW_INSECURE_NO_AUTH=1 if that is meant"
            ]
        return []

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in _HIDDEN]

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


# Whoever sets one of these has a collector.
_COLLECTORS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER",
)  # fmt: skip


def wants_spans(environ: Mapping[str, str]) -> bool:
    """TOPICS_OTEL decides, and where it says nothing the variables that all of OpenTelemetry goes by."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    wanted = Settings.from_env(environ).otel
    if wanted is not None:
        return wanted
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter in ("", "otlp") and any(environ.get(name, "").strip() for name in _COLLECTORS)


def _can_trace() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def variable(field: str) -> str:
    return PREFIX + field.upper()


def describe() -> list[tuple[str, str, str]]:
    """Name, default and meaning of every variable, in the order of the fields."""
    rows = []
    defaults = Settings()
    for name, _, meta in _fields():
        default = getattr(defaults, name)
        shown = (
            ""
            if default is None or default == ""
            else str(int(default) if isinstance(default, bool) else default)
        )
        rows.append((variable(name), shown, meta.description or ""))
    return rows


def split_host(text: str) -> tuple[str, str | None]:
    """The host and, when the text has one, the port: `host`, `host:port`, `[v6]`, `[v6]:port`, bare `v6`."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest[1:] if rest.startswith(":") else None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None


def join_host(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True when every address of the host is one; a name that does not resolve is not trusted."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(
        ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found
    )


def _fields() -> list[tuple[str, Any, Meta]]:
    """Name, type and description of each field."""
    hints = get_type_hints(Settings, include_extras=True)
    return [(name, *get_args(hints[name])) for name in Settings.__struct_fields__]


def _parse(kind: Any, meta: Meta, text: str) -> str | int | bool | None:
    """The value of a variable's text; None means the default."""
    if not text:
        return None
    if bool in (kind, *get_args(kind)):
        return _BOOLS.get(text.lower())
    if kind == LogFormat:
        return text.lower() if text.lower() in _LOG_FORMATS else None
    if int in (kind, *get_args(kind)):
        return _parse_number(meta, text)
    return text


def _parse_number(meta: Meta, text: str) -> int | None:
    if not _NUMBER.fullmatch(text):
        return None
    number = int(text)
    if meta.ge is not None:
        number = max(number, int(meta.ge))
    if meta.le is not None:
        number = min(number, int(meta.le))
    return number
