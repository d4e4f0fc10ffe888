"""`topics inspect`: what a file of a data directory says, and whether it is what was written."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from topics.cli.tables import as_bytes, as_time, safe, table
from topics.engine.inspected_files import inspect
from topics.engine.inspection import Inspection, Record
from topics.printing import while_it_is_read
from topics.read_only_disk import ReadOnlyDisk

SOUND, DAMAGED, CANNOT = 0, 1, 3
RECORDS, RECORDS_MAX = 10, 100_000
SETTLE_S, FRESH_S = 0.3, 5.0

EPILOG = """\
It tells of log files, snapshots, erase intents, layout.json, cold-id, watch, and of segments: any of their files
names the segment. Nothing is changed and no lock is taken: a server may run.

exit codes: 0 it is what was written; 1 it is damaged, of another version, or no file of topics; 2 wrong arguments;
3 there is no such file, or it cannot be read
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="topics inspect",
        description="Tells what a file of a data directory says, and whether it is what was written.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--records",
        metavar="n",
        type=_number,
        default=RECORDS,
        help=f"the first n and the last n of records, envelopes, topics [{RECORDS}]",
    )
    parser.add_argument(
        "--from-seq", metavar="s", type=_number, help="n records from this seq on, instead of first and last"
    )
    parser.add_argument(
        "--cold-dir",
        metavar="path",
        default=os.environ.get("TOPICS_COLD_DIR") or None,
        help="where the records of a cold segment are [$TOPICS_COLD_DIR]",
    )
    arguments = parser.parse_args(argv)
    if not arguments.file:
        parser.error("the file's path is empty")
    if arguments.records > RECORDS_MAX:
        parser.error(f"--records is {RECORDS_MAX} at most")
    try:
        found = look(arguments.file, arguments.records, arguments.from_seq, arguments.cold_dir)
    except IsADirectoryError:
        text = "is a directory; name one of the files below it. `topics du` tells what is there"
        print(f"topics inspect: {safe(arguments.file)} {text}", file=sys.stderr)
        return CANNOT
    except OSError as error:
        print(f"topics inspect: {safe(arguments.file)}: {error.strerror or error}", file=sys.stderr)
        return CANNOT
    with while_it_is_read():
        if arguments.json:
            print(as_json(found))
        else:
            print("\n".join(lines(found)))
    return SOUND if found.sound else DAMAGED


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return int(text)


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


def as_json(found: Inspection) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
