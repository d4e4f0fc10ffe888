"""The pages are true: the engine's tour runs and prints what it shows, and the README lists the modules in import order."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "topics" / "engine"
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def without_times(text: str) -> str:
    return re.sub(r'"\$ts":\d{13}\b', '"$ts":…', text)


def test_the_tour_of_the_engine_prints_what_it_shows() -> None:
    tour = (ROOT / "docs" / "engine.md").read_text()
    scripts, shown = blocks(tour, "bash"), blocks(tour, "text")
    assert scripts
    assert len(scripts) == len(shown)
    for script, expected in zip(scripts, shown, strict=True):
        assert ".venv/bin/python" in script
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script.replace(".venv/bin/python", sys.executable)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert without_times(run.stdout) == without_times(expected)


def engine_imports(module: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((ENGINE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "topics.engine":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("topics.engine."):
            found.add(str(node.module).removeprefix("topics.engine."))
    return found


def test_the_table_lists_every_module_below_what_it_imports() -> None:
    table = section("Reading the source").split("| `topics/engine/` |", 1)[1].split("\n\n", 1)[0]
    listed = re.findall(r"^\| `(\w+)\.py` \|", table, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in ENGINE.glob("*.py") if path.stem != "__init__")
    above: set[str] = set()
    for module in listed:
        assert engine_imports(module) <= above, module
        above.add(module)


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)


def test_the_limits_page_names_every_bound() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    names = re.findall(r"^([A-Z_]+)(?:: \w+)? = ", (ENGINE / "limits.py").read_text(), flags=re.MULTILINE)
    config = (ENGINE / "config.py").read_text().split("class EngineConfig", 1)[1]
    names += re.findall(r"^    (\w+): ", config, flags=re.MULTILINE)
    assert [name for name in names if name not in {"KIB", "MIB"} and f"`{name}`" not in page] == []
