"""One shard behind the wire: messages in, messages out. No socket, no thread, no clock of its own.

    core.receive(peer, message)      requests are decoded and wait for the turn
    actions = core.turn()            one turn of the engine for all of them
    actions = core.finish(job, …)    a job has ended; its replies

What a request means in HTTP terms begins and ends here: the front passes bodies through.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from topics.api.errors import InvalidRequest, OverGrant, TopicsError
from topics.api.http_errors import error_head, error_parts
from topics.engine.commands import consumers as con
from topics.engine.commands import forwards as fwd
from topics.engine.commands import topics as cmd
from topics.engine.core.ports import Disk
from topics.engine.runtime.engine import Engine, Job, Outcome
from topics.link import wire
from workers.codec import replies
from workers.codec.large_bodies import LARGE_BYTES, LargeBodies, Steps, read_large, read_large_record
from workers.codec.large_bodies import OPS as LARGE_OPS
from workers.forward.catch_up import LATE, READS, mark_late
from workers.forward.forwarder import CopyBatch
from workers.forward.outbox import Outbox, OutboxBatch
from workers.forward.rules.service import Operation, RuleService
from workers.forward.service import Forwarding, TotalsQuery
from workers.peers.links import BUDGET_MS, Message, OnAnswer, PeerLinks
from workers.shard.answer_window import AnswerWindow
from workers.shard.caps import Caps
from workers.shard.held_reads import HeldReads, share_pages
from workers.shard.metrics import ShardMetrics
from workers.shard.operations import OperationCodec, Read, is_headers_only
from workers.shard.outgoing import Outgoing, Sends
from workers.shard.pressure import ShardPressure
from workers.watch.feeds import Feed
from workers.watch.jobs import JobStreams
from workers.watch.service import JOB_KIND, WatchService

logger = logging.getLogger("topics.shard")

Token = tuple[bytes, wire.Request, Any, "Turn", cmd.Command]  # peer, what it asked, how it wants it
MS = 1000.0  # microseconds

CLAIMS_WAIT_US = 32_000_000  # longer than any claim waits, for jobs and then for dead letters
PROBE_EVERY_US = 1_000_000  # whether a front that takes nothing is still there
MANY_COPIES = 64  # for each dest: so many are not left waiting for the answers before them


@dataclass(slots=True)
class Turn:
    """What the requests of one turn share."""

    append_ms: float = 0.0


@dataclass(slots=True)
class Actions:
    """What the shell does next, top to bottom."""

    jobs: list[Job] = field(default_factory=list)
    sends: Sends = field(default_factory=list)
    wake_at_ms: int | None = None
    asks: list[Message] = field(default_factory=list)  # to other workers


class NotReady(TopicsError):
    code = "not_ready"


DROPS = (cmd.TopicDropped, con.ConsumerDropped)
DESK_BUDGET_MS = 1 << 31  # what the desk asks is never too late
OWN = b"\0own"  # the peer that this shard is to itself
# What comes from other workers for the engine.
FROM_WORKERS = frozenset((wire.DEAD_LETTERS, wire.COPIES, wire.FORWARD_STEP))


class ShardCore:
    def __init__(
        self,
        engine: Engine,
        caps: Caps,
        metrics: ShardMetrics,
        *,
        incarnation: int,
        now_us: Callable[[], int],
        disk: Disk,
        shards: int,
        max_sessions: int = 0,
        max_sessions_per_key: int = 0,
        max_forwards: int = 0,
    ) -> None:
        self.engine = engine
        self.caps = caps
        self.metrics = metrics
        self.progress = 0.0  # of recovery; from 1 on the shard serves
        self.catalog_incarnation: int | None = (
            None  # of the worker that hosts the catalog, when it is another one
        )
        self._incarnation = incarnation
        self._now_us = now_us
        self._waiting: list[tuple[Token, cmd.Command]] = []
        self._large = LargeBodies()
        self._waits_for_room = False  # the first large body has been read; a job makes a log file for it
        self._window = AnswerWindow()
        self._held_reads = HeldReads(self._window)
        self._outgoing = Outgoing(incarnation, self._window)
        self._reopened = False  # since the last turn
        self._claimed_us: dict[bytes, int] = {}  # when a front sent a claim last, which may wait
        self._probe_at_us = 0
        self._wake_at_ms: int | None = None  # as the engine said last
        self._began_us = 0  # the last turn
        engine.shard.can_send = self._may_wake
        self.pressure = ShardPressure(engine, now_us)
        self._peers: dict[int, int] = {}
        self._turn = Turn()
        self._turns_again: list[Turn] = []  # of writes that were parked, and are asked again in this turn
        self.desk = WatchService(
            engine,
            disk,
            max_sessions=max_sessions,
            max_sessions_per_key=max_sessions_per_key,
            send=self._send,
            ask=self._ask_for_desk,
            now_us=now_us,
        )
        self.links = PeerLinks(now_us, self._hear_catalog)
        self.outbox = Outbox(engine, self.links, shards=shards, submit=self._submit, now_us=now_us)
        self.forwarding = Forwarding(
            engine,
            self.links,
            shards=shards,
            ask=self.ask_shard,
            submit=self._submit_copies,
            count=self._submit,
            send=self._send,
            now_us=now_us,
        )
        engine.shard.copier = self.forwarding.forwarder
        self.jobs = JobStreams(
            engine,
            send=self._send,
            ask=partial(self._ask_for_desk, op=wire.OPEN_JOBS),
            takes=self._window.is_open,
            is_headers_only=partial(is_headers_only, engine),
        )
        self._doors = OperationCodec(engine)
        self._asked_own: dict[int, OnAnswer] = {}
        self._own_replies: deque[wire.Reply] = deque()
        self._own_number = 0
        self._held_ms = 0  # of the sync whose answers are being made
        self.rules: RuleService | None = None
        if engine.config.shard == 0:
            self.rules = RuleService(
                engine,
                shards=shards,
                max_forwards=max_forwards,
                send=self._send,
                ask=self.ask_shard,
                submit=self._submit,
                now_us=now_us,
            )

    # -- in ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.progress >= 1.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether a turn is wanted now, for other things than copies."""
        if self._waiting or self._reopened or self.caps.has_released:
            return True
        if self.is_ready and (
            self.engine.shard.has_new_work or self.engine.shard.backlog or self.engine.has_jobs
        ):
            return True
        return self._held_reads.are_due

    @property
    def has_copies(self) -> bool:
        """Whether a turn is wanted for copies, once the answers before them are with the fronts."""
        return self.is_ready and self.engine.shard.has_copies

    @property
    def are_copies_urgent(self) -> bool:
        """Somebody waits for them; or there are many, and whoever writes so much at once hardly notices them."""
        return self.forwarding.forwarder.is_chased or self.engine.shard.copies_due_records >= MANY_COPIES

    def start(self) -> None:
        """The shard has recovered."""
        for topic, *consumers in self.engine.report.overlaps:
            fields = {"topic": topic, "consumers": consumers}
            logger.warning("two consumers of a work queue get the same records", extra={"fields": fields})
        self.caps.start()
        self.desk.load()
        if self.rules is not None:
            self.rules.start()

    def receive(self, peer: bytes, message: bytes, apart: wire.Buffer | None = None) -> None:
        if wire.read_message_head(message) != self._incarnation:
            return  # it was meant for a worker that is gone, and was answered there
        now_us = self._now_us()
        is_first = True
        for request in wire.read_requests(message, apart):
            if is_first and request.received_us:
                self.pressure.arrived(now_us - request.received_us)
                is_first = False
            self._take(peer, request, now_us)

    def _take(self, peer: bytes, request: wire.Request, now_us: int) -> None:
        if request.op >= wire.READY and request.op not in FROM_WORKERS:
            self._internal(peer, request)
            return
        try:
            self._check_serving(request, now_us)
            self.pressure.check(request, now_us)
            if len(request.body) > LARGE_BYTES and request.op in LARGE_OPS:
                self._large.add(peer, request)
                return
            args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
            topic = request.topic.decode("utf-8", "replace")
            command, options = self._doors.read[request.op](topic, request, args)
        except Exception as error:
            self._refuse_unread(peer, request, error)
        else:
            request.body = b""  # it lives on in the command, if at all
            if request.op == wire.CLAIM:
                self._claimed_us[peer] = now_us
            entry = (peer, request, options, self._turn, command), command
            if request.op == wire.COPIES:
                self.forwarding.catch_ups.learn(cast(fwd.TakeCopies, command).copies.forward)
            elif request.op in READS and self._catches_up(topic, entry):
                return
            self._waiting.append(entry)

    def _refuse_unread(self, peer: bytes, request: wire.Request, error: Exception) -> None:
        if not isinstance(error, TopicsError):  # one hostile body must not take the shard down
            logger.exception("a request could not be read")
            error = TopicsError(f"the request could not be read: {error!r}")
        self._refuse(peer, request, error)

    @property
    def has_large(self) -> bool:
        """Whether `read_large` has something to do."""
        return bool(self._large.line) and not self._waits_for_room

    def read_large(self) -> None:
        """Read a slice of the first large body. When it has been read, and the log has room for it, it waits for its turn."""
        peer, request = self._large.line[0]
        try:
            read = self._large.step(self._begin_large)
        except Exception as error:
            self._refuse_unread(peer, request, error)
            return
        if read is None:
            return
        command, options = read
        if isinstance(command, cmd.Append) and not self.engine.prepare_room(command):
            self._waits_for_room = True
            return
        self._large.leave()
        request.body = b""
        self._waiting.append(((peer, request, options, self._turn, command), command))

    def _begin_large(self, request: wire.Request) -> Steps:
        self._check_serving(request, self._now_us())
        args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
        topic = request.topic.decode("utf-8", "replace")

        def read() -> Read:
            return self._doors.read[request.op](topic, request, args)

        if request.op == wire.WRITE_RAW:
            return read_large_record(request.body, read)
        return read_large(request, args.traceparent, read)

    def _catches_up(self, topic: str, entry: tuple[Token, cmd.Command]) -> bool:
        peer, request = entry[0][:2]
        return self.forwarding.catch_ups.hold(topic, peer, request, lambda: self._waiting.append(entry))

    def ask_shard(self, shard: int, op: int, topic: bytes, body: bytes, on_answer: OnAnswer) -> bool:
        """A request to another worker, or to this one as if another had asked. False: it cannot be asked now. Never
        answered before this returns.
        """
        if shard != self.engine.config.shard:
            return self.links.ask(shard, op, topic, body, on_answer)
        self._own_number = number = self._own_number + 1
        self._asked_own[number] = on_answer
        now_us = self._now_us()
        self._take(OWN, wire.Request(number, now_us, BUDGET_MS, op, 0, topic, b"", body), now_us)
        return True

    def _check_serving(self, request: wire.Request, now_us: int) -> None:
        if self.progress < 1.0:
            raise self._replaying()
        if now_us - request.received_us > request.budget_ms * 1000:
            raise NotReady("the request waited too long and was not executed; try again")

    def _replaying(self) -> NotReady:
        return NotReady(
            "this topic's shard is still replaying its log; try again shortly",
            replay_progress=round(self.progress, 4),
        )

    def _ask_for_desk(
        self, peer: bytes, number: int, asker: Any, command: cmd.Command | None, op: int = wire.FOLLOW
    ) -> Token:
        """A question of a desk to the engine; without a command it only wants the token for one."""
        request = wire.Request(number, self._now_us(), DESK_BUDGET_MS, op, 0, b"", b"", b"")
        token = (peer, request, asker, self._turn, command)
        # Where a watch begins is a look at the topic like any other.
        is_look = isinstance(command, cmd.State)
        if command is not None and not (is_look and self._catches_up(command.topic, (token, command))):  # type: ignore[arg-type,union-attr]
            self._waiting.append((token, command))  # type: ignore[arg-type]
        return token  # type: ignore[return-value]

    def _submit(self, asker: OutboxBatch | CopyBatch | TotalsQuery | Operation, command: cmd.Command) -> None:
        """What this shard itself has for its engine; the answer comes to whoever asks."""
        request = wire.Request(0, self._now_us(), DESK_BUDGET_MS, wire.DEAD_LETTERS, 0, b"", b"", b"")
        self._waiting.append(((b"", request, asker, self._turn, command), command))

    def _submit_copies(self, batch: CopyBatch, command: fwd.TakeCopies) -> None:
        self.forwarding.catch_ups.learn(command.copies.forward)
        self._submit(batch, command)

    def _own_answered(self, asker: object, result: object) -> None:
        match asker:
            case OutboxBatch():
                self.outbox.answered(asker, result)
            case CopyBatch():
                self.forwarding.forwarder.answered(asker, result)
            case TotalsQuery():
                self.forwarding.counted(asker, result)
            case Operation():
                assert self.rules is not None
                self.rules.answered(asker, result)

    def _internal(self, peer: bytes, request: wire.Request) -> None:
        """Questions about the shard itself, answered also while it recovers."""
        if request.op == wire.READY:
            body = msgspec.msgpack.encode(self.metrics.readiness(self.progress))
        elif request.op == wire.METRICS:
            try:
                body = self._report(peer)
            except Exception as error:  # whoever looks at it must not take it down
                logger.exception("the figures could not be told")
                self._refuse(peer, request, TopicsError(f"the figures could not be told: {error!r}"))
                return
        elif request.op == wire.CATALOG:
            try:
                self.caps.receive_report(peer, request.body)
            except wire.BadMessage as error:  # one report that is none must not take the shard down
                logger.error("a report could not be read", extra={"fields": {"error": str(error)}})
            return
        elif request.op == wire.CANCEL_CLAIM:
            self._unclaim(peer, request)
            return
        elif request.op == wire.PRESSURE:
            self.pressure.heard(peer, request.id)
            return
        elif request.op == wire.WINDOW_UPDATE:
            was_open = self._window.is_open(peer)
            self._window.taken(peer, wire.read_window_update(request.body))
            if self._window.is_open(peer) and not was_open:
                self._reopen()
            return
        else:
            self._at_desk(peer, request)
            return
        self._send(peer, request.id, 200, wire.INTERNAL, b"", body)

    def _report(self, peer: bytes) -> bytes:
        report = self.metrics.report(self.progress)
        report.watch_sessions = self.desk.sessions.count
        report.streams_elsewhere = self.desk.streams_elsewhere(peer)
        self.forwarding.report(report)
        report.pressure = self.pressure.value
        report.pressure_refused = self.pressure.refused
        report.forwards = self.rules.book.count if self.rules is not None else 0
        return msgspec.msgpack.encode(report)

    def _unclaim(self, peer: bytes, request: wire.Request) -> None:
        """Who claimed is gone. If the claim still waits it is ended, and nothing is handed out for it."""

        def is_it(token: object) -> bool:
            return _is_claim_of(peer, token) and cast(Token, token)[1].id == request.id

        waits = self.forwarding.catch_ups.withdraw(peer, request.id)
        waits = waits or any(is_it(token) for token, _ in self._waiting)
        self._waiting[:] = [entry for entry in self._waiting if not is_it(entry[0])]
        waits = self._held_reads.withdraw(peer, is_it) or waits
        args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
        topic = request.topic.decode("utf-8", "replace")
        if waits or self.engine.shard.withdraw_claim(topic, args.consumer, is_it):
            self._refuse(peer, request, NotReady("the client is gone"))

    def _at_desk(self, peer: bytes, request: wire.Request, *, is_caught_up: bool = False) -> None:
        try:
            if self.progress < 1.0:
                raise self._replaying()
            if not is_caught_up and self._waits_at_desk(peer, request):
                return
            desks = (self.desk, self.jobs, self.forwarding, self.rules)
            if not any(desk is not None and desk.receive(peer, request) for desk in desks):
                raise InvalidRequest(f"there is no operation {request.op}")
        except TopicsError as error:
            self._refuse(peer, request, error)
        except Exception as error:  # as with any other request
            logger.exception("a message about watching could not be handled")
            self._refuse(peer, request, TopicsError(f"the request could not be handled: {error!r}"))

    def _waits_at_desk(self, peer: bytes, request: wire.Request) -> bool:
        """Whether a stream of jobs waits for copies, or did so until now, when its client left."""
        catch_ups = self.forwarding.catch_ups
        if request.op == wire.OPEN_JOBS:
            topic = request.topic.decode("utf-8", "replace")
            go = partial(self._at_desk, peer, request, is_caught_up=True)
            return catch_ups.hold(topic, peer, request, go)
        return request.op == wire.CLOSE_JOBS and catch_ups.withdraw(peer, request.id)

    # -- the turn ------------------------------------------------------------------------------------------

    def turn(self) -> Actions:
        requests_, self._waiting = self._waiting, []
        if self.caps.has_released:
            again = self.caps.released()
            for token, _ in again:
                token[3].append_ms = 0.0
                self._turns_again.append(token[3])
            requests_ = [*again, *requests_]
        self._reopened = False
        requests_ = self._held_reads.admit(requests_, self._may_begin)
        share_pages(requests_)
        turn = self._turn
        self._turn = Turn()
        self.metrics.queued(len(requests_))
        batches = self.engine.counters["batches"]
        self._began_us = self._now_us()
        if self.engine.shard.long:
            self._end_late()
        outcome = self.engine.turn(requests_)
        self.metrics.turns.add(self._now_us() - self._began_us)
        self.metrics.queued(0)
        if self.engine.counters["batches"] > batches:
            turn.append_ms = self.metrics.append_ms()
            for earlier in self._turns_again:
                earlier.append_ms = turn.append_ms
        self._turns_again = []
        return self._act(outcome, 0.0)

    def _end_late(self) -> None:
        """Commands with much work may not come to their end in time."""

        def is_late(token: object) -> bool:
            request = cast(Token, token)[1]
            return self._began_us - request.received_us > request.budget_ms * 1000

        for long in self.engine.shard.long.end(is_late):
            peer, request = cast(Token, long.token)[:2]
            error = NotReady("the request took too long and was given up; try again", **long.outcome)
            self._refuse(peer, request, error)

    def _may_begin(self, token: Token) -> bool:
        """A read that was held may have waited too long, and is refused then."""
        try:
            self._check_serving(token[1], self._now_us())
        except NotReady as error:
            self._refuse(token[0], token[1], error)
            return False
        return True

    def _reopen(self) -> None:
        self._reopened = True
        self.engine.shard.sending_resumed()

    def _may_wake(self, token: object) -> bool:
        return self._window.is_open(cast(Token, token)[0])

    def forget_peer(self, peer: bytes) -> None:
        """That front is gone, and nobody waits for its reads."""
        self._window.forget(peer)
        self.pressure.front_gone(peer)
        self._held_reads.forget(peer)
        self.forwarding.catch_ups.withdraw(peer)
        self.desk.front_gone(peer)
        self.jobs.front_gone(peer)
        if self._claimed_us.pop(peer, None) is not None:
            self.engine.shard.withdraw_claims(lambda token: _is_claim_of(peer, token))
        # However long they have waited: a claim that went on would hand out jobs to nobody.
        self.engine.cold.withdraw(lambda token: cast(Token, token)[0] == peer)
        self.engine.shard.long.end(partial(_is_asked_by, peer))
        self.engine.shard.upkeep.withdraw(partial(_is_asked_by, peer))
        self._reopen()

    def finish(self, job: Job, error: BaseException | None, took_ms: float) -> Actions:
        self._waits_for_room = False
        if job.kind == "sync":
            self.metrics.synced(took_ms)
            self.pressure.synced()
        elif job.kind == JOB_KIND:
            self.desk.saved(error)
            return self._act(Outcome([], [], self._wake_at_ms), 0.0)
        self._began_us = self._now_us()
        outcome = self.engine.finish(job, error)
        return self._act(outcome, took_ms, job.held_ms)

    def close(self) -> Actions:
        """The last turn: what is open is committed, and a snapshot is written."""
        for peer, request in self._large.line:
            self._refuse(
                peer, request, NotReady("the server stops, and the request was not executed; try again")
            )
        self.desk.close()
        self.outbox.close()
        self.forwarding.forwarder.close()
        if self.rules is not None:
            self.rules.close()
        return self._act(self.engine.close(), 0.0)

    def idle(self) -> Actions:
        """Replies that needed no turn."""
        return self._act(Outcome([], [], self._wake_at_ms), 0.0)

    def _act(self, outcome: Outcome, sync_ms: float, held_ms: int = 0) -> Actions:
        """`held_ms`: how long the sync that was waited for was put off, to cover more."""
        now_us = self._now_us()
        self._held_ms = held_ms
        self.pressure.began(outcome.jobs)
        self.pressure.tend(now_us)
        for token, result in outcome.replies:
            if type(result) is OverGrant:
                result = self.caps.park(token, result)
                if result is None:
                    continue
            self._answer(token, result, now_us, sync_ms)  # type: ignore[arg-type]
        self.jobs.tend()
        self._tend_rules()
        if self.caps.has_mail:
            self.caps.attend()
        jobs = outcome.jobs + self.desk.tend() if self.is_ready else outcome.jobs
        wake_at_ms = self._wake_at_ms = outcome.wake_at_ms
        if self.is_ready:
            wake_at_ms = self.desk.wake_at_ms(wake_at_ms)
        if self.caps.wake_at_us is not None:
            wake_at_ms = self._tend_parked(now_us, wake_at_ms)
        wake_at_ms = self._tend_links(wake_at_ms)
        messages = self._outgoing.take(self.caps.pushes())
        doubtful = dict.fromkeys((*self._window.closed(), *self.desk.fronts(), *self.jobs.fronts()))
        if self._claimed_us:
            late_us = now_us - CLAIMS_WAIT_US
            self._claimed_us = {peer: at_us for peer, at_us in self._claimed_us.items() if at_us > late_us}
            doubtful |= dict.fromkeys(self._claimed_us)
        if doubtful:
            wake_at_ms = self._probe(doubtful, messages, now_us, wake_at_ms)
        return Actions(jobs, messages, wake_at_ms, self.links.take_messages())

    def _probe(
        self,
        doubtful: Iterable[bytes],
        messages: Sends,
        now_us: int,
        wake_at_ms: int | None,
    ) -> int:
        """Fronts that do not take their answers, or hold streams, may be gone, and only a message, here an empty one,
        finds that out.
        """
        if now_us >= self._probe_at_us:
            self._probe_at_us = now_us + PROBE_EVERY_US
            messages += [(peer, [self._outgoing.head]) for peer in doubtful]
        probe_at_ms = self._probe_at_us // 1000 + 1
        return probe_at_ms if wake_at_ms is None else min(wake_at_ms, probe_at_ms)

    def _tend_parked(self, now_us: int, wake_at_ms: int | None) -> int | None:
        for token, error in self.caps.expired():
            self._answer(token, error, now_us, 0.0)
        return _earlier(wake_at_ms, self.caps.wake_at_us)

    def _tend_links(self, wake_at_ms: int | None) -> int | None:
        """What this shard has to say to others: reports to the catalog, if one hosts it and lives, letters, copies."""
        self.links.expire()
        if self.is_ready:
            self.outbox.tend()
            self.forwarding.tend()
        if self.catalog_incarnation is not None:
            bodies, self.caps.reports = self.caps.reports, []
            for body in bodies:
                self.links.tell(0, wire.CATALOG, body)
        if self.rules is not None and self.is_ready:
            wake_at_ms = _earlier(wake_at_ms, self.rules.wake_at_us)
        dues = (self.links, self.outbox, self.forwarding, self.pressure)
        for at_us in [due.wake_at_us for due in dues]:
            wake_at_ms = _earlier(wake_at_ms, at_us)
        return wake_at_ms

    def _tend_rules(self) -> None:
        """What this shard has answered itself is heard, until nothing follows from it."""
        while True:
            while self._own_replies:
                reply = self._own_replies.popleft()
                self._asked_own.pop(reply.id)(reply)
            if self.rules is not None and self.is_ready:
                self.rules.tend()
            if not self._own_replies:
                return

    def _answer(
        self, token: Token, result: object, now_us: int, sync_ms: float, *, is_told: bool = False
    ) -> None:
        """`is_told`: the catalog has heard of the rules that went with a topic."""
        peer, request, options, turn, command = token
        if request.op == wire.FOLLOW:
            if type(options) is Feed:  # a group may be far behind, and says nothing of how fast we are
                self.metrics.delivered(result, now_us - self._began_us)
            self.metrics.told(result)
            self.desk.answered(options, token, result)
            return
        if not peer:
            self._own_answered(options, result)
            return
        if request.op == wire.OPEN_JOBS:
            self.metrics.told(result)
            self.jobs.answered(options, token, result)
            return
        total_ms = (now_us - request.received_us) / MS
        if type(result) is cmd.Appended:
            status, kind, head, body = replies.appended(
                result,
                with_seqs=not request.flags & wire.NO_SEQS,
                total_ms=total_ms,
                append_ms=turn.append_ms,
                sync_ms=sync_ms if result.synced and self._doors.is_synced_class(result.topic) else 0.0,
                more=self._throttled() if self.pressure.text or self._held_ms else b"",
            )
        elif isinstance(result, TopicsError):
            self._refuse(peer, request, result)
            return
        elif (
            isinstance(command, con.MovesDeadLetters)
            and command.last_dead_letter
            and self._waits(token, command, result, sync_ms)
        ):
            return
        else:
            if isinstance(result, DROPS) and not is_told:
                self.jobs.dropped(result)
                if isinstance(result, cmd.TopicDropped) and result.forwards:
                    self.forwarding.dropped(
                        result.forwards,
                        lambda: self._answer(token, result, self._now_us(), sync_ms, is_told=True),
                    )
                    return
            elif request.op == wire.FORWARD_STEP:
                self.forwarding.stepped(result)
            try:
                rendered = self._doors.render(request, result, options, total_ms, sync_ms)
                status, kind, head, body = mark_late(rendered) if request.flags & LATE else rendered
            except Exception as error:  # one odd record must not take the shard down with every read of it
                logger.exception("an answer could not be made")
                unknown = {"outcome": "unknown"} if request.op in wire.CHANGES else {}
                self._refuse(
                    peer, request, TopicsError(f"the answer could not be made: {error!r}", **unknown)
                )
                return
            self.metrics.told(result)
        if request.flags & wire.IGNORED:
            head, body = replies.with_ignored(kind, head, body, request.ignored)
        self.metrics.answered(request.op, command, now_us - request.received_us)
        self._send(peer, request.id, status, kind, head, body)

    def _waits(self, token: Token, command: con.MovesDeadLetters, result: object, sync_ms: float) -> bool:
        """Whether the answer to a command that sent dead letters waits until they are where they go."""
        size = int(sum(result.page.lengths)) if isinstance(result, con.Claimed) else 0
        return self.outbox.hold(command, size, lambda: self._answer(token, result, self._now_us(), sync_ms))

    def _throttled(self) -> bytes:
        """What the pressure did to the writes that are answered now."""
        return (b',"throttle_wait_ms":%d' % self._held_ms if self._held_ms else b"") + self.pressure.text

    # -- other workers -------------------------------------------------------------------------------------

    def set_peers(self, living: dict[int, int]) -> None:
        """Which workers live, as shard → incarnation."""
        for shard, incarnation in self._peers.items():
            if living.get(shard) != incarnation:
                self.caps.shard_down(shard, incarnation)
        self._peers = living
        own = self.engine.config.shard
        others = {shard: number for shard, number in living.items() if shard != own}
        self.links.set_peers(others)
        self.forwarding.set_peers(living)
        if self.rules is not None:
            self.rules.set_peers(others)
        host = living.get(0) if own else None
        if host != self.catalog_incarnation:
            if self.catalog_incarnation is not None:
                self.caps.catalog_down()
            self.catalog_incarnation = host
            if host is not None:
                self.caps.catalog_up()

    def receive_answer(self, shard: int, message: bytes, apart: wire.Buffer | None = None) -> None:
        """What another worker answers, or the catalog on shard 0 says."""
        self.links.receive(shard, message, apart)

    def _hear_catalog(self, shard: int, reply: wire.Reply) -> None:
        if shard == 0:
            self.caps.receive(reply.body)

    # -- out -----------------------------------------------------------------------------------------------

    def _refuse(self, peer: bytes, request: wire.Request, error: TopicsError) -> None:
        status, body = error_parts(error)
        if request.op != wire.CANCEL_CLAIM:  # nobody is there to be refused anything
            self.metrics.refused(error.code)
        self._send(peer, request.id, status, wire.JSON, error_head(status), body)

    def _send(
        self, peer: bytes, request_id: int, status: int, kind: int, head: bytes, body: wire.Buffer
    ) -> None:
        if peer == OWN:
            self._own_replies.append(wire.Reply(request_id, status, kind, head, body))
            return
        self._outgoing.add(peer, request_id, status, kind, head, body)


def _is_claim_of(peer: bytes, token: object) -> bool:
    asked = cast(Token, token)
    return asked[0] == peer and asked[1].op == wire.CLAIM


def _is_asked_by(peer: bytes, token: object) -> bool:
    """Not so the release of leases: it is for others to get the records."""
    asked = cast(Token, token)
    return asked[0] == peer and not isinstance(asked[4], con.Release)


def _earlier(at_ms: int | None, at_us: int | None) -> int | None:
    if at_us is None:
        return at_ms
    return at_us // 1000 + 1 if at_ms is None else min(at_ms, at_us // 1000 + 1)
