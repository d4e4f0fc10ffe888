"""Commands whose work grows with what a topic holds: a slice of them each turn, so that others do not wait for them.

A handler passes such a command on as a generator, `Work`. It yields now and then what it has done since the last yield, in
units of about a microsecond, which are counted and not measured; so the same requests take the same turns. The last thing it does,
with no yield after it, is to answer as a handler does: by an op, by `_answer`, by another command, or by raising an error.

    start     a first slice at once, within what the turn has left for first slices: little work is answered in its turn
    go_on     each turn: a slice for each that waits, by turns, until the share of a turn is used up
    end       for those whose client is gone, or that have no time left

Between two slices anything may happen to the topic. Before each slice but the first `enter` loads it again, lets time act on it, and
refuses when it was dropped; the generator looks up again whatever else it rests on. A change may be half done when
its client hears of an error: its outcome is unknown. With too many in line a change is refused before it begins, so that it has
changed nothing; a read may still find its answer in the first slice.
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
    log: TopicLog | None  # the topic it is about, if it is about one
    work: Work
    done: bool = False

    @property
    def outcome(self) -> dict[str, str]:
        """What an error before its end has to tell: a change may be half done."""
        return {"outcome": "unknown"} if isinstance(self.command, Change) else {}

    def advance(self, share: int) -> int:
        """Work until the share is used up, or to the end; returns how many units that took."""
        used = 0
        for units in self.work:
            used += units
            if used >= share:
                return used
        self.done = True
        return used


class LongCommands:
    """Those of one shard that are not answered yet, in the order of their next slices."""

    def __init__(
        self,
        enter: Callable[[LongCommand], None],
        failed: Callable[[object, Command, Exception], None],
    ) -> None:
        """`failed` answers a command with what its work has raised."""
        self._enter = enter
        self._failed = failed
        self._queue: deque[LongCommand] = deque()
        self._room = 0  # of this turn, for first slices

    def __len__(self) -> int:
        return len(self._queue)

    def begin_turn(self) -> None:
        self._room = limits.LONG_TURN_UNITS

    def start(
        self, token: object, command: Command, log: TopicLog | None, work: Work, *, refusable: bool = True
    ) -> None:
        """Called by a handler, before anything is changed: what the work raises in its first slice is answered as what a handler
        raises. `refusable`: not so for work that no client would ask for again.
        """
        is_full = refusable and len(self._queue) >= limits.LONG_COMMANDS_MAX
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
        self._queue.append(long)

    def run_slices(self) -> None:
        """A turn's share of work."""
        room = limits.LONG_TURN_UNITS
        pending: list[LongCommand] = []
        while room > 0 and self._queue:
            long = self._queue.popleft()
            try:
                self._enter(long)
            except UpkeepPending:  # it goes on when its topic does
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
                self._queue.append(long)
        self._queue.extend(pending)

    def _fail(self, long: LongCommand, error: Exception) -> int:
        long.work.close()
        self._failed(long.token, long.command, error)
        return 1

    def end(self, matches_token: Callable[[object], bool] = lambda token: True) -> list[LongCommand]:
        """End those with such a token, and return them. Answering them is up to the caller."""
        ended = [long for long in self._queue if matches_token(long.token)]
        if ended:
            self._queue = deque(long for long in self._queue if not matches_token(long.token))
        for long in ended:
            long.work.close()
        return ended


def _too_many() -> Throttled:
    return Throttled(
        "too many commands with much work are under way already; come back later",
        limit="long_commands",
        max=limits.LONG_COMMANDS_MAX,
    )
