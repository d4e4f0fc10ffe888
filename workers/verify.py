"""`topics verify`: offline check and repair of a data directory.

It takes the locks of a server, so it refuses a directory that is in use, and no server can start meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from topics.api.config import EngineConfig
from topics.api.errors import TopicsError, UnsupportedFormat
from topics.cli import commands
from topics.cli.errors import CommandError
from topics.cli.options import cold_dir_option, complete_directory, non_empty
from topics.engine.core.ports import SegmentStore
from topics.engine.core.topic_ids import ID_STEP
from topics.engine.storage.files import TEMP_SUFFIX
from topics.engine.storage.layout import LAYOUT_NAME, Layout, encode_layout, generation_of, stale_layouts
from topics.engine.storage.tiered import TieredDisk
from topics.engine.tools.repair import (
    QUARANTINE,
    CannotRepair,
    Repaired,
    UnsupportedFiles,
    finish_repairs,
    repair_shard,
)
from topics.engine.tools.verify import Finding, verify_shard
from topics.system.stdio import ignore_broken_pipe
from workers.process.data_directory import PRIVATE_UMASK, DataDirectory, read_layout, write_atomically
from workers.process.exit_codes import DirectoryLocked, Refusal
from workers.shard.local_store import ID_NAME, LocalSegmentStore, read_id
from workers.shard.posix import PosixDisk, SystemClock, make_durable_dir

SOUND, DAMAGED, USAGE, CANNOT, NAMELESS = range(5)
MEANINGS = {
    SOUND: "no damage, or all damage was repaired by --repair",
    DAMAGED: "there is damage, or the repair failed",
    USAGE: "invalid arguments",
    CANNOT: "the directory is in use, missing, not readable, or of a later version",
    NAMELESS: "repaired by --repair, but some topics have lost their names and are now called recovered-…",
}
OURS = {"LOCK", "RUN", LAYOUT_NAME, "topics", "lost+found", QUARANTINE, ID_NAME}

_TOPIC = re.compile(r"[0-9a-f]{16}")

T = TypeVar("T")


class CannotVerify(Exception):
    """The directory cannot be checked; the text says why."""


class VerifiedShard(msgspec.Struct, frozen=True):
    """The state of a shard after the run, and the findings of the run."""

    shard: int
    opens: str  # how a server would start it; empty: normally
    topics: int
    records: int
    findings: list[Finding]


class VerifyReport(msgspec.Struct, frozen=True):
    """The report that --json prints."""

    data_dir: str
    sound: bool
    repaired: bool
    findings: list[Finding]  # of the directory itself
    shards: list[VerifiedShard]
    losses: list[tuple[str, int, int]]  # to be announced to readers: topic, first seq, last seq
    notes: list[str]  # what is unknown or cannot be undone
    quarantined: list[str]
    recovered: dict[str, int]  # topics named by the repair, and their numbers of records
    problem: str = ""  # why the repair failed


@dataclass
class _Run:
    path: Path
    repair: bool
    quiet: bool
    findings: list[Finding] = field(default_factory=list)
    shards: list[VerifiedShard] = field(default_factory=list)
    done: list[Repaired] = field(default_factory=list)
    problem: str = ""
    layout_made: bool = False

    def report(self) -> VerifyReport:
        damage = [
            f for f in [*self.findings, *(f for s in self.shards for f in s.findings)] if f.kind == "damage"
        ]
        changed = self.layout_made or any(done.quarantined for done in self.done)
        return VerifyReport(
            str(self.path),
            sound=not self.problem and (self.repair or not damage),
            repaired=changed,
            findings=self.findings,
            shards=self.shards,
            losses=[loss for done in self.done for loss in done.losses],
            notes=[note for done in self.done for note in done.notes],
            quarantined=[path for done in self.done for path in done.quarantined],
            recovered={name: count for done in self.done for name, count in done.recovered.items()},
            problem=self.problem,
        )


@click.command(
    "verify",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items()) + ".",
)
@click.argument("data_dir", type=non_empty, metavar="DATA_DIR", shell_complete=complete_directory)
@click.option("--repair", is_flag=True, help="Repair all damage. Replaced files are kept in DATA_DIR/quarantine; every loss is reported, and announced to readers.")  # fmt: skip
@cold_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as one JSON object.")
def command(data_dir: str, repair: bool, cold_dir: str | None, as_json: bool) -> int:
    """Check every file of a data directory that no server is using. Nothing is changed without --repair."""
    try:
        report = run(Path(data_dir).absolute(), repair=repair, quiet=as_json, cold_dir=cold_dir)
    except DirectoryLocked as error:
        raise CommandError(f"{data_dir} is in use; stop the server first", CANNOT) from error
    except (CannotVerify, Refusal) as error:
        raise CommandError(str(error), CANNOT) from error
    with ignore_broken_pipe():
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            print_report(report)
    if report.sound and report.recovered:
        return NAMELESS
    return SOUND if report.sound else DAMAGED


def main(argv: Sequence[str] | None = None) -> int:
    return commands.run(["verify", *(sys.argv[1:] if argv is None else argv)])


def run(path: Path, *, repair: bool, quiet: bool, cold_dir: str | None = None) -> VerifyReport:
    _check_is_ours(path)
    if cold_dir is not None and not os.path.isdir(cold_dir):
        raise CannotVerify(f"the directory {cold_dir} does not exist")
    try:
        identity = read_id(str(path)) if cold_dir is not None else None
    except OSError as error:
        raise CannotVerify(str(error.strerror)) from error
    cold = LocalSegmentStore(cold_dir, identity=identity) if cold_dir is not None else None
    if cold is not None:
        try:
            cold.check()
        except OSError as error:
            raise CannotVerify(
                f"{error.strerror}; to continue without the cold tier's data, remove {path}/{ID_NAME}"
            ) from error
    state = _Run(path, repair, quiet)
    with ExitStack() as held:
        held.callback(os.umask, os.umask(PRIVATE_UMASK))
        held.callback(DataDirectory(str(path)).close)
        disk = PosixDisk(str(path))
        layout = _layout(state)
        for number in _shard_numbers(path, layout.directory):
            _lock_shard(held, path / layout.shard_dir(number))
        _check_root(state, layout)
        for number in range(layout.shards):
            _check_shard(state, disk, number, layout, cold)
        if state.repair and any(
            finding.path == "layout.json" and finding.kind == "damage" for finding in state.findings
        ):
            _write_layout(state, layout)
    return state.report()


def _check_is_ours(path: Path) -> None:
    """Checked before taking locks, which creates files: leave unrelated directories untouched."""
    if not os.path.lexists(path):
        raise CannotVerify(f"the directory {path} does not exist")
    if not path.is_dir():
        raise CannotVerify(f"{path} is not a directory")
    try:
        names = os.listdir(path)
    except OSError as error:
        raise CannotVerify(f"{path} cannot be read: {error.strerror}") from error
    layouts = [name for name in names if generation_of(name) and (path / name).is_dir()]
    if not layouts and not (path / "layout.json").is_file():
        raise CannotVerify(f"{path} is not a data directory of topics: it has no layout.json")


def _names(path: Path) -> list[str]:
    return os.listdir(path) if path.is_dir() else []


def _check_root(state: _Run, layout: Layout) -> None:
    names = sorted(os.listdir(state.path))
    stale = stale_layouts(names, layout.generation)
    for name in stale:
        what = "left by an interrupted change of the number of shards; the next start removes it"
        state.findings.append(Finding("pending", name, 0, what))
    for name in names:
        if name == LAYOUT_NAME + TEMP_SUFFIX:
            state.findings.append(Finding("extra", name, 0, "a temporary file that is not needed"))
        elif name not in OURS and name != layout.directory and name not in stale:
            state.findings.append(Finding("extra", name, 0, "not a file of topics"))


def _shard_numbers(path: Path, layout_dir: str) -> list[int]:
    names = _names(path / layout_dir)
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"shard-(\d+)", name)))


def _lock_shard(held: ExitStack, path: Path) -> None:
    """Take a worker's lock: after its supervisor was killed, a worker may still be in its last sync."""
    try:
        fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CannotVerify(
            f"cannot lock {path}/LOCK: {error.strerror}; it must be a regular file, so remove whatever else has that name"
        ) from error
    held.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryLocked(f"{path} is in use by a running worker") from None


