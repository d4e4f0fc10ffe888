"""report.html: a single responsive file without scripts or external resources, with a dark mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from spark_pipeline.report.charts import columns, over_time, ranking, shares
from spark_pipeline.report.model import PERCENTILES, Report, TopicReport
from spark_pipeline.report.trend import changes, points
from spark_pipeline.tasks.statistics import Statistics, size_of_class
from topics.cli.formatting import format_size, format_time

TOPICS_SHOWN = 50  # with charts, largest first
ROWS_SHOWN = 1000  # in the table of topics
OPEN = 5  # topics whose charts are expanded
RUNS_SHOWN = 60
WARNINGS_SHOWN = 20

STYLE = """
:root{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5c6670;--line:#dde1e6;--a:#2563c9;--b:#c2740c;--c:#9aa3ad;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ground:#111418;--card:#1a1f25;--ink:#e6e9ec;--soft:#9aa5b1;--line:#2d343c;--a:#6ba4ff;--b:#f0a54a;--c:#5f6a75;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.15rem;margin:1.6em 0 .6em}h3{font-size:.85rem;font-weight:600;color:var(--soft);margin:0 0 .6em}
p{margin:.3em 0}.card p{font-size:.85rem}.soft,.none{color:var(--soft)}
.grid-of{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));align-items:start}
.tiles{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(130px,1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;min-width:0}
.tile b{display:block;font-size:1.3rem;font-weight:600}.change{display:block;font-size:.85rem}
.warn{border-color:var(--bad)}.warn h3,.bad{color:var(--bad)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:5px 10px 5px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left}
td.text{text-align:left;white-space:normal;min-width:12em;overflow-wrap:anywhere}
td:first-child{max-width:20em;overflow:hidden;text-overflow:ellipsis}
details{margin:12px 0}summary{cursor:pointer;font-weight:600;padding:6px 0;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;max-width:640px}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
svg rect{fill:var(--a)}svg .dead{fill:var(--b)}svg .gone,svg .back{fill:var(--line)}svg .cold{fill:var(--c)}
svg .grid{stroke:var(--line)}svg .bars rect:hover{opacity:.7}
"""


def page(report: Report) -> str:
    shown = sorted(report.topics, key=lambda one: (-one.total.payload_bytes, one.topic))
    parts = [
        _head(report),
        _warnings(report),
        _tiles(report),
        _overview(report),
        _table_of_topics(report, shown),
        *(_topic(report, one, is_open=number < OPEN) for number, one in enumerate(shown[:TOPICS_SHOWN])),
        _more(shown),
        _history(report.history),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>topics: report of {_moment(report.made_at_ms)}</title><style>{STYLE}</style></head><body><main>"
        + "".join(parts)
        + "</main></body></html>\n"
    )


# ── All topics ────────────────────────────────────────────────────────────────────────


def _head(report: Report) -> str:
    return f'<h1>Topics</h1><p class="soft">{escape(report.url)}, as of {_moment(report.made_at_ms)}. Times are UTC.</p>'


def _warnings(report: Report) -> str:
    lines = [f"{topic}: {segment} is not counted: {reason}" for topic, segment, reason in report.failed()]
    for topic, scrub in report.scrubs.items():
        when = f"found by the scrub of {_moment(scrub.at_ms)}"
        for one in scrub.ranges:
            seqs = _seqs(one.first_seq, one.last_seq)
            lines.append(f"{topic}: {one.segment}, {seqs}: {one.what}, {when}")
        if scrub.damaged > len(scrub.ranges):
            lines.append(f"{topic}: {_number(scrub.damaged - len(scrub.ranges))} further ranges, {when}")
    if not lines:
        return ""
    more = f"<p>… and {_number(len(lines) - WARNINGS_SHOWN)} more</p>" if len(lines) > WARNINGS_SHOWN else ""
    text = "".join(f"<p>{escape(line)}</p>" for line in lines[:WARNINGS_SHOWN])
    return _card("Damaged", text + more, "warn", margin=True)


def _seqs(first_seq: int, last_seq: int) -> str:
    if not last_seq:
        return "between records"
    return f"record {first_seq}" if first_seq == last_seq else f"records {first_seq} to {last_seq}"


def _tiles(report: Report) -> str:
    total = report.total()
    lag = max((one.lag for one in report.topics), default=0)
    lost = sum(last - first + 1 for one in report.topics for first, last, _ in one.losses)
    queues = [one.queue for one in report.topics if one.queue is not None]
    found = [
        ("topics", _number(len(report.topics))),
        ("records", _number(total.live)),
        ("payload", format_size(total.payload_bytes)),
        ("dead in files", format_size(total.dead_bytes)),
        ("largest lag", _number(lag)),
        ("lost", _number(lost)),
    ]
    exports = [export for one in report.topics for export in one.exports]
    if exports:
        found.append(("cold, not exported", _number(sum(one.behind_cold for one in exports))))
    if report.scrubs:
        found.append(("damaged ranges", _number(sum(one.damaged for one in report.scrubs.values()))))
    if queues:
        found.append(("jobs waiting", _number(sum(queue["ready"] for queue in queues))))
        found.append(("dead-lettered", _number(sum(queue["dead_lettered"] for queue in queues))))
    before = report.previous
    changed: dict[str, str] = {}
    if before is not None:
        changed = {
            "topics": _change(len(report.topics) - len(before.topics), _number),
            "records": _change(total.live - before.total("records"), _number),
            "payload": _change(total.payload_bytes - before.total("payload_bytes"), _bytes),
            "dead in files": _change(total.dead_bytes - before.total("dead_bytes"), _bytes),
        }
    tiles = "".join(
        f'<div class="card tile"><b>{escape(value)}</b><span class="soft">{name}</span>'
        f'<span class="soft change">{escape(changed.get(name, ""))}</span></div>'
        for name, value in found
    )
    since = (
        f'<p class="soft">Changes are since the report of {_moment(before.made_at_ms)}.</p>' if before else ""
    )
    return f'<div class="tiles">{tiles}</div>{since}'


def _overview(report: Report) -> str:
    total = report.total()
    most = sorted(report.topics, key=lambda one: -one.total.payload_bytes)[:8]
    lags = [
        (f"{one.topic} · {consumer['consumer']}", float(consumer["lag_records"]))
        for one in report.topics
        for consumer in one.consumers
    ]
    cards = [
        _traffic(total),
        _live(total, sum(one.gone for one in report.topics)),
        _card(
            "Largest topics",
            ranking(
                [(one.topic, one.total.payload_bytes) for one in most], _bytes, "Largest topics by bytes"
            ),
        ),
    ]
    runs = points(report)
    if len(runs) > 1:
        shown = [(_moment(run["made_at_ms"]), run["records"]) for run in runs]
        cards.append(_card("Records, by report", columns(shown, _number, "Records by report")))
        shown = [(_moment(run["made_at_ms"]), run["payload_bytes"]) for run in runs]
        cards.append(_card("Payload, by report", columns(shown, _bytes, "Payload by report")))
    if lags:
        lags.sort(key=lambda pair: (-pair[1], pair[0]))
        cards.append(_card("Consumer lag, records", ranking(lags[:8], _number, "Consumer lag")))
    return f'<h2>All topics</h2><div class="grid-of">{"".join(cards)}</div>'


def _table_of_topics(report: Report, topics: Sequence[TopicReport]) -> str:
    heads = ("topic", "records", "change", "payload", "dead", "segments", "tags", "lag", "newest")
    rows = [
        (
            one.topic,
            _number(one.total.live),
            _records_changed(report, one),
            format_size(one.total.payload_bytes),
            format_size(one.total.dead_bytes),
            _number(len(one.segments)),
            _number(one.total.tag_count()),
            _number(one.lag) if one.consumers else "",
            _moment(one.total.ts_max) if one.total.live else "",
        )
        for one in topics[:ROWS_SHOWN]
    ]
    return _card("", _table(heads, rows), "wide", margin=True)


def _records_changed(report: Report, one: TopicReport) -> str:
    if report.previous is None:
        return ""
    found = changes(one, report.previous)
    return _change(found["records"], _number) if found else "new"


def _more(topics: Sequence[TopicReport]) -> str:
    left = len(topics) - TOPICS_SHOWN
    return f'<p class="soft">{left} smaller topics are only in report.json.</p>' if left > 0 else ""


# ── One topic ─────────────────────────────────────────────────────────────────────────


def _topic(report: Report, one: TopicReport, *, is_open: bool) -> str:
    total, top = one.total, report.top
    cards = [
        _traffic(total),
        _live(total, one.gone),
        _sizes(total),
        _card(
            f"Most frequent tags, of {_number(total.tag_count())}",
            ranking([(tag, float(count)) for tag, count in total.tags.most_common(top)], _number, "Top tags"),
        ),
        _segments(one),
        _gaps(one),
        _jobs(report, one),
    ]
    if one.queue is not None:
        cards.append(_queue(one))
    if one.consumers:
        cards.append(_consumers(one))
    about = f"{_number(total.live)} records, {format_size(total.payload_bytes)}"
    return (
        f'<details{" open" if is_open else ""}><summary>{escape(one.topic)} <span class="soft">{about}</span></summary>'
        f'<div class="grid-of">{"".join(cards)}</div></details>'
    )


def _traffic(total: Statistics) -> str:
    records = {hour: float(count) for hour, (count, _) in total.hours.items()}
    return _card("Records by time", columns(over_time(records), _number, "Records by time"))


def _live(total: Statistics, gone: int) -> str:
    return _card(
        "Live and dead records",
        shares(
            [
                ("live", total.live, "live"),
                ("dead, still in files", total.dead, "dead"),
                ("gone", gone, "gone"),
            ],
            _number,
            "Live and dead records",
        ),
    )


def _sizes(total: Statistics) -> str:
    """Sizes by powers of two; the other output files have finer classes."""
    doubled: dict[int, float] = {}
    for kind, count in total.sizes.items():
        power = max(size_of_class(kind) - 1, 0).bit_length()
        doubled[power] = doubled.get(power, 0.0) + count
    span = range(min(doubled, default=0), max(doubled, default=-1) + 1)
    bars = [(f"to {format_size(1 << power)}", doubled.get(power, 0.0)) for power in span]
    marks = ", ".join(
        f"{share * 100:g} %: {format_size(total.size_percentile(share))}" for share in PERCENTILES
    )
    return _card(
        "Record sizes",
        columns(bars, _number, "Record sizes") + (f'<p class="soft">{marks}</p>' if bars else ""),
    )


def _segments(one: TopicReport) -> str:
    tiers = shares(
        [("cold", one.statistics.cold.live, "cold"), ("newer", one.statistics.hot.live, "live")],
        _number,
        "Records by tier",
    )
    bars = [(segment.name, float(segment.data_bytes)) for segment in one.segments[-120:]]
    chart = columns(bars, _bytes, "Sizes of cold segments") if bars else ""
    words = f"{len(one.segments)} cold segments, {one.retired} replaced segments not yet deleted"
    return _card("Segments", f'{tiers}{chart}<p class="soft">{words}</p>')


def _gaps(one: TopicReport) -> str:
    words = [
        f"seqs {one.earliest_seq} to {one.head_seq}",
        f"{_number(one.gaps)} gaps of deleted or expired records",
        f"{_number(one.total.out_of_order)} records older than their predecessor",
    ]
    text = "".join(f"<p>{escape(word)}</p>" for word in words)
    if one.losses:
        rows = [
            (reason, f"{first}–{last}", _number(last - first + 1)) for first, last, reason in one.losses[-10:]
        ]
        text += _table(("tombstone", "seqs", "records"), rows)
    return _card("Gaps and tombstones", text, "warn" if one.losses else "")


def _jobs(report: Report, one: TopicReport) -> str:
    """State of its exports, and the last scrub."""
    rows = [
        (
            export.name,
            _number(export.fresh.rows),
            format_size(export.fresh.bytes),
            _number(export.behind_cold),
            _moment(export.fresh.at_ms) if export.fresh.at_ms else "",
        )
        for export in one.exports
    ]
    text = _table(("lake", "rows", "bytes", "not yet", "last"), rows) if rows else ""
    scrub = report.scrubs.get(one.topic)
    if scrub is None:
        text += '<p class="soft">no known scrub</p>'
        return _card("Exports and scrubs", text, "wide")
    found = f"{_number(scrub.damaged)} damaged ranges" if scrub.damaged else "no damage"
    words = f"scrubbed {_moment(scrub.at_ms)}: {_number(scrub.records)} records, {found}"
    kind = "wide warn" if scrub.damaged else "wide"
    return _card("Exports and scrubs", text + f"<p>{escape(words)}</p>", kind)


def _queue(one: TopicReport) -> str:
    queue = one.queue or {}
    rows = [
        ("ready", float(queue["ready"])),
        ("in flight", float(queue["in_flight"])),
        ("dead-lettered", float(queue["dead_lettered"])),
    ]
    dead_letters = (
        f"dead letters go to {one.dead_letter}"
        if one.dead_letter
        else "no dead-letter topic: failed jobs are redelivered forever"
    )
    return _card("Queue", ranking(rows, _number, "Queue") + f'<p class="soft">{escape(dead_letters)}</p>')


def _consumers(one: TopicReport) -> str:
    rows = [
        (
            consumer["consumer"],
            _number(consumer["lag_records"]),
            _age(consumer["lag_ms"]),
            _number(consumer["ack_pending"]),
            _number(consumer["redelivered"]),
            _number(consumer["dead_lettered"]),
        )
        for consumer in sorted(one.consumers, key=lambda consumer: -consumer["lag_records"])[:20]
    ]
    heads = ("consumer", "lag", "lag time", "in flight", "redelivered", "dead letters")
    return _card("Consumers", _table(heads, rows), "wide")


# ── Jobs ──────────────────────────────────────────────────────────────────────────────


def _history(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return ""
    newest = list(runs)[-RUNS_SHOWN:]
    bars = [
        (f"{run['job']} {_moment(run['began_s'] * 1000)}, {run['result']}", run["ended_s"] - run["began_s"])
        for run in newest
    ]
    chart = _card("Duration of runs", columns(bars, lambda value: f"{value:.1f} s", "Duration of runs"))
    rows = [
        (
            run["job"],
            _moment(run["began_s"] * 1000),
            run["result"],
            f"{run['ended_s'] - run['began_s']:.1f} s",
            _merged(run["figures"]),
            run["message"],
        )
        for run in reversed(newest)
    ]
    heads = ("job", "began", "result", "duration", "bytes", "")
    table = _card("Newest first", _table(heads, rows, text=5), "wide", margin=True)
    return f'<h2>Jobs</h2><div class="grid-of">{chart}</div>{table}'


def _merged(figures: dict[str, float]) -> str:
    """Bytes before and after a merge."""
    if not figures.get("bytes_in"):
        return ""
    return f"{format_size(int(figures['bytes_in']))} → {format_size(int(figures['bytes_out']))}"


# ── Parts ─────────────────────────────────────────────────────────────────────────────


def _card(title: str, content: str, kind: str = "", *, margin: bool = False) -> str:
    head = f"<h3>{escape(title)}</h3>" if title else ""
    style = ' style="margin:12px 0"' if margin else ""
    return f'<section class="card {kind}"{style}>{head}{content}</section>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text: int | None = None) -> str:
    """`text`: the column with long texts, which may wrap."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if column == text else ''}>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")


def _change(value: float, show: Callable[[float], str]) -> str:
    if not value:
        return "±0"
    return ("+" if value > 0 else "\u2212") + show(abs(value))


def _bytes(value: float) -> str:
    return format_size(int(value))


def _moment(ts_ms: float) -> str:
    return format_time(round(ts_ms))[:16].replace("T", " ")


def _age(ms: float) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{ms / size:.1f} {unit}"
    return f"{ms:.0f} ms"
