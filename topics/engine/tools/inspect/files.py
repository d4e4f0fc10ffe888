"""`topics inspect`: what a file of a data directory is, what it says, and whether that is what was written.

It only looks, at a file that a server may be writing, and never has more of it in memory than a row, an envelope or a
MiB. What is wrong is told with its place; nothing that a file contains is an error of this program.
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
from topics.engine.upkeep.checkpoint import ShardRow, TopicRow

SMALL_BYTES_MAX = 4096  # of layout.json and cold-id

_SNAPSHOT = re.compile(r"snap-[0-9a-f]{16}")
_INTENT = re.compile(r"intent-[0-9a-f]{16}")
_COLD_ID = re.compile(rb"[0-9a-f]{32}\n?")
_KIND_OF_NAME = {
    LAYOUT_NAME: "layout",
    COLD_ID_NAME: "cold-id",
    WATCH_NAME: "watch",
    "LOCK": "lock",  # whoever uses the directory holds a lock on it; the pid in it is for people
    "RUN": "run",  # where the sockets of a running server are
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
    """The beginning of a session's row."""

    wid: str


_session = msgspec.msgpack.Decoder(_Session).decode
_group = msgspec.msgpack.Decoder(tuple[str, int, str, int]).decode
# A file that was found without an owner is kept under its name, and that of its shard or topic before it.
_OWNER = re.compile(r"(?:shard-[0-9]+|[0-9a-f]{16})-(?=wal-|snap-|intent-|txn-)")


def inspect(
    disk: Disk, path: str, *, records: int = 10, from_seq: int | None = None, cold_dir: str | None = None
) -> Inspection:
    """OSError: there is no such file, or it cannot be opened. `cold_dir` is the root of the cold tier."""
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
        found.notes.append("it never got its real name: it is being written, or was when a server died")
    try:
        _describe(disk, found, name, records, from_seq, cold_dir)
    except (TopicsError, OSError) as error:
        found.caught(error, path)
    found.left_out = {what: number for what, number in found.left_out.items() if number}
    return found


def _kind(name: str, head: bytes) -> str:
    """By the name, and for files that somebody has renamed by what they begin with."""
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
                what = "a file of a segment under another name; its others are looked for by the name seg-<seq>-<generation>"
                found.trouble(found.path, 0, what)
                return
            folder = found.path.rpartition("/")[0].rpartition("/")[2]
            there = f"{cold_dir}/topics/{folder}" if cold_dir is not None else None
            inspect_segment(disk, found, segment[0], segment[1], count, from_seq, there)
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
                raise Corrupt(found.path, 0, "does not hold the 32 hexadecimal digits of an id")
            found.facts["id"] = text.decode("ascii").strip()
        case "manifest" | "dead-rows" | "current" | "pin" | "plan":
            inspect_manifest(found, _whole(disk, found))
        case "sidecar" | "marks" | "output":
            is_small = found.kind != "output" or name.endswith(".sum")
            head = _range(disk, found.path, 0, min(found.bytes, HEADER_BYTES))
            inspect_staging(found, head, _whole(disk, found) if is_small else b"")
        case "reserve":
            found.version = None
            found.notes.append("space that a shard holds for when the disk is full")
        case "lock" | "run":
            found.facts["text"] = text_of(_small(disk, found).strip())
        case _:
            found.version = None
            found.trouble(
                found.path, 0, "is no file of topics: neither its name nor its first bytes are known"
            )


def _whole(disk: Disk, found: Inspection) -> bytes:
    if found.bytes > WHOLE_BYTES_MAX:
        raise Corrupt(found.path, WHOLE_BYTES_MAX, f"{found.bytes} bytes are more than is looked at")
    return _range(disk, found.path, 0, found.bytes)


def _small(disk: Disk, found: Inspection) -> bytes:
    found.version = None
    if found.bytes > SMALL_BYTES_MAX:
        raise Corrupt(found.path, SMALL_BYTES_MAX, f"has {found.bytes} bytes, which is far too long")
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
        raise Corrupt(found.path, start, f"{end - start} bytes are more than is looked at; the digest holds")
    return _range(disk, found.path, start, end)


# -- state -------------------------------------------------------------------------------------------------


def _snapshot(disk: Disk, found: Inspection, count: int) -> None:
    path = found.path
    start, end = HEADER_BYTES, max(HEADER_BYTES, found.bytes - 8)
    try:
        start, end = _check_digest(disk, found, SNAPSHOT_MAGIC)
    except Corrupt as error:
        # Names and places that can still be read help whoever has lost it.
        found.caught(error, path)
        found.notes.append("the rows are told as they are, though the digest does not vouch for them")
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
            raise Corrupt(path, last[0], f"holds {number} rows, which is not what its closing row says")
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
        found.trouble(found.path, HEADER_BYTES, f"says that it is number {row.number}")


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
    """What sessions are about is the worker's knowledge; here they are counted."""
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
            f"behind byte {whole} there is no whole entry: one is being written, or was when a server died"
        )


def _transaction(disk: Disk, found: Inspection) -> None:
    """Who staged it and for which batch is in the log and in snapshots; here it is what was staged."""
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
    found.digests.append(Digest(f"{chunks + decisions} entries", True))  # it goes on as far as they hold
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
            f"behind byte {end} there is no whole entry: a chunk was being written, or a commit has been erased from here on"
        )
