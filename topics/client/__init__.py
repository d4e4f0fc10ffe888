"""The Python client: `Client` for threads, `AsyncClient` for asyncio, with the same calls.

All logic is in generators without I/O (`flows`, `calls`, `streams`, `watch_streams` …), which `blocking` and
`asynchronous` drive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from topics.client import answers as answers
from topics.client import errors as errors
from topics.client.answers import Job as Job
from topics.client.answers import Record as Record
from topics.client.answers import Tombstone as Tombstone
from topics.client.blocking import Client as Client
from topics.client.blocking import Items as Items
from topics.client.errors import ApiError as ApiError
from topics.client.errors import ClientError as ClientError
from topics.client.errors import Disconnected as Disconnected
from topics.client.errors import RecordsLost as RecordsLost
from topics.client.flows import Retries as Retries
from topics.client.queue_calls import leased as leased
from topics.client.record_encoding import NewRecord as NewRecord
from topics.client.settings import Timeouts as Timeouts

if TYPE_CHECKING:
    from topics.client.asynchronous import AsyncClient as AsyncClient
    from topics.client.asynchronous import AsyncItems as AsyncItems
    from topics.client.producer import AsyncProducer as AsyncProducer
    from topics.client.producer import AsyncReceipt as AsyncReceipt
    from topics.client.producer import Producer as Producer
    from topics.client.producer import Receipt as Receipt
    from topics.client.worker import AsyncWorker as AsyncWorker
    from topics.client.worker import Worker as Worker
    from topics.client.worker_core import GiveUp as GiveUp
    from topics.client.worker_core import RetryLater as RetryLater

# Imported on first use: a command that makes one call should not wait for aiohttp.
_LAZY = {
    "AsyncClient": "topics.client.asynchronous",
    "AsyncItems": "topics.client.asynchronous",
    "AsyncProducer": "topics.client.producer",
    "AsyncReceipt": "topics.client.producer",
    "Producer": "topics.client.producer",
    "Receipt": "topics.client.producer",
    "AsyncWorker": "topics.client.worker",
    "Worker": "topics.client.worker",
    "GiveUp": "topics.client.worker_core",
    "RetryLater": "topics.client.worker_core",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'topics.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
