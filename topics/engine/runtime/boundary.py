"""The boundary of the engine: all that a running shell calls.

Three calls do the work: `turn`, `finish` and the read-only `stats`. The others are its life cycle, state changes that must
precede any further call (`withdraw`, `set_quota`), and three shortcuts of hot loops, which are parts with a name and a protocol
of their own: `copies`, `standing_reads`, `dead_letters`.

Shells import this module, `commands` (what is asked and answered), `core` (ports and plain rules), `storage` (file formats) and
`tools` (for files without a server), and `runtime.stats`. Import-linter forbids the other packages; only the program imports
the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from topics.engine.commands.consumers import DeadLetter
from topics.engine.commands.copies import Copier, CopySource
from topics.engine.commands.standing_reads import StandingReads
from topics.engine.commands.topics import Append, Command
from topics.engine.core.pressure import Measures
from topics.engine.reading.cold_blocks import READ_KIND as READ_KIND
from topics.engine.runtime.stats import Stats
from topics.engine.shard.transactions import STAGE_KIND as STAGE_KIND
from topics.engine.storage.segment_store import COLD_IO_KIND
from topics.engine.upkeep.compaction import REWRITE_KIND as REWRITE_KIND

COLD_KINDS = frozenset(
    (READ_KIND, COLD_IO_KIND)
)  # jobs that may take any time; a shutdown does not wait for them

Request: TypeAlias = tuple[object, Command]


@dataclass(slots=True, eq=False)
class Job:
    """Blocking work. The caller runs it off the loop, then reports it to `finish`."""

    kind: str
    work: Callable[[], object]
    done: Callable[[object, BaseException | None], None]
    value: object = None
    held_ms: int = 0  # how long a sync was delayed to cover more writes

    def run(self) -> None:
        self.value = self.work()


@dataclass(slots=True)
class Outcome:
    """What the caller has to do after a turn."""

    replies: list[tuple[object, object]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    wake_at_ms: int | None = None  # on the monotonic clock: when the next turn must be at the latest
    created: list[str] = field(default_factory=list)  # topics that readers see since this turn
    settled: list[int] = field(default_factory=list)  # connections whose leases have ended, at least one each


class Shell(Protocol):
    """What the engine asks its caller in a turn."""

    @property
    def copier(self) -> Copier: ...

    @property
    def measures(self) -> Measures:
        """The measures against overload that are in force; the shell changes them."""

    def can_send(self, token: object) -> bool:
        """Whether a reply to this token can be sent now."""

    def is_followed(self, topic: str, consumer: str) -> bool:
        """Whether a consumer has an open stream."""


class DeadLetterSource(Protocol):
    """Dead letters of this shard's topics, to be sent to their targets."""

    @property
    def due(self) -> Mapping[int, object]:
        """The topics that have some, by id."""

    def next_dead_letters(self, topic_id: int, count: int, max_bytes: int) -> list[DeadLetter]:
        """The next ones of a topic, in order of their numbers, all for one target."""


class ShardEngine(Protocol):
    # -- the three calls
    def turn(self, requests: Sequence[Request]) -> Outcome: ...

    def finish(self, job: Job, error: BaseException | None = None) -> Outcome: ...

    @property
    def stats(self) -> Stats: ...

    # -- its life
    def attach(self, shell: Shell) -> None:
        """Before recovery: the caller that the engine works for. Without one, every reply can be sent."""

    def recover_steps(self) -> Generator[float, None, None]: ...

    def stop_cold(self) -> None: ...

    def close(self) -> Outcome: ...

    # -- before the next call
    def withdraw(self, matches: Callable[[object], bool], *, claims: bool) -> None:
        """Drop what waits for a client that is gone, without a reply: with `claims`, also its claims."""

    def withdraw_claim(self, topic: str, consumer: str, matches: Callable[[object], bool]) -> bool:
        """Drop a waiting claim without a reply; returns whether there was one."""

    def end_long_commands(self, matches: Callable[[object], bool]) -> list[tuple[object, dict[str, str]]]:
        """End long commands; the caller answers them. Returns their tokens, and detail for the errors."""

    def set_quota(self, topics: int | None, size: int | None) -> None:
        """This shard's share of the caps on topics and bytes."""

    def resume_sending(self) -> None:
        """Replies that could not be sent may be sendable again."""

    def prepare_room(self, command: Append) -> bool:
        """Whether a large write may be handled now; if not, ask again when a job has ended."""

    # -- shortcuts of hot loops
    @property
    def copies(self) -> CopySource: ...

    @property
    def standing_reads(self) -> StandingReads: ...

    @property
    def dead_letters(self) -> DeadLetterSource: ...
