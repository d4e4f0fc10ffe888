"""`topics inspect`: contents of one file of a data directory, and whether it is intact."""

from __future__ import annotations

import os
import time

import click
import msgspec

from topics.cli.errors import CommandError
from topics.cli.formatting import format_size, format_time, printable, table
from topics.cli.options import SEQ, cold_dir_option, complete_file, non_empty
from topics.engine.tools.inspect.files import inspect
from topics.engine.tools.inspect.report import Inspection, Record
from topics.system.read_only_disk import ReadOnlyDisk
from topics.system.stdio import ignore_broken_pipe

SOUND, DAMAGED, CANNOT = 0, 1, 3
RECORDS, RECORDS_MAX = 10, 100_000
SETTLE_S, FRESH_S = 0.3, 5.0

EPILOG = """\b
FILE is a log file, a snapshot, an erase intent, layout.json, cold-id, watch, or any file of a segment.
Nothing is changed and no lock is taken, so the server may be running.
\b
Exit codes: 0 the file is intact; 1 it is damaged, of another version, or not a file of topics;
2 wrong arguments; 3 the file does not exist or cannot be read.
"""


@click.command("inspect", epilog=EPILOG)
@click.argument("path", type=non_empty, metavar="FILE", shell_complete=complete_file)
@click.option("--records", type=click.IntRange(0, RECORDS_MAX), default=RECORDS, metavar="N", help=f"Show the first N and the last N records, envelopes or topics. [{RECORDS}]")  # fmt: skip
@click.option("--from-seq", type=SEQ, metavar="SEQ", help="Show N records from this seq instead.")  # fmt: skip
@cold_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show(path: str, records: int, from_seq: int | None, cold_dir: str | None, as_json: bool) -> int:
    """Show the contents of a file of a data directory, and whether it is intact."""
    try:
        found = look(path, records, from_seq, cold_dir)
    except IsADirectoryError as error:
        advice = "is a directory; give a file in it. `topics du` gives an overview"
        raise CommandError(f"{printable(path)} {advice}", CANNOT) from error
    except OSError as error:
        raise CommandError(f"{printable(path)}: {error.strerror or error}", CANNOT) from error
    with ignore_broken_pipe():
        print(json_text(found) if as_json else "\n".join(lines(found)))
    return SOUND if found.sound else DAMAGED


def look(path: str, records: int, from_seq: int | None, cold_dir: str | None) -> Inspection:
    disk = ReadOnlyDisk()
    # The topic's id is the name of the directory, so a bare file name needs one.
    full_path = path if "/" in path else f"{os.getcwd()}/{path}"

    def once() -> Inspection:
        return inspect(disk, full_path, records=records, from_seq=from_seq, cold_dir=cold_dir)

    found = once()
    if not found.sound and _was_just_written(path):
        # A running server may be in the middle of a write. Real damage is still there a moment later.
        time.sleep(SETTLE_S)
        found = once()
    return found


def _was_just_written(path: str) -> bool:
    try:
        return time.time() - os.stat(path).st_mtime < FRESH_S
    except OSError:
        return True


def json_text(found: Inspection) -> str:
    # Paths may contain surrogates. All other text is from files and was decoded when it was read.
    plain = msgspec.to_builtins(found)
    plain["path"] = plain["path"].encode("utf-8", "backslashreplace").decode()
    plain["sound"] = found.sound
    plain["problems"] = [
        {**problem, "path": problem["path"].encode("utf-8", "backslashreplace").decode()}
        for problem in plain.get("problems", [])
    ]
    return msgspec.json.format(msgspec.json.encode(plain)).decode()


def lines(found: Inspection) -> list[str]:
    version = f", version {found.version}" if found.version is not None else ""
    text = [f"{printable(found.path)}: {found.kind}{version}, {format_size(found.bytes)}"]
    if found.files:
        text += [
            "",
            *table(["file", "bytes"], [[printable(f.name), str(f.bytes)] for f in found.files], left=1),
        ]
    facts = [(key, _fact(key, value)) for key, value in found.facts.items() if value is not None]
    if facts:
        width = max(len(key) for key, _ in facts)
        text += ["", *(f"{key.replace('_', ' ').ljust(width)}  {value}" for key, value in facts)]
    if found.digests:
        text += ["", *(f"digest of {d.of}: {'ok' if d.holds else 'MISMATCH'}" for d in found.digests)]
    text += _tables(found)
    for note in found.notes:
        text += ["", f"note: {printable(note)}"]
    for problem in found.problems:
        text += [
            "",
            f"problem: {printable(problem.path)} at byte {problem.offset}: {printable(problem.what)}",
        ]
    return text


def _fact(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (key.startswith("ts_") or key.endswith("_ms")):
        return f"{value} ({format_time(value)})"
    return printable(str(value))


def _tables(found: Inspection) -> list[str]:
    text: list[str] = []
    if found.topics:
        heads = ["topic", "id", "records", "first seq", "head", "bytes", "segments"]
        rows = [
            [
                printable(t.name),
                f"{t.id:x}",
                *map(str, (t.records, t.first_seq, t.head, t.live_bytes, t.segments)),
            ]
            for t in found.topics
        ]
        heads += ["cold", "inline"]
        rows = [
            [*row, str(t.cold_segments), str(t.inline_bytes)]
            for row, t in zip(rows, found.topics, strict=True)
        ]
        text += ["", *table(heads, rows, left=1)]
    if found.envelopes:
        heads = ["lsn", "prev lsn", "synced lsn", "offset", "bytes", "frames"]
        rows = [
            [*map(str, (e.lsn, e.prev_lsn, e.synced_lsn, e.offset, e.bytes)), _counts(e.frames)]
            for e in found.envelopes
        ]
        text += ["", *table(heads, rows, left=0)]
    if found.records:
        heads = ["seq", "time", "offset", "bytes", "size", "topic", "lsn", "tag", "node", "flags", "digest"]
        text += ["", *table(heads, [_record(record) for record in found.records], left=0)]
    if found.patches:
        rows = [[printable(p.path), str(p.offset), str(p.bytes)] for p in found.patches]
        text += ["", *table(["overwrites", "offset", "bytes"], rows, left=1)]
    text += [f"{count} more {kind} are not shown; see --records" for kind, count in found.left_out.items()]
    return text


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _record(record: Record) -> list[str]:
    digest = {None: "not read", True: "ok", False: "MISMATCH"}[record.whole]
    return [
        str(record.seq),
        format_time(record.ts),
        *map(str, (record.offset, record.bytes, record.size)),
        f"{record.topic_id:x}",
        "-" if record.lsn is None else str(record.lsn),
        *("-" if name is None else printable(name) for name in (record.tag, record.node)),
        ",".join(record.flags) or "-",
        digest if record.bytes else "no record",
    ]
