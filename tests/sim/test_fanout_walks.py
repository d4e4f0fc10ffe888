"""Goal: in any order of events, each stream that stays open gets every record once, and nothing is left behind.

Method: random runs with two fronts and two shards: writes, streams that open, close and stop reading, workers that
die, messages that are late. At the end everything is delivered, and what each client has is compared with what was
written.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.support.watch_rig import Client, Town
from topics.link.watch import FeedOptions

NAMES = [f"a.{i}" for i in range(5)]
STEPS = 80


class Walk:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.town = Town(shards=2, fronts=2)
        self.written: Counter[str] = Counter()
        self.clients: list[tuple[Client, list[str]]] = []
        self.is_up = [True, True]

    def run(self) -> None:
        moves = {
            self.write: 25,
            self.begin_stream: 8,
            self.fill: 5,
            self.drain: 7,
            self.leave: 3,
            self.kill_or_start: 4,
            self.town.carry_up: 23,
            self.town.carry_down: 20,
            self.wait: 5,
        }
        for move in self.rng.choices(list(moves), list(moves.values()), k=STEPS):
            move()

    def write(self) -> None:
        name, count = self.rng.choice(NAMES), self.rng.randint(1, 4)
        if self.is_up[self.town.front.streams.fanout.shard_of(name)]:
            self.town.write(count, name)
            self.written[name] += count

    def begin_stream(self) -> None:
        front = self.rng.choice(self.town.fronts)
        options = FeedOptions(limit=self.rng.choice((2, 256)))
        wid = f"w{len(self.clients)}"
        if not self.is_up[front.streams.fanout.shard_of(wid)]:
            return  # a session could not be created
        names = [name for name in NAMES if self.written[name] and self.rng.random() < 0.6]
        if names and self.rng.random() < 0.5:
            self.clients.append((front.stream(dict.fromkeys(names, 0), options=options, wid=wid), names))
        else:
            self.clients.append((front.stream(patterns=["a.>"], options=options, wid=wid), NAMES))

    def some_client(self) -> Client | None:
        living = [client for client, _ in self.clients if not client.is_closed]
        return self.rng.choice(living) if living else None

    def fill(self) -> None:
        if client := self.some_client():
            client.is_full = True

    def drain(self) -> None:
        if client := self.some_client():
            client.drain()

    def leave(self) -> None:
        if client := self.some_client():
            client.leave()

    def kill_or_start(self) -> None:
        shard = self.rng.randrange(2)
        if self.is_up[shard]:
            self.town.disks[shard].sync_all()
            self.town.kill(shard)
        else:
            self.town.start(shard)
        self.is_up[shard] = not self.is_up[shard]

    def wait(self) -> None:
        self.town.advance(self.rng.choice((1000, 60_000, 500_000)))

    # -- the end -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        for shard, is_up in enumerate(self.is_up):
            if not is_up:
                self.town.start(shard)
        for client, _ in self.clients:
            if not client.is_closed:
                client.drain()
        self.town.advance(3_000_000)

    def check_clients(self) -> None:
        for client, names in self.clients:
            if client.is_closed:
                continue
            for name in names:
                assert client.seqs(name) == list(range(1, self.written[name] + 1))
                told = [f.event for f in client.frames if f.event != "retry" and f.data["topic"] == name]
                assert not told or told[-1] == "caught-up"

    def check_nothing_is_left(self) -> None:
        for client, _ in self.clients:
            if not client.is_closed:
                client.leave()
        self.town.advance(1_000_000)
        for rig in self.town.rigs:
            assert rig is not None
            assert len(rig.core.watch.feeds) == len(rig.core.watch._name_watches) == 0
            assert not any(log.waiters for log in rig.core.engine.shard.state.published.values())
        for front in self.town.fronts:
            fanout = front.streams.fanout
            assert not fanout._feeds and not fanout._by_number
            assert not fanout._name_watches and not fanout._name_watches_by_number
            assert not fanout.stalled and fanout._reading_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_ends_with_every_record_at_every_client(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    walk.settle()
    walk.check_clients()
    walk.check_nothing_is_left()
