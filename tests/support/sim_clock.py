"""A clock that moves only when a test says so."""

from __future__ import annotations


class SimClock:
    """Clock in a test's hands. The wall may jump either way; the monotonic side never runs back."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = 0

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> None:
        """Time passes, on both clocks."""
        if ms < 0:
            raise ValueError(f"time does not run back: advance({ms}); use jump_wall")
        self._wall_ms += ms
        self._monotonic_ms += ms

    def jump_wall(self, ms: int) -> None:
        """Somebody sets the wall clock forward or, with a negative number, back."""
        self._wall_ms += ms