def _layout(state: _Run) -> Layout:
    """The stored layout; if it is damaged, the one inferred from the shards' directories."""
    path = state.path / LAYOUT_NAME
    try:
        return read_layout(path)
    except Refusal as error:
        if isinstance(error.__cause__, UnsupportedFormat):
            raise
        problem = str(error) if path.exists() else "is missing"
    state.findings.append(Finding("damage", LAYOUT_NAME, 0, problem))
    generations = [number for name in _names(state.path) if (number := generation_of(name))]
    if len(generations) != 1:
        raise CannotVerify(
            f"{path} cannot be read, and which of {len(generations)} layouts is current is unknown; restore it from a backup"
        )
    layout = Layout.of(generations[0], 1)
    numbers = _shard_numbers(state.path, layout.directory)
    # After a change of the number of shards, a topic may be on another shard than the one that created it; its row shows
    # whether it is on the right one.
    owners = {int(name, 16) % ID_STEP for name in _names(state.path / "topics") if _TOPIC.fullmatch(name)}
    fits = layout.generation > 1 or owners <= set(numbers)
    if not numbers or numbers != list(range(len(numbers))) or not fits:
        raise CannotVerify(
            f"{path} cannot be read, and the number of shards cannot be inferred from their directories; restore it from a backup"
        )
    return Layout.of(layout.generation, len(numbers))


