"""Merges of a real server's cold segments, by the `topics-spark` command and its parts.

Goal: clients read the same before and after, except for deletes; a killed job is resumed, concurrent jobs do no harm, damage is reported
and not touched. Method: a real server, tasks in processes and in Spark, kill -9, and a hook between merge and commit.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.cli import arguments
from spark_pipeline.cli.__main__ import main
from spark_pipeline.cli.arguments import use_engine
from spark_pipeline.jobs.consolidate import Consolidation, JobFailed, Outcome, Parameters
from spark_pipeline.jobs.engines import Engine, LocalEngine, Running, SparkEngine
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.tasks import server as http
from spark_pipeline.tasks.manifest import find_topics
from tests.spark.conftest import WIDE_TOPIC, events_of, segments_of, seqs_of, url_of
from tests.support.server import ROOT, Server, until
from tests.support.watching_proxy import watching

SMALL = Parameters(
    target_bytes=4000, min_segments=2
)  # few segments per group, so that there are several groups


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEngine]:
    engine = LocalEngine(2)
    yield engine
    engine.close()


class HookedEngine:
    """An engine with a hook that runs when all tasks are done, before the job gets their results."""

    name = "between"
    workers = 2

    def __init__(self, engine: Engine, then: Callable[[], None]) -> None:
        self._engine, self._then = engine, then

    def start(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Running[Any]:
        running = self._engine.start(function, tasks)
        results = running.results
        then = self._then

        def finished() -> list[Any]:
            found = results()
            then()
            return found

        running.results = finished  # type: ignore[method-assign]
        return running

    def close(self) -> None: ...


def job(
    server: Server, topic: str, engine: Any, parameters: Parameters = SMALL, lease_ms: int = 60_000
) -> Consolidation:
    progress = Progress(io.StringIO(), as_json=True)
    return Consolidation(http.Server(url_of(server)), topic, engine, progress, parameters, lease_ms=lease_ms)


def retry_while_leased(run: Callable[[], Outcome]) -> Outcome:
    """Retry while another job has the lease."""

    def ended() -> Outcome | None:
        found = run()
        return None if found.state == "leased" else found

    found: Outcome = until(ended)
    return found


def dead(server: Server, topic: str, *seqs: int) -> None:
    reply = server.post(f"/v0/topics/{topic}/delete", {"seqs": list(seqs)})
    assert reply.json["deleted"] == len(seqs)


def test_spark_merges_in_several_tasks(spark: Any, server: Server, event_log: Path) -> None:
    """The driver receives figures, not records: much less than what is merged."""
    before, count = seqs_of(server, "m1"), segments_of(server, "m1")
    outcome = job(server, "m1", SparkEngine(spark)).run()
    assert outcome.state == "committed"
    assert outcome.groups >= 2
    assert seqs_of(server, "m1") == before
    assert segments_of(server, "m1") < count
    wide = job(
        server, WIDE_TOPIC, SparkEngine(spark), Parameters(target_bytes=1_100_000, min_segments=2)
    ).run()
    assert wide.state == "committed"
    assert wide.bytes_out > 1_000_000
    groups = outcome.groups + wide.groups

    def tasks() -> list[Any] | None:
        """The event log gets each task of the job some time after it has run."""
        events = events_of(event_log)
        stages = {
            stage
            for event in events
            if event["Event"] == "SparkListenerJobStart"
            and "merge_group" in event["Properties"].get("spark.job.description", "")
            for stage in event["Stage IDs"]
        }
        ended = [one for one in events if one["Event"] == "SparkListenerTaskEnd"]
        found = [one for one in ended if one["Stage ID"] in stages]
        return found if len(found) >= groups else None

    ended = until(tasks)
    assert all(event["Task End Reason"]["Reason"] == "Success" for event in ended)
    assert sum(event["Task Metrics"]["Result Size"] for event in ended) < wide.bytes_out / 50


class FailingEngine(HookedEngine):
    """An engine that fails when all tasks are done, like a driver whose JVM was killed."""

    def __init__(self, engine: Engine) -> None:
        def die() -> None:
            raise RuntimeError("the JVM is gone")

        super().__init__(engine, die)


def test_an_engine_that_dies_under_the_job(server: Server, local: LocalEngine) -> None:
    before, count = seqs_of(server, "m17"), segments_of(server, "m17")
    with pytest.raises(JobFailed, match="the JVM is gone; run it again to resume"):
        job(server, "m17", FailingEngine(local)).run()
    assert segments_of(server, "m17") == count
    outcome = retry_while_leased(lambda: job(server, "m17", local).run())
    assert (outcome.state, outcome.resumed) == ("committed", outcome.groups)
    assert seqs_of(server, "m17") == before
    assert segments_of(server, "m17") < count


def test_deletes_during_the_job_stay_deleted(server: Server, local: LocalEngine) -> None:
    dead(server, "m2", 5, 6, 7)
    engine = HookedEngine(local, lambda: dead(server, "m2", 12, 13, 50))
    outcome = job(server, "m2", engine).run()
    assert outcome.state == "committed"
    gone = {5, 6, 7, 12, 13, 50}
    assert seqs_of(server, "m2") == [seq for seq in range(1, 101) if seq not in gone]
    [topic] = find_topics(str(server.folder / "cold"), "m2")
    marked = {
        first + row
        for first, mask in topic.dead().items()
        for row, is_dead in enumerate(mask.tolist())
        if is_dead
    }
    assert marked == {12, 13, 50}, "records that were dead before are not in the files any more"


def test_a_killed_job_is_resumed(server: Server, local: LocalEngine) -> None:
    """It has merged everything, and is killed before it asks the server to publish."""
    before, count = seqs_of(server, "m3"), segments_of(server, "m3")
    command = [
        sys.executable, "-m", "spark_pipeline.cli.__main__", "compact", "m3", "--engine", "local",
        "--workers", "1", "--target-bytes", "4000", "--min-segments", "2", "--lease-ms", "1000", "--json",
    ]  # fmt: skip
    with watching(url_of(server)) as proxy:
        proxy.at("/commit", "before", lambda _: os.killpg(run.pid, signal.SIGKILL))
        run = subprocess.Popen(
            [*command, "--url", proxy.url],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        _, said = run.communicate()
        assert proxy.sprung.wait(60), said
    assert seqs_of(server, "m3") == before
    assert segments_of(server, "m3") == count
    outcome = retry_while_leased(lambda: job(server, "m3", local).run())
    assert outcome.state == "committed"
    assert outcome.resumed == outcome.groups
    assert seqs_of(server, "m3") == before
    assert segments_of(server, "m3") < count


def test_a_second_job_is_refused_for_now(server: Server, local: LocalEngine) -> None:
    outcomes: list[Outcome] = []
    engine = HookedEngine(local, lambda: outcomes.append(job(server, "m4", local).run()))
    first = job(server, "m4", engine).run()
    assert (first.state, outcomes[0].state) == ("committed", "leased")
    assert seqs_of(server, "m4") == list(range(1, 101))


def test_a_paused_job_finds_that_another_has_published(server: Server, local: LocalEngine) -> None:
    """Its lease has expired, and another job has taken over and published the same plan: both get the same result."""
    outcomes: list[Outcome] = []

    def overtake() -> None:
        outcomes.append(retry_while_leased(lambda: job(server, "m5", local).run()))

    late = job(server, "m5", HookedEngine(local, overtake), lease_ms=1000).run()
    assert [one.state for one in outcomes] == ["committed"]
    assert outcomes[0].resumed == outcomes[0].groups
    assert late.state == "committed"
    assert late.groups == outcomes[0].groups
    assert seqs_of(server, "m5") == list(range(1, 101))


def test_damage_is_reported_and_the_rest_is_merged(
    server: Server, local: LocalEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    [topic] = find_topics(str(server.folder / "cold"), "m6")
    path = Path(topic.folder) / f"{topic.manifest.segments[4].name}.data"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    outcome = job(server, "m6", local).run()
    assert outcome.state == "failed"
    assert [one["segment"] for one in outcome.failed] == [topic.manifest.segments[4].name]
    assert outcome.groups >= 1
    after = find_topics(str(server.folder / "cold"), "m6")[0].manifest
    assert topic.manifest.segments[4].name in {one.name for one in after.segments}
    # A scrub finds it, too, and names the record.
    assert (
        main(["scrub", "m6", "--url", url_of(server), "--engine", "local", "--workers", "1", "--json"]) == 1
    )
    told = json.loads(capsys.readouterr().out)
    assert [(name, segment) for name, segment, _ in told["damage"]] == [
        ("m6", topic.manifest.segments[4].name)
    ]
    assert server.get("/v0/topics/m6/consolidation").json["snapshots"] == 0


def test_a_server_that_dies_before_the_commit_finds_the_plan_again(
    server: Server, local: LocalEngine
) -> None:
    def die() -> None:
        server.kill()
        server.start()

    outcome = job(server, "m7", HookedEngine(local, die)).run()
    assert outcome.state == "committed"
    assert seqs_of(server, "m7") == list(range(1, 101))


def test_a_server_that_dies_while_the_job_runs_renews_the_lease(server: Server, local: LocalEngine) -> None:
    class Slow(HookedEngine):
        """Its tasks take until the server is back and two renewals are due."""

        def start(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Running[Any]:
            running = local.start(function, tasks)
            server.kill()
            server.start()
            ends_s, wait = time.monotonic() + 0.8, running.wait
            running.wait = lambda timeout_s: wait(timeout_s) and time.monotonic() > ends_s  # type: ignore[method-assign]
            return running

    outcome = job(server, "m8", Slow(local, lambda: None), lease_ms=1000).run()
    assert outcome.state == "committed"
    assert seqs_of(server, "m8") == list(range(1, 101))


def test_removed_staging_ends_the_job(server: Server, local: LocalEngine) -> None:
    """As by an erase during the job."""

    class Late:
        name, workers = "late", 1

        def start(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Running[Any]:
            plan = server.folder / "cold" / tasks[0].staging
            assert plan.exists()
            assert server.delete("/v0/topics/m11").status == 200
            until(lambda: not plan.exists())
            return local.start(function, tasks)

    with pytest.raises(http.Refused) as caught:
        job(server, "m11", Late()).run()
    assert caught.value.status == 404


def test_the_plan_command_changes_nothing(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "m9", "--url", url_of(server), "--target-bytes", "4000"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "m9" in shown
    assert "segments" in shown
    assert server.get("/v0/topics/m9/consolidation").json["plan"] is None
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["m9"]
    assert sum(len(group["inputs"]) for group in plan["groups"]) >= 4


def test_a_purge_rewrites_only_what_has_dead_records(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    dead(server, "m9", *range(21, 29), 35)
    before = segments_of(server, "m9")
    arguments = [
        "purge",
        "m9",
        "--url",
        url_of(server),
        "--engine",
        "local",
        "--workers",
        "1",
        "--min-garbage",
        "0.05",
    ]
    assert main([*arguments, "--json"]) == 0
    [outcome] = json.loads(capsys.readouterr().out)
    assert (outcome["state"], outcome["groups"]) == ("committed", 2)
    assert outcome["bytes_out"] < outcome["bytes_in"]
    assert segments_of(server, "m9") == before
    assert seqs_of(server, "m9") == [seq for seq in range(1, 101) if seq not in {*range(21, 29), 35}]
    assert main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_temporary_refusals_have_their_own_exit_code(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another job has the plan, or readers hold all snapshots of a topic: exit code 4, so that the job is run again later."""
    path = "/v0/topics/m9"
    plan = server.post(f"{path}/consolidation", {"target_bytes": 4000, "min_segments": 1}).json
    assert main(["plan", "m9", "fresh.*,m10", "--url", url_of(server)]) == 3  # no topic matches
    assert main(["plan", "--url", url_of(server), "--json"]) == 4  # all topics
    assert {"m1", "m10"} <= set(json.loads(capsys.readouterr().out))
    assert main(["plan", "m9", "m10", "--url", url_of(server), "--json"]) == 4
    told = capsys.readouterr()
    assert list(json.loads(told.out)) == ["m10"]
    assert "m9: another client holds the lease" in told.err
    server.post(f"{path}/consolidation/{plan['plan_id']}/abandon", {"lease": plan["lease"]})
    pins = [server.post(f"{path}/snapshots", {"ttl_ms": 600_000}).json["snapshot_id"] for _ in range(16)]
    assert main(["scrub", "m9", "--url", url_of(server), "--engine", "local", "--workers", "1"]) == 4
    assert "Each batch that Spark reads keeps a snapshot for its pinTtl" in capsys.readouterr().err
    for pin in pins:
        assert server.delete(f"{path}/snapshots/{pin}").status == 200


