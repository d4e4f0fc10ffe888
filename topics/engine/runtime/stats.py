"""Read-only view of an engine: its figures, and what is known of its topics, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from topics.api.config import EngineConfig
from topics.engine.commands.forwards import Forward
from topics.engine.shard.reads import state_of
from topics.engine.topic.log import TopicLog

if TYPE_CHECKING:
    from topics.engine.runtime.engine import Engine


@dataclass(slots=True)
class TopicFigures:
    name: str
    is_queue: bool
    head: int
    earliest: int
    count: int
    bytes: int
    ready: int = 0  # of a queue, as are the next two
    in_flight: int = 0
    oldest_ms: int = 0


@dataclass(slots=True)
class ConsumerFigures:
    topic: str
    consumer: str
    lag: int
    pending: int
    lag_ms: int | None  # None: with a filter, as that would take a scan


@dataclass(slots=True)
class QueueTotals:
    queues: int
    in_flight: int
    consumers: int  # named ones
    dead_lettered: int


class Stats:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shard = engine.shard
        self._state = engine.shard.state

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def shard(self) -> int:
        return self._engine.config.shard

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time of the last turn."""
        return self._engine.clock.now_ms

    def present_ms(self) -> int:
        return self._engine.clock.present_ms()

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def read_only(self) -> str | None:
        """Why changes are refused until a restart."""
        return self._state.read_only

    @property
    def is_full(self) -> bool:
        """Whether writes are refused for lack of disk space."""
        return self._state.disk_full or self._state.low_space

    @property
    def disk_free(self) -> int:
        return self._engine.free_bytes

    @property
    def cold_problem(self) -> str:
        """Why the cold tier accepts no segments; empty: it does."""
        return self._engine.relocator.problem

    @property
    def overlaps(self) -> list[tuple[str, str, str]]:
        """Work queues, each with two consumers whose filters overlap."""
        return self._shard.consumers.overlaps

    @property
    def counters(self) -> Mapping[str, int]:
        return self._engine.counters

    # -- work that is due ----------------------------------------------------------------------------------

    @property
    def needs_turn(self) -> bool:
        """Whether a turn is needed now, for anything but copies."""
        delivery = self._shard.delivery
        return delivery.has_new_work or bool(delivery.backlog) or self._engine.has_jobs

    @property
    def long_commands(self) -> int:
        """Commands that run in slices and are not answered yet."""
        return len(self._state.long.queue)

    @property
    def has_copies(self) -> bool:
        """Whether copies wait for a turn without replies."""
        return self._shard.delivery.has_copies

    @property
    def copies_due_records(self) -> float:
        """New records to copy, each divided by its number of dests."""
        return self._shard.forwards.copies_due_records

    @property
    def backlog(self) -> int:
        """Topics that wait for delivery."""
        return self._shard.delivery.backlog

    @property
    def paused(self) -> int:
        """Topics whose pushes wait until the pressure falls."""
        return len(self._shard.delivery.paused)

    @property
    def picks(self) -> tuple[int, int]:
        """How often a topic was picked for delivery, and the milliseconds they had waited."""
        scheduler = self._shard.delivery.scheduler
        return scheduler.picks, scheduler.waited_ms

    @property
    def band_bytes(self) -> list[int]:
        """Bytes delivered, by priority band."""
        return [band.used for band in self._shard.delivery.scheduler.bands]

    # -- sizes ---------------------------------------------------------------------------------------------

    @property
    def topics(self) -> int:
        return len(self._state.published)

    @property
    def topics_by_class(self) -> dict[str, int]:
        return self._state.class_counts()

    @property
    def records_live(self) -> int:
        return self._state.records_live

    @property
    def bytes_live(self) -> int:
        return self._state.bytes_live

    @property
    def used(self) -> tuple[int, int]:
        """Topics and bytes that count towards the caps."""
        state = self._state
        topics = len(state.staged) + state.topics_unknown
        return topics, state.bytes_live + state.bytes_reserved + state.bytes_unknown

    @property
    def log_bytes(self) -> int:
        return self._engine.checkpointer.log_bytes

    @property
    def log_share(self) -> float:
        """The log since the last checkpoint, of its maximum."""
        return self._engine.checkpointer.log_share

    @property
    def tiers(self) -> dict[str, tuple[int, int, int]]:
        """Live, dead and reclaimable bytes of segments by tier, as of the last checkpoint."""
        totals = self._engine.checkpointer.usage.totals
        return {tier: (usage.live, usage.dead, usage.reclaimable) for tier, usage in totals.items()}

    @property
    def cold_reads(self) -> tuple[int, int, int]:
        """Fetches from the cold tier, failed ones, and waiting readers."""
        cold = self._engine.cold
        return cold.fetches, cold.failures, cold.waiting

    @property
    def retired(self) -> tuple[int, int]:
        """Segments that a merge has replaced and that readers may still use, and their bytes."""
        return self._engine.merge_service.retirement.totals()

    @property
    def transactions(self) -> tuple[int, int]:
        """Open transactions, and their staged bytes."""
        transactions = self._shard.transactions
        return (
            (transactions.open_transactions, transactions.staged_bytes)
            if transactions is not None
            else (0, 0)
        )

    def queue_totals(self) -> QueueTotals:
        queues, in_flight = self._shard.consumers.queue_totals()
        count = dead_lettered = 0
        for log in self._state.published.values():
            consumers = log.consumers
            if consumers is not None:
                count += len(consumers.named)
                dead_lettered += consumers.dead_lettered
                dead_lettered += sum(one.counters.dead_lettered for one in consumers.named.values())
        return QueueTotals(queues, in_flight, count, dead_lettered)

    def topic_figures(self, count: int) -> list[TopicFigures]:
        """The first topics by name."""
        return [self._figures(self._state.published[name]) for name in islice(self._state.names, count)]

    def _figures(self, log: TopicLog) -> TopicFigures:
        state, queue = state_of(log), self._shard.consumers.queue_counts(log)
        row = TopicFigures(
            state.topic, queue is not None, state.head_seq, state.earliest_seq, state.count, state.bytes
        )
        if queue is not None:
            row.ready, row.in_flight = queue.ready, queue.in_flight
            oldest = log.find(state.earliest_seq) if state.count else None
            if oldest is not None:
                row.oldest_ms = max(0, self.present_ms() - oldest[0].ts_at(oldest[1]))
        return row

    def consumer_figures(self) -> Iterator[ConsumerFigures]:
        """Named consumers by topic and name, of loaded topics: other lags are not known without loading them."""
        for name in self._state.names:
            log = self._state.published[name]
            if log.consumers is None or log.stored is not None or log.deferred:
                continue
            for consumer_name in sorted(log.consumers.named):
                consumer = log.consumers.named[consumer_name]
                lag = self._shard.leases.known_lag(log, consumer)
                if lag is None:
                    continue
                lag_ms = None
                if consumer.filter is None:
                    lag_ms = self._shard.consumers.lag_ms(log, consumer, self.present_ms()) if lag else 0
                yield ConsumerFigures(name, consumer_name, lag, len(consumer.entries), lag_ms)

    # -- topics --------------------------------------------------------------------------------------------

    def has_topic(self, name: str) -> bool:
        """Whether a topic exists, or is about to."""
        return name in self._state.staged

    def is_published(self, name: str) -> bool:
        return name in self._state.published

    def names_between(self, first: str, last: str, *, inclusive: bool) -> Iterable[str]:
        """The names from `first` on, or after it, up to `last`, ascending."""
        return self._state.names.irange(first, last, inclusive=(inclusive, True))

    def topic_id(self, name: str) -> int | None:
        log = self._state.published.get(name)
        return log.id if log is not None else None

    def is_fsync(self, topic: str) -> bool:
        log = self._state.published.get(topic)
        return log is not None and log.config.durability == "fsync"

    def is_headers_only(self, topic: str, consumer: str) -> bool:
        log = self._state.published.get(topic) if consumer else None
        found = log.consumers.find(consumer) if log is not None and log.consumers is not None else None
        return found is not None and found.config.headers_only

    def leases_of(self, topic: str, consumer: str, connection: int) -> int | None:
        """The number of unexpired leases of a connection; None: there is no such topic."""
        log = self._state.published.get(topic)
        return self._shard.leases.leases_of(log, consumer, connection) if log is not None else None

    def oldest_dead_letter(self, topic_id: int) -> int | None:
        """The number of a topic's first dead letter that is not settled; None: there is none."""
        log = self._state.by_id.get(topic_id)
        if log is None or log.dropped or log.consumers is None:
            return None
        return next(iter(log.consumers.dead_letters), None)

    # -- forwards ------------------------------------------------------------------------------------------

    @property
    def forwards(self) -> list[Forward]:
        """The catalog of forwards, on the shard that has it."""
        return list(self._shard.forwards.catalog.values())

    @property
    def last_forward_uid(self) -> int:
        return self._shard.forwards.last_uid

    def outflows(self) -> dict[int, Forward]:
        """The forwards that this shard has sources of, by uid."""
        return {uid: outflow.forward for uid, outflow in self._shard.forwards.outflows.items()}

    def inflows(self, topic: str) -> Iterable[int]:
        """The uids of the forwards that copy into a topic."""
        log = self._state.published.get(topic)
        return log.inflows if log is not None and log.inflows is not None else ()

    def all_inflows(self) -> Iterator[tuple[str, int]]:
        for log in self._state.published.values():
            for uid in log.inflows or ():
                yield log.name, uid

    def inflow_total(self, topic: str, uid: int) -> tuple[str, int | None] | None:
        """The name of a forward and the number of records it has copied into a topic. None instead of the number: it may
        include records that are not synced or not replayed yet; ask with a command. None: there is no such forward.
        """
        log = self._state.published.get(topic)
        inflow = log.inflows.get(uid) if log is not None and log.inflows is not None else None
        if log is None or inflow is None:
            return None
        is_known = not (log.pending or log.deferred) or self._state.read_only is not None
        return inflow.name, inflow.total if is_known else None
