"""The cold tier in a directory, which may be a mounted disk that is not there at times."""

from __future__ import annotations

from collections.abc import Callable

from topics.engine.ports import Disk
from topics.engine.segment_store import DiskSegmentStore
from workers.posix_disk import PosixDisk


class LocalSegmentStore(DiskSegmentStore):
    """Files under `root`, which is created when absent. `shard` keeps the workers' unfinished files apart."""

    def __init__(
        self, root: str, shard: int = 0, through: Callable[[PosixDisk], Disk] = lambda disk: disk
    ) -> None:
        super().__init__(through(PosixDisk(root)), f"staging/shard-{shard:02d}")
