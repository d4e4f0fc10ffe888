"""Schedules for others: units of systemd, CronJobs of Kubernetes, lines of a crontab, DAGs of Airflow."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.schedule.config import Schedule, load
from spark_pipeline.schedule.emit import emit, on_calendar
from spark_pipeline.schedule.timing import Cron
from tests.spark.test_schedule import NIGHTLY, write
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
    import yaml

    schedule = deployed()
    arguments = {"program": "/opt/bin/topics-spark", "image": "topics-spark:1", "claims": ["cold=/data/cold"]}
    systemd = emit(schedule, "systemd", **arguments)  # type: ignore[arg-type]
    assert systemd.count("OnCalendar=") == 3
    assert 'ExecStart="/opt/bin/topics-spark" "compact"' in systemd
    assert "flock --nonblock" in emit(schedule, "cron", **arguments)  # type: ignore[arg-type]
    jobs = list(yaml.safe_load_all(emit(schedule, "kubernetes", **arguments)))  # type: ignore[arg-type]
    pod = jobs[0]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"] == schedule.command_of(schedule.jobs[0])
    assert pod["containers"][0]["volumeMounts"] == [{"name": "cold", "mountPath": "/data/cold"}]
    assert jobs[0]["spec"]["startingDeadlineSeconds"] == 3 * 3600


def test_dags_have_the_command_of_each_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is run beside stand-ins for the two classes of Airflow's that it names."""
    made: list[dict[str, Any]] = []

    class Dag:
        def __init__(self, dag_id: str, **options: Any) -> None:
            self.dag_id, self.options = dag_id, options

        def __enter__(self) -> Dag:
            return self

        def __exit__(self, *of: object) -> None: ...

    def operator(**options: Any) -> None:
        made.append(options)

    names = ("airflow", "airflow.operators", "airflow.operators.bash")
    modules = {name: types.ModuleType(name) for name in names}
    modules["airflow"].DAG = Dag  # type: ignore[attr-defined]
    modules["airflow.operators.bash"].BashOperator = operator  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    job = f'name="lake"\nrun="export"\ntopics=["it\'s.*"]\ncron="5 2 * * *"\nout="{tmp_path}/a {{{{b}}}}"'
    schedule = load(write(tmp_path, job, NIGHTLY))
    found: dict[str, Any] = {}
    exec(emit(schedule, "airflow", program="/opt/bin/topics-spark", image=""), found)
    assert found["topics-spark-nightly"].options["schedule"] == "15 2 * * *"
    for options, one in zip(made, schedule.jobs, strict=True):
        plain = options["bash_command"].removeprefix("{% raw %}").removesuffix("{% endraw %} ")
        assert shlex.split(plain) == ["/opt/bin/topics-spark", *schedule.command_of(one)]
        assert options["skip_on_exit_code"] == 4
