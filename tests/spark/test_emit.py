"""The jobs of a schedule as systemd units and crontab lines."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from spark_pipeline.schedule.config import Schedule, load
from spark_pipeline.schedule.emit import emit, on_calendar
from spark_pipeline.schedule.timing import Cron
from tests.support.server import ROOT

DEPLOYED = ROOT / "deploy" / "spark" / "schedule.toml"


def deployed() -> Schedule:
    return load(DEPLOYED)


def test_the_schedule_of_the_image_is_sound() -> None:
    schedule = deployed()
    assert [job.run for job in schedule.jobs] == ["compact", "report", "scrub"]
    assert schedule.settings.state.startswith("/reports/")


@pytest.mark.parametrize(
    ("cron", "calendar"),
    [
        ("15 2 * * *", ["*-*-* 02:15:00 UTC"]),
        ("*/20 * * * *", ["*-*-* *:00,20,40:00 UTC"]),
        ("30 4 * * 0", ["Sun *-*-* 04:30:00 UTC"]),
        ("0 0 1 JAN 1-5", ["*-01-01 00:00:00 UTC", "Mon,Tue,Wed,Thu,Fri *-01-* 00:00:00 UTC"]),
    ],
)
def test_calendars_of_systemd(cron: str, calendar: list[str]) -> None:
    assert on_calendar(Cron(cron)) == calendar
    if shutil.which("systemd-analyze"):
        subprocess.run(["systemd-analyze", "calendar", *calendar], check=True, capture_output=True)


def test_units_have_the_command_of_each_job() -> None:
    schedule = deployed()
    systemd = emit(schedule, "systemd", program="/opt/bin/topics-spark")
    assert systemd.count("OnCalendar=") == 3
    assert 'ExecStart="/opt/bin/topics-spark" "compact"' in systemd
    crontab = emit(schedule, "cron", program="/opt/bin/topics-spark")
    assert crontab.count("flock --nonblock") == 3
    for job in schedule.jobs:
        [line] = [line for line in crontab.splitlines() if f"topics-spark-{job.name}.lock " in line]
        command = shlex.split(line.replace(r"\%", "%").partition(".lock ")[2])
        assert command == ["/opt/bin/topics-spark", *schedule.command_of(job)]
