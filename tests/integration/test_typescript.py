"""Types that are generated from the OpenAPI document fit a program that reads, works and handles errors.

Method: openapi-typescript makes the types, and the compiler checks `typescript/program.ts` with `--strict`. The packages come
from npm's cache or registry; without node or them the test is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.support.length import only_long
from topics.protocols.http.openapi.document import document

PROGRAM = Path(__file__).parent / "typescript"


@only_long(
    "test_openapi.py shows that no answer is of an unknown type; this compiles a program, which takes a minute"
)
def test_a_strict_program_compiles(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("the types are not compiled: node and npm are not installed")
    folder = shutil.copytree(PROGRAM, tmp_path / "program")
    install = [npm, "install", "--prefer-offline", "--no-audit", "--no-fund"]
    done = subprocess.run(install, check=False, cwd=folder, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.skip(f"the types are not compiled: npm cannot install its packages: {done.stderr[-300:]}")
    (folder / "document.json").write_bytes(msgspec.json.encode(document("1")))
    programs = folder / "node_modules" / ".bin"
    for command in (["openapi-typescript", "document.json", "-o", "topics.d.ts"], ["tsc", "-p", "."]):
        done = subprocess.run(
            [programs / command[0], *command[1:]],
            check=False,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
