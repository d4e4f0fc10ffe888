"""A durable event log, job queue and pub/sub server, and its client: `from topics import Client, AsyncClient`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topics.client import AsyncClient as AsyncClient
    from topics.client import Client as Client

# The only place that says it: the package's metadata is made from this line.
__version__ = "0.1.0.dev0"

_OF_THE_CLIENT = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    # The server's processes import this package, too: they do not pay for a client.
    if name in _OF_THE_CLIENT:
        import topics.client

        return getattr(topics.client, name)
    raise AttributeError(f"module 'topics' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_THE_CLIENT])
