"""The state machine of one shard: maps commands to handlers, which decide on staged state.

`handle` never touches the log file. It leaves frames for the next envelope in `frames`, changes to publish once that
is written or synced in `ops`, and replies that need neither in `ready`. The engine commits them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from topics.api.config import EngineConfig
from topics.engine.commands import consumers as con
from topics.engine.commands import forwards as fwd
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as cmd
from topics.engine.commands import transactions as txc
from topics.engine.core.clock import EngineClock
from topics.engine.reading.reader import Reader
from topics.engine.shard.delivery import Delivery


class Shard(Delivery):
    """All command handlers of one shard."""

    def __init__(self, config: EngineConfig, clock: EngineClock, reader: Reader, boot_id: str) -> None:
        super().__init__(config, clock, reader, boot_id)
        # Set by the engine: merge commands are handled by the MergeService.
        self.merge: Callable[[object, mrg.MergeCommand], None] = lambda token, command: None
        self._handlers = {
            cmd.Append: self._append,
            cmd.Skip: self._skip,
            cmd.Diff: self._diff,
            cmd.Delete: self._delete,
            cmd.PutTopic: self._put_topic,
            cmd.DropTopic: self._drop_topic,
            cmd.State: self._state,
            cmd.ListTopics: self._list,
            cmd.LastByTag: self._last_by_tag,
            cmd.NextByTag: self._next_by_tag,
            cmd.RecordsAt: self._records_at,
            cmd.CountByTag: self._count_by_tag,
            cmd.ListDeleted: self._list_deleted,
            con.Claim: self._claim,
            con.Settle: self._settle,
            con.Release: self._release,
            con.PutConsumer: self._put_consumer,
            con.DropConsumer: self._drop_consumer,
            con.PauseConsumer: self._pause_consumer,
            con.ResetConsumer: self._reset_consumer,
            con.GetConsumer: self._get_consumer,
            con.ListConsumers: self._list_consumers,
            con.TakeDeadLetters: self._take_dead_letters,
            con.SettleDeadLetters: self._settle_dead_letters,
            fwd.PutForward: self._put_forward,
            fwd.DropForward: self._drop_forward,
            fwd.OpenOutflow: self._open_outflow,
            fwd.CloseOutflow: self._close_outflow,
            fwd.OpenInflow: self._open_inflow,
            fwd.CloseInflow: self._close_inflow,
            fwd.TakeCopies: self._take_copies,
            **dict.fromkeys(get_args(mrg.MergeCommand), self._merge),
            txc.BeginTransaction: self._begin_transaction,
            txc.StageChunk: self._stage_chunk,
            txc.CommitTransaction: self._commit_transaction,
            txc.AbortTransaction: self._abort_transaction,
        }

    def _merge(self, token: object, command: mrg.MergeCommand) -> None:
        self.merge(token, command)

    def check_invariants(self) -> None:
        for log in self.by_id.values():
            log.check()
        self.check_consumers()
        self.check_forwards()
        self.check_transactions()
        total = sum(log.bytes for log in self.staged.values())
        assert total == self.bytes_live, (total, self.bytes_live)
        records = sum(log.count for log in self.staged.values())
        assert records == self.records_live, (records, self.records_live)
