"""Goal: the checker accepts what a real shard answers, and detects every change that makes it illegal.

Method: clients send requests to a real shard on a simulated disk, a few at a time, while it is killed and its power
is cut; the answers are a legal history. Then one answer is changed in a way that must be harmful, and the checker
must report a problem. Each kind of change is tried many times, at random places.
"""

from __future__ import annotations

import functools
import json
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.support import length
from tests.support.checker import assert_ok, check
from tests.support.engine_harness import SMALL
from tests.support.history import History, Op
from tests.support.shard_rig import Rig
from topics.api.limits import MIB
from topics.link import wire

SEEDS = (1, 2, 3)
TRIES = length.pick(short=2, long=30)
TOPICS: dict[str, dict[str, Any]] = {
    "fsync": {"durability": "fsync"},
    "disk": {},
    "capped": {"durability": "fsync", "cap_records": 6},
    "memory": {"durability": "memory"},
    "ephemeral": {"durability": "ephemeral"},
}
TAGS = ["a.1", "a.2", "b", None]
OPS = {
    "write": wire.WRITE, "diff": wire.DIFF, "delete": wire.DELETE, "put": wire.PUT_TOPIC, "state": wire.GET_TOPIC,
    "drop": wire.DROP_TOPIC, "last": wire.LAST_BY_TAG, "tags": wire.COUNT_BY_TAG,
}  # fmt: skip
IN_ARGS = ("last", "tags")


