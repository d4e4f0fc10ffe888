"""`topics tail`: its output formats, and broken, ended and forgotten streams.

Method: formatters are called directly; the rest runs against a scripted server on a real socket, and its requests
are checked. Reconnecting is done by the client and tested there.
"""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.event_server import Answer, EventServer, event, made, records, refusal, serving
from topics.cli import record_format
from topics.cli.client_errors import command_error
from topics.cli.errors import FAILED, OK, UNREACHABLE, CommandError
from topics.cli.tail import follow
from topics.client import Client, ClientError, Record, Retries
from topics.client.answers import RawRecord
from topics.client.patterns import is_pattern

ROOT = Path(__file__).resolve().parents[2]
SOON = b"retry: 1\n\n"


# -- lines -------------------------------------------------------------------------------------------------


def record(text: bytes, topic: str = "orders.eu") -> Record:
    found = msgspec.json.decode(text, type=RawRecord)
    found.topic = topic
    return found


RECORD = record(b'{"$seq":7,"$ts":1700000000123,"$tag":"eu","data":{"b": 1.0,"a":18446744073709551615}}')
BYTES = record(b'{"$seq":7,"$ts":1700000000123,"$encoding":"base64","data":"AAH/"}')


def test_a_line_for_people() -> None:
    shown = b'orders.eu 7 2023-11-14T22:13:20.123Z tag=eu {"b": 1.0,"a":18446744073709551615}\n'
    assert record_format.as_text(RECORD) == shown
    assert record_format.as_text(BYTES) == b"orders.eu 7 2023-11-14T22:13:20.123Z base64:AAH/\n"


def test_a_time_that_no_calendar_has_is_shown_as_it_is() -> None:
    odd = record(b'{"$seq":1,"$ts":18446744073709551615,"data":null}', "t")
    assert record_format.as_text(odd) == b"t 1 18446744073709551615 null\n"


def test_json_keeps_every_byte_of_the_data() -> None:
    line = record_format.as_json(RECORD)
    assert line.endswith(b',"data":{"b": 1.0,"a":18446744073709551615}}\n')
    assert json.loads(line) == {
        "topic": "orders.eu",
        "$seq": 7,
        "$ts": 1700000000123,
        "$tag": "eu",
        "data": {"b": 1.0, "a": 18446744073709551615},
    }
    assert json.loads(record_format.as_json(BYTES))["$encoding"] == "base64"


def test_raw_is_data_alone() -> None:
    assert record_format.as_data(RECORD) == b'{"b": 1.0,"a":18446744073709551615}\n'
    assert record_format.as_data(BYTES) == b'"AAH/"\n'


def test_a_terminal_gets_colours_and_no_escapes_of_records() -> None:
    sly = record('{"$seq":1,"$ts":0,"data":"\x9b2J\x7f ü"}'.encode())
    line = record_format.as_coloured_text(sly).decode()
    assert line.endswith('"\\u009b2J\\u007f ü"\n')
    assert line.startswith("\x1b[")
    assert record_format.as_coloured_text(sly) == record_format.as_coloured_text(sly)


# -- patterns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("orders", False),
        ("orders.*", True),
        ("*.eu", True),
        (">", True),
        ("a.>", True),
        ("a*", False),
        (">x", False),
    ],
)
def test_patterns(name: str, wanted: bool) -> None:
    assert is_pattern(name) == wanted


# -- streams -----------------------------------------------------------------------------------------------


class FinishedTail:
    """A tail that has ended."""

    def __init__(self, server: EventServer, *names: str, count: int | None = None) -> None:
        self.out, self.told, self.reason = io.BytesIO(), list[str](), ""
        with Client(server.url, retries=Retries(for_s=0), raw=True) as client:
            events = client.watch(*names or ("t",))
            try:
                self.code = follow(events, record_format.as_data, self.out.write, self.told.append, count)
            except (ClientError, CommandError) as error:
                ended = command_error(error) if isinstance(error, ClientError) else error
                self.code, self.reason = ended.code, str(ended)

    @property
    def shown(self) -> list[Any]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


def test_it_shows_records_and_stops_after_so_many() -> None:
    stream = SOON + records("t", "a", 1, 1, 2) + event("caught-up", "a", topic="t", head_seq=2)
    with serving(made(t=0), Answer(body=stream + records("t", "b", 3, 3, 4), holds=True)) as server:
        run = FinishedTail(server, count=3)
    assert (run.code, run.shown, run.told) == (OK, [1, 2, 3], [])


def test_a_broken_stream_resumes_after_the_last_complete_event() -> None:
    cut = records("t", "b", 2, "half")[:-1]
    with serving(
        made(t=0),
        Answer(body=SOON + records("t", "a", 1, 1) + cut),
        Answer(body=SOON + records("t", "b", 2, 2), holds=True),
    ) as server:
        run = FinishedTail(server, count=2)
    assert run.shown == [1, 2]
    assert server.ids == [None, "a"]
    assert run.told == ["the connection ended (retrying)", "reconnected"]


