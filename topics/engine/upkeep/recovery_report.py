"""Results of a recovery."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RecoveryReport:
    """What recovery found: used for logs, readiness and `topics verify`."""

    snapshot: int = 0
    skipped_snapshots: list[str] = field(default_factory=list)
    replayed_lsn: int = 0
    replayed_frames: int = 0
    torn: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)  # damaged indexes that were rebuilt from the records
    losses: list[tuple[str, int, int, str]] = field(default_factory=list)
    power_cut: bool = False
    # Work queues with consumers that overlap, created before that was refused: topic, two of the consumers.
    overlaps: list[tuple[str, str, str]] = field(default_factory=list)
