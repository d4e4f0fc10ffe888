"""Goal: every variable is read under its name with its default, unsafe settings are refused, and no key is ever
shown.

Method: environments as plain dicts; defaults are compared with the documented table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import configuration_page
from topics.api import limits
from topics.api.requests import WATCH_TOPICS_MAX
from topics.protocols.json.requests import META_BYTES_MAX, TAG_BYTES_MAX
from topics.system import settings
from topics.system.quantities import milliseconds, size_bytes
from topics.system.settings import Settings, is_loopback, join_host

ROOT = Path(__file__).resolve().parents[3]

DEFAULTS = {
    "TOPICS_HOST": "127.0.0.1",
    "TOPICS_PORT": 4000,
    "TOPICS_PORT_FILE": None,
    "TOPICS_API_KEYS": "",
    "TOPICS_ALLOW_INSECURE_NO_AUTH": False,
    "TOPICS_ALLOWED_HOSTS": "",
    "TOPICS_CORS_ORIGINS": "",
    "TOPICS_PROBE_AUTH": False,
    "TOPICS_STRICT_SETTINGS": False,
    "TOPICS_DATA_DIR": "./topics-data",
    "TOPICS_COLD_DIR": None,
    "TOPICS_WAL_SHARDS": None,
    "TOPICS_SEGMENT_MAX_EVENTS": 10000,
    "TOPICS_SEGMENT_MAX_BYTES": 67108864,
    "TOPICS_SEGMENT_MAX_AGE_MS": 3600000,
    "TOPICS_HOT_RETAIN_SEGMENTS": 4,
    "TOPICS_HOT_RETAIN_BYTES": 0,
    "TOPICS_RELOCATE_BYTES_PER_S": 33554432,
    "TOPICS_COLD_CACHE_BYTES": 33554432,
    "TOPICS_RETIRE_GRACE_MS": 86_400_000,
    "TOPICS_PLAN_TTL_MS": 604_800_000,
    "TOPICS_RECLAIM_BYTES_PER_S": 33554432,
    "TOPICS_MIN_FREE_BYTES": 268435456,
    "TOPICS_MAX_BODY_BYTES": 67108864,
    "TOPICS_MAX_TOPICS": 100000,
    "TOPICS_MAX_ROUTERS": 10000,
    "TOPICS_MAX_WATCH_SESSIONS": 10000,
    "TOPICS_MAX_SSE_CONNECTIONS": 10000,
    "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": 1000,
    "TOPICS_MAX_INFLIGHT_PER_KEY": 1000,
    "TOPICS_MAX_WATCH_SESSIONS_PER_KEY": 1000,
    "TOPICS_MAX_TOTAL_BYTES": 0,
    "TOPICS_TXN_MAX_BYTES": 16 << 30,
    "TOPICS_TXN_SHARD_BYTES": 64 << 30,
    "TOPICS_MAX_MEMORY_BYTES": 268435456,
    "TOPICS_TEST_MIN_HEARTBEAT_MS": 1000,
    "TOPICS_FRONTS": 1,
    "TOPICS_PING_TIMEOUT_MS": 30000,
    "TOPICS_OTEL": None,
    "TOPICS_LOG_FORMAT": "auto",
    "TOPICS_VERIFY": False,
    "TOPICS_CACHE_BYTES": 33554432,
    "TOPICS_WAL_FILE_BYTES": 67108864,
    "TOPICS_KEEPALIVE_MS": 75000,
    "TOPICS_REQUEST_TIMEOUT_MS": 60000,
    "TOPICS_FAST_PATH": True,
    "TOPICS_HANDOVER": 0,
    "TOPICS_STRICT_REQUESTS": False,
}
NUMBERS = sorted(
    name for name, value in DEFAULTS.items() if type(value) is int or name == "TOPICS_WAL_SHARDS"
)


def field(name: str) -> str:
    return name.removeprefix("TOPICS_").lower()


def read(**environ: str) -> Settings:
    return Settings.from_env(environ)


def test_defaults() -> None:
    empty = read()
    assert {settings.variable(name): getattr(empty, name) for name in empty.__struct_fields__} == DEFAULTS


def test_the_description_covers_every_variable() -> None:
    rows = settings.describe()
    assert {name for name, _, _ in rows} == set(DEFAULTS)
    assert all(meaning for _, _, meaning in rows)


@pytest.mark.parametrize("text", ["", " ", "x", "-1", "1.5", "1e3", "0x10", "1_000", "٣", "9" * 30])
def test_non_numeric_value_uses_default(text: str) -> None:
    found = read(**dict.fromkeys(NUMBERS, text))
    assert {name: getattr(found, field(name)) for name in NUMBERS} == {
        name: DEFAULTS[name] for name in NUMBERS
    }


@given(st.sampled_from(NUMBERS), st.integers(min_value=0, max_value=10**18 - 1))
def test_every_number_is_accepted_or_brought_into_range(name: str, number: int) -> None:
    value = getattr(read(**{name: f" {number} "}), field(name))
    assert isinstance(value, int)
    assert value >= 0


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TOPICS_WAL_SHARDS", "0", 1),
        ("TOPICS_WAL_SHARDS", "4", 4),
        ("TOPICS_FRONTS", "0", 1),
        ("TOPICS_SEGMENT_MAX_EVENTS", "0", 1),
        ("TOPICS_SEGMENT_MAX_AGE_MS", "0", 0),
        ("TOPICS_MAX_TOPICS", "0", 0),
        ("TOPICS_TEST_MIN_HEARTBEAT_MS", "0", 1),
        ("TOPICS_TEST_MIN_HEARTBEAT_MS", "5000", 1000),
        ("TOPICS_PORT", "0", 0),
        ("TOPICS_PORT", "65536", 4000),
    ],
)
def test_ranges(name: str, text: str, value: int) -> None:
    assert getattr(read(**{name: text}), field(name)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("TRUE", True),
        ("0", False),
        ("false", False),
        ("yes", False),
        ("", False),
    ],
)
def test_switches(text: str, value: bool) -> None:
    assert read(TOPICS_VERIFY=text).verify is value


def test_the_fast_path_is_on_unless_switched_off() -> None:
    assert [read(TOPICS_FAST_PATH=text).fast_path for text in ("0", "off", "false", "?", "1")] == [
        False
    ] * 3 + [True] * 2


def test_an_unknown_log_format_means_the_default() -> None:
    assert [read(TOPICS_LOG_FORMAT=text).log_format for text in ("JSON", "human", "xml")] == [
        "json",
        "human",
        "auto",
    ]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost", "localhost", 7),
        ("localhost:4001", "localhost", 4001),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("127.0.0.1:x", "127.0.0.1", 4000),
        ("127.0.0.1:", "127.0.0.1", 4000),
        ("[::1]:4001", "::1", 4001),
        ("[::1]", "::1", 7),
        ("::1", "::1", 7),
        ("::", "::", 7),
        ("", "127.0.0.1", 7),
    ],
)
def test_hosts(text: str, host: str, port: int) -> None:
    found = read(TOPICS_HOST=text, TOPICS_PORT="7")
    assert (found.host, found.port) == (host, port)


def test_a_port_without_a_host_is_refused() -> None:
    assert read(TOPICS_HOST=":4000").problems()


def test_addresses_are_joined_as_urls_want_them() -> None:
    assert join_host("::1", 4000) == "[::1]:4000"
    assert join_host("127.0.0.1", 4000) == "127.0.0.1:4000"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]:4000", "localhost:1"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert read(TOPICS_HOST=host).problems() == []


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]:4000", "192.0.2.1", "no-such-host.invalid", "0.0.0.0:4000", "0"]
)
def test_elsewhere_keys_or_a_clear_wish_are_needed(host: str) -> None:
    (problem,) = read(TOPICS_HOST=host).problems()
    assert "TOPICS_API_KEYS" in problem
    assert "TOPICS_ALLOW_INSECURE_NO_AUTH" in problem
    assert read(TOPICS_HOST=host, TOPICS_API_KEYS=" , :read").problems(), (
        "entries without a secret are no keys"
    )
    assert read(TOPICS_HOST=host, TOPICS_ALLOW_INSECURE_NO_AUTH="yes").problems()
    assert read(TOPICS_HOST=host, TOPICS_API_KEYS="secret").problems() == []
    assert read(TOPICS_HOST=host, TOPICS_ALLOW_INSECURE_NO_AUTH="true").problems() == []


def test_a_bad_key_entry_is_refused_without_its_secret() -> None:
    (problem,) = read(TOPICS_API_KEYS="good,swordfish:reed").problems()
    assert "reed" in problem
    assert "swordfish" not in problem


def test_keys_are_never_shown() -> None:
    found = read(TOPICS_API_KEYS="swordfish:read")
    assert found.api_keys == "swordfish:read"
    for shown in (repr(found), str(found), f"{found}", repr(list(found.__rich_repr__()))):
        assert "swordfish" not in shown
        assert "4000" in shown


def test_a_name_that_does_not_resolve_is_not_trusted() -> None:
    assert not is_loopback("no-such-host.invalid")
    assert not is_loopback("a" * 300)


# ---- units


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TOPICS_KEEPALIVE_MS", "250ms", 250),
        ("TOPICS_KEEPALIVE_MS", "30s", 30_000),
        ("TOPICS_KEEPALIVE_MS", "1h30m", 5_400_000),
        ("TOPICS_KEEPALIVE_MS", "2d", 172_800_000),
        ("TOPICS_KEEPALIVE_MS", "1.5s", 1500),
        ("TOPICS_MAX_BODY_BYTES", "512KiB", 512 << 10),
        ("TOPICS_MAX_BODY_BYTES", "1.5GiB", 3 << 29),
        ("TOPICS_MAX_BODY_BYTES", "10GB", 10**10),
        ("TOPICS_MAX_BODY_BYTES", "1024B", 1024),
        ("TOPICS_MAX_BODY_BYTES", "64 mib", 64 << 20),
        ("TOPICS_RELOCATE_BYTES_PER_S", "8MiB", 8 << 20),
    ],
)
def test_durations_and_sizes_have_units(name: str, text: str, value: int) -> None:
    assert getattr(read(**{name: text}), field(name)) == value
    assert settings.find_warnings({name: text}) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TOPICS_KEEPALIVE_MS", "1GiB"),
        ("TOPICS_KEEPALIVE_MS", "30 s"),
        ("TOPICS_KEEPALIVE_MS", "0.5ms"),
        ("TOPICS_KEEPALIVE_MS", "-1s"),
        ("TOPICS_MAX_BODY_BYTES", "30s"),
        ("TOPICS_MAX_BODY_BYTES", "1.0001KiB"),
        ("TOPICS_MAX_BODY_BYTES", "99999999TiB"),
        ("TOPICS_MAX_TOPICS", "10k"),
        ("TOPICS_FRONTS", "1s"),
    ],
)
def test_other_units_and_parts_of_a_byte_are_unreadable(name: str, text: str) -> None:
    assert getattr(read(**{name: text}), field(name)) == DEFAULTS[name]
    (warning,) = settings.find_warnings({name: text})
    assert warning.text.endswith(f"in use: {DEFAULTS[name]}")


@given(st.integers(min_value=0, max_value=10**9), st.sampled_from(["ms", "s", "m", "h", "d", "w"]))
def test_a_duration_is_its_number_of_units(number: int, unit: str) -> None:
    one = milliseconds(f"1{unit}")
    assert one is not None
    assert milliseconds(f"{number}{unit}") == number * one


@given(st.text(max_size=30))
def test_any_text_is_a_quantity_or_none(text: str) -> None:
    for found in (milliseconds(text), size_bytes(text)):
        assert found is None or found >= 0


# ---- warnings


def texts(**environ: str) -> list[str]:
    return [warning.text for warning in settings.find_warnings(environ)]


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"TOPICS_MAX_TOPCIS": "5", "TOPICS_MAX_TOPICS": "7"},
            "TOPICS_MAX_TOPCIS is not a known variable and is ignored; did you mean TOPICS_MAX_TOPICS? In use: 7",
        ),
        (
            {"TOPICS_SHARDS": "4"},
            "TOPICS_SHARDS is not a known variable and is ignored; did you mean TOPICS_WAL_SHARDS? "
            "In use: as before; for a new directory the CPUs, at most 8",
        ),
        (
            {"TOPICS_TOKN": "swordfish"},
            "TOPICS_TOKN is not a known variable and is ignored; did you mean TOPICS_TOKEN?",
        ),
        ({"TOPICS_QQQQ": "1"}, "TOPICS_QQQQ is not a known variable and is ignored"),
        ({"TOPICS_FRONTS": "two"}, "TOPICS_FRONTS='two' is not a whole number; in use: 1"),
        ({"TOPICS_FRONTS": "0"}, "TOPICS_FRONTS='0' is below the minimum of 1; in use: 1"),
        ({"TOPICS_FRONTS": "65"}, "TOPICS_FRONTS='65' is above the maximum of 64; in use: 64"),
        ({"TOPICS_PORT": "65536"}, "TOPICS_PORT='65536' is above the maximum of 65535; in use: 4000"),
        ({"TOPICS_HOST": "::1", "TOPICS_PORT": "x"}, "TOPICS_PORT='x' is not a whole number; in use: 4000"),
        (
            {"TOPICS_HOST": "localhost:x"},
            "the port of TOPICS_HOST='x' is not a whole number; in use: 4000",
        ),
        ({"TOPICS_VERIFY": "yes"}, "TOPICS_VERIFY='yes' must be 1 or 0; in use: 0"),
        (
            {"TOPICS_OTEL": "?"},
            "TOPICS_OTEL='?' must be 1 or 0; in use: if OTEL_… names a collector",
        ),
        (
            {"TOPICS_LOG_FORMAT": "xml"},
            "TOPICS_LOG_FORMAT='xml' is not one of auto, human, json; in use: auto",
        ),
        (
            {"TOPICS_CACHE_BYTES": "much"},
            "TOPICS_CACHE_BYTES='much' is not a size, such as 1000, 64KiB, 10MB or 1.5GiB; in use: 33554432",
        ),
        (
            {"TOPICS_MAX_LIMIT": "5000"},
            "TOPICS_MAX_LIMIT is a fixed limit and cannot be set; in use: 1000",
        ),
        (
            {"TOPICS_ALLOWED_HOSTS": "topics, *, http://topics"},
            "TOPICS_ALLOWED_HOSTS='topics, *, http://topics' has 'http://topics', which is not a host name such as "
            "topics.example.com or topics:4000; in use: topics, *, http://topics",
        ),
        (
            {"TOPICS_CORS_ORIGINS": "https://app.example,null"},
            "TOPICS_CORS_ORIGINS='https://app.example,null' has 'null', which is not an origin such as "
            "https://app.example.com; in use: https://app.example,null",
        ),
        ({"TOPICS_API_KEYS": ",:read"}, "TOPICS_API_KEYS has no valid entry; in use: no authentication"),
    ],
)
def test_a_warning_names_the_variable_and_the_value_in_use(environ: dict[str, str], text: str) -> None:
    assert texts(**environ) == [text]


def test_every_bad_variable_is_listed() -> None:
    environ = {"TOPICS_FRONTS": "x", "TOPICS_VERIFY": "x", "TOPICS_A": "x", "TOPICS_B": "x", "OTHER": "x"}
    assert {warning.variable for warning in settings.find_warnings(environ)} == set(environ) - {"OTHER"}


@pytest.mark.parametrize("name", ["TOPICS_API_KEYZ", "TOPICS_APIKEY", "TOPICS_API_KEYS_", "TOPICS_SECRET"])
def test_the_value_of_an_unknown_variable_is_never_shown(name: str) -> None:
    (text,) = texts(**{name: "swordfish:read", "TOPICS_API_KEYS": "tunafish"})
    assert name in text
    assert "fish" not in text


def test_empty_means_unset() -> None:
    empty = dict.fromkeys((*DEFAULTS, *settings.OTHER_VARIABLES, "TOPICS_QQQQ", "TOPICS_MAX_CLAIM"), " ")
    assert texts(**empty) == []
    assert read(**empty) == read()


def test_the_variables_of_other_programs_are_known() -> None:
    assert texts(**dict.fromkeys(settings.OTHER_VARIABLES, "x")) == []


def test_fixed_limits_are_those_of_the_code() -> None:
    fixed = settings._FIXED
    assert fixed["TOPICS_MAX_TAG_BYTES"] == TAG_BYTES_MAX
    assert fixed["TOPICS_MAX_META_BYTES"] == META_BYTES_MAX
    assert fixed["TOPICS_MAX_WATCH_TOPICS"] == WATCH_TOPICS_MAX
    assert fixed["TOPICS_MAX_RECORD_BYTES"] == limits.RECORD_BYTES_MAX == 1_048_576
    assert texts(**{name: str(value) for name, value in fixed.items()}) == []


KUBERNETES = {
    "TOPICS_SERVICE_HOST": "10.0.0.1",
    "TOPICS_SERVICE_PORT": "4000",
    "TOPICS_SERVICE_PORT_HTTP": "4000",
    "TOPICS_PORT": "tcp://10.0.0.1:4000",
    "TOPICS_PORT_4000_TCP": "tcp://10.0.0.1:4000",
    "TOPICS_PORT_4000_TCP_PROTO": "tcp",
    "TOPICS_PORT_4000_TCP_PORT": "4000",
    "TOPICS_PORT_4000_TCP_ADDR": "10.0.0.1",
    "TOPICS_HEADLESS_SERVICE_HOST": "10.0.0.2",  # of a service called topics-headless
    "TOPICS_HEADLESS_PORT": "tcp://10.0.0.2:4000",
}


def test_variables_injected_by_kubernetes_are_ignored_silently() -> None:
    assert texts(**KUBERNETES) == []
    assert read(**KUBERNETES) == read()
    assert read(**KUBERNETES, TOPICS_HOST="localhost:7").port == 7
    assert texts(TOPICS_HEADLESS_PORT="4000"), "only Kubernetes writes it as a URL"


def variables_in(path: Path) -> Iterator[str]:
    """The TOPICS_ names in a file; in Python only those in strings, as a constant of the code may have such a name,
    too.
    """
    text = path.read_text("utf-8")
    if path.suffix == ".py" and "TOPICS_" in text:
        nodes = ast.walk(ast.parse(text))
        text = "\n".join(
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
    yield from re.findall(r"(?<![A-Za-z0-9_])TOPICS_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_])", text)


def test_the_list_of_variables_is_that_of_the_tree() -> None:
    folders = ("deploy", "docs", "pyspark_topics", "router", "scripts", "spark_pipeline", "topics", "workers")
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    texts_of = (".py", ".sh", ".md", ".yaml", ".yml", ".toml", ".service", ".example", "")
    found = {
        name
        for path in paths
        if path.is_file() and path.suffix in texts_of and path != ROOT / "topics" / "system" / "settings.py"
        for name in variables_in(path)
    }
    kubernetes = {name for name in found if settings._SERVICE_LINK.fullmatch(name)}
    fields = {settings.variable(name) for name in Settings.__struct_fields__}
    known = fields | settings.OTHER_VARIABLES | set(settings._FIXED)
    assert found - known - kubernetes - {"TOPICS_MAX_TOPCIS"} == set(), (
        "declare these in topics/system/settings.py"
    )
    # `queue work` composes these.
    job = {name for name in settings.OTHER_VARIABLES if name.startswith("TOPICS_JOB_")}
    assert settings.OTHER_VARIABLES - job - found == set(), "no program reads these"


# ---- the page


def test_the_page_is_made_of_the_code() -> None:
    assert configuration_page.PAGE.read_text("utf-8") == configuration_page.page(), (
        "run: python -m tests.support.configuration_page"
    )


def test_the_page_has_every_variable_its_default_and_links_that_lead_somewhere() -> None:
    text = configuration_page.page()
    rows = dict(re.findall(r"^\| `(TOPICS_\w+)` \| (.*?) \|", text, flags=re.MULTILINE))
    for name, default, _ in settings.describe():
        assert not default or rows[name] == f"`{default}`"
    docs = configuration_page.PAGE.parent
    for path, anchor in re.findall(r"\]\(([\w/.-]+\.md)(?:#([\w-]+))?\)", text):
        headings = re.findall(r"^#+ (.+)$", (docs / path).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, (path, anchor)


@pytest.mark.parametrize(
    "name", ["TOPICS_URL", "TOPICS_TOKEN", "TOPICS_API_KEY", "TOPICS_CONFIG", "NO_COLOR"]
)
def test_documented_variables_of_the_command_are_read(name: str) -> None:
    package = configuration_page.PAGE.parents[1] / "topics"
    assert f"`{name}`" in configuration_page.TAIL
    read = [
        path
        for folder in ("cli", "client")
        for path in (package / folder).glob("*.py")
        if f'"{name}"' in path.read_text()
    ]
    assert read
