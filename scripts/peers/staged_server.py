"""An instrumented server: the product's processes, with marks around the methods that end a stage.

    python -m peers.staged_server FOLDER

The product's code is not changed: the supervisor gets other entry points for its children, which wrap methods before they
call the original `main`. Each process writes its marks to FOLDER at its exit.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from peers import stage_marks as points
from peers.stage_marks import Marks
from topics.system.process import FrontSpec, WorkerSpec

ASK_ARGUMENTS = 8  # of PendingRequests.ask, the last of which takes the reply


def supervise(folder: Path) -> int:
    from topics.system.settings import Settings
    from workers.process import supervisor

    return supervisor.serve(
        Settings.from_env(os.environ), partial(run_worker, folder), partial(run_front, folder)
    )


def run_front(folder: Path, spec: FrontSpec, control: socket.socket) -> int:
    from router.front import main

    marks = Marks()
    wrap_front(marks)
    try:
        return main(spec, control)
    finally:
        marks.save(folder / "front.marks")


def run_worker(folder: Path, spec: WorkerSpec, control: socket.socket) -> int:
    from workers.shard.program import main

    marks, sync_marks = Marks(), Marks()
    wrap_loop(marks)
    wrap_engine(marks)
    wrap_syncs(sync_marks)
    try:
        return main(spec, control)
    finally:
        marks.save(folder / "worker.marks")
        sync_marks.save(folder / "syncs.marks")


def wrap_front(marks: Marks) -> None:
    from router.connections.connection import Connection
    from router.pending import PendingRequests
    from router.shard_client import ShardClient

    put = marks.put
    received_ns = 0
    plain_received = Connection.data_received
    plain_ask: Callable[..., int] = PendingRequests.ask
    plain_link, plain_receive, plain_write = ShardClient._send, PendingRequests.receive, Connection._write

    def data_received(self: Connection, data: bytes) -> None:
        nonlocal received_ns
        received_ns = perf_counter_ns()
        plain_received(self, data)

    def ask(self: PendingRequests, *arguments: Any, **options: Any) -> int:
        *request, on_reply = arguments[:ASK_ARGUMENTS]
        began_ns = received_ns  # a request is placed within the call that received its bytes

        def answered(reply: Any) -> None:
            on_reply(reply)
            put(points.WRITTEN, reply.id, 0, perf_counter_ns())

        number = plain_ask(self, *request, answered, *arguments[ASK_ARGUMENTS:], **options)
        put(points.PARSING, number, 0, began_ns)
        put(points.PLACED, number, 0, perf_counter_ns())
        return number

    def link(self: ShardClient) -> None:
        # Marked before the call: its system call wakes the other side, which may run before it returns.
        put(points.LINKED, 0, 0, perf_counter_ns())
        plain_link(self)

    def receive(self: PendingRequests, *arguments: Any) -> None:
        put(points.RETURNED, 0, 0, perf_counter_ns())
        plain_receive(self, *arguments)

    def write(self: Connection, *arguments: Any, **options: Any) -> None:
        put(points.ANSWERING, 0, 0, perf_counter_ns())
        plain_write(self, *arguments, **options)

    _replace(Connection, data_received=data_received, _write=write)
    _replace(PendingRequests, ask=ask, receive=receive)
    _replace(ShardClient, _send=link)


def wrap_loop(marks: Marks) -> None:
    """Instrument the worker's side of the links."""
    from topics.engine.commands.topics import Page
    from workers.shard.core import ShardCore
    from workers.shard.loop import ShardLoop

    put = marks.put
    plain_receive, plain_answer, plain_send = ShardCore.receive, ShardCore._answer, ShardLoop._send

    def receive(self: ShardCore, *arguments: Any) -> None:
        began_ns = perf_counter_ns()
        before = len(self._pending)
        plain_receive(self, *arguments)
        for (_, request, *_), _ in self._pending[before:]:
            put(points.RECEIVED, request.id, 0, began_ns)
        put(points.DECODED, 0, 0, perf_counter_ns())

    def answer(self: ShardCore, token: Any, result: object, *arguments: Any) -> None:
        plain_answer(self, token, result, *arguments)
        if type(result) is Page:
            put(points.READ, token[1].id, result.next_from_seq, perf_counter_ns())

    def send(self: ShardLoop, actions: Any) -> None:
        if actions.sends:
            put(points.SENT, 0, 0, perf_counter_ns())
        plain_send(self, actions)

    _replace(ShardCore, receive=receive, _answer=answer)
    _replace(ShardLoop, _send=send)


def wrap_engine(marks: Marks) -> None:
    from topics.engine.commands.topics import Appended
    from topics.engine.runtime.engine import Engine, Job, Outcome, Request
    from topics.engine.runtime.group_commit import GroupCommit
    from topics.engine.shard.delivery import Delivery
    from topics.engine.shard.state import ShardState
    from topics.engine.topic.log import Op

    put = marks.put
    syncs = 0
    plain_turn, plain_finish, plain_write = Engine.turn, Engine.finish, GroupCommit._write_group
    plain_publish, plain_deliver = ShardState.publish, Delivery.deliver

    def turn(self: Engine, requests: Sequence[Request]) -> Outcome:
        now_ns = perf_counter_ns()
        put(points.TURN, 0, 0, now_ns)
        for token, _ in requests:
            put(points.TAKEN, token[1].id, 0, now_ns)  # type: ignore[index]
        return plain_turn(self, requests)

    def finish(self: Engine, job: Job, error: BaseException | None = None) -> Outcome:
        nonlocal syncs
        syncs += job.kind == "sync"
        put(points.TURN, 0, syncs if job.kind == "sync" else 0, perf_counter_ns())
        return plain_finish(self, job, error)

    def write_group(self: GroupCommit) -> int:
        put(points.APPENDING, 0, 0, perf_counter_ns())
        lsn = plain_write(self)
        put(points.APPENDED, 0, 0, perf_counter_ns())
        return lsn

    def publish(self: ShardState, op: Op) -> None:
        plain_publish(self, op)
        if type(op.result) is Appended:
            token: Any = op.token
            put(points.PUBLISHED, token[1].id, op.result.first_seq, perf_counter_ns())

    def deliver(self: Delivery) -> None:
        plain_deliver(self)
        put(points.WOKEN, 0, 0, perf_counter_ns())

    _replace(Engine, turn=turn, finish=finish)
    _replace(GroupCommit, _write_group=write_group)
    _replace(ShardState, publish=publish)
    _replace(Delivery, deliver=deliver)


def wrap_syncs(marks: Marks) -> None:
    """Instrument the sync thread, which runs one job at a time and reports them in order."""
    from topics.engine.runtime.engine import Job

    plain_run = Job.run
    syncs = 0

    def run(self: Job) -> None:
        nonlocal syncs
        if self.kind != "sync":
            plain_run(self)
            return
        syncs += 1
        marks.put(points.SYNCING, 0, syncs, perf_counter_ns())
        plain_run(self)
        marks.put(points.SYNCED, 0, syncs, perf_counter_ns())

    _replace(Job, run=run)


def _replace(owner: type, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(owner, name, method)


def main() -> int:
    if len(sys.argv) == 2:
        return supervise(Path(sys.argv[1]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
