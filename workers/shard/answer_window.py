"""How far a shard may run ahead of the fronts that read its answers.

A front takes answers from its socket one after another, and only what it has taken is in its accounts: what still lies in
the socket is held by nobody's limit. So a front says now and then how much it has taken, and a shard begins no read for a
front, and wakes no long poll of it, while more than AHEAD_BYTES_MAX of its answers are not taken. Writes never wait.

One turn more may be under way when the window closes, so the most that a front has not taken of one shard is
AHEAD_BYTES_MAX + TURN_READ_BYTES + limits.WAKE_BYTES_MAX and one page.
"""

from __future__ import annotations

from topics.api import limits

AHEAD_BYTES_MAX = 16 * limits.MIB
TURN_READ_BYTES = 32 * limits.MIB  # what the reads of one turn may fetch together
READS_PER_TURN = 32  # a page holds one record, however large: so few of them stay within the bytes


class AnswerWindow:
    """Bytes of answers that were sent and not taken, by front."""

    def __init__(self) -> None:
        self._untaken: dict[bytes, int] = {}

    def sent(self, peer: bytes, size: int) -> None:
        self._untaken[peer] = self._untaken.get(peer, 0) + size

    def taken(self, peer: bytes, size: int) -> None:
        self._untaken[peer] = max(0, self._untaken.get(peer, 0) - size)

    def forget(self, peer: bytes) -> None:
        self._untaken.pop(peer, None)

    def is_open(self, peer: bytes) -> bool:
        return self._untaken.get(peer, 0) <= AHEAD_BYTES_MAX

    def closed(self) -> list[bytes]:
        """The fronts that are to take something before they get more."""
        return [peer for peer, size in self._untaken.items() if size > AHEAD_BYTES_MAX]
