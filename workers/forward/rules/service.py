"""The rule service of the catalog, on shard 0: queues operations on forwarding rules, and retries their requests. Pure: no
socket, and the clock is injected.

One operation (operations.py) runs at a time, so its checks hold until it ends. Internal operations go first (rules left
incomplete by a crash or dropped with a topic; checks of restarted workers), then requests of clients in FIFO order. At
most QUEUE_MAX requests wait, for TIMEOUT_US; then they fail. Reads of rules are not queued.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from topics.api.errors import InvalidRequest, Throttled, TopicsError
from topics.engine.commands.forwards import DropForward, ForwardDropped, ForwardPut, PutForward
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from topics.link.rules import RuleResult
from topics.protocols.encoding import Encoding
from workers.forward import messages
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

QUEUE_MAX = 256
TIMEOUT_US = 10_000_000

DONE: wire.Result = (wire.OK, wire.MSGPACK, b"", b"")  # reply to another worker

Send: TypeAlias = Callable[[bytes, int, int, int, bytes, wire.Buffer], None]


@dataclass(slots=True, eq=False)
class RuleClient:
    """The recipient of a reply: a client at a front, or another worker."""

    peer: bytes
    request: wire.Request
    until_us: int


@dataclass(slots=True, eq=False)
class Operation:
    """A queued or running operation; `steps` is set while it runs."""

    begin: Callable[[], Steps]
    client: RuleClient | None = None
    steps: Steps | None = None
    requests: list[WorkerRequest] = field(default_factory=list)
    answers: dict[int, wire.Reply | None] = field(default_factory=dict)  # by index of the request
    unsent: list[int] = field(default_factory=list)  # indexes of requests to send
    has_logged: bool = False  # it is resumed after a restart
    retries: list[int] = field(default_factory=list)  # indexes of requests to send again after a pause
    pause_ms: int = 0
    logging: int = 0  # commands to this shard's engine without a result
    failure: TopicsError | None = None  # of one of these commands


class RuleService:
    def __init__(
        self,
        engine: ShardEngine,
        *,
        shards: int,
        max_forwards: int,
        send: Send,
        ask: Ask,
        submit: Callable[[Operation, PutForward | DropForward], None],
        now_us: Callable[[], int],
        encodings: Mapping[int, Encoding],
    ) -> None:
        """`ask` sends a request to any shard, including this one, and never replies before it returns. `submit` queues a
        command for this shard's engine; its result goes to `on_result`.
        """
        self._engine = engine
        self._send = send
        self._ask = ask
        self._submit = submit
        self._now_us = now_us
        self._encodings = encodings
        self.book = RuleBook()
        self._operations = RuleOperations(
            engine, self.book, shards=shards, max_forwards=max_forwards, now_us=now_us
        )
        self._reads = RuleReads(self.book, shards=shards, ask=ask, now_us=now_us)
        self._queue: deque[Operation] = deque()  # from clients
        self._urgent: deque[Operation] = deque()  # from workers
        self._running: Operation | None = None
        self._retry_us: int | None = None  # when the running operation retries its requests
        self._unfinished: dict[int, int] = {}  # uids of incomplete rules, and when to resume them
        self._is_open = False

    # -- start and stop ------------------------------------------------------------------------------------

    def start(self) -> None:
        """The shard has recovered."""
        self._is_open = True
        for forward in self._engine.stats.forwards:
            self.book.put(forward)
        now_us = self._now_us()
        self._unfinished = dict.fromkeys(self.book.unsettled, now_us)
        for shard in (self._engine.stats.shard, *self._operations.living):
            self._operations.checks[shard] = now_us, PAUSE_MS_MIN

    def close(self) -> None:
        self._is_open = False

    def set_peers(self, living: dict[int, int]) -> None:
        """The other running workers, as shard → incarnation. New ones are checked."""
        known = self._operations.living
        for shard, incarnation in living.items():
            if known.get(shard) != incarnation:
                self._operations.checks[shard] = self._now_us(), PAUSE_MS_MIN
        self._operations.living = dict(living)

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Handle a request about rules; False: it is not one. A TopicsError is sent as the reply."""
        op, now_us = request.op, self._now_us()
        client = RuleClient(peer, request, now_us + TIMEOUT_US)
        args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
        if op == wire.FORWARDS_GONE:
            # Never refused, because it is not repeated. There are at most as many as rules.
            uids = [uid for uid, _ in messages.read_gone(request.body).forwards]
            self.book.gone |= dict.fromkeys(uid for uid in uids if self.book.get(uid) is not None)
            self._urgent.append(Operation(partial(self._operations.end_gone, uids), client))
        elif now_us - request.received_us > request.budget_ms * 1000:
            raise NotReady("the request waited too long and was not executed; try again")
        elif request.encoding not in self._encodings:  # found out now: the answer is rendered later
            raise InvalidRequest(f"there is no encoding {request.encoding} of requests about routers")
        elif op == wire.GET_FORWARD:
            self._reads.get(args, partial(self._answer, client))
        elif op == wire.LIST_FORWARDS:
            self._reads.list(args, partial(self._answer, client))
        elif op == wire.PUT_FORWARD:
            spec = self._encodings[request.encoding].read_rule(request, args)
            request.body = b""
            self._enqueue(Operation(partial(self._operations.put, spec), client))
        elif op == wire.DROP_FORWARD:
            name, prefixes = args.forward, wire.prefixes_of(args)
            self._enqueue(Operation(partial(self._operations.drop, name, prefixes), client))
        else:
            return False
        return True

    def _enqueue(self, operation: Operation) -> None:
        if len(self._queue) >= QUEUE_MAX:
            raise Throttled(
                "too many changes of routers are queued; try again", limit="router_changes", max=QUEUE_MAX
            )
        self._queue.append(operation)

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        first = self._queue[0].client if self._queue else None
        running = self._running.client if self._running is not None else None
        due = [client.until_us for client in (first, running) if client is not None]
        due += [at_us for at_us in (self._retry_us, self._reads.wake_at_us) if at_us is not None]
        if self._running is None and self._may_resume:
            due += [*self._unfinished.values(), *(at_us for at_us, _ in self._operations.checks.values())]
        return min(due) if due else None

    @property
    def _may_resume(self) -> bool:
        return self._engine.stats.read_only is None

    def tick(self) -> None:
        """Run what is due. A loop rather than recursion, so that a thousand steps that fail at once do not nest."""
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
            elif running.unsent:
                self._send_one(running)
            elif self._retry_us is not None and self._retry_us <= now_us:
                self._retry_us = None
                running.unsent, running.retries = running.retries, []
            else:
                return

    def _next(self, now_us: int) -> Operation | None:
        if self._urgent:
            return self._urgent.popleft()
        if self._may_resume:
            for uid, at_us in self._unfinished.items():
                if at_us <= now_us:
                    del self._unfinished[uid]
                    return Operation(partial(self._operations.resume, uid))
            for shard, (at_us, pause_ms) in self._operations.checks.items():
                if at_us <= now_us:
                    del self._operations.checks[shard]
                    return Operation(partial(self._operations.check, shard, pause_ms))
        return self._queue.popleft() if self._queue else None

    def _expire(self, now_us: int) -> None:
        """Fail operations that have timed out. All have the same timeout, so the queue is sorted by deadline."""
        while self._queue and (client := self._queue[0].client) is not None and client.until_us <= now_us:
            self._queue.popleft()
            self._answer(
                client, NotReady("routers cannot be changed while a worker is not ready; try again shortly")
            )
        running = self._running
        if running is not None and running.client is not None and running.client.until_us <= now_us:
            client, running.client = running.client, None
            text = "a worker is not ready; the change will be applied when it is"
            self._answer(client, NotReady(text, outcome="unknown"))

    # -- the running operation -----------------------------------------------------------------------------

    def _begin(self, operation: Operation) -> None:
        self._running = operation
        operation.steps = operation.begin()
        self._advance(operation, operation.steps.send, None)

    def _advance(self, operation: Operation, advance: Callable[[Any], Wait], value: object) -> None:
        try:
            wait = advance(value)
        except StopIteration as end:
            self._end(operation, end.value)
        except TopicsError as error:
            self._end(operation, error)
        except Exception as error:  # one bad rule must not take the shard down
            logger.exception("an operation on forwards failed")
            self._end(operation, TopicsError(f"the request could not be handled: {error!r}"))
        else:
            if isinstance(wait, list):
                operation.requests, operation.answers, operation.pause_ms = wait, {}, 0
                operation.unsent = list(range(len(wait)))
            else:
                commands = wait if isinstance(wait, tuple) else (wait,)
                operation.logging = len(commands)
                for command in commands:
                    self._submit(operation, command)

    def _end(self, operation: Operation, result: RuleResult | TopicsError | None) -> None:
        self._running = self._retry_us = None
        if operation.client is not None:
            self._answer(operation.client, result)
        elif isinstance(result, TopicsError):
            fields = {"error": str(result)}
            logger.error("an operation on forwards failed and will be retried", extra={"fields": fields})
        later_us = self._now_us() + PAUSE_MS_MAX * 1000
        for uid in (*self.book.unsettled, *self.book.gone):
            self._unfinished.setdefault(uid, later_us)

    def on_result(self, operation: Operation, result: object) -> None:
        """Result of this shard's engine."""
        assert operation is self._running and operation.steps is not None
        operation.logging -= 1
        if isinstance(result, TopicsError):
            if operation.has_logged:  # and undoing that may be what fails now
                result = NotReady(f"{result}; the change will be applied then", outcome="unknown")
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

    def _send_one(self, operation: Operation) -> None:
        index = operation.unsent.pop(0)
        request = operation.requests[index]
        if not self._ask(
            request.shard, request.op, b"", request.body, partial(self._on_reply, operation, index)
        ):
            self._on_reply(operation, index, None)

    def _on_reply(self, operation: Operation, index: int, reply: wire.Reply | None) -> None:
        """Reply of a worker; None: the request could not be sent, or its outcome is unknown."""
        unknown = reply is None or reply.error_code in wire.UNAVAILABLE
        if unknown and operation.requests[index].retry:
            operation.retries.append(index)
            if self._retry_us is None:
                operation.pause_ms = min(max(2 * operation.pause_ms, PAUSE_MS_MIN), PAUSE_MS_MAX)
                self._retry_us = self._now_us() + operation.pause_ms * 1000
            return
        operation.answers[index] = None if unknown else reply
        if len(operation.answers) == len(operation.requests):
            assert operation.steps is not None
            answers = [operation.answers[i] for i in range(len(operation.requests))]
            self._advance(operation, operation.steps.send, answers)

    # -- out -----------------------------------------------------------------------------------------------

    def _answer(self, client: RuleClient, result: RuleResult | TopicsError | None) -> None:
        request = client.request
        if isinstance(result, StepRefused):
            reply = result.reply
            answer = reply.code, reply.kind, reply.fields, reply.body
        elif isinstance(result, TopicsError):
            answer = wire.refused(result)
        elif result is None:
            answer = DONE
        else:
            total_ms = (self._now_us() - request.received_us) / 1000
            try:
                encoding = self._encodings[request.encoding]
                answer = encoding.marked(request, encoding.render(request, result, None, total_ms, 0.0))
            except Exception as error:  # one rule must not take the shard down at every read of it
                logger.exception("a reply could not be encoded")
                unknown = {"outcome": "unknown"} if request.op in wire.CHANGES else {}
                answer = wire.refused(TopicsError(f"the reply could not be encoded: {error!r}", **unknown))
        self._send(client.peer, request.id, *answer)
