"""The catalog's desk for forwards, on shard 0: who wants what, in which order, and when something is tried again. Pure: no
socket, and the clock is given.

One operation (operations.py) at a time: what it found when it checked holds until it ends. What must be done goes first
(rules that a crash left half way, or that went with a topic; workers that came up), then clients in the order of asking.
LINE_MAX of them wait; who has waited for PATIENCE_US is told to come back. Looks at rules do not wait in this line.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from topics.api.errors import Throttled, TopicsError
from topics.api.http_errors import error_head, error_parts
from topics.engine.commands.forwards import DropForward, ForwardDropped, ForwardPut, PutForward
from topics.engine.runtime.engine import Engine
from topics.link import wire
from workers.codec.replies import Rendered, with_ignored
from workers.forward import messages
from workers.forward.requests import prefixes_of, read_wish
from workers.forward.rules.book import RuleBook
from workers.forward.rules.operations import (
    PAUSE_MS_MAX,
    PAUSE_MS_MIN,
    NotReady,
    RuleOperations,
    StepRefused,
    Steps,
    Wait,
    WorkerRequest,
)
from workers.forward.rules.reads import Ask, RuleReads

logger = logging.getLogger("topics.shard")

LINE_MAX = 256
PATIENCE_US = 10_000_000

DONE: Rendered = (200, wire.INTERNAL, b"", b"")  # to another worker

Send: TypeAlias = Callable[[bytes, int, int, int, bytes, wire.Buffer], None]


@dataclass(slots=True, eq=False)
class RuleClient:
    """Who is to be answered, at a front or another worker."""

    peer: bytes
    number: int
    received_us: int
    until_us: int
    ignored: list[str] = field(default_factory=list)  # of the request's fields


@dataclass(slots=True, eq=False)
class Operation:
    """One that waits, or runs: then `steps` is where it is."""

    begin: Callable[[], Steps]
    client: RuleClient | None = None
    steps: Steps | None = None
    asked: list[WorkerRequest] = field(default_factory=list)
    answers: dict[int, wire.Reply | None] = field(default_factory=dict)  # by places in `asked`
    unasked: list[int] = field(default_factory=list)  # places: to be asked at the next chance
    has_logged: bool = False  # after a restart it is gone on with
    again: list[int] = field(default_factory=list)  # places: to be asked after a pause
    pause_ms: int = 0
    logging: int = 0  # commands to the own engine that are not answered
    failure: TopicsError | None = None  # of one of them


class RuleService:
    def __init__(
        self,
        engine: Engine,
        *,
        shards: int,
        max_forwards: int,
        send: Send,
        ask: Ask,
        submit: Callable[[Operation, PutForward | DropForward], None],
        now_us: Callable[[], int],
    ) -> None:
        """`ask` is of any shard, this one too, and never answers at once. `submit` is a command to the own engine, whose
        answer comes to `on_result`.
        """
        self._engine = engine
        self._send = send
        self._ask = ask
        self._submit = submit
        self._now_us = now_us
        self.book = RuleBook()
        self._operations = RuleOperations(
            engine, self.book, shards=shards, max_forwards=max_forwards, now_us=now_us
        )
        self._reads = RuleReads(self.book, shards=shards, ask=ask, now_us=now_us)
        self._line: deque[Operation] = deque()  # of clients
        self._first: deque[Operation] = deque()  # of workers
        self._running: Operation | None = None
        self._again_us: int | None = None  # when the one that runs asks again
        self._unfinished: dict[int, int] = {}  # uids of rules to go on with, and when
        self._is_open = False

    # -- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The shard has recovered."""
        self._is_open = True
        for forward in self._engine.shard.forwards.values():
            self.book.put(forward)
        now_us = self._now_us()
        self._unfinished = dict.fromkeys(self.book.unsettled, now_us)
        for shard in (self._engine.config.shard, *self._operations.living):
            self._operations.checks[shard] = now_us, PAUSE_MS_MIN

    def close(self) -> None:
        self._is_open = False

    def set_peers(self, living: dict[int, int]) -> None:
        """Which other workers live, as shard → incarnation. Whoever is new among them is checked."""
        known = self._operations.living
        for shard, incarnation in living.items():
            if known.get(shard) != incarnation:
                self._operations.checks[shard] = self._now_us(), PAUSE_MS_MIN
        self._operations.living = dict(living)

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Whether it was for this desk; a TopicsError is what the asker is to be told."""
        op, now_us = request.op, self._now_us()
        client = RuleClient(peer, request.id, request.received_us, now_us + PATIENCE_US)
        args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
        total_ms = partial(self._total_ms, client)
        if op == wire.FORWARDS_GONE:
            # Never refused: nobody would say it again. There are no more of these than rules.
            uids = [uid for uid, _ in messages.read_gone(request.body).forwards]
            self.book.gone |= dict.fromkeys(uid for uid in uids if self.book.get(uid) is not None)
            self._first.append(Operation(partial(self._operations.end_gone, uids), client))
        elif now_us - request.received_us > request.budget_ms * 1000:
            raise NotReady("the request waited too long and was not executed; try again")
        elif op == wire.GET_FORWARD:
            self._reads.get(args, partial(self._answer, client), total_ms)
        elif op == wire.LIST_FORWARDS:
            self._reads.list(args, partial(self._answer, client), total_ms)
        elif op == wire.PUT_FORWARD:
            wish = read_wish(request, args)
            if request.flags & wire.IGNORED:
                client.ignored = request.ignored
            self._wait_in_line(Operation(partial(self._operations.put, wish, total_ms), client))
        elif op == wire.DROP_FORWARD:
            name, prefixes = args.forward, prefixes_of(args)
            self._wait_in_line(Operation(partial(self._operations.drop, name, prefixes, total_ms), client))
        else:
            return False
        return True

    def _wait_in_line(self, operation: Operation) -> None:
        if len(self._line) >= LINE_MAX:
            raise Throttled(
                "too many changes of routers wait; try again", limit="router_changes", max=LINE_MAX
            )
        self._line.append(operation)

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        first = self._line[0].client if self._line else None
        running = self._running.client if self._running is not None else None
        due = [client.until_us for client in (first, running) if client is not None]
        due += [at_us for at_us in (self._again_us, self._reads.wake_at_us) if at_us is not None]
        if self._running is None and self._may_go_on:
            due += [*self._unfinished.values(), *(at_us for at_us, _ in self._operations.checks.values())]
        return min(due) if due else None

    @property
    def _may_go_on(self) -> bool:
        return self._engine.shard.read_only is None

    def tick(self) -> None:
        """Whatever is due by now. Nothing of it calls itself: a thousand steps that fail at once are a loop, not a depth."""
        now_us = self._now_us()
        self._expire(now_us)
        self._reads.tick()
        while self._is_open:
            running = self._running
            if running is None:
                following = self._next(now_us)
                if following is None:
                    return
                self._begin(following)
            elif running.unasked:
                self._ask_one(running)
            elif self._again_us is not None and self._again_us <= now_us:
                self._again_us = None
                running.unasked, running.again = running.again, []
            else:
                return

    def _next(self, now_us: int) -> Operation | None:
        if self._first:
            return self._first.popleft()
        if self._may_go_on:
            for uid, at_us in self._unfinished.items():
                if at_us <= now_us:
                    del self._unfinished[uid]
                    return Operation(partial(self._operations.go_on_with, uid))
            for shard, (at_us, pause_ms) in self._operations.checks.items():
                if at_us <= now_us:
                    del self._operations.checks[shard]
                    return Operation(partial(self._operations.check, shard, pause_ms))
        return self._line.popleft() if self._line else None

    def _expire(self, now_us: int) -> None:
        """Those in line have the same patience, so who came first gives up first."""
        while self._line and (client := self._line[0].client) is not None and client.until_us <= now_us:
            self._line.popleft()
            self._answer(
                client, NotReady("routers cannot be changed while a worker is not ready; try again shortly")
            )
        running = self._running
        if running is not None and running.client is not None and running.client.until_us <= now_us:
            client, running.client = running.client, None
            text = "a worker is not ready; the change goes on when it is back"
            self._answer(client, NotReady(text, outcome="unknown"))

    # -- the one that runs ---------------------------------------------------------------------------------

    def _begin(self, operation: Operation) -> None:
        self._running = operation
        operation.steps = operation.begin()
        self._advance(operation, operation.steps.send, None)

    def _advance(self, operation: Operation, go_on: Callable[[Any], Wait], value: object) -> None:
        try:
            wait = go_on(value)
        except StopIteration as end:
            self._end(operation, end.value)
        except TopicsError as error:
            self._end(operation, error)
        except Exception as error:  # one odd rule must not take the shard down
            logger.exception("an operation on forwards failed")
            self._end(operation, TopicsError(f"the request could not be handled: {error!r}"))
        else:
            if isinstance(wait, list):
                operation.asked, operation.answers, operation.pause_ms = wait, {}, 0
                operation.unasked = list(range(len(wait)))
            else:
                commands = wait if isinstance(wait, tuple) else (wait,)
                operation.logging = len(commands)
                for command in commands:
                    self._submit(operation, command)

    def _end(self, operation: Operation, result: Rendered | TopicsError | None) -> None:
        self._running = self._again_us = None
        if operation.client is not None:
            self._answer(operation.client, result if result is not None else DONE)
        elif isinstance(result, TopicsError):
            fields = {"error": str(result)}
            logger.error("an operation on forwards is put off", extra={"fields": fields})
        later_us = self._now_us() + PAUSE_MS_MAX * 1000
        for uid in (*self.book.unsettled, *self.book.gone):
            self._unfinished.setdefault(uid, later_us)

    def on_result(self, operation: Operation, result: object) -> None:
        """Of the own engine."""
        assert operation is self._running and operation.steps is not None
        operation.logging -= 1
        if isinstance(result, TopicsError):
            if operation.has_logged:  # and to take that back may be what fails now
                result = NotReady(f"{result}; the change goes on then", outcome="unknown")
            operation.failure = result
        elif isinstance(result, ForwardPut):
            operation.has_logged = True
            self.book.put(result.forward)
        else:
            assert isinstance(result, ForwardDropped)
            operation.has_logged = True
            self.book.drop(result.uid)
        if operation.logging:
            return
        failure, operation.failure = operation.failure, None
        if failure is not None:
            self._advance(operation, operation.steps.throw, failure)
        else:
            self._advance(operation, operation.steps.send, None)

    def _ask_one(self, operation: Operation) -> None:
        place = operation.unasked.pop(0)
        asked = operation.asked[place]
        if not self._ask(asked.shard, asked.op, b"", asked.body, partial(self._heard, operation, place)):
            self._heard(operation, place, None)

    def _heard(self, operation: Operation, place: int, reply: wire.Reply | None) -> None:
        """Of a worker; None: it could not be asked, or nobody knows what became of it."""
        unknown = reply is None or reply.status == 503
        if unknown and operation.asked[place].urgent:
            operation.again.append(place)
            if self._again_us is None:
                operation.pause_ms = min(max(2 * operation.pause_ms, PAUSE_MS_MIN), PAUSE_MS_MAX)
                self._again_us = self._now_us() + operation.pause_ms * 1000
            return
        operation.answers[place] = None if unknown else reply
        if len(operation.answers) == len(operation.asked):
            assert operation.steps is not None
            answers = [operation.answers[i] for i in range(len(operation.asked))]
            self._advance(operation, operation.steps.send, answers)

    # -- out -----------------------------------------------------------------------------------------------

    def _total_ms(self, client: RuleClient) -> float:
        return (self._now_us() - client.received_us) / 1000

    def _answer(self, client: RuleClient, result: Rendered | TopicsError) -> None:
        if isinstance(result, StepRefused):
            reply = result.reply
            result = reply.status, wire.JSON, reply.head, reply.body
        elif isinstance(result, TopicsError):
            status, body = error_parts(result)
            result = status, wire.JSON, error_head(status), body
        elif client.ignored:
            status, kind, head, shown = result
            result = status, kind, *with_ignored(kind, head, shown, client.ignored)
        self._send(client.peer, client.number, *result)
