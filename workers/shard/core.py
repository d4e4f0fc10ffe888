"""The state machine of a shard worker: messages in, messages out. No socket, no thread, no clock of its own.

    core.receive(peer, message)      decode requests and queue them for the next turn
    actions = core.turn()            one turn of the engine for all queued requests: its jobs and replies
    actions = core.finish(job, …)    a job has ended; its replies
    actions = core.tend()            all else: timers, streams, copies, messages to other workers

Replies leave before anything else is done. `tend` is called after each of the others, and only if `needs_tending`: if one of
the services here was given something to do, or a time is reached that one of them waits for. A plain request does neither.

Bodies are decoded and encoded here; fronts pass them through.
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
from topics.engine.commands import consumers as con
from topics.engine.commands import forwards as fwd
from topics.engine.commands import topics as cmd
from topics.engine.commands.copies import Copier
from topics.engine.core.ports import Disk
from topics.engine.core.pressure import Measures
from topics.engine.runtime.boundary import Job, Outcome, ShardEngine
from topics.link import wire
from topics.protocols.encoding import Codec, Steps
from workers.forward.catch_up import READS
from workers.forward.forwarder import CopyBatch
from workers.forward.outbox import Outbox, OutboxBatch
from workers.forward.rules.service import Operation, RuleService
from workers.forward.service import Forwarding, TotalsQuery
from workers.peers.links import BUDGET_MS, Message, OnReply, PeerLinks
from workers.shard.caps import Caps
from workers.shard.encodings import BetweenWorkers, ShardFacts, shard_encodings
from workers.shard.flow_control import ReadQueue, ReplyBuffer, ReplyWindow, Sends, share_pages
from workers.shard.large_bodies import LARGE_BYTES, LargeBodies
from workers.shard.metrics import ShardMetrics
from workers.shard.pressure import ShardPressure
from workers.watch.feeds import Feed
from workers.watch.job_streams import JobStreams
from workers.watch.service import JOB_KIND, WatchService

logger = logging.getLogger("topics.shard")

# Peer, request, options of its reply, turn, command.
Token = tuple[bytes, wire.Request, Any, "Turn", cmd.Command]
MS = 1000.0  # microseconds

NEVER_US = 1 << 62
CLAIM_US_MAX = 32_000_000  # longer than any claim waits, for jobs and then for dead letters
PROBE_EVERY_US = 1_000_000  # interval of liveness probes to fronts that receive nothing
URGENT_COPIES = 64  # with this many per dest, copies do not wait until earlier replies have left


@dataclass(slots=True)
class Turn:
    """Timing shared by the requests of one turn."""

    append_ms: float = 0.0


@dataclass(slots=True)
class Actions:
    """What the event loop does next, in this order."""

    jobs: list[Job] = field(default_factory=list)
    sends: Sends = field(default_factory=list)
    wake_at_ms: int | None = None
    requests: list[Message] = field(default_factory=list)  # to other workers
    local_replies: list[wire.Reply] = field(default_factory=list)  # to clients that this worker serves itself


class NotReady(TopicsError):
    code = "not_ready"


DROP_RESULTS = (cmd.TopicDropped, con.ConsumerDropped)
MARKS = wire.IGNORED | wire.LATE
NO_DEADLINE_MS = 1 << 31  # for commands of the shard's own services
SELF_PEER = b"\0own"  # sender of requests that this shard sends to itself
LOCAL_PEER = b"\0clients"  # sender of the requests of clients that this worker serves itself
# Requests of other workers that the engine executes.
FROM_WORKERS = frozenset((wire.DEAD_LETTERS, wire.COPIES, wire.FORWARD_STEP))


class ShardCore:
    def __init__(
        self,
        engine: ShardEngine,
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
        self.progress = 0.0  # of recovery; at 1 the shard serves
        self.catalog_incarnation: int | None = None  # of the other worker that hosts the catalog
        self._incarnation = incarnation
        self._now_us = now_us
        self._pending: list[tuple[Token, cmd.Command]] = []
        self._large = LargeBodies()
        self._awaits_log_space = False  # the first large body is decoded; a job creates a log file for it
        self._window = ReplyWindow()
        self._read_queue = ReadQueue(self._window)
        self._replies = ReplyBuffer(incarnation, self._window)
        self._reopened = False  # since the last turn
        self._claimed_us: dict[bytes, int] = {}  # time of each front's last claim, which may still wait
        self._probe_at_us = 0
        self.needs_tending = True  # a service, or the buffer of replies, has something that no turn takes
        self._tend_at_us = NEVER_US  # when a service waits for a time: the earliest
        self._wake_at_ms: int | None = None  # from the engine's last outcome
        self._began_us = 0  # when the last turn began
        self._facts = ShardFacts(engine)
        self._encodings = shard_encodings(self._facts)
        self._codecs: dict[int, Codec] = {**self._encodings, wire.MSGPACK: BetweenWorkers()}
        self.pressure = ShardPressure(engine, now_us)
        self._peers: dict[int, int] = {}
        self._turn = Turn()
        self._retried_turns: list[Turn] = []  # of parked writes that are retried in this turn
        self.watch = WatchService(
            engine,
            disk,
            max_sessions=max_sessions,
            max_sessions_per_key=max_sessions_per_key,
            send=self._send,
            ask=self._ask_for_service,
            now_us=now_us,
            encodings=self._encodings,
        )
        self.links = PeerLinks(now_us, self._on_catalog_push)
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
        self.jobs = JobStreams(
            engine,
            send=self._send,
            ask=partial(self._ask_for_service, op=wire.OPEN_JOBS),
            has_window=self._window.is_open,
            encodings=self._encodings,
            is_headers_only=self._facts.is_headers_only,
        )
        engine.attach(self)
        self._dead_letters = engine.dead_letters
        self._own_requests: dict[int, OnReply] = {}
        self._own_replies: deque[wire.Reply] = deque()
        self._own_number = 0
        self._local_replies: list[wire.Reply] = []
        self._sync_delay_ms = 0  # of the sync whose replies are being sent
        self.rules: RuleService | None = None
        if engine.stats.shard == 0:
            self.rules = RuleService(
                engine,
                shards=shards,
                max_forwards=max_forwards,
                send=self._send,
                ask=self.ask_shard,
                submit=self._submit,
                now_us=now_us,
                encodings=self._encodings,
            )

    # -- in ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.progress >= 1.0

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def needs_turn(self) -> bool:
        """Whether a turn is needed now, for anything but copies."""
        if self._pending or self._reopened or self.caps.has_retries:
            return True
        if self.is_ready and (self.engine.stats.needs_turn):
            return True
        return self._read_queue.is_ready

    @property
    def has_copies(self) -> bool:
        """Whether a turn is needed for copies, once earlier replies have reached the fronts."""
        return self.is_ready and self.engine.stats.has_copies

    @property
    def are_copies_urgent(self) -> bool:
        """A reader waits for them; or there are so many that the writer hardly notices the delay."""
        return (
            self.forwarding.forwarder.has_waiting_readers
            or self.engine.stats.copies_due_records >= URGENT_COPIES
        )

    def start(self) -> None:
        """The shard has recovered."""
        for topic, *consumers in self.engine.stats.overlaps:
            fields = {"topic": topic, "consumers": consumers}
            logger.warning("consumers of a work queue have overlapping filters", extra={"fields": fields})
        self.needs_tending = True
        self.caps.start()
        self.watch.load()
        if self.rules is not None:
            self.rules.start()

    def receive(self, peer: bytes, message: bytes, separate: wire.Buffer | None = None) -> None:
        if wire.read_message_head(message) != self._incarnation:
            return  # sent to a previous incarnation
        now_us = self._now_us()
        is_first = True
        for request in wire.read_requests(message, separate):
            if is_first and request.received_us:
                self.pressure.record_delay(now_us - request.received_us)
                is_first = False
            self._accept(peer, request, now_us)

    def receive_local(self, request: wire.Request) -> None:
        """A request of a client that this worker serves itself. Its reply is in `Actions.local_replies`."""
        self._accept(LOCAL_PEER, request, self._now_us())

    def _accept(self, peer: bytes, request: wire.Request, now_us: int) -> None:
        if request.op >= wire.READY and request.op not in FROM_WORKERS:
            self._handle_internal(peer, request)
            return
        try:
            self._check_serving(request, now_us)
            self.pressure.check(request, now_us)
            codec = self._codecs[request.encoding]
            if len(request.body) > LARGE_BYTES and request.op in codec.read_large:
                self._large.add(peer, request)
                return
            args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
            topic = request.topic.decode("utf-8", "replace")
            command, options = codec.read[request.op](topic, request, args)
        except Exception as error:
            self._refuse_unread(peer, request, error)
        else:
            request.body = b""  # the command holds what it needs of it
            if request.op == wire.CLAIM and peer != LOCAL_PEER:
                self._claimed_us[peer] = now_us
                self._tend_by(self._probe_at_us)
            entry = (peer, request, options, self._turn, command), command
            if request.op == wire.COPIES:
                self.forwarding.catch_ups.learn_source(cast(fwd.TakeCopies, command).copies.forward)
            elif request.op in READS and self._hold_for_copies(topic, entry):
                return
            self._pending.append(entry)

    def _refuse_unread(self, peer: bytes, request: wire.Request, error: Exception) -> None:
        if not isinstance(error, TopicsError):  # one hostile body must not take the shard down
            logger.exception("a request could not be decoded")
            error = TopicsError(f"the request could not be decoded: {error!r}")
        self.needs_tending = True  # there may be no turn that sends it
        self._refuse(peer, request, error)

    @property
    def has_large(self) -> bool:
        """Whether `read_large` has work to do."""
        return bool(self._large.queue) and not self._awaits_log_space

    def read_large(self) -> None:
        """Decode a slice of the first large body. Once decoded, and if the log has room for it, it is queued for a turn."""
        peer, request = self._large.queue[0]
        try:
            read = self._large.step(self._begin_large)
        except Exception as error:
            self._refuse_unread(peer, request, error)
            return
        if read is None:
            return
        command, options = read
        if isinstance(command, cmd.Append) and not self.engine.prepare_room(command):
            self._awaits_log_space = True
            return
        self._large.pop()
        request.body = b""
        self._pending.append(((peer, request, options, self._turn, command), command))

    def _begin_large(self, request: wire.Request) -> Steps:
        self._check_serving(request, self._now_us())
        args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
        topic = request.topic.decode("utf-8", "replace")
        return self._codecs[request.encoding].read_large[request.op](topic, request, args)

    def _hold_for_copies(self, topic: str, entry: tuple[Token, cmd.Command]) -> bool:
        if not self.engine.stats.inflows(topic):
            return False
        self.needs_tending = True
        peer, request = entry[0][:2]
        return self.forwarding.catch_ups.hold(topic, peer, request, lambda: self._pending.append(entry))

    def ask_shard(self, shard: int, op: int, topic: bytes, body: bytes, on_reply: OnReply) -> bool:
        """Send a request to a worker, which may be this one. False: not possible now. `on_reply` is never called before
        this returns.
        """
        if shard != self.engine.stats.shard:
            return self.links.ask(shard, op, topic, body, on_reply)
        self._own_number = number = self._own_number + 1
        self._own_requests[number] = on_reply
        now_us = self._now_us()
        request = wire.Request(number, now_us, BUDGET_MS, op, 0, topic, b"", body, wire.MSGPACK)
        self._accept(SELF_PEER, request, now_us)
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

    def _ask_for_service(
        self, peer: bytes, number: int, requester: Any, command: cmd.Command | None, op: int = wire.FOLLOW
    ) -> Token:
        """Queue a command of a service for the engine; without a command, only make a token."""
        request = wire.Request(number, self._now_us(), NO_DEADLINE_MS, op, 0, b"", b"", b"")
        token = (peer, request, requester, self._turn, command)
        # The state at which a watch begins is a read of the topic like any other.
        is_read = isinstance(command, cmd.State)
        if command is not None and not (is_read and self._hold_for_copies(command.topic, (token, command))):  # type: ignore[arg-type,union-attr]
            self._pending.append((token, command))  # type: ignore[arg-type]
        return token  # type: ignore[return-value]

    def _submit(
        self, requester: OutboxBatch | CopyBatch | TotalsQuery | Operation, command: cmd.Command
    ) -> None:
        """Queue a command of this shard for its engine; the result goes to `requester`."""
        request = wire.Request(0, self._now_us(), NO_DEADLINE_MS, wire.DEAD_LETTERS, 0, b"", b"", b"")
        self._pending.append(((b"", request, requester, self._turn, command), command))

    def _submit_copies(self, batch: CopyBatch, command: fwd.TakeCopies) -> None:
        self.forwarding.catch_ups.learn_source(command.copies.forward)
        self._submit(batch, command)

    def _own_command_done(self, requester: object, result: object) -> None:
        match requester:
            case OutboxBatch():
                self.outbox.on_result(requester, result)
            case CopyBatch():
                self.forwarding.forwarder.on_result(requester, result)
            case TotalsQuery():
                self.forwarding.on_total(requester, result)
            case Operation():
                assert self.rules is not None
                self.rules.on_result(requester, result)

    def _handle_internal(self, peer: bytes, request: wire.Request) -> None:
        """Requests about the worker itself, some of which are answered even during recovery."""
        self.needs_tending = True
        if request.op == wire.READY:
            body = msgspec.msgpack.encode(self.metrics.readiness(self.progress))
        elif request.op == wire.METRICS:
            try:
                body = self._report(peer)
            except Exception as error:  # a scrape must not take the shard down
                logger.exception("metrics could not be collected")
                self._refuse(peer, request, TopicsError(f"metrics could not be collected: {error!r}"))
                return
        elif request.op == wire.CATALOG:
            try:
                self.caps.receive_report(peer, request.body)
            except wire.BadMessage as error:  # an invalid report must not take the shard down
                logger.error("a quota report could not be decoded", extra={"fields": {"error": str(error)}})
            return
        elif request.op == wire.CANCEL_CLAIM:
            self._cancel_claim(peer, request)
            return
        elif request.op == wire.PRESSURE:
            self.pressure.front_reported(peer, request.id)
            return
        elif request.op == wire.WINDOW_UPDATE:
            was_open = self._window.is_open(peer)
            self._window.received(peer, wire.read_window_update(request.body))
            if self._window.is_open(peer) and not was_open:
                self._reopen()
            return
        else:
            self._dispatch(peer, request)
            return
        self._send(peer, request.id, wire.OK, wire.MSGPACK, b"", body)

    def _report(self, peer: bytes) -> bytes:
        report = self.metrics.report(self.progress)
        report.watch_sessions = self.watch.sessions.count
        report.streams_elsewhere = self.watch.streams_elsewhere(peer)
        self.forwarding.report(report)
        report.pressure = self.pressure.value
        report.pressure_refused = self.pressure.refused
        report.forwards = self.rules.book.count if self.rules is not None else 0
        return msgspec.msgpack.encode(report)

    def _cancel_claim(self, peer: bytes, request: wire.Request) -> None:
        """The client of a claim has disconnected. If the claim still waits, end it without delivering anything."""

        def matches(token: object) -> bool:
            return _is_claim_of(peer, token) and cast(Token, token)[1].id == request.id

        is_waiting = self.forwarding.catch_ups.withdraw(peer, request.id)
        is_waiting = is_waiting or any(matches(token) for token, _ in self._pending)
        self._pending[:] = [entry for entry in self._pending if not matches(entry[0])]
        is_waiting = self._read_queue.withdraw(peer, matches) or is_waiting
        args = wire.decode_args(request.args) if request.args else wire.NO_ARGS
        topic = request.topic.decode("utf-8", "replace")
        if is_waiting or self.engine.withdraw_claim(topic, args.consumer, matches):
            self._refuse(peer, request, NotReady("the client has disconnected"))

    def _dispatch(self, peer: bytes, request: wire.Request, *, is_caught_up: bool = False) -> None:
        try:
            if self.progress < 1.0:
                raise self._replaying()
            if not is_caught_up and self._holds_job_stream(peer, request):
                return
            services = (self.watch, self.jobs, self.forwarding, self.rules)
            if not any(service is not None and service.receive(peer, request) for service in services):
                raise InvalidRequest(f"there is no operation {request.op}")
        except TopicsError as error:
            self._refuse(peer, request, error)
        except Exception as error:  # as with any other request
            logger.exception("a request could not be handled")
            self._refuse(peer, request, TopicsError(f"the request could not be handled: {error!r}"))

    def _holds_job_stream(self, peer: bytes, request: wire.Request) -> bool:
        """Whether a job stream waits for copies to open; or did so until now, when its client disconnected."""
        catch_ups = self.forwarding.catch_ups
        if request.op == wire.OPEN_JOBS:
            topic = request.topic.decode("utf-8", "replace")
            go = partial(self._dispatch, peer, request, is_caught_up=True)
            return catch_ups.hold(topic, peer, request, go)
        return request.op == wire.CLOSE_JOBS and catch_ups.withdraw(peer, request.id)

    # -- the turn ------------------------------------------------------------------------------------------

    def turn(self) -> Actions:
        entries, self._pending = self._pending, []
        if self.caps.has_retries:
            self.needs_tending = True  # the catalog's next messages can be read
            retries = self.caps.take_retries()
            for token, _ in retries:
                token[3].append_ms = 0.0
                self._retried_turns.append(token[3])
            entries = [*retries, *entries]
        self._reopened = False
        entries = self._read_queue.admit(entries, self._may_begin)
        share_pages(entries)
        turn = self._turn
        self._turn = Turn()
        self.metrics.queued(len(entries))
        batches = self.engine.stats.counters["batches"]
        self._began_us = self._now_us()
        if self.engine.stats.long_commands:
            self._expire_long_commands()
        outcome = self.engine.turn(entries)
        self.metrics.turns.add(self._now_us() - self._began_us)
        self.metrics.queued(0)
        if self.engine.stats.counters["batches"] > batches:
            turn.append_ms = self.metrics.append_ms()
            for earlier in self._retried_turns:
                earlier.append_ms = turn.append_ms
        self._retried_turns = []
        return self._collect_actions(outcome, 0.0)

    def _expire_long_commands(self) -> None:
        """Refuse long-running commands that have exceeded the time budget of their request."""

        def is_late(token: object) -> bool:
            request = cast(Token, token)[1]
            return self._began_us - request.received_us > request.budget_ms * 1000

        for token, detail in self.engine.end_long_commands(is_late):
            peer, request = cast(Token, token)[:2]
            error = NotReady("the request took too long and was aborted; try again", **detail)
            self._refuse(peer, request, error)

    def _may_begin(self, token: Token) -> bool:
        """Whether a queued read is still within its time budget; if not, it is refused."""
        try:
            self._check_serving(token[1], self._now_us())
        except NotReady as error:
            self._refuse(token[0], token[1], error)
            return False
        return True

    def _reopen(self) -> None:
        self._reopened = self.needs_tending = True
        self.engine.resume_sending()

    # -- what the engine asks in a turn, see topics/engine/runtime/boundary.py ----------------------------------

    @property
    def copier(self) -> Copier:
        return self.forwarding.forwarder

    @property
    def measures(self) -> Measures:
        return self.pressure.measures

    def is_followed(self, topic: str, consumer: str) -> bool:
        return self.jobs.is_followed(topic, consumer)

    def can_send(self, token: object) -> bool:
        return self._window.is_open(cast(Token, token)[0])

    def forget_peer(self, peer: bytes) -> None:
        """A front is gone: drop its reads, claims and streams."""
        self._window.forget(peer)
        self.pressure.front_gone(peer)
        self._read_queue.forget(peer)
        self.forwarding.catch_ups.withdraw(peer)
        self.watch.front_gone(peer)
        self.jobs.front_gone(peer)
        # No matter how long they have waited: a claim that went on would lease jobs without a client.
        has_claims = self._claimed_us.pop(peer, None) is not None
        self.engine.withdraw(partial(_is_requested_by, peer), claims=has_claims)
        self._reopen()

    def finish(self, job: Job, error: BaseException | None, took_ms: float) -> Actions:
        self._awaits_log_space = False
        if job.kind == "sync":
            self.metrics.synced(took_ms)
            self.pressure.synced()
        elif job.kind == JOB_KIND:
            self.watch.on_saved(error)
            self.needs_tending = True
            return self._collect_actions(Outcome([], [], self._wake_at_ms), 0.0)
        self._began_us = self._now_us()
        outcome = self.engine.finish(job, error)
        return self._collect_actions(outcome, took_ms, job.held_ms)

    def close(self) -> Actions:
        """The last turn: commit open writes and write a snapshot."""
        for peer, request in self._large.queue:
            self._refuse(
                peer,
                request,
                NotReady("the server is stopping and the request was not executed; try again"),
            )
        self.watch.close()
        self.outbox.close()
        self.forwarding.forwarder.close()
        if self.rules is not None:
            self.rules.close()
        actions, rest = self._collect_actions(self.engine.close(), 0.0), self.tend()
        actions.sends += rest.sends
        actions.requests += rest.requests
        actions.local_replies += rest.local_replies
        return actions

    def _collect_actions(self, outcome: Outcome, sync_ms: float, held_ms: int = 0) -> Actions:
        """`held_ms`: how long the sync was delayed to cover more writes."""
        now_us = self._now_us()
        self._sync_delay_ms = held_ms
        if outcome.jobs:
            self.pressure.jobs_started(outcome.jobs, now_us)
            self._tend_by(self.pressure.sample_at_us)  # a sync may take long, and be all that happens
        if outcome.created or outcome.settled:
            self.needs_tending = True
            for name in outcome.created:
                self.watch.topic_created(name)
            for connection in outcome.settled:
                self.jobs.settled(connection)
        for token, result in outcome.replies:
            if type(result) is OverGrant:
                self.needs_tending = True
                result = self.caps.park(token, result)
                if result is None:
                    continue
            self._answer(token, result, now_us, sync_ms)  # type: ignore[arg-type]
        sends = self._replies.take()
        if (
            now_us >= self._tend_at_us
            or now_us >= self.pressure.sample_at_us
            or self._dead_letters.due
            or self._window.closed
            or self.forwarding.forwarder.is_changed
        ):
            self.needs_tending = True
        self._wake_at_ms = outcome.wake_at_ms
        return Actions(outcome.jobs, sends, self._earliest_wake(), local_replies=self._take_local_replies())

    def _take_local_replies(self) -> list[wire.Reply]:
        replies, self._local_replies = self._local_replies, []
        return replies

    def tend(self) -> Actions:
        """Let the services run what is due, and collect the messages of all."""
        self.needs_tending = False
        now_us = self._now_us()
        self.pressure.tick(now_us)
        self.jobs.tick()
        self._tick_rules()
        self.caps.process_inbox()
        jobs: list[Job] = []
        wake_at_ms: int | None = None
        if self.is_ready:
            jobs = self.watch.tick()
            wake_at_ms = self.watch.wake_at_ms(None)
        for token, error in self.caps.expired():
            self._answer(token, error, now_us, 0.0)
        self._tick_links()
        services = (self.caps, self.links, self.outbox, self.forwarding, self.pressure)
        times = [service.wake_at_us for service in services]
        if wake_at_ms is not None:
            times.append(wake_at_ms * 1000)
        if self.rules is not None and self.is_ready:
            times.append(self.rules.wake_at_us)
        messages = self._replies.take(self.caps.pushes())
        probed = dict.fromkeys((*self._window.closed, *self.watch.fronts(), *self.jobs.fronts()))
        if self._claimed_us:
            late_us = now_us - CLAIM_US_MAX
            self._claimed_us = {peer: at_us for peer, at_us in self._claimed_us.items() if at_us > late_us}
            probed |= dict.fromkeys(self._claimed_us)
        if probed:
            self._probe(probed, messages, now_us)
            times.append(self._probe_at_us)
        self._tend_at_us = min((at_us for at_us in times if at_us is not None), default=NEVER_US)
        # These depend on more than their own inputs and times.
        self.needs_tending = self.needs_tending or self.jobs.has_refills or self.outbox.is_busy
        return Actions(
            jobs, messages, self._earliest_wake(), self.links.take_messages(), self._take_local_replies()
        )

    def _tend_by(self, at_us: int) -> None:
        self._tend_at_us = min(self._tend_at_us, at_us)

    def _earliest_wake(self) -> int | None:
        """The earlier of the times at which the engine and the services are due."""
        if self._tend_at_us == NEVER_US:
            return self._wake_at_ms
        at_ms = -(-self._tend_at_us // 1000)
        return at_ms if self._wake_at_ms is None else min(self._wake_at_ms, at_ms)

    def _probe(self, fronts: Iterable[bytes], messages: Sends, now_us: int) -> None:
        """Probe fronts that receive nothing, or that have streams or claims: only sending a message, here an empty one,
        shows whether a front still exists.
        """
        if now_us >= self._probe_at_us:
            self._probe_at_us = now_us + PROBE_EVERY_US
            messages += [(peer, [self._replies.head]) for peer in fronts]

    def _tick_links(self) -> None:
        """Queue messages to other workers: reports to the catalog, dead letters, copies."""
        self.links.expire()
        if self.is_ready:
            self.outbox.tick()
            self.forwarding.tick()
        if self.catalog_incarnation is not None:
            bodies, self.caps.reports = self.caps.reports, []
            for body in bodies:
                self.links.tell(0, wire.CATALOG, body)

    def _tick_rules(self) -> None:
        """Deliver replies of this shard to itself, until there are no new ones."""
        while True:
            while self._own_replies:
                reply = self._own_replies.popleft()
                self._own_requests.pop(reply.id)(reply)
            if self.rules is not None and self.is_ready:
                self.rules.tick()
            if not self._own_replies:
                return

    def _answer(
        self, token: Token, result: object, now_us: int, sync_ms: float, *, is_announced: bool = False
    ) -> None:
        """`is_announced`: the catalog has acknowledged the rules that were dropped with a topic."""
        peer, request, options, turn, command = token
        if request.op == wire.FOLLOW:
            self.needs_tending = True
            if type(options) is Feed:  # the lag of a group says nothing about delivery latency
                self.metrics.delivered(result, now_us - self._began_us)
            self.metrics.count_tombstone(result)
            self.watch.on_result(options, token, result)
            return
        if not peer:
            self.needs_tending = True
            self._own_command_done(options, result)
            return
        if request.op == wire.OPEN_JOBS:
            self.needs_tending = True
            self.metrics.count_tombstone(result)
            self.jobs.on_result(options, token, result)
            return
        total_ms = (now_us - request.received_us) / MS
        if type(result) is cmd.Appended:
            answer = self._encodings[request.encoding].appended(
                result,
                with_seqs=not request.flags & wire.NO_SEQS,
                total_ms=total_ms,
                append_ms=turn.append_ms,
                sync_ms=sync_ms if result.synced and self._facts.is_synced_class(result.topic) else 0.0,
                more=self._throttle_text() if self.pressure.text or self._sync_delay_ms else b"",
            )
        elif isinstance(result, TopicsError):
            self._refuse(peer, request, result)
            return
        elif (
            isinstance(command, con.MovesDeadLetters)
            and command.last_dead_letter
            and self._hold_for_dead_letters(token, command, result, sync_ms)
        ):
            return
        else:
            if isinstance(result, DROP_RESULTS) and not is_announced:
                self.needs_tending = True
                self.jobs.on_dropped(result)
                if isinstance(result, cmd.TopicDropped) and result.forwards:
                    self.forwarding.on_dropped(
                        result.forwards,
                        lambda: self._answer(token, result, self._now_us(), sync_ms, is_announced=True),
                    )
                    return
            elif request.op == wire.FORWARD_STEP:
                self.needs_tending = True
                self.forwarding.on_step(result)
            try:
                codec = self._codecs[request.encoding]
                answer = codec.render(request, result, options, total_ms, sync_ms)
            except Exception as error:  # one bad record must not take the shard down at every read of it
                logger.exception("a reply could not be encoded")
                unknown = {"outcome": "unknown"} if request.op in wire.CHANGES else {}
                self._refuse(
                    peer, request, TopicsError(f"the reply could not be encoded: {error!r}", **unknown)
                )
                return
            self.metrics.count_tombstone(result)
        if request.flags & MARKS:
            answer = self._encodings[request.encoding].marked(request, answer)
        self.metrics.answered(request.op, command, now_us - request.received_us)
        code, kind, fields, body = answer
        self._send(peer, request.id, code, kind, fields, body)

    def _hold_for_dead_letters(
        self, token: Token, command: con.MovesDeadLetters, result: object, sync_ms: float
    ) -> bool:
        """Whether the reply to a command that sent dead letters waits until their topics have them."""
        self.needs_tending = True
        size = int(sum(result.page.lengths)) if isinstance(result, con.Claimed) else 0
        return self.outbox.hold(command, size, lambda: self._answer(token, result, self._now_us(), sync_ms))

    def _throttle_text(self) -> bytes:
        """Members of `performance` about throttling, for writes that are answered now."""
        return (
            b',"throttle_wait_ms":%d' % self._sync_delay_ms if self._sync_delay_ms else b""
        ) + self.pressure.text

    # -- other workers -------------------------------------------------------------------------------------

    def set_peers(self, living: dict[int, int]) -> None:
        """The running workers, as shard → incarnation."""
        self.needs_tending = True
        for shard, incarnation in self._peers.items():
            if living.get(shard) != incarnation:
                self.caps.shard_down(shard, incarnation)
        self._peers = living
        own = self.engine.stats.shard
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

    def receive_reply(self, shard: int, message: bytes, separate: wire.Buffer | None = None) -> None:
        """Replies of another worker, or pushes of the catalog on shard 0."""
        self.needs_tending = True
        self.links.receive(shard, message, separate)

    def _on_catalog_push(self, shard: int, reply: wire.Reply) -> None:
        if shard == 0:
            self.caps.receive(reply.body)

    # -- out -----------------------------------------------------------------------------------------------

    def _refuse(self, peer: bytes, request: wire.Request, error: TopicsError) -> None:
        if request.op != wire.CANCEL_CLAIM:  # the client is gone
            self.metrics.refused(error.code)
        self._send(peer, request.id, *wire.refused(error))

    def _send(
        self, peer: bytes, request_id: int, code: int, kind: int, fields: bytes, body: wire.Buffer
    ) -> None:
        if peer == SELF_PEER:
            self.needs_tending = True
            self._own_replies.append(wire.Reply(request_id, code, kind, fields, body))
            return
        if peer == LOCAL_PEER:
            self._local_replies.append(wire.Reply(request_id, code, kind, fields, body))
            return
        self._replies.add(peer, request_id, code, kind, fields, body)


def _is_claim_of(peer: bytes, token: object) -> bool:
    found = cast(Token, token)
    return found[0] == peer and found[1].op == wire.CLAIM


def _is_requested_by(peer: bytes, token: object) -> bool:
    """Except the release of leases, which lets other consumers get the records."""
    found = cast(Token, token)
    return found[0] == peer and not isinstance(found[4], con.Release)
