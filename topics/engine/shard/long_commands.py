"""Long commands: commands whose work grows with the size of the topic run in slices, so that other requests do not wait.

A handler passes such a command on as a generator, `Work`. It yields the work done since its last yield, in units of about a
microsecond. Units are counted, not measured, so the same requests always take the same turns. At its end, with no yield
after it, it replies as a handler does: with an op, with `answer`, with another command, or by raising an error.

    start        runs a first slice at once, within the turn's budget for first slices: short work is answered in its turn
    run_slices   each turn, one slice for each waiting command, round robin, until the turn's budget is used up
    end          ends commands whose client has disconnected or whose deadline has passed

Between two slices the topic may change in any way. Before each slice but the first, `enter` loads and expires the topic
again, and raises if it was dropped; the generator must look up everything else again. If a change fails after its first
slice, it may be half done, so its outcome is unknown. When the queue is full, changes are refused before they start and so
have no effect; a read may still be answered from its first slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

from topics.api import limits
from topics.api.errors import Throttled
from topics.engine.commands.topics import Change, Command
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.topic.log import TopicLog

Work: TypeAlias = Generator[int, None, None]


@dataclass(slots=True, eq=False)
class LongCommand:
    token: object
    command: Command
    log: TopicLog | None  # its topic, if it has one
    work: Work
    done: bool = False

    @property
    def outcome(self) -> dict[str, str]:
        """Error detail if it is ended early: a change may be half done."""
        return {"outcome": "unknown"} if isinstance(self.command, Change) else {}

    def advance(self, share: int) -> int:
        """Work until the share is used up or the work is done; returns the units used."""
        used = 0
        for units in self.work:
            used += units
            if used >= share:
                return used
        self.done = True
        return used


class LongCommands:
    """The unanswered long commands of one shard, in the order of their next slices."""

    def __init__(
        self,
        enter: Callable[[LongCommand], None],
        failed: Callable[[object, Command, Exception], None],
    ) -> None:
        """`enter` prepares a command's next slice; `failed` answers a command whose work raised an error."""
        self._enter = enter
        self._failed = failed
        self.queue: deque[LongCommand] = deque()
        self._room = 0  # left in this turn for first slices

    def begin_turn(self) -> None:
        self._room = limits.LONG_TURN_UNITS

    def start(
        self, token: object, command: Command, log: TopicLog | None, work: Work, *, refusable: bool = True
    ) -> None:
        """Called by a handler before it has changed anything; errors in the first slice are raised from here.

        `refusable`: False for work that no client would retry.
        """
        is_full = refusable and len(self.queue) >= limits.LONG_COMMANDS_MAX
        if is_full and isinstance(command, Change):
            raise _too_many()
        long = LongCommand(token, command, log, work)
        if self._room > 0:
            self._room -= long.advance(self._room)
            if long.done:
                return
        if is_full:
            work.close()
            raise _too_many()
        self.queue.append(long)

    def run_slices(self) -> None:
        """Do one turn's share of work."""
        room = limits.LONG_TURN_UNITS
        pending: list[LongCommand] = []
        while room > 0 and self.queue:
            long = self.queue.popleft()
            try:
                self._enter(long)
            except UpkeepPending:  # continues when its topic's upkeep is done
                pending.append(long)
                continue
            except Exception as error:
                room -= self._fail(long, error)
                continue
            try:
                room -= max(1, long.advance(min(room, limits.LONG_SLICE_UNITS)))
            except Exception as error:
                room -= self._fail(long, error)
                continue
            if not long.done:
                self.queue.append(long)
        self.queue.extend(pending)

    def _fail(self, long: LongCommand, error: Exception) -> int:
        long.work.close()
        self._failed(long.token, long.command, error)
        return 1

    def end(self, matches_token: Callable[[object], bool] = lambda token: True) -> list[LongCommand]:
        """End the commands with a matching token and return them. The caller must answer them."""
        ended = [long for long in self.queue if matches_token(long.token)]
        if ended:
            self.queue = deque(long for long in self.queue if not matches_token(long.token))
        for long in ended:
            long.work.close()
        return ended


def _too_many() -> Throttled:
    return Throttled(
        "too many long-running commands are in progress; retry later",
        limit="long_commands",
        max=limits.LONG_COMMANDS_MAX,
    )
