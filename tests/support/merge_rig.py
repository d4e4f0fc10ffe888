"""A topic with cold segments of 4 records each, a job that merges them, and everything that readers can see of it."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.engine_harness import FSYNC, SMALL, Harness, append, numbered, rows_of
from tests.support.merger import Merger
from tests.support.stores import ObjectStore
from topics.api.config import EngineConfig, TopicConfig
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.core.ports import SegmentStore
from topics.engine.core.subjects import TagMatch
from topics.engine.storage.manifest import (
    Manifest,
    dead_name,
    decode_current,
    decode_dead,
    decode_manifest,
    is_manifest_file,
    manifest_name,
)
from topics.engine.storage.segments import parse_segment_name

GRACE_MS = 1000
CONFIG = msgspec.structs.replace(
    SMALL, hot_retain_segments=1, cold_cache_bytes=1 << 20, retire_grace_ms=GRACE_MS, plan_ttl_ms=1 << 40
)
SECRET = b'"the secret that nobody may find again: 4711-0815"'
NEEDLE = b"nobody may find again"
TAGS = (b"a", b"b", None)


def begun(
    store: SegmentStore | None = None,
    *,
    count: int = 22,
    secret: int = 0,
    config: EngineConfig = CONFIG,
    topic: TopicConfig = FSYNC,
    moved: bool = True,
) -> Harness:
    """Segments of 4 records, all but the last two in the cold tier."""
    h = Harness(config, cold=store if store is not None else ObjectStore())
    h.put("t", topic)
    for seq in range(1, count + 1):
        payload = SECRET if seq == secret else numbered(seq, 1)[0]
        h.do(append("t", payload, tag=TAGS[seq % 3], nodes=[b"n%d" % (seq % 2)]))
    for _ in range(3 if moved else 0):
        h.checkpoint()
    return h


def plan(h: Harness, **options: Any) -> dict[str, Any]:
    """The plan as the HTTP answer has it."""
    body: dict[str, Any] = msgspec.to_builtins(h.do(mrg.PlanMerge("t", **options)).body)
    return body


def work(h: Harness, body: dict[str, Any], attempt: str = "1") -> None:
    assert h.cold is not None
    Merger(h.cold, body, attempt).run()


def commit(h: Harness, body: dict[str, Any], **options: Any) -> Any:
    return h.send(mrg.CommitPlan("t", body["plan_id"], body["lease"], **options))


def merged(h: Harness, **options: Any) -> dict[str, Any]:
    body = plan(h, **options)
    work(h, body)
    answer = commit(h, body)
    assert isinstance(answer, mrg.MergeReply), answer
    return answer.body


def seen(h: Harness) -> list[Any]:
    """What readers can see of the topic."""
    rows, gaps = h.read("t")
    state = h.state("t")
    found: list[Any] = [rows, gaps, (state.count, state.bytes, state.head_seq, state.earliest_seq)]
    for match in (TagMatch("Eq", b"a"), TagMatch("Glob", b"*")):
        page = h.do(c.Diff("t", 0, match=match, limit=1000, touch=False))
        found.append((rows_of(page), page.tags, page.timestamps))
        last = h.do(c.LastByTag("t", match, each=True))
        found.append(rows_of(last))
        found.append(h.do(c.CountByTag("t", match)).counts)
    by_node = h.do(c.Diff("t", 0, nodes=(b"n1",), limit=1000, touch=False))
    found.append(rows_of(by_node))
    return [_plain(part) for part in found]


def _plain(part: Any) -> Any:
    part = part.tolist() if hasattr(part, "tolist") else part
    return [_plain(one) for one in part] if isinstance(part, list | tuple) else part


def segments(h: Harness) -> list[tuple[int, int, int, str]]:
    """First seq, generation, rows and tier of each segment."""
    log = h.engine.shard.state.published["t"]
    return [
        (chunk.meta.first_seq, chunk.meta.generation, chunk.count, chunk.meta.tier)
        for chunk in log.chunks
        if chunk.meta is not None
    ]


def keys(h: Harness) -> list[str]:
    assert h.cold is not None
    return [*h.cold.list("topics/"), *h.cold.list("staging/plans/")]


def current(h: Harness) -> tuple[Manifest, dict[int, Any]]:
    """The manifest that CURRENT names, and its dead rows."""
    store, directory = h.cold, h.topic_dir("t")
    assert store is not None

    def read(name: str) -> bytes:
        key = f"{directory}/{name}"
        return store.read_range(key, 0, store.length(key))

    number = decode_current("CURRENT", read("CURRENT"))
    manifest = decode_manifest("manifest", read(manifest_name(number)))
    if not store.exists(f"{directory}/{dead_name(number)}"):
        return manifest, {}
    return manifest, decode_dead("dead", read(dead_name(number)), manifest.segments)


def check_tidy(h: Harness, note: object = "") -> None:
    """After the grace period and some checkpoints the store has the current segments and manifests, and nothing else."""
    for _ in range(4):
        h.append("t", b'"after"')
        h.checkpoint()
        h.pass_time(GRACE_MS + 70_000)
    h.rest()
    log = h.engine.shard.state.published["t"]
    named = {
        (chunk.meta.first_seq, chunk.meta.generation)
        for chunk in log.chunks
        if chunk.meta is not None and chunk.meta.tier == "cold"
    }
    found = set()
    for key in keys(h):
        assert not key.startswith("staging/"), (note, key)
        name = key.rpartition("/")[2]
        parsed = parse_segment_name(name)
        if parsed is None:
            assert is_manifest_file(name), (note, key)
        else:
            found.add((parsed[0], parsed[1]))
    assert found == named, (note, found, named)
    hot = {parsed[:2] for name in h.segment_files("t") if (parsed := parse_segment_name(name))}
    assert hot == {(chunk.meta.first_seq, chunk.meta.generation) for chunk in log.chunks if chunk.meta}, note
    listed = {(one.first_seq, one.generation) for one in current(h)[0].segments}
    assert listed == named, (note, listed, named)
    assert log.merges.retired == [], note
