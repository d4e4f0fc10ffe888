"""The servers of the integration tests, for tests that kill them."""

from __future__ import annotations

from tests.integration.conftest import shared_server, start_server, topic

__all__ = ["shared_server", "start_server", "topic"]
