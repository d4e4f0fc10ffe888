"""Files of sink transactions, as `topics verify` looks at them."""

from __future__ import annotations

from collections.abc import Iterator

from topics.engine.core.ports import Disk
from topics.engine.storage.transaction_file import file_name, read_chunks, read_decision
from topics.engine.upkeep.checkpoint import TopicRow


def staged_names(rows: list[TopicRow]) -> set[tuple[int, str]]:
    """Topic and name of each file that these rows know. What is torn at the end of one was never promised."""
    return {
        (row.id, file_name(one.opened.txn, one.opened.number))
        for row in rows
        if row.transactions is not None
        for one in row.transactions.opened
    }


def decided_faults(
    disk: Disk, topics_dir: str, row: TopicRow, advanced: dict[tuple[int, int], int]
) -> Iterator[tuple[str, int, str, int]]:
    """Path, offset, what is wrong and how many records that concerns: of a commit that is decided all that is not in the log yet
    must be there. A file that is gone has served its purpose since the snapshot. `advanced`: how far it is by the log."""
    for one in row.transactions.opened if row.transactions is not None else ():
        decision = one.decision
        path = f"{topics_dir}/{row.id:016x}/{file_name(one.opened.txn, one.opened.number)}"
        if decision is None or not disk.exists(path):
            continue
        order = read_decision(disk, path, decision.offset)
        if order is None:
            what = "it cannot be read what a commit that is decided is to append"
            yield path, decision.offset, what, decision.records - decision.count
            continue
        done = max(decision.done, advanced.get((row.id, one.opened.txn), 0))
        for placed in order[done:]:
            if read_chunks(disk, path, [placed]) == [None]:
                what = "a chunk of a commit that is decided has rotted; it will be announced as lost"
                yield path, placed[0], what, placed[2]
