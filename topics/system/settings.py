"""Settings from the environment. A field `max_topics` is read from the variable TOPICS_MAX_TOPICS; empty means unset.

Durations (`…_ms`) and sizes (`…_bytes`, `…_bytes_per_s`) accept units: 30s, 64MiB. Numbers are forgiving, as the interface
promises: text that cannot be read means the default, and a number outside its range means the nearest end of it.
`complaints()` lists these, and variables that no program of topics reads; the server logs them at its start, and with
TOPICS_STRICT_SETTINGS=1 refuses to start. What would be unsafe is always refused: `problems()`.
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
from topics.system.extras import install
from topics.system.quantities import milliseconds, size_bytes

PREFIX = "TOPICS_"
LogFormat = Literal["auto", "human", "json"]

_HIDDEN = frozenset({"api_keys"})
# Only these two switch something on: TOPICS_ALLOW_INSECURE_NO_AUTH must not be guessed from other words.
_BOOLS = {"1": True, "true": True, "0": False, "false": False, "no": False, "off": False}
_LISTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "allowed_hosts": (read_host, "a name such as topics.example.com or topics:4000"),
    "cors_origins": (read_origin, "an origin such as https://app.example.com"),
}
_LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
# Eighteen digits always fit a signed 64-bit number.
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_NUMBER_END = 10**18
_SHOWN_MAX = 100  # characters of an unreadable value

# Limits of the interface that cannot be changed, under the names that it gives them.
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
# Variables of the other programs, which may stand in the server's environment. A test compares this list with the source tree.
OTHER_VARIABLES = frozenset({
    "TOPICS_URL", "TOPICS_TOKEN", "TOPICS_API_KEY",  # the client
    "TOPICS_CONFIG",  # the command
    "TOPICS_JOB_TOPIC", "TOPICS_JOB_SEQ", "TOPICS_JOB_TAG", "TOPICS_JOB_TS", "TOPICS_JOB_DELIVERIES",  # `topics queue work`
    "TOPICS_OFFLINE_TOKEN",  # Spark jobs
    "TOPICS_BASE_IMAGE", "TOPICS_PUBLISH", "TOPICS_SPARK_MEMORY",  # the compose file
    "TOPICS_NEEDS", "TOPICS_ROOT", "TOPICS_VENV",  # scripts
    "TOPICS_FAILPOINTS", "TOPICS_COLD_FAILPOINTS",  # tests of crashes
})  # fmt: skip
# What Kubernetes injects for a service called `topics`, or `topics-…`: TOPICS_SERVICE_HOST, TOPICS_PORT_4000_TCP_ADDR and so on.
_SERVICE_LINK = re.compile(
    r"TOPICS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)
# The value that it gives TOPICS_PORT, whose name is that of a setting.
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")


class Complaint(NamedTuple):
    """A variable that does not do what was meant. The text names the value in use, and no secret."""

    variable: str
    text: str


def _doc(description: str, *, ge: int | None = None, le: int | None = None) -> Meta:
    return Meta(description=description, ge=ge, le=le)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The server's settings; every process of it reads the same environment."""

    # Where it listens, and for whom.
    host: Annotated[str, _doc("address, or host:port; TOPICS_PORT is then ignored")] = "127.0.0.1"
    port: Annotated[int, _doc("port; 0 lets the system choose", le=65535)] = 4000
    port_file: Annotated[str | None, _doc("gets the actual host:port once it is bound")] = None
    api_keys: Annotated[str, _doc("secret[:scopes[:prefixes]],…; none: everyone may do everything")] = ""
    allow_insecure_no_auth: Annotated[bool, _doc("1: listen beyond loopback without keys")] = False
    allowed_hosts: Annotated[
        str, _doc("names it may be called by without keys, beside localhost and addresses; *: any")
    ] = ""
    cors_origins: Annotated[str, _doc("origins of other web pages that may use it; *: any")] = ""
    probe_auth: Annotated[bool, _doc("1: health and readiness need a key")] = False
    strict_settings: Annotated[bool, _doc("1: refuse to start with unknown or unreadable variables")] = False

    # Where data is, and in what portions.
    data_dir: Annotated[str, _doc("data directory; one server at a time")] = "./topics-data"
    cold_dir: Annotated[str | None, _doc("directory of the cold tier, for old segments; unset: none")] = None
    # None lets an existing data directory decide, and the number of CPUs for a new one.
    wal_shards: Annotated[
        int | None,
        _doc("worker processes [as before; for a new directory the CPUs, at most 8]", ge=1, le=256),
    ] = None
    segment_max_events: Annotated[int, _doc("records that seal a segment", ge=1)] = 10_000
    segment_max_bytes: Annotated[int, _doc("bytes that seal a segment", ge=1)] = 64 * limits.MIB
    segment_max_age_ms: Annotated[int, _doc("age that seals a segment; 0: none")] = 3_600_000
    hot_retain_segments: Annotated[int, _doc("newest sealed segments kept hot")] = 4
    hot_retain_bytes: Annotated[int, _doc("most bytes of sealed segments kept hot; 0: no bound")] = 0
    relocate_bytes_per_s: Annotated[
        int, _doc("segments that move to the cold tier, per shard; 0: no bound")
    ] = 32 * limits.MIB
    cold_cache_bytes: Annotated[int, _doc("cold records in memory, per shard")] = 32 * limits.MIB
    retire_grace_ms: Annotated[int, _doc("merged segments stay on disk this long")] = 86_400_000
    plan_ttl_ms: Annotated[int, _doc("a merge plan without a lease is forgotten after this")] = 604_800_000
    min_free_bytes: Annotated[int, _doc("less space than this: no appends; 0: off")] = 256 * limits.MIB
    reclaim_bytes_per_s: Annotated[int, _doc("rewriting of dead segments, per shard; 0: no bound")] = (
        32 * limits.MIB
    )
    cache_bytes: Annotated[int, _doc("recent payloads in memory, per shard")] = 32 * limits.MIB
    wal_file_bytes: Annotated[int, _doc("size of one log file", ge=limits.MIB)] = 64 * limits.MIB

    # What one request may hold. The engine's own bounds cannot be raised from here.
    max_body_bytes: Annotated[int, _doc("a larger request body is refused", ge=1)] = 64 * limits.MIB
    strict_requests: Annotated[bool, _doc("1: unknown fields in request bodies are an error")] = False

    # What may exist at once; 0 means no cap.
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
        return _read(environ)[0]

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
        shown = "" if default is None else _as_text(default)
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