def test_a_forgotten_session_is_created_again_from_the_cursors() -> None:
    with serving(
        made(t=0),
        Answer(body=SOON + records("t", "a", 1, 1)),
        refusal(404, "not_found"),
        made("wid_2", t=1),
        Answer(body=SOON + records("t", "z", 2, 2), holds=True),
    ) as server:
        run = FinishedTail(server, count=2)
    assert run.shown == [1, 2]
    assert [body["topics"] for body in server.bodies] == [{"t": {"tail": True}}, {"t": {"from_seq": 1}}]
    assert [asked.path for asked in server.asked][-2:] == ["/v0/watch?lenient=true", "/v0/watch/wid_2"]
    assert server.ids == [None, "a", None]


def test_a_server_that_forgets_at_once_is_asked_after_a_pause() -> None:
    with serving(
        made(t=0),
        Answer(body=SOON + event("caught-up", "z", topic="t", head_seq=0)),
        refusal(404, "not_found"),
        made("wid_2", t=0),
        refusal(404, "not_found", "no such watch"),
        made("wid_3", t=0),
        Answer(body=records("t", "a", 1, 1), holds=True),
    ) as server:
        run = FinishedTail(server, count=1)
    assert run.shown == [1]
    assert len(server.asked) == 7


def test_gaps_and_deleted_topics_are_reported() -> None:
    gap = {"topic": "t", "earliest_seq": 5, "head_seq": 9}
    stream = (
        event("tombstone", "a", reason="cap", gap_from=1, gap_to=4, **gap)
        + event("tombstone", "b", reason="crash", gap_from=6, gap_to=6, **gap)
        + event("tombstone", "c", reason="recreated", gap_from=1, gap_to=0, **gap)
        + event("topic-deleted", "d", topic="t", head_seq=0, reason="deleted")
    )
    with serving(made(t=0), Answer(body=stream)) as server:
        run = FinishedTail(server)
    assert run.told == [
        "t: records 1 to 4 are lost (cap)",
        "t: record 6 is lost (crash)",
        "t was deleted and created again; reading from its beginning",
        "t was deleted",
    ]
    assert (run.code, run.reason) == (FAILED, "all topics were deleted")


def test_a_gap_moves_the_cursor_also_back() -> None:
    gap = {"reason": "recreated", "gap_from": 1, "gap_to": 0, "earliest_seq": 1, "head_seq": 0}
    with serving(
        made(t=9),
        Answer(body=SOON + event("tombstone", "a", topic="t", **gap)),
        refusal(404, "not_found"),
        made(t=0),
        Answer(body=records("t", "b", 1, 1), holds=True),
    ) as server:
        FinishedTail(server, count=1)
    assert server.bodies[1]["topics"] == {"t": {"from_seq": 0}}


def test_a_pattern_outlives_its_topics() -> None:
    deleted = event("topic-deleted", "a", topic="o.a", head_seq=0, reason="deleted")
    with serving(
        made(**{"o.a": 0}), Answer(body=SOON + deleted + records("o.b", "b", 1, 1), holds=True)
    ) as server:
        run = FinishedTail(server, "o.>", count=1)
    assert (run.code, run.shown) == (OK, [1])


def test_a_topic_deleted_while_the_stream_was_disconnected() -> None:
    with serving(
        made(a=1, b=1),
        Answer(body=SOON + event("caught-up", "z", topic="b", head_seq=1)),
        refusal(404, "not_found"),
        made(b=1),
        Answer(body=records("b", "x", 2, 2), holds=True),
    ) as server:
        run = FinishedTail(server, "a", "b", count=1)
    assert run.shown == [2]
    assert "a was deleted" in run.told


@pytest.mark.parametrize("status", [502, 503, 429])
def test_a_server_that_is_not_ready_is_asked_again(status: int) -> None:
    with serving(
        made(t=0),
        Answer(body=SOON + records("t", "a", 1, 1)),
        refusal(status, "not_ready", "not ready yet"),
        Answer(body=records("t", "b", 2, 2), holds=True),
    ) as server:
        assert FinishedTail(server, count=2).shown == [1, 2]
    assert server.ids == [None, "a", "a"]


def test_the_reason_why_a_stream_ended_is_reported() -> None:
    bye = event("error", code="server_shutting_down", error="stopping", message="the server is stopping")
    advice = event("error", code=429, error="slow down", message="slow down", retry_after_ms=5, topics=["t"])
    with serving(
        made(t=0),
        Answer(body=SOON + event("caught-up", "z", topic="t", head_seq=0) + advice + bye),
        Answer(body=records("t", "a", 1, 1), holds=True),
    ) as server:
        run = FinishedTail(server, count=1)
    assert run.told == [
        "slow down",
        "the server is stopping (retrying)",
        "reconnected",
    ]


