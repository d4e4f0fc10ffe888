"""Goal: the checker reports broken promises about transactions, merges or snapshots, under the right rule, and
nothing else.

Method: histories built by hand, as in test_checker, by a server that also has transactions. The test makes them
illegal by changing its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.checker import assert_ok
from tests.support.history import Op
from tests.support.scripted_server import Cases, Row, ScriptedServer, StoredTopic

CASES = Cases()
FSYNC = {"durability": "fsync"}


@dataclass
class Txn:
    batch: int
    chunks: dict[tuple[str, int], list[Row]] = field(default_factory=dict)


class BatchServer(ScriptedServer):
    """One producer, `p`. A batch of more than 3 records, in several chunks, is appended chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.history.happened("pieces", note="3")
        self.txns: dict[str, Txn] = {}
        self.last = (0, 0, 0, 0)  # batch, first, last, count
        self.ask("put", **FSYNC)

    # -- the server ----------------------------------------------------------------------------------------

    def _begin(self, op: Op) -> tuple[int, Row]:
        batch, txn = op.request["batch"], f"{op.request['batch']:016x}"
        if batch <= self.last[0]:
            return 200, self.committed(txn)
        self.txns.setdefault(txn, Txn(batch))
        return 200, self.told(txn, "open")

    def _stage(self, op: Op) -> tuple[int, Row]:
        request = op.request
        chunks = self.txns[request["txn"]].chunks
        key = request["part"], request["chunk"]
        repeated = key in chunks
        chunks.setdefault(key, request["records"])
        answer: Row = {"topic": "t", "part": key[0], "chunk": key[1]}
        return 200, answer | {"records": len(request["records"]), "repeated": repeated}

    def _commit(self, op: Op) -> tuple[int, Row]:
        txn = op.request["txn"]
        open_txn = self.txns.pop(txn, None)
        if open_txn is not None:
            keys = [(part["part"], n) for part in op.request["parts"] for n in range(part["chunks"])]
            self.append(open_txn.batch, [open_txn.chunks[key] for key in keys])
        return 200, self.committed(txn)

    def _abort(self, op: Op) -> tuple[int, Row]:
        self.txns.pop(op.request["txn"])
        return 200, {"topic": "t", "txn": op.request["txn"], "state": "aborted"}

    def append(self, batch: int, chunks: list[list[Row]]) -> None:
        first, count = self.held["t"].head + 1, 0
        for records in chunks:
            self.do(Op("p", "write", "t", {"records": records}, 0))
            count += len(records)
        self.last = (batch, first, self.held["t"].head, count)

    def committed(self, txn: str) -> Row:
        answer = self.told(txn, "committed")
        if int(txn, 16) == self.last[0]:
            answer |= {"first_seq": self.last[1], "last_seq": self.last[2], "count": self.last[3]}
        return answer

    @staticmethod
    def told(txn: str, state: str) -> Row:
        return {"topic": "t", "txn": txn, "state": state, "first_seq": None, "last_seq": None, "count": None}

    # -- requests of a producer ------------------------------------------------------------------------------

    def begin(self, batch: int = 1) -> Op:
        return self.ask("begin", producer="p", batch=batch)

    def staged(self, batch: int = 1, chunks: int = 2, size: int = 1, part: str = "a") -> list[Row]:
        """Begin and stage; returns the parts that a commit names."""
        txn = self.begin(batch).answer["txn"]
        for chunk in range(chunks):
            self.stage(txn, part, chunk, size)
        return [{"part": part, "chunks": chunks, "records": chunks * size}]

    def stage(self, txn: str, part: str, chunk: int, size: int = 1) -> Op:
        records = [{"data": {"w": f"{txn}-{part}-{chunk}", "i": i}} for i in range(size)]
        return self.ask("stage", txn=txn, part=part, chunk=chunk, records=records)

    def send_commit(self, parts: list[Row], batch: int = 1) -> Op:
        return self.send("commit", txn=f"{batch:016x}", parts=parts)

    def commit(self, parts: list[Row], batch: int = 1) -> Op:
        return self.finish(self.send_commit(parts, batch))

    def publish(self, plan_id: str = "1", manifest: int = 3) -> Op:
        op = self.send("publish", plan_id=plan_id, lease="l")
        answer = {"plan_id": plan_id, "state": "committed", "manifest": manifest, "groups": [], "failed": []}
        return self.reply(op, (200, answer))

    def merges(self, *committed: str) -> Op:
        names = ["plan", "retired_segments", "retired_bytes", "snapshots", "manifest"]
        return self.reply(self.send("merges"), (200, {**dict.fromkeys(names), "committed": list(committed)}))

    def scan(self, *seqs: int) -> Op:
        """The files of a snapshot that is pinned now show these records."""
        held = self.held["t"]
        records = [held.live[seq] for seq in seqs]
        answer = {"topic": "t", "records": records, "first_seq": held.earliest, "next_seq": held.head + 1}
        return self.reply(self.send("scan"), (200, answer))


# -- legal ---------------------------------------------------------------------------------------------------


