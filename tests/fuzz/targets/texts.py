"""Texts that people write: settings, API keys, query strings, cursors and percent-encoded names.

The first byte of an input selects the parser. Invalid numbers fall back to defaults; invalid keys are refused without showing a
secret; a cursor is valid or refused.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from unittest import mock
from urllib.parse import quote_from_bytes

from tests.fuzz.runner import Target
from topics.api.api_keys import ALL_SCOPES, find_key, parse_keys, secrets_of
from topics.api.errors import InvalidRequest
from topics.protocols.http.admission import Admission
from topics.protocols.http.call import Services
from topics.protocols.http.query import decode_cursor, encode_cursor, flag, number, optional_flag, parse_query
from topics.system import settings
from topics.system.settings import Settings, join_host, split_host

_NAMES = Settings.__struct_fields__
_BOUNDS = {name: meta for name, _, meta in settings._fields()}


def run(data: bytes) -> None:
    which, data = (data[0], data[1:]) if data else (0, b"")
    _RUNS[which % len(_RUNS)](data)


def _settings(data: bytes) -> None:
    """Lines of NAME=value, like an environment."""
    environ: dict[str, str] = {}
    for line in data.split(b"\n"):
        name, _, value = line.replace(b"\0", b"").decode("utf-8", "surrogateescape").partition("=")
        environ[name] = value
        if name.isascii() and name.isdigit():  # short for the name of a variable
            environ[settings.variable(_NAMES[int(name[:3]) % len(_NAMES)])] = value
    found = Settings.from_env(environ)
    for name, meta in _BOUNDS.items():
        value = getattr(found, name)
        if isinstance(value, int) and not isinstance(value, bool):
            assert value >= (meta.ge or 0) and (meta.le is None or value <= meta.le), f"{name}={value}"
    assert 0 <= found.port <= 65535
    with mock.patch.object(socket, "getaddrinfo", _numeric):
        problems = found.problems()
    warnings = [warning.text for warning in settings.find_warnings(environ)]
    shown = " ".join(problems + warnings) + repr(found)
    for secret in secrets_of(found.api_keys):
        known = (
            len(secret) < 8
            or secret in repr(Settings())
            or secret in repr(environ).replace(found.api_keys, "")
        )
        assert known or secret not in shown, f"{secret!r} in {shown}"


def _numeric(host: str, *_: object, **__: object) -> list[Any]:
    """A resolver of numeric addresses only: names would be asked of the network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise socket.gaierror("not an address") from None
    return [(0, 0, 0, "", (str(address), 0))]


def _keys(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    try:
        keys = parse_keys(text)
    except ValueError as error:
        assert not isinstance(error, UnicodeError)
        for secret in secrets_of(text):
            # Short ones may be words of the message itself.
            assert len(secret) < 12 or secret not in str(error), f"{secret!r} in {error}"
        return
    for secret in secrets_of(text):
        key = find_key(keys, secret)
        assert key is not None and key.scopes and key.scopes <= ALL_SCOPES
    assert find_key(keys, text + "?") is None


def _query(data: bytes) -> None:
    pairs = parse_query(data)
    for name, value in pairs.items():
        assert isinstance(value, str) and (name or not data)
        assert 0 <= number(pairs, name, 5) < 10**19
        assert isinstance(flag(pairs, name, True), bool)
        assert optional_flag(pairs, name) in (None, True, False)
    text = data.decode("latin-1")
    try:
        name = decode_cursor(text)
    except InvalidRequest:
        return
    assert decode_cursor(encode_cursor(name)) == name


def _place(data: bytes) -> None:
    """A percent-encoded name in a path is decoded to the original."""
    gate = Admission(Services(None, Settings(), int, "0", 0), [], int, lambda *_: False)  # type: ignore[arg-type]
    methods, topic, *_ = gate._match(b"/v0/topics/" + quote_from_bytes(data, safe="").encode())
    assert topic == data and (methods is not None) == bool(data)
    methods, topic, *_ = gate._match(b"/" + data)
    assert methods is None or not topic or data.startswith(b"v0/topics/")


def _host(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    host, port = split_host(text)
    if port is not None and port.isascii() and port.isdigit() and int(port[:9]) < 65536 and "[" not in host:
        again = split_host(join_host(host, int(port[:9])))
        assert again == (host, str(int(port[:9]))), f"{text!r}: {again}"


_RUNS = (_settings, _keys, _query, _place, _host)


def seeds() -> list[bytes]:
    numbers = b"\n".join(b"TOPICS_%b=%d" % (name.upper().encode(), i * 1000) for i, name in enumerate(_NAMES))
    return [
        b"\0" + numbers,
        b"\0TOPICS_HOST=0.0.0.0:99\nTOPICS_API_KEYS=verysecret:r:a.|b.,othersecret\nTOPICS_PORT=-1",
        b"\0TOPICS_HOST=[::1]:70000\nTOPICS_LOG_FORMAT=JSON\nTOPICS_FAST_PATH=off\nTOPICS_MAX_TOPICS=1e3",
        b"\x01onesecret:rw:orders.|bills.,twosecret:read+delete,threesecret::x,four",
        b"\x02prefix=a%20b&page_size=10&cursor=YWJj&each=true&each=0&x",
        b"\x02YWJj",
        b"\x03na\xc3\xafve/%41?\xff",
        b"\x03v0/topics/%41/diff",
        b"\x04[::1]:80",
        b"\x04host:80",
    ]


TOKENS = (
    b"%",
    b"%2",
    b"%ff",
    b"+",
    b"&",
    b"=",
    b":",
    b",",
    b"|",
    b"::",
    b"rw",
    b"\nTOPICS_API_KEYS=",
    b"99999999999999999999",
    b"\xc2\xb2",
)
TARGET = Target("texts", run, seeds, TOKENS, rounds=2500)
