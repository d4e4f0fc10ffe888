"""Delta tables, one per topic, with delta-rs: tasks write the files, and one commit of the driver adds them.

The position of an export is in the table's log: each commit has an application transaction `topics-spark:<topic id>`
whose version is the next seq. Files and position are in one log entry, so they cannot disagree.

Files removed from the log (by an optimize) are still needed by older versions of the table. So an orphan is not a file
missing from the newest version, but one of our files that starts at or after the next seq.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa

from spark_pipeline.lake.table import (
    Busy,
    ExportFailed,
    Freshness,
    LakeUnavailable,
    recreated_topic_error,
    remove_files,
    rename_into_place,
)
from spark_pipeline.tasks.export import WANTED, ExportFile, sync
from topics.system.extras import install_command

LOG = "_delta_log"
APPLICATION = "topics-spark:"
SCHEMA = WANTED.schema().append(pa.field("date", pa.date32()))
_NEXT_SEQ = "topics_next_seq"  # in a commit's metadata, for humans and reports
_HISTORY_MAX = 50  # commits to search for our newest one


def folder_of(out: str, topic: str) -> Path:
    """Escaped with ~, which topic names do not contain: delta-rs does not support percent signs in paths."""
    return Path(os.path.abspath(out)) / quote(topic, safe="").replace("%", "~")


class DeltaTable:
    def __init__(self, folder: Path, topic: str, topic_id: str) -> None:
        self._folder, self._topic = folder, topic
        self._application = f"{APPLICATION}{topic_id}"
        self._table = _open(folder)
        self.next_seq = 1
        if self._table is not None:
            found = self._table.transaction_version(self._application)
            if found is None:
                raise recreated_topic_error(folder, topic)
            self.next_seq = int(found)

    def remove_orphans(self) -> None:
        remove_files(self._folder, lambda path, first_seq: first_seq >= self.next_seq)

    def publish(self, files: Sequence[ExportFile], next_seq: int) -> None:
        delta = _package()
        rename_into_place(self._folder, files)
        sync(self._folder)  # directories of new days
        if self._table is None:
            # With a position from the start: a table without one belongs to another topic.
            self._table = delta.DeltaTable.create(
                self._folder,
                SCHEMA,
                partition_by=["date"],
                name=self._topic,
                description=f"records of the topic {self._topic}",
                commit_properties=self._properties(1),
            )
            sync(self._folder.parent)
        before = self._table.version()
        try:
            self._table.create_write_transaction(
                [_added(file) for file in files],
                mode="append",
                schema=SCHEMA,
                partition_by=["date"],
                commit_properties=self._properties(next_seq),
            )
        except delta.exceptions.CommitFailedError as error:
            raise Busy(f"{self._folder} was changed concurrently: {error}; run it again later") from error
        self._table.update_incremental()
        self._sync_log(before)
        self.next_seq = next_seq

    def _properties(self, next_seq: int) -> Any:
        delta = _package()
        return delta.CommitProperties(
            custom_metadata={_NEXT_SEQ: str(next_seq)},
            app_transactions=[delta.Transaction(self._application, next_seq)],
        )

    def _sync_log(self, since: int) -> None:
        """Sync the log: delta-rs does not."""
        log = self._folder / LOG
        for path in log.iterdir():
            number = path.name[:20]
            if number.isdigit() and int(number) >= since:
                sync(path)
        sync(log)
        sync(self._folder)


def _added(file: ExportFile) -> Any:
    from deltalake.transaction import AddAction

    stats = {
        "numRecords": file.rows,
        "minValues": {"seq": file.first_seq, "ts": _moment(file.ts_min)},
        "maxValues": {"seq": file.next_seq - 1, "ts": _moment(file.ts_max)},
        "nullCount": {"seq": 0, "ts": 0},
    }
    return AddAction(
        path=file.path,
        size=file.bytes,
        partition_values={"date": file.path.partition("/")[0].removeprefix("date=")},
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=msgspec.json.encode(stats).decode(),
    )


def _moment(ts_ms: int) -> str:
    return datetime.fromtimestamp(ts_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _package() -> Any:
    try:
        import deltalake
    except ImportError:
        raise LakeUnavailable(
            f"Delta tables need the package deltalake: {install_command('delta')}"
        ) from None
    return deltalake


def _open(folder: Path) -> Any:
    """None: there is no table yet."""
    delta = _package()
    if "%" in str(folder):
        raise LakeUnavailable(
            f"{folder}: delta-rs does not support paths with a percent sign; export to another directory"
        )
    if not (folder / LOG).exists():
        return None
    try:
        return delta.DeltaTable(folder)
    except delta.exceptions.TableNotFoundError:
        return None  # a run died before the first log entry
    except Exception as error:  # delta-rs raises many types
        raise ExportFailed(
            f"{folder} is not a readable Delta table ({error}). If the newest file of {LOG} is truncated, for example by a power "
            f"failure, delete that file; otherwise restore {LOG} from a backup, or delete {folder} to export everything again"
        ) from error


def freshness(folder: Path) -> Freshness | None:
    table = _open(folder) if (folder / LOG).exists() else None
    if table is None:
        return None
    actions = pa.table(table.get_add_actions(flatten=True))
    next_seq = at_ms = 0
    for entry in table.history(_HISTORY_MAX):
        if _NEXT_SEQ in entry:
            next_seq, at_ms = int(entry[_NEXT_SEQ]), int(entry.get("timestamp") or 0)
            break
    rows = actions.column("num_records").to_pylist()
    return Freshness(
        "delta",
        next_seq,
        sum(count or 0 for count in rows),
        sum(actions.column("size_bytes").to_pylist()),
        len(rows),
        at_ms,
    )
