"""Small files of jobs and schedules with invalid contents: reported in one line, and not read into memory if they are large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_pipeline.cli import schedule
from spark_pipeline.lake.parquet import MANIFEST, read_manifest
from spark_pipeline.report import scrub_results
from spark_pipeline.report.trend import read_previous
from spark_pipeline.tasks.manifest import read_current
from tests.support.in_process import call
from tests.support.small_files import DAMAGE, check, one_line
from topics.api.errors import Corrupt


def schedule_config(path: Path, what: str) -> None:
    one_line(call(schedule.main, "emit", "--form", "cron", "--config", path), path, 3)


def schedule_state(path: Path, what: str) -> None:
    done = call(schedule.status, "--state", path)
    if what == "a dangling link":
        assert "Traceback" not in done.stderr
    else:
        one_line(done, path, 3)


def previous_report(path: Path, what: str) -> None:
    assert read_previous(path, "") is None


def scrubbed(path: Path, what: str) -> None:
    if what == "a dangling link":
        assert not scrub_results.read(path).topics
    else:
        with pytest.raises((ValueError, OSError), match=path.name):
            scrub_results.read(path)


def current(path: Path, what: str) -> None:
    if what != "a dangling link":
        with pytest.raises((Corrupt, OSError), match="CURRENT"):
            read_current(str(path.parent))


READERS: dict[str, Callable[[Path, str], None]] = {
    "schedule.toml": schedule_config,
    "schedule.json": schedule_state,
    "report.json": previous_report,
    "scrubs.json": scrubbed,
    "CURRENT": current,
}


@pytest.mark.parametrize("name", READERS)
def test_small_files(name: str, tmp_path: Path) -> None:
    check(READERS[name], name, tmp_path)


def test_a_manifest_of_the_lake_that_is_nested_deeply(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(DAMAGE["nested deeply"] or b"")
    with pytest.raises(Exception, match="restore it from a backup"):
        read_manifest(tmp_path)
