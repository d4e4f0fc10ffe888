"""Patterns of topic names: tokens between dots, `*` for one, a final `>` for one or more."""

from __future__ import annotations


def is_pattern(name: str) -> bool:
    tokens = name.split(".")
    return "*" in tokens or tokens[-1] == ">"


def matches(pattern: str, name: str) -> bool:
    wanted, tokens = pattern.split("."), name.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(a in ("*", b) for a, b in zip(wanted, tokens))


def prefix_of(pattern: str) -> str:
    """What every name that matches begins with."""
    plain: list[str] = []
    for token in pattern.split("."):
        if token in ("*", ">"):
            return ".".join([*plain, ""]) if plain else ""
        plain.append(token)
    return pattern