def test_without_an_address_it_is_the_server_of_this_machine(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(arguments, "DEFAULT_URL", url_of(server))
    for name in ("TOPICS_URL", "TOPICS_COLD_DIR"):
        monkeypatch.delenv(name, raising=False)
    local = ["--engine", "local", "--workers", "1"]
    assert main(["scrub", "m10", *local]) == 0
    assert main(["export", "m10", "--out", str(tmp_path / "lake"), *local]) == 0


def test_errors_are_one_line(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    local = ["--engine", "local", "--workers", "1"]
    assert main(["compact", "nobody", "--url", url_of(server), *local]) == 3
    assert "topic 'nobody' does not exist" in capsys.readouterr().err
    assert main(["scrub", "--cold-dir", str(tmp_path), *local]) == 3
    assert "TOPICS_COLD_DIR" in capsys.readouterr().err
    assert main(["bogus"]) == 2
    assert main(["compact", " ", "--url", url_of(server), *local]) == 3
    assert "the name of a topic is empty; '>' matches every topic" in capsys.readouterr().err
    assert main(["scrub", "--url", "http://127.0.0.1:99999", *local]) == 3
    assert "'http://127.0.0.1:99999' is not the URL of a server" in capsys.readouterr().err
    for command in ("plan", "compact", "purge", "scrub", "export", "report"):
        out = ["--out", str(tmp_path)] if command in ("export", "report") else []
        engine = [] if command == "plan" else local
        assert main([command, "m*", "--url", url_of(server), *out, *engine]) == 3
        assert "a wildcard must be a whole token. Write 'orders.*' for one more" in capsys.readouterr().err
    for wrong in (["--min-garbage", "2"], ["--max-groups", "0"], ["--workers", "-3"]):
        with pytest.raises(SystemExit):
            main(["compact", "m1", *wrong])
        assert f"argument {wrong[0]}: '{wrong[1]}' is not " in capsys.readouterr().err


def test_a_topic_deleted_meanwhile_does_not_end_the_job_for_others(
    server: Server, local: LocalEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is deleted after topics are listed, and before it is queried."""

    def told(asks: str, *words: str) -> Any:
        server.write("a.going", 1)
        with watching(url_of(server)) as proxy, use_engine(local):
            proxy.at(asks, "before", lambda _: server.delete("/v0/topics/a.going"))
            assert main([*words, "--url", proxy.url, "--json", "--", "a.going", "m19"]) == 0
            assert proxy.sprung.is_set()
        return json.loads(capsys.readouterr().out)

    assert told("/a.going/snapshots", "export", "--out", str(tmp_path / "lake"))["topics"] == 1
    outcomes = told("/a.going", "compact")
    assert {one["topic"]: one["state"] for one in outcomes} == {"a.going": "gone", "m19": "committed"}
