"""Progress of a job: a bar on a terminal, otherwise one line of JSON per step."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

import msgspec

from topics.cli.formatting import printable

BAR = 30
STEP_S = 5.0  # between progress lines


class Progress:
    def __init__(self, out: TextIO | None = None, *, as_json: bool | None = None) -> None:
        self._out = out or sys.stderr
        self.is_bar = self._out.isatty() if as_json is None else not as_json
        self._shown = 0
        self._last_s = 0.0

    def step(self, step: str, text: str, **fields: Any) -> None:
        """Report a step: `text` for humans, `fields` for machines."""
        if self.is_bar:
            self._clear()
            print(printable(text), file=self._out, flush=True)
        else:
            line = {"time_ms": time.time_ns() // 1_000_000, "step": step, **fields}
            print(msgspec.json.encode(line).decode(), file=self._out, flush=True)

    def bar(self, what: str, done: int, total: int) -> None:
        """Show progress; without a terminal at most one line every STEP_S."""
        now = time.monotonic()
        if self.is_bar:
            filled = BAR * done // max(total, 1)
            text = f"{printable(what)} [{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}"
            self._clear()
            print(text, end="", file=self._out, flush=True)
            self._shown = len(text)
        elif now - self._last_s >= STEP_S:
            self._last_s = now
            self.step("progress", "", what=what, done=done, total=total)

    def _clear(self) -> None:
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=self._out)
            self._shown = 0
