"""Benchmark of the subject trie against a linear list of patterns: `scripts/bench subjects [--quick]`.

Both hold the same subscriptions: most are exact subjects, the others contain a `*` or end with `>`, and some share a
group. They alternate in one run, and each row shows medians. `--quick` does a twentieth of the work.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench_engine_support import against_floor, elapsed

from topics.api.limits import MATCHES_CACHED_MAX
from topics.engine.core.subject_trie import SubjectTrie
from topics.engine.core.subjects import Pattern, parse_pattern

Subscription = tuple[bytes, int, bytes | None]
KINDS, REGIONS = 200, 50
ROUNDS = 5
MATCHES = 10_000  # distinct subjects of an uncached round, or repetitions of a cached one
CHANGES = 5_000  # subscriptions inserted or removed per round
NAIVE_MATCHES = 8  # the list takes tens of milliseconds for each
NAIVE_REMOVES = 100


class PatternList:
    """The naive matcher."""

    def __init__(self) -> None:
        self.subscriptions: list[tuple[Pattern, Subscription]] = []

    def insert(self, pattern: bytes, subscriber: int, group: bytes | None) -> None:
        self.subscriptions.append((parse_pattern(pattern), (pattern, subscriber, group)))

    def remove(self, pattern: bytes, subscriber: int, group: bytes | None) -> None:
        wanted = (pattern, subscriber, group)
        for index, (_, subscription) in enumerate(self.subscriptions):
            if subscription == wanted:
                del self.subscriptions[index]
                return

    def match(self, subject: bytes) -> tuple[dict[int, None], dict[bytes, dict[int, None]]]:
        plain: dict[int, None] = {}
        groups: dict[bytes, dict[int, None]] = {}
        for pattern, (_, subscriber, group) in self.subscriptions:
            if pattern.matches(subject):
                members = plain if group is None else groups.setdefault(group, {})
                members[subscriber] = None
        return plain, groups


def subject(number: int) -> bytes:
    return b"shop.kind%d.region%d.%d" % (number % KINDS, number % REGIONS, number)


def subscriptions(rng: Random, count: int, first: int = 0) -> list[Subscription]:
    """Distinct subscriptions: 70 % are exact, 20 % have a `*`, 10 % a `>`; 10 % are in a group."""
    found = []
    for number in range(first, first + count):
        tokens = subject(rng.randrange(10 * count)).split(b".")
        kind = rng.random()
        if kind < 0.2:
            tokens[rng.randrange(1, 4)] = b"*"
        elif kind < 0.3:
            tokens[3:] = [b">"]
        found.append(
            (b".".join(tokens), number, b"group%d" % rng.randrange(10) if rng.random() < 0.1 else None)
        )
    return found


@dataclass
class Bench:
    trie: SubjectTrie[int]
    naive: PatternList
    rng: Random
    next_subscriber: int
    next_subject: int = 0

    def fresh_subjects(self, count: int) -> list[bytes]:
        first, self.next_subject = self.next_subject, self.next_subject + count
        return [subject(number) for number in range(first, first + count)]

    def fresh_subscriptions(self, count: int) -> list[Subscription]:
        first, self.next_subscriber = self.next_subscriber, self.next_subscriber + count
        return subscriptions(self.rng, count, first)

    def cached(self) -> float:
        subjects = self.fresh_subjects(MATCHES_CACHED_MAX // 2)
        for each in subjects:
            self.trie.match(each)
        repeats = MATCHES // len(subjects)
        match = self.trie.match

        def work() -> None:
            for _ in range(repeats):
                for each in subjects:
                    match(each)

        return elapsed(work) / (repeats * len(subjects))

    def uncached(self) -> float:
        return per_call(self.trie.match, [(each,) for each in self.fresh_subjects(MATCHES)])

    def naive_match(self) -> float:
        return per_call(self.naive.match, [(each,) for each in self.fresh_subjects(NAIVE_MATCHES)])

    def insert(self) -> float:
        inserted = self.fresh_subscriptions(CHANGES)
        taken = per_call(self.trie.insert, inserted)
        for subscription in inserted:
            self.trie.remove(*subscription)
        return taken

    def remove(self) -> float:
        removed = self.fresh_subscriptions(CHANGES)
        for subscription in removed:
            self.trie.insert(*subscription)
        self.rng.shuffle(removed)
        return per_call(self.trie.remove, removed)

    def naive_insert(self) -> float:
        size = len(self.naive.subscriptions)
        taken = per_call(self.naive.insert, self.fresh_subscriptions(CHANGES))
        del self.naive.subscriptions[size:]
        return taken

    def naive_remove(self) -> float:
        removed = [each for _, each in self.rng.sample(self.naive.subscriptions, NAIVE_REMOVES)]
        taken = per_call(self.naive.remove, removed)
        for subscription in removed:
            self.naive.insert(*subscription)
        return taken


def per_call(call: Callable[..., object], arguments: list[tuple[object, ...]] | list[Subscription]) -> float:
    """Nanoseconds per call."""

    def work() -> None:
        for each in arguments:
            call(*each)

    return elapsed(work) / len(arguments)


def found_per_match(bench: Bench) -> float:
    """Average number of subscribers and groups per match. Exits if trie and list disagree."""
    found = 0
    subjects = bench.fresh_subjects(5 * NAIVE_MATCHES)
    for each in subjects:
        matched = bench.trie.match(each)
        plain, groups = bench.naive.match(each)
        members = {name: tuple(group) for name, group in groups.items()}
        if (matched.plain, matched.groups) != (tuple(plain), members):
            raise SystemExit(f"the trie and the list disagree about {each!r}")
        found += len(plain) + len(groups)
    return found / len(subjects)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench subjects", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the subscriptions")
    parser.add_argument("--count", type=int, default=100_000, help="number of subscriptions")
    options = parser.parse_args()
    count = options.count // 20 if options.quick else options.count
    began = time.monotonic()
    rng = Random(1)
    bench = Bench(SubjectTrie(), PatternList(), rng, next_subscriber=count)
    for subscription in subscriptions(rng, count):
        bench.trie.insert(*subscription)
        bench.naive.insert(*subscription)
    found = found_per_match(bench)
    gc.collect()
    gc.freeze()  # so that garbage collection of so many objects does not distort the result
    print(f"{bench.trie.count} subscriptions, {found:.0f} subscribers and groups per match\n")
    print("| work | trie | list | list / trie |")
    print("|---|---|---|---|")
    for name, ours, floor in [
        ("match, cached", bench.cached, bench.naive_match),
        ("match, not cached", bench.uncached, bench.naive_match),
        ("insert", bench.insert, bench.naive_insert),
        ("remove", bench.remove, bench.naive_remove),
    ]:
        mine, theirs, ratio = against_floor(ours, floor, ROUNDS)
        print(f"| {name} | {mine / 1000:.2f} µs | {theirs / 1000:.2f} µs | {1 / ratio:.3g} |")
    print(f"\n{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
