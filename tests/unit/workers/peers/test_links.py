"""Goal: every request to another worker is answered once, by that worker or with an unknown outcome, within bounds.

Method: links without sockets; messages are decoded with the wire's own reader, answers and deaths are simulated.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tests.support.faults import fault
from topics.link import wire
from workers.peers import links as peers
from workers.peers.links import BUDGET_MS, GIVE_UP_US, PeerLinks
from workers.shard.flow_control import WINDOW_BYTES


class Links:
    """PeerLinks with a clock, and their results."""

    def __init__(self, **living: int) -> None:
        self.now_us = 1_000_000
        self.pushes: list[tuple[int, bytes]] = []
        self.answers: dict[str, list[wire.Reply | None]] = {}
        self.core = PeerLinks(
            lambda: self.now_us, lambda shard, reply: self.pushes.append((shard, bytes(reply.body)))
        )
        self.core.set_peers({int(shard.removeprefix("s")): number for shard, number in living.items()})

    def ask(self, shard: int, name: str, body: bytes = b"body") -> bool:
        found: list[wire.Reply | None] = []
        accepted = self.core.ask(shard, wire.DEAD_LETTERS, name.encode(), body, found.append)
        if accepted:
            self.answers[name] = found
        return accepted

    def sent(self) -> list[tuple[int, int, list[wire.Request]]]:
        """Shard, incarnation and requests of each message."""
        return [
            (
                shard,
                wire.read_message_head(bytes(parts[0])),
                list(wire.read_requests(bytes(parts[0]), *parts[1:])),
            )
            for shard, parts in self.core.take_messages()
        ]

    def answer(self, shard: int, incarnation: int, number: int, body: bytes = b"yes") -> None:
        head = wire.reply_head(number, wire.OK, wire.MSGPACK, b"", len(body))
        self.core.receive(shard, wire.message_head(incarnation) + head + body)


def test_an_answer_finds_whoever_asked() -> None:
    links = Links(s1=7, s2=8)
    for name in ("a", "b"):
        assert links.ask(1, name)
    assert links.ask(2, "c")
    first, second = links.sent()
    assert [(shard, incarnation) for shard, incarnation, _ in (first, second)] == [(1, 7), (2, 8)]
    a, b = first[2]
    assert (a.topic, a.op, a.body, a.budget_ms) == (b"a", wire.DEAD_LETTERS, b"body", BUDGET_MS)
    assert a.received_us == links.now_us
    links.answer(1, 7, b.id, b"for b")
    assert [len(found) for found in links.answers.values()] == [0, 1, 0]
    reply = links.answers["b"][0]
    assert reply is not None and reply.body == b"for b"
    links.answer(1, 7, b.id)
    assert len(links.answers["b"]) == 1, "a second answer is ignored"
    assert links.core.take_messages() == []


def test_a_large_body_goes_apart_and_the_order_stays() -> None:
    links = Links(s1=7)
    large = b"x" * wire.SEPARATE_BODY_BYTES
    for name, body in (("a", b"1"), ("b", large), ("c", b"3")):
        links.ask(1, name, body)
    links.core.tell(1, wire.CATALOG, b"report")
    items = [request for _, _, requests in links.sent() for request in requests]
    assert [(item.topic, bytes(item.body)) for item in items] == [
        (b"a", b"1"),
        (b"b", large),
        (b"c", b"3"),
        (b"", b"report"),
    ]


def test_notifications_have_no_answer_and_pushes_no_request() -> None:
    links = Links(s0=7)
    links.core.tell(0, wire.CATALOG, b"report")
    ((_, _, (told,)),) = links.sent()
    assert (told.id, told.op, told.body) == (0, wire.CATALOG, b"report")
    push = wire.reply_head(0, wire.OK, wire.GRANT, b"", 5) + b"grant"
    links.core.receive(0, wire.message_head(7) + push)
    links.core.receive(0, wire.message_head(6) + push)  # of the worker before
    assert links.pushes == [(0, b"grant")]


@fault("link", "a worker dies while another's letters are on their way to it", "they are sent again")
def test_when_a_worker_goes_nobody_knows_what_became_of_its_requests() -> None:
    links = Links(s1=7, s2=8)
    links.ask(1, "sent")
    links.sent()
    links.ask(1, "unsent")
    links.ask(2, "other")
    links.core.set_peers({1: 9, 2: 8})
    assert links.answers == {"sent": [None], "unsent": [None], "other": []}
    assert [message[0] for message in links.sent()] == [2], "no part of it goes to the next one"
    links.answer(1, 7, 1)  # late messages of the dead worker
    assert links.answers["sent"] == [None]
    assert links.ask(1, "again")
    ((_, incarnation, _),) = links.sent()
    assert incarnation == 9


def test_the_same_news_twice_change_nothing() -> None:
    links = Links(s1=7)
    links.ask(1, "a")
    links.core.set_peers({1: 7})
    assert links.answers["a"] == []
    assert len(links.sent()) == 1


def test_nobody_is_asked_who_is_not_there() -> None:
    links = Links(s1=7)
    assert not links.ask(2, "a")
    links.core.tell(2, wire.CATALOG, b"report")
    links.core.receive(2, wire.message_head(1))
    assert links.core.take_messages() == []


def test_requests_not_answered_in_time_are_given_up() -> None:
    links = Links(s1=7, s2=8)
    assert links.core.wake_at_us is None
    links.ask(1, "a")
    links.now_us += 1000
    links.ask(2, "b")
    assert links.core.wake_at_us == 1_000_000 + GIVE_UP_US
    links.now_us = 1_000_000 + GIVE_UP_US - 1
    links.core.expire()
    assert links.answers == {"a": [], "b": []}
    links.now_us += 1
    links.core.expire()
    assert links.answers == {"a": [None], "b": []}
    assert links.core.wake_at_us == 1_001_000 + GIVE_UP_US
    links.answer(1, 7, 1)
    assert links.answers["a"] == [None], "too late"


def test_requests_and_bytes_on_their_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REQUESTS_MAX", 3)
    monkeypatch.setattr(peers, "BYTES_MAX", 2000)
    links = Links(s1=7, s2=8)
    assert links.ask(1, "large", b"x" * 1500)
    assert not links.ask(1, "more", b"x" * 500)
    assert [links.ask(1, name, b"") for name in "ab"] == [False, False]
    assert [links.ask(2, name, b"") for name in "cdef"] == [True, True, True, False]
    links.answer(1, 7, 1)
    assert links.ask(1, "more", b"x" * 500), "there is room again"
    links.core.set_peers({1: 9, 2: 8})
    assert links.ask(1, "large again", b"x" * 1500)


def test_a_worker_hears_how_much_of_its_answers_is_taken() -> None:
    """Otherwise it would assume after a while that its answers are not read."""
    links = Links(s1=7)
    untaken = 0
    numbers = itertools.count(1)
    for i in range(40):
        links.ask(1, f"t{i}")
        body = b"x" * (1 << 20)
        head = wire.message_head(7) + wire.reply_head(
            next(numbers), wire.OK, wire.MSGPACK, b"", wire.SEPARATE
        )
        links.core.receive(1, head, body)
        untaken += len(head) + len(body)
        for _, _, requests in links.sent():
            untaken -= sum(
                wire.read_window_update(item.body) for item in requests if item.op == wire.WINDOW_UPDATE
            )
        assert untaken < WINDOW_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_request_is_answered_once(seed: int) -> None:
    rng = random.Random(seed)
    links = Links(s1=1, s2=2)
    living = {1: 1, 2: 2}
    incarnations = itertools.count(3)
    names = itertools.count()
    on_wires: list[tuple[int, int, int]] = []
    for _ in range(300):
        kind = rng.randrange(5)
        shard = rng.choice((1, 2))
        if kind < 2:
            links.ask(shard, f"n{next(names)}", bytes(rng.choice((0, 10, 70_000))))
        elif kind == 2:
            on_wires += [(to, number, item.id) for to, number, items in links.sent() for item in items]
        elif kind == 3 and on_wires:
            links.answer(*on_wires.pop(rng.randrange(len(on_wires))))
        elif rng.random() < 0.2:
            living[shard] = next(incarnations)
            links.core.set_peers(dict(living))
        links.now_us += rng.choice((0, 1000, 1_000_000))
        links.core.expire()
        assert all(len(found) <= 1 for found in links.answers.values())
    links.core.set_peers({})
    assert links.answers and all(len(found) == 1 for found in links.answers.values())
