"""deploy/compose.yaml in a real Docker engine: `scripts/drill compose`. CI tests the files without an engine: test_image.py, test_compose.py.

Both images are built, and the project is started with its own file; a second file makes segments small and runs the jobs
every minute. Records are written until the schedule has merged cold segments and its report counts what a client counts. Then the
server's container is killed while records are written: after a start all acknowledged records must be there. Finally both
containers must stop with exit code 0.

A running engine is used if there is one. Otherwise, as root on Debian, one is installed and runs in a temporary folder until the end. Without
a registry, the base image is built from this machine's Debian, with its certificates and pip.conf.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.deploy.replay import COMPOSE, DEPLOY, inputs
from topics import Client
from topics.client import ClientError, Retries

PROJECT = "topics-drill"
IMAGES = {"topics": "topics-drill:server", "spark": "topics-drill:spark"}
TARGETS = {"topics": "server", "spark": "spark"}
BASE = "topics-drill:base"
TOPICS = ("orders", "orders.eu", "orders.eu.de")
COUNT = 1000  # records per topic
DEAD = 50  # of them, which are deleted again
PULL_S, BUILD_S, START_S, JOBS_S = 120, 1800, 300, 1200
# Settings by which everything that takes a day happens within a minute.
SERVER = {
    "TOPICS_SEGMENT_MAX_EVENTS": "100",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_WAL_SHARDS": "2",
}


class Failed(Exception):
    """A step of the drill failed."""


class Drill:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = dict(os.environ)
        self.skipped: list[str] = []
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", flush=True)

    def skip(self, text: str) -> None:
        self.skipped.append(text)
        self.say(f"skipped: {text}")

    def run(self, *command: str, timeout: float = 300, **more: str) -> str:
        shown = f"{' '.join(command[:6])} …"
        try:
            done = subprocess.run(
                command, env=self.env | more, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failed(f"{shown} did not end within {timeout:.0f} s") from None
        if done.returncode:
            raise Failed(f"{shown} ended with {done.returncode}:\n{done.stdout.strip()[-3000:]}")
        return done.stdout

    def works(self, *command: str, timeout: float = 60) -> bool:
        try:
            self.run(*command, timeout=timeout)
        except (Failed, OSError):
            return False
        return True

    def until(self, what: str, holds: Callable[[], Any], limit_s: float) -> Any:
        self.say(f"waiting: {what}")
        end = time.monotonic() + limit_s
        while True:
            if found := holds():
                return found
            if time.monotonic() > end:
                raise Failed(f"not within {limit_s:.0f} s: {what}")
            time.sleep(1)


# ---- the engine


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def need(drill: Drill, program: str, package: str) -> None:
    if shutil.which(program) is not None:
        return
    if not can_install():
        raise Failed(f"{program} is missing, and can only be installed by root on Debian")
    drill.say(f"installing {package}")
    install = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "install", "-y", package]
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # RUNLEVEL: services are not started
    try:
        drill.run(*install, timeout=BUILD_S, **quiet)
    except Failed:
        drill.run("apt-get", "-q", "update", timeout=BUILD_S)
        drill.run(*install, timeout=BUILD_S, **quiet)


@contextmanager
def engine(drill: Drill) -> Iterator[None]:
    if drill.works("docker", "version"):
        drill.say("engine: a running one is used")
        yield
        return
    need(drill, "dockerd", "docker.io")
    drill.env["DOCKER_HOST"] = f"unix://{drill.folder}/docker.sock"
    # Without changes to this machine's network: containers use a bridge, and builds the host's network.
    common = [
        "dockerd", "--data-root", f"{drill.folder}/data", "--exec-root", f"{drill.folder}/exec", "--pidfile", f"{drill.folder}/pid",
        "--host", drill.env["DOCKER_HOST"], "--bridge", "none", "--ip-forward=false", "--iptables=false", "--ip6tables=false",
    ]  # fmt: skip
    log = drill.folder / "dockerd.log"
    for storage in ([], ["--storage-driver", "vfs"]):
        with log.open("wb") as out:
            # In its own session: Ctrl-C ends the drill, which then removes its containers and stops the engine.
            process = subprocess.Popen(
                [*common, *storage], stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            end = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < end and not drill.works("docker", "version"):
                time.sleep(0.5)
            if process.poll() is None and drill.works("docker", "version"):
                drill.say(f"engine: started in {drill.folder} {' '.join(storage)}")
                yield
                return
        finally:
            process.terminate()
            process.wait(60)
            # Remaining mounts would keep the folder from being removed.
            drill.works("umount", f"{drill.folder}/exec/netns/default")
    raise Failed(f"dockerd does not start:\n{log.read_text()[-2000:]}")


# ---- the images


def base_image(drill: Drill, given: str) -> str:
    if given:
        drill.skip(f"the base image of the Dockerfile: {given} was given")
        return given
    [pinned] = re.findall(r"^ARG BASE_IMAGE=(.+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    if drill.works("docker", "image", "inspect", pinned) or drill.works(
        "docker", "pull", "-q", pinned, timeout=PULL_S
    ):
        return str(pinned)
    if not can_install():
        raise Failed(f"{pinned} cannot be pulled: name an existing image with --base-image")
    drill.skip(f"the base image {pinned}: no registry can be reached. One is built from this Debian instead")
    debian_tree(drill)
    return BASE


def debian_tree(drill: Drill) -> None:
    need(drill, "debootstrap", "debootstrap")
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.M))
    suite, tree = release["VERSION_CODENAME"], drill.folder / "base"
    shown = drill.run(
        "apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"
    )
    mirror = [line.split()[1] for line in shown.splitlines() if line.split()[0] == suite][:1]
    drill.say(f"debootstrap of {suite}")
    include = "--include=python3,python3-venv,python-is-python3,ca-certificates"
    drill.run("debootstrap", "--variant=minbase", include, suite, str(tree), *mirror, timeout=BUILD_S)
    for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
        if Path(path).exists():
            shutil.copy(path, f"{tree}{path}")
    index = [
        f"--change=ENV {name}={value}"
        for name, value in drill.env.items()
        if re.fullmatch(r"PIP_(EXTRA_)?INDEX_URL|PIP_TRUSTED_HOST", name)
    ]
    with subprocess.Popen(["tar", "-C", tree, "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(
            ["docker", "import", *index, "-", BASE], stdin=packed.stdout, env=drill.env, check=True, stdout=subprocess.DEVNULL
        )  # fmt: skip
    shutil.rmtree(tree)


def build(drill: Drill, base: str) -> None:
    context = inputs(drill.folder / "context")
    more = {}
    if not drill.works("docker", "buildx", "version"):
        drill.skip("BuildKit: this client has no buildx, so the classic builder is used")
        more = {"DOCKER_BUILDKIT": "0"}
    proxies = [
        f"--build-arg={name}={value}" for name, value in drill.env.items() if name.lower().endswith("_proxy")
    ]
    for service, image in IMAGES.items():
        drill.say(f"building the image of {service}")
        drill.run(
            "docker", "build", "--network=host", f"--build-arg=BASE_IMAGE={base}", *proxies, f"--file={DEPLOY}/Dockerfile",
            f"--target={TARGETS[service]}", f"--tag={image}", str(context), timeout=BUILD_S, **more,
        )  # fmt: skip


# ---- the project


class Project:
    def __init__(self, drill: Drill) -> None:
        self.drill = drill
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        # As after a plain `docker compose up`, whatever the caller's environment.
        for name in [name for name in drill.env if name.startswith("TOPICS_")]:
            del drill.env[name]
        drill.env["TOPICS_PORT"] = str(port)
        self.url = f"http://127.0.0.1:{port}"
        self.client = Client(self.url)
        self.command = self._compose()

    def _compose(self) -> list[str]:
        drill, own = self.drill, DEPLOY / "compose.yaml"
        if drill.works("docker", "compose", "version"):
            program = ["docker", "compose"]
        else:
            need(drill, "docker-compose", "docker-compose")
            program = ["docker-compose"]
            if drill.run("docker-compose", "version", "--short").startswith("1."):
                drill.skip("compose 2: version 1 is installed, which gets the file without its line `name:`")
                text = re.sub(r"^name:.*\n", "", own.read_text(), flags=re.M)
                own = drill.folder / "compose.yaml"
                own.write_text(text)
        schedule = drill.folder / "schedule.toml"
        text = (DEPLOY / "spark" / "schedule.toml").read_text()
        schedule.write_text(re.sub(r'^cron = ".*"', 'cron = "* * * * *"', text, flags=re.M))
        second = drill.folder / "drill.yaml"
        services: dict[str, Any] = {name: {"image": image} for name, image in IMAGES.items()}
        services["topics"]["environment"] = SERVER
        files = COMPOSE["services"]["topics"]["ulimits"]["nofile"]["hard"]
        limit = f"--ulimit=nofile={files}:{files}"
        if not drill.works("docker", "run", "--rm", limit, "--entrypoint=true", IMAGES["topics"]):
            here = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            drill.skip(f"the limit of {files} open files: on this machine the engine may set {here}")
            services["topics"]["ulimits"] = {"nofile": {"soft": here, "hard": here}}
        services["spark"]["volumes"] = [f"{schedule}:/etc/topics/schedule.toml:ro"]
        second.write_text(json.dumps({"services": services}))
        return [
            *program,
            "-f",
            str(own),
            "-f",
            str(second),
            "--project-directory",
            str(DEPLOY),
            "-p",
            PROJECT,
        ]

    def __call__(self, *arguments: str, timeout: float = 300) -> str:
        return self.drill.run(*self.command, *arguments, timeout=timeout)

    def container(self, service: str) -> str:
        return self("ps", "-q", "-a", service).strip()

    def state(self, service: str) -> Mapping[str, Any]:
        shown = self.drill.run("docker", "inspect", self.container(service))
        return json.loads(shown)[0]["State"]

    def is_healthy(self) -> bool:
        return self.state("topics").get("Health", {}).get("Status") == "healthy"

    def in_spark(self, *command: str) -> str:
        """Output of a command in the container of the jobs; empty if it fails: a file may not be there yet."""
        try:
            return self.drill.run("docker", "exec", self.container("spark"), *command)
        except Failed:
            return ""

    def runs(self, job: str) -> list[dict[str, Any]]:
        shown = self.in_spark("cat", "/reports/schedule.json")
        return json.loads(shown)["jobs"].get(job, {}).get("runs", []) if shown else []

    def reported(self) -> dict[str, int]:
        """Live records of each topic according to the last report."""
        shown = self.in_spark("cat", "/reports/report.json")
        if not shown:
            return {}
        return {
            name: int(figures["records"]["live"]) for name, figures in json.loads(shown)["topics"].items()
        }

    def records(self) -> dict[str, dict[int, Any]]:
        return {topic: {one.seq: one.data for one in self.client.records(topic)} for topic in TOPICS}


def write(drill: Drill, project: Project) -> None:
    drill.say(f"writing {COUNT} records to each of {', '.join(TOPICS)}, and deleting {DEAD} of each")
    for topic in TOPICS:
        for first in range(0, COUNT, 100):
            project.client.write_many(topic, [{"n": n, "text": "x" * 500} for n in range(first, first + 100)])
        project.client.delete(topic, seqs=list(range(1, DEAD + 1)))


def wait_for_jobs(drill: Drill, project: Project) -> None:
    def has_merged() -> bool:
        for run in project.runs("nightly-compact"):
            if run["result"] not in ("done", "later", "cannot"):
                raise Failed(f"nightly-compact: {run['result']}: {run['message']}")
            if run["result"] == "done" and run["figures"].get("bytes_out"):
                return True
        return False

    drill.until("the schedule has merged cold segments", has_merged, JOBS_S)
    [figures] = [
        run["figures"] for run in project.runs("nightly-compact") if run["figures"].get("bytes_out")
    ][:1]
    drill.say(f"merged: {figures['bytes_in']:.0f} bytes became {figures['bytes_out']:.0f}")
    is_reported(drill, project)
    drill.until("the schedule has scrubbed", lambda: project.runs("weekly-scrub"), JOBS_S)
    if project.runs("weekly-scrub")[-1]["result"] != "done":
        raise Failed(f"weekly-scrub: {project.runs('weekly-scrub')[-1]}")


def is_reported(drill: Drill, project: Project) -> None:
    read = {topic: len(records) for topic, records in project.records().items()}
    drill.until(f"the report has {read}", lambda: project.reported() == read, JOBS_S)
    if "</html>" not in project.in_spark("cat", "/reports/report.html"):
        raise Failed("report.html is incomplete")


def kill(drill: Drill, project: Project) -> None:
    """Kill the server while records are written; afterwards compare the acknowledged ones, and all earlier ones."""
    before = project.records()
    acked: dict[int, Any] = {}

    def go_on_writing() -> None:
        client = Client(project.url, retries=Retries(0))
        try:
            for n in range(1 << 30):
                acked[client.write(TOPICS[0], {"late": n}).last_seq] = {"late": n}
        except ClientError:
            pass  # killed

    writer = threading.Thread(target=go_on_writing)
    writer.start()
    drill.until("records are written", lambda: len(acked) > 100, START_S)
    drill.say("killing the server's container with SIGKILL")
    drill.run("docker", "kill", "--signal=KILL", project.container("topics"))
    writer.join()
    project("start", "topics")
    drill.until("the server is healthy again", project.is_healthy, START_S)
    after = project.records()
    before[TOPICS[0]] |= acked
    for topic, records in before.items():
        # The interrupted write may be there or not.
        extra = after[topic].keys() - records.keys()
        if {seq: after[topic].get(seq) for seq in records} != records or len(extra) > 1:
            missing = sorted(records.keys() - after[topic].keys())
            raise Failed(f"{topic} has changed: missing {missing[:10]}, new {sorted(extra)[:10]}")
    drill.say(
        f"compared: {sum(map(len, before.values()))} records, {len(acked)} of them written until the kill"
    )


def stop(drill: Drill, project: Project) -> None:
    drill.say("stopping")
    project("stop", timeout=180)
    codes = {service: project.state(service)["ExitCode"] for service in IMAGES}
    if any(codes.values()):
        raise Failed(f"exit codes of a stop: {codes}\n{project('logs', '--tail=30')}")


def up_to_stop(drill: Drill, base: str) -> None:
    images = base_image(drill, base)
    build(drill, images)
    project = Project(drill)
    try:
        drill.say("bringing the project up")
        project("up", "-d", "--no-build", timeout=START_S)
        drill.until("the server is healthy", project.is_healthy, START_S)
        write(drill, project)
        wait_for_jobs(drill, project)
        kill(drill, project)
        is_reported(drill, project)
        stop(drill, project)
        drill.skip("Prometheus and Grafana (profile monitoring): their images come from a registry")
    except BaseException:
        drill.say("failed; the last lines of the containers:")
        drill.works(*project.command, "stop")
        with suppress(Failed):
            print(project("logs", "--no-color", "--tail=40"), flush=True)
        raise
    finally:
        drill.say("removing containers, volumes and images")
        drill.works(*project.command, "down", "-v", "--remove-orphans", timeout=180)
        drill.works("docker", "image", "rm", "-f", *IMAGES.values(), BASE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/drill compose", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--base-image",
        metavar="image",
        default="",
        help="base image [that of the Dockerfile]",
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it cleans up
    # Not in /tmp, which may be in memory: images take gigabytes.
    folder = Path(tempfile.mkdtemp(prefix="topics-drill-", dir="/var/tmp"))
    drill = Drill(folder)
    try:
        with engine(drill):
            up_to_stop(drill, arguments.base_image)
    except Failed as error:
        drill.say(f"FAILED: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    drill.say("passed" + "".join(f"\n  skipped: {text}" for text in drill.skipped))
    return 0


if __name__ == "__main__":
    sys.exit(main())
