"""Puts the packages that a wheel declares into an environment, from the tests' own environment: no package index is needed."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from email.parser import HeaderParser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        parsed = HeaderParser().parsestr(archive.read(name).decode())
    return {key: parsed.get_all(key, []) for key in parsed}


def closure(wheel: Path, extras: Collection[str] = ()) -> list[Distribution]:
    """The packages that the wheel needs with these extras, and all that they need."""
    waiting = [(text, {"", *extras}) for text in metadata(wheel)["Requires-Dist"]]
    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    while waiting:
        text, wanted = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": one}) for one in wanted):
            continue
        name = requirement.name.lower()
        for extra in {"", *requirement.extras}:
            if (name, extra) not in done:
                done.add((name, extra))
                found.setdefault(name, distribution(name))
                waiting += [(one, {extra}) for one in found[name].requires or []]
    return list(found.values())


def link(package: Distribution, site: Path) -> None:
    assert package.files is not None
    for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
        target = site / top
        if not target.exists():
            target.symlink_to(Path(str(package.locate_file(top))))
