"""Goal: no process outlives its supervisor, and the next server has everything that was acked.

Method: kill -9 of the supervisor under load, also while a child process is stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.load import acks, check_all, load, topics_on
from tests.crash.processes import is_gone, stopped
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import PATIENCE_S, Server, until

pytestmark = pytest.mark.crash

TOPICS = topics_on(0, 2, 2) + topics_on(1, 2, 2)


def kill_supervisor(server: Server) -> list[int]:
    """kill -9 of the supervisor alone; returns the pids of its children."""
    assert server.process is not None
    children = list(server.children().values())
    server.process.kill()
    server.process.wait(PATIENCE_S)
    return children


@fault(
    "supervisor",
    "killed (-9) while clients write",
    "all processes end; after a restart every acked write is there",
)
def test_everything_acked_survives_the_supervisor(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with load(server, TOPICS, front_dies=True) as writers:
        until(lambda: acks(writers) > 400)
        children = kill_supervisor(server)
        assert len(children) == 3
        until(lambda: all(is_gone(pid) for pid in children))
    server.start()  # the lock is free
    check_all(server, writers)


@fault(
    "supervisor",
    "killed (-9) while a child is stopped (SIGSTOP)",
    "the child ends too, and the next server can start",
)
@pytest.mark.parametrize("name", ["shard 1", "front 0"])
def test_a_stopped_child_does_not_outlive_the_supervisor(
    start_server: Callable[..., Server], name: str
) -> None:
    server = start_server()
    assert server.write(TOPICS[-1], 1).status == 201
    with stopped(server.pid(name)):
        children = kill_supervisor(server)
    until(lambda: all(is_gone(pid) for pid in children))
    server.start()
    assert server.write(TOPICS[-1], 2).status == 200
    assert server.diff(TOPICS[-1]).json["head_seq"] == 2


@fault("supervisor", "killed (-9) while it starts", "no process is left, and the next server can start")
def test_a_server_that_dies_while_it_starts_leaves_nothing(start_server: Callable[..., Server]) -> None:
    """The time between a child's fork and its request to be killed with its parent (PR_SET_PDEATHSIG)."""
    server = start_server()
    assert server.write("t", 1).status == 201
    server.stop()
    for _ in range(pick(short=1, long=3)):
        server.start(wait_ready=False)
        children = kill_supervisor(server)
        until(lambda children=children: all(is_gone(pid) for pid in children))
    server.start()
    assert server.diff("t").json["head_seq"] == 1