@CASES.is_legal
def a_batch_and_what_is_said_of_it_again(server: BatchServer) -> None:
    parts = server.staged()
    server.commit(parts)
    server.read()
    server.commit(parts)
    server.begin()
    server.write()
    server.commit(server.staged(2), 2)
    server.begin(1)
    server.read()


@CASES.is_legal
def a_commit_without_an_answer_that_was_done_or_not(server: BatchServer) -> None:
    server.lose(server.send_commit(server.staged(1)), executed=True)
    server.read()
    server.begin(1)
    parts = server.staged(2)
    server.lose(server.send_commit(parts, 2))
    server.begin(2)
    server.commit(parts, 2)
    server.event("calm")
    server.read()


@CASES.is_legal
def a_large_batch_with_others_between(server: BatchServer) -> None:
    parts = server.staged(chunks=2, size=2)
    op = server.send_commit(parts)
    chunks = list(server.txns.pop(op.request["txn"]).chunks.values())
    server.append(1, chunks[:1])
    server.read()
    server.write()
    server.append(1, chunks[1:])
    server.last = (1, 1, 5, 4)
    server.reply(op, (200, server.committed(op.request["txn"])))
    server.read()


@CASES.is_legal
def a_power_cut_takes_a_batch_that_nobody_was_told_of(server: BatchServer) -> None:
    server.ask("put")  # of class `disk`
    parts = server.staged()
    server.lose(server.send_commit(parts), executed=True)
    server.read()
    server.event("power")
    server.held["t"].live.clear()
    server.held["t"].gaps.append((1, 2, "crash"))
    server.last = (0, 0, 0, 0)
    server.commit(server.staged())
    server.read(2)


@CASES.is_legal
def a_power_cut_takes_chunks_that_were_seen_and_they_come_again(server: BatchServer) -> None:
    server.ask("put")  # of class `disk`
    parts = server.staged(chunks=2, size=2)
    op = server.send_commit(parts)
    chunks = list(server.txns.pop(op.request["txn"]).chunks.values())
    server.append(1, chunks)
    server.lose(op)
    server.read()
    server.event("power")
    for seq in (3, 4):
        del server.held["t"].live[seq]
    server.held["t"].gaps.append((3, 4, "crash"))
    server.append(1, chunks[1:])
    server.last = (1, 1, 6, 4)
    server.commit(parts)
    server.read(2)


@CASES.is_legal
def a_crash_takes_the_first_chunks_of_an_ephemeral_topic(server: BatchServer) -> None:
    """The batch was decided, so all chunks are appended again."""
    server.ask("put", durability="ephemeral")
    server.write(3)
    cut_short(server)
    server.held["t"] = StoredTopic(server.held["t"].config)
    server.append(1, large(server))
    server.event("calm")
    server.begin()
    server.read()


def cut_short(server: BatchServer) -> None:
    """The worker dies when one chunk of a large batch is there."""
    op = server.send_commit(server.staged(chunks=3, size=2))
    server.append(1, large(server)[:1])
    server.read()
    server.event("kill", "t")
    server.lose(op)


def large(server: BatchServer) -> list[list[Row]]:
    return list(server.txns[f"{1:016x}"].chunks.values())


@CASES.is_legal
def aborted_and_begun_again(server: BatchServer) -> None:
    server.staged()
    server.ask("abort", txn=f"{1:016x}")
    server.commit(server.staged(part="b"))
    server.read()


@CASES.is_legal
def merged_and_scanned(server: BatchServer) -> None:
    server.write(3)
    server.publish()
    server.publish()
    server.merges("1")
    server.ask("delete", seqs=[2])
    server.scan(1, 3)


# -- broken --------------------------------------------------------------------------------------------------


@CASES.breaks("moved")
def a_batch_is_appended_once_more(server: BatchServer) -> None:
    parts = server.staged()
    chunks = list(server.txns[f"{1:016x}"].chunks.values())
    server.commit(parts)
    server.read()
    server.append(1, chunks)
    server.read()


@CASES.breaks("twice")
def two_tries_of_a_batch_are_there(server: BatchServer) -> None:
    server.lose(server.send_commit(server.staged(part="a")), executed=True)
    server.last = (0, 0, 0, 0)
    server.commit(server.staged(part="b"))
    server.event("calm")
    server.read()


@CASES.breaks("txn-twice")
def two_tries_of_a_large_batch_are_there(server: BatchServer) -> None:
    server.lose(server.send_commit(server.staged(part="a", size=2)), executed=True)
    server.last = (0, 0, 0, 0)
    server.commit(server.staged(part="b", size=2))
    server.event("calm")
    server.read()


@CASES.breaks("moved")
def a_large_batch_begins_again_and_nothing_was_lost(server: BatchServer) -> None:
    server.ask("put")  # of class `disk`
    cut_short(server)
    server.append(1, large(server))
    server.event("calm")
    server.read(2)


@CASES.breaks("twice")
def a_batch_is_appended_by_each_of_two_commits(server: BatchServer) -> None:
    parts = server.staged()
    chunks = list(server.txns[f"{1:016x}"].chunks.values())
    server.commit(parts)
    server.read()
    server.append(1, chunks)
    server.lose(server.send_commit(parts))
    server.read()


