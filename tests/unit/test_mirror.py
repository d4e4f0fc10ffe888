"""tests/unit mirrors the packages: tests/unit/engine/storage/test_wal.py tests topics/engine/storage/wal.py.

A module with several files of tests has them as test_<module>_<aspect>.py; a package counts as a module.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Folders of tests/unit whose package is not in topics/.
PACKAGES = {
    "router": "router",
    "workers": "workers",
    "spark": "spark_pipeline",
    "support": "tests/support",
    "scripts": "scripts",
}
PAGES = "docs"  # tests of pages, not of modules


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_each_file_of_tests_has_the_name_of_a_module() -> None:
    strays = []
    for test in HERE.rglob("test_*.py"):
        top, *folders = test.relative_to(HERE).parent.parts or (PAGES,)
        if top == PAGES:
            continue
        package = ROOT.joinpath(PACKAGES.get(top, f"topics/{top}"), *folders)
        words = test.stem.removeprefix("test_").split("_")
        if not any(is_module(package / "_".join(words[:count])) for count in range(len(words), 0, -1)):
            strays.append(str(test.relative_to(ROOT)))
    assert not strays, f"{strays}: no module of that name; test_<module>[_<aspect>].py moves with its module"
