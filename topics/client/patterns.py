"""Patterns of topic names: dot-separated tokens, where `*` matches one token and a final `>` one or more."""

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
    """The common prefix of all matching names."""
    plain: list[str] = []
    for token in pattern.split("."):
        if token in ("*", ">"):
            return ".".join([*plain, ""]) if plain else ""
        plain.append(token)
    return pattern
