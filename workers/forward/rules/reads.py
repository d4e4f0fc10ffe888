"""Reads of forwarding rules: the rule comes from the catalog, its number of copies from the shard of the dest."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from topics.api.errors import (
    Forbidden,
    ForwardNotFound,
    InvalidRequest,
    Throttled,
    TopicNotFound,
    TopicsError,
)
from topics.engine.commands.forwards import Forward
from topics.engine.core.placement import shard_of
from topics.link import wire
from topics.link.rules import RuleFound, RuleList, RuleResult
from workers.forward import messages
from workers.forward.rules.book import RuleBook
from workers.forward.rules.operations import NotReady

logger = logging.getLogger("topics.shard")

READS_MAX = 128  # in flight; copies and steps need room between the workers, too
TIMEOUT_US = 2_000_000  # for a worker that is starting
RETRY_US = 50_000

Ask: TypeAlias = Callable[[int, int, bytes, bytes, Callable[[wire.Reply | None], None]], bool]
Answer: TypeAlias = Callable[[RuleResult | TopicsError], None]


@dataclass(slots=True, eq=False)
class RuleQuery:
    """A read of rules that waits for totals."""

    answer: Answer
    forwards: list[Forward]
    until_us: int
    page_size: int = 0  # 0: a read of one rule
    left: int = 0
    totals: dict[int, int] = field(default_factory=dict)
    timed_out: bool = False
    failed: bool = False


class RuleReads:
    def __init__(self, book: RuleBook, *, shards: int, ask: Ask, now_us: Callable[[], int]) -> None:
        self._book = book
        self._shards = shards
        self._ask = ask
        self._now_us = now_us
        self._open = 0
        self._retries: deque[tuple[int, Callable[[], None]]] = deque()  # time, request

    def get(self, args: wire.Args, answer: Answer) -> None:
        """Read one rule. This is a read of the dest, which catches up first."""
        rule = self._book.find(args.forward)
        if rule is None or not self._book.is_shown(rule):
            raise ForwardNotFound(args.forward)
        if not rule.is_covered_by(wire.prefixes_of(args)):
            raise Forbidden("this key may not use that router")
        self._begin(RuleQuery(answer, [rule], self._now_us() + TIMEOUT_US))

    def list(self, args: wire.Args, answer: Answer) -> None:
        prefixes = wire.prefixes_of(args)
        rows = self._book.page(
            lambda rule: rule.is_covered_by(prefixes),
            prefix=args.prefix,
            after=args.after,
            source=args.source,
            dest=args.dest,
            count=args.page_size + 1,
        )
        self._begin(RuleQuery(answer, rows, self._now_us() + TIMEOUT_US, args.page_size))

    def _begin(self, reading: RuleQuery) -> None:
        """Send one request per shard."""
        if self._open >= READS_MAX:
            raise Throttled(
                "too many reads of routers at once; try again", limit="router_reads", max=READS_MAX
            )
        wanted: dict[int, list[tuple[str, int]]] = {}
        for rule in reading.forwards[: reading.page_size or 1]:
            wanted.setdefault(shard_of(rule.dest, self._shards), []).append((rule.dest, rule.uid))
        topic = b"" if reading.page_size else reading.forwards[0].dest.encode()
        self._open += 1
        reading.left = len(wanted)
        if not wanted:
            self._finish(reading)
        for shard, inflows in wanted.items():
            self._request(reading, shard, topic, messages.encode(messages.WantTotals(inflows)))

    def _request(self, reading: RuleQuery, shard: int, topic: bytes, body: bytes) -> None:
        retry = partial(self._request, reading, shard, topic, body)
        on_reply = partial(self._on_reply, reading, retry)
        if not self._ask(shard, wire.FORWARD_TOTALS, topic, body, on_reply):
            on_reply(None)

    def _on_reply(self, reading: RuleQuery, retry: Callable[[], None], reply: wire.Reply | None) -> None:
        if reply is None or (reply.code != wire.OK and reply.error_code != TopicNotFound.code):
            if self._now_us() < reading.until_us:
                self._retries.append((self._now_us() + RETRY_US, retry))
                return
            reading.failed = True
        elif reply.code == wire.OK:  # else the dest is gone
            self._add(reading, reply)
        reading.left -= 1
        if not reading.left:
            self._finish(reading)

    @property
    def wake_at_us(self) -> int | None:
        return self._retries[0][0] if self._retries else None

    def tick(self) -> None:
        while self._retries and self._retries[0][0] <= self._now_us():
            self._retries.popleft()[1]()

    @staticmethod
    def _add(reading: RuleQuery, reply: wire.Reply) -> None:
        try:
            found = messages.read_totals(reply.body)
        except InvalidRequest as error:
            logger.error("totals could not be decoded", extra={"fields": {"error": str(error)}})
            reading.failed = True
            return
        reading.totals |= found.totals
        reading.timed_out |= found.catch_up_timed_out

    def _finish(self, reading: RuleQuery) -> None:
        self._open -= 1
        rows, totals = reading.forwards, reading.totals
        if reading.failed:
            reading.answer(NotReady("a dest's shard is not ready; try again shortly"))
        elif reading.page_size:
            reading.answer(RuleList(rows, totals, reading.page_size))
        elif rows[0].uid not in totals:  # its dest was just dropped
            reading.answer(ForwardNotFound(rows[0].name))
        else:
            reading.answer(RuleFound(rows[0], totals[rows[0].uid], reading.timed_out))
