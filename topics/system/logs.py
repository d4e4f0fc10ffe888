"""Logging to stderr: human-readable lines on a terminal, JSON lines otherwise.

    12:30:05.123 info  shard 0: recovered topics=12 took_ms=340
    {"ts":"2024-05-01T12:30:05.123Z","level":"info","process":"shard 0","pid":71,"message":"recovered","fields":{…}}

Both formats have the same fields. Secrets passed to `configure` are redacted from messages, fields and tracebacks.
"""

from __future__ import annotations

import json
import logging
import select
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

# Shorter secrets occur in ordinary words: redacting them would reveal them.
SECRET_LENGTH_MIN = 4
REDACTED = "[secret]"


def configure(process_name: str, format: str = "auto", secrets: Iterable[str] = ()) -> None:
    """Send all log records of this process to stderr. `format` is auto, human or json."""
    human = format == "human" or (format == "auto" and sys.stderr.isatty())
    handler = _Handler(sys.stderr)
    handler.setFormatter((HumanFormatter if human else JsonFormatter)(process_name, secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def log(logger: logging.Logger, level: int, message: str, /, **fields: Any) -> None:
    logger.log(level, message, extra={"fields": fields})


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that drops lines instead of blocking: a full pipe would block requests, restarts and even shutdown."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_writable(self.stream):
            self._dropped += 1
            return
        if self._dropped:
            super().emit(self._drop_notice(record))
            self._dropped = 0
        super().emit(record)

    def _drop_notice(self, record: logging.LogRecord) -> logging.LogRecord:
        message = "log lines were dropped because stderr was not read"
        notice = logging.LogRecord(record.name, logging.WARNING, __file__, 0, message, None, None)
        notice.fields = {"lines": self._dropped}
        return notice


def _is_writable(stream: TextIO) -> bool:
    """Whether a line can be written without blocking. A pipe is writable while it has a free page."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))  # also true if the reader has closed it: the write fails
    except (OSError, ValueError, AttributeError):  # no file descriptor, or closed
        return True


class _Formatter(logging.Formatter):
    def __init__(self, process_name: str, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self.process_name = process_name
        # Longest first: a secret may be the prefix of another one.
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
            text = text.replace(secret, REDACTED)
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
    """One line with time, level, process, message and fields, followed by a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03} {record.levelname.lower():7} {self.process_name}: {_plain(self.message(record))}"
        for name, value in self.fields(record).items():
            line += f" {name}={_token(value)}"
        trace = self.trace(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(_Formatter):
    """One JSON object. `fields` and `error` are absent if empty."""

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
        # Plain ASCII, so that text from clients cannot break the line or control a terminal.
        return json.dumps(entry, separators=(",", ":"))


def _plain(text: str) -> str:
    """The text; quoted if it has control characters, which could fake a line or control a terminal."""
    return text if text.isprintable() else json.dumps(text)


def _token(value: Any) -> str:
    if isinstance(value, str):
        return (
            value if value and value.isprintable() and not set(value) & {" ", '"', "="} else json.dumps(value)
        )
    return json.dumps(value)
