"""A real server with a cold directory whose number of shards changes, with that directory there and not.

Goal: every record is read as before, the metrics of the tiers add up as before, nothing in the cold directory is
touched, and `topics verify` finds both tiers sound. Method: segments of 10 records, all but the open ones cold; 2, 5 and 1 shards.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.contract import ok
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import ROOT, Server, until

TOPICS = [f"t{i}" for i in range(6)]
COUNT = 45


def cold_files(server: Server) -> dict[str, bytes]:
    root = server.folder / "cold" / "topics"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def metric(server: Server, name: str) -> int:
    text = server.get("/v0/metrics").body.decode()
    return sum(int(float(value)) for value in re.findall(rf"^{re.escape(name)} (\S+)$", text, re.M))


def read(server: Server, topic: str) -> list[Any]:
    found: list[Any] = []
    cursor = 0
    while True:
        page = ok(server.diff(topic, from_seq=cursor, limit=1000))
        assert page["tombstone"] is None
        found += [record["data"] for record in page["records"]]
        if page["caught_up"]:
            return found
        cursor = page["next_from_seq"]


def restart(server: Server, shards: int) -> None:
    assert server.stop() == 0
    server.shards = shards
    server.start()


def verify(server: Server) -> Any:
    command = [sys.executable, "-m", "topics.cli", "verify", str(server.data_dir), "--json"]
    command += ["--cold-dir", str(server.folder / "cold")]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout)


@fault(
    "disk",
    "the cold tier is not mounted while the number of shards is changed",
    "the number is changed; records of that tier are 503 until it is back, and then read as before",
)
# Without it in between everything happens that happens with it, and more.
@pytest.mark.parametrize("is_there", [False, True][: pick(short=1, long=2)], ids=str)
def test_two_five_one(tmp_path: Path, is_there: bool) -> None:
    environment = {
        "TOPICS_COLD_DIR": str(tmp_path / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "0",
        "TOPICS_SEGMENT_MAX_EVENTS": "10",
        "TOPICS_VERIFY": "1",
    }
    server = Server(tmp_path, environment=environment, shards=2).start()
    try:
        for topic in TOPICS:
            ok(server.put(f"/v0/topics/{topic}", {"durability": "fsync"}), 201)
            ok(server.write(topic, *range(COUNT)), 200)
        restart(server, 2)
        until(lambda: metric(server, "topics_relocations_total") == 4 * len(TOPICS))
        restart(server, 2)
        assert all(read(server, topic) == list(range(COUNT)) for topic in TOPICS)
        before = cold_files(server)
        live = metric(server, 'topics_segment_bytes_live{tier="cold"}')
        assert live
        for shards in (5, 1):
            assert server.stop() == 0
            if not is_there:
                (tmp_path / "cold").rename(tmp_path / "away")
            server.shards = shards
            server.start()
            if not is_there:
                assert server.diff(TOPICS[0]).status == 503
                (tmp_path / "cold").rmdir()
                (tmp_path / "away").rename(tmp_path / "cold")
            assert all(read(server, topic) == list(range(COUNT)) for topic in TOPICS)
            assert metric(server, 'topics_segment_bytes_live{tier="cold"}') == live
            assert cold_files(server) == before
        assert server.stop() == 0
        assert verify(server)["sound"]
    finally:
        server.close()
