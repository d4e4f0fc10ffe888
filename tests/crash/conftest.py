"""The servers of the integration tests, for tests that kill them; and whole campaigns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, start_campaign
from tests.integration.conftest import lasting_server, shared_server, start_server, topic
from tests.support.power_cut import Machine

__all__ = ["campaign", "lasting_server", "shared_server", "start_server", "topic"]


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Callable[..., Campaign]]:
    """Begin campaigns; their servers are gone when the test ends."""
    begun: list[Campaign] = []

    def begin(*, seed: int, machine: Machine | None = None) -> Campaign:
        begun.append(start_campaign(tmp_path, seed, machine))
        return begun[-1]

    yield begin
    for one in begun:
        one.server.close()
