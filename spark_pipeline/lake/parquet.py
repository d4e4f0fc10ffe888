"""Plain Parquet exports: `_manifest.json` lists the files of a topic and the seq where the next run continues."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from spark_pipeline.lake.table import (
    ExportFailed,
    Freshness,
    recreated_topic_error,
    remove_files,
    rename_into_place,
)
from spark_pipeline.tasks.export import ExportFile, sync

MANIFEST = "_manifest.json"


class LakeFile(msgspec.Struct, frozen=True):
    """Seqs are half-open."""

    path: str
    rows: int
    bytes: int
    first_seq: int
    next_seq: int


class LakeManifest(msgspec.Struct):
    topic: str
    topic_id: str
    next_seq: int = 1
    rows: int = 0
    bytes: int = 0
    files: list[LakeFile] = []
    version: int = 1
    exported_at_ms: int = 0


def folder_of(out: str, topic: str) -> Path:
    """Named like a Hive partition."""
    return Path(os.path.abspath(out)) / f"topic={quote(topic, safe='')}"


class ParquetTable:
    def __init__(self, folder: Path, topic: str, topic_id: str) -> None:
        self._folder = folder
        found = read_manifest(folder)
        if found is not None and found.topic_id != topic_id:
            raise recreated_topic_error(folder, topic)
        self._manifest = found or LakeManifest(topic, topic_id)
        self.next_seq = self._manifest.next_seq

    def remove_orphans(self) -> None:
        named = {file.path for file in self._manifest.files}
        remove_files(self._folder, lambda path, first_seq: path not in named)

    def publish(self, files: Sequence[ExportFile], next_seq: int) -> None:
        rename_into_place(self._folder, files)
        manifest = self._manifest
        manifest.files = [
            *manifest.files,
            *(LakeFile(file.path, file.rows, file.bytes, file.first_seq, file.next_seq) for file in files),
        ]
        manifest.next_seq = self.next_seq = next_seq
        manifest.rows = sum(file.rows for file in manifest.files)
        manifest.bytes = sum(file.bytes for file in manifest.files)
        manifest.exported_at_ms = time.time_ns() // 1_000_000
        temporary = self._folder / f".{MANIFEST}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        sync(temporary)
        sync(self._folder)  # directories of new days before the manifest that refers to them
        os.replace(temporary, self._folder / MANIFEST)
        sync(self._folder)
        sync(self._folder.parent)


def read_manifest(folder: Path) -> LakeManifest | None:
    """None: nothing is exported yet."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=LakeManifest)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Without it the valid files are not known; guessing could write rows twice.
        raise ExportFailed(
            f"{folder / MANIFEST} cannot be read ({error}); restore it from a backup, or delete {folder} to export everything again"
        ) from error


def freshness(folder: Path) -> Freshness | None:
    found = read_manifest(folder)
    if found is None:
        return None
    return Freshness(
        "parquet", found.next_seq, found.rows, found.bytes, len(found.files), found.exported_at_ms
    )
