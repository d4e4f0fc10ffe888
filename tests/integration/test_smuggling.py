"""Request smuggling: requests that two parsers could read differently are refused with 400, the connection is closed, nothing is executed.

A malformed request must not qualify for the fast path. The last part tests connections
that end early, late or not at all.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.faults import fault
from tests.support.h2_client import Http2Client
from tests.support.raw_http import Closed, RawClient, RawReply
from tests.support.server import PATIENCE_S, Server, until
from topics.protocols.http1.pace import READ_AHEAD_MAX
from topics.protocols.http1.plain_head import read_plain_head

BODY = b'{"records":[{"data":1}]}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
# A request that must never be executed, wherever it is hidden.
HIDDEN = b"POST /v0/topics/hidden HTTP/1.1\r\nHost: x\r\n" + JSON + LENGTH + b"\r\n" + BODY


def request(
    headers: bytes = b"",
    *,
    line: bytes = b"POST /v0/topics/victim HTTP/1.1\r\n",
    host: bytes = b"Host: x\r\n",
    length: bytes = LENGTH,
    body: bytes = BODY,
) -> bytes:
    return line + host + JSON + length + headers + b"\r\n" + body


def chunks(body: bytes, coding: bytes = CHUNKED) -> bytes:
    return request(coding, length=b"", body=body)


def lined(line: bytes) -> bytes:
    return request(line=line)


WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
MALFORMED = {
    # Two lengths.
    "length twice": request(LENGTH),
    "two lengths": request(b"Content-Length: 3\r\n"),
    "a shorter length first": request(LENGTH, length=b"Content-Length: 3\r\n"),
    "length and chunked": request(CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
    "chunked and length": request(length=CHUNKED + LENGTH, body=b"0\r\n\r\n" + HIDDEN),
    "length 0 and chunked": request(CHUNKED, length=b"Content-Length: 0\r\n", body=WHOLE),
    # Invalid lengths.
    "length +": request(length=b"Content-Length: +24\r\n"),
    "length -": request(length=b"Content-Length: -24\r\n"),
    "length with a blank": request(length=b"Content-Length: 2 4\r\n"),
    "length hex": request(length=b"Content-Length: 0x18\r\n"),
    "length list": request(length=b"Content-Length: 24, 24\r\n"),
    "length empty": request(length=b"Content-Length:\r\n"),
    "length 20 digits": request(length=b"Content-Length: " + b"9" * 20 + b"\r\n"),
    "length beyond 64 bits": request(length=b"Content-Length: 18446744073709551640\r\n"),
    "length in other digits": request(length="Content-Length: ٢٤\r\n".encode()),
    "length with a dot": request(length=b"Content-Length: 24.0\r\n"),
    "length with an underscore": request(length=b"Content-Length: 2_4\r\n"),
    "length folded": request(length=b"Content-Length:\r\n 24\r\n"),
    "length, blank before colon": request(length=b"Content-Length : 24\r\n"),
    "length, tab before colon": request(length=b"Content-Length\t: 24\r\n"),
    # Codings.
    "xchunked": chunks(WHOLE, b"Transfer-Encoding: xchunked\r\n"),
    "chunked, identity": chunks(WHOLE, b"Transfer-Encoding: chunked, identity\r\n"),
    "identity, chunked": chunks(WHOLE, b"Transfer-Encoding: identity, chunked\r\n"),
    "gzip, chunked": chunks(WHOLE, b"Transfer-Encoding: gzip, chunked\r\n"),
    "chunked, chunked": chunks(WHOLE, b"Transfer-Encoding: chunked, chunked\r\n"),
    "chunked twice": chunks(WHOLE, CHUNKED + CHUNKED),
    "chunked and identity": chunks(WHOLE, CHUNKED + b"Transfer-Encoding: identity\r\n"),
    "identity": chunks(WHOLE, b"Transfer-Encoding: identity\r\n"),
    "coding empty": chunks(WHOLE, b"Transfer-Encoding:\r\n"),
    "coding quoted": chunks(WHOLE, b'Transfer-Encoding: "chunked"\r\n'),
    "coding with parameter": chunks(WHOLE, b"Transfer-Encoding: chunked;a=b\r\n"),
    "coding with a vertical tab": chunks(WHOLE, b"Transfer-Encoding: \x0bchunked\r\n"),
    "coding, blank before colon": chunks(WHOLE, b"Transfer-Encoding : chunked\r\n"),
    "coding, tab before colon": chunks(WHOLE, b"Transfer-Encoding\t: chunked\r\n"),
    "coding folded": chunks(WHOLE, b"Transfer-Encoding:\r\n chunked\r\n"),
    "coding behind a bare CR": request(b"X-A: b\rTransfer-Encoding: chunked\r\n"),
    "coding behind a bare LF": request(b"X-A: b\nTransfer-Encoding: chunked\r\n"),
    "chunked in HTTP/1.0": chunks(WHOLE).replace(b"HTTP/1.1", b"HTTP/1.0"),
    # ChunkedBody.
    "chunk size negative": chunks(b"-1\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size beyond 64 bits": chunks(b"1000000000000000000000018\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size hex prefix": chunks(b"0x18\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size empty": chunks(b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size with a blank": chunks(b"18 \r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size, bare LF": chunks(b"18\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size, bare CR": chunks(b"18\r" + BODY + b"\r\n0\r\n\r\n"),
    "chunk too long": chunks(b"17\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk without CR LF": chunks(b"18\r\n" + BODY + b"0\r\n\r\n"),
    "chunk with bare LF": chunks(b"18\r\n" + BODY + b"\n0\r\n\r\n"),
    "extension with a NUL": chunks(b"18;\0\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "extension with a bare CR": chunks(b"18;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "extension with a bare LF": chunks(b"18;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "extension too long": chunks(b"18;" + b"a" * 20_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "trailer without a colon": chunks(b"18\r\n" + BODY + b"\r\n0\r\nGET / HTTP/1.1\r\n\r\n"),
    "trailers without an end": chunks(b"18\r\n" + BODY + b"\r\n0\r\n" + b"X-A: b\r\n" * 4000),
    # Header lines.
    "folded": request(b"X-A: b\r\n c\r\n"),
    "folded first": request(host=b" X-A: b\r\nHost: x\r\n"),
    "bare LF": request().replace(b"\r\n", b"\n"),
    "one bare LF": request(b"X-A: b\n"),
    "bare LF at the end of the head": request().replace(b"\r\n\r\n", b"\n\n"),
    "bare CR": request(b"X-A: b\rc\r\n"),
    "CR CR LF": request(b"X-A: b\r\r\n"),
    "NUL in a value": request(b"X-A: b\0c\r\n"),
    "NUL in a name": request(b"X-\0A: b\r\n"),
    "control in a value": request(b"X-A: b\x01c\r\n"),
    "DEL in a value": request(b"X-A: b\x7fc\r\n"),
    "blank in a name": request(b"X A: b\r\n"),
    "blank before a name": request(b" X-A: b\r\n"),
    "blank before the colon": request(b"X-A : b\r\n"),
    "no name": request(b": b\r\n"),
    "no colon": request(b"X-A\r\n"),
    "name not ASCII": request("X-é: b\r\n".encode()),
    "name in parentheses": request(b"X(A): b\r\n"),
    # The request line.
    "blank before": b" " + request(),
    "tab before": b"\t" + request(),
    "bare LF before": b"\n" + request(),
    "bare CR before": b"\r" + request(),
    "two blanks": lined(b"POST  /v0/topics/victim HTTP/1.1\r\n"),
    "two blanks after": lined(b"POST /v0/topics/victim  HTTP/1.1\r\n"),
    "blank at the end": lined(b"POST /v0/topics/victim HTTP/1.1 \r\n"),
    "tabs": lined(b"POST\t/v0/topics/victim\tHTTP/1.1\r\n"),
    "blank in the path": lined(b"POST /v0/topics/vic tim HTTP/1.1\r\n"),
    "not ASCII in the path": lined("POST /v0/topics/é HTTP/1.1\r\n".encode()),
    "byte in the path": lined(b"POST /v0/topics/\xff HTTP/1.1\r\n"),
    "control in the path": lined(b"POST /v0/topics/a\x01 HTTP/1.1\r\n"),
    "NUL in the path": lined(b"POST /v0/topics/a\0 HTTP/1.1\r\n"),
    "fragment": lined(b"POST /v0/topics/victim#a HTTP/1.1\r\n"),
    "no path": lined(b"POST HTTP/1.1\r\n"),
    "relative path": lined(b"POST v0/topics/victim HTTP/1.1\r\n"),
    "authority": lined(b"POST x:80 HTTP/1.1\r\n"),
    "connect": lined(b"CONNECT x:80 HTTP/1.1\r\n"),
    "connect to a path": lined(b"CONNECT /v0/topics/victim HTTP/1.1\r\n"),
    "asterisk": lined(b"POST * HTTP/1.1\r\n"),
    "other scheme": lined(b"POST file:///v0/topics/victim HTTP/1.1\r\n"),
    "user in the URL": lined(b"POST http://a@x/v0/topics/victim HTTP/1.1\r\n"),
    "method with a colon": lined(b"PO:ST /v0/topics/victim HTTP/1.1\r\n"),
    "HTTP/0.9": b"GET /v0/topics/victim\r\n",
    "HTTP/0.9 with a version": lined(b"POST /v0/topics/victim HTTP/0.9\r\n"),
    "HTTP/1.2": lined(b"POST /v0/topics/victim HTTP/1.2\r\n"),
    "HTTP/2.0": lined(b"POST /v0/topics/victim HTTP/2.0\r\n"),
    "HTTP/1.10": lined(b"POST /v0/topics/victim HTTP/1.10\r\n"),
    "HTTP/1": lined(b"POST /v0/topics/victim HTTP/1\r\n"),
    "http/1.1": lined(b"POST /v0/topics/victim http/1.1\r\n"),
    "another protocol": lined(b"POST /v0/topics/victim RTSP/1.0\r\n"),
    "half a preface": b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    "TLS": bytes.fromhex("16030100050100000100") + bytes(20),
    # Host.
    "no host": request(host=b""),
    "two hosts": request(host=b"Host: x\r\nHost: x\r\n"),
    "two names in a host": request(host=b"Host: x y\r\n"),
    "host with a path": request(host=b"Host: x/y\r\n"),
    "host with a user": request(host=b"Host: a@x\r\n"),
    # Repeated.
    "two types": request(JSON),
}
TOO_LARGE = {
    "one header of 17 KiB": request(b"X-A: " + b"b" * 17_000 + b"\r\n"),
    "a plain header of 17 KiB": request(b"User-Agent: " + b"b" * 17_000 + b"\r\n"),
    "head of 1 MiB": request(b"User-Agent: " + b"b" * (1 << 20) + b"\r\n"),
    "a path of 17 KiB": lined(b"POST /" + b"a" * 17_000 + b" HTTP/1.1\r\n"),
    "1000 headers": request(b"".join(b"X-%d: a\r\n" % i for i in range(1000))),
    "a head without an end": b"POST /v0/topics/victim HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 3000,
}


def topics(server: Server) -> set[str]:
    return {row["topic"] for row in server.get("/v0/topics?page_size=1000").json["topics"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_MAX_BODY_BYTES": str(2 << 20)}
    server = Server(tmp_path_factory.mktemp("smuggling"), environment)
    try:
        yield server.start()
    finally:
        server.close()


def ask(server: Server, data: bytes) -> list[RawReply]:
    """All answers to these bytes, until the server closes the connection."""
    client = RawClient(server, timeout_s=PATIENCE_S)
    try:
        client.send(data)
        return client.read_all()
    finally:
        client.close()


def check_refused(reply: RawReply, status: int = 400) -> None:
    assert reply.status == status, reply
    assert reply.headers["connection"] == "close"
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.error) >= {"code", "message"} and reply.error["message"]


def check_untouched(server: Server) -> None:
    assert not topics(server) & {"victim", "hidden"}
    assert server.get("/healthz").status == 200


@fault(
    "request",
    "a malformed or ambiguous HTTP/1.1 request",
    "400 and the connection is closed; nothing is executed",
)
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(server: Server, name: str) -> None:
    data = MALFORMED[name]
    assert read_plain_head(data) is None
    replies = ask(server, data + HIDDEN)
    assert len(replies) == 1
    check_refused(replies[0])
    check_untouched(server)


@fault(
    "request",
    "a request line, URL or header larger than the limit",
    "431 and the connection is closed",
)
@pytest.mark.parametrize("name", TOO_LARGE)
def test_heads_that_are_too_large_are_refused(server: Server, name: str) -> None:
    data = TOO_LARGE[name]
    assert read_plain_head(data) is None
    replies = ask(server, data + HIDDEN)
    assert len(replies) == 1
    check_refused(replies[0], 431)
    assert replies[0].error["code"] == "header_fields_too_large"
    check_untouched(server)


@pytest.mark.parametrize("method", [b"FROB", b"post", b"M-SEARCH", b"TRACE", b"POSTS", b"PRI"])
@pytest.mark.parametrize("headers", [b"", b"Connection: keep-alive\r\n"])
def test_unknown_methods_end_the_connection(server: Server, method: bytes, headers: bytes) -> None:
    """Another server may know the method, and what follows it: so nothing after it is read."""
    line = method + b" /v0/topics/victim HTTP/1.1\r\n"
    [reply] = ask(server, request(headers, line=line) + HIDDEN)
    check_refused(reply, 405)
    assert reply.error["code"] == "method_not_allowed"
    [reply] = ask(server, line.replace(b"/victim", b"") + b"Host: x\r\n\r\n" + HIDDEN)
    check_refused(reply, 405)
    check_untouched(server)


def test_malformed_requests_behind_good_ones(server: Server) -> None:
    """Whichever parser read the request before, the next one is checked in the same way."""
    good = [
        b"POST /v0/topics/none/diff HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"GET /v0/topics/none HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v0/topics/none/diff HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v0/topics/none HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"\r\n",
    ]
    for data in list(MALFORMED.values())[::3]:
        if data.startswith((b"\r", b"\n")):
            continue
        replies = ask(server, b"".join(good) + data + HIDDEN)
        assert [reply.status for reply in replies] == [404, 404, 404, 404, 400]
        check_refused(replies[-1])
    check_untouched(server)


def test_malformed_requests_byte_by_byte(server: Server) -> None:
    """The result does not depend on how much arrives at once."""
    for data in list(MALFORMED.values())[::6]:
        client = RawClient(server, timeout_s=PATIENCE_S)
        for i in range(min(len(data), 400)):
            try:
                client.send(data[i : i + 1])
            except OSError:
                break  # refused already
        try:
            client.send(data[400:] + HIDDEN)
        except OSError:
            pass
        [reply] = client.read_all()
        check_refused(reply)
        client.close()
    check_untouched(server)


# -- valid requests ----------------------------------------------------------------------------------------


def write(topic: str, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST /v0/topics/%b HTTP/%b\r\nHost: x\r\n%b%b%b\r\n%b" % (
        topic.encode(),
        version,
        JSON,
        LENGTH,
        headers,
        BODY,
    )


def test_bytes_after_the_content_length_are_the_next_request(server: Server, topic: str) -> None:
    replies = ask(server, write(topic) + b"xx" + HIDDEN)
    assert [reply.status for reply in replies] == [201, 405]
    check_untouched(server)
    replies = ask(server, write(topic) + write(topic, b"Connection: close\r\n") + HIDDEN)
    assert [reply.json["last_seq"] for reply in replies] == [2, 3]
    check_untouched(server)


@pytest.mark.parametrize("headers", [b"", b"X-Odd: 1\r\n"])
def test_a_request_in_a_body_is_a_body(server: Server, topic: str, headers: bytes) -> None:
    body = json.dumps({"records": [{"data": HIDDEN.decode()}]}).encode()
    for content in (body, HIDDEN, b"\r\n\r\n" + HIDDEN, b"0\r\n\r\n" + HIDDEN):
        head = b"POST /v0/topics/%b HTTP/1.1\r\nHost: x\r\n%b%b" % (topic.encode(), JSON, headers)
        whole = head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
        in_chunks = head + CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
        for data in (whole, in_chunks):
            replies = ask(server, data + write(topic, b"Connection: close\r\n"))
            assert len(replies) == 2 and replies[0].status in ((200, 201) if content is body else (400,))
            assert replies[1].status in (200, 201)
    for method in (b"GET", b"DELETE", b"HEAD"):
        line = (
            b"%b /v0/topics/none/diff HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        )
        client = RawClient(server)
        client.send(line % (method, len(HIDDEN)) + HIDDEN)
        assert client.read(with_body=method != b"HEAD").status == 405
        assert client.read_all() == []
        client.close()
    check_untouched(server)


def test_blank_lines_before_a_request(server: Server, topic: str) -> None:
    replies = ask(server, b"\r\n" + write(topic) + b"\r\n\r\n" + write(topic, b"Connection: close\r\n"))
    assert [reply.status for reply in replies] == [201, 200]


def test_targets_that_are_whole_urls(server: Server, topic: str) -> None:
    data = (
        write(topic, b"Connection: close\r\n")
        .replace(b" /v0", b" http://localhost:1/v0")
        .replace(b"Host: x", b"Host: elsewhere")
    )
    [reply] = ask(server, data)
    assert reply.status == 201 and reply.json["topic"] == topic


def test_connection_close(server: Server, topic: str) -> None:
    for headers in (b"Connection: close\r\n", b"Connection: Close\r\n", b"Connection: a, close\r\n"):
        [reply] = ask(server, write(topic, headers) + HIDDEN)
        assert reply.status in (200, 201) and reply.headers["connection"] == "close"
    check_untouched(server)


def test_http_1_0(server: Server, topic: str) -> None:
    [reply] = ask(server, write(topic, version=b"1.0") + HIDDEN)
    assert reply.status == 201 and reply.headers["connection"] == "close"
    check_untouched(server)
    stays = write(topic, b"Connection: keep-alive\r\n", b"1.0")
    replies = ask(server, stays + stays + b"GET /healthz HTTP/1.0\r\n\r\n" + HIDDEN)
    assert [reply.headers["connection"] for reply in replies] == ["keep-alive", "keep-alive", "close"]
    check_untouched(server)


def test_expect_continue(server: Server, topic: str) -> None:
    client = RawClient(server)
    whole = write(topic, b"Expect: 100-continue\r\n")
    client.send(whole[: -len(BODY)])
    assert client.read().status == 100
    client.send(BODY)
    assert client.read().status == 201
    client.send(write(topic))
    assert client.read().status == 200
    # A refused request gets no 100, and its body may or may not follow.
    client.send(whole.replace(b"application/json", b"text/plain")[: -len(BODY)])
    reply = client.read()
    assert reply.status == 415 and reply.headers["connection"] == "close"
    assert client.read_all() == []
    client.close()


@pytest.mark.parametrize(
    "headers",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YWJjZA==\r\n",
    ],
)
def test_no_upgrade(server: Server, topic: str, headers: bytes) -> None:
    client = RawClient(server)
    client.send(write(topic, headers) + write(topic))
    replies = [client.read(), client.read()]
    assert [reply.status for reply in replies] == [201, 200]
    assert all("upgrade" not in reply.headers for reply in replies)
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert client.read().status == 400
    client.close()


def test_chunked_requests_keep_the_connection(server: Server, topic: str) -> None:
    client = RawClient(server)
    line = b"POST /v0/topics/%b HTTP/1.1\r\nHost: x\r\n" % topic.encode()
    body = b"%x;name=value\r\n%b\r\n0\r\nX-Sum: 1\r\nHost: y\r\n\r\n" % (len(BODY), BODY)
    for i in range(3):
        client.send(line + JSON + CHUNKED + b"\r\n" + body + write(topic))
        assert [client.read().json["last_seq"], client.read().json["last_seq"]] == [2 * i + 1, 2 * i + 2]
    client.close()


# -- refused bodies ----------------------------------------------------------------------------------------


@fault(
    "request", "a body larger than the limit on a persistent connection", "413 and the connection is closed"
)
def test_too_large_a_body_ends_the_connection(server: Server, topic: str) -> None:
    head = b"POST /v0/topics/%b HTTP/1.1\r\nHost: x\r\n%b" % (topic.encode(), JSON)
    size = 3 << 20
    [reply] = ask(server, head + b"Content-Length: %d\r\n\r\n" % size)  # without sending the body
    check_refused(reply, 413)
    # The client sends the body all the same: a reset must not destroy the answer.
    for _ in range(5):
        client = RawClient(server)
        try:
            client.send(head + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        except OSError:
            pytest.fail("the connection was reset before the answer could be read")
        [reply] = client.read_all()
        check_refused(reply, 413)
        client.close()
    client = RawClient(server)
    client.send(head + CHUNKED + b"\r\n")
    for _ in range(size // 65536):
        client.send(b"10000\r\n" + bytes(65536) + b"\r\n")
    [reply] = client.read_all()
    check_refused(reply, 413)
    client.close()
    assert topic not in topics(server)


def test_a_refused_small_body_keeps_the_connection(server: Server, topic: str) -> None:
    client = RawClient(server)
    refused = write(topic).replace(b"application/json", b"text/plain")
    for headers in (b"", b"X-Odd: 1\r\n"):
        client.send(refused.replace(LENGTH, headers + LENGTH) + write(topic))
        assert client.read().status == 415
        assert client.read().status in (200, 201)
    client.close()


# -- disconnects -------------------------------------------------------------------------------------------


def poll(topic: str, wait_ms: int, headers: bytes = b"") -> bytes:
    """A long poll on a topic with one record."""
    body = b'{"from_seq":1,"wait_ms":%d}' % wait_ms
    return b"POST /v0/topics/%b/diff HTTP/1.1\r\nHost: x\r\n%b%bContent-Length: %d\r\n\r\n%b" % (
        topic.encode(),
        JSON,
        headers,
        len(body),
        body,
    )


@fault("client", "a client closes its sending side right after its requests", "it gets its answers")
@pytest.mark.parametrize("headers", [b"", b"X-Odd: 1\r\n"])
def test_a_half_closed_client_gets_its_answers(server: Server, topic: str, headers: bytes) -> None:
    client = RawClient(server)
    client.send(write(topic, headers) + poll(topic, 50, headers) + write(topic, headers))
    client.half_close()
    assert [reply.status for reply in client.read_all()] == [201, 200, 200]
    client.close()


def test_a_half_closed_http2_client_gets_its_answers(server: Server, topic: str) -> None:
    server.write(topic, 1)
    client = Http2Client(server)
    json_type = [("content-type", "application/json")]
    streams = [
        client.send("POST", f"/v0/topics/{topic}/diff", json_type, b'{"from_seq":1,"wait_ms":50}'),
        client.send("GET", f"/v0/topics/{topic}"),
    ]
    client.half_close()
    assert [client.wait(stream).status for stream in streams] == [200, 200]
    client.wait_closed()
    client.close()


def faults(server: Server) -> list[str]:
    return [line for line in server.log.splitlines() if "Traceback" in line]


def open_sockets(server: Server) -> int:
    folder = Path(f"/proc/{server.pid('front 0')}/fd")
    links = []
    for link in folder.iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:
            pass
    return sum(link.startswith("socket:") for link in links)


@fault("client", "clients disconnect during their long polls", "the polls are cancelled")
def test_clients_that_disconnect_in_a_long_poll_leak_nothing(server: Server, topic: str) -> None:
    server.write(topic, 1)
    before = open_sockets(server)
    for i in range(60):
        client = server.connect()
        headers = b"X-Odd: 1\r\n" if i % 3 == 1 else b""
        if i % 3 == 2:
            http2 = Http2Client(server)
            body = b'{"from_seq":1,"wait_ms":300}'
            http2.send("POST", f"/v0/topics/{topic}/diff", [("content-type", "application/json")], body)
            http2.close()
        client.sendall(poll(topic, 300, headers))
        if i % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        client.close()
    until(lambda: open_sockets(server) <= before)
    server.diff(topic, from_seq=1, wait_ms=400)  # ends after the others, whose answers are dropped
    assert server.get("/healthz").status == 200
    assert faults(server) == []


@fault(
    "client",
    "a client disconnects in the middle of a body",
    "nothing is executed, and no error is logged",
)
def test_clients_that_disconnect_in_a_body_are_no_error(server: Server, topic: str) -> None:
    before = open_sockets(server)
    for headers in (b"", b"X-Odd: 1\r\n"):
        for length in (LENGTH, CHUNKED):
            for reset in (False, True):
                client = server.connect()
                data = request(headers, length=length, body=b"5\r\nab")
                client.sendall(data)
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
    until(lambda: open_sockets(server) <= before)
    check_untouched(server)
    assert faults(server) == []


# -- timeouts ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_timeouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_KEEPALIVE_MS": "200", "TOPICS_REQUEST_TIMEOUT_MS": "300"}
    server = Server(tmp_path_factory.mktemp("short_timeouts"), environment)
    try:
        yield server.start()
    finally:
        server.close()


@fault("client", "a connection is idle", "it is closed after a timeout, unless it waits for an answer")
def test_idle_connections_are_closed(short_timeouts: Server, topic: str) -> None:
    clients = []
    for data in (b"", write(topic), b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"):
        client = RawClient(short_timeouts, timeout_s=PATIENCE_S)
        client.send(data)
        clients.append((client, 1 if data else 0))
    http2 = Http2Client(short_timeouts, timeout_s=PATIENCE_S)
    assert http2.request("GET", "/healthz").status == 200
    for client, answers in clients:
        assert len(client.read_all()) == answers
        client.close()
    http2.wait_closed()
    http2.close()


def test_a_long_poll_is_not_idle(short_timeouts: Server, topic: str) -> None:
    short_timeouts.write(topic, 1)
    clients = []
    for headers in (b"", b"X-Odd: 1\r\n"):
        client = RawClient(short_timeouts, timeout_s=PATIENCE_S)
        client.send(poll(topic, 2500, headers))
        clients.append(client)
    for client in clients:
        assert client.read().status == 200
        client.close()


@fault(
    "client",
    "a client sends half a request and then nothing",
    "408 after a timeout, and the connection is closed",
)
def test_unfinished_requests_are_answered_with_408(short_timeouts: Server, topic: str) -> None:
    parts = [
        b"P",
        b"POST /v0/topics/a HTTP/1.1\r\nHost: x\r\nContent-Le",
        write(topic)[:-1],
        write(topic, b"X-Odd: 1\r\n")[:-1],
        chunks(WHOLE)[:-3],
        write(topic).replace(b"application/json", b"text/plain", 1)[:-1],
    ]
    clients = []
    for part in parts:
        client = RawClient(short_timeouts, timeout_s=PATIENCE_S)
        client.send(part)
        clients.append(client)
    for client in clients:
        [reply] = client.read_all()
        check_refused(reply, 408)
        assert reply.error["code"] == "request_timeout"
        client.close()
    assert topic not in topics(short_timeouts)


# -- clients that do not read ------------------------------------------------------------------------------


def rss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


@fault("client", "a client stops reading its answer", "its connection is cut; a slow one is not")
def test_a_client_that_reads_nothing_is_bounded_and_cut(short_timeouts: Server, topic: str) -> None:
    short_timeouts.write(topic, *["x" * 500_000] * 6)
    body = b'{"max_batch_bytes":8388608}'
    line = b"POST /v0/topics/%b/diff HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b"
    diff = line % (topic.encode(), JSON, len(body), body)
    front = short_timeouts.pid("front 0")
    before = rss_bytes(front)
    client = short_timeouts.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(diff * 200)  # answers of 600 MB

    def is_cut() -> bool:
        assert rss_bytes(front) - before < 60 << 20
        try:
            client.sendall(b"\r\n")
        except OSError:
            return True
        return False

    until(is_cut, every_s=0.05)
    client.close()
    assert short_timeouts.diff(topic, limit=1).status == 200


def test_pipelined_requests_beyond_the_buffer_are_answered(server: Server, topic: str) -> None:
    """The first request waits; the ones after it fill the buffer, and all are answered in the end."""
    server.write(topic, 1)
    one = poll(topic, 0)
    count = 2 * READ_AHEAD_MAX // len(one)
    client = RawClient(server)
    client.socket.settimeout(120)
    client.send(poll(topic, 300))
    client.send(one * count)
    client.half_close()
    assert len(client.read_all()) == count + 1
    client.close()


def test_the_lingering_ends(server: Server) -> None:
    """A client that keeps sending after a refusal is read only for a short time."""
    client = RawClient(server)
    client.send(b"GARBAGE\r\n")
    check_refused(client.read())
    with pytest.raises(Closed):
        client.read()

    def is_closed() -> bool:
        try:
            client.send(b"x")
        except OSError:
            return True
        return False

    until(is_closed, every_s=0.05)
    client.close()


def test_draining_lets_open_requests_end(start_server: Callable[..., Server], topic: str) -> None:
    server = start_server()
    server.write(topic, 1)
    clients = []
    for headers in (b"", b"X-Odd: 1\r\n"):
        client = RawClient(server)
        client.send(poll(topic, 30_000, headers))
        clients.append(client)
    server.diff(topic, from_seq=1, wait_ms=300)  # sent after the others, so they have arrived when it ends
    assert server.stop() == 0
    for client in clients:
        [reply] = client.read_all()
        check_refused(reply, 503)  # without waiting for the polls to end
        assert reply.error["code"] == "shutting_down"
        client.close()
