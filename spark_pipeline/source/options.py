"""Options of `format("topics")`: parsing and validation."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from spark_pipeline.tasks.columns import COLUMNS
from spark_pipeline.tasks.names import split_names
from spark_pipeline.tasks.reading import SEQ_MAX, Range, Wanted
from spark_pipeline.tasks.segments import VERIFY
from spark_pipeline.tasks.server import TOKEN_ENV
from topics.api.limits import KEY_BYTES_MAX, MIB

OPTIONS = (
    "path", "url", "topic", "columns", "dataAs", "startSeq", "endSeq", "startTs", "endTs", "startingOffsets",
    "includeDeleted", "verify", "onCorrupt", "report", "maxPartitionBytes", "minPartitions", "maxRecordsPerTrigger",
    "maxBytesPerTrigger", "failOnDataLoss", "pushdown", "tokenEnv", "pinTtl", "coldFiles",
    "tagColumn", "dataColumn", "nodeColumn", "metaColumn", "delivery", "txnTtl", "producer", "batch", "checkpointLocation", "queryName",
)  # fmt: skip

_BY_LOWER = {name.lower(): name for name in OPTIONS}
_SIZE = re.compile(r"([0-9]+)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SPAN = re.compile(r"([0-9]+)\s*(ms|s|m|h|d)?")
_SPAN_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class BadOption(ValueError):
    """An option is unknown or invalid; the message says what is valid."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    topic: str
    wanted: Wanted
    path: str = ""
    url: str = ""
    starting_offsets: str = "earliest"
    skip_corrupt: bool = False
    report: str = ""
    partition_bytes_max: int = 64 * MIB
    partitions_min: int = 0
    trigger_records: int = 0
    trigger_bytes: int = 0
    fail_on_loss: bool | None = None  # None: streams fail, batches report
    pushdown: str = "auto"
    token_env: str = TOKEN_ENV
    pin_ms: int = 300_000
    cold_files: str = "auto"


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of a write. Columns without an option are used under their default names if present."""

    url: str
    topic: str
    delivery: str = "staged"
    tag_column: str = ""
    data_column: str = ""
    node_column: str = ""
    meta_column: str = ""
    txn_ttl_ms: int = 3_600_000
    producer: str = ""  # for batch writes: a permanent name
    batch: int | None = None  # for batch writes: number of the batch; None: a new one
    token_env: str = TOKEN_ENV


def parse_sink(given: Mapping[str, str]) -> SinkOptions:
    """Raises BadOption for unknown or invalid options."""
    options = _known(given)
    read = _Reader(options)
    topic = options.get("topic", "").strip()
    if not topic or any(sign in topic for sign in "*?[,"):
        raise BadOption("give the option topic: the name of one topic to write to")
    if not options.get("url"):
        raise BadOption("give the option url: the server to write to, like http://127.0.0.1:4000")
    producer = options.get("producer", "").strip()
    if options.get("batch") and not producer:
        raise BadOption("the option batch needs the option producer")
    if len(producer.encode()) > KEY_BYTES_MAX:
        raise BadOption(f"producer must be at most {KEY_BYTES_MAX} bytes long")
    return SinkOptions(
        url=options["url"],
        topic=topic,
        delivery=read.choice("delivery", ("staged", "direct")),
        tag_column=options.get("tagColumn", ""),
        data_column=options.get("dataColumn", ""),
        node_column=options.get("nodeColumn", ""),
        meta_column=options.get("metaColumn", ""),
        txn_ttl_ms=read.duration("txnTtl", 3_600_000),
        producer=producer,
        batch=read.number("batch", 0) if options.get("batch") else None,
        token_env=options.get("tokenEnv") or TOKEN_ENV,
    )


def parse(given: Mapping[str, str]) -> SourceOptions:
    """Raises BadOption for unknown or invalid options."""
    options = _known(given)
    read = _Reader(options)
    topic = options.get("topic", "").strip()
    if not topic:
        raise BadOption("give the option topic: a name, comma-separated names, or a pattern like 'orders.*'")
    try:
        split_names(topic)
    except ValueError as error:
        raise BadOption(f"topic: {error}") from error
    if not options.get("path") and not options.get("url"):
        raise BadOption(
            "give the option path (the server's cold directory) or url (like http://127.0.0.1:4000), or both"
        )
    if options.get("maxRecordsPerTrigger") and options.get("maxBytesPerTrigger"):
        raise BadOption("give only one of maxRecordsPerTrigger and maxBytesPerTrigger")
    span = Range(
        start_seq=read.number("startSeq", 0),
        end_seq=read.number("endSeq", SEQ_MAX),
        start_ts=read.time("startTs", 0),
        end_ts=read.time("endTs", SEQ_MAX),
    )
    wanted = Wanted(
        columns=read.columns(),
        as_text=read.choice("dataAs", ("binary", "json")) == "json",
        verify=read.choice("verify", ("block", *VERIFY)),  # type: ignore[arg-type]
        include_deleted=read.flag("includeDeleted", False),
        range=span,
    )
    starting = options.get("startingOffsets", "earliest").strip()
    if starting not in {"earliest", "latest"} and not starting.isdigit():
        starting = f"ts:{read.time('startingOffsets', 0)}"
    return SourceOptions(
        topic=topic,
        path=os.path.abspath(options["path"]) if options.get("path") else "",
        url=options.get("url", ""),
        wanted=wanted,
        starting_offsets=starting,
        skip_corrupt=read.choice("onCorrupt", ("fail", "skip")) == "skip",
        report=options.get("report", ""),
        partition_bytes_max=max(read.size("maxPartitionBytes", 64 * MIB), 1),
        partitions_min=read.number("minPartitions", 0),
        trigger_records=read.number("maxRecordsPerTrigger", 0),
        trigger_bytes=read.size("maxBytesPerTrigger", 0),
        fail_on_loss=read.flag("failOnDataLoss", False) if "failOnDataLoss" in options else None,
        pushdown=read.choice("pushdown", ("auto", "off")),
        token_env=options.get("tokenEnv") or TOKEN_ENV,
        pin_ms=read.duration("pinTtl", 300_000),
        cold_files=read.choice("coldFiles", ("auto", "yes", "no")),
    )


def _known(given: Mapping[str, str]) -> dict[str, str]:
    """Restore the case of option names, which Spark may convert to lower case."""
    options: dict[str, str] = {}
    for name, value in given.items():
        known = _BY_LOWER.get(name.lower())
        if known is None:
            near = difflib.get_close_matches(name.lower(), _BY_LOWER, 1)
            advice = f"did you mean {_BY_LOWER[near[0]]}?" if near else f"valid ones are {', '.join(OPTIONS)}"
            raise BadOption(f"the source topics has no option {name}; {advice}")
        options[known] = str(value)
    return options


class _Reader:
    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def columns(self) -> tuple[str, ...]:
        text = self._options.get("columns", "")
        if not text.strip():
            return COLUMNS
        found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        unknown = [name for name in found if name not in COLUMNS]
        if unknown:
            raise BadOption(f"no column {unknown[0]!r}; valid ones are {', '.join(COLUMNS)}")
        return found

    def number(self, name: str, default: int) -> int:
        text = self._options.get(name, "").strip().replace("_", "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit()) or int(text) > SEQ_MAX:
            raise BadOption(f"{name} must be a number, not {text!r}")
        return int(text)

    def size(self, name: str, default: int) -> int:
        text = self._options.get(name, "").strip()
        if not text:
            return default
        match = _SIZE.fullmatch(text)
        if match is None:
            raise BadOption(f"{name} must be a size like 67108864 or 64m, not {text!r}")
        return int(match[1]) * _UNITS[match[2].lower()]

    def duration(self, name: str, default_ms: int) -> int:
        text = self._options.get(name, "").strip()
        if not text:
            return default_ms
        match = _SPAN.fullmatch(text)
        if match is None:
            raise BadOption(f"{name} must be a duration like 600000 (ms), 10m or 1h, not {text!r}")
        return int(match[1]) * _SPAN_MS[match[2] or "ms"]

    def time(self, name: str, default: int) -> int:
        """Milliseconds since the epoch, given as such or as an ISO timestamp."""
        text = self._options.get(name, "").strip()
        if not text:
            return default
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise BadOption(
                f"{name} must be a time like 2026-11-16T14:00:00Z or 1794837672551 (ms), not {text!r}"
            ) from None
        return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)

    def flag(self, name: str, default: bool) -> bool:
        text = self._options.get(name, "").strip().lower()
        if not text:
            return default
        if text not in {"true", "false", "1", "0"}:
            raise BadOption(f"{name} must be true or false, not {text!r}")
        return text in {"true", "1"}

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        """The first one is the default."""
        text = self._options.get(name, "").strip().lower() or known[0]
        if text not in known:
            raise BadOption(f"{name} must be one of {', '.join(dict.fromkeys(known))}, not {text!r}")
        return text
