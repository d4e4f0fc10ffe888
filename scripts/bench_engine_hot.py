"""Rows that compare with a minimal implementation of the same work: append, diff, recovery, start."""

from __future__ import annotations

import glob
import os
import random
from statistics import median

import numpy as np
from bench_engine_support import PAYLOADS, Row, Run, Shell, WatchedDisk, against_floor, elapsed, plain
from xxhash import xxh3_64_digest

from topics.engine.commands import topics as c
from topics.engine.reading.render import render_records
from topics.engine.storage.frames import HEADER
from topics.engine.storage.segments import ROW
from topics.engine.storage.wal import ENVELOPE, ENVELOPE_BYTES, ENVELOPE_MAGIC, FILE_HEADER_BYTES

US = 1000.0
TS = 1748470000123


def _frames(payloads: list[bytes], first_seq: int) -> bytes:
    """The floor of an append: the same frames, packed, hashed and joined."""
    pack = HEADER.pack
    pieces: list[bytes] = []
    for seq, payload in enumerate(payloads, first_seq):
        size = len(payload)
        body = pack(size + 42, 1, 0, 1024, seq, TS, 0, 0, size) + payload
        pieces += (body, xxh3_64_digest(body))
    return b"".join(pieces)


def append_batches(run: Run) -> list[Row]:
    turns, rounds = run.count(200), 15
    with run.directory("append-100") as path:
        shell = Shell(path)
        shell.send(plain("t"))
        shell.fill("t", run.count(300_000))  # fills the cache of recent entries, to reach the steady state

        def ours() -> float:
            shell.reset()
            for _ in range(turns):
                shell.send(c.Append("t", c.Records(PAYLOADS)))
            return shell.loop_ns / turns / 100

        def floor() -> float:
            return elapsed(lambda: [_frames(PAYLOADS, 1) for _ in range(turns)]) / turns / 100

        mine, lowest, ratio = against_floor(ours, floor, rounds)
        shell.abandon()
    return [
        Row("append, batch 100 of 100 B", mine / US, "µs/record", lowest / US, ratio, "≤ 2.5 x", ratio <= 2.5)
    ]


