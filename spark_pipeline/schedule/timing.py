"""Due times of jobs, and what to do about missed ones. All times are UTC, in seconds since the epoch.

due                             the job runs, if its window has not ended
several due times have passed   the newest counts; the others are reported as missed
the window has ended            the job is skipped and reported; it runs at its next regular time
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from cronsim import CronSim, CronSimError

MISSED_MAX = 1000  # counted at most


class BadCron(ValueError):
    pass


class Cron:
    """A cron expression of five fields, as in crontab(5), in UTC."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or len(text.split()) != 5:
            raise BadCron(f"{text!r} does not have five fields; write '15 2 * * *'")
        try:
            # Also fails for dates that never occur, like February 30.
            next(CronSim(text, datetime(2024, 1, 1, tzinfo=UTC)))
        except (CronSimError, StopIteration) as error:
            raise BadCron(f"{text!r} is invalid, or never occurs; write '15 2 * * *'") from error
        self.text = text

    def after(self, now_s: float) -> float:
        """The first due time after `now_s`."""
        due: datetime = next(CronSim(self.text, _datetime(now_s)))
        return due.timestamp()

    def until(self, now_s: float) -> float:
        """The last due time at or before `now_s`."""
        # Searching backwards excludes the start, so start at the next second.
        due: datetime = next(CronSim(self.text, _datetime(now_s + 1), reverse=True))
        return due.timestamp()


def _datetime(now_s: float) -> datetime:
    return datetime.fromtimestamp(int(now_s), UTC)


@dataclass(frozen=True, slots=True)
class Due:
    """What to do about a job now."""

    verdict: Literal["wait", "run", "skip"]
    due_s: float  # for "wait", the next due time
    missed: int = 0  # earlier due times without a run


def check_due(cron: Cron, *, handled_s: float, window_s: float, now_s: float) -> Due:
    """`handled_s`: the last due time that is handled, that is run, skipped, or before the job existed."""
    due_s = cron.until(now_s)
    if due_s <= handled_s:
        return Due("wait", cron.after(max(now_s, handled_s)))
    missed, at = 0, cron.after(handled_s)
    while at < due_s and missed < MISSED_MAX:
        missed, at = missed + 1, cron.after(at)
    return Due("run" if now_s <= due_s + window_s else "skip", due_s, missed)
