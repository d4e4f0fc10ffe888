"""Replies on their way to fronts and other workers: the small ones of a turn go as one message to each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from topics.link import wire
from workers.shard.answer_window import AnswerWindow

Sends: TypeAlias = list[tuple[bytes, list[wire.Buffer]]]  # peer, parts of a message


class Outgoing:
    def __init__(self, incarnation: int, window: AnswerWindow) -> None:
        self.head = wire.message_head(incarnation)
        self._window = window
        self._small: dict[bytes, list[bytes]] = {}  # by peer
        self._apart: Sends = []

    def add(
        self, peer: bytes, request_id: int, status: int, kind: int, head: bytes, body: wire.Buffer
    ) -> None:
        size = len(body)
        if size >= wire.SEPARATE_BODY_BYTES:
            first = self.head + wire.reply_head(request_id, status, kind, head, wire.SEPARATE)
            self._apart.append((peer, [first, body]))
            return
        small = self._small.get(peer)
        if small is None:
            small = self._small[peer] = [self.head]
        small.append(wire.reply_head(request_id, status, kind, head, size))
        small.append(body)  # type: ignore[arg-type]

    def take(self, pushes: Iterable[tuple[bytes, bytes]]) -> Sends:
        """All messages, and behind them what is said unasked."""
        messages: Sends = [(peer, [b"".join(parts)]) for peer, parts in self._small.items()]
        messages += self._apart
        for peer, sent in messages:
            self._window.sent(peer, sum(map(len, sent)))
        for peer, body in pushes:
            head = wire.reply_head(0, 200, wire.PUSH, b"", len(body))
            messages.append((peer, [self.head + head + body]))
        if messages:
            self._small, self._apart = {}, []
        return messages
