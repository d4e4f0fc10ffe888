"""Fixtures of the crash tests: servers as in the integration tests, and campaigns (a server, its load and the checker)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, start_campaign
from tests.integration.conftest import session_server, shared_server, start_server, topic
from tests.support.power_cut import Machine

__all__ = ["campaign", "session_server", "shared_server", "start_server", "topic"]


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Callable[..., Campaign]]:
    """Starts campaigns; their servers are stopped when the test ends."""
    begun: list[Campaign] = []

    def begin(*, seed: int, machine: Machine | None = None) -> Campaign:
        begun.append(start_campaign(tmp_path, seed, machine))
        return begun[-1]

    yield begin
    for one in begun:
        one.server.close()
