"""`topics inspect`: the kind of a data file, its contents, and whether it is intact.

Files are only read, and a server may be writing to them. At most a row, an envelope or a MiB is in memory at a time. Damage
is reported with its offset; no file content makes the program fail.
"""

from __future__ import annotations

import re

import msgspec

from topics.api.errors import Corrupt, TopicsError
from topics.engine.core.ports import Disk
from topics.engine.storage.files import (
    HEADER,
    HEADER_BYTES,
    TEMP_SUFFIX,
    WATCH_MAGIC,
    WATCH_NAME,
    check_digest_file,
    read_exact,
)
from topics.engine.storage.intents import MAGIC as INTENT_MAGIC
from topics.engine.storage.intents import Patch
from topics.engine.storage.layout import COLD_ID_NAME, LAYOUT_NAME, decode_layout
from topics.engine.storage.manifest import CURRENT_NAME, DEAD_MAGIC, dead_name, manifest_number, pin_id
from topics.engine.storage.merge_plan_file import PLAN_NAME
from topics.engine.storage.reserve import RESERVE_NAME
from topics.engine.storage.segments import COLD, parse_segment_name
from topics.engine.storage.snapshot import MAGIC as SNAPSHOT_MAGIC
from topics.engine.storage.snapshot import iter_rows
from topics.engine.storage.transaction_file import MAGIC as TXN_MAGIC
from topics.engine.storage.transaction_file import entries, parse_name
from topics.engine.storage.wal import MAGIC as LOG_MAGIC
from topics.engine.storage.wal import file_number
from topics.engine.storage.watch_file import read_entries
from topics.engine.tools.inspect.log import inspect_log
from topics.engine.tools.inspect.manifest import inspect_manifest
from topics.engine.tools.inspect.report import Digest, FirstAndLast, Inspection, PatchLine, TopicLine, text_of
from topics.engine.tools.inspect.segment import MAGICS, WHOLE_BYTES_MAX, inspect_segment
from topics.engine.tools.inspect.staging import inspect_staging, kind_in_staging
from topics.engine.topic.snapshot_row import ShardRow, TopicRow

SMALL_BYTES_MAX = 4096  # layout.json and cold-id

_SNAPSHOT = re.compile(r"snap-[0-9a-f]{16}")
_INTENT = re.compile(r"intent-[0-9a-f]{16}")
_COLD_ID = re.compile(rb"[0-9a-f]{32}\n?")
_KIND_OF_NAME = {
    LAYOUT_NAME: "layout",
    COLD_ID_NAME: "cold-id",
    WATCH_NAME: "watch",
    "LOCK": "lock",  # locked by the process that uses the directory; its pid in the file is informational
    "RUN": "run",  # directory of a running server's sockets
    RESERVE_NAME: "reserve",
    CURRENT_NAME: "current",
    PLAN_NAME: "plan",
}
_KIND_OF_MAGIC = {
    LOG_MAGIC: "log",
    SNAPSHOT_MAGIC: "snapshot",
    INTENT_MAGIC: "intent",
    WATCH_MAGIC: "watch",
    DEAD_MAGIC: "dead-rows",
    TXN_MAGIC: "transaction",
    **dict.fromkeys(MAGICS.values(), "segment"),
}


class _Session(msgspec.Struct, array_like=True):
    """Prefix of a session's row."""

    wid: str


_session = msgspec.msgpack.Decoder(_Session).decode
_group = msgspec.msgpack.Decoder(tuple[str, int, str, int]).decode
# In lost+found, the name of a file is preceded by that of its shard or topic.
_OWNER = re.compile(r"(?:shard-[0-9]+|[0-9a-f]{16})-(?=wal-|snap-|intent-|txn-)")


def inspect(
    disk: Disk, path: str, *, records: int = 10, from_seq: int | None = None, cold_dir: str | None = None
) -> Inspection:
    """Describe a file. `cold_dir`: root of the cold tier. Raises OSError if the file is missing or cannot be opened."""
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        head = disk.read(handle, 0, HEADER_BYTES)
    finally:
        disk.close(handle)
    name = path.rpartition("/")[2]
    kind = kind_in_staging(path) or _kind(name, head)
    found = Inspection(path, kind, size, int(HEADER.unpack(head)[1]) if len(head) == HEADER_BYTES else None)
    if name.endswith(TEMP_SUFFIX):
        found.notes.append("a temporary file: it is being written, or a server died while writing it")
    try:
        _describe(disk, found, name, records, from_seq, cold_dir)
    except (TopicsError, OSError) as error:
        found.add_error(error, path)
    found.left_out = {what: number for what, number in found.left_out.items() if number}
    return found


