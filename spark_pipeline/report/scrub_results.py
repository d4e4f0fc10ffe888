"""What scrubs have found, by topic: `scrub.json`, which scrubs write and reports read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from spark_pipeline.schedule.state import BYTES_MAX, write_whole
from topics.system.read_only_disk import read_small

NAME = "scrub.json"
TOPICS_MAX = 10_000  # those that were looked at last
RANGES_MAX = 100  # of a topic, one by one; all of them are counted


class Range(msgspec.Struct, frozen=True):
    segment: str
    first_seq: int
    last_seq: int  # 0: not known which
    path: str
    offset: int
    what: str


class TopicScrub(msgspec.Struct):
    at_ms: int
    segments: int = 0
    records: int = 0
    bytes: int = 0
    damaged: int = 0  # ranges
    ranges: list[Range] = []


class Scrubs(msgspec.Struct):
    topics: dict[str, TopicScrub] = {}
    version: int = 1


def read(path: Path) -> Scrubs:
    """ValueError when there is one that cannot be understood."""
    try:
        return msgspec.json.decode(read_small(path, BYTES_MAX), type=Scrubs)
    except FileNotFoundError:
        return Scrubs()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no result of a scrub ({error}); move it away") from error


def add(folder: Path, found: Mapping[str, TopicScrub]) -> None:
    """These topics anew; what is known of others stays. Scrubs that end at once wait for each other."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / f".{NAME}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        scrubs = read(folder / NAME)
        together = sorted((scrubs.topics | dict(found)).items(), key=lambda one: -one[1].at_ms)
        scrubs.topics = dict(together[:TOPICS_MAX])
        write_whole(folder / NAME, msgspec.json.format(msgspec.json.encode(scrubs)))
    finally:
        os.close(handle)
