"""Streaming reads over HTTP. An offset has the next seq of each topic and its epoch: `{"orders": 17, "#epochs": {"orders": "400.0"}}`.

Offsets of earlier versions have no epochs; their seqs are used as they are. Spark compares offsets as text, so topics
are sorted. `initialOffset` is called several times, and `latest` must mean the same each time, so it is looked up once.
The server keeps no state for a stream, so it does not matter if Spark calls `commit` and `stop` late or never.
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
        """The end of the next micro-batch. Limits count seqs, some of which may have no record any more."""
        begin, known = split_offset(start)
        heads, epochs = self._heads(sorted(begin))
        if self._target is not None:
            target_seqs, target_epochs = self._target
            heads = {
                # The target does not apply to a topic that was created again since.
                name: min(seq, target_seqs.get(name, seq))
                if target_epochs.get(name) == epochs.get(name)
                else seq
                for name, seq in heads.items()
            }
        for name, seq in heads.items():
            begin[name] = self._begin_in(name, begin[name], known.get(name), epochs.get(name), report=True)
            self._check_not_recreated(name, begin[name], seq)
        behind = {name: seq - begin[name] for name, seq in heads.items() if seq > begin[name]}
        allowed = self._allowed(behind, limit)
        ends: Offsets = {}
        for name in sorted(begin):
            if heads[name] < begin[name]:
                ends[name] = heads[name]
            else:
                ends[name] = begin[name] + min(behind.get(name, 0), allowed.get(name, 0))
        return make_offset(ends, epochs)

    def _allowed(self, behind: Offsets, limit: ReadLimit) -> Offsets:
        """How many seqs of each topic to read. Topics share the limit, and each one makes progress."""
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
        problem = f"topic {topic} ends before seq {begin}: it was deleted and created again, or the checkpoint is from another server"
        if self._fail:
            raise DataLoss(
                f"{problem}. Start with a new checkpoint, or with failOnDataLoss=false to read it from its beginning"
            )
        print(problem, file=sys.stderr, flush=True)

    def _begin_in(
        self, topic: str, seq: int, known: str | None, epoch: str | None, *, report: bool = False
    ) -> int:
        """Where to continue after `seq` of epoch `known`: earlier, if its seqs now belong to other records."""
        if known is None or epoch is None or known == epoch:
            return seq
        server = self._connected()
        body = {"from_seq": seq - 1, "epoch": known, "limit": 1, "include_data": False}
        tombstone = server.post(server.topic(topic, "/diff"), body)["tombstone"]
        if tombstone is None or int(tombstone["gap_from"]) >= seq:  # only records not read yet are affected
            return seq
        if tombstone["reason"] == "recreated":
            problem, rest = f"topic {topic} was deleted and created again", "it from its beginning"
        else:
            first, reason = tombstone["gap_from"], tombstone["reason"]
            problem = f"records of {topic} from seq {first} on were lost ({reason}), and new records have their seqs"
            rest = "the new records"
        if report and self._fail:
            raise DataLoss(
                f"{problem}. Start with a new checkpoint, or with failOnDataLoss=false to read {rest}"
            )
        if report:
            print(problem, file=sys.stderr, flush=True)
        return int(tombstone["gap_from"])

    # -- records -------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found: list[InputPartition] = []
        server = self._connected()
        (lows, before), (highs, epochs) = split_offset(start), split_offset(end)
        for name in sorted(highs):
            low, high, epoch = lows.get(name, 1), highs[name], epochs.get(name)
            low = self._begin_in(name, low, before.get(name), epoch)
            if high < low:  # created again
                low = 1
            parts = split_http(server, self._options, name, low, high)
            found += [HttpPartition(replace(part, epoch=epoch)) for part in parts]
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._wanted, fail_on_loss=self._fail)

    # -- the server ----------------------------------------------------------------------------------------

    def _connected(self) -> Server:
        # Not checked in the constructor, where Spark would hide this error behind one of its own.
        if not self._options.url:
            raise BadOption("give the option url: streams are read from a server")
        if self._server is None:
            self._server = Server(self._options.url, self._options.token_env)
        return self._server

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for the executors, which open their own connections.
        return {**self.__dict__, "_server": None}

    def _state(self, topic: str) -> dict[str, Any]:
        server = self._connected()
        try:
            found: dict[str, Any] = server.get(server.topic(topic))
        except Refused as error:
            if error.code == "topic_not_found" and self._fail:
                raise DataLoss(f"{error}; the topics of a stream must exist: create them first") from error
            raise
        return found

    def _heads(self, names: Iterable[str]) -> tuple[Offsets, Epochs]:
        states = {name: self._state(name) for name in names}
        return {name: int(state["head_seq"]) + 1 for name, state in states.items()}, _epochs_of(states)

    def _average(self, topic: str) -> int:
        state = self._state(topic)
        return max(int(state["bytes"]) // max(int(state["count"]), 1), 1)

    def _first(self, topic: str, state: dict[str, Any]) -> int:
        """The first seq of a new stream."""
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
    """Epochs by topic; older servers have none."""
    return {name: state["epoch"] for name, state in states.items() if "epoch" in state}
