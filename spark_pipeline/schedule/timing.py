"""When a job is due, and what is done about one whose time has passed. All times are UTC, in seconds since the epoch.

a job whose time has come       runs, if its window has not ended
several times have passed       the newest counts, the others are told as missed
its window has ended            it is skipped, and told; the next time is as usual
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from cronsim import CronSim, CronSimError

MISSED_MAX = 1000  # counted, no further


class BadCron(ValueError):
    pass


class Cron:
    """Five fields, as crontab(5) has them, in UTC."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or len(text.split()) != 5:
            raise BadCron(f"{text!r} has not five fields; one looks like '15 2 * * *'")
        try:
            # Also one that no day ever matches, like the 30th of February.
            next(CronSim(text, datetime(2024, 1, 1, tzinfo=UTC)))
        except (CronSimError, StopIteration) as error:
            raise BadCron(f"{text!r} is no time that comes; one looks like '15 2 * * *'") from error
        self.text = text

    def after(self, now_s: float) -> float:
        """The first time after this moment."""
        found: datetime = next(CronSim(self.text, _moment(now_s)))
        return found.timestamp()

    def until(self, now_s: float) -> float:
        """The last time up to this moment, itself included."""
        # Looking back leaves out the moment itself, so look from the next second on.
        found: datetime = next(CronSim(self.text, _moment(now_s + 1), reverse=True))
        return found.timestamp()


def _moment(now_s: float) -> datetime:
    return datetime.fromtimestamp(int(now_s), UTC)


@dataclass(frozen=True, slots=True)
class Due:
    """What there is to do about a job at a moment."""

    verdict: Literal["wait", "run", "skip"]
    due_s: float  # when it was due; for "wait" when it will be
    missed: int = 0  # times before this one that nothing came of


def look(cron: Cron, *, handled_s: float, window_s: float, now_s: float) -> Due:
    """`handled_s` is the last time that is settled: run, skipped, or before the job was known."""
    due_s = cron.until(now_s)
    if due_s <= handled_s:
        return Due("wait", cron.after(max(now_s, handled_s)))
    missed, at = 0, cron.after(handled_s)
    while at < due_s and missed < MISSED_MAX:
        missed, at = missed + 1, cron.after(at)
    return Due("run" if now_s <= due_s + window_s else "skip", due_s, missed)
