"""The registry of frame kinds is complete, and its payload types are those of the frames."""

from __future__ import annotations

import re
from pathlib import Path

from topics.engine.storage import frames
from topics.engine.storage.control import KINDS, Scope, kind_name


def test_every_kind_of_frame_is_registered_once() -> None:
    source = Path(frames.__file__).read_text().split("# Kinds of frames", 1)[1].split("HAS_TAG", 1)[0]
    names = re.findall(r"[A-Z_]{4,}(?=[, ])", source)
    assert sorted(getattr(frames, name) for name in names) == sorted(KINDS)
    assert all(number == kind.number for number, kind in KINDS.items())
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)
    assert [kind.name for kind in KINDS.values() if kind.scope is Scope.FILE] == ["wal-start"]


def test_an_unknown_kind_is_named_by_its_number() -> None:
    assert (kind_name(frames.DELETE), kind_name(99)) == ("delete", "99")