def _kind(name: str, head: bytes) -> str:
    """The kind by the file's name; for a renamed file, by its first bytes."""
    plain = _OWNER.sub("", name.removesuffix(TEMP_SUFFIX))
    if parse_segment_name(plain) is not None:
        return "segment"
    if file_number(plain) is not None:
        return "log"
    if _SNAPSHOT.fullmatch(plain):
        return "snapshot"
    if _INTENT.fullmatch(plain):
        return "intent"
    if manifest_number(plain) is not None:
        return "dead-rows" if plain == dead_name(manifest_number(plain) or 0) else "manifest"
    if pin_id(plain) is not None:
        return "pin"
    if parse_name(plain) is not None:
        return "transaction"
    return _KIND_OF_NAME.get(plain) or _KIND_OF_MAGIC.get(head[:8], "unknown")


def _describe(
    disk: Disk, found: Inspection, name: str, count: int, from_seq: int | None, cold_dir: str | None
) -> None:
    match found.kind:
        case "segment":
            segment = parse_segment_name(name.removesuffix(TEMP_SUFFIX))
            if segment is None:
                what = "a renamed segment file; rename it to seg-<seq>-<generation>.<suffix> to find its other files"
                found.add_problem(found.path, 0, what)
                return
            folder = found.path.rpartition("/")[0].rpartition("/")[2]
            cold_folder = f"{cold_dir}/topics/{folder}" if cold_dir is not None else None
            inspect_segment(disk, found, segment[0], segment[1], count, from_seq, cold_folder)
        case "log":
            inspect_log(disk, found, count, from_seq)
        case "snapshot":
            _snapshot(disk, found, count)
        case "intent":
            _intent(disk, found, count)
        case "watch":
            _watch(disk, found)
        case "transaction":
            _transaction(disk, found)
        case "layout":
            layout = decode_layout(found.path, _small(disk, found))
            found.version = layout.format
            found.facts |= {
                "format": layout.format,
                "generation": layout.generation,
                "shards": layout.shards,
                "directory": layout.directory,
            }
        case "cold-id":
            found.version = None
            text = _small(disk, found)
            if not _COLD_ID.fullmatch(text):
                raise Corrupt(found.path, 0, "does not contain an id of 32 hexadecimal digits")
            found.facts["id"] = text.decode("ascii").strip()
        case "manifest" | "dead-rows" | "current" | "pin" | "plan":
            inspect_manifest(found, _whole(disk, found))
        case "sidecar" | "marks" | "output":
            is_small = found.kind != "output" or name.endswith(".sum")
            head = _range(disk, found.path, 0, min(found.bytes, HEADER_BYTES))
            inspect_staging(found, head, _whole(disk, found) if is_small else b"")
        case "reserve":
            found.version = None
            found.notes.append("disk space that a shard reserves for when the disk is full")
        case "lock" | "run":
            found.facts["text"] = text_of(_small(disk, found).strip())
        case _:
            found.version = None
            found.add_problem(
                found.path, 0, "is not a file of topics: neither its name nor its first bytes are known"
            )


def _whole(disk: Disk, found: Inspection) -> bytes:
    if found.bytes > WHOLE_BYTES_MAX:
        raise Corrupt(found.path, WHOLE_BYTES_MAX, f"has {found.bytes} bytes, which is too long to inspect")
    return _range(disk, found.path, 0, found.bytes)


def _small(disk: Disk, found: Inspection) -> bytes:
    found.version = None
    if found.bytes > SMALL_BYTES_MAX:
        raise Corrupt(
            found.path, SMALL_BYTES_MAX, f"has {found.bytes} bytes, which is too long for such a file"
        )
    return _range(disk, found.path, 0, found.bytes)


def _range(disk: Disk, path: str, start: int, end: int) -> bytes:
    handle = disk.open(path)
    try:
        return read_exact(disk, handle, path, start, end - start)
    finally:
        disk.close(handle)


def _check_digest(disk: Disk, found: Inspection, magic: bytes) -> tuple[int, int]:
    try:
        bounds = check_digest_file(disk, found.path, magic)
    except TopicsError:
        found.digests.append(Digest("the file", False))
        raise
    found.digests.append(Digest("the file", True))
    return bounds


def _payload(disk: Disk, found: Inspection, magic: bytes) -> bytes:
    start, end = _check_digest(disk, found, magic)
    if end - start > WHOLE_BYTES_MAX:
        raise Corrupt(
            found.path, start, f"has {end - start} bytes, which is too long to inspect; the digest matches"
        )
    return _range(disk, found.path, start, end)


# -- state -------------------------------------------------------------------------------------------------


def _snapshot(disk: Disk, found: Inspection, count: int) -> None:
    path = found.path
    start, end = HEADER_BYTES, max(HEADER_BYTES, found.bytes - 8)
    try:
        start, end = _check_digest(disk, found, SNAPSHOT_MAGIC)
    except Corrupt as error:
        # Show what can still be read: names and segments help with manual recovery.
        found.add_error(error, path)
        found.notes.append("the rows are shown although the file does not match its digest")
    topics: FirstAndLast[TopicLine] = FirstAndLast(count)
    last: tuple[int, bytes] | None = None
    number = 0
    try:
        for at, row in iter_rows(disk, path, start, end):
            if last is not None:
                _row(found, number, last, topics)
                number += 1
            last = at, row
        if last is None or not number:
            raise Corrupt(path, start, "has no shard row or no closing row")
        if last[1] != msgspec.msgpack.encode(number):
            raise Corrupt(path, last[0], f"has {number} rows, which does not match its closing row")
    finally:
        found.facts |= {"rows": number, "topics": topics.count}
        found.topics = topics.shown
        found.left_out["topics"] = topics.left_out


