"""Reads that wait for their turn: a shard begins no more of them than fit, and none for a front that does not take its answers.

A read is small to ask for and may answer with 8 MiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from topics.api import limits
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.link import wire
from workers.shard.answer_window import READS_PER_TURN, TURN_READ_BYTES, AnswerWindow

if TYPE_CHECKING:
    from workers.shard.core import Token

Asked: TypeAlias = "tuple[Token, cmd.Command]"

LARGE_READS = (cmd.Diff, cmd.LastByTag, con.Claim)
PAGE_BYTES_MIN = 64 * limits.KIB
READS_FREE = TURN_READ_BYTES // limits.DIFF_BYTES_MAX  # so few fit, however large they are


class HeldReads:
    """By the front that is to take its answers first; fronts take turns."""

    def __init__(self, window: AnswerWindow) -> None:
        self._window = window
        self._by_front: dict[bytes, deque[Asked]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_front)

    @property
    def are_due(self) -> bool:
        return any(map(self._window.is_open, self._by_front))

    def admit(self, asked: list[Asked], may_begin: Callable[[Token], bool]) -> list[Asked]:
        """What of it, and of what was held, belongs to this turn. The rest waits until there is room for its answers, and goes
        first then; by that time `may_begin` may say that it is too late.
        """
        if len(asked) <= READS_PER_TURN and not self._by_front and not self._window.closed():
            return asked
        begun: list[Asked] = []
        for entry in asked:
            # A stream of jobs has a bound of its own, and its claim must come before the release that may follow it.
            if isinstance(entry[1], LARGE_READS) and entry[0][1].op != wire.OPEN_JOBS:
                self._by_front.setdefault(entry[0][0], deque()).append(entry)
            else:
                begun.append(entry)
        room = READS_PER_TURN
        for peer in list(filter(self._window.is_open, self._by_front)):
            if not room:
                break
            held = self._by_front.pop(peer)
            while held and room:
                entry = held.popleft()
                if may_begin(entry[0]):
                    begun.append(entry)
                    room -= 1
            if held:
                self._by_front[peer] = held  # behind the others: they have the next turn's room first
        return begun

    def withdraw(self, peer: bytes, is_it: Callable[[object], bool]) -> bool:
        """Forget the reads of a front that are meant; whether there were any."""
        held = self._by_front.get(peer, deque())
        kept = deque(entry for entry in held if not is_it(entry[0]))
        if len(kept) == len(held):
            return False
        self._by_front[peer] = kept
        return True

    def forget(self, peer: bytes) -> None:
        self._by_front.pop(peer, None)


def share_pages(asked: list[Asked]) -> None:
    """Shorten pages when their turn would take too much memory; a reader comes back for the rest."""
    if len(asked) <= READS_FREE:
        return
    reads = [command for _, command in asked if isinstance(command, LARGE_READS)]
    if len(reads) <= READS_FREE:
        return
    share = max(PAGE_BYTES_MIN, TURN_READ_BYTES // len(reads))
    for command in reads:
        paged = isinstance(command, cmd.Diff) and not command.frames
        default = limits.DIFF_BYTES_DEFAULT if paged else limits.DIFF_BYTES_MAX
        command.max_bytes = min(command.max_bytes or default, share)
