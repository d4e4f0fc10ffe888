"""The pages are correct: links have a target, and names and figures are those of the code. (Code blocks:
tests/integration/test_pages.py.)
"""

from __future__ import annotations

import re
from pathlib import Path

from router.watch.fanout import READS_PER_WATCHER
from tests.support.pages import pages
from tests.support.server import ROOT
from topics.engine.storage import frames
from topics.engine.storage.control import KINDS

API = ROOT / "topics" / "api"


def plain(markdown: str) -> str:
    """The text without code, which has neither links nor headings."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), text)


def anchors(page: Path) -> set[str]:
    """The anchors of headings: lower case, no punctuation, dashes for blanks; the second one of a name ends with -1."""
    found: dict[str, int] = {}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = found[name] = found.get(name, -1) + 1
        if count:
            found[f"{name}-{count}"] = 0
    return set(found)


def test_links_lead_somewhere() -> None:
    broken: list[str] = []
    for name in pages():
        page = ROOT / name
        for target in re.findall(r"\]\(([^)\s]+)\)", plain(page.read_text())):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            linked = page if not path else page.parent / path
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                broken.append(f"{name}: {target}")
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    to_read = [ROOT / "README.md"]
    while to_read:
        page = to_read.pop().resolve()
        if page.suffix == ".md" and page.exists() and page not in reached:
            reached.add(page)
            targets = re.findall(r"\]\(([^)#\s]+)", plain(page.read_text()))
            to_read += [page.parent / target for target in targets if "://" not in target]
    assert [name for name in pages() if (ROOT / name).resolve() not in reached] == []


def test_the_limits_page_names_every_bound() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    names = re.findall(r"^([A-Z_]+)(?:: \w+)? = ", (API / "limits.py").read_text(), flags=re.MULTILINE)
    config = (API / "config.py").read_text().split("class EngineConfig", 1)[1]
    names += re.findall(r"^    (\w+): ", config, flags=re.MULTILINE)
    assert [name for name in names if name not in {"KIB", "MIB"} and f"`{name}`" not in page] == []


def test_the_comparison_has_the_figures_of_the_benchmarks() -> None:
    measured = (ROOT / "docs" / "comparison.md").read_text().split("\n## Measured\n", 1)[1]
    figures = re.findall(r"[\d.]+ ×|[\d.]+ ms", measured.split("\n\n", 2)[1])
    known = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(figures) > 20
    assert [figure for figure in figures if figure.removesuffix(" ms") not in known] == []


def test_pages_count_the_points_behind_alike() -> None:
    known = (ROOT / "docs" / "benchmarks.md").read_text()
    said = re.search(r"\d+ of \d+ comparisons", (ROOT / "docs" / "comparison.md").read_text())
    assert said is not None
    assert f"In {said[0]}:" in known


def test_the_readme_has_the_figures_of_the_benchmarks() -> None:
    """Ratios to Redis Streams as ranges: reads by one client; batches, and reads of both sizes, with 16 clients or
    more.
    """
    row = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| How fast")
    )
    page = (ROOT / "docs" / "benchmarks.md").read_text()

    def between(title: str, size: str, clients: str = "16|64|256") -> str:
        part = page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
        rows = re.findall(
            rf"^\| {size} \| (?:{clients}) \|.*\| ([\d.]+) × \| [\d.]+ × \|$", part, flags=re.MULTILINE
        )
        return f"{min(rows, key=float)} to {max(rows, key=float)} ×"

    assert f"reads by one client ({between('Reads of 1000', '.*', '1')})" in row
    assert f"with 16 or more clients about equal for batches ({between('Batches of 100', '.*')})" in row
    small, large = (between("Reads of 1000", size) for size in ("100 B", "1 KiB"))
    assert f"({small} at 100 B, but {large} at 1 KiB)" in row


def test_the_format_page_names_every_frame_type_and_extension() -> None:
    page = (ROOT / "docs" / "decisions" / "0001-frame-and-file-formats.md").read_text()
    extensions, types = (
        page.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
        for head in ("id | value", "type | name | payload")
    )
    named = {
        int(number): name.lower()
        for number, name in re.findall(r"^\| (\d+) \| ([^|]+?) \| (?!reserved)", types, flags=re.MULTILINE)
    }
    assert named.keys() == KINDS.keys()
    assert [
        name for number, name in named.items() if not name.startswith(KINDS[number].name.replace("-", " "))
    ] == []
    known = {value for name, value in vars(frames).items() if name.startswith("EXT_")}
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", extensions, flags=re.MULTILINE)} == known


def test_the_limits_page_knows_how_many_reads_a_watcher_has() -> None:
    assert f"(`READS_PER_WATCHER`) | {READS_PER_WATCHER} |" in (ROOT / "docs" / "limits.md").read_text()
