"""How calls continue after failures, with a clock and random numbers that the test controls."""

from __future__ import annotations

import dataclasses
import datetime
import random
from typing import Any

import msgspec
import pytest

from topics.client import errors
from topics.client.calls import as_ms, health, write
from topics.client.flows import Core, Flow, Repeat, Request, Response, Retries, Send, Sleep, with_query
from topics.client.patterns import is_pattern, matches, prefix_of

URL = "http://server"


class ScriptedServer:
    """A scripted server: answers in the order of the script; sleeping moves the clock."""

    def __init__(self, *script: Response | Exception, retries: Retries | None = None) -> None:
        self.now = 100.0
        self.script = list(script)
        self.sent: list[Request] = []
        self.pauses: list[float] = []
        self.core = Core(
            URL, "me", retries or Retries(), lambda: self.now, lambda: 1_000_000, random.Random(7)
        )

    def run(self, flow: Flow[Any]) -> Any:
        try:
            effect = next(flow)
            while True:
                if isinstance(effect, Sleep):
                    self.pauses.append(effect.seconds)
                    self.now += effect.seconds
                    effect = flow.send(None)
                    continue
                assert isinstance(effect, Send)
                self.sent.append(effect.request)
                answer = self.script.pop(0)
                effect = flow.throw(answer) if isinstance(answer, Exception) else flow.send(answer)
        except StopIteration as stop:
            return stop.value


def refusal(status: int, code: str, retry_after: str = "", **detail: Any) -> Response:
    body = {"error": {"code": code, "message": "so it is", "detail": detail}}
    return Response(status, msgspec.json.encode(body), retry_after)


def cut(outcome: errors.Outcome = "unknown") -> errors.Disconnected:
    return errors.Disconnected(URL, "the connection broke", outcome)


OK = Response(
    200,
    b'{"topic":"t","first_seq":1,"last_seq":1,"head_seq":1,"count":1,"created":false,"deduped":false,"performance":'
    b'{"server_total_ms":0.1,"wal_append_ms":0.1,"fsync_ms":0.0}}',
)
NOT_READY = refusal(503, "not_ready", "1")


def test_a_write_is_repeated_with_the_same_key() -> None:
    world = ScriptedServer(cut(), refusal(503, "not_ready", "1", outcome="unknown"), NOT_READY, OK)
    assert world.run(write(world.core, "t", 1)).first_seq == 1
    keys = {request.headers["Idempotency-Key"] for request in world.sent}
    assert (len(world.sent), len(keys)) == (4, 1)
    assert {request.body for request in world.sent} == {b'{"records":[{"data":1}]}'}


def test_two_writes_have_two_keys() -> None:
    world = ScriptedServer(OK, OK)
    world.run(write(world.core, "t", 1))
    world.run(write(world.core, "t", 1))
    assert len({request.headers["Idempotency-Key"] for request in world.sent}) == 2


def test_without_a_key_only_what_was_refused_is_repeated() -> None:
    world = ScriptedServer(NOT_READY, cut("none"), refusal(429, "throttled", limit="pressure"), OK)
    world.run(write(world.core, "t", 1, idempotent=False))
    assert "Idempotency-Key" not in world.sent[0].headers
    for failure in (cut(), refusal(503, "not_ready", "1", outcome="unknown"), Response(502, b"<html>")):
        world = ScriptedServer(failure)
        with pytest.raises(errors.ClientError) as caught:
            world.run(write(world.core, "t", 1, idempotent=False))
        assert (caught.value.outcome, world.pauses) == ("unknown", [])


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """After the first refused connection, and again only after an answer in between."""
    refused = errors.Disconnected(URL, "connection refused", "none")
    world = ScriptedServer(refused, refused, refused, OK, OK, refused, OK)
    world.run(write(world.core, "t", 1))
    assert caplog.messages == [f"cannot reach {URL}: connection refused; retrying for 30 s"]
    producer = dataclasses.replace(world.core, retries=Retries(for_s=60))
    world.run(write(producer, "t", 1))
    world.run(write(producer, "t", 1))
    assert [message.rpartition("for ")[2] for message in caplog.messages] == ["30 s", "60 s"]
    world = ScriptedServer(refused, retries=Retries(for_s=0))
    with pytest.raises(errors.Disconnected):
        world.run(write(world.core, "t", 1))
    assert len(caplog.messages) == 2  # a call that is tried once raises at once


