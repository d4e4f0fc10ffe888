"""The code blocks of the documentation pages, and their runner: each page is run from top to bottom.

Shell and Python blocks are run, JSON and TOML ones parsed, unless a comment in front of the block says why not
(Python is compiled anyway):

    <!-- not run: it needs Docker -->

A block of `text` that follows a block shows its output. Times, leases and the like are not compared, and `…` matches
anything. `<!-- any order -->` in front of it: its lines may come in any order.

    python -m tests.support.pages       # which blocks are not run, by reason
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tests.support.server import PATIENCE_S, ROOT

SHELL, PYTHON = ("bash", "sh", "console"), "python"
PARSED = {"json": json.loads, "toml": tomllib.loads}
# Languages that are only displayed. All others have to be listed here, or are run.
SHOWN = {"", "text", "mermaid", "js", "sql", "html", "diff", "nginx", "caddy", "yaml"}
# Lines like these are meant to be pasted, so their block must be marked as a shell block.
COMMAND = re.compile(
    r"(\$ |(sudo |[A-Z_]+=\S+ )?(\.venv/bin/|(\./)?scripts/|curl |topics |topics-spark |docker |pip |python3? ))"
)
ENDS_S = 240.0  # below the timeout of a test
STREAM_CUT = 28  # curl's exit code when --max-time ends a stream
# A stream ends after this much silence, not after a total time: a slow machine may need longer for the first bytes.
CURL = """#!/bin/sh
for word; do
    [ "$word" != --max-time ] || exec {patient} "$@"
done
exec {curl} "$@"
"""
PATIENT_CURL = """#!{python}
import os, select, subprocess, sys
words = sys.argv[1:]
at = words.index("--max-time")
silence_s = float(words[at + 1])
curl = subprocess.Popen([{curl!r}, *words[:at], *words[at + 2:]], stdout=subprocess.PIPE)
patience_s = {patience_s}
while select.select([curl.stdout], [], [], patience_s)[0]:
    piece = os.read(curl.stdout.fileno(), 65536)
    if not piece:
        sys.exit(curl.wait())
    os.write(1, piece)
    patience_s = silence_s
curl.kill()
sys.exit({code})
"""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None
    shown: str | None = None  # its expected output
    any_order: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.not_run is None and self.language in (*SHELL, PYTHON)


def pages() -> list[str]:
    """Every page, by its path from the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks(page: str) -> list[Block]:
    """The blocks of a page. The expected output of a block belongs to it, and is not a block of its own."""
    found: list[Block] = []
    for block, comment, headings in _fenced(page):
        last = found[-1] if found else None
        if (
            block.language == "text"
            and last is not None
            and last.runs
            and last.shown is None
            and not headings
        ):
            found[-1] = replace(last, shown=block.text, any_order=comment == "any order")
            continue
        reason = comment.removeprefix("not run:").strip() if comment.startswith("not run:") else None
        found.append(replace(block, not_run=reason, any_order=comment == "any order"))
    return found


def _fenced(page: str) -> Iterator[tuple[Block, str, int]]:
    """Each block, the comment in front of it, and how many headings are between it and the previous block."""
    language: str | None = None
    comment, headings, start = "", 0, 0
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if language is not None:
            if line == "```":
                yield Block(page, start, language, "".join(lines)), comment, headings
                language, comment, headings = None, "", 0
            else:
                lines.append(line + "\n")
        elif opened := re.fullmatch(r"\s*```(\w*)", line):
            assert line.startswith("```"), (
                f"{page}:{number}: a block inside a list is not found by this parser"
            )
            language, start, lines = opened[1], number, []
        elif told := re.fullmatch(r"<!-- (.*) -->", line):
            comment = told[1]
        elif line.strip():
            comment, headings = "", headings + line.startswith("#")
    assert language is None, f"{page}:{start}: the block does not end"


def not_run() -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for page in pages():
        for block in blocks(page):
            if block.not_run is not None:
                found.setdefault(block.not_run, []).append(block)
    return found