def complaints(environ: Mapping[str, str]) -> list[Complaint]:
    """The variables that are unreadable, out of range, not to be set or unknown."""
    settings, refused = _read(environ)
    listed = [Complaint(name, f"{text}; in use: {_in_use(settings, field)}") for name, text, field in refused]
    if settings.api_keys and not api_keys.secrets_of(settings.api_keys):
        listed.append(
            Complaint("TOPICS_API_KEYS", "TOPICS_API_KEYS has no usable entry; in use: no authentication")
        )
    fields = {variable(field): field for field in Settings.__struct_fields__}
    for name, value in sorted(environ.items()):
        text = value.strip()
        if not name.startswith(PREFIX) or not text or name in fields or _is_foreign(name, text):
            continue
        if name in _FIXED:
            if text != str(_FIXED[name]):
                fixed = f"{name} is a fixed limit and cannot be set; in use: {_FIXED[name]}"
                listed.append(Complaint(name, fixed))
            continue
        # Without its value, which may be a key: the name may be a misspelt TOPICS_API_KEYS.
        unknown = f"{name} is not a known variable and is ignored"
        if near := _nearest(name, [*fields, *OTHER_VARIABLES]):
            unknown += f"; did you mean {near}?"
            if near in fields:
                unknown += f" In use: {_in_use(settings, fields[near])}"
        listed.append(Complaint(name, unknown))
    return listed


def _is_foreign(name: str, text: str) -> bool:
    """Whether it is another program's, or a link of Kubernetes'."""
    if name.endswith("_PORT") and _SERVICE_URL.fullmatch(text):
        return True
    return name in OTHER_VARIABLES or _SERVICE_LINK.fullmatch(name) is not None


def _nearest(name: str, known: list[str]) -> str:
    """The most similar name, if there is a similar one."""
    names = [one.removeprefix(PREFIX) for one in known]
    found = get_close_matches(name.removeprefix(PREFIX), names, 1, 0.5)
    return PREFIX + found[0] if found else ""


def _in_use(settings: Settings, field: str) -> str:
    value = getattr(settings, field)
    if field in _HIDDEN:
        return "a value that is not shown" if value else "none"
    if value is None or value == "":
        meaning = next(meta.description or "" for name, _, meta in _fields() if name == field)
        return meaning.partition(" [")[2].rstrip("]") or "none"
    return _as_text(value)


def _as_text(value: Any) -> str:
    """A value as a variable has it."""
    return str(int(value) if isinstance(value, bool) else value)


def _read(environ: Mapping[str, str]) -> tuple[Settings, list[tuple[str, str, str]]]:
    """The settings, and what was not taken as it is: the variable, a text that says why, and the field."""
    values: dict[str, Any] = {}
    refused: list[tuple[str, str, str]] = []
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
                refused.append((source, f"{label}{shown} {fault}", field))
    if port is not None and not host:
        values["host"] = ""
    settings = Settings(**{field: value for field, value in values.items() if value is not None})
    return settings, refused


def _parse(field: str, kind: Any, meta: Meta, text: str) -> tuple[str | int | bool | None, str]:
    """The value of a variable's text, None for the default; and why it is not what the text says, if so."""
    if not text:
        return None, ""
    if bool in (kind, *get_args(kind)):
        switch = _BOOLS.get(text.lower())
        return switch, "" if switch is not None else "is neither 1 nor 0"
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
        # Another port than the one that was meant is as good as the default.
        return None if field == "port" else int(meta.le), f"is above the maximum of {meta.le}"
    return number, ""
