"""A job that executes a merge plan, small and slow: one row at a time, with the engine's codec and none of the
server's code.

`Merger(store, body).run()` takes the answer of a plan call. It reads inputs and deletion marks, and writes the four
files of each output into staging, the sidecar last. The store is anything with `put`, `read_range`, `length` and
`exists`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from topics.engine.core.ports import SegmentStore
from topics.engine.storage.delete_marks import salvage_deleted
from topics.engine.storage.files import HEADER_BYTES, header, with_digest, xxh
from topics.engine.storage.sealing import Sum
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    DATA_MAGIC,
    IDX_MAGIC,
    ROW,
    SUM_MAGIC,
    IndexFiles,
    SegmentMeta,
    parse_dict,
)


class Damaged(Exception):
    """An input does not match its .sum file."""


class Merger:
    def __init__(self, store: SegmentStore, plan: dict[str, Any], attempt: str = "1") -> None:
        self.store = store
        self.plan = msgspec.to_builtins(plan)
        self.attempt = attempt

    def run(self) -> None:
        for group in self.plan["groups"]:
            if not self.store.exists(f"{self.plan['staging']}/group-{group['group']}.json"):
                self.merge(group)

    def merge(self, group: dict[str, Any]) -> None:
        try:
            sidecar = self._merge(group)
        except Damaged as error:
            sidecar = {"group": group["group"], "failed": str(error), "segment": error.args[1]}
        self.put(f"group-{group['group']}.json", msgspec.json.encode(sidecar))

    def put(self, name: str, data: bytes) -> None:
        self.store.put(f"{self.plan['staging']}/{name}", [data])

    def _read(self, key: str) -> bytes:
        return self.store.read_range(key, 0, self.store.length(key))

    def _merge(self, group: dict[str, Any]) -> dict[str, Any]:
        tags: dict[bytes, int] = {}
        nodes: dict[bytes, int] = {}
        expiries: list[tuple[int, int]] = []
        data = bytearray(header(DATA_MAGIC))
        rows = np.zeros(group["next_seq"] - group["first_seq"], dtype=ROW)
        at = 0
        for one in group["inputs"]:
            before, names, theirs, content = self._input(one)
            dead = np.zeros(len(before), dtype=np.bool_)
            if one["dead"] is not None:
                meta = SegmentMeta(one["first_seq"], one["generation"], one["rows"])
                dead = salvage_deleted(self._read(one["dead"]), meta)
            for i in range(len(before)):
                row = rows[at + i]
                row["ts"] = before["ts"][i]
                if dead[i] or not before["length"][i]:
                    continue
                start, length = int(before["offset"][i]), int(before["length"][i])
                for column in ("length", "flags", "size"):
                    row[column] = before[column][i]
                row["offset"] = len(data)
                for column, known, local in (("tag", tags, names[0]), ("node", nodes, names[1])):
                    if before[column][i]:
                        name = local[int(before[column][i]) - 1]
                        row[column] = known.setdefault(name, len(known) + 1)
                data += content[start : start + length]
            gone = dead | (before["length"] == 0)
            expiries += [(at + row, time) for row, time in theirs.tolist() if not gone[row]]
            at += len(before)
        return self._write(group, bytes(data), rows, list(tags), list(nodes), expiries)

    def _input(self, one: dict[str, Any]) -> tuple[Any, tuple[list[bytes], list[bytes]], Any, bytes]:
        base = f"topics/{self.plan['topic_id']}/{one['name']}"
        raw = self._read(f"{base}.sum")
        if raw[-8:].hex() != one["sum_digest"]:
            raise Damaged("not the .sum of the plan", one["name"])
        summary = msgspec.msgpack.decode(raw[HEADER_BYTES:-8], type=Sum)
        idx, content = self._read(f"{base}.idx"), self._read(f"{base}.data")
        blocks = [xxh(content[i : i + BLOCK_BYTES]) for i in range(0, len(content), BLOCK_BYTES)]
        if xxh(idx) != summary.idx_digest or blocks != summary.blocks:
            raise Damaged("a digest does not match", one["name"])
        tags, nodes, expiries = (
            parse_dict(base, self._read(f"{base}.dict"))
            if one["dict_bytes"]
            else ([], [], np.zeros(0, "u4,u8"))
        )
        return np.frombuffer(idx, dtype=ROW, offset=HEADER_BYTES), (tags, nodes), expiries, content

    def _write(
        self,
        group: dict[str, Any],
        data: bytes,
        rows: Any,
        tags: list[bytes],
        nodes: list[bytes],
        expiries: list[tuple[int, int]],
    ) -> dict[str, Any]:
        times = rows["ts"][rows["ts"] > 0]
        index = IndexFiles.build(
            rows, tags, nodes, np.array(expiries, dtype=[("row", "<u4"), ("time", "<u8")])
        )
        assert index.idx[:HEADER_BYTES] == header(IDX_MAGIC)
        summary = Sum(
            first_seq=group["first_seq"],
            generation=group["generation"],
            rows=len(rows),
            live=int(np.count_nonzero(rows["length"])),
            data_bytes=len(data),
            dict_bytes=len(index.names),
            tag_names=len(tags),
            node_names=len(nodes),
            ts_min=int(times.min()) if len(times) else 0,
            ts_max=int(times.max()) if len(times) else 0,
            idx_digest=xxh(index.idx),
            dict_digest=xxh(index.names) if index.names else b"",
            blocks=[xxh(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)],
            chain=bytes.fromhex(group["chain"]),
            origin=bytes.fromhex(group["origin"]),
        )
        content = with_digest(SUM_MAGIC, msgspec.msgpack.encode(summary))
        stem = f"group-{group['group']}.{self.attempt}"
        self.put(f"{stem}.data", data)
        self.put(f"{stem}.idx", index.idx)
        if index.names:
            self.put(f"{stem}.dict", index.names)
        self.put(f"{stem}.sum", content)
        return {
            "group": group["group"],
            "attempt": self.attempt,
            "rows": len(rows),
            "live": summary.live,
            "data_bytes": len(data),
            "idx_bytes": len(index.idx),
            "dict_bytes": len(index.names),
            "tag_names": len(tags),
            "node_names": len(nodes),
            "ts_min": summary.ts_min,
            "ts_max": summary.ts_max,
            "sum_digest": content[-8:].hex(),
        }
