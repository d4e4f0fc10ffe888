"""Binding the port: a server that was just killed may still hold it for a moment."""

from __future__ import annotations

import socket
import threading
from typing import Any, cast

import pytest

from tests.support.faults import fault
from workers.process import listeners
from workers.process.exit_codes import CannotBind


def taken_port() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


@fault(
    "supervisor",
    "the fronts of a server that was just killed still hold the port",
    "the new server waits for it up to 1.5 s, then serves",
)
def test_port_that_is_given_up_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = taken_port()
    port = taken.getsockname()[1]
    refused = threading.Event()
    bind_once = listeners._bind

    def counted(*arguments: Any) -> list[socket.socket]:
        try:
            return bind_once(*arguments)
        except CannotBind:
            refused.set()
            raise

    monkeypatch.setattr(listeners, "_bind", counted)
    monkeypatch.setattr(listeners, "BIND_PATIENCE_S", 30.0)

    def give_up_the_port() -> None:
        assert refused.wait(120)
        taken.close()

    owner = threading.Thread(target=give_up_the_port)
    owner.start()
    made = listeners.bind("127.0.0.1", port, 1)
    owner.join()
    assert made[0].getsockname()[1] == port
    made[0].close()


def test_port_that_stays_in_use_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "BIND_PATIENCE_S", 0.0)
    with taken_port() as taken, pytest.raises(CannotBind):
        listeners.bind("127.0.0.1", cast(int, taken.getsockname()[1]), 1)
