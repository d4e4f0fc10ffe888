"""Runs the steps of a Dockerfile without an engine, in a directory that stands for the root of the image.

Every path of the image that a step may write (`ROOTS`) is placed below that directory, also inside commands. Files are copied
from a clean tree of the declared inputs, so a file that the image would lack is missing here, too. All stages share the
directory, so `COPY --from` does nothing. Packages come from the tests' environment, or with `--long` from the index in
the versions of constraints.txt.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import yaml

from tests.deploy.packages import closure, link
from tests.support.length import is_long

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
INSTALL = re.compile(
    r"python -m venv (?P<folder>\S+) && \S+/bin/python -m pip install --no-cache-dir"
    r' --constraint deploy/constraints\.txt "\.\[(?P<extras>[\w,]+)\]"$'
)
ROOTS = ("/opt/topics", "/src", "/data", "/etc/topics", "/etc/passwd", "/etc/group")


def inputs(target: Path) -> Path:
    """A tree of the project's files that .dockerignore does not exclude."""
    kept = [
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *kept],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.split():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return target


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def parse(text: str) -> list[Stage]:
    stages: list[Stage] = []
    arguments: dict[str, str] = {}
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "ARG" and not stages:
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif word == "FROM":
            base, _, name = Template(rest).substitute(arguments).partition(" AS ")
            stages.append(Stage(name.strip(), base.strip()))
        else:
            stages[-1].steps.append((word, re.sub(r"\s+", " ", rest).strip()))
    return stages


class Replay:
    def __init__(self, dockerfile: Path, context: Path, root: Path) -> None:
        self.stages = {stage.name: stage for stage in parse(dockerfile.read_text())}
        self.context, self.root = context, root
        self.env: dict[str, str] = {}
        self.entry: list[str] = []
        self.arguments: list[str] = []
        self.health: list[str] = []
        self.user = ""
        self.workdir = "/"
        (root / "etc").mkdir(parents=True)
        for name in ("passwd", "group"):
            (root / "etc" / name).write_text("")

    def here(self, text: str) -> str:
        """Replace paths of the image in a text by paths of this machine."""
        for path in ROOTS:
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w-])", f"{self.root}{path}", text)
        return text

    def build(self, target: str) -> None:
        stage = self.stages[target]
        copied = [rest for word, rest in stage.steps if word == "COPY" and rest.startswith("--from=")]
        for source in (rest.removeprefix("--from=").split()[0] for rest in copied):
            self.build(source)
        if stage.base in self.stages:
            self.build(stage.base)
        for word, rest in stage.steps:
            getattr(self, f"_{word.lower()}")(rest)

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a process in the image; of this process only the network's settings."""
        passed = {
            k: v
            for k, v in os.environ.items()
            if k.lower().endswith("_proxy") or k.startswith(("PIP_", "SSL_", "UV_"))
        }
        return {"PATH": os.environ["PATH"], "HOME": str(self.root), **passed, **self.env, **more}

    # -- instructions --------------------------------------------------------------------------------------

    def _workdir_path(self) -> Path:
        return Path(self.here(self.workdir))

    def _copy(self, rest: str) -> None:
        if rest.startswith("--from="):
            return
        *sources, target = rest.split()
        goal = Path(self.here(target)) if target.startswith("/") else self._workdir_path() / target
        for source in sources:
            found = self.context / source
            assert found.exists(), f"{source} is excluded by .dockerignore or does not exist"
            if found.is_dir():
                shutil.copytree(found, goal, dirs_exist_ok=True)
            else:
                is_folder = target.endswith("/") or target == "."
                where = goal / found.name if is_folder else goal
                where.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, where)

    def _run(self, rest: str) -> None:
        self._workdir_path().mkdir(parents=True, exist_ok=True)
        if (found := INSTALL.match(rest)) and not is_long():
            self._install(Path(self.here(found["folder"])), found["extras"].split(","))
        else:
            self._call("sh", "-euc", self.here(rest))

    def _install(self, folder: Path, extras: list[str]) -> None:
        """Like the step, but with the packages of this environment: an index takes half a minute."""
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        wheels = self.root / "wheels"
        self._call(sys.executable, "-m", "venv", "--without-pip", str(folder))
        self._call(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), ".")
        (wheel,) = wheels.iterdir()
        (site,) = folder.glob("lib/python*/site-packages")
        for package in closure(wheel, extras):
            link(package, site)
        self._call(
            *pip, "--python", f"{folder}/bin/python", "install", "-q", "--no-index", "--no-deps", str(wheel)
        )

    def _call(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self._workdir_path(), env=self.environment(),
            capture_output=True, text=True, timeout=800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    def _env(self, rest: str) -> None:
        self.env |= {name: self.here(value) for name, value in (pair.split("=", 1) for pair in rest.split())}

    def _workdir(self, rest: str) -> None:
        self.workdir = rest

    def _user(self, rest: str) -> None:
        self.user = rest

    def _entrypoint(self, rest: str) -> None:
        self.entry = json.loads(self.here(rest))

    def _cmd(self, rest: str) -> None:
        self.arguments = json.loads(self.here(rest))

    def _healthcheck(self, rest: str) -> None:
        self.health = json.loads(self.here(rest.partition("CMD ")[2]))

    def _volume(self, rest: str) -> None:
        Path(self.here(rest)).mkdir(parents=True, exist_ok=True)

    def _expose(self, rest: str) -> None:
        pass

    def _stopsignal(self, rest: str) -> None:
        assert rest == "SIGTERM"
