"""Goal: a server under ten times its sustainable load on a slow disk loses no acked record, uses bounded memory, refuses only
with documented errors, and recovers afterwards.

Method: the short form of scripts/overload, without its comparison of latencies.
"""

from __future__ import annotations

from pathlib import Path

from tests.overload import attacks
from tests.overload.attacks import NAMES, attack
from tests.overload.run import overload, start
from tests.support.faults import fault

GROWN_MIB_MAX = 64
PEAK_MIB_MAX = 600  # of any process; one flood of records once took 1650 MiB of the shard


@fault(
    "disk",
    "slow syncs, and ten times the load",
    "memory stays bounded, no acked record is lost, the server recovers by itself",
)
def test_ten_times_the_sustainable_load(tmp_path: Path) -> None:
    server = start(tmp_path)
    try:
        report = overload(server, seconds=4.0, connections=200, calm_s=1.0, slack_ms=1000.0)
    finally:
        server.close()
    assert report.sustained > 0
    assert report.offered > 5 * report.sustained
    assert report.lost == 0
    assert report.unseen == 0
    assert set(report.statuses) <= {200, 201, 429}
    assert report.records >= sum(report.statuses.get(status, 0) for status in (200, 201))
    assert all(grown <= GROWN_MIB_MAX for grown in report.grown_mib.values()), report.grown_mib
    assert report.recovered_s < 60


@fault(
    "request",
    "small requests with high costs: compressed floods of records and values, gzip bombs, WebSocket handshakes, patterns over many tags, watches of long patterns",
    "a bystander is served all the time, and memory stays bounded",
)
def test_a_bystander_of_attacks(tmp_path: Path) -> None:
    server = attacks.start(tmp_path)
    try:
        reports = {name: attack(server, name, 1.0, tags=20_000) for name in NAMES if name != "none"}
    finally:
        server.close()
    for name, report in reports.items():
        assert report.writes > 0 and report.answers, name
        assert all(mib <= PEAK_MIB_MAX for mib in report.peak_mib.values()), (name, report.peak_mib)
    for name, status in (("records", "400"), ("stage", "400"), ("hidden", "413"), ("giant", "400")):
        assert set(reports[name].answers) <= {status, "429"}, reports[name]
    assert set(reports["bombs"].answers) <= {"413", "429"}
    assert set(reports["tags"].answers) == {"200"}
    assert set(reports["watches"].answers) <= {"200", "429", "stream 200"}
