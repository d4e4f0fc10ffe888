"""Targets other than plain ratios for single writes, batches and reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peers import wording
from peers.markdown import figure, rate, times, why_missing


@dataclass(frozen=True, slots=True)
class AimResult:
    """A measured value and its bound. `value` is a ratio, or a value of topics alone; None: not measured."""

    what: str
    bound: float
    at_most: bool
    unit: str
    value: float | None
    against: str = ""  # a peer; empty: an absolute bound
    called: str = ""  # name of the peer in the table
    ours: float | None = None
    theirs: float | None = None

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def missed_by(self) -> float:
        """How much worse than the bound the value is, as a fraction of the bound."""
        return 0.0 if self.value is None or self.met else abs(self.value - self.bound) / self.bound

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.what,
            "against": self.against or None,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio" if self.unit == "×" else "value": self.value,
            "aim": self.bound,
            "met": self.met,
        }


def aim_rows(held: list[AimResult], meta: dict[str, Any]) -> list[list[str]]:
    """Rows of the summary: work, against, ours, theirs, ratio, aim, verdict."""
    rows = []
    for one in held:
        sign = "≤" if one.at_most else "≥"
        quotient = times(one.value) if one.unit == "×" else "–"
        unit = "" if one.unit == "×" else one.unit
        show = rate if one.against else lambda value, unit=unit: figure(value, unit)
        rows.append(
            [
                one.what,
                one.called or "–",
                show(one.ours),
                show(one.theirs),
                quotient,
                f"{sign} {one.bound:g} {one.unit}",
                verdict(one, meta),
            ]
        )
    return rows


def verdict(one: AimResult, meta: dict[str, Any]) -> str:
    if one.value is None:
        return (why_missing(meta, one.against) if one.against else None) or "not part of this run"
    return wording.met_or_missed(one.met, one.missed_by)
