"""`topics inspect`: what a file of a data directory says, and whether it is what was written."""

from __future__ import annotations

import os
import time

import click
import msgspec

from topics.cli.failures import Failed
from topics.cli.quantities import SEQ, cold_dir_option, complete_file, filled
from topics.cli.tables import as_bytes, as_time, safe, table
from topics.engine.tools.inspect.files import inspect
from topics.engine.tools.inspect.report import Inspection, Record
from topics.system.read_only_disk import ReadOnlyDisk
from topics.system.stdio import ignore_broken_pipe

SOUND, DAMAGED, CANNOT = 0, 1, 3
RECORDS, RECORDS_MAX = 10, 100_000
SETTLE_S, FRESH_S = 0.3, 5.0

EPILOG = """\b
It reads log files, snapshots, erase intents, layout.json, cold-id, watch, and segments: any file of a segment
names it. Nothing is changed and no lock is taken: a server may run.
\b
Exit codes: 0 the file is what was written; 1 it is damaged, of another version, or not a file of topics;
2 wrong arguments; 3 there is no such file, or it cannot be read.
"""


@click.command("inspect", epilog=EPILOG)
@click.argument("path", type=filled, metavar="FILE", shell_complete=complete_file)
@click.option("--records", type=click.IntRange(0, RECORDS_MAX), default=RECORDS, metavar="N", help=f"Show the first N and the last N of records, envelopes, topics. [{RECORDS}]")  # fmt: skip
@click.option("--from-seq", type=SEQ, metavar="SEQ", help="Show N records from this seq on instead.")  # fmt: skip
@cold_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show(path: str, records: int, from_seq: int | None, cold_dir: str | None, as_json: bool) -> int:
    """Show what a file of a data directory contains, and whether it is what was written."""
    try:
        found = look(path, records, from_seq, cold_dir)
    except IsADirectoryError as error:
        advice = "is a directory; name one of the files in it. `topics du` shows what there is"
        raise Failed(f"{safe(path)} {advice}", CANNOT) from error
    except OSError as error:
        raise Failed(f"{safe(path)}: {error.strerror or error}", CANNOT) from error
    with ignore_broken_pipe():
        print(json_text(found) if as_json else "\n".join(lines(found)))
    return SOUND if found.sound else DAMAGED


def look(path: str, records: int, from_seq: int | None, cold_dir: str | None) -> Inspection:
    disk = ReadOnlyDisk()
    # The name of its directory is the topic's, also for who stands in it.
    where = path if "/" in path else f"{os.getcwd()}/{path}"

    def once() -> Inspection:
        return inspect(disk, where, records=records, from_seq=from_seq, cold_dir=cold_dir)

    found = once()
    if not found.sound and _is_fresh(path):
        # A server may just have been writing it: what is damage is so a moment later, too.
        time.sleep(SETTLE_S)
        found = once()
    return found


def _is_fresh(path: str) -> bool:
    try:
        return time.time() - os.stat(path).st_mtime < FRESH_S
    except OSError:
        return True


def json_text(found: Inspection) -> str:
    # The path alone may be no text: all else comes from files, and was made text when it was read.
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
    told = [f"{safe(found.path)}: {found.kind}{version}, {as_bytes(found.bytes)}"]
    if found.files:
        told += ["", *table(["file", "bytes"], [[safe(f.name), str(f.bytes)] for f in found.files], left=1)]
    facts = [(key, _fact(key, value)) for key, value in found.facts.items() if value is not None]
    if facts:
        width = max(len(key) for key, _ in facts)
        told += ["", *(f"{key.replace('_', ' ').ljust(width)}  {value}" for key, value in facts)]
    if found.digests:
        told += ["", *(f"digest of {d.of}: {'holds' if d.holds else 'DOES NOT HOLD'}" for d in found.digests)]
    told += _lists(found)
    for note in found.notes:
        told += ["", f"note: {safe(note)}"]
    for problem in found.problems:
        told += ["", f"problem: {safe(problem.path)} at byte {problem.offset}: {safe(problem.what)}"]
    return told


def _fact(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (key.startswith("ts_") or key.endswith("_ms")):
        return f"{value} ({as_time(value)})"
    return safe(str(value))


def _lists(found: Inspection) -> list[str]:
    told: list[str] = []
    if found.topics:
        heads = ["topic", "id", "records", "first seq", "head", "bytes", "segments"]
        rows = [
            [safe(t.name), f"{t.id:x}", *map(str, (t.records, t.first_seq, t.head, t.live_bytes, t.segments))]
            for t in found.topics
        ]
        heads += ["cold", "inline"]
        rows = [
            [*row, str(t.cold_segments), str(t.inline_bytes)]
            for row, t in zip(rows, found.topics, strict=True)
        ]
        told += ["", *table(heads, rows, left=1)]
    if found.envelopes:
        heads = ["lsn", "prev lsn", "synced lsn", "offset", "bytes", "frames"]
        rows = [
            [*map(str, (e.lsn, e.prev_lsn, e.synced_lsn, e.offset, e.bytes)), _counts(e.frames)]
            for e in found.envelopes
        ]
        told += ["", *table(heads, rows, left=0)]
    if found.records:
        heads = ["seq", "time", "offset", "bytes", "size", "topic", "lsn", "tag", "node", "flags", "digest"]
        told += ["", *table(heads, [_record(record) for record in found.records], left=0)]
    if found.patches:
        rows = [[safe(p.path), str(p.offset), str(p.bytes)] for p in found.patches]
        told += ["", *table(["overwrites", "offset", "bytes"], rows, left=1)]
    told += [f"{count} more {what} are not shown; see --records" for what, count in found.left_out.items()]
    return told


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _record(record: Record) -> list[str]:
    whole = {None: "not read", True: "holds", False: "DOES NOT HOLD"}[record.whole]
    return [
        str(record.seq),
        as_time(record.ts),
        *map(str, (record.offset, record.bytes, record.size)),
        f"{record.topic_id:x}",
        "-" if record.lsn is None else str(record.lsn),
        *("-" if name is None else safe(name) for name in (record.tag, record.node)),
        ",".join(record.flags) or "-",
        whole if record.bytes else "no record",
    ]
