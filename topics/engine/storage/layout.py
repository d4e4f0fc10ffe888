"""Which files of a data directory count: `layout.json` says which layout is the present one, and how many shards it has.

    layout.json        {"format":1,"generation":1,"shards":4}
    layout-1/shard-00  log, snapshots and watch sessions of one shard

A change of the number of shards makes a layout of the next generation beside the present one. Replacing `layout.json` is
the moment at which it counts. Any other layout is then stale: half made, or no longer needed. Versions that know only
generation 1 must not take a directory without it for an empty one, so later generations have a format of their own.
"""

from __future__ import annotations

import re

import msgspec

from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.core.ports import Disk
from topics.engine.core.topic_ids import ID_STEP
from topics.engine.storage.files import TEMP_SUFFIX, publish, write_whole

LAYOUT_NAME = "layout.json"
LAYOUT_FORMATS = (1, 2)
LAYOUT_BYTES_MAX = 4096
COLD_ID_NAME = "cold-id"  # in the data directory and in its cold one, with the same text

GENERATION_MAX = (1 << 63) - 1
_DIR = re.compile(r"layout-([1-9][0-9]*)")


class Layout(msgspec.Struct, frozen=True):
    format: int
    generation: int
    shards: int

    @classmethod
    def of(cls, generation: int, shards: int) -> Layout:
        return cls(1 if generation == 1 else 2, generation, shards)

    @property
    def directory(self) -> str:
        return layout_dir(self.generation)

    def shard_dir(self, shard: int) -> str:
        return shard_dir(self.generation, shard)


def layout_dir(generation: int) -> str:
    return f"layout-{generation}"


def shard_dir(generation: int, shard: int) -> str:
    return f"{layout_dir(generation)}/shard-{shard:02d}"


def generation_of(name: str) -> int | None:
    """Of a layout's directory; None: it is none."""
    match = _DIR.fullmatch(name)
    return int(match[1]) if match else None


def stale_layouts(names: list[str], generation: int) -> list[str]:
    """Directories of layouts other than the present one."""
    return [name for name in names if generation_of(name) not in (None, generation)]


def encode_layout(layout: Layout) -> bytes:
    return msgspec.json.encode(layout) + b"\n"


def decode_layout(path: str, data: bytes) -> Layout:
    try:
        layout = msgspec.json.decode(data, type=Layout)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(path, 0, f"cannot be read: {error}") from error
    if layout.format not in LAYOUT_FORMATS:
        raise UnsupportedFormat(path, layout.format)
    if not 1 <= layout.shards <= ID_STEP or not 1 <= layout.generation <= GENERATION_MAX:
        raise Corrupt(path, 0, f"says {layout.shards} shards, generation {layout.generation}")
    return layout


def prepare_layout(disk: Disk, layout: Layout) -> None:
    """Have it written and synced aside; nothing counts yet."""
    write_whole(disk, LAYOUT_NAME + TEMP_SUFFIX, encode_layout(layout))


def publish_layout(disk: Disk) -> None:
    """What was prepared counts from here on. When this fails nobody knows whether it does: the next start goes by what it reads."""
    publish(disk, LAYOUT_NAME + TEMP_SUFFIX, LAYOUT_NAME)
