"""Pinned snapshots of topics: manifests whose files are kept while a job reads them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from spark_pipeline.tasks.manifest import ColdTopic, NoManifest, read_manifest
from spark_pipeline.tasks.server import Refused, Server, Unreachable, wanted_topics

TTL_MS = 600_000
# Error codes that mean: no snapshot for this key or on this server, so read over HTTP.
NO_SNAPSHOT = frozenset({"no_cold_tier", "forbidden", "not_found", "method_not_allowed", "throttled"})


@dataclass(frozen=True, slots=True)
class _Pin:
    topic: str
    snapshot_id: str


@contextmanager
def pinned(server: Server, wanted: str, cold_dir: str = "") -> Iterator[list[ColdTopic]]:
    """Pin the topics of a list or pattern until the block ends. A thread renews the pins."""
    pins: list[_Pin] = []
    stopped = threading.Event()
    try:
        names = wanted_topics(server, wanted)
        topics = [
            one for name in names if (one := _pin_of(server, name, cold_dir, pins, len(names))) is not None
        ]
        renewer = threading.Thread(
            target=_renew, args=(Server(server.url, server.token_env), pins, stopped), daemon=True
        )
        renewer.start()
        yield topics
    finally:
        stopped.set()
        _release(server, pins)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A topic: the part to read from files, if any, and the half-open range of seqs to read over HTTP."""

    topic: str
    cold: ColdTopic | None
    first_seq: int
    stop_seq: int


@contextmanager
def pinned_or_http(server: Server, names: Sequence[str], cold_dir: str = "") -> Iterator[list[Pinned]]:
    """As `pinned`, but topics without a snapshot (no cold tier, or no access) are read over HTTP. Deleted topics are omitted."""
    pins: list[_Pin] = []
    stopped = threading.Event()
    try:
        found = [one for name in names if (one := _pin_or_http(server, name, cold_dir, pins)) is not None]
        renewer = threading.Thread(
            target=_renew, args=(Server(server.url, server.token_env), pins, stopped), daemon=True
        )
        renewer.start()
        yield found
    finally:
        stopped.set()
        _release(server, pins)


def _pin_or_http(server: Server, name: str, cold_dir: str, pins: list[_Pin]) -> Pinned | None:
    try:
        try:
            cold = _pin(server, name, cold_dir, pins)
            return Pinned(name, cold, cold.manifest.cold_next_seq, cold.manifest.head_seq + 1)
        except Refused as error:
            if error.code not in NO_SNAPSHOT:
                raise
        state = server.get(server.topic(name, "?touch=false"))
    except Refused as error:
        if error.code == "topic_not_found":
            return None
        raise
    return Pinned(name, None, int(state["earliest_seq"]), int(state["head_seq"]) + 1)


def _pin_of(server: Server, name: str, cold_dir: str, pins: list[_Pin], of: int) -> ColdTopic | None:
    """None: one of several topics was deleted since they were listed."""
    try:
        return _pin(server, name, cold_dir, pins)
    except Refused as error:
        if error.code != "topic_not_found" or of == 1:
            raise
        return None


def _release(server: Server, pins: Sequence[_Pin]) -> None:
    for pin in pins:
        # Pins expire, so a failure here must not fail the job.
        with suppress(Refused, Unreachable):
            server.request("DELETE", server.topic(pin.topic, f"/snapshots/{pin.snapshot_id}"))


def _pin(server: Server, name: str, cold_dir: str, pins: list[_Pin]) -> ColdTopic:
    answer: dict[str, Any] = server.post(server.topic(name, "/snapshots"), {"ttl_ms": TTL_MS})
    pins.append(_Pin(name, answer["snapshot_id"]))
    root = cold_dir or answer["cold_dir"]
    path = os.path.join(root, answer["path"])
    if not os.path.exists(path):
        raise NoManifest(
            f"{path} does not exist here, or is not readable; give the mount point of the server's cold directory with --cold-dir"
        )
    return ColdTopic(os.path.dirname(path), read_manifest(path))


def _renew(server: Server, pins: list[_Pin], stopped: threading.Event) -> None:
    while not stopped.wait(TTL_MS / 3000):
        for pin in pins:
            with suppress(Refused, Unreachable):
                server.post(
                    server.topic(pin.topic, f"/snapshots/{pin.snapshot_id}/renew"), {"ttl_ms": TTL_MS}
                )
