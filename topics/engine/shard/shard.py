"""One shard: its state, and the features that handle commands on it."""

from __future__ import annotations

from topics.api.config import EngineConfig
from topics.engine.core.clock import EngineClock
from topics.engine.core.ports import Disk
from topics.engine.reading.reader import Reader
from topics.engine.shard.appends import Appends
from topics.engine.shard.consumers.admin import Consumers
from topics.engine.shard.consumers.claims import Claims
from topics.engine.shard.consumers.dead_letters import DeadLetters
from topics.engine.shard.consumers.leases import Leases
from topics.engine.shard.consumers.settle import Settlement
from topics.engine.shard.delivery import Delivery
from topics.engine.shard.forwards import Forwards
from topics.engine.shard.reads import Reads
from topics.engine.shard.state import ShardState
from topics.engine.shard.transactions import Transactions

OPTIONAL_FEATURES = ("transactions", "merges")  # those that can be left out


class Shard:
    """Each feature gets the state, and only features that were created before it. None inherits from another."""

    def __init__(
        self,
        config: EngineConfig,
        clock: EngineClock,
        reader: Reader,
        disk: Disk,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        """`absent`: features to leave out. A log or snapshot that needs one of them is refused."""
        self.state = state = ShardState(config, clock, reader, disk.boot_id())
        self.appends = Appends(state)
        self.reads = Reads(state)
        self.leases = Leases(state, self.appends, self.reads)
        self.claims = Claims(state, self.leases)
        self.settlement = Settlement(state, self.appends, self.leases, self.claims)
        self.consumers = Consumers(state, self.leases, self.claims)
        self.dead_letters = DeadLetters(state, self.appends, self.reads, self.leases, self.claims)
        self.forwards = Forwards(state, self.appends, self.reads)
        self.transactions = Transactions(state, self.appends, disk) if "transactions" not in absent else None
        self.delivery = Delivery(state, self.reads, self.leases, self.claims, self.consumers, self.forwards)
