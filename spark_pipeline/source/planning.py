"""Planning of a batch's partitions: cold segments are read from files, everything else over HTTP.

With a `url`, the server provides a snapshot: a manifest whose files are kept for a while. Records that are not cold yet,
or all of them if the cold directory is not accessible here, are read over HTTP.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spark_pipeline.source.options import SourceOptions
from spark_pipeline.tasks.http_reading import Gap, HttpSlice
from spark_pipeline.tasks.manifest import ColdTopic, NoManifest, find_topics, read_manifest
from spark_pipeline.tasks.reading import Range, Slice, pack, slices_of
from spark_pipeline.tasks.server import Refused, Server, wanted_topics
from topics.api.limits import MIB

SMALL_BYTES = 4 * MIB  # the overhead of a task; partitions are not smaller unless requested
HTTP_RECORDS_MIN = 1000
# Error codes that mean: no snapshot for this key or on this server, so read over HTTP.
_NO_SNAPSHOT = frozenset({"no_cold_tier", "forbidden", "not_found", "method_not_allowed", "throttled"})


@dataclass(frozen=True, slots=True)
class Plan:
    files: list[list[Slice]]
    http: list[HttpSlice]
    gaps: list[Gap]  # known at planning time


def plan_batch(options: SourceOptions) -> Plan:
    span = options.wanted.range
    if not options.url:
        topics = find_topics(options.path, options.topic)
        return Plan(_pack(options, topics, span), [], _losses(topics, span))
    server = Server(options.url, options.token_env)
    try:
        cold: list[ColdTopic] = []
        http: list[HttpSlice] = []
        for name in wanted_topics(server, options.topic):
            pinned, first, stop = _pin(server, options, name)
            if pinned is not None:
                cold.append(pinned)
            http += split_http(server, options, name, max(first, span.start_seq), min(stop, span.end_seq))
        return Plan(_pack(options, cold, span), http, _losses(cold, span))
    finally:
        server.close()


def _pin(server: Server, options: SourceOptions, topic: str) -> tuple[ColdTopic | None, int, int]:
    """The part to read from files, and the half-open range of seqs of the rest."""
    if options.cold_files != "no":
        try:
            answer = server.post(server.topic(topic, "/snapshots"), {"ttl_ms": options.pin_ms})
        except Refused as error:
            if options.cold_files == "yes" or error.code not in _NO_SNAPSHOT:
                raise
            if error.code == "throttled":
                print(f"topics: reading {topic} over HTTP: {error}", file=sys.stderr, flush=True)
        else:
            root = options.path or answer["cold_dir"]
            path = os.path.join(root, answer["path"])
            if os.path.exists(path):
                cold = ColdTopic(os.path.dirname(path), read_manifest(path))
                return cold, int(answer["cold_next_seq"]), int(answer["head_seq"]) + 1
            if options.cold_files == "yes" or options.path:
                raise NoManifest(
                    f"{path} does not exist here, or is not readable; is {root} the server's cold directory?"
                )
    state = server.get(server.topic(topic))
    return None, int(state["earliest_seq"]), int(state["head_seq"]) + 1


def _pack(options: SourceOptions, topics: Sequence[ColdTopic], span: Range) -> list[list[Slice]]:
    slices = [part for topic in topics for part in slices_of(topic, span)]
    total = sum(part.data_bytes for part in slices)
    least = options.partitions_min or min(os.cpu_count() or 1, -(-total // SMALL_BYTES))
    return pack(slices, bytes_max=options.partition_bytes_max, parts_min=least)


def _losses(topics: Sequence[ColdTopic], span: Range) -> list[Gap]:
    found = []
    for topic in topics:
        for first, last, reason in topic.manifest.losses:
            low = max(first, span.start_seq)
            high = min(last, span.end_seq - 1, topic.manifest.cold_next_seq - 1)
            if low <= high:
                found.append(Gap(topic.name, low, high, reason))
    return found


def split_http(server: Server, options: SourceOptions, topic: str, first: int, stop: int) -> list[HttpSlice]:
    """Split a range of seqs into parts of about the wanted size, by the topic's average record size."""
    if first >= stop:
        return []
    state = server.get(server.topic(topic))
    average = max(int(state["bytes"]) // max(int(state["count"]), 1), 1)
    total = (stop - first) * average
    count = max(-(-total // options.partition_bytes_max), options.partitions_min, 1)
    if not options.partitions_min:
        count = max(count, min(os.cpu_count() or 1, -(-total // SMALL_BYTES)))
        count = min(count, -(-(stop - first) // HTTP_RECORDS_MIN))
    count = min(count, stop - first)
    edges = [first + (stop - first) * i // count for i in range(count + 1)]
    return [HttpSlice(options.url, options.token_env, topic, low, high) for low, high in pairwise(edges)]
