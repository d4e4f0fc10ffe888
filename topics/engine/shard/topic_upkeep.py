"""Upkeep of topics: loading their rows, and removing records that a TTL or a cap has ended. A bounded share each turn.

Small work is done at once, within the turn's budget. A topic with more to do is queued (`UpkeepPending`): requests to it wait in the order
of their arrival, and other topics are served meanwhile. When its work is done the waiting requests resume, some each turn, before
newer requests to the same topic.

Work is counted in units of about a microsecond, not measured, so that the same requests take the same turns.
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
class _Place:
    """A topic in line."""

    log: TopicLog
    work: Work | None  # None: done, and some still wait
    waiting: deque[tuple[object, Resume]] = field(default_factory=deque)
    names: set[object] = field(default_factory=set)
    error: TopicsError | None = None

    def advance(self, share: int) -> int:
        """Work until the share is used up, or to the end; returns how many units that took."""
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
        """`work_of`: all that a topic needs now."""
        self._work_of = work_of
        self._line: dict[int, _Place] = {}
        self._resumed: _Place | None = None  # one who waited there goes on
        self._room = limits.LONG_TURN_UNITS  # of this turn, for what is begun in it

    def __bool__(self) -> bool:
        return bool(self._line)

    def begin_turn(self) -> None:
        self._room = limits.LONG_TURN_UNITS

    def holds(self, log: TopicLog) -> bool:
        """Whether a new request to this topic has to wait."""
        place = self._line.get(log.id)
        return place is not None and place is not self._resumed

    def tend(self, log: TopicLog) -> None:
        """Do what a topic needs, or put it in line for that."""
        place = self._line.get(log.id)
        if place is None or (place is self._resumed and place.work is None):
            begun = _Place(log, self._work_of(log))
            if self._room > 0:
                self._room -= begun.advance(self._room)
            if begun.error is not None:
                raise begun.error
            if begun.work is None:
                return
            if place is None:
                self._line[log.id] = begun
            else:
                place.work = begun.work
        raise UpkeepPending(log)

    def put_in_line(self, log: TopicLog) -> None:
        """A topic needs something from the next turn on, whether it is asked or not."""
        place = self._line.get(log.id)
        if place is None:
            self._line[log.id] = _Place(log, self._work_of(log))
        elif place.work is None:
            place.work = self._work_of(log)

    def wait(self, log: TopicLog, resume: Resume, *, token: object = None, name: object = None) -> None:
        """Have `resume` called when the topic is tended, once for each name. `token`: by which it can be withdrawn."""
        place = self._line[log.id]
        if name is not None:
            if name in place.names:
                return
            place.names.add(name)
        if place is self._resumed:
            place.waiting.appendleft((token, resume))  # it went on, and has to wait again
        else:
            place.waiting.append((token, resume))

    def go_on(self) -> Iterator[None]:
        """A turn's share. Each step of this is one who waited and has gone on."""
        room, answers = limits.LONG_TURN_UNITS, limits.UPKEEP_RESUMED_MAX
        for place in list(self._line.values()):
            room -= place.advance(room)
            if place.work is None:
                place.names.clear()
            self._resumed = place
            try:
                while place.work is None and place.waiting and answers:
                    answers -= 1
                    _, resume = place.waiting.popleft()
                    resume(place.error)
                    yield
            finally:
                self._resumed = None
            # The others first in the next turn.
            del self._line[place.log.id]
            if place.work is not None or place.waiting:
                self._line[place.log.id] = place
            if room <= 0 or not answers:
                return

    def withdraw(self, is_it: Callable[[object], bool]) -> bool:
        """Those with such a token do not want to go on; whether there were any."""
        found = False
        for place in self._line.values():
            kept = deque(entry for entry in place.waiting if entry[0] is None or not is_it(entry[0]))
            found = found or len(kept) < len(place.waiting)
            place.waiting = kept
        return found
