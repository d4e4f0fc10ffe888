"""Goal: the image of deploy/Dockerfile can be built from its declared inputs, starts, becomes healthy and stops cleanly.

Method: without an engine. The steps are run in a clean directory (replay.py) with the files that .dockerignore lets
in; then entry point, health check and stop signal are used as an engine would, as another user if this one is root.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.deploy.replay import COMPOSE, DEPLOY, Replay, inputs, parse
from tests.support.length import is_long

IS_ROOT = os.geteuid() == 0
PATIENCE_S = 600


@pytest.fixture
def image() -> Iterator[Replay]:
    # Not below pytest's folder, which is closed to other users: the image's user must be able to enter.
    with tempfile.TemporaryDirectory(prefix="topics-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        replay = Replay(DEPLOY / "Dockerfile", inputs(folder / "context"), folder / "root")
        if not IS_ROOT:
            print("tests/deploy: not root, so the image's server runs as this user", file=sys.stderr)
            runtime = replay.stages["runtime"]
            runtime.steps = [step for step in runtime.steps if step[0] != "RUN"]
        replay.build("server")
        yield replay


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def as_user(image: Replay) -> dict[str, int]:
    uid, _, gid = image.user.partition(":")
    assert int(uid) > 0
    # Interpreter and packages of this machine may be readable for their owner alone, unlike those of the image.
    places = [*Path(sys.executable).resolve().parents, *Path(aiohttp.__file__).resolve().parents]
    can_go = all(path.stat().st_mode & 0o001 for path in places)
    return {"user": int(uid), "group": int(gid)} if IS_ROOT and can_go else {}


@pytest.mark.timeout(900)  # it installs packages
def test_the_image_from_its_build_to_its_stop(image: Replay) -> None:
    """One test, because each part needs the one before, and several processes would each build the image."""
    has_only_what_runs(image)
    wanted = COMPOSE["services"]["topics"]["environment"]
    given = {name: value.partition(":-")[2].rstrip("}") for name, value in wanted.items()}
    env = image.environment(**given, TOPICS_PORT=str(free_port()))
    command = [*image.entry, *image.arguments]
    with (image.root / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, cwd=image.root / "data", stderr=log, stdout=log, **as_user(image)
        )  # type: ignore[call-overload]
    try:
        becomes_healthy(image, process, env)
        writes_nowhere_but_to_its_volume(image)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0, (image.root / "server.log").read_text()
    finally:
        process.kill()
        process.wait()
    checked = subprocess.run(image.health, env=env, capture_output=True, text=True, check=False)
    assert checked.returncode == 3
    assert "is the server running" in checked.stdout


def becomes_healthy(image: Replay, process: subprocess.Popen[bytes], env: dict[str, str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        checked = subprocess.run(
            image.health, env=env, capture_output=True, text=True, check=False, **as_user(image)
        )  # type: ignore[call-overload]
        if checked.returncode == 0 or time.monotonic() > end or process.poll() is not None:
            break
    assert checked.returncode == 0, checked.stdout + checked.stderr + (image.root / "server.log").read_text()
    assert (image.root / "data" / "hot" / "layout.json").exists()


def writes_nowhere_but_to_its_volume(image: Replay) -> None:
    """With compose the root of the image is read-only."""
    since = (image.root / "etc" / "passwd").stat().st_mtime
    new = [
        path
        for part in ("opt", "src", "etc")
        for path in (image.root / part).rglob("*")
        if path.is_file()
        and path.stat().st_mtime > since
        and "opt/topics" in str(path)
        and path.suffix == ".pyc"
    ]
    assert not [path for path in new if path.stat().st_uid != os.geteuid()]


def has_only_what_runs(image: Replay) -> None:
    python = f"{image.root}/opt/topics/bin/python"
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "list", "--format=freeze"],
        env=image.environment(), capture_output=True, text=True, check=True,
    ).stdout.lower()  # fmt: skip
    names = {line.partition("==")[0] for line in listed.splitlines()}
    assert {"topics", "aiohttp", "pyzmq", "opentelemetry-sdk"} <= names
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "pyspark"}
    installed = {line for line in listed.splitlines() if not line.startswith(("topics", "pip", "setuptools"))}
    pinned = {line for line in (DEPLOY / "constraints.txt").read_text().lower().splitlines() if "==" in line}
    assert {line.partition("==")[0] for line in installed} <= {line.partition("==")[0] for line in pinned}
    if is_long():
        assert installed <= pinned


def test_every_base_is_pinned() -> None:
    stages = parse((DEPLOY / "Dockerfile").read_text())
    names = {stage.name for stage in stages}
    assert all(stage.base in names or stage.base.count(".") >= 2 for stage in stages)
    assert stages[-1].name == "server"
