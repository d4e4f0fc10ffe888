"""Settings from environment variables. The field `max_topics` is the variable TOPICS_MAX_TOPICS; empty means unset.

Durations (`…_ms`) and sizes (`…_bytes`, `…_bytes_per_s`) accept units: 30s, 64MiB. Invalid values are not fatal, as
documented: the default is used instead, and a number outside its range is clamped. `find_warnings()` lists these, and unknown
variables; the server logs them at startup, and refuses to start with TOPICS_STRICT_SETTINGS=1. Unsafe settings are always
refused: `problems()`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from topics.api import api_keys, limits
from topics.api.origins import ANY, read_host, read_origin, split_list
from topics.system.extras import install_command
from topics.system.quantities import milliseconds, size_bytes

PREFIX = "TOPICS_"
LogFormat = Literal["auto", "human", "json"]

_HIDDEN = frozenset({"api_keys"})
# Only these two mean true: TOPICS_ALLOW_INSECURE_NO_AUTH must not be guessed from other words.
_BOOLS = {"1": True, "true": True, "0": False, "false": False, "no": False, "off": False}
_LISTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "allowed_hosts": (read_host, "a host name such as topics.example.com or topics:4000"),
    "cors_origins": (read_origin, "an origin such as https://app.example.com"),
}
_LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
# 18 digits always fit into a signed 64-bit integer.
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_NUMBER_END = 10**18
_SHOWN_MAX = 100  # characters of an invalid value

# Variables for fixed limits of the HTTP API.
_FIXED = {
    "TOPICS_MAX_BATCH_RECORDS": limits.BATCH_RECORDS_MAX,
    "TOPICS_MAX_RECORD_BYTES": limits.RECORD_BYTES_MAX,
    "TOPICS_MAX_META_BYTES": 16 * limits.KIB,
    "TOPICS_MAX_TAG_BYTES": 256,
    "TOPICS_MAX_NODE_BYTES": limits.NODE_BYTES_MAX,
    "TOPICS_MAX_LIMIT": limits.DIFF_LIMIT_MAX,
    "TOPICS_MAX_WATCH_TOPICS": 256,
    "TOPICS_MAX_CLAIM": limits.CLAIM_MAX,
}
# Variables of other programs, which may be set in the server's environment. A test compares this list with the source tree.
OTHER_VARIABLES = frozenset({
    "TOPICS_URL", "TOPICS_TOKEN", "TOPICS_API_KEY",  # the client
    "TOPICS_CONFIG",  # the command
    "TOPICS_JOB_TOPIC", "TOPICS_JOB_SEQ", "TOPICS_JOB_TAG", "TOPICS_JOB_TS", "TOPICS_JOB_DELIVERIES",  # `topics queue work`
    "TOPICS_OFFLINE_TOKEN",  # Spark jobs
    "TOPICS_BASE_IMAGE", "TOPICS_PUBLISH", "TOPICS_SPARK_MEMORY",  # the compose file
    "TOPICS_NEEDS", "TOPICS_ROOT", "TOPICS_VENV",  # scripts
    "TOPICS_FAILPOINTS", "TOPICS_COLD_FAILPOINTS",  # tests of crashes
})  # fmt: skip
# Variables that Kubernetes injects for a service called `topics` or `topics-…`: TOPICS_SERVICE_HOST, TOPICS_PORT_4000_TCP_ADDR …
_SERVICE_LINK = re.compile(
    r"TOPICS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)
# Kubernetes also sets TOPICS_PORT, to such a URL.
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")


class SettingsWarning(NamedTuple):
    """A variable that is invalid, unknown or has no effect. The text gives the value in use, but no secret."""

    variable: str
    text: str


def _doc(description: str, *, ge: int | None = None, le: int | None = None) -> Meta:
    return Meta(description=description, ge=ge, le=le)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The server's settings; all its processes read the same environment."""

    # Listening and access.
    host: Annotated[str, _doc("address to listen on, or host:port, which overrides TOPICS_PORT")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _doc("port to listen on; 0: any free port", le=65535)] = 4000
    port_file: Annotated[str | None, _doc("file to write the bound host:port to")] = None
    api_keys: Annotated[str, _doc("secret[:scopes[:prefixes]],…; unset: no authentication")] = ""
    allow_insecure_no_auth: Annotated[bool, _doc("1: allow a non-loopback address without keys")] = False
    allowed_hosts: Annotated[
        str, _doc("host names accepted without keys, besides localhost and IP addresses; *: any")
    ] = ""
    cors_origins: Annotated[str, _doc("other origins whose web pages may use the server; *: any")] = ""
    probe_auth: Annotated[bool, _doc("1: require a key for health and readiness")] = False
    strict_settings: Annotated[bool, _doc("1: refuse to start with unknown or invalid variables")] = False

    # Storage.
    data_dir: Annotated[str, _doc("data directory; used by one server at a time")] = "./topics-data"
    cold_dir: Annotated[str | None, _doc("directory of the cold tier, for old segments; unset: none")] = None
    # None: as in an existing data directory, or the number of CPUs for a new one.
    wal_shards: Annotated[
        int | None,
        _doc("worker processes [as before; for a new directory the CPUs, at most 8]", ge=1, le=256),
    ] = None
    segment_max_events: Annotated[int, _doc("maximum records of a segment", ge=1)] = 10_000
    segment_max_bytes: Annotated[int, _doc("maximum bytes of a segment", ge=1)] = 64 * limits.MIB
    segment_max_age_ms: Annotated[int, _doc("maximum age of an open segment; 0: no limit")] = 3_600_000
    hot_retain_segments: Annotated[int, _doc("newest sealed segments kept hot")] = 4
    hot_retain_bytes: Annotated[int, _doc("maximum bytes of sealed segments kept hot; 0: no limit")] = 0
    relocate_bytes_per_s: Annotated[int, _doc("rate of moves to the cold tier, per shard; 0: no limit")] = (
        32 * limits.MIB
    )
    cold_cache_bytes: Annotated[int, _doc("cache of cold records, per shard")] = 32 * limits.MIB
    retire_grace_ms: Annotated[int, _doc("how long merged segments stay on disk")] = 86_400_000
    plan_ttl_ms: Annotated[int, _doc("how long a merge plan without a lease is kept")] = 604_800_000
    min_free_bytes: Annotated[int, _doc("appends are refused below this free space; 0: off")] = (
        256 * limits.MIB
    )
    reclaim_bytes_per_s: Annotated[int, _doc("rate of compaction, per shard; 0: no limit")] = 32 * limits.MIB
    cache_bytes: Annotated[int, _doc("cache of recent payloads, per shard")] = 32 * limits.MIB
    wal_file_bytes: Annotated[int, _doc("size of a log file", ge=limits.MIB)] = 64 * limits.MIB

    # Requests. The engine's own limits are fixed.
    max_body_bytes: Annotated[int, _doc("maximum size of a request body", ge=1)] = 64 * limits.MIB
    strict_requests: Annotated[bool, _doc("1: unknown fields in request bodies are an error")] = False

    # Caps; 0 means none.
    max_topics: Annotated[int, _doc("topics; 0: no cap, here and below")] = 100_000
    max_routers: Annotated[int, _doc("forwarding rules")] = 10_000
    max_watch_sessions: Annotated[int, _doc("stored watch sessions")] = 10_000
    max_watch_sessions_per_key: Annotated[int, _doc("the same, per key")] = 1000
    max_sse_connections: Annotated[int, _doc("open streams and WebSockets")] = 10_000
    max_sse_connections_per_key: Annotated[int, _doc("the same, per key")] = 1000
    max_inflight_per_key: Annotated[int, _doc("concurrent requests per key")] = 1000
    max_memory_bytes: Annotated[int, _doc("records of ephemeral topics, per shard; 0 refuses them")] = (
        256 * limits.MIB
    )
    max_total_bytes: Annotated[int, _doc("live bytes of all topics")] = 0
    txn_max_bytes: Annotated[int, _doc("bytes staged in one transaction")] = 16 << 30
    txn_shard_bytes: Annotated[int, _doc("bytes staged in all transactions, per shard")] = 64 << 30

    # Processes.
    fronts: Annotated[int, _doc("front processes that share the port", ge=1, le=64)] = 1
    ping_timeout_ms: Annotated[
        int, _doc("a process that does not respond for this long is restarted", ge=100)
    ] = 30_000
    keepalive_ms: Annotated[int, _doc("idle time after which a connection is closed")] = 75_000
    request_timeout_ms: Annotated[int, _doc("maximum time for a request to arrive")] = 60_000
    fast_path: Annotated[bool, _doc("0: parse the head of every request in full; for debugging")] = True
    handover: Annotated[
        int,
        _doc("a worker serves a connection from this request in a row for its topics on; 0: never", le=1000),
    ] = 0
    otel: Annotated[
        bool | None, _doc("1: send request spans, configured by OTEL_… [if OTEL_… names a collector]")
    ] = None
    log_format: Annotated[LogFormat, _doc("auto: human on a terminal, otherwise json")] = "auto"
    verify: Annotated[bool, _doc("1: check every invariant after every turn; slow")] = False
    test_min_heartbeat_ms: Annotated[
        int, _doc("for tests: lowest heartbeat_ms of a watch", ge=1, le=1000)
    ] = 1000

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        return _read(environ)[0]

    def problems(self) -> list[str]:
        """Reasons why the server must not start with these settings, without secrets. May resolve the host name."""
        try:
            keys = api_keys.parse_keys(self.api_keys)
        except ValueError as error:
            return [f"TOPICS_API_KEYS: {error}"]
        if self.otel and not _can_trace():
            return [
                f"TOPICS_OTEL=1 needs packages that are not installed: run {install_command('otel')}, or unset it"
            ]
        if not self.host:
            return ["TOPICS_HOST has a port but no host"]
        if not keys and not self.allow_insecure_no_auth and not is_loopback(self.host):
            return [
                f"TOPICS_HOST={self.host} is not a loopback address and there are no API keys, so anyone on the network "
                "could read and write everything; set TOPICS_API_KEYS, or TOPICS_ALLOW_INSECURE_NO_AUTH=1 to allow it"
            ]
        return []

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in _HIDDEN]

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


