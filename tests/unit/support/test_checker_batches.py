"""Goal: the checker blames a server that breaks a promise about transactions, merges or snapshots, by the right name, and nothing
else.

Method: histories told by hand, as in test_checker, by a tale that knows transactions as well. What is wrong is done behind its back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.checker import assert_ok
from tests.support.checker_tale import Cases, Held, Row, Tale
from tests.support.history import Op

CASES = Cases()
FSYNC = {"durability": "fsync"}


@dataclass
class Txn:
    batch: int
    chunks: dict[tuple[str, int], list[Row]] = field(default_factory=dict)


class BatchTale(Tale):
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

    # -- what a producer does --------------------------------------------------------------------------------

    def begin(self, batch: int = 1) -> Op:
        return self.ask("begin", producer="p", batch=batch)

    def staged(self, batch: int = 1, chunks: int = 2, size: int = 1, part: str = "a") -> list[Row]:
        """Begin and stage; the parts that a commit names."""
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
        return self.tell(op, (200, answer))

    def merges(self, *committed: str) -> Op:
        names = ["plan", "retired_segments", "retired_bytes", "snapshots", "manifest"]
        return self.tell(self.send("merges"), (200, {**dict.fromkeys(names), "committed": list(committed)}))

    def scan(self, *seqs: int) -> Op:
        """The files of a snapshot that is pinned now show these records."""
        held = self.held["t"]
        records = [held.live[seq] for seq in seqs]
        answer = {"topic": "t", "records": records, "first_seq": held.earliest, "next_seq": held.head + 1}
        return self.tell(self.send("scan"), (200, answer))


# -- legal ---------------------------------------------------------------------------------------------------


@CASES.is_legal
def a_batch_and_what_is_said_of_it_again(tale: BatchTale) -> None:
    parts = tale.staged()
    tale.commit(parts)
    tale.read()
    tale.commit(parts)
    tale.begin()
    tale.write()
    tale.commit(tale.staged(2), 2)
    tale.begin(1)
    tale.read()


@CASES.is_legal
def a_commit_without_an_answer_that_was_done_or_not(tale: BatchTale) -> None:
    tale.lose(tale.send_commit(tale.staged(1)), executed=True)
    tale.read()
    tale.begin(1)
    parts = tale.staged(2)
    tale.lose(tale.send_commit(parts, 2))
    tale.begin(2)
    tale.commit(parts, 2)
    tale.event("calm")
    tale.read()


@CASES.is_legal
def a_large_batch_with_others_between(tale: BatchTale) -> None:
    parts = tale.staged(chunks=2, size=2)
    op = tale.send_commit(parts)
    chunks = list(tale.txns.pop(op.request["txn"]).chunks.values())
    tale.append(1, chunks[:1])
    tale.read()
    tale.write()
    tale.append(1, chunks[1:])
    tale.last = (1, 1, 5, 4)
    tale.tell(op, (200, tale.committed(op.request["txn"])))
    tale.read()


@CASES.is_legal
def a_power_cut_takes_a_batch_that_nobody_was_told_of(tale: BatchTale) -> None:
    tale.ask("put")  # of class `disk`
    parts = tale.staged()
    tale.lose(tale.send_commit(parts), executed=True)
    tale.read()
    tale.event("power")
    tale.held["t"].live.clear()
    tale.held["t"].gaps.append((1, 2, "crash"))
    tale.last = (0, 0, 0, 0)
    tale.commit(tale.staged())
    tale.read(2)


@CASES.is_legal
def a_power_cut_takes_chunks_that_were_seen_and_they_come_again(tale: BatchTale) -> None:
    tale.ask("put")  # of class `disk`
    parts = tale.staged(chunks=2, size=2)
    op = tale.send_commit(parts)
    chunks = list(tale.txns.pop(op.request["txn"]).chunks.values())
    tale.append(1, chunks)
    tale.lose(op)
    tale.read()
    tale.event("power")
    for seq in (3, 4):
        del tale.held["t"].live[seq]
    tale.held["t"].gaps.append((3, 4, "crash"))
    tale.append(1, chunks[1:])
    tale.last = (1, 1, 6, 4)
    tale.commit(parts)
    tale.read(2)


@CASES.is_legal
def a_crash_takes_the_first_chunks_of_an_ephemeral_topic(tale: BatchTale) -> None:
    """It was decided, so all of them come again."""
    tale.ask("put", durability="ephemeral")
    tale.write(3)
    cut_short(tale)
    tale.held["t"] = Held(tale.held["t"].config)
    tale.append(1, large(tale))
    tale.event("calm")
    tale.begin()
    tale.read()


def cut_short(tale: BatchTale) -> None:
    """The worker dies when one chunk of a large batch is there."""
    op = tale.send_commit(tale.staged(chunks=3, size=2))
    tale.append(1, large(tale)[:1])
    tale.read()
    tale.event("kill", "t")
    tale.lose(op)


def large(tale: BatchTale) -> list[list[Row]]:
    return list(tale.txns[f"{1:016x}"].chunks.values())


@CASES.is_legal
def aborted_and_begun_again(tale: BatchTale) -> None:
    tale.staged()
    tale.ask("abort", txn=f"{1:016x}")
    tale.commit(tale.staged(part="b"))
    tale.read()


@CASES.is_legal
def merged_and_scanned(tale: BatchTale) -> None:
    tale.write(3)
    tale.publish()
    tale.publish()
    tale.merges("1")
    tale.ask("delete", seqs=[2])
    tale.scan(1, 3)


# -- broken --------------------------------------------------------------------------------------------------


@CASES.breaks("moved")
def a_batch_is_appended_once_more(tale: BatchTale) -> None:
    parts = tale.staged()
    chunks = list(tale.txns[f"{1:016x}"].chunks.values())
    tale.commit(parts)
    tale.read()
    tale.append(1, chunks)
    tale.read()


@CASES.breaks("twice")
def two_tries_of_a_batch_are_there(tale: BatchTale) -> None:
    tale.lose(tale.send_commit(tale.staged(part="a")), executed=True)
    tale.last = (0, 0, 0, 0)
    tale.commit(tale.staged(part="b"))
    tale.event("calm")
    tale.read()


@CASES.breaks("txn-twice")
def two_tries_of_a_large_batch_are_there(tale: BatchTale) -> None:
    tale.lose(tale.send_commit(tale.staged(part="a", size=2)), executed=True)
    tale.last = (0, 0, 0, 0)
    tale.commit(tale.staged(part="b", size=2))
    tale.event("calm")
    tale.read()


@CASES.breaks("moved")
def a_large_batch_begins_again_and_nothing_was_lost(tale: BatchTale) -> None:
    tale.ask("put")  # of class `disk`
    cut_short(tale)
    tale.append(1, large(tale))
    tale.event("calm")
    tale.read(2)


@CASES.breaks("twice")
def a_batch_is_appended_by_each_of_two_commits(tale: BatchTale) -> None:
    parts = tale.staged()
    chunks = list(tale.txns[f"{1:016x}"].chunks.values())
    tale.commit(parts)
    tale.read()
    tale.append(1, chunks)
    tale.lose(tale.send_commit(parts))
    tale.read()


@CASES.breaks("batch")
def half_of_a_batch_is_seen(tale: BatchTale) -> None:
    tale.lose(tale.send_commit(tale.staged()), executed=True)
    del tale.held["t"].live[2]
    tale.read()


@CASES.breaks("invented")
def what_is_staged_is_seen(tale: BatchTale) -> None:
    tale.staged()
    tale.append(1, list(tale.txns[f"{1:016x}"].chunks.values()))
    tale.read()


@CASES.breaks("refused-visible")
def a_refused_commit_is_seen(tale: BatchTale) -> None:
    op = tale.send_commit(tale.staged())
    tale.do(op)
    tale.refuse(op, 409, "txn_incomplete", parts=[])
    tale.read()


@CASES.breaks("lost")
def a_committed_batch_of_a_disk_topic_is_lost_with_the_power(tale: BatchTale) -> None:
    tale.ask("put")
    tale.commit(tale.staged())
    tale.event("power")
    tale.held["t"].live.clear()
    tale.held["t"].gaps.append((1, 2, "crash"))
    tale.read()


@CASES.breaks("lost")
def chunks_that_came_again_are_lost_after_the_commit(tale: BatchTale) -> None:
    a_power_cut_takes_chunks_that_were_seen_and_they_come_again(tale)
    tale.event("power")
    for seq in (5, 6):
        del tale.held["t"].live[seq]
    tale.held["t"].gaps[:] = [(3, 6, "crash")]
    tale.read(2)


@CASES.breaks("txn-forgotten")
def a_committed_batch_is_open_again(tale: BatchTale) -> None:
    tale.commit(tale.staged())
    tale.last = (0, 0, 0, 0)
    tale.begin()


@CASES.breaks("txn-answer")
def a_retry_is_told_another_place(tale: BatchTale) -> None:
    parts = tale.staged()
    tale.write(2)
    tale.commit(parts)
    tale.last = (1, 1, 2, 2)
    tale.commit(parts)


@CASES.breaks("txn-count")
def another_number_of_records(tale: BatchTale) -> None:
    op = tale.send_commit(tale.staged(chunks=2, size=2))
    done = tale.do(op)
    done[1]["count"] = 3
    tale.tell(op, done)


@CASES.breaks("txn-invented")
def committed_and_nobody_asked_for_it(tale: BatchTale) -> None:
    tale.staged()
    tale.last = (1, 1, 2, 2)
    tale.begin()


@CASES.breaks("txn-rising")
def an_earlier_batch_comes_behind_a_later_one(tale: BatchTale) -> None:
    parts = tale.staged(1)
    tale.commit(tale.staged(2, part="b"), 2)
    tale.commit(parts, 1)
    tale.read()


@CASES.breaks("txn-order")
def chunks_in_another_order(tale: BatchTale) -> None:
    op = tale.send_commit(tale.staged(chunks=3, size=2))
    chunks = list(tale.txns.pop(op.request["txn"]).chunks.values())
    tale.append(1, [chunks[0], chunks[2], chunks[1]])
    tale.lose(op)
    tale.read()


@CASES.breaks("txn-part")
def a_chunk_of_a_large_batch_never_comes(tale: BatchTale) -> None:
    op = tale.send_commit(tale.staged(chunks=3, size=2))
    tale.append(1, list(tale.txns.pop(op.request["txn"]).chunks.values())[:2])
    tale.lose(op)
    tale.event("calm")
    tale.read()


@CASES.breaks("txn-stuck")
def a_decided_batch_never_ends(tale: BatchTale) -> None:
    tale.lose(tale.send_commit(tale.staged()))
    tale.event("calm")
    op = tale.send("begin", producer="p", batch=1)
    tale.tell(op, (200, tale.told(f"{1:016x}", "committing")))


@CASES.breaks("txn-stage")
def a_chunk_is_there_that_nobody_sent(tale: BatchTale) -> None:
    txn = tale.begin().answer["txn"]
    tale.txns[txn].chunks["a", 0] = []
    tale.stage(txn, "a", 0)


@CASES.breaks("plan-answer")
def another_result_of_a_plan(tale: BatchTale) -> None:
    tale.publish(manifest=3)
    tale.publish(manifest=4)


@CASES.breaks("plan-forgotten")
def a_published_plan_is_not_known(tale: BatchTale) -> None:
    tale.publish("1")
    tale.merges("2")


@CASES.breaks("scan")
def a_record_is_not_in_the_files(tale: BatchTale) -> None:
    tale.write(3)
    tale.scan(1, 3)


@CASES.breaks("undeleted")
def a_deleted_record_is_in_the_files(tale: BatchTale) -> None:
    tale.write(3)
    gone = tale.held["t"].live[2]
    tale.ask("delete", seqs=[2])
    tale.held["t"].live[2] = gone
    tale.scan(1, 2, 3)


@pytest.mark.parametrize("story", CASES.legal, ids=lambda story: story.__name__)
def test_legal(story: Any) -> None:
    tale = BatchTale()
    story(tale)
    assert_ok(tale.history)


@pytest.mark.parametrize(("rule", "story"), CASES.broken, ids=lambda part: getattr(part, "__name__", None))
def test_broken(rule: str, story: Any) -> None:
    tale = BatchTale()
    story(tale)
    assert rule in tale.rules()
