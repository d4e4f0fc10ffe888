"""Logging to stderr: one line for people on a terminal, one JSON object a line for machines.

    12:30:05.123 info  shard 0: recovered topics=12 took_ms=340
    {"ts":"2024-05-01T12:30:05.123Z","level":"info","process":"shard 0","pid":71,"message":"recovered","fields":{…}}

Fields travel with the record, so the two formats carry the same facts. Secrets that
were given to `configure` are blotted out of messages, fields and tracebacks.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

# A shorter one is part of many a word: blotting it out would show what it is.
SECRET_LENGTH_MIN = 4
BLOT = "[secret]"


def configure(process_name: str, format: str = "auto", secrets: Iterable[str] = ()) -> None:
    """Send all logging of this process to stderr. `format` is auto, human or json."""
    human = format == "human" or (format == "auto" and sys.stderr.isatty())
    handler = _Handler(sys.stderr)
    handler.setFormatter((HumanFormatter if human else JsonFormatter)(process_name, secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def log(logger: logging.Logger, level: int, message: str, /, **fields: Any) -> None:
    logger.log(level, message, extra={"fields": fields})


class _Handler(logging.StreamHandler[TextIO]):
    """Drops lines rather than wait for whoever reads them: a pipe that is full would hold up requests, restarts and even a stop."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not _takes_more(self.stream):
            self._dropped += 1
            return
        if self._dropped:
            super().emit(self._told(record))
            self._dropped = 0
        super().emit(record)

    def _told(self, record: logging.LogRecord) -> logging.LogRecord:
        message = "lines of the log were dropped: nobody read them"
        told = logging.LogRecord(record.name, logging.WARNING, __file__, 0, message, None, None)
        told.fields = {"lines": self._dropped}
        return told


def _takes_more(stream: TextIO) -> bool:
    """Whether a line can be written at once. Of a pipe that is so as long as it has a page to spare."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))  # true also when nobody will ever read it: the write fails
    except (OSError, ValueError, AttributeError):  # no stream of the system's, or closed
        return True


class _Formatter(logging.Formatter):
    def __init__(self, process_name: str, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self.process_name = process_name
        # Longest first: a secret may begin with another one.
        self._secrets = sorted(
            {secret for secret in secrets if len(secret) >= SECRET_LENGTH_MIN}, key=len, reverse=True
        )

    def message(self, record: logging.LogRecord) -> str:
        return self.clean(record.getMessage())

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        return {name: self._clean_value(value) for name, value in getattr(record, "fields", {}).items()}

    def trace(self, record: logging.LogRecord) -> str:
        parts = [self.formatException(record.exc_info)] if record.exc_info else []
        if record.stack_info:
            parts.append(record.stack_info)
        return self.clean("\n".join(parts))

    def clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, BLOT)
        return text

    def _clean_value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, list | tuple):
            return [self._clean_value(item) for item in value]
        if isinstance(value, dict):
            return {self.clean(str(name)): self._clean_value(item) for name, item in value.items()}
        return self.clean(str(value))


class HumanFormatter(_Formatter):
    """Time, level, process, message and fields; only a traceback adds lines."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03} {record.levelname.lower():7} {self.process_name}: {_plain(self.message(record))}"
        for name, value in self.fields(record).items():
            line += f" {name}={_token(value)}"
        trace = self.trace(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(_Formatter):
    """One JSON object; `fields` and `error` are there only when they have something to say."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "ts": f"{clock}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "process": self.process_name,
            "pid": record.process,
            "logger": record.name,
            "message": self.message(record),
        }
        if fields := self.fields(record):
            entry["fields"] = fields
        if trace := self.trace(record):
            entry["error"] = trace
        # Plain ASCII, so that text from clients cannot break the line or the terminal of who reads it.
        return json.dumps(entry, separators=(",", ":"))


def _plain(text: str) -> str:
    """The text, or its quoted form where a control character could fake a line or steer a terminal."""
    return text if text.isprintable() else json.dumps(text)


def _token(value: Any) -> str:
    if isinstance(value, str):
        return (
            value if value and value.isprintable() and not set(value) & {" ", '"', "="} else json.dumps(value)
        )
    return json.dumps(value)