class Recorder:
    """A shard, its clients, and their history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.history = History()
        self.rig = Rig(msgspec.structs.replace(SMALL, wal_file_bytes=MIB))
        self._serial = 0

    def run(self, steps: int) -> History:
        for _ in range(steps):
            self.together(self._any() for _ in range(self.rng.choice((1, 1, 2, 4))))
            self.rig.clock.advance(self.rng.choice((0, 1, 150)))
            if self.rng.random() < 0.03:
                self.restart(self.rng.choice(("kill", "power")))
        for topic in TOPICS:
            for kind, request in (
                ("state", {}),
                ("tags", {}),
                ("diff", {"include_tags": True}),
                ("diff", {}),
            ):
                self.together([(kind, topic, request)])
        return self.history

    def together(self, requests: Any) -> None:
        """All are in flight at once."""
        waiting: dict[tuple[bytes, int], Op] = {}
        for i, (kind, topic, request) in enumerate(requests):
            op = self.history.sent(f"c{i}", kind, topic, request)
            args = wire.encode_args(wire.Args(**request)) if kind in IN_ARGS else b""
            waiting[self.rig.receive(OPS[kind], topic, b"" if args else request, args=args)] = op
        self.rig.rest()
        for key in self.rig.order:
            if key in waiting:
                reply = self.rig.replies[key]
                self.history.answered(waiting[key], reply.status, json.loads(bytes(reply.body)))
        self.rig.order.clear()

    def restart(self, kind: str) -> None:
        """One more write is in flight; its client never learns the outcome."""
        _, topic, request = self._write(self.rng.choice(list(TOPICS)))
        op = self.history.sent("c9", "write", topic, request)
        self.rig.receive(wire.WRITE, topic, request)
        if self.rng.random() < 0.5:
            self.rig.turn()
        rig = self.rig
        (rig.disk.crash if kind == "power" else rig.disk.kill)()
        self.history.happened(kind)
        self.rig = Rig(rig.config, clock=rig.clock, disk=rig.disk, incarnation=rig.incarnation + 1)
        self.history.settled(op)

    def _any(self) -> tuple[str, str, dict[str, Any]]:
        rng = self.rng
        topic = rng.choice(list(TOPICS))
        kind = rng.choices(
            ("write", "diff", "delete", "state", "last", "tags", "put"), (9, 6, 1, 1, 1, 1, 0.2)
        )[0]
        if kind == "write":
            return self._write(topic)
        if kind == "delete" and topic == "capped":
            kind = "state"
        request: dict[str, Any] = {
            "diff": {"from_seq": rng.choice((0, 0, 5, 20)), "include_tags": rng.random() < 0.7},
            "delete": rng.choice(
                ({"before_seq": 4}, {"match": "a.*", "keep": 2}, {"seqs": [rng.randrange(1, 40)]})
            ),
            "last": {"tag": rng.choice(("a.*", "b")), "each": rng.random() < 0.5},
            "put": TOPICS[topic],
        }.get(kind, {})
        return kind, topic, request

    def _write(self, topic: str) -> tuple[str, str, dict[str, Any]]:
        self._serial += 1
        count = self.rng.choice((1, 1, 2, 4))
        records: list[dict[str, Any]] = [{"data": {"w": self._serial, "i": i}} for i in range(count)]
        for record in records:
            tag = self.rng.choice(TAGS)
            if tag is not None:
                record["tag"] = tag
        request = {"records": records, "config": TOPICS[topic]}
        if self.rng.random() < 0.3:
            request["idempotency_key"] = f"k{self._serial}"
        return "write", topic, request


@functools.cache
def stored(seed: int) -> bytes:
    return pickle.dumps(Recorder(seed).run(130))


def recorded(seed: int) -> History:
    """A copy that the caller may change."""
    return pickle.loads(stored(seed))  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_of_a_real_shard_are_legal(seed: int) -> None:
    history = recorded(seed)
    assert {event.kind for event in history.events} <= {"kill", "power"} and history.events
    assert sum(op.status is None for op in history.ops) == len(history.events)
    assert any(op.kind == "diff" and op.ok and op.answer["tombstone"] for op in history.ops)
    assert_ok(history)


# -- harmful changes -----------------------------------------------------------------------------------------

Mutation = Callable[[History, random.Random], bool]
mutations: list[Mutation] = []


def mutation(function: Mutation) -> Mutation:
    mutations.append(function)
    return function


def answers(history: History, kind: str, topic: str = "fsync") -> list[Op]:
    return [op for op in history.ops if op.kind == kind and op.topic == topic and op.ok]


def pages(history: History, least: int = 1, topic: str = "fsync") -> list[Op]:
    return [op for op in answers(history, "diff", topic) if len(op.answer["records"]) >= least]


def was_ever_deleted(history: History, record: dict[str, Any]) -> bool:
    """Deletes of the recorded histories: seqs up to 3, or a tag that begins with `a.`."""
    seqs = {seq for op in answers(history, "delete") for seq in op.request.get("seqs", ())}
    return record["$seq"] < 4 or record["$seq"] in seqs or "a." in json.dumps(record) or "$tag" not in record


@mutation
def a_record_is_left_out(history: History, rng: random.Random) -> bool:
    page = rng.choice(pages(history))
    safe = [
        record
        for record in page.answer["records"]
        if record.get("$tag") == "b" and not was_ever_deleted(history, record)
    ]
    if safe:
        page.answer["records"].remove(rng.choice(safe))
    return bool(safe)


@mutation
def a_record_is_shown_twice(history: History, rng: random.Random) -> bool:
    records = rng.choice(pages(history)).answer["records"]
    records.insert(rng.randrange(len(records)), rng.choice(records))
    return True


@mutation
def two_records_change_places(history: History, rng: random.Random) -> bool:
    one, two = rng.sample(rng.choice(pages(history, 2)).answer["records"], 2)
    one["data"], two["data"] = two["data"], one["data"]
    return True


@mutation
def data_is_changed(history: History, rng: random.Random) -> bool:
    rng.choice(rng.choice(pages(history)).answer["records"])["data"] = {"w": 0}
    return True


@mutation
def data_of_another_topic_is_shown(history: History, rng: random.Random) -> bool:
    other = rng.choice(rng.choice(pages(history, topic="disk")).answer["records"])
    rng.choice(rng.choice(pages(history)).answer["records"])["data"] = other["data"]
    return True


@mutation
def a_tag_is_changed(history: History, rng: random.Random) -> bool:
    tagged = [record for page in pages(history) for record in page.answer["records"] if "$tag" in record]
    rng.choice(tagged)["$tag"] = "other"
    return True


@mutation
def a_time_is_changed(history: History, rng: random.Random) -> bool:
    """Of a record that was returned more than once."""
    shown: dict[int, list[dict[str, Any]]] = {}
    for page in pages(history):
        for record in page.answer["records"]:
            shown.setdefault(record["$seq"], []).append(record)
    rng.choice(rng.choice([rows for rows in shown.values() if len(rows) > 1]))["$ts"] += 7
    return True


@mutation
def a_seq_is_moved(history: History, rng: random.Random) -> bool:
    page = rng.choice(pages(history))
    rng.choice(page.answer["records"])["$seq"] += rng.choice((-1, 1))
    return True


@mutation
def a_page_says_that_it_is_not_the_last(history: History, rng: random.Random) -> bool:
    page = rng.choice(pages(history))
    page.answer["caught_up"] = not page.answer["caught_up"]
    return True


@mutation
def a_head_is_lowered(history: History, rng: random.Random) -> bool:
    state = rng.choice(answers(history, "state"))
    if not state.answer["head_seq"]:
        return False
    told = [op for op in answers(history, "write") if (op.answered_at or 0) < state.sent_at]
    state.answer["head_seq"] = max((op.answer["last_seq"] for op in told), default=0) - 1
    return bool(told)


@mutation
def a_head_is_raised(history: History, rng: random.Random) -> bool:
    rng.choice(answers(history, "state")).answer["head_seq"] += 1000
    return True


@mutation
def a_count_is_raised(history: History, rng: random.Random) -> bool:
    """Above everything ever written."""
    rng.choice(answers(history, "state")).answer["count"] += 1000
    return True


@mutation
def an_ack_names_other_seqs(history: History, rng: random.Random) -> bool:
    ack = rng.choice([op for op in answers(history, "write") if not op.answer["deduped"]]).answer
    by = rng.choice((-1, 1))
    ack.update(first_seq=ack["first_seq"] + by, last_seq=ack["last_seq"] + by, head_seq=ack["head_seq"] + by)
    ack["seqs"] = [seq + by for seq in ack["seqs"]]
    return True


@mutation
def a_visible_write_was_refused(history: History, rng: random.Random) -> bool:
    seen = {record["$seq"] for page in pages(history) for record in page.answer["records"]}
    op = rng.choice([op for op in answers(history, "write") if op.answer["first_seq"] in seen])
    op.status, op.answer = 429, {"error": {"code": "throttled", "message": "", "detail": {"limit": "queue"}}}
    return not op.request.get("idempotency_key")


@mutation
def a_gap_is_not_announced(history: History, rng: random.Random) -> bool:
    """No client deletes from this topic, so nothing else can explain the gap."""
    gaps = [op for op in answers(history, "diff", "capped") if op.answer["tombstone"]]
    rng.choice(gaps).answer["tombstone"] = None
    return True


@mutation
def a_gap_has_another_reason(history: History, rng: random.Random) -> bool:
    gaps = [
        op
        for op in answers(history, "diff", "capped")
        if (op.answer["tombstone"] or {}).get("reason") == "cap"
    ]
    rng.choice(gaps).answer["tombstone"]["reason"] = rng.choice(("ttl", "mixed", "corrupt", "crash"))
    return True


@mutation
def a_topic_is_said_to_be_missing(history: History, rng: random.Random) -> bool:
    before = answers(history, "write")[0].answered_at or 0
    op = rng.choice([op for op in answers(history, "state") if op.sent_at > before] or [history.ops[0]])
    op.status, op.answer = 404, {"error": {"code": "topic_not_found", "message": "", "detail": {}}}
    return op.kind == "state"


@mutation
def an_old_page_is_told_again(history: History, rng: random.Random) -> bool:
    """As the answer to a later request, after more was acknowledged."""
    whole = [op for op in answers(history, "diff") if not op.request.get("from_seq")]
    old, new = sorted(rng.sample(whole, 2), key=lambda op: op.sent_at)
    between = [
        op
        for op in answers(history, "write")
        if old.answered_at < op.sent_at and op.answered_at < new.sent_at
    ]  # type: ignore[operator]
    new.answer = old.answer
    new.request = old.request
    return bool(between)


@mutation
def a_config_is_another(history: History, rng: random.Random) -> bool:
    rng.choice(answers(history, "state")).answer["config"]["cap_records"] = 77
    return True


def harmful(mutation: Mutation) -> Iterator[History]:
    """Copies of recorded histories with this change, at random places."""
    for attempt in range(TRIES):
        history = recorded(SEEDS[attempt % len(SEEDS)])
        if mutation(history, random.Random(attempt)):
            yield history


@pytest.mark.parametrize("mutation", mutations, ids=lambda mutation: mutation.__name__)
def test_every_harmful_mutation_is_caught(mutation: Mutation) -> None:
    tried = 0
    for history in harmful(mutation):
        tried += 1
        assert check(history), f"the checker missed change {tried}"
    assert tried >= max(1, TRIES // 4), "the change could hardly ever be made"
