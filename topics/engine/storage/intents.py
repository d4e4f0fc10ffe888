"""Erase intents: a redo log for overwrites in place.

A power cut in the middle of an overwrite leaves a frame that is neither the old nor the new one, which recovery would take
for damage. So the intent is synced first, and recovery applies all of its patches again before it reads anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.storage.files import TEMP_SUFFIX, ensure_dir, read_digest_file, write_digest_file

MAGIC = b"TPCSINT\0"

Patch = tuple[str, int, bytes]  # path, offset, new bytes

_NAME = re.compile(r"intent-([0-9a-f]{16})")
_DECODER = msgspec.msgpack.Decoder(list[Patch])


def intent_path(meta_dir: str, number: int) -> str:
    return f"{meta_dir}/intent-{number:016x}"


def write_intent(disk: Disk, meta_dir: str, number: int, patches: Iterable[Patch]) -> None:
    """Write and sync the patches; only then may the first of them be applied."""
    ensure_dir(disk, meta_dir)
    write_digest_file(disk, intent_path(meta_dir, number), MAGIC, msgspec.msgpack.encode(list(patches)))


def apply_patches(disk: Disk, patches: Iterable[Patch]) -> None:
    """Write all patches and sync the files. Idempotent.

    A missing or shorter file no longer has the bytes to overwrite: retention may have removed it between the erase and the
    crash.
    """
    by_path: dict[str, list[tuple[int, bytes]]] = {}
    for path, offset, data in patches:
        by_path.setdefault(path, []).append((offset, data))
    for path, writes in by_path.items():
        if disk.exists(path):
            _patch_file(disk, path, writes)


def _patch_file(disk: Disk, path: str, writes: list[tuple[int, bytes]]) -> None:
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        for offset, data in writes:
            if offset < size:
                disk.write(handle, offset, data[: size - offset])
        disk.sync(handle)
    finally:
        disk.close(handle)


def pending_intents(disk: Disk, meta_dir: str) -> list[tuple[int, list[Patch]]]:
    """Intents left by a crash, oldest first.

    A temporary file was never complete, so none of its patches was applied: it is removed. A renamed file was synced; if it
    cannot be read it is damaged, and its patches may be half applied: Corrupt.
    """
    pending: list[tuple[int, list[Patch]]] = []
    for name in disk.list(meta_dir):
        if match := _NAME.fullmatch(name):
            number = int(match[1], 16)
            pending.append((number, _read_intent(disk, intent_path(meta_dir, number))))
        elif name.endswith(TEMP_SUFFIX) and _NAME.fullmatch(name.removesuffix(TEMP_SUFFIX)):
            disk.remove(f"{meta_dir}/{name}")
    return pending


def _read_intent(disk: Disk, path: str) -> list[Patch]:
    payload = read_digest_file(disk, path, MAGIC)
    try:
        return _DECODER.decode(payload)
    except ValueError as error:  # from msgspec, or for a path that is not UTF-8
        raise Corrupt(path, 0, f"cannot be decoded: {error}") from error


def finish_intent(disk: Disk, meta_dir: str, number: int) -> None:
    """Remove an intent whose patches are synced, durably: it must not come back after a power cut."""
    disk.remove(intent_path(meta_dir, number))
    disk.sync_dir(meta_dir)
