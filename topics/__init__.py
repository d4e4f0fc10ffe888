"""A durable event log, job queue and pub/sub server, and its client: `from topics import Client, AsyncClient`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topics.client import AsyncClient as AsyncClient
    from topics.client import Client as Client

# The version in the package metadata is read from this line.
__version__ = "0.1.0.dev0"

_LAZY = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    # The server's processes import this package too, and do not need the client.
    if name in _LAZY:
        import topics.client

        return getattr(topics.client, name)
    raise AttributeError(f"module 'topics' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
