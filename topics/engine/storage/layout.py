"""The layout of a data directory: `layout.json` names the current layout and its number of shards.

    layout.json        {"format":1,"generation":1,"shards":4}
    layout-1/shard-00  log, snapshots and watch sessions of one shard

Resharding builds a layout of the next generation next to the current one, and commits it by replacing `layout.json`. All other
layouts are then stale: incomplete or no longer needed. Later generations have a different format number, so that versions that
only know generation 1 do not take a directory without layout-1 for an empty one.
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
COLD_ID_NAME = "cold-id"  # same content in the data directory and in its cold directory

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
    """The generation of a layout directory; None for other names."""
    match = _DIR.fullmatch(name)
    return int(match[1]) if match else None


def stale_layouts(names: list[str], generation: int) -> list[str]:
    """Directories of layouts other than the current one."""
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
        raise Corrupt(path, 0, f"{layout.shards} shards, generation {layout.generation}: out of range")
    return layout


def prepare_layout(disk: Disk, layout: Layout) -> None:
    """Write and sync the new layout.json under a temporary name."""
    write_whole(disk, LAYOUT_NAME + TEMP_SUFFIX, encode_layout(layout))


def publish_layout(disk: Disk) -> None:
    """Commit the prepared layout. If this fails, the outcome is unknown: the next start uses whichever layout it reads."""
    publish(disk, LAYOUT_NAME + TEMP_SUFFIX, LAYOUT_NAME)
