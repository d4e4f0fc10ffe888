"""Choosing topics by name and pattern, as everywhere else: a token `*` is one token, a last `>` all that follow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from topics.engine.core.subjects import parse_pattern

ALL_TOPICS = ">"

_WILDCARD = re.compile(r"[*>?\[\]]")


def split_names(wanted: str) -> list[str]:
    """The names and patterns of a list with commas; ValueError when one of them can match no topic."""
    parts = [part for part in map(str.strip, wanted.split(",")) if part]
    if not parts:
        raise ValueError(f"the name of a topic is empty; {ALL_TOPICS!r} is every topic")
    for part in parts:
        if any(_WILDCARD.search(token) and token not in ("*", ">") for token in part.split(".")):
            raise ValueError(
                f"{part!r} is neither a name nor a pattern: a wildcard is a whole token. Write 'orders.*' for one more token, "
                f"'orders.>' for one or more, {ALL_TOPICS!r} for every topic, or the names with commas"
            )
        if is_pattern(part):
            parse_pattern(part.encode())
    return parts


def is_pattern(name: str) -> bool:
    return "*" in name or ">" in name


def pick_names(names: Sequence[str], parts: Sequence[str]) -> list[str] | str:
    """The names that are asked for, each once; or the first part that asks for none of them.

    ValueError for a pattern that matches nothing only because `*` is a single token.
    """
    picked: dict[str, None] = {}
    for part in parts:
        matching = _matching(names, part)
        if not matching:
            wider = f"{part.removesuffix('*')}>"
            if part.endswith("*") and (meant := _matching(names, wider)):
                raise ValueError(
                    f"{part!r} matches no topic, because * is exactly one token: write {wider!r} for {', '.join(meant[:3])}"
                )
            return part
        picked |= dict.fromkeys(matching)
    return list(picked)


def _matching(names: Sequence[str], part: str) -> list[str]:
    if part == ALL_TOPICS:
        return list(names)  # also those with an empty token, which no pattern matches
    if not is_pattern(part):
        return [part] if part in names else []
    pattern = parse_pattern(part.encode())
    return [name for name in names if pattern.matches(name.encode())]
