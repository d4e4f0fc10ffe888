"""Upkeep of topics: loading rows, and removing records that expired or exceed a cap. Bounded work per turn.

Small work is done at once, within the turn's budget. A topic with more to do is queued (`UpkeepPending`): its requests wait
in order of arrival while other topics are served. When its work is done, waiting requests resume, a few per turn, before
newer ones to the same topic.

Work is counted in units of about a microsecond, not measured, so the same requests always take the same turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from topics.api import limits
from topics.api.errors import TopicsError
from topics.engine.core.tasks import Work
from topics.engine.topic.log import TopicLog

Resume: TypeAlias = Callable[[TopicsError | None], None]


class UpkeepPending(Exception):
    """The topic is queued for upkeep and nothing was changed. The caller waits with `Upkeep.wait`."""

    def __init__(self, log: TopicLog) -> None:
        super().__init__(log.name)
        self.log = log


@dataclass(slots=True, eq=False)
class _QueuedTopic:
    """A topic that is queued for upkeep."""

    log: TopicLog
    work: Work | None  # None: done, but requests still wait
    waiting: deque[tuple[object, Resume]] = field(default_factory=deque)
    names: set[object] = field(default_factory=set)
    error: TopicsError | None = None

    def advance(self, share: int) -> int:
        """Work until the share is used up or the work is done; returns the units used."""
        used = 0
        if self.work is None:
            return used
        try:
            for units in self.work:
                used += units
                if used >= share:
                    return used
        except TopicsError as error:
            self.error = error
        except OSError as error:
            self.error = TopicsError(f"a file could not be read: {error}")
        self.work = None
        return used


class Upkeep:
    def __init__(self, work_of: Callable[[TopicLog], Work]) -> None:
        """`work_of` returns all the upkeep a topic needs now."""
        self._work_of = work_of
        self.queue: dict[int, _QueuedTopic] = {}  # topics with upkeep or waiting requests, by id
        self._resumed: _QueuedTopic | None = None  # the topic whose waiting requests are being resumed
        self._room = limits.LONG_TURN_UNITS  # left in this turn for work that starts in it

    def begin_turn(self) -> None:
        self._room = limits.LONG_TURN_UNITS

    def is_queued(self, log: TopicLog) -> bool:
        """Whether a new request to this topic must wait."""
        queued = self.queue.get(log.id)
        return queued is not None and queued is not self._resumed

    def run(self, log: TopicLog) -> None:
        """Do a topic's upkeep, or queue it and raise UpkeepPending."""
        queued = self.queue.get(log.id)
        if queued is None or (queued is self._resumed and queued.work is None):
            begun = _QueuedTopic(log, self._work_of(log))
            if self._room > 0:
                self._room -= begun.advance(self._room)
            if begun.error is not None:
                raise begun.error
            if begun.work is None:
                return
            if queued is None:
                self.queue[log.id] = begun
            else:
                queued.work = begun.work
        raise UpkeepPending(log)

    def enqueue(self, log: TopicLog) -> None:
        """Queue a topic for upkeep from the next turn on, even without requests."""
        queued = self.queue.get(log.id)
        if queued is None:
            self.queue[log.id] = _QueuedTopic(log, self._work_of(log))
        elif queued.work is None:
            queued.work = self._work_of(log)

    def wait(self, log: TopicLog, resume: Resume, *, token: object = None, name: object = None) -> None:
        """Call `resume` when the topic's upkeep is done, once per `name`. `token`: identifies it for `withdraw`."""
        queued = self.queue[log.id]
        if name is not None:
            if name in queued.names:
                return
            queued.names.add(name)
        if queued is self._resumed:
            queued.waiting.appendleft((token, resume))  # it was resumed and must wait again
        else:
            queued.waiting.append((token, resume))

    def run_slices(self) -> Iterator[None]:
        """Do one turn's share of work. Yields after each request that was resumed."""
        room, answers = limits.LONG_TURN_UNITS, limits.UPKEEP_RESUMED_MAX
        for queued in list(self.queue.values()):
            room -= queued.advance(room)
            if queued.work is None:
                queued.names.clear()
            self._resumed = queued
            try:
                while queued.work is None and queued.waiting and answers:
                    answers -= 1
                    _, resume = queued.waiting.popleft()
                    resume(queued.error)
                    yield
            finally:
                self._resumed = None
            # To the end of the queue, so that other topics go first in the next turn.
            del self.queue[queued.log.id]
            if queued.work is not None or queued.waiting:
                self.queue[queued.log.id] = queued
            if room <= 0 or not answers:
                return

    def withdraw(self, matches_token: Callable[[object], bool]) -> bool:
        """Drop waiting requests with a matching token; returns whether there were any."""
        found = False
        for queued in self.queue.values():
            kept = deque(entry for entry in queued.waiting if entry[0] is None or not matches_token(entry[0]))
            found = found or len(kept) < len(queued.waiting)
            queued.waiting = kept
        return found