# Each of these variables implies a collector.
_COLLECTORS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER",
)  # fmt: skip


def wants_spans(environ: Mapping[str, str]) -> bool:
    """Whether to send spans: by TOPICS_OTEL, or if unset by the standard variables of OpenTelemetry."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    wanted = Settings.from_env(environ).otel
    if wanted is not None:
        return wanted
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter in ("", "otlp") and any(environ.get(name, "").strip() for name in _COLLECTORS)


def hands_over(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether fronts hand connections over to workers. Not with request spans, which only fronts send."""
    return settings.handover > 0 and not wants_spans(environ)


def _can_trace() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def variable(field: str) -> str:
    return PREFIX + field.upper()


def describe() -> list[tuple[str, str, str]]:
    """Name, default and description of every variable, in the order of the fields."""
    rows = []
    defaults = Settings()
    for name, _, meta in _fields():
        default = getattr(defaults, name)
        shown = "" if default is None else _as_text(default)
        rows.append((variable(name), shown, meta.description or ""))
    return rows


def split_host(text: str) -> tuple[str, str | None]:
    """The host and, if present, the port: `host`, `host:port`, `[v6]`, `[v6]:port`, `v6`."""
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
    """Whether all addresses of the host are loopback addresses; False if the name does not resolve."""
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


