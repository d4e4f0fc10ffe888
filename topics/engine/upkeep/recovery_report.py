"""What a recovery found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RecoveryReport:
    """What was found; for logs, readiness and `verify`."""

    snapshot: int = 0
    skipped_snapshots: list[str] = field(default_factory=list)
    replayed_lsn: int = 0
    replayed_frames: int = 0
    torn: list[str] = field(default_factory=list)
    rotten: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)  # damaged indexes that the records could replace
    losses: list[tuple[str, int, int, str]] = field(default_factory=list)
    power_cut: bool = False
    # Work queues with consumers that get the same records, from before that was refused: topic, two of the consumers.
    overlaps: list[tuple[str, str, str]] = field(default_factory=list)