@CASES.breaks("batch")
def half_of_a_batch_is_seen(server: BatchServer) -> None:
    server.lose(server.send_commit(server.staged()), executed=True)
    del server.held["t"].live[2]
    server.read()


@CASES.breaks("invented")
def what_is_staged_is_seen(server: BatchServer) -> None:
    server.staged()
    server.append(1, list(server.txns[f"{1:016x}"].chunks.values()))
    server.read()


@CASES.breaks("refused-visible")
def a_refused_commit_is_seen(server: BatchServer) -> None:
    op = server.send_commit(server.staged())
    server.do(op)
    server.refuse(op, 409, "txn_incomplete", parts=[])
    server.read()


@CASES.breaks("lost")
def a_committed_batch_of_a_disk_topic_is_lost_with_the_power(server: BatchServer) -> None:
    server.ask("put")
    server.commit(server.staged())
    server.event("power")
    server.held["t"].live.clear()
    server.held["t"].gaps.append((1, 2, "crash"))
    server.read()


@CASES.breaks("lost")
def chunks_that_came_again_are_lost_after_the_commit(server: BatchServer) -> None:
    a_power_cut_takes_chunks_that_were_seen_and_they_come_again(server)
    server.event("power")
    for seq in (5, 6):
        del server.held["t"].live[seq]
    server.held["t"].gaps[:] = [(3, 6, "crash")]
    server.read(2)


@CASES.breaks("txn-forgotten")
def a_committed_batch_is_open_again(server: BatchServer) -> None:
    server.commit(server.staged())
    server.last = (0, 0, 0, 0)
    server.begin()


@CASES.breaks("txn-answer")
def a_retry_is_told_another_place(server: BatchServer) -> None:
    parts = server.staged()
    server.write(2)
    server.commit(parts)
    server.last = (1, 1, 2, 2)
    server.commit(parts)


@CASES.breaks("txn-count")
def another_number_of_records(server: BatchServer) -> None:
    op = server.send_commit(server.staged(chunks=2, size=2))
    done = server.do(op)
    done[1]["count"] = 3
    server.reply(op, done)


@CASES.breaks("txn-invented")
def committed_and_nobody_asked_for_it(server: BatchServer) -> None:
    server.staged()
    server.last = (1, 1, 2, 2)
    server.begin()


@CASES.breaks("txn-rising")
def an_earlier_batch_comes_behind_a_later_one(server: BatchServer) -> None:
    parts = server.staged(1)
    server.commit(server.staged(2, part="b"), 2)
    server.commit(parts, 1)
    server.read()


@CASES.breaks("txn-order")
def chunks_in_another_order(server: BatchServer) -> None:
    op = server.send_commit(server.staged(chunks=3, size=2))
    chunks = list(server.txns.pop(op.request["txn"]).chunks.values())
    server.append(1, [chunks[0], chunks[2], chunks[1]])
    server.lose(op)
    server.read()


@CASES.breaks("txn-part")
def a_chunk_of_a_large_batch_never_comes(server: BatchServer) -> None:
    op = server.send_commit(server.staged(chunks=3, size=2))
    server.append(1, list(server.txns.pop(op.request["txn"]).chunks.values())[:2])
    server.lose(op)
    server.event("calm")
    server.read()


@CASES.breaks("txn-stuck")
def a_decided_batch_never_ends(server: BatchServer) -> None:
    server.lose(server.send_commit(server.staged()))
    server.event("calm")
    op = server.send("begin", producer="p", batch=1)
    server.reply(op, (200, server.told(f"{1:016x}", "committing")))


@CASES.breaks("txn-stage")
def a_chunk_is_there_that_nobody_sent(server: BatchServer) -> None:
    txn = server.begin().answer["txn"]
    server.txns[txn].chunks["a", 0] = []
    server.stage(txn, "a", 0)


@CASES.breaks("plan-answer")
def another_result_of_a_plan(server: BatchServer) -> None:
    server.publish(manifest=3)
    server.publish(manifest=4)


@CASES.breaks("plan-forgotten")
def a_published_plan_is_not_known(server: BatchServer) -> None:
    server.publish("1")
    server.merges("2")


@CASES.breaks("scan")
def a_record_is_not_in_the_files(server: BatchServer) -> None:
    server.write(3)
    server.scan(1, 3)


@CASES.breaks("undeleted")
def a_deleted_record_is_in_the_files(server: BatchServer) -> None:
    server.write(3)
    gone = server.held["t"].live[2]
    server.ask("delete", seqs=[2])
    server.held["t"].live[2] = gone
    server.scan(1, 2, 3)


@pytest.mark.parametrize("scenario", CASES.legal, ids=lambda scenario: scenario.__name__)
def test_legal(scenario: Any) -> None:
    server = BatchServer()
    scenario(server)
    assert_ok(server.history)


@pytest.mark.parametrize(("rule", "scenario"), CASES.broken, ids=lambda part: getattr(part, "__name__", None))
def test_each_violation_is_found(rule: str, scenario: Any) -> None:
    server = BatchServer()
    scenario(server)
    assert rule in server.rules()
