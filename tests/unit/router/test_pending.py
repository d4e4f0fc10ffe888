"""Goal: every request gets exactly one answer, from the worker it was sent to or from the front itself.

Method: single cases of the bounds and of deaths; then a state machine that sends, answers, loses, expires and
restarts in any order, and counts the answers.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router import pending
from router.pending import (
    BUDGET_MS,
    CREDIT_BYTES,
    GIVE_UP_US,
    REQUEST_COST,
    WINDOW_UPDATE_BYTES,
    PendingRequests,
)
from tests.support.faults import fault
from topics.engine.core.placement import shard_of
from topics.link import wire
from topics.protocols.http.call import Call, Services, ask_all, ask_owner
from topics.protocols.http.exchange import Request, Response
from topics.system.settings import Settings

CHANGES = sorted(wire.CHANGES)
OTHERS = sorted(set(range(wire.WRITE, wire.CATALOG)) - wire.CHANGES)


class Answers(list[wire.Reply]):
    """An `on_reply` that keeps the answers."""

    __slots__ = ()

    def __call__(self, reply: wire.Reply) -> None:
        self.append(reply)

    @property
    def only(self) -> wire.Reply:
        assert len(self) == 1, self
        return self[0]

    @property
    def error(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self.only.failure)


def core_with(shards: int = 2) -> PendingRequests:
    core = PendingRequests(shards)
    for shard in range(shards):
        core.worker_up(shard, 1)
    return core


def send(
    core: PendingRequests, shard: int = 0, *, op: int = wire.WRITE, body: wire.Buffer = b"", at: int = 0
) -> Answers:
    answers = Answers()
    core.ask(shard, op, 0, b"t", b"", body, at, answers)
    return answers


def sent(core: PendingRequests) -> list[tuple[int, wire.Request]]:
    """The messages that leave now, read as the shards would."""
    found = []
    for shard, parts in core.take_messages():
        assert wire.read_message_head(bytes(parts[0])) == core.links[shard].incarnation
        found += [(shard, request) for request in wire.read_requests(bytes(parts[0]), *parts[1:])]
    return found


def answer(
    core: PendingRequests, shard: int, *numbers: int, incarnation: int = 1, code: int = wire.OK
) -> None:
    items = [wire.reply_head(number, code, wire.JSON, b"", 2) + b"{}" for number in numbers]
    core.receive(shard, wire.message_head(incarnation) + b"".join(items))


# ---- requests and replies


def test_a_tick_s_requests_to_one_shard_are_one_message_in_order() -> None:
    core = core_with()
    for i in range(5):
        send(core, i % 2, body=b"%d" % i)
    messages = core.take_messages()
    assert [shard for shard, _ in messages] == [0, 1]
    bodies = [[r.body for r in wire.read_requests(bytes(parts[0]))] for _, parts in messages]
    assert bodies == [[b"0", b"2", b"4"], [b"1", b"3"]]
    assert core.take_messages() == []


def test_a_large_body_goes_as_a_part_of_its_own_and_keeps_its_place() -> None:
    core = core_with(1)
    large = b"x" * wire.SEPARATE_BODY_BYTES
    bodies = [b"a", large, b"b", large]
    for body in bodies:
        send(core, body=body)
    messages = core.take_messages()
    assert [len(parts) for _, parts in messages] == [1, 2, 1, 2]
    assert messages[1][1][1] is large
    read = [r.body for _, parts in messages for r in wire.read_requests(bytes(parts[0]), *parts[1:])]
    assert read == bodies


def test_a_request_says_when_it_came_and_how_long_it_may_wait() -> None:
    core = core_with(1)
    send(core, at=12345)
    ((_, request),) = sent(core)
    assert (request.received_us, request.budget_ms) == (12345, BUDGET_MS)


def test_each_reply_finds_its_request() -> None:
    core = core_with(1)
    first, second = send(core), send(core)
    numbers = [request.id for _, request in sent(core)]
    answer(core, 0, numbers[1], code=wire.CREATED)
    assert (len(first), second.only.code) == (0, wire.CREATED)
    answer(core, 0, numbers[0])
    assert first.only.code == wire.OK
    assert (core.in_flight, core.links[0].cost) == (0, 0)


@fault("link", "a worker replies twice", "the second reply goes nowhere")
def test_a_second_reply_is_nobody_s() -> None:
    core = core_with(1)
    answers = send(core)
    ((_, request),) = sent(core)
    answer(core, 0, request.id, request.id)
    answer(core, 0, request.id)
    assert len(answers) == 1


@fault("front", "an answer cannot be handed to its client", "the others of the same message are answered")
def test_a_fault_in_one_answer_does_not_cost_the_others_theirs() -> None:
    core = core_with(1)

    def fails(_: wire.Reply) -> None:
        raise RuntimeError("a client's fault")

    core.ask(0, wire.WRITE, 0, b"t", b"", b"", 0, fails)
    answers = send(core)
    answer(core, 0, *(request.id for _, request in sent(core)))
    assert answers.only.code == wire.OK
    core.ask(0, wire.WRITE, 0, b"t", b"", b"", 0, fails)
    answers = send(core)
    core.worker_down(0)
    assert answers.error["code"] == "not_ready"


# ---- placement


def call_for(core: PendingRequests, topic: str) -> Call:
    services = Services(core, Settings(), lambda: 0, "1", 0)
    request = Request(b"POST", b"", b"", 5, b"body")
    return Call(request, topic.encode(), None, services)


def test_a_topic_s_requests_go_to_the_shard_that_owns_it() -> None:
    core = core_with(5)
    for topic in (f"topic-{i}" for i in range(50)):
        responses: list[Response] = []
        ask_owner(call_for(core, topic), wire.WRITE, responses.append)
        ((shard, request),) = sent(core)
        assert shard == shard_of(topic, 5)
        assert request.topic == topic.encode()
        answer(core, shard, request.id)
        assert [response.status for response in responses] == [200]


def test_a_question_to_all_waits_for_all_and_keeps_their_order() -> None:
    core = core_with(3)
    got: list[list[wire.Reply]] = []
    ask_all(call_for(core, ""), wire.READY, got.append)
    asked = sent(core)
    assert [shard for shard, _ in asked] == [0, 1, 2]
    for shard, request in reversed(asked):
        assert got == []
        answer(core, shard, request.id, code=shard)
    assert [[reply.code for reply in replies] for replies in got] == [
        [wire.OK, wire.CREATED, wire.UNFINISHED]
    ]


@fault(
    "link", "a question to all shards while one is down", "it is answered; the one that is down counts as 503"
)
def test_a_question_to_all_is_answered_when_one_is_down() -> None:
    core = core_with(3)
    got: list[list[wire.Reply]] = []
    core.worker_down(1)
    ask_all(call_for(core, ""), wire.READY, got.append)
    for shard, request in sent(core):
        answer(core, shard, request.id)
    assert [[reply.error_code for reply in replies] for replies in got] == [["", "not_ready", ""]]


# ---- bounds


@fault(
    "link",
    "a worker stalls while requests keep coming",
    "beyond its credit they are refused with 429 and cost no memory",
)
def test_beyond_its_credit_a_shard_gets_nothing_more() -> None:
    core = core_with(2)
    half = memoryview(bytearray(CREDIT_BYTES // 2 - REQUEST_COST))
    first, second = send(core, body=half), send(core, body=half)
    over = send(core)
    assert over.error["code"] == "throttled"
    assert core.refused_full == 1
    assert send(core, 1) == []  # the other shard has a bound of its own
    assert (first, second) == ([], [])
    answer(core, 0, next(request.id for _, request in sent(core)))
    assert send(core) == []


def test_a_single_body_above_the_credit_passes_when_nothing_else_waits() -> None:
    core = core_with(1)
    assert send(core, body=memoryview(bytearray(CREDIT_BYTES + 1))) == []
    assert send(core).error["code"] == "throttled"


@fault("link", "more requests wait than a front may hold", "the rest is refused with 429")
def test_only_so_many_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "PENDING_MAX", 3)
    core = core_with(1)
    assert [send(core) for _ in range(3)] == [[], [], []]
    assert send(core).error["code"] == "throttled"


def test_a_shard_is_told_what_was_taken_of_its_answers() -> None:
    core = core_with()
    send(core, op=wire.DIFF)
    ((_, asked),) = sent(core)
    message = wire.message_head(1) + wire.reply_head(asked.id, wire.OK, wire.JSON, b"", wire.SEPARATE)
    core.receive(0, message, bytes(WINDOW_UPDATE_BYTES - len(message) - 1))
    assert sent(core) == [], "not for every small change"
    answer(core, 0, 0)
    ((shard, told),) = sent(core)
    assert (shard, told.op) == (0, wire.WINDOW_UPDATE)
    small = len(wire.message_head(1) + wire.reply_head(0, wire.OK, wire.JSON, b"", 0))
    assert wire.read_window_update(told.body) >= WINDOW_UPDATE_BYTES - 1 + small
    assert core.in_flight == 0


def test_a_dead_worker_s_debts_are_forgotten() -> None:
    core = core_with(1)
    send(core, body=memoryview(bytearray(CREDIT_BYTES)))
    core.worker_down(0)
    core.worker_up(0, 2)
    assert core.links[0].cost == 0
    assert [send(core), send(core)] == [[], []]


# ---- incarnations and deaths


@fault(
    "link", "a worker dies with a change that it was sent", "the client is told that the outcome is unknown"
)
@pytest.mark.parametrize("op", CHANGES)
def test_a_change_lost_with_its_worker_has_an_unknown_outcome(op: int) -> None:
    core = core_with(1)
    answers = send(core, op=op)
    sent(core)
    core.worker_down(0)
    assert answers.error["code"] == "not_ready"
    assert answers.error["code"] == "not_ready"
    assert answers.error["detail"] == {"outcome": "unknown"}


@fault("link", "a worker dies with a read that it was sent", "the client is told to try again")
@pytest.mark.parametrize("op", OTHERS)
def test_a_question_lost_with_its_worker_has_no_outcome(op: int) -> None:
    core = core_with(1)
    answers = send(core, op=op)
    sent(core)
    core.worker_down(0)
    assert answers.error["code"] == "not_ready"
    assert "outcome" not in answers.error.get("detail", {})


@fault(
    "link",
    "a worker dies before a request was sent to it",
    "the request is refused and never carried out later",
)
def test_unsent_requests_are_never_sent_to_the_next_worker() -> None:
    core = core_with(1)
    lost = send(core), send(core, body=b"x" * wire.SEPARATE_BODY_BYTES)
    core.worker_down(0)
    core.worker_up(0, 2)
    assert core.take_messages() == []
    assert [answers.error["code"] for answers in lost] == ["not_ready", "not_ready"]


@fault("link", "a request for a shard whose worker is away", "refused at once with 503; other shards serve")
def test_while_a_worker_is_down_its_requests_are_refused_at_once() -> None:
    core = core_with(2)
    core.worker_down(1)
    refused = send(core, 1)
    assert refused.error["code"] == "not_ready"
    assert "outcome" not in refused.error["detail"]  # it was certainly not carried out
    assert send(core, 0) == []
    assert [shard for shard, _ in sent(core)] == [0]


@fault("link", "a reply of a dead worker comes after its successor started", "it is ignored")
def test_a_late_reply_of_the_worker_before_is_ignored() -> None:
    """Ids continue over incarnations, but a reply of the old one would be wrong even for an id that is in use."""
    core = core_with(1)
    core.worker_down(0)
    core.worker_up(0, 2)
    answers = send(core)
    ((_, request),) = sent(core)
    answer(core, 0, request.id, incarnation=1)
    assert answers == []
    answer(core, 0, request.id, incarnation=2)
    assert answers.only.code == wire.OK


def test_ids_are_not_used_again() -> None:
    core = core_with(1)
    send(core)
    before = {request.id for _, request in sent(core)}
    core.worker_down(0)
    core.worker_up(0, 2)
    send(core)
    assert before.isdisjoint(request.id for _, request in sent(core))


@fault(
    "link", "a worker does not answer in time", "the client gets an answer; a change has an unknown outcome"
)
def test_stream_messages_of_a_shard_are_no_replies() -> None:
    """Streams had numbers of their own: a write with the same number was answered with the message that a stream is
    to end.
    """
    core = core_with()
    pushed: list[int] = []
    core.on_push = lambda shard, reply: pushed.append(reply.id)
    answers = [send(core) for _ in range(3)]
    stream = core.new_number()
    answers += [send(core) for _ in range(3)]
    answer(core, 0, stream)
    assert pushed == [stream]
    assert answers == [[]] * 6


def test_requests_that_wait_too_long_are_given_up() -> None:
    core = core_with(2)
    old, question, young = send(core, at=0), send(core, 1, op=wire.DIFF, at=0), send(core, at=10)
    core.expire(GIVE_UP_US - 1)
    assert (old, question, young) == ([], [], [])
    core.expire(GIVE_UP_US)
    assert old.error["detail"] == {"outcome": "unknown"}
    assert question.error["code"] == "not_ready"
    assert young == []
    numbers = [request.id for _, request in sent(core)]
    answer(core, 0, *numbers)
    assert (len(old), len(young)) == (1, 1)
    assert core.links[0].cost == 0


def test_a_stop_ends_reads_but_no_changes() -> None:
    core = core_with(1)
    poll, frames = send(core, op=wire.DIFF, at=5), send(core, op=wire.WATCH_READ, at=5)
    young, write = send(core, op=wire.DIFF, at=6), send(core, op=wire.WRITE, at=5)
    claim = send(core, op=wire.CLAIM, at=5)
    core.end_polls(5)
    assert [poll.error["code"], frames.error["code"]] == ["shutting_down"] * 2
    # It may have got a lease meanwhile, which only ends by time.
    assert (claim.error["code"], claim.error["detail"]) == ("shutting_down", {"outcome": "unknown"})
    assert (young, write, core.in_flight) == ([], [], 2)
    answer(core, 0, *(request.id for _, request in sent(core)))
    assert [len(poll), len(frames), len(young), len(write), len(claim)] == [1, 1, 1, 1, 1]


def test_a_claim_stays_on_the_books_when_its_client_goes() -> None:
    """It may still get a job, and the number of waiting claims at a shard has to include it."""
    core = core_with(1)
    claim, poll = send(core, op=wire.CLAIM), send(core, op=wire.DIFF)
    numbers = [request.id for _, request in sent(core)]
    for number in numbers:
        core.cancel(0, number)
    assert (claim, len(poll), core.in_flight) == ([], 1, 1)
    answer(core, 0, numbers[0])
    assert (len(claim), core.in_flight) == (1, 0)


def test_a_client_may_send_again_from_within_its_answer() -> None:
    """A pipelined request follows as soon as the one before is answered, also when a death answers it."""
    core = core_with(1)
    again: list[Answers] = []
    core.ask(0, wire.WRITE, 0, b"t", b"", b"", 0, lambda _: again.append(send(core)))
    core.worker_down(0)
    assert again[0].error["code"] == "not_ready"
    core.worker_up(0, 2)
    core.ask(0, wire.WRITE, 0, b"t", b"", b"", 0, lambda _: again.append(send(core)))
    ((_, request),) = sent(core)
    answer(core, 0, request.id, incarnation=2)
    assert again[1] == []
    assert len(sent(core)) == 1


# ---- any order


class Traffic(RuleBasedStateMachine):
    """Two shards, what their workers have received, and replies of dead workers that are still in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.core = PendingRequests(2)
        self.now_us = 0
        self.incarnation = 0
        self.asked: list[Answers] = []
        self.open: list[tuple[int, int, int]] = []  # shard, incarnation, id: received by a worker

    def living(self) -> list[int]:
        return [shard for shard, link in enumerate(self.core.links) if link.incarnation is not None]

    @rule(
        shard=st.integers(0, 1),
        op=st.sampled_from(CHANGES + OTHERS),
        large=st.booleans(),
        follow=st.booleans(),
    )
    def send(self, shard: int, op: int, large: bool, follow: bool) -> None:
        answers = Answers()
        self.asked.append(answers)

        def on_reply(reply: wire.Reply) -> None:
            answers(reply)
            if follow:
                self.send(shard, op, large, follow=False)

        body = b"x" * (wire.SEPARATE_BODY_BYTES if large else 3)
        self.core.ask(shard, op, 0, b"t", b"", body, self.now_us, on_reply)

    @rule()
    def flush(self) -> None:
        for shard, request in sent(self.core):
            self.open.append((shard, self.core.links[shard].incarnation or 0, request.id))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer_some(self, data: st.DataObject) -> None:
        """Answers include those that a dead worker sent just before its end."""
        shard, incarnation, number = data.draw(st.sampled_from(self.open))
        answer(self.core, shard, number, incarnation=incarnation)

    @rule(shard=st.integers(0, 1))
    def restart(self, shard: int) -> None:
        if shard in self.living():
            self.core.worker_down(shard)
        else:
            self.incarnation += 1
            self.core.worker_up(shard, self.incarnation)

    @rule(seconds=st.integers(1, 70))
    def pass_time(self, seconds: int) -> None:
        self.now_us += seconds * 1_000_000
        self.core.expire(self.now_us)

    @rule()
    def end_polls(self) -> None:
        self.core.end_polls(self.now_us)

    @invariant()
    def nobody_is_answered_twice(self) -> None:
        assert all(len(answers) <= 1 for answers in self.asked)
        assert self.core.in_flight == sum(not answers for answers in self.asked)

    @invariant()
    def what_is_owed_is_what_waits(self) -> None:
        for link in self.core.links:
            assert link.cost == sum(entry.cost for entry in link.pending.values())

    def teardown(self) -> None:
        for shard in self.living():
            self.core.worker_down(shard)
        assert all(len(answers) == 1 for answers in self.asked)
        assert self.core.in_flight == 0


Traffic.TestCase.settings = settings(stateful_step_count=40)
TestTraffic = Traffic.TestCase