class Shell:
    """One shell for all blocks of a page, so variables and functions stay defined."""

    # Each line names a script, whose output, failures and exit status go to files next to it. A command fails where
    # `set -e` would end the script.
    DRIVER = """
        set -uE -o pipefail
        while read -r script <&3; do
            trap 'echo "$? $BASH_COMMAND" >> "$script.failed"' ERR
            . "$script" > "$script.out" 2> "$script.err" < /dev/null
            trap - ERR
            echo done >&4
        done
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._count = folder, 0
        orders, answers = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec 3<&{orders[0]} 4>&{answers[1]}\n{self.DRIVER}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(orders[0], answers[1]),
            start_new_session=True,
        )
        os.close(orders[0])
        os.close(answers[1])
        self._orders: IO[str] = os.fdopen(orders[1], "w")
        self._answers: IO[str] = os.fdopen(answers[0])

    def run(self, text: str) -> tuple[str, str, list[tuple[int, str]]]:
        """The script's output, its stderr, and the commands that failed, with their exit codes."""
        self._count += 1
        script = self._folder / f".block-{self._count}"
        script.write_text(text)
        self._orders.write(f"{script}\n")
        self._orders.flush()
        if not select.select([self._answers], [], [], ENDS_S)[0]:
            return "", "", [(1, f"it did not end within {ENDS_S:g} s")]
        ended = self._answers.readline() == ""
        said = [Path(f"{script}.{name}") for name in ("out", "err", "failed")]
        out, err, failed = (path.read_text() if path.exists() else "" for path in said)
        codes = [(int(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in failed.splitlines()]
        return out, err, [*codes, (1, "the shell ended")] if ended else codes

    def close(self) -> None:
        self._orders.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass  # the block that did not end
        finally:
            self._answers.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)  # background processes of the page
            self._process.wait()


class PageRunner:
    """Runs the blocks of a page in a folder. `places` maps paths and ports of this test to those in the pages."""

    def __init__(
        self, folder: Path, places: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        programs = folder / ".bin"
        programs.mkdir(exist_ok=True)
        for name, module in (("topics", "topics.cli"), ("topics-spark", "spark_pipeline.cli")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
            program.chmod(0o755)
        if curl := shutil.which("curl"):
            script = PATIENT_CURL.format(
                python=sys.executable, curl=curl, patience_s=PATIENCE_S, code=STREAM_CUT
            )
            plain = CURL.format(patient=shlex.quote(str(folder / ".patient-curl")), curl=shlex.quote(curl))
            for program, text in ((folder / ".patient-curl", script), (programs / "curl", plain)):
                program.write_text(text)
                program.chmod(0o755)
        self.environment = {
            **clean,
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TOPICS_CONFIG": str(folder / "contexts.json"),
            **(environment or {}),
        }
        self._commands = {".venv/bin/topics": "topics", ".venv/bin/python": sys.executable}
        self._places = dict(places)
        self._folder = folder
        self._shell: Shell | None = None
        self.names: dict[str, Any] = {"__name__": "page"}

    def run(self, block: Block) -> None:
        """Run one block. Fails when the block fails, or its output differs from the page."""
        printed = self.printed(block)
        if block.language == "console":
            compare(block, printed, _replaced(_session(block.text)[1], self._places))
        elif block.shown is not None:
            compare(block, printed, _replaced(block.shown, self._places))
        else:
            assert '{"error":' not in printed, f"{block} is refused: {printed}"

    def printed(self, block: Block) -> str:
        if block.language == PYTHON:
            return self._run_python(block, self._here(block.text))
        commands = _session(block.text)[0] if block.language == "console" else block.text
        return self._run_shell(block, self._here(commands))

    def as_shown(self, printed: str) -> str:
        """The output with this test's paths and ports replaced by those in the pages."""
        return _replaced(printed, {meant: said for said, meant in self._places.items()})

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()

    def _here(self, text: str) -> str:
        return _replaced(text, {**self._commands, **self._places})

    def _run_python(self, block: Block, text: str) -> str:
        printed = io.StringIO()
        # Add blank lines in front, so that a traceback has the page's line numbers.
        code = compile("\n" * block.line + text, block.page, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed), contextlib.chdir(self._folder), self._as_environment():
            exec(code, self.names)
        return printed.getvalue()

    @contextlib.contextmanager
    def _as_environment(self) -> Iterator[None]:
        wanted = {name: value for name, value in self.environment.items() if name.startswith("TOPICS_")}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _run_shell(self, block: Block, text: str) -> str:
        if self._shell is None:
            self._shell = Shell(self._folder, self.environment)
        out, err, failed = self._shell.run(text)
        bad = [
            (code, command) for code, command in failed if not (code == STREAM_CUT and "--max-time" in text)
        ]
        assert not bad and "Traceback" not in err, f"{block}: {bad}\n{err}\n{out}"
        return out


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def _session(text: str) -> tuple[str, str]:
    """Commands (lines that begin with `$ `, with their continuation lines), and their output."""
    commands: list[str] = []
    shown: list[str] = []
    goes_on = False
    for line in text.splitlines(keepends=True):
        if line.startswith("$ ") or goes_on:
            commands.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\\n")
        else:
            shown.append(line)
    return "".join(commands), "".join(shown)


# Values that differ from run to run.
CHANGING = [
    (r'"performance":\{[^}]*\}', '"performance":{}'),
    (r'"effective_priority":\d+', '"effective_priority":0'),
    (r"\blease_[0-9a-f]{6,}", "lease_0"),
    (r"\bwid_[\w-]{22}", "wid_0"),
    (r'"(\$ts|\w+_ts|deadline|\w+_at_ms|uptime_ms|expires_at)":\d{13}\b', r'"\1":0'),
    (r'"(lag_ms)":\d+', r'"\1":0'),
    (r"\d{4}-\d\d-\d\d[T ][\d:.]+Z?", "TIME"),
    (r"^id: \S+$", "id: 0"),
    (r"\bpressure [\d.]+", "pressure 0"),
    (r"\b[\d.]+( [KMG]?i?B)?( \w+)?/s\b", "0/s"),
    (r"http://127\.0\.0\.1:\d{4,5}\b", "http://SERVER"),
]


def comparable(text: str) -> list[str]:
    for pattern, meant in CHANGING:
        text = re.sub(pattern, meant, text, flags=re.MULTILINE)
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def compare(block: Block, printed: str, shown: str) -> None:
    found, wanted = comparable(printed), comparable(shown)
    if block.any_order:
        found, wanted = sorted(found), sorted(wanted)
    same = len(found) == len(wanted) and all(
        re.fullmatch(".*".join(map(re.escape, line.split("…"))), other) for line, other in zip(wanted, found)
    )
    assert same, f"{block} shows\n{shown}\nand prints\n{printed}"


def write_shown(block: Block, printed: str) -> None:
    """Replace the expected output of a block in its page."""
    path = ROOT / block.page
    lines = path.read_text().splitlines(keepends=True)
    first = lines.index("```text\n", block.line) + 1
    lines[first : lines.index("```\n", first)] = [printed.rstrip("\n") + "\n"]
    path.write_text("".join(lines))


def check(block: Block) -> None:
    """Checks of a block that do not run it."""
    if block.language in PARSED:
        try:
            PARSED[block.language](block.text)
        except ValueError as error:
            raise AssertionError(f"{block}: {error}") from error
        return
    if block.language == PYTHON:
        try:
            compile(block.text, str(block), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise AssertionError(f"{block}: {error}") from error
    if block.language in (*SHELL, PYTHON):
        return
    assert block.language in SHOWN, f"{block}: add the language {block.language!r} to tests/support/pages.py"
    if block.not_run is None:
        pasted = [line for line in block.text.splitlines() if COMMAND.match(line)]
        assert not pasted, f"{block} has commands, so its language must be bash: {pasted}"


if __name__ == "__main__":
    for reason, those in sorted(not_run().items()):
        print(f"{reason}\n  {', '.join(map(str, those))}")
