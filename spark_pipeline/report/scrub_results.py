"""Results of scrubs by topic, in `scrub.json`, which scrubs write and reports read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from spark_pipeline.schedule.state import BYTES_MAX, replace_file
from topics.system.read_only_disk import read_small

NAME = "scrub.json"
TOPICS_MAX = 10_000  # most recently scrubbed ones
RANGES_MAX = 100  # listed per topic; all are counted


class Range(msgspec.Struct, frozen=True):
    segment: str
    first_seq: int
    last_seq: int  # 0: not known
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
    """Read the file; empty if it does not exist, ValueError if it is invalid."""
    try:
        return msgspec.json.decode(read_small(path, BYTES_MAX), type=Scrubs)
    except FileNotFoundError:
        return Scrubs()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a result of a scrub ({error}); move it away") from error


def add(folder: Path, found: Mapping[str, TopicScrub]) -> None:
    """Replace the results of these topics and keep the others. A lock serializes concurrent scrubs."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / f".{NAME}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        scrubs = read(folder / NAME)
        newest_first = sorted((scrubs.topics | dict(found)).items(), key=lambda one: -one[1].at_ms)
        scrubs.topics = dict(newest_first[:TOPICS_MAX])
        replace_file(folder / NAME, msgspec.json.format(msgspec.json.encode(scrubs)))
    finally:
        os.close(handle)
