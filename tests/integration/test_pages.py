"""The examples of all pages work: their blocks are run from top to bottom on a real server, and print what the page shows."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pages import Block, PageRunner, blocks, check, not_run, pages, write_shown
from tests.support.server import ROOT, Server, running, until

ELSEWHERE = {"docs/spark.md": "tests/spark/test_spark_page.py"}  # pages that need more than a server
RUN = [page for page in pages() if any(block.runs for block in blocks(page))]


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all pages of this process; each finds it empty."""
    folder = tmp_path_factory.mktemp("pages")
    environment = {
        "TOPICS_COLD_DIR": str(folder / "cold"),
        "TOPICS_SEGMENT_MAX_EVENTS": "100",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    with running(folder, environment=environment, shards=1) as server:
        yield server


def empty(server: Server) -> None:
    for router in server.get("/v0/routers?page_size=1000").json["routers"]:
        assert server.delete(f"/v0/routers/{router['router']}").status == 200
    for topic in server.get("/v0/topics?page_size=1000").json["topics"]:
        assert server.delete(f"/v0/topics/{topic['topic']}").status == 200


def with_segments(server: Server) -> None:
    """A topic with segments in both tiers, as on a server that has run for a while."""
    for _ in range(4):
        assert server.write("readings", *range(100)).status in {200, 201}
    assert server.stop() == 0
    server.start()
    until(lambda: list((server.folder / "cold" / "topics").glob("*/MANIFEST-*")))


PREPARED: dict[str, Callable[[Server], None]] = {
    "docs/storage.md": with_segments,
    "docs/verify.md": with_segments,
}
STOPPED = {"docs/verify.md"}  # pages about a stopped server


@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages need curl")
@pytest.mark.parametrize("page", [page for page in RUN if page not in ELSEWHERE])
def test_a_page_prints_what_it_shows(page: str, page_server: Server, tmp_path: Path) -> None:
    empty(page_server)
    if page in PREPARED:
        PREPARED[page](page_server)
    if page in STOPPED:
        assert page_server.stop() == 0
    try:
        run_page(page, page_server, tmp_path)
    finally:
        if page in STOPPED:
            page_server.start()


def run_page(page: str, server: Server, folder: Path, *, rewrite: bool = False) -> None:
    (folder / "topics-data").symlink_to(server.data_dir)
    places = {
        "127.0.0.1:4000": f"{server.host}:{server.port}",
        "/mnt/cold": str(server.folder / "cold"),
        "deploy/examples/": f"{ROOT}/deploy/examples/",
    }
    given = {"TOPICS_URL": f"http://{server.host}:{server.port}", "TOPICS_COLD_DIR": places["/mnt/cold"]}
    runner = PageRunner(folder, places, given)
    try:
        # Backwards, so that earlier line numbers stay valid.
        printed = [(block, runner.printed(block)) for block in blocks(page) if rewrite and block.runs]
        for block, text in reversed(printed):
            if block.shown is not None:
                write_shown(block, runner.as_shown(text))
        for block in blocks(page):
            if block.runs and not rewrite:
                runner.run(block)
    finally:
        runner.close()


def test_each_block_is_run_or_says_why_not() -> None:
    for page in pages():
        for block in blocks(page):
            check(block)
    for reason, those in not_run().items():
        assert len(reason) > 10, those
        for path in re.findall(r"\b(?:tests|scripts)/[\w./]*\w", reason):
            assert (ROOT / path).exists(), (reason, path)


@pytest.mark.browser
@pytest.mark.parametrize(
    "page", [page for page in pages() if any(block.language == "js" for block in blocks(page))]
)
def test_the_script_for_a_web_page_follows(page: str, page_server: Server, tmp_path: Path) -> None:
    browsers = pytest.importorskip("tests.support.browser")
    program = browsers.program()
    if program is None:
        pytest.skip("no browser is installed")
    [script] = [block.text for block in blocks(page) if block.language == "js"]
    empty(page_server)
    page_server.write("orders.eu", {"item": "tea"})
    origin = f"http://{page_server.host}:{page_server.port}"
    with browsers.running(program, tmp_path) as browser, browser.page(f"{origin}/") as tab:
        assert tab.run("document.querySelector('.origin').textContent") == origin, (
            "the page at / shows the server's address"
        )
        tab.run("window.seen = []; console.log = (...words) => { seen.push(words); }; 0")
        tab.run(script)
        tab.wait("seen.length == 1")
        page_server.write("orders.us", {"item": "jam"})
        tab.wait("seen.length == 2")
        assert tab.run("seen") == [["orders.eu", 1, {"item": "tea"}], ["orders.us", 1, {"item": "jam"}]]


def test_pages_that_are_run_elsewhere_are() -> None:
    for page, test in ELSEWHERE.items():
        assert page in RUN
        assert page in (ROOT / test).read_text()


@pytest.mark.parametrize(
    ("language", "text", "shown"),
    [
        ("bash", "true\nfalse\n", None),
        ("bash", "curl -s http://127.0.0.1:4000/v0/topics/none\n", None),
        ("bash", "echo one\n", "two\n"),
        ("bash", "echo one\necho two\n", "one\n"),
        ("bash", "exit 0\n", None),
        ("bash", "echo $nobody_has_set_this\n", None),
        ("console", "$ echo one\ntwo\n", None),
        ("python", "raise ValueError\n", None),
        ("python", "print(1)\n", "2\n"),
    ],
)
def test_a_block_that_does_not_work_is_found(
    language: str, text: str, shown: str | None, page_server: Server, tmp_path: Path
) -> None:
    runner = PageRunner(tmp_path, {"127.0.0.1:4000": f"{page_server.host}:{page_server.port}"})
    try:
        with pytest.raises((AssertionError, ValueError)):
            runner.run(Block("page.md", 1, language, text, shown=shown))
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("language", "text"),
    [("json", "{"), ("toml", "="), ("python", "def"), ("perl", "1"), ("", "$ ls\n"), ("text", "curl -s x\n")],
)
def test_a_block_that_cannot_be_right_is_found(language: str, text: str) -> None:
    with pytest.raises(AssertionError):
        check(Block("page.md", 1, language, text))


if (
    __name__ == "__main__"
):  # python -m tests.integration.test_pages PAGE ...: updates these pages with their current output
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder, running(Path(folder), shards=1) as own:
            (Path(folder) / "page").mkdir()
            run_page(name, own, Path(folder) / "page", rewrite=True)