def test_pauses_double_within_their_bounds() -> None:
    world = ScriptedServer(*[cut()] * 8, OK, retries=Retries(for_s=1000, first_s=1.0, most_s=8.0))
    world.run(write(world.core, "t", 1))
    for pause, most in zip(world.pauses, (1, 2, 4, 8, 8, 8, 8, 8), strict=True):
        assert most / 2 <= pause <= most
    assert len(set(world.pauses)) == 8


def test_the_server_is_not_asked_sooner_than_it_says() -> None:
    world = ScriptedServer(NOT_READY, refusal(429, "throttled", "1", retry_after_ms=2500), OK)
    world.run(write(world.core, "t", 1))
    assert 1.0 <= world.pauses[0] <= 1.25
    assert 2.5 <= world.pauses[1] <= 3.2


def test_a_server_that_asks_for_no_pause_is_given_one() -> None:
    world = ScriptedServer(*[refusal(503, "not_ready", "0")] * 5, OK)
    world.run(write(world.core, "t", 1))
    assert min(world.pauses) >= 0.05


def test_it_gives_up_in_time_and_says_that_nobody_knows() -> None:
    world = ScriptedServer(cut(), *[NOT_READY] * 100, retries=Retries(for_s=10))
    with pytest.raises(errors.NotReady) as caught:
        world.run(write(world.core, "t", 1))
    # The last attempt was refused, but the first one was not.
    assert caught.value.outcome == "unknown"
    assert world.now <= 110
    assert len(world.sent) > 5


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(400, "invalid_request"), errors.InvalidRequest),
        (refusal(404, "topic_not_found", topic="t"), errors.TopicNotFound),
        (refusal(429, "throttled", "1", limit="max_topics"), errors.Throttled),
        (refusal(429, "throttled", "1", limit="tags"), errors.Throttled),
        (refusal(500, "internal", outcome="unknown"), errors.ServerFault),
        (refusal(422, "topic_full"), errors.TopicFull),
        (refusal(418, "of_tomorrow"), errors.ApiError),
        (refusal(404, "of_tomorrow"), errors.NotFound),
        (refusal(409, "of_tomorrow"), errors.Conflict),
    ],
)
def test_errors_that_a_retry_cannot_fix_are_raised_at_once(answer: Response, kind: type) -> None:
    world = ScriptedServer(answer)
    with pytest.raises(kind) as caught:
        world.run(write(world.core, "t", 1))
    assert (type(caught.value), world.pauses) == (kind, [])


def test_probes_are_not_repeated() -> None:
    world = ScriptedServer(NOT_READY)
    with pytest.raises(errors.NotReady):
        world.run(health(world.core))


def test_an_error_says_what_to_do() -> None:
    error = errors.error_of(URL, 422, refusal(422, "topic_full", topic="t").body)
    assert str(error) == "so it is (topic_full)"
    assert "update_topic" in error.advice
    assert error.__notes__ == [f"what to do: {error.advice}"]


def test_nothing_is_repeated_for_zero_seconds() -> None:
    world = ScriptedServer(NOT_READY, retries=Retries(for_s=0))
    with pytest.raises(errors.NotReady):
        world.run(world.core.exchange(Request("GET", "/"), Repeat.SAFE))


def test_times() -> None:
    core = ScriptedServer().core
    assert as_ms(core, 5) == 5
    assert as_ms(core, datetime.timedelta(seconds=1)) == 999_000
    assert as_ms(core, datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)) == 1000


def test_queries() -> None:
    assert with_query("/a", {"b": None}) == "/a"
    assert with_query("/a", {"b": True, "c": "x y>", "d": 1}) == "/a?b=true&c=x+y%3E&d=1"


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*", "a.b", False),
        ("a.*.c", "a.b.c", True),
        ("a", "a", True),
    ],
)
def test_patterns(pattern: str, name: str, is_match: bool) -> None:
    assert matches(pattern, name) == is_match
    if is_match:
        assert name.startswith(prefix_of(pattern))
    assert is_pattern(pattern) == (pattern != "a")
