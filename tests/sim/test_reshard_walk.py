"""Goal: whatever was written, deleted and lost before, changing the number of shards and changing it back has no
visible effect.

Method: the random runs of tests/sim/walk.py, compared with a model of the API, but wherever a run stops and starts,
or dies, the data directory first goes from one shard to a few and back to one, and is killed or loses its power on
the way. The model does not know of it.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.sim.walk import Walk
from tests.support import length
from tests.support.driver import Driver
from tests.support.engine_harness import RecordedDisk
from tests.support.sim_disk import SimulatedCrash
from topics.engine.storage.files import read_file
from topics.engine.storage.layout import LAYOUT_NAME, Layout, prepare_layout, publish_layout
from topics.engine.tools.reshard import Reshard, clear_stale

pytestmark = pytest.mark.sim


class ReshardingDriver(Driver):
    """A driver whose every start but the first comes after changes of the number of shards."""

    reshards = 0

    def _open(self, how: str, **options: object) -> None:
        plans = list(self.disk._plans)  # for the recovery
        self.disk_calm()
        if not self.disk.exists(LAYOUT_NAME):
            prepare_layout(self.disk, Layout.of(1, 1))
            publish_layout(self.disk)
        elif self.rng.random() < 0.6:
            how = self._there_and_back(how)
        clear_stale(self.disk, self._layout())
        self.config = msgspec.structs.replace(self.config, shard_dir=self._layout().shard_dir(0))
        self.disk._plans += plans
        self.disk._armed = bool(plans)
        super()._open(how, **options)  # type: ignore[arg-type]

    def _layout(self) -> Layout:
        return msgspec.json.decode(read_file(self.disk, LAYOUT_NAME), type=Layout)

    def _there_and_back(self, how: str) -> str:
        """The worst crash on the way, which decides what may be lost."""
        targets = [self.rng.randrange(2, 5) for _ in range(self.rng.randrange(1, 3))]
        for target in [*targets, 1]:
            while self._layout().shards != target:
                if self.rng.random() < 0.5:
                    self.disk.crash_at(self.rng.randrange(1, 400), midway=self.rng.random() < 0.5)
                line = RecordedDisk(self.disk)
                try:
                    work = Reshard(
                        line, self.clock, self.config, self._layout(), target, lambda old, new: None
                    )  # type: ignore[arg-type]
                    for _ in work.steps():
                        pass
                    self.reshards += 1
                    self.events["changes of the number of shards"] += 1
                except SimulatedCrash:
                    again = self.rng.choice(["kill", "power"])
                    self.events["crash in a change"] += 1
                    line.cut()
                    self._cut(again)
                    how = "power" if "power" in (how, again) else how if how != "clean" else "kill"
                self.disk_calm()
                line.cut()
        return how


class ReshardingWalk(Walk):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, steps=120)
        self.driver = ReshardingDriver(seed)


@pytest.mark.parametrize("seed", length.seeds(short=2, long=60))
def test_walks_over_changes_of_the_number_of_shards(seed: int) -> None:
    walk = ReshardingWalk(seed)
    walk.run()
    assert walk.driver.reshards
