"""The README's tours work when pasted: they are taken from the page, run against a real server, and print what they show."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import ROOT, Server

STREAM_CUT = 28  # curl's own code


def section(title: str) -> str:
    return (ROOT / "README.md").read_text().split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def block(language: str, title: str = "Tour") -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", section(title), flags=re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return found[0]


def without_times(text: str) -> str:
    text = re.sub(r'"performance":\{[^}]*\}', '"performance":…', text)
    text = re.sub(r'"effective_priority":\d+', '"effective_priority":…', text)
    text = re.sub(r'"lease_id":"lease_[0-9a-f]+"', '"lease_id":…', text)
    return re.sub(r'"(\$ts|deadline)":\d{13}\b', r'"\1":…', text)


def run_tour(address: str, title: str = "Tour") -> str:
    script = block("bash", title).replace("127.0.0.1:4000", address)
    script = script.replace(".venv/bin/topics", f"{sys.executable} -m topics.cli")
    # `--max-time` ends a stream, and curl calls that a failure.
    strict = "-euo" if title == "Tour" else "-uo"
    done = subprocess.run(
        ["bash", strict, "pipefail", "-c", script],
        cwd=ROOT,
        env={**os.environ, "TOPICS_URL": f"http://{address}"},  # what the tail finds by itself elsewhere
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, STREAM_CUT), done.stderr
    assert done.stderr == ""
    return done.stdout


def without_order(text: str) -> list[str]:
    """Lines of the tail and frames of the stream. No order holds between topics, and so an id may be another one."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\S+Z", "TIME", without_times(text))
    text = re.sub(r"^id: \S+$", "id: …", text, flags=re.MULTILINE)
    tail, stream = text.split("retry: 2000\n\n", 1)
    return sorted(tail.splitlines()) + sorted(stream.split("\n\n"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the tour needs curl")
def test_the_tour_prints_what_it_shows(start_server) -> None:  # type: ignore[no-untyped-def]
    server = start_server()
    assert without_times(run_tour(f"{server.host}:{server.port}")) == without_times(block("text"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the tour needs curl")
def test_following_prints_what_it_shows(start_server) -> None:  # type: ignore[no-untyped-def]
    server = start_server()
    printed = run_tour(f"{server.host}:{server.port}", "Live")
    assert without_order(printed) == without_order(block("text", "Live"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the tour needs curl")
def test_the_jobs_print_what_they_show(start_server) -> None:  # type: ignore[no-untyped-def]
    server = start_server()
    printed = run_tour(f"{server.host}:{server.port}", "Jobs")
    assert without_times(printed) == without_times(block("text", "Jobs"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the tour needs curl")
def test_the_copies_print_what_they_show(start_server) -> None:  # type: ignore[no-untyped-def]
    server = start_server()
    printed = run_tour(f"{server.host}:{server.port}", "Copies")
    assert without_times(printed) == without_times(block("text", "Copies"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page needs curl")
def test_the_page_of_consumers_begins_with_calls_that_work(start_server) -> None:  # type: ignore[no-untyped-def]
    server = start_server()
    run_tour(f"{server.host}:{server.port}")  # whoever comes from the README has its topics
    (script,) = re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "docs" / "consumers.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    script = script.replace("127.0.0.1:4000", f"{server.host}:{server.port}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    made, fetched, acked, state = map(json.loads, done.stdout.splitlines())
    assert made["created"]
    assert [record["data"] for record in fetched["claimed"]] == [{"item": "tea"}]
    assert (acked["acked"], acked["skipped"]) == (1, [])
    assert (state["ack_floor"], state["lag_records"]) == (2, 0)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page needs curl")
def test_the_reference_shows_calls_of_a_queue_that_work(start_server) -> None:  # type: ignore[no-untyped-def]
    server = start_server()
    run_tour(f"{server.host}:{server.port}", "Jobs")
    queues = (ROOT / "docs" / "http.md").read_text().split("\n## Queues\n", 1)[1]
    script = queues.split("```sh\n", 1)[1].split("```", 1)[0]
    script = script.replace("127.0.0.1:4000", f"{server.host}:{server.port}").replace("curl", "curl -w '\\n'")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    made, written, claimed, acked = map(json.loads, done.stdout.splitlines())
    assert made["created"]
    assert [job["$seq"] for job in claimed["claimed"]] == written["seqs"] == [1, 2]
    assert (acked["acked"], acked["skipped"]) == (2, [])


@pytest.mark.browser
def test_the_script_for_a_page_follows(start_server, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    browsers = pytest.importorskip("tests.support.browser")
    program = browsers.program()
    if program is None:
        pytest.skip("there is no browser")
    server = start_server()
    server.write("orders.eu", {"item": "tea"})
    url = f"http://{server.host}:{server.port}/v0/health"
    with browsers.running(program, tmp_path) as browser, browser.page(url) as page:
        page.run("window.seen = []; console.log = (...words) => { seen.push(words); }; 0")
        page.run(block("js", "Live"))
        page.wait("seen.length == 1")
        server.write("orders.us", {"item": "jam"})
        page.wait("seen.length == 2")
        assert page.run("seen") == [["orders.eu", 1, {"item": "tea"}], ["orders.us", 1, {"item": "jam"}]]


def write_page(folder: Path) -> None:
    """Put what the tours print now into the page: `python -m tests.integration.test_readme_tour`."""
    page = ROOT / "README.md"
    for title in ("Tour", "Live", "Copies"):
        (folder / title).mkdir()
        server = Server(folder / title).start()
        try:
            printed = run_tour(f"{server.host}:{server.port}", title)
        finally:
            server.close()
        page.write_text(page.read_text().replace(block("text", title), printed))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_page(Path(folder))
    sys.exit(0)
