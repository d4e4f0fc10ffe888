"""How a function of the core appears as a method of both clients: with its own name, words and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def present(method: Any, build: Callable[..., Any], returns: str) -> None:
    signature = inspect.signature(build)
    core, *parameters = signature.parameters.values()
    method.__name__, method.__doc__, method.__module__ = build.__name__, build.__doc__, build.__module__
    method.__qualname__ = build.__qualname__
    # What a user sees has the client in the place of the core, and what comes out instead of how it is got.
    kind = str(signature.return_annotation)
    inner = kind[kind.index("[") + 1 : -1]
    method.__signature__ = signature.replace(
        parameters=[core.replace(name="self", annotation=inspect.Parameter.empty), *parameters],
        return_annotation=returns.format(inner),
    )
