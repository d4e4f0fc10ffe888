"""Fixtures for the tests of HTTP/2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.http2_bench import Bench


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def build(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1].handshake()

    yield build
    for bench in benches:
        bench.check_and_end()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
