"""The jobs of a schedule as systemd units or crontab lines."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime

from cronsim import CronSim

from spark_pipeline.schedule.config import BadSchedule, Job, Schedule
from spark_pipeline.schedule.timing import Cron

FORMS = ("systemd", "cron")
_WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")


def emit(schedule: Schedule, form: str, *, program: str) -> str:
    if form == "cron":
        return _crontab(schedule, program)
    return "\n".join(_systemd(schedule, job, program) for job in schedule.jobs)


def _crontab(schedule: Schedule, program: str) -> str:
    lines = [
        "# Times are UTC. If cron does not support CRON_TZ, set the machine's time zone to UTC.",
        "CRON_TZ=UTC",
        "SHELL=/bin/sh",
        f"# Set the server's API key with {schedule.settings.token_env}=… here, or in cron's environment.",
    ]
    for job in schedule.jobs:
        # flock keeps a job from overlapping with itself. For cron, an unescaped % is a newline.
        command = shlex.join([program, *schedule.command_of(job)]).replace("%", r"\%")
        lines += [
            f"# {job.name}",
            f"{job.cron.text} flock --nonblock /tmp/topics-spark-{job.name}.lock {command}",
        ]
    return "\n".join(lines) + "\n"


# ── systemd ───────────────────────────────────────────────────────────────────────────


def _systemd(schedule: Schedule, job: Job, program: str) -> str:
    name = f"topics-spark-{job.name}"
    command = " ".join(_systemd_word(word) for word in (program, *schedule.command_of(job)))
    calendar = "\n".join(f"OnCalendar={when}" for when in on_calendar(job.cron))
    return f"""\
# /etc/systemd/system/{name}.service
[Unit]
Description=topics: {job.name}
After=network-online.target

[Service]
Type=oneshot
# {schedule.settings.token_env}=… (the server's API key)
EnvironmentFile=-/etc/topics/spark.env
ExecStart={command}
# 4: another job is running; not a failure.
SuccessExitStatus=4
KillSignal=SIGINT
TimeoutStopSec=60

# /etc/systemd/system/{name}.timer
[Unit]
Description=topics: timer of {job.name}

[Timer]
{calendar}
Persistent=true

[Install]
WantedBy=timers.target
"""


def _systemd_word(word: str) -> str:
    """Quote a word for systemd, for which % and $ are special."""
    return json.dumps(word, ensure_ascii=False).replace("%", "%%").replace("$", "$$")


def on_calendar(cron: Cron) -> list[str]:
    """OnCalendar expressions. Two of them if cron means either a day of the month or a weekday."""
    fields = CronSim(cron.text, datetime(2024, 1, 1, tzinfo=UTC))
    if any(not isinstance(day, int) for day in fields.weekdays) or min(fields.days) < 0:
        raise BadSchedule(f"cron {cron.text!r}: systemd has no equivalent of L and #")
    weekdays = sorted({day % 7 for day in fields.weekdays})
    days = _set(fields.days, 31)
    names = "" if len(weekdays) == 7 else ",".join(_WEEKDAYS[day] for day in weekdays) + " "
    time = f"{_set(fields.hours, 24)}:{_set(fields.minutes, 60)}:00 UTC"
    months = _set(fields.months, 12)
    if fields.day_and or not names or days == "*":
        return [f"{names}*-{months}-{days} {time}"]
    return [f"*-{months}-{days} {time}", f"{names}*-{months}-* {time}"]


def _set(values: set[int], every: int) -> str:
    return "*" if len(values) == every else ",".join(f"{value:02d}" for value in sorted(values))
