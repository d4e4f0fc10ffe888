"""Reading a stream over HTTP: offsets are the next seq of each topic and its epoch, `{"orders": 17, "#epochs": {"orders": "400.0"}}`.

Offsets of earlier versions have no epochs: their seqs are taken as they are. Spark compares offsets as text, so topics are always in the same order. `initialOffset` is called more than once and what
`latest` means must not change between: it is looked up once. Nothing is kept on the server for a stream, so nothing has to
be released either: Spark's `commit` and `stop` may come late or never.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from spark_pipeline.source.batch import HttpPartition, read_partition
from spark_pipeline.source.losses import DataLoss
from spark_pipeline.source.options import BadOption, SourceOptions
from spark_pipeline.source.planning import split_http
from spark_pipeline.tasks.server import Refused, Server, wanted_topics

Offsets = dict[str, int]
Epochs = dict[str, str]

EPOCHS = "#epochs"  # no topic has this name


def split_offset(offset: Mapping[str, Any]) -> tuple[Offsets, Epochs]:
    return {name: int(seq) for name, seq in offset.items() if name != EPOCHS}, dict(offset.get(EPOCHS, {}))


def make_offset(seqs: Offsets, epochs: Epochs) -> dict[str, Any]:
    offset: dict[str, Any] = {name: seqs[name] for name in sorted(seqs)}
    if epochs:
        offset[EPOCHS] = {name: epochs[name] for name in sorted(epochs)}
    return offset


class TopicsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._wanted = replace(options.wanted, columns=tuple(columns))
        self._fail = options.fail_on_loss is not False
        self._initial: dict[str, Any] | None = None
        self._target: tuple[Offsets, Epochs] | None = None
        self._server: Server | None = None

    # -- offsets -------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            names = wanted_topics(self._connected(), self._options.topic)
            states = {name: self._state(name) for name in sorted(names)}
            seqs = {name: self._first(name, state) for name, state in states.items()}
            self._initial = make_offset(seqs, _epochs_of(states))
        return dict(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.trigger_records:
            return ReadMaxRows(self._options.trigger_records)
        if self._options.trigger_bytes:
            return ReadMaxBytes(self._options.trigger_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = None
        self._target = self._heads(split_offset(self.initialOffset())[0])

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return make_offset(*self._heads(split_offset(self.initialOffset())[0]))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """As far as the limit allows. It counts seqs, of which some may have no record any more: never more than that."""
        begin, known = split_offset(start)
        heads, epochs = self._heads(sorted(begin))
        if self._target is not None:
            aims, aimed = self._target
            heads = {
                # What was aimed at in a topic that was created again since says nothing of this one.
                name: min(seq, aims.get(name, seq)) if aimed.get(name) == epochs.get(name) else seq
                for name, seq in heads.items()
            }
        for name, seq in heads.items():
            begin[name] = self._begin_in(name, begin[name], known.get(name), epochs.get(name), tell=True)
            self._check_not_recreated(name, begin[name], seq)
        behind = {name: seq - begin[name] for name, seq in heads.items() if seq > begin[name]}
        allowed = self._allowed(behind, limit)
        found: Offsets = {}
        for name in sorted(begin):
            if heads[name] < begin[name]:
                found[name] = heads[name]
            else:
                found[name] = begin[name] + min(behind.get(name, 0), allowed.get(name, 0))
        return make_offset(found, epochs)

    def _allowed(self, behind: Offsets, limit: ReadLimit) -> Offsets:
        """How many seqs of each topic: all share the limit, and each that has something gets on."""
        if not behind or isinstance(limit, ReadAllAvailable):
            return behind
        total = sum(behind.values())
        if isinstance(limit, ReadMaxRows):
            return {name: max(limit.max_rows * count // total, 1) for name, count in behind.items()}
        if isinstance(limit, ReadMaxBytes):
            share = max(limit.max_bytes // len(behind), 1)
            return {name: max(share // self._average(name), 1) for name in behind}
        return behind

    def _check_not_recreated(self, topic: str, begin: int, head: int) -> None:
        if head >= begin:
            return
        what = f"topic {topic} ends before seq {begin}: it was deleted and made anew, or this checkpoint is of another server"
        if self._fail:
            raise DataLoss(
                f"{what}. Start with a new checkpoint, or with failOnDataLoss=false to read it from its beginning"
            )
        print(what, file=sys.stderr, flush=True)

    def _begin_in(
        self, topic: str, seq: int, known: str | None, epoch: str | None, *, tell: bool = False
    ) -> int:
        """Where reading goes on that was at this seq in the epoch that is known: lower if other records have these seqs now."""
        if known is None or epoch is None or known == epoch:
            return seq
        server = self._connected()
        body = {"from_seq": seq - 1, "epoch": known, "limit": 1, "include_data": False}
        gone = server.post(server.topic(topic, "/diff"), body)["tombstone"]
        if gone is None or int(gone["gap_from"]) >= seq:  # nothing of what was read, or what reading tells of
            return seq
        if gone["reason"] == "recreated":
            what, how = f"topic {topic} was deleted and created again", "it from its beginning"
        else:
            what = f"records of {topic} from seq {gone['gap_from']} on were lost ({gone['reason']}), and others have their seqs now"
            how = "those"
        if tell and self._fail:
            raise DataLoss(f"{what}. Start with a new checkpoint, or with failOnDataLoss=false to read {how}")
        if tell:
            print(what, file=sys.stderr, flush=True)
        return int(gone["gap_from"])

    # -- records -------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found: list[InputPartition] = []
        server = self._connected()
        (lows, before), (highs, epochs) = split_offset(start), split_offset(end)
        for name in sorted(highs):
            low, high, epoch = lows.get(name, 1), highs[name], epochs.get(name)
            low = self._begin_in(name, low, before.get(name), epoch)
            if high < low:  # made anew
                low = 1
            parts = split_http(server, self._options, name, low, high)
            found += [HttpPartition(replace(part, epoch=epoch)) for part in parts]
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._wanted, fail_on_loss=self._fail)

    # -- the server ----------------------------------------------------------------------------------------

    def _connected(self) -> Server:
        # Not when this is made: Spark would tell of a fault of its own that follows from it, and not of this.
        if not self._options.url:
            raise BadOption("a stream is read from a server: give its address as url")
        if self._server is None:
            self._server = Server(self._options.url, self._options.token_env)
        return self._server

    def __getstate__(self) -> dict[str, Any]:
        # It travels to the executors, where `read` needs no connection of this one.
        return {**self.__dict__, "_server": None}

    def _state(self, topic: str) -> dict[str, Any]:
        server = self._connected()
        try:
            found: dict[str, Any] = server.get(server.topic(topic))
        except Refused as error:
            if error.code == "topic_not_found" and self._fail:
                raise DataLoss(
                    f"{error}; a stream needs its topics to be there: make them with PUT first"
                ) from error
            raise
        return found

    def _heads(self, names: Iterable[str]) -> tuple[Offsets, Epochs]:
        states = {name: self._state(name) for name in names}
        return {name: int(state["head_seq"]) + 1 for name, state in states.items()}, _epochs_of(states)

    def _average(self, topic: str) -> int:
        state = self._state(topic)
        return max(int(state["bytes"]) // max(int(state["count"]), 1), 1)

    def _first(self, topic: str, state: dict[str, Any]) -> int:
        """Where a new stream begins."""
        wanted = self._options.starting_offsets
        if wanted == "earliest":
            return int(state["earliest_seq"])
        if wanted == "latest":
            return int(state["head_seq"]) + 1
        if wanted.isdigit():
            return int(wanted)
        server = self._connected()
        at = int(state["earliest_seq"]) - 1
        while True:
            body = {
                "from_seq": at,
                "from_ts": int(wanted.removeprefix("ts:")),
                "limit": 1,
                "include_data": False,
            }
            page = server.post(server.topic(topic, "/diff"), body)
            if page["records"]:
                return int(page["records"][0]["$seq"])
            if page["caught_up"]:
                return int(page["head_seq"]) + 1
            at = int(page["next_from_seq"])


def _epochs_of(states: Mapping[str, dict[str, Any]]) -> Epochs:
    """Of a server that has them."""
    return {name: state["epoch"] for name, state in states.items() if "epoch" in state}
