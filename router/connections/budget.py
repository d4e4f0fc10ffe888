"""A count of bytes that may be held at one time, shared by all connections of a front."""

from __future__ import annotations


class ByteBudget:
    """Full means that the caller refuses; nobody waits."""

    __slots__ = ("bytes_max", "held")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def take(self, size: int) -> bool:
        """Whether there is room; a single thing larger than the whole budget passes when nothing else is held."""
        if self.held and self.held + size > self.bytes_max:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size
        assert self.held >= 0, "more was given back than was taken"