def append_singles(run: Run) -> list[Row]:
    rows: list[Row] = []
    for per_turn, turns, aim in ((64, run.count(100), 8.0), (1, run.count(2000), None)):
        with run.directory("append-1") as path:
            shell = Shell(path)
            shell.send(plain("t"))
            for _ in range(run.count(300_000) // 64 if per_turn > 1 else run.count(4000)):
                shell.send(*[c.Append("t", c.Records([payload])) for payload in PAYLOADS[:per_turn]])

            def ours(per_turn: int = per_turn, turns: int = turns, shell: Shell = shell) -> float:
                shell.reset()
                for _ in range(turns):
                    shell.send(*[c.Append("t", c.Records([payload])) for payload in PAYLOADS[:per_turn]])
                return shell.loop_ns / turns / per_turn

            def floor(count: int = per_turn * turns) -> float:
                singles = [[PAYLOADS[i % 100]] for i in range(count)]
                return elapsed(lambda: [_frames(single, 1) for single in singles]) / count

            mine, lowest, ratio = against_floor(ours, floor, 11)
            shell.abandon()
        work = f"append, batch 1, {per_turn} a turn"
        if aim:
            rows.append(Row(work, mine / US, "µs/record", lowest / US, ratio, f"≤ {aim:g} x", ratio <= aim))
        else:
            rows.append(
                Row(work, mine / US, "µs/record", lowest / US, ratio, "–", note="one write call a record")
            )
    return rows


def diff_to_json(run: Run) -> list[Row]:
    total, rounds = run.count(200_000) // 1000 * 1000, 40
    pages = total // 1000
    template = b'{"$seq":%d,"$ts":%d,"data":%b}'
    with run.directory("diff") as path:
        shell = Shell(path)
        shell.send(plain("t"))
        shell.fill("t", total)
        shell.checkpoint()
        at = [0]

        def read() -> tuple[c.Page, bytes]:
            at[0] = (at[0] + 1) % pages
            outcome = shell.engine.turn([(0, c.Diff("t", at[0] * 1000, 1000))])
            page = outcome.replies[0][1]
            assert isinstance(page, c.Page)
            return page, render_records(page)

        page, text = read()
        seqs, times = list(map(int, page.seqs)), list(map(int, page.timestamps))
        payloads = [PAYLOADS[(seq - 1) % 100] for seq in seqs]

        def format_ready() -> bytes:
            return b",".join([template % row for row in zip(seqs, times, payloads)])

        assert len(seqs) == 1000 and format_ready() == text
        for _ in range(pages):  # blocks are verified on their first read
            read()
        mine, lowest, ratio = against_floor(
            lambda: elapsed(lambda: [read() for _ in range(5)]) / 5000,
            lambda: elapsed(lambda: [format_ready() for _ in range(5)]) / 5000,
            rounds,
        )
        renders = against_floor(
            lambda: elapsed(lambda: [render_records(page) for _ in range(5)]) / 5000, lambda: 1.0, rounds
        )
        shell.abandon()
    note = f"of it rendering {renders[0] / US:.2f} µs"
    return [
        Row(
            "diff of 1000 rows to JSON",
            mine / US,
            "µs/record",
            lowest / US,
            ratio,
            "≤ 1.5 x",
            ratio <= 1.5,
            note,
        )
    ]


def _unpack_all(files: list[bytes]) -> int:
    """The floor of recovery: unpack every frame of every envelope."""
    count = 0
    unpack = HEADER.unpack_from
    for data in files:
        at = FILE_HEADER_BYTES
        while data[at : at + 4] == ENVELOPE_MAGIC:
            start = at + ENVELOPE_BYTES
            end = start + ENVELOPE.unpack_from(data, at)[1]
            while start < end:
                header = unpack(data, start)
                start += header[0] + 4
                count += 1
            at = (end + 7) & ~7
    return count


def recovery(run: Run) -> list[Row]:
    total = run.count(1_000_000)
    with run.directory("recovery") as path:
        shell = Shell(path)
        shell.send(plain("t"))
        shell.fill("t", total)
        for _ in range(2):  # a later entry shows recovery that the earlier ones are synced
            while shell.engine.wal.synced_lsn < shell.engine.wal.last_lsn:
                shell.send()
            shell.fill("t", 100)
        shell.abandon()
        files = [_read(name) for name in sorted(glob.glob(f"{path}/*/*/wal/*.log"))]
        head = total + 200

        waits: list[float] = []

        def ours() -> float:
            disk = WatchedDisk(path)
            again: list[Shell] = []
            taken = elapsed(lambda: again.append(Shell(path, disk=disk)))
            assert again[0].engine.shard.state.published["t"].view.head == head
            again[0].abandon()
            waits.append(disk.wait_ns / 1e9)
            return (taken - disk.wait_ns) / head

        def floor() -> float:
            counts: list[int] = []
            taken = elapsed(lambda: counts.append(_unpack_all(files)))
            assert counts[0] >= head
            return taken / counts[0]

        mine, lowest, ratio = against_floor(ours, floor, 3)
        note = f"plus {median(waits):.2f} s to zero-fill and sync a new log file"
    return [
        Row(
            "recovery of 1 M records from the WAL",
            mine / US,
            "µs/record",
            lowest / US,
            ratio,
            "≤ 3 x",
            ratio <= 3,
            note,
        )
    ]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _tag_map(idx_paths: list[str]) -> dict[int, list[int]]:
    """The floor of a start: read the index files and list the records of every tag id."""
    seqs_by_tag: dict[int, list[int]] = {}
    for path in idx_paths:
        seq = int(os.path.basename(path).split("-")[1], 16)
        for tag_id in np.frombuffer(_read(path), dtype=ROW, offset=16)["tag"].tolist():
            if tag_id:
                seqs_by_tag.setdefault(tag_id, []).append(seq)
            seq += 1
    return seqs_by_tag


def _tag_names(idx_paths: list[str]) -> dict[bytes, None]:
    """What the floor omits: ids are per segment, so a map by tag also needs the names of every segment."""
    tags: dict[bytes, None] = {}
    for path in idx_paths:
        names = _read(path.removesuffix("idx") + "dict")
        at = 16  # after the file header; there are only blocks of tags
        while at < len(names):
            count = int.from_bytes(names[at + 4 : at + 8], "little")
            text = at + 12 + 2 * count
            for i in range(at + 12, text, 2):
                size = names[i] | names[i + 1] << 8
                tags[names[text : text + size]] = None
                text += size
            at = text
    return tags


def start(run: Run) -> list[Row]:
    total, tags = run.count(1_000_000), 10_000
    names = [b"sensor.%d.value" % i for i in range(tags)]
    order = random.Random(1)
    with run.directory("start") as path:
        shell = Shell(path)
        shell.send(plain("t"))
        shell.fill("t", total, lambda i: names[order.randrange(tags)])
        shell.engine.close()
        idx_paths = sorted(glob.glob(f"{path}/topics/*/*.idx"))
        tags_used = len(_tag_names(idx_paths))
        data_read: list[int] = []
        waits: list[float] = []

        def ours() -> float:
            disk = WatchedDisk(path)
            again: list[Shell] = []

            def open_and_touch() -> None:
                again.append(Shell(path, disk=disk))
                again[0].engine.turn([(0, c.State("t"))])

            taken = elapsed(open_and_touch)
            log = again[0].engine.shard.state.published["t"]
            assert log.count == total and len(log.tags) == tags_used
            data_read.append(disk.bytes_read.get(".data", 0))
            waits.append(disk.wait_ns / 1e9)
            again[0].abandon()
            return (taken - disk.wait_ns) / total

        names_ns: list[float] = []

        def floor() -> float:
            names_ns.append(elapsed(lambda: _tag_names(idx_paths)) / total)
            return elapsed(lambda: _tag_map(idx_paths)) / total

        mine, lowest, ratio = against_floor(ours, floor, 5)
    note = (
        f"{max(data_read)} bytes of .data read; {mine / (lowest + median(names_ns)):.2f} x of a floor that also reads "
        f".dict; plus {median(waits):.2f} s to zero-fill and sync a new log file"
    )
    met = ratio <= 3 and not max(data_read)
    work = "start, 1 M checkpointed records, 10 k tags"
    return [Row(work, mine / US, "µs/record", lowest / US, ratio, "≤ 3 x, no .data", met, note)]


ROWS = [append_batches, append_singles, diff_to_json, recovery, start]