def find_warnings(environ: Mapping[str, str]) -> list[SettingsWarning]:
    """Variables that are invalid, out of range, fixed or unknown."""
    settings, rejected = _read(environ)
    listed = [
        SettingsWarning(name, f"{text}; in use: {_in_use(settings, field)}") for name, text, field in rejected
    ]
    if settings.api_keys and not api_keys.secrets_of(settings.api_keys):
        listed.append(
            SettingsWarning(
                "TOPICS_API_KEYS", "TOPICS_API_KEYS has no valid entry; in use: no authentication"
            )
        )
    fields = {variable(field): field for field in Settings.__struct_fields__}
    for name, value in sorted(environ.items()):
        text = value.strip()
        if not name.startswith(PREFIX) or not text or name in fields or _is_foreign(name, text):
            continue
        if name in _FIXED:
            if text != str(_FIXED[name]):
                fixed = f"{name} is a fixed limit and cannot be set; in use: {_FIXED[name]}"
                listed.append(SettingsWarning(name, fixed))
            continue
        # Without the value, which may be a key: the name may be a misspelt TOPICS_API_KEYS.
        unknown = f"{name} is not a known variable and is ignored"
        if near := _nearest(name, [*fields, *OTHER_VARIABLES]):
            unknown += f"; did you mean {near}?"
            if near in fields:
                unknown += f" In use: {_in_use(settings, fields[near])}"
        listed.append(SettingsWarning(name, unknown))
    return listed


