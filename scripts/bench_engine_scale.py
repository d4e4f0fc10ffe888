"""Rows that must not depend on the size of a topic: the same operation on 10 k and 1 M records, alternating."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from bench_engine_support import PAYLOADS, Row, Run, Shell, plain

from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch

US = 1000.0
TOLERANCE = 1.2
SMALL = 10_000
FRONT = 2_000  # untagged, for the operations that delete from the front
ROUNDS = 60
REMOVED = 10  # records per operation
# Records that the tag operations delete: by group, the number of tags and of records per tag.
GROUPS = {
    b"delete": (ROUNDS, REMOVED),
    b"trim": (ROUNDS, 2 * REMOVED),
    b"purge": (ROUNDS * 5, REMOVED // 5),
    b"last": (ROUNDS, REMOVED),
}
FILLER_TAGS = 9_000


def _tags(size: int) -> Callable[[int], bytes | None]:
    """Tag by position: none in front, then the records of the groups spread evenly among filler."""
    special: list[bytes] = []
    for group, (tags, each) in GROUPS.items():
        for i in range(tags * each):
            tag = i % tags
            special.append(
                b"%b.%d.%d" % (group, tag // 5, tag % 5) if group == b"purge" else b"%b.%d" % (group, tag)
            )
    # Mixed, so that neighbours of one group do not become one range, at either size.
    special = [special[i * 7919 % len(special)] for i in range(len(special))]
    step = (size - FRONT) // len(special)

    def tag(i: int) -> bytes | None:
        if i < FRONT:
            return None
        place, rest = divmod(i - FRONT, step)
        if rest == 0 and place < len(special):
            return special[place]
        return b"filler.%d" % (i * 31 % FILLER_TAGS)

    return tag


def _pair(
    shell: Shell, small: Callable[[int], c.Command], large: Callable[[int], c.Command]
) -> tuple[float, float]:
    """Medians of the same operation on the small and the large topic, alternating."""
    times = [(shell.ask(small(i)), shell.ask(large(i))) for i in range(ROUNDS)]
    return median(a for a, _ in times), median(b for _, b in times)


def _row(work: str, small: float, large: float, per: int, note: str) -> Row:
    ratio = large / small
    return Row(
        work, large / per / US, "µs/record", small / per / US, ratio, f"≤ {TOLERANCE:g} x of 10 k", ratio <= TOLERANCE, note
    )  # fmt: skip


def operations(run: Run) -> list[Row]:
    size = run.count(1_000_000)
    tags = GROUPS.items()
    assert 2 * sum(tags * each for _, (tags, each) in tags) // 2 <= SMALL - FRONT
    front_step = FRONT // (2 * ROUNDS + 4)

    def eq(tag: bytes) -> TagMatch:
        return TagMatch("Eq", tag)

    # Front operations share the untagged front: first all of one, then all of the other.
    operations: list[tuple[str, Callable[[str, int], c.Command], int]] = [
        ("delete by exact tag", lambda t, i: c.Delete(t, match=eq(b"delete.%d" % i)), REMOVED),
        ("trim a tag to N", lambda t, i: c.Delete(t, match=eq(b"trim.%d" % i), keep=REMOVED), REMOVED),
        ("purge by prefix", lambda t, i: c.Delete(t, match=TagMatch("Glob", b"purge.%d.*" % i)), REMOVED),
        ("last by tag", lambda t, i: c.LastByTag(t, eq(b"last.%d" % i)), 1),
        ("before_seq delete", lambda t, i: c.Delete(t, before_seq=(i + 1) * front_step + 1), front_step),
        ("keep-N", lambda t, i: c.Delete(t, keep=counts[t] - (i + 1) * front_step), front_step),
    ]
    rows: list[Row] = []
    with run.directory("scale") as path:
        shell = Shell(path)
        for topic, records in (("small", SMALL), ("large", size)):
            shell.send(plain(topic))
            shell.fill(topic, records, _tags(records))
        shell.checkpoint()
        for topic in ("small", "large"):  # warm up: opens and verifies segments, and sorts the names
            for i in range(ROUNDS):
                shell.send(c.LastByTag(topic, eq(b"last.%d" % i)))
            shell.send(c.CountByTag(topic, TagMatch("Glob", b"purge.0.*")))
        counts: dict[str, int] = {}
        for work, command, per in operations:
            counts = {t: shell.engine.shard.state.published[t].count for t in ("small", "large")}
            before = dict(counts)
            small, large = _pair(
                shell, lambda i, f=command: f("small", i), lambda i, f=command: f("large", i)
            )
            if work != "last by tag":
                for t, count in before.items():
                    gone = count - shell.engine.shard.state.published[t].count
                    assert gone == ROUNDS * per, (work, t, gone)
            rows.append(_row(f"{work}, 10 k / 1 M records", small, large, per, f"{per} a time"))
        shell.abandon()
    return rows


def cap_eviction(run: Run) -> list[Row]:
    size = run.count(1_000_000)
    with run.directory("cap") as path:
        shell = Shell(path)
        for topic, records in (("small", SMALL), ("large", size)):
            shell.send(plain(topic, cap_records=records))
            shell.fill(topic, records + 500)
        shell.checkpoint()
        one = c.Records(PAYLOADS[:1])
        small, large = _pair(shell, lambda i: c.Append("small", one), lambda i: c.Append("large", one))
        assert [shell.engine.shard.state.published[t].count for t in ("small", "large")] == [SMALL, size]
        shell.abandon()
    return [_row("append that evicts 1, cap 10 k / 1 M", small, large, 1, "the append included")]


ROWS = [operations, cap_eviction]
