"""Reports: figures that agree with what a client counts, and files for people and machines.

Method: a real server with records in the cold tier and newer ones, some deleted, counted by reading all of them; and a browser that opens the page.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spark_pipeline.cli.__main__ import main
from spark_pipeline.jobs.engines import LocalEngine, SparkEngine
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.jobs.reporting import collect
from spark_pipeline.report.charts import BARS_MAX, over_time
from spark_pipeline.report.model import Report, TopicReport
from spark_pipeline.report.page import page
from spark_pipeline.schedule.state import JobState, Run, State, StateFile
from spark_pipeline.tasks import server as http
from spark_pipeline.tasks.http_reading import Gap, HttpSlice
from spark_pipeline.tasks.manifest import find_topics
from spark_pipeline.tasks.reading import Range, slices_of
from spark_pipeline.tasks.statistics import HOUR_MS, Statistics, TopicStatistics, count, split_http, tasks_of
from tests.spark.conftest import url_of
from tests.support import browser
from tests.support.cold_tier import ColdTier, some_records
from tests.support.server import Server


@pytest.fixture(scope="module")
def engine() -> Any:
    found = LocalEngine(2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def changed(server: Server) -> Server:
    """m12 gets deletes in both tiers, a consumer, and more kinds of records; there is a queue with a dead letter, too."""
    # Deletes across two segments, across the tiers, of a whole segment, and of the first and the last record.
    dead = [1, 3, 4, 5, *range(10, 13), *range(38, 52), 90, 91, 95, 100]
    assert server.post("/v0/topics/m12/delete", {"seqs": dead}).json["deleted"] == len(dead) == 25
    records = [
        {"data": {"large": "x" * 3000}, "tag": "<b>&'\""},
        {"data": None},
        {"data": 1, "meta": {"a": 1}},
    ]
    assert server.post("/v0/topics/m12", {"records": records}).status == 200
    assert server.put("/v0/topics/m12/consumers/slow", {}).status in {200, 201}
    config = {"type": "queue", "lease_ms": 100, "max_deliveries": 5, "dead_letter": "letters"}
    assert server.put("/v0/topics/jobs", config).status in {200, 201}
    server.post("/v0/topics/jobs", {"records": [{"data": n} for n in range(4)]})
    return server


def records_of(server: Server, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = 0
    while True:
        answer = server.diff(topic, from_seq=cursor, limit=1000, include_tags=True).json
        found += answer["records"]
        cursor = answer["next_from_seq"]
        if answer["caught_up"]:
            return found


def quiet() -> Progress:
    return Progress(io.StringIO(), as_json=True)


def check(server: Server, found: TopicReport) -> None:
    records = records_of(server, found.topic)
    state = server.get(f"/v0/topics/{found.topic}").json
    total = found.total
    assert total.live == len(records) == state["count"]
    assert total.payload_bytes == state["bytes"]
    assert total.tags == Counter(one["$tag"] for one in records if one.get("$tag") is not None)
    hours = Counter(one["$ts"] // HOUR_MS for one in records)
    assert {hour: count for hour, (count, _) in total.hours.items()} == hours
    assert sum(total.sizes.values()) == len(records)
    assert found.total.live + found.total.dead + found.gone == total.rows
    # A client sees gaps in the seqs, from the earliest to the newest.
    edges = [state["earliest_seq"] - 1, *(one["$seq"] for one in records), state["head_seq"] + 1]
    assert found.gaps == sum(later - earlier > 1 for earlier, later in pairwise(edges))
    assert total.out_of_order == sum(two["$ts"] < one["$ts"] for one, two in pairwise(records))


def test_figures_are_what_a_client_counts(changed: Server, engine: LocalEngine) -> None:
    report = collect(http.Server(url_of(changed)), "m12,jobs", engine, quiet())
    main_topic, jobs = report.topics
    check(changed, main_topic)
    check(changed, jobs)
    assert (main_topic.statistics.cold.live, main_topic.statistics.hot.live) == (68, 10)
    assert main_topic.gaps in {6, 7}, "the first one does not count if the earliest seq has moved behind it"
    assert [one["lag_records"] for one in main_topic.consumers] == [78]
    assert jobs.queue == {"ready": 4, "in_flight": 0, "dead_lettered": 0}
    assert jobs.dead_letter == "letters"
    assert report.server["topics_consumers"] >= 1


def test_spark_counts_the_same(spark: Any, changed: Server) -> None:
    report = collect(http.Server(url_of(changed)), "m12", SparkEngine(spark), quiet())
    check(changed, report.topics[0])


def test_without_a_cold_tier_all_of_it_comes_over_http(tmp_path: Path, engine: LocalEngine) -> None:
    server = Server(tmp_path, shards=1).start()
    try:
        server.post("/v0/topics/only", {"records": [{"data": n, "tag": f"t{n % 3}"} for n in range(50)]})
        server.post("/v0/topics/only/delete", {"seqs": [1, 2, 10, 50]})
        [found] = collect(http.Server(url_of(server)), ">", engine, quiet()).topics
        check(server, found)
        assert found.cold_next_seq == 0
        server.post("/v0/topics/only/delete", {"before_seq": 99})
        [found] = collect(http.Server(url_of(server)), ">", engine, quiet()).topics
        check(server, found)
    finally:
        server.close()


def test_a_damaged_segment_is_reported_and_the_others_count(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    for amount in (50, 30, 20):
        tier.add(some_records(amount, tier.next_seq))
    tier.publish()
    path = tier.folder / f"{tier.segments[1].name}.idx"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    [topic] = find_topics(str(tier.root), tier.topic)
    found = TopicStatistics(topic.name)
    for task in tasks_of(topic.name, slices_of(topic, Range()), [], 1):
        found.append(count(task))
    assert found.cold.live == 70
    [(segment, why)] = found.failed
    assert segment == tier.segments[1].name
    assert "digest" in why


# ── Files ─────────────────────────────────────────────────────────────────────────────


def test_the_command_writes_three_files(
    changed: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateFile(str(tmp_path / "state.json"))
    run = Run(0, 1000, 1012.5, "done", figures={"bytes_in": 4096, "bytes_out": 1024})
    state.save(State(jobs={"nightly": JobState(handled_s=0, runs=[run])}))
    out = tmp_path / "out"
    arguments = ["report", "--out", str(out), "--url", url_of(changed), "--engine", "local", "--workers", "1"]
    assert main([*arguments, "--state", str(state.path), "--json", "m12", "jobs"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["topics"], told["records"], told["failed"]) == (2, 82, 0)
    assert sorted(path.name for path in out.iterdir()) == ["metrics.parquet", "report.html", "report.json"]
    table = pq.read_table(out / "metrics.parquet")
    assert table.column_names == ["run_id", "topic", "metric", "dimension", "value"]
    rows = {(row["topic"], row["metric"], row["dimension"]): row["value"] for row in table.to_pylist()}
    found = json.loads((out / "report.json").read_text())
    assert rows["m12", "records", "live"] == found["topics"]["m12"]["records"]["live"] == 78
    assert rows["m12", "records_by_tag", "tag-1"] == 20
    assert rows["m12", "consumer_lag_records", "slow"] == 78
    assert rows["", "job_duration_s", "nightly/done"] == 12.5
    assert set(table.column("run_id").to_pylist()) == {found["run_id"]}
    html = (out / "report.html").read_text()
    assert "&lt;b&gt;&amp;" in html
    assert "<b>&'" not in html
    assert "4.0 KiB → 1.0 KiB" in html


def test_exports_scrubs_and_what_has_changed(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exported, then grown and damaged: the second report shows all of it."""
    out, lake = tmp_path / "out", tmp_path / "lake"
    here = ["--url", url_of(server), "--engine", "local", "--workers", "1", "--json"]

    def run(*arguments: str) -> dict[str, Any]:
        main([*arguments, *here, "--", "m15"])
        return dict(json.loads(capsys.readouterr().out))

    def report() -> dict[str, Any]:
        run("report", "--out", str(out), "--lake", str(lake))
        return dict(json.loads((out / "report.json").read_text()))

    exported = run("export", "--out", str(lake))["rows"]
    assert run("scrub", "--out", str(out))["damage"] == []
    first = report()
    figures = first["topics"]["m15"]
    assert figures["export_rows"] == {str(lake): exported}
    assert figures["export_behind_cold_seqs"] == {str(lake): 0}
    assert figures["export_behind_seqs"] == {str(lake): 100 - exported}
    assert figures["scrub_damaged_ranges"] == {"": 0}
    assert "change" not in figures
    assert len(first["trend"]) == 1
    assert server.post("/v0/topics/m15", {"records": [{"data": n} for n in range(7)]}).status == 200
    assert server.post("/v0/topics/m15/delete", {"seqs": [50, 51]}).json["deleted"] == 2
    [topic] = find_topics(str(server.folder / "cold"), "m15")
    path = Path(topic.folder) / f"{topic.manifest.segments[2].name}.data"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    assert len(run("scrub", "--out", str(out))["damage"]) == 1
    second = report()
    figures = second["topics"]["m15"]
    assert figures["change"]["records"] == 5
    assert figures["change"]["gaps"] == 1
    assert figures["scrub_damaged_ranges"] == {"": 1}
    [damage] = second["damage"]
    assert (damage["topic"], damage["segment"]) == ("m15", topic.manifest.segments[2].name)
    assert [point["records"] for point in second["trend"]] == [100, 105]
    assert second["previous_made_at_ms"] == first["made_at_ms"]
    html = (out / "report.html").read_text()
    assert "+5" in html
    assert f"{topic.manifest.segments[2].name}, record " in html
    assert main(["report", "--out", str(out), *here, "--", "nobody.has.it"]) == 3
    assert "has no topic 'nobody.has.it'" in capsys.readouterr().err
    # Reports of other topics, and one that is unreadable: there is nothing to compare with.
    main(["report", "--out", str(out), *here, "--", "m14"])
    assert json.loads((out / "report.json").read_text())["previous_made_at_ms"] is None
    (out / "report.json").write_text("{")
    (lake / "topic=m15" / "_manifest.json").write_text("{")
    capsys.readouterr()
    assert main(["report", "--out", str(out), "--lake", str(lake), *here, "--", "m15"]) == 1
    assert "restore it from a backup" in capsys.readouterr().err
    path.write_bytes(bytes(content[:200]) + bytes([content[200] ^ 1]) + bytes(content[201:]))