def _is_foreign(name: str, text: str) -> bool:
    """Whether the variable belongs to another program, or was injected by Kubernetes."""
    if name.endswith("_PORT") and _SERVICE_URL.fullmatch(text):
        return True
    return name in OTHER_VARIABLES or _SERVICE_LINK.fullmatch(name) is not None


def _nearest(name: str, known: list[str]) -> str:
    """The most similar known name, if any."""
    names = [one.removeprefix(PREFIX) for one in known]
    found = get_close_matches(name.removeprefix(PREFIX), names, 1, 0.5)
    return PREFIX + found[0] if found else ""


def _in_use(settings: Settings, field: str) -> str:
    value = getattr(settings, field)
    if field in _HIDDEN:
        return "a hidden value" if value else "none"
    if value is None or value == "":
        meaning = next(meta.description or "" for name, _, meta in _fields() if name == field)
        return meaning.partition(" [")[2].rstrip("]") or "none"
    return _as_text(value)


def _as_text(value: Any) -> str:
    """A value as written in a variable."""
    return str(int(value) if isinstance(value, bool) else value)


def _read(environ: Mapping[str, str]) -> tuple[Settings, list[tuple[str, str, str]]]:
    """The settings, and the values that were rejected or clamped: variable, reason and field of each."""
    values: dict[str, Any] = {}
    rejected: list[tuple[str, str, str]] = []
    host, port = split_host(environ.get(variable("host"), "").strip())
    for field, kind, meta in _fields():
        name = variable(field)
        given = [(name, environ.get(name, "").strip())]
        if field == "host":
            given = [(name, host)]
        elif field == "port" and _SERVICE_URL.fullmatch(given[0][1]):
            given = []
        if field == "port" and port is not None:
            given.append((variable("host"), port))
        for source, text in given:
            values[field], fault = _parse(field, kind, meta, text)
            if fault:
                label = source if source == name else f"the port of {source}"
                shown = "" if field in _HIDDEN else f"={text[:_SHOWN_MAX]!r}"
                rejected.append((source, f"{label}{shown} {fault}", field))
    if port is not None and not host:
        values["host"] = ""
    settings = Settings(**{field: value for field, value in values.items() if value is not None})
    return settings, rejected


def _parse(field: str, kind: Any, meta: Meta, text: str) -> tuple[str | int | bool | None, str]:
    """The value of a variable, None for the default; and the reason if it was rejected or clamped."""
    if not text:
        return None, ""
    if bool in (kind, *get_args(kind)):
        switch = _BOOLS.get(text.lower())
        return switch, "" if switch is not None else "must be 1 or 0"
    if kind == LogFormat:
        if text.lower() in _LOG_FORMATS:
            return text.lower(), ""
        return None, f"is not one of {', '.join(_LOG_FORMATS)}"
    if int in (kind, *get_args(kind)):
        return _parse_number(field, meta, text)
    if field in _LISTS:
        read, wanted = _LISTS[field]
        wrong = [entry for entry in split_list(text) if entry != ANY and read(entry) is None]
        return text, f"has {wrong[0]!r}, which is not {wanted}" if wrong else ""
    return text, ""


def _parse_number(field: str, meta: Meta, text: str) -> tuple[int | None, str]:
    number, wanted = None, "a whole number"
    if _NUMBER.fullmatch(text):
        number = int(text)
    elif field.endswith("_ms"):
        number, wanted = milliseconds(text), "a duration, such as 500ms, 30s, 5m or 7d"
    elif field.endswith(("_bytes", "_bytes_per_s")):
        number, wanted = size_bytes(text), "a size, such as 1000, 64KiB, 10MB or 1.5GiB"
    if number is None or number >= _NUMBER_END:
        return None, f"is not {wanted}"
    if meta.ge is not None and number < meta.ge:
        return int(meta.ge), f"is below the minimum of {meta.ge}"
    if meta.le is not None and number > meta.le:
        # A clamped port would be no better than the default.
        return None if field == "port" else int(meta.le), f"is above the maximum of {meta.le}"
    return number, ""