def _write_layout(state: _Run, layout: Layout) -> None:
    """Write the inferred layout, if every topic was found in the shard where it belongs."""
    path = state.path / "layout.json"
    misplaced = [f for shard in state.shards for f in shard.findings if "another shard" in f.what]
    if misplaced or state.problem:
        state.problem = (
            state.problem
            or f"{layout.shards} shards do not fit the topics; restore layout.json from a backup"
        )
        return
    if path.exists():
        aside = state.path / QUARANTINE / str(_next_run(state.path))
        make_durable_dir(str(aside))
        os.rename(path, aside / "layout.json")
    write_atomically(path, encode_layout(layout))
    state.layout_made = True


def _next_run(path: Path) -> int:
    numbers = [int(name) for name in _names(path / QUARANTINE) if name.isascii() and name.isdigit()]
    return max(numbers, default=0) + 1


def _check_shard(state: _Run, hot: PosixDisk, shard: int, layout: Layout, cold: SegmentStore | None) -> None:
    disk = TieredDisk(hot, cold) if cold is not None else hot
    shards = layout.shards
    config = EngineConfig(shard=shard, shard_dir=layout.shard_dir(shard))
    progress = _Progress(f"shard {shard}", state.quiet)
    if not (state.path / config.shard_dir).is_dir():
        if (state.path / layout.directory).is_dir():
            state.findings.append(Finding("damage", config.shard_dir, 0, "the shard's directory is missing"))
            state.problem = f"{config.shard_dir} is missing; restore it from a backup"
        return
    try:
        if state.repair:
            finish_repairs(disk, shard)
            steps = repair_shard(disk, SystemClock(), config, shards, _next_run(state.path), cold)
            done = progress.follow(steps)
            found, left = done.found, done.after or done.found
            state.done.append(done)
        else:
            found = left = progress.follow(verify_shard(disk, SystemClock(), config, shards, cold))
    except UnsupportedFiles as error:
        raise CannotVerify(str(error)) from error
    except CannotRepair as error:
        state.problem = str(error)
        return
    except (TopicsError, OSError) as error:
        raise CannotVerify(f"shard {shard} cannot be read: {error}") from error
    finally:
        progress.end()
    later = [finding for finding in found.findings if finding.kind == "unsupported"]
    if later:
        raise CannotVerify(later[0].what)
    state.shards.append(VerifiedShard(shard, left.opens, left.topics, left.records, found.findings))


class _Progress:
    """A progress line on a terminal; elsewhere one line per shard."""

    def __init__(self, title: str, quiet: bool) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty() and not quiet
        self._count = 0
        if not quiet and not self._terminal:
            print(f"checking {title}", file=sys.stderr, flush=True)

    def follow(self, steps: Generator[str, None, T]) -> T:
        while True:
            try:
                what = next(steps)
            except StopIteration as ended:
                result: T = ended.value
                return result
            self._count += 1
            if self._terminal:
                wheel = "|/-\\"[self._count % 4]
                line = f"{wheel} {self._title}: {what}"[:100]
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def print_report(report: VerifyReport) -> None:
    for finding in [*report.findings, *(f for shard in report.shards for f in shard.findings)]:
        where = f"{finding.path} at byte {finding.offset}" if finding.offset else finding.path
        about = f" [topic {finding.topic}]" if finding.topic else ""
        lost = f" (seqs {finding.first_seq} to {finding.last_seq})" if finding.first_seq else ""
        print(f"{finding.kind}: {where}{about}: {finding.what}{lost}")
    for shard in report.shards:
        if shard.opens:
            print(f"shard {shard.shard}: a server would start it {shard.opens}")
    for topic, first, last in report.losses:
        print(f"announced as lost: topic {topic}, seqs {first} to {last}")
    for note in report.notes:
        print(f"note: {note}")
    if report.quarantined:
        print(f"{len(report.quarantined)} files are kept in {report.data_dir}/{QUARANTINE}")
    if report.problem:
        print(f"not repaired: {report.problem}")
    topics = sum(shard.topics for shard in report.shards)
    records = sum(shard.records for shard in report.shards)
    state = "repaired" if report.repaired and report.sound else "sound" if report.sound else "damaged"
    print(f"{state}: {len(report.shards)} shards, {topics} topics, {records} records")


if __name__ == "__main__":
    sys.exit(main())
