"""Goal: the sdist builds the wheel, and the wheel with its declared packages and no others is a working server and
command; licence, version and list of contents are included and agree.

Method: built from a clean tree as pip would. The wheel is installed into an empty environment, which gets the files of the
declared packages and their dependencies from this one; so a package that is used but not declared is missing there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import topics
from tests.deploy.packages import closure, link, metadata
from tests.support.server import START_S, until

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600
PACKAGES = ("topics", "workers", "router", "spark_pipeline", "pyspark_topics")


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    tree, out = clean_tree(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree))
    return out


def clean_tree(tree: Path) -> Path:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    ):
        if name and not name.startswith(("tests/", "docs/", "scripts/")) and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    site = Path(run(str(python), "-c", "import site; print(site.getsitepackages()[0])").strip())
    for needed in closure(wheel):
        link(needed, site)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run(*pip, "install", "-q", "--no-index", "--no-deps", "--no-compile", str(wheel))
    run(*pip, "check")
    return python.parent


def run(*command: str, env: dict[str, str] | None = None, given: str = "") -> str:
    done = subprocess.run(
        command,
        cwd="/",
        env=outside() if env is None else env,
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def outside() -> dict[str, str]:
    """A clean environment. Spark's tests have put the tree on this process's path, where pip would find the package."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TOPICS_", "PYTHON"))}


@pytest.mark.timeout(900)  # it builds and installs
def test_a_release_from_its_build_to_its_list_of_contents(
    built: Path, wheel: Path, installed: Path, address: dict[str, str], tmp_path: Path
) -> None:
    """One test, because all parts need the same build, and several processes would each make it."""
    says_its_version_in_one_place(built, wheel)
    has_the_licence_in_both(built, wheel)
    has_every_module_and_no_test(wheel)
    serves_writes_and_reads(installed, address)
    lacks_what_is_optional(installed)
    has_a_list_of_contents(installed, wheel, tmp_path)


def test_an_editable_install_is_on_the_path(tmp_path: Path) -> None:
    """Spark finds data sources by a scan of the path. A folder `topics` beside a script, such as a clone, must not hide the package."""
    tree, python = clean_tree(tmp_path / "tree"), str(tmp_path / "venv" / "bin" / "python")
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    build = "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_editable(sys.argv[2])"
    run(sys.executable, "-c", build, str(tree), str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "-q", "--no-index", "--no-deps", "--no-compile", str(wheel))
    scan = "import pkgutil; print([one.name for one in pkgutil.iter_modules() if one.name.startswith('pyspark_')])"
    assert run(python, "-c", scan) == "['pyspark_topics']\n"
    (tmp_path / "topics").mkdir()
    (tmp_path / "first.py").write_text("import topics\nprint(topics.__version__)\n")
    assert run(python, str(tmp_path / "first.py")) == f"{topics.__version__}\n"


# ---- contents


def says_its_version_in_one_place(built: Path, wheel: Path) -> None:
    assert metadata(wheel)["Version"] == [topics.__version__]
    assert {path.name for path in built.iterdir()} == {
        f"topics-{topics.__version__}.tar.gz", f"topics-{topics.__version__}-py3-none-any.whl",
    }  # fmt: skip
    said = [
        path
        for path in [
            ROOT / "pyproject.toml",
            *(ROOT / "topics").rglob("*.py"),
            *(ROOT / "router").rglob("*.py"),
        ]
        if f'"{topics.__version__}"' in path.read_text()
    ]
    assert said == [ROOT / "topics" / "__init__.py"]


def has_the_licence_in_both(built: Path, wheel: Path) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert metadata(wheel)["License-Expression"] == ["Apache-2.0"]
    assert metadata(wheel)["License-File"] == ["LICENSE"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert archive.read(name) == licence
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as sdist:
        file = sdist.extractfile(f"topics-{topics.__version__}/LICENSE")
        assert file is not None and file.read() == licence


def has_every_module_and_no_test(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".properties", ".typed"):
                assert str(path.relative_to(ROOT)) in packed
    tops = {name.partition("/")[0] for name in packed}
    assert tops == {*PACKAGES, f"topics-{topics.__version__}.dist-info"}


# ---- behaviour


@pytest.fixture
def address(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment for commands that connect to a server of the wheel."""
    folder = tmp_path_factory.mktemp("served")
    clean = outside()
    env = {
        **clean, "TOPICS_DATA_DIR": str(folder / "data"), "TOPICS_PORT": "0", "TOPICS_PORT_FILE": str(folder / "port"),
        "TOPICS_WAL_SHARDS": "1", "TOPICS_WAL_FILE_BYTES": str(1 << 20), "HOME": str(folder),
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [installed / "topics", "serve"], cwd=folder, env=env, stdout=log, stderr=log
        )
    try:
        until(lambda: (folder / "port").exists() or server.poll() is not None, START_S)
        assert server.poll() is None, (folder / "log").read_text()
        yield {**clean, "TOPICS_URL": f"http://{(folder / 'port').read_text().strip()}", "HOME": str(folder)}
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    finally:
        server.kill()
        server.wait()


def serves_writes_and_reads(installed: Path, address: dict[str, str]) -> None:
    command = str(installed / "topics")
    assert topics.__version__ in run(command, "--version")
    run(command, "health", "--wait", "60", env=address)
    run(command, "pub", "orders", env=address, given='{"item":"tea"}\n')
    assert json.loads(run(command, "read", "orders", "--json", env=address))["data"] == {"item": "tea"}
    text = "from topics import Client; print(Client().get_topic('orders').head_seq)"
    assert run(str(installed / "python"), "-c", text, env=address) == "1\n"


def lacks_what_is_optional(installed: Path) -> None:
    for name in ("pyspark", "opentelemetry", "pytest", "pip"):
        done = subprocess.run(
            [installed / "python", "-c", f"import {name}"], env=outside(), capture_output=True, check=False
        )
        assert b"ModuleNotFoundError" in done.stderr, name
    done = subprocess.run(
        [installed / "topics-spark", "doctor"],
        env=outside(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode != 0
    assert "topics[spark]" in done.stdout + done.stderr


def has_a_list_of_contents(installed: Path, wheel: Path, tmp_path: Path) -> None:
    """Built by scripts/release in the same way."""
    out = tmp_path / "topics.cdx.json"
    run(
        str(ROOT / "scripts" / "sbom"),
        str(out),
        str(installed / "python"),
        env={**os.environ, "VIRTUAL_ENV": ""},
    )
    bom = json.loads(out.read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    listed = {component["name"].lower(): component for component in bom["components"]}
    wanted = {package.name.lower(): package.version for package in closure(wheel)}
    assert {name: found["version"] for name, found in listed.items()} == wanted | {
        "topics": topics.__version__
    }
    assert all(component.get("licenses") for component in listed.values())
    assert all(
        component["purl"].startswith("pkg:pypi/") for name, component in listed.items() if name != "topics"
    )
