"""A clock that moves only when a test says so."""

from __future__ import annotations


class SimClock:
    """A clock under the test's control. The wall clock may jump either way; the monotonic one never goes back."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = 0

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> None:
        """Let time pass, on both clocks."""
        if ms < 0:
            raise ValueError(f"time does not go back: advance({ms}); use jump_wall")
        self._wall_ms += ms
        self._monotonic_ms += ms

    def jump_wall(self, ms: int) -> None:
        """Set the wall clock forward or, with a negative number, back."""
        self._wall_ms += ms
