"""Jobs on the data of a stopped server: with `--offline` they start their own server, which locks the directory meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_pipeline.cli.__main__ import main
from spark_pipeline.offline import private_server
from spark_pipeline.tasks.server import Refused
from spark_pipeline.tasks.server import Server as Http
from tests.spark.conftest import record, segments_of, seqs_of
from tests.support.server import Server, until


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Server]:
    environment = {
        "TOPICS_COLD_DIR": str(tmp_path / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_SEGMENT_MAX_AGE_MS": "0",
    }
    server = Server(tmp_path, environment=environment, shards=2).start()
    try:
        for first in range(1, 41, 10):
            server.post("/v0/topics/t", {"records": [record(n) for n in range(first, first + 10)]})
        assert server.stop() == 0
        server.start()
        until(lambda: segments_of(server, "t") >= 3)
        assert server.stop() == 0
        yield server
    finally:
        server.close()


def test_a_merge_without_a_server(
    stopped: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(
        "TOPICS_WAL_SHARDS", "3"
    )  # the settings of another server: this directory has two shards, and keeps them
    cold, data = str(tmp_path / "cold"), str(stopped.data_dir)
    count = segments_of(stopped, "t")
    here = ["--offline", data, "--cold-dir", cold, "--json"]

    assert main(["compact", "t", *here, "--engine", "local", "--workers", "1"]) == 0
    [outcome] = json.loads(capsys.readouterr().out)
    assert outcome["state"] == "committed"
    assert segments_of(stopped, "t") < count
    with private_server(data, cold) as private:
        with pytest.raises(Refused) as caught:
            Http(private.url, "NO_SUCH_VARIABLE").topics()
        assert caught.value.status == 401
    stopped.start()
    assert seqs_of(stopped, "t") == list(range(1, 41))
    assert sorted(stopped.children()) == ["front 0", "shard 0", "shard 1"]
    # Now a server is running.
    assert main(["compact", "t", *here]) == 4
    assert "give its --url instead of --offline" in capsys.readouterr().err
    assert main(["compact", "t", "--offline", str(tmp_path), "--cold-dir", cold]) == 3
    assert "is not a server's data directory" in capsys.readouterr().err