def _row(found: Inspection, number: int, row: tuple[int, bytes], topics: FirstAndLast[TopicLine]) -> None:
    at, data = row
    try:
        if not number:
            _shard_row(found, msgspec.msgpack.decode(data, type=ShardRow))
        else:
            topics.add(_topic_line(msgspec.msgpack.decode(data, type=TopicRow)))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(found.path, at, f"a row cannot be decoded: {error}") from error


def _shard_row(found: Inspection, row: ShardRow) -> None:
    found.facts |= {
        "number": row.number,
        "base_lsn": row.base_lsn,
        "clean_lsn": row.clean_lsn or None,
        "next_id": f"{row.next_id:016x}",
        "time_ceiling_ms": row.time_ceiling_ms,
        "now_ms": row.now_ms,
        "boot_id": text_of(row.boot_id.encode("utf-8", "backslashreplace")),
        "forwards": len(row.forwards),
        "outflows": len(row.outflows),
        "adopted": len(row.adopted) // 8,
    }
    named = found.path.rpartition("snap-")[2]
    if re.fullmatch(r"[0-9a-f]{16}", named) and int(named, 16) != row.number:
        found.add_problem(found.path, HEADER_BYTES, f"contains the number {row.number}")


def _topic_line(row: TopicRow) -> TopicLine:
    return TopicLine(
        id=row.id,
        name=text_of(row.name.encode("utf-8", "backslashreplace")),
        records=row.count,
        first_seq=row.first_seq,
        head=row.head,
        live_bytes=row.live_bytes,
        applied_lsn=row.applied_lsn,
        segments=len(row.segments),
        cold_segments=sum(meta.tier == COLD for meta in row.segments),
        inline_bytes=len(row.inline[2]) if row.inline is not None else 0,
        consumers=len(row.consumers),
    )


def _intent(disk: Disk, found: Inspection, count: int) -> None:
    payload = _payload(disk, found, INTENT_MAGIC)
    try:
        patches = msgspec.msgpack.decode(payload, type=list[Patch])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(found.path, HEADER_BYTES, f"cannot be decoded: {error}") from error
    shown: FirstAndLast[PatchLine] = FirstAndLast(count)
    for path, offset, data in patches:
        shown.add(PatchLine(text_of(path.encode("utf-8", "backslashreplace")), offset, len(data)))
    found.patches = shown.shown
    found.left_out["patches"] = shown.left_out
    found.facts |= {"patches": shown.count, "bytes_to_write": sum(len(data) for _, _, data in patches)}


def _watch(disk: Disk, found: Inspection) -> None:
    """Count the sessions. Only the worker can decode their contents."""
    sessions: set[str] = set()
    groups: set[tuple[str, str]] = set()
    entries = whole = 0
    try:
        for offset, end, entry in read_entries(disk, found.path):
            entries, whole = entries + 1, end
            sessions.difference_update(entry.ended)
            groups.difference_update(entry.ended_groups)
            try:
                sessions.update(_session(row).wid for row in entry.sessions)
                groups.update((topic, name) for topic, _, name, _ in map(_group, entry.groups))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Corrupt(found.path, offset, f"the rows cannot be read: {error}") from error
    except Corrupt:
        found.digests.append(Digest(f"{entries} entries", entries > 0))
        raise
    found.digests.append(Digest(f"{entries} entries", True))
    found.facts |= {"sessions": len(sessions), "groups": len(groups)}
    if entries and whole < found.bytes:
        found.notes.append(
            f"after byte {whole} there is no complete entry: one is being written, or a server died while writing it"
        )


def _transaction(disk: Disk, found: Inspection) -> None:
    """Describe the staged chunks. The producer and the batch are in the log and in snapshots."""
    chunks = records = size = decisions = 0
    end = HEADER_BYTES
    parts: dict[str, None] = {}
    for entry in entries(disk, found.path):
        end = entry.offset + entry.bytes
        if entry.chunk is None:
            decisions += 1
            continue
        parts[entry.chunk.part] = None
        chunks += 1
        records += entry.chunk.records
        size += entry.chunk.size
    found.digests.append(Digest(f"{chunks + decisions} entries", True))  # reading stops at the first bad one
    named = parse_name(found.path.rpartition("/")[2])
    found.facts |= {
        "transaction": f"{named[0]:016x}" if named is not None else None,
        "parts": len(parts),
        "chunks": chunks,
        "records": records,
        "record_bytes": size,
        "is_decided": bool(decisions),
    }
    if end < found.bytes:
        found.notes.append(
            f"after byte {end} there is no complete entry: a chunk is being written, or the rest of a commit was erased"
        )
