"""Memory budget shared by all connections of a front."""

from __future__ import annotations


class ByteBudget:
    """A limit on buffered bytes. When it is reached, callers refuse requests instead of waiting."""

    __slots__ = ("bytes_max", "held")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def take(self, size: int) -> bool:
        """Reserve bytes if there is room. A single item larger than the budget is allowed if nothing else is held."""
        if self.held and self.held + size > self.bytes_max:
            return False
        self.held += size
        return True

    def release(self, size: int) -> None:
        self.held -= size
        assert self.held >= 0, "more was released than taken"