def a_report(topics: int) -> Report:
    found = []
    for number in range(topics):
        figures = TopicStatistics(f"topic-{number}")
        figures.hot = Statistics(
            rows=10,
            live=10,
            payload_bytes=1000,
            hours={480_000 + hour: (hour, hour) for hour in range(48)},
            sizes={8: 10},
            tags=Counter({"a-tag-of-a-name-that-is-too-long-for-a-phone-" * 4: 7}),
            ts_max=1,
        )
        figures.lost = [Gap("t", 1, 2, "rot")]
        found.append(TopicReport(f"topic-{number}-{'x' * 200}", figures, 1, 10, 0, losses=[(1, 2, "rot")]))
    return Report("run", 1_800_000_000_000, "http://here", found)


@pytest.mark.skipif(browser.program() is None, reason="no browser is installed")
def test_the_page_fits_a_phone_and_the_dark(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(a_report(3)))
    folder = tmp_path / "browser"
    folder.mkdir()
    program = browser.program()
    assert program is not None
    with browser.running(program, folder) as running, running.page(path.as_uri()) as shown:
        assert shown.run("document.querySelectorAll('svg').length") > 10
        light = shown.run("getComputedStyle(document.body).backgroundColor")
        running.call(
            "Emulation.setDeviceMetricsOverride",
            shown._session,
            width=360,
            height=740,
            deviceScaleFactor=2,
            mobile=True,
        )
        assert shown.run("document.documentElement.scrollWidth") <= 360
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        running.call("Emulation.setEmulatedMedia", shown._session, features=features)
        assert shown.run("getComputedStyle(document.body).backgroundColor") != light


def test_a_page_of_many_topics_stays_small() -> None:
    html = page(a_report(300))
    assert html.count("<details") == 50
    assert "250 smaller topics" in html
    assert "topic-299" in html
    assert page(a_report(0))


def test_long_times_are_drawn_together() -> None:
    for span in (1, 100, 1000, 100_000):
        hours = {480_000 + hour: 1.0 for hour in range(span)}
        bars = over_time(hours)
        assert len(bars) <= BARS_MAX + 1
        assert sum(value for _, value in bars) == span
    assert over_time({}) == []


def test_parts_over_http_cover_the_range() -> None:
    parts = split_http(HttpSlice("u", "T", "t", 5, 1_000_005), 2)
    assert (parts[0].start_seq, parts[-1].end_seq, len(parts)) == (5, 1_000_005, 8)
    assert all(one.end_seq == two.start_seq for one, two in pairwise(parts))
    assert split_http(HttpSlice("u", "T", "t", 5, 5), 2) == []
