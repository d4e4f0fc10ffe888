"""Selection of topics by name and pattern: `*` matches one token, a final `>` one or more."""

from __future__ import annotations

import re
from collections.abc import Sequence

from topics.engine.core.subjects import parse_pattern

ALL_TOPICS = ">"

_WILDCARD = re.compile(r"[*>?\[\]]")


def split_names(wanted: str) -> list[str]:
    """Split a comma-separated list of names and patterns; ValueError if one is invalid."""
    parts = [part for part in map(str.strip, wanted.split(",")) if part]
    if not parts:
        raise ValueError(f"the name of a topic is empty; {ALL_TOPICS!r} matches every topic")
    for part in parts:
        if any(_WILDCARD.search(token) and token not in ("*", ">") for token in part.split(".")):
            raise ValueError(
                f"{part!r} is neither a name nor a pattern: a wildcard must be a whole token. Write 'orders.*' for one more token, "
                f"'orders.>' for one or more, {ALL_TOPICS!r} for every topic, or comma-separated names"
            )
        if is_pattern(part):
            parse_pattern(part.encode())
    return parts


def is_pattern(name: str) -> bool:
    return "*" in name or ">" in name


def pick_names(names: Sequence[str], parts: Sequence[str]) -> list[str] | str:
    """The names that match, each once; or the first part that matches none.

    Raises ValueError for a pattern that matches nothing only because `*` matches a single token.
    """
    picked: dict[str, None] = {}
    for part in parts:
        matching = _matching(names, part)
        if not matching:
            wider = f"{part.removesuffix('*')}>"
            if part.endswith("*") and (matched := _matching(names, wider)):
                raise ValueError(
                    f"{part!r} matches no topic, because * matches exactly one token: write {wider!r} for {', '.join(matched[:3])}"
                )
            return part
        picked |= dict.fromkeys(matching)
    return list(picked)


def _matching(names: Sequence[str], part: str) -> list[str]:
    if part == ALL_TOPICS:
        return list(names)  # including names with an empty token, which patterns do not match
    if not is_pattern(part):
        return [part] if part in names else []
    pattern = parse_pattern(part.encode())
    return [name for name in names if pattern.matches(name.encode())]
