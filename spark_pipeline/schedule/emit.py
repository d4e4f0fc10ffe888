"""The same jobs for other schedulers: units of systemd, CronJobs of Kubernetes, lines of a crontab, DAGs of Airflow."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from cronsim import CronSim

from spark_pipeline.schedule.config import BadSchedule, Job, Schedule
from spark_pipeline.schedule.timing import Cron

FORMS = ("systemd", "kubernetes", "cron", "airflow")
_WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")


def emit(schedule: Schedule, form: str, *, program: str, image: str, claims: Sequence[str] = ()) -> str:
    """`claims` are volumes of Kubernetes, as NAME=PATH."""
    if form == "cron":
        return _crontab(schedule, program)
    if form == "systemd":
        return "\n".join(_systemd(schedule, job, program) for job in schedule.jobs)
    if form == "airflow":
        return _airflow(schedule, program)
    mounts = [_mount(claim) for claim in claims]
    return "".join(_kubernetes(schedule, job, image, mounts) for job in schedule.jobs)


def _crontab(schedule: Schedule, program: str) -> str:
    lines = [
        "# Times are UTC. Where a cron has no CRON_TZ, the machine's time has to be UTC.",
        "CRON_TZ=UTC",
        "SHELL=/bin/sh",
        f"# The key of the server: {schedule.settings.token_env}=… here, or in the environment of cron.",
    ]
    for job in schedule.jobs:
        # The lock keeps a job from overlapping with itself; a percent sign is a newline for cron.
        command = shlex.join([program, *schedule.command_of(job)]).replace("%", r"\%")
        lines += [
            f"# {job.name}",
            f"{job.cron.text} flock --nonblock /tmp/topics-spark-{job.name}.lock {command}",
        ]
    return "\n".join(lines) + "\n"


def _airflow(schedule: Schedule, program: str) -> str:
    jobs = ""
    for job in schedule.jobs:
        # Commands are templates there; and one that ends with .sh would be a file of one, but for the space.
        command = f"{{% raw %}}{shlex.join([program, *schedule.command_of(job)])}{{% endraw %}} "
        jobs += f"    {job.name!r}: ({job.cron.text!r}, {command!r}),\n"
    return f"""\
# A DAG for each job, for the dags folder of Airflow. Times are UTC.
# The key of the server: {schedule.settings.token_env}=… in the environment of its workers.
from datetime import datetime, timezone

from airflow import DAG

try:
    from airflow.providers.standard.operators.bash import BashOperator
except ImportError:  # Airflow 2
    from airflow.operators.bash import BashOperator

JOBS = {{
{jobs}}}

for name, (cron, command) in JOBS.items():
    with DAG(
        f"topics-spark-{{name}}",
        schedule=cron,
        start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
        catchup=False,
        max_active_runs=1,
        tags=["topics"],
    ) as dag:
        # 4: somebody else is at it, which is no failure.
        BashOperator(task_id="run", bash_command=command, skip_on_exit_code=4)
    globals()[dag.dag_id] = dag
"""


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
# {schedule.settings.token_env}=… the key of the server
EnvironmentFile=-/etc/topics/spark.env
ExecStart={command}
# Somebody else is at it: no failure of this unit.
SuccessExitStatus=4
KillSignal=SIGINT
TimeoutStopSec=60

# /etc/systemd/system/{name}.timer
[Unit]
Description=topics: when {job.name} runs

[Timer]
{calendar}
Persistent=true

[Install]
WantedBy=timers.target
"""


def _systemd_word(word: str) -> str:
    """Quoted as systemd wants it: percent signs and dollars mean something to it."""
    return json.dumps(word, ensure_ascii=False).replace("%", "%%").replace("$", "$$")


def on_calendar(cron: Cron) -> list[str]:
    """The times as systemd writes them. Two lines where cron means one day or the other."""
    found = CronSim(cron.text, datetime(2024, 1, 1, tzinfo=UTC))
    if any(not isinstance(day, int) for day in found.weekdays) or min(found.days) < 0:
        raise BadSchedule(f"cron {cron.text!r}: L and # have no like in systemd")
    weekdays = sorted({day % 7 for day in found.weekdays})
    days = _set(found.days, 31)
    names = "" if len(weekdays) == 7 else ",".join(_WEEKDAYS[day] for day in weekdays) + " "
    time = f"{_set(found.hours, 24)}:{_set(found.minutes, 60)}:00 UTC"
    months = _set(found.months, 12)
    if found.day_and or not names or days == "*":
        return [f"{names}*-{months}-{days} {time}"]
    return [f"*-{months}-{days} {time}", f"{names}*-{months}-* {time}"]


def _set(values: set[int], every: int) -> str:
    return "*" if len(values) == every else ",".join(f"{value:02d}" for value in sorted(values))


# ── Kubernetes ────────────────────────────────────────────────────────────────────────


def _mount(claim: str) -> tuple[str, str]:
    name, _, path = claim.partition("=")
    if not name or not path.startswith("/"):
        raise BadSchedule(f"{claim!r} is no volume; one looks like topics-cold=/data/cold")
    return name, path


def _kubernetes(schedule: Schedule, job: Job, image: str, mounts: Sequence[tuple[str, str]]) -> str:
    # Strings of JSON are strings of YAML, too.
    quote = json.dumps
    arguments = "".join(f"\n                - {quote(word)}" for word in schedule.command_of(job))
    volumes = mounted = ""
    if mounts:
        mounted = "\n              volumeMounts:" + "".join(
            f"\n                - {{name: {quote(name)}, mountPath: {quote(path)}}}" for name, path in mounts
        )
        volumes = "\n          volumes:" + "".join(
            f"\n            - {{name: {quote(name)}, persistentVolumeClaim: {{claimName: {quote(name)}}}}}"
            for name, _ in mounts
        )
    token = schedule.settings.token_env
    return f"""\
---
apiVersion: batch/v1
kind: CronJob
metadata:
  name: topics-spark-{job.name[:39].rstrip("-")}
spec:
  schedule: {quote(job.cron.text)}
  timeZone: Etc/UTC
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: {int(job.window_s)}
  jobTemplate:
    spec:
      backoffLimit: 2
      template:
        spec:
          restartPolicy: Never
          securityContext: {{runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001}}
          containers:
            - name: topics-spark
              image: {quote(image)}
              args:{arguments}
              env:
                - {{name: HOME, value: /tmp}}
                - name: {quote(token)}
                  valueFrom: {{secretKeyRef: {{name: topics, key: token, optional: true}}}}{mounted}{volumes}
"""