def test_a_session_that_is_gone_while_it_streams() -> None:
    gone = event("error", code=410, error="gone", message="gone")
    with serving(
        made(t=3), Answer(body=SOON + gone), made(t=3), Answer(body=records("t", "a", 4, 4), holds=True)
    ) as server:
        assert FinishedTail(server, count=1).shown == [4]
    assert server.bodies[1]["topics"] == {"t": {"from_seq": 3}}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refusal(404, "topic_not_found", "topic 't' does not exist"), "topic 't' does not exist"),
        (refusal(401, "unauthorized", "send a key"), "send a key"),
        (refusal(429, "throttled", "too many"), "too many"),
        (Answer(200, b"hello"), "{url} does not respond like a topics server"),
        (Answer(418, b"<html>"), "{url} does not respond like a topics server: status 418"),
    ],
)
def test_a_refusal_ends_it(answer: Answer, told: str) -> None:
    with serving(answer) as server:
        run = FinishedTail(server)
    assert run.code == FAILED
    assert run.reason.startswith(told.format(url=server.url))


def test_an_invalid_event_ends_it() -> None:
    with serving(made(t=0), Answer(body=event("record", "a", later=1))) as server:
        assert FinishedTail(server).code == FAILED


def test_events_of_later_versions_are_ignored() -> None:
    stream = event("weather", "a", sky="grey") + records("t", "b", 1, 1)
    with serving(made(t=0), Answer(body=stream, holds=True)) as server:
        assert FinishedTail(server, count=1).shown == [1]


# -- the command -------------------------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> list[str]:
    return [
        "env",
        *(f"{name}={value}" for name, value in environment.items()),
        sys.executable,
        "-m",
        "topics.cli",
        "tail",
        *arguments,
    ]


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, **environment), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_reads_its_environment() -> None:
    with serving(made(t=0), Answer(body=records("t", "a", 1, {"n": 1}), holds=True)) as server:
        done = run_command("t", "--count", "1", TOPICS_URL=server.url, TOPICS_API_KEY="secret")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 't 1 2023-11-14T22:13:20.000Z {"n": 1}\n'
    assert [asked.authorization for asked in server.asked] == ["Bearer secret"] * 2


def test_options_are_put_into_the_request() -> None:
    with serving(made(t=0), Answer(body=records("t", "a", 1, 5), holds=True)) as server:
        done = run_command("t", "--json", "--all", "--group", "g", "--count", "1", "--url", server.url)
    assert json.loads(done.stdout) == {"topic": "t", "$seq": 1, "$ts": 1_700_000_000_000, "data": 5}
    (body,) = server.bodies
    assert body["topics"] == {"t": {"from_seq": 0}}
    assert (body["group"], body["limit"], body["include_tags"]) == ("g", 1, True)


@pytest.mark.parametrize(
    "arguments",
    [[], ["t", "--count", "0"], ["t", "--from", "-1"], ["t", "--all", "--from", "3"], ["t", "--json", "--raw"],
     ["t", "--url", "ftp://x"], ["t", "--url", "http://x:port"], ["t", "--key", "a\nb"]],
)  # fmt: skip
def test_wrong_arguments(arguments: list[str]) -> None:
    done = run_command(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = run_command("t", "--url", url)
    assert done.returncode == UNREACHABLE
    assert done.stderr == (
        f"topics tail: cannot reach {url}: connection refused. "
        "Start a server with `topics serve`, or give its address with --url or TOPICS_URL\n"
    )


def test_ctrl_c_ends_it_quietly() -> None:
    with serving(made(t=0), Answer(body=records("t", "a", 1, 1), holds=True)) as server:
        tail = subprocess.Popen(
            command("t", "--raw", "--url", server.url),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert tail.stdout is not None
        assert tail.stdout.readline() == b"1\n"  # flushed into the pipe while the stream continues
        tail.send_signal(signal.SIGINT)
        out, err = tail.communicate(timeout=120)
    assert (tail.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("last_words", [records("t", "b", 2, 2), b": hb 1\n\n"])
def test_a_reader_that_goes_away_ends_it_quietly(last_words: bytes) -> None:
    with serving(
        made(t=0), Answer(body=SOON + records("t", "a", 1, 1)), Answer(body=last_words, holds=True)
    ) as server:
        tail = subprocess.Popen(
            command("t", "--raw", "--url", server.url),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert tail.stdout is not None
        assert tail.stderr is not None
        assert tail.stdout.readline() == b"1\n"
        tail.stdout.close()
        assert b"Traceback" not in tail.stderr.read()
        assert tail.wait(120) == 0
        tail.stderr.close()


def test_colours_are_for_terminals() -> None:
    for environment, wanted in ({}, b"\x1b["), ({"NO_COLOR": "1"}, b"t 1 2023"):
        ours, theirs = pty.openpty()
        with serving(made(t=0), Answer(body=records("t", "a", 1, 1), holds=True)) as server:
            subprocess.run(
                command("t", "--count", "1", "--url", server.url, **environment),
                cwd=ROOT,
                stdout=theirs,
                timeout=60,
                check=True,
            )
        assert os.read(ours, 1000).startswith(wanted)
        os.close(ours)
        os.close(theirs)
