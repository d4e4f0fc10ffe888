"""Goal: Host and Origin are checked as documented, in every spelling.

Method: a table of each; everything that is not allowed is refused.
"""

from __future__ import annotations

import pytest

from topics.api.origins import KNOWN_BYTES_MAX, KNOWN_MAX, Origins


def origins(hosts: str = "", pages: str = "", *, bound: str = "127.0.0.1", keys: bool = False) -> Origins:
    return Origins(allowed_hosts=hosts, cors_origins=pages, bound_host=bound, has_keys=keys)


def code(rule: Origins, host: str, origin: str = "", *, websocket: bool = False) -> str | None:
    refusal = rule.refusal(host.encode(), origin.encode(), is_websocket=websocket)
    return refusal[0] if refusal is not None else None


@pytest.mark.parametrize(
    "host",
    [
        "", "localhost", "localhost:4000", "LOCALHOST:4000", "localhost.", "localhost.:4000", "localhost:",
        "127.0.0.1", "127.0.0.1:4000", "10.1.2.3:80", "[::1]", "[::1]:4000", "[2001:DB8::1]:4000", "[fe80::1%25eth0]",
    ],
)  # fmt: skip
def test_localhost_and_addresses_are_always_fine(host: str) -> None:
    assert code(origins(), host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:4000", "localhost.evil.example", "evil.localhost", "localhost..", "xlocalhost", "127.0.0.1.evil.example",
        "127.0.0.1.nip.io:4000", "::1", "[::1", "[evil.example]", "localhost:4000:1", "localhost:x", "%6cocalhost", "*", "0x7f000001", "\xff",
    ],
)  # fmt: skip
def test_other_names_are_misdirected(host: str) -> None:
    rule = origins()
    assert [code(rule, host), code(rule, host)] == ["misdirected_request"] * 2
    refusal = rule.refusal(host.encode(), b"", is_websocket=False)
    assert refusal is not None and host in refusal[1] and "TOPICS_ALLOWED_HOSTS" in refusal[1]
    assert code(origins(keys=True), host) is None


def test_names_that_are_listed() -> None:
    rule = origins("topics, Api.Example.com.,only:4000,")
    for host in ("topics", "topics:4000", "TOPICS:1", "api.example.com", "api.example.com.:80", "only:4000"):
        assert code(rule, host) is None
    for host in ("only", "only:4001", "example.com", "a.topics"):
        assert code(rule, host) == "misdirected_request"
    assert code(origins("a,*"), "anything:1") is None
    assert code(origins(bound="db.internal"), "db.internal:4000") is None


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:4000", "http://localhost:4000"),
        ("LOCALHOST:4000", "http://localhost:4000"),
        ("127.0.0.1:4000", "http://127.0.0.1:4000"),
        ("[::1]:4000", "http://[::1]:4000"),
        ("localhost", "http://localhost"),
        ("localhost", "https://localhost"),
        ("localhost:80", "http://localhost"),
        ("localhost", "http://localhost:80"),
        ("localhost:443", "https://localhost"),
        ("localhost.:4000", "http://localhost.:4000"),
    ],
)
def test_a_page_of_the_server_itself(host: str, origin: str) -> None:
    assert code(origins(), host, origin) is None
    assert code(origins(keys=True), host, origin, websocket=True) is None


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:4000", "http://evil.example"),
        ("localhost:4000", "http://localhost"),
        ("localhost:4000", "http://localhost:4001"),
        ("localhost:4000", "http://127.0.0.1:4000"),
        ("localhost:443", "http://localhost"),
        ("localhost:4000", "ftp://localhost:4000"),
        ("localhost", "chrome-extension://localhost"),
        ("localhost:4000", "null"),
        ("localhost:4000", "http://localhost:4000/"),
        ("localhost:4000", "http://localhost:4000, http://localhost:4000"),
        ("localhost:4000", "http://user@localhost:4000"),
        ("localhost:4000", "localhost:4000"),
        ("localhost:4000", "\xff"),
        ("", "http://localhost"),
    ],
)
def test_a_page_of_another_origin(host: str, origin: str) -> None:
    assert (
        code(origins(), host, origin) == code(origins(), host, origin, websocket=True) == "forbidden_origin"
    )
    assert code(origins(keys=True), host, origin) is None
    assert code(origins(keys=True), host, origin, websocket=True) == "forbidden_origin"
    refusal = origins().refusal(host.encode(), origin.encode(), is_websocket=False)
    assert refusal is not None and origin in refusal[1] and "TOPICS_CORS_ORIGINS" in refusal[1]
    assert code(origins(pages="*"), host, origin, websocket=True) is None


def test_a_rebound_name_does_not_make_a_page_the_servers_own() -> None:
    assert code(origins(), "evil.example:4000", "http://evil.example:4000") == "misdirected_request"


def test_pages_that_are_listed() -> None:
    rule = origins(pages="https://app.example, HTTP://localhost:3000")
    for origin in ("https://app.example", "https://app.example:443", "http://localhost:3000"):
        assert code(rule, "localhost:4000", origin) is None
        allowed, varies, exposed, end = rule.cors_head(origin.encode()).split(b"\r\n")
        assert (allowed, varies, end) == (
            b"Access-Control-Allow-Origin: " + origin.encode(),
            b"Vary: Origin",
            b"",
        )
        assert exposed.startswith(b"Access-Control-Expose-Headers: ")
    for origin in ("http://app.example", "https://app.example:444", "https://a.app.example", "null"):
        assert code(rule, "localhost:4000", origin) == "forbidden_origin"
        assert rule.cors_head(origin.encode()) == b"Vary: Origin\r\n"
    assert rule.cors_head(b"") == b"Vary: Origin\r\n"
    anywhere, _, end = origins(pages="*").cors_head(b"a\r\nb").split(b"\r\n")
    assert (anywhere, end) == (b"Access-Control-Allow-Origin: *", b"")
    assert (rule.has_cors, origins().has_cors) == (True, False)


def test_remembered_origins_are_bounded() -> None:
    rule = origins("*")
    for number in range(2 * KNOWN_MAX):
        for _ in range(2):
            assert code(rule, f"host-{number}", f"http://host-{number}") is None
            assert code(rule, f"host-{number}", "http://elsewhere") == "forbidden_origin"
    assert code(rule, "h" * (KNOWN_BYTES_MAX + 1)) is None
    for known in (rule.known_hosts, rule._known_pages):
        assert 0 < len(known) <= KNOWN_MAX
    assert max(map(len, rule.known_hosts)) <= KNOWN_BYTES_MAX
