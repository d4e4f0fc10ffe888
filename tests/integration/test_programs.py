"""Goal: behaviour that only a separate process shows: imports, terminals, stderr, other string hashes.

Method: small programs, started with this interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.cli.test_disk_usage import data as data
from tests.unit.cli.test_disk_usage import size_of
from tests.unit.scripts.peers.test_report import made_up
from topics import __version__
from topics.protocols.http.openapi import document as openapi

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_package_is_imported_without_the_client() -> None:
    program = (
        "import sys, topics; before = set(sys.modules); topics.Client; after = set(sys.modules); topics.AsyncClient;"
        "print(*('msgspec' in before, 'topics.client' in before, 'topics.client' in after, 'aiohttp' in after,"
        " 'numpy' in after, 'aiohttp' in sys.modules, hasattr(topics, 'nothing')))"
    )
    assert run("-c", program).stdout == "False False True False False True False\n"


def test_the_openapi_document_is_printed() -> None:
    assert json.loads(run("-m", "topics.protocols.http.openapi.document").stdout) == openapi.document(
        __version__
    )


def test_du_shows_progress_on_a_terminal(data: Path) -> None:
    """A progress line on a terminal, which is erased at the end; none elsewhere."""
    ours, theirs = os.openpty()
    command = ["-m", "topics.cli", "du", str(data), "--json"]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        done = subprocess.run(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=theirs, check=True, cwd=ROOT
        )
        os.close(theirs)
        shown = screen.read(1 << 16)
    assert b"files" in shown
    assert shown.endswith(b"\r\x1b[K")
    assert json.loads(done.stdout)["hot_bytes"] == size_of(data)
    assert run(*command).stderr == ""


LOGGING = """
import logging, os
from topics.system import logs
from topics.api.api_keys import secrets_of
from topics.system.settings import Settings
settings = Settings.from_env(os.environ)
for chosen in ("json", "human", "auto"):
    logs.configure("test", chosen, secrets_of(settings.api_keys))
    logging.getLogger("topics.x").info("settings %s keys %s", settings, settings.api_keys)
    logging.getLogger("other").info("environment %s", dict(os.environ))
    logging.getLogger("other").debug("not shown")
    try:
        int(settings.api_keys)
    except ValueError:
        logging.getLogger("y").exception("failed")
"""


def test_a_process_logs_to_stderr_without_its_keys() -> None:
    done = run("-c", LOGGING, TOPICS_API_KEYS="swordfish:read,tunafish")
    assert done.stdout == ""
    assert "fish" not in done.stderr
    assert "not shown" not in done.stderr
    lines = done.stderr.splitlines()
    # A pipe is not a terminal, so auto means json.
    assert [json.loads(line)["process"] for line in (*lines[:3], *lines[-3:])] == ["test"] * 6
    assert len(lines) > 9


def test_string_hashes_change_neither_simulated_disks_nor_reports(tmp_path: Path) -> None:
    results, disks, pages = tmp_path / "results.json", set(), []
    results.write_text(json.dumps(made_up()))
    program = "from tests.unit.support.test_sim_disk import busy_trace; print('|'.join(busy_trace(3)))"
    for hashes in ("1", "2"):
        disks.add(run("-c", program, PYTHONHASHSEED=hashes).stdout)
        docs = tmp_path / hashes
        (docs / "benchmarks").mkdir(parents=True)
        (docs / "benchmarks" / "batch.svg").write_text("of an earlier run")
        run("scripts/peers/report.py", str(results), "--docs", str(docs), PYTHONHASHSEED=hashes)
        pages.append({str(f.relative_to(docs)): f.read_bytes() for f in docs.rglob("*") if f.is_file()})
    assert len(disks) == 1 and disks != {""}
    assert pages[0] == pages[1]
    assert "benchmarks/batch.svg" not in pages[0]
